"""What PyTorch users have instead: scores of kvpress and times of its steps, beside ours (needs torch)."""
