"""ParisKV without its rotation: keys are hashed as they are."""

from __future__ import annotations

from kvjax.methods import ParisKV
from kvjax.protocol.typing import pytree


@pytree
class PlainKeys(ParisKV):
    """ParisKV whose codes are of keys that no Hadamard matrix has rotated."""

    def _signs(self, dim: int) -> None:
        return None

    def _scale(self, dim: int) -> float:
        return 1.0
