"""Shared parts of kernels for TPUs, which Pallas compiles with Mosaic."""
