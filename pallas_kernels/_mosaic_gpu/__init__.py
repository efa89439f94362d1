"""Shared parts of kernels for NVIDIA's GPUs, which Pallas compiles with Mosaic GPU."""
