"""The workshop: studies, peers, training, makers of pages and goldens. Not in the wheel; nothing outside imports it."""
