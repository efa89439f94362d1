"""What a decoder is made of, as Flax Linen modules without state."""
