"""Exact decoding: a method drafts tokens, and one pass of the model verifies them."""
