"""Attention over a cache, whole or selected, and what is known about a prompt's attention."""
