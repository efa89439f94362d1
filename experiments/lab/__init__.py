"""The workshop: studies and makers of pages. Not in the wheel; nothing outside imports it."""
