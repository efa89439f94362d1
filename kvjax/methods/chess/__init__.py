"""CHESS: the method, its page tree, and thresholds from data."""

from kvjax.methods.chess.method import Chess as Chess
