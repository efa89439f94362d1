"""Shared parts of kernels for TPUs, which Pallas compiles with Mosaic."""

from __future__ import annotations
