"""The scores of kvpress's presses on the prompts of a result folder, to compare with kvjax's methods of the same names."""
