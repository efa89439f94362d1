"""Weights that stay in 8 or 4 bits in memory: how they are rounded, loaded and taken from GGUF files.

A parameter with codes is a `pallas_kernels.formats.coded_matrix.CodedMatrix` in the place of an array. Its rows are what the
parameter's product sums over: a kernel [K, N] becomes a matrix [N, K], gate and up [K, 2, F] become [2, F, K], and a table
[V, d] stays. Norms and biases stay floating-point numbers.
"""
