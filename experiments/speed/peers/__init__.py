"""How fast PyTorch users decode the same shapes: Hugging Face `generate` and kvpress, beside `experiments.speed`."""
