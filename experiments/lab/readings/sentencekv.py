"""SentenceKV read otherwise: parts of equal length for sentences, the newest query alone, the code's open sentence."""

from __future__ import annotations

from typing import Any

from jax import Array

from kvjax.methods import SentenceKV
from kvjax.protocol.typing import pytree, static
from pallas_kernels.choose.sentencekv.sentence_cut import Rules


@pytree
class Chunks(SentenceKV):
    """The paper's ablation: parts of ``chunk`` tokens take the place of sentences, and no boundary is read."""

    chunk: int = static(default=32, least=1)

    def _table(self) -> Any:
        return None

    def _ends(self, tokens: Array, position: Array) -> Array:
        return (position + 1) % self.chunk == 0


@pytree
class CurrentQuery(SentenceKV):
    """The newest token's query asks alone, not with the others of the open sentence."""

    def _asked_before(self, aux: Any) -> None:
        return None


@pytree
class CodeMode(SentenceKV):
    """The released code: no slots are for the open sentence, and a step that begins a sentence attends to all tokens."""

    @property
    def _rules(self) -> Rules:
        return Rules(sinks=self.num_sink, recent=self.num_recent, open_cap=0, whole=1)
