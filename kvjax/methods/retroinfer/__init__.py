"""RetroInfer: the method, and its clusters of keys."""

from kvjax.methods.retroinfer.method import RetroInfer as RetroInfer
