"""The parts of the papers' methods, varied one at a time."""
