"""The workshop: studies, FlashInfer beside ours, makers of pages and goldens. Not in the wheel; nothing outside imports it."""
