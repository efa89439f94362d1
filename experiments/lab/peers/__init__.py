"""The speed of decoding the same shapes in PyTorch: Hugging Face `generate` and kvpress, to compare with kvjax."""
