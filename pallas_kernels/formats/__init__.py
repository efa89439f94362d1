"""Layouts of stored data that several operations read and write."""

from __future__ import annotations
