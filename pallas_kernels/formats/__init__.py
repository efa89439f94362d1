"""Layouts of stored data that several operations read and write; `shapes` is the base of all timed shapes."""

from __future__ import annotations
