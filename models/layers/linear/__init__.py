"""Layers of linear attention by the gated delta rule, which keep a state of a fixed size instead of keys: Qwen3-Next, 3.5.

``sizes`` is what `models.sizes.config.ModelConfig` declares, ``layer`` the module, and ``delta`` and ``convolution`` are what it
computes. ``files`` translates from and to ``config.json`` and the tensors of a checkpoint.
"""
