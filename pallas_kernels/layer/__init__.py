"""What a layer of a decoder computes beside its attention: sums and norms, and products with weights in 8 or 4 bits."""
