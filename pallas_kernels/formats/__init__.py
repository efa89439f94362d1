"""Layouts of stored data that several operations read and write; `shapes` is what timed shapes are declared in."""
