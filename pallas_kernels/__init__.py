"""Attention kernels that depend on JAX alone: one function per operation, several implementations."""

from __future__ import annotations
