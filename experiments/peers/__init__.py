"""How fast PyTorch users decode the same shapes: Hugging Face `generate` and kvpress, beside `experiments.speed`."""

from experiments.peers.report import peer_tables as peer_tables
from experiments.peers.settings import PRESSES as PRESSES
