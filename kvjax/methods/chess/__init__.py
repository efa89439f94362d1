"""CHESS: its page tree, its thresholds, the method."""

from kvjax.methods.chess.method import Chess as Chess
