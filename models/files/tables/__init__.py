"""Which tensors of a checkpoint make which parameters, by family."""
