"""Layers of linear attention by the gated delta rule, which keep a state of a fixed size instead of keys: Qwen3-Next, 3.5."""
