"""The workshop: studies, FlashInfer beside us, makers of pages and goldens. Not in the wheel; nothing outside imports it."""
