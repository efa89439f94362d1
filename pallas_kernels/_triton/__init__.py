"""Shared parts of Triton kernels: the calls that launch them, and steps that the bodies of several kernels take."""
