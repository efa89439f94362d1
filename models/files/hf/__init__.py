"""Hugging Face's ``config.json`` to and from the sizes of a model."""
