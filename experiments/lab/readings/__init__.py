"""Readings of the papers that the ablations compare and that `kvjax.methods` does not offer, as subclasses of the methods."""

from __future__ import annotations

import dataclasses
from typing import Any


def read_as[Reading](cls: type[Reading], method: Any, **knobs: Any) -> Reading:
    """Make a reading with the fields of ``method``, of whose class ``cls`` is a subclass, some of them changed."""
    return cls(**{field.name: vars(method)[field.name] for field in dataclasses.fields(method)} | knobs)
