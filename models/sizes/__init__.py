"""Sizes and parts of decoders, without layers or files."""
