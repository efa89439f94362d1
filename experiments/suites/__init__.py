"""Evaluation suites: examples from generators and from files that users bring, with each suite's own scorers."""
