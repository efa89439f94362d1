"""Every implementation of every kernel, checked against a reference and timed beside the floor that its bytes set."""
