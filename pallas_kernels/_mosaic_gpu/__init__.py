"""Shared parts of kernels for Hopper's GPUs, which Pallas compiles with Mosaic GPU."""
