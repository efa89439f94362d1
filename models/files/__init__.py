"""Checkpoints on disk: Hugging Face folders, GGUF files, adapters, and tables of which tensor is which parameter."""
