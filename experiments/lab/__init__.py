"""The workshop: studies, peers, makers of pages and goldens. Not in the wheel; nothing outside imports it."""
