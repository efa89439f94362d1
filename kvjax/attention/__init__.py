"""Attention over a whole cache or selected slots, sparse attention over prompts, and statistics of a prompt's queries."""
