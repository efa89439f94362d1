"""Full: exact attention over every token; the reference for quality, and the denominator of every ratio.

Stored: keys (rotated at their positions) and values of all tokens. Nothing is scored and nothing is dropped.

**Source**: Vaswani et al., "Attention Is All You Need" (arXiv:1706.03762), grouped-query form of arXiv:2305.13245.
**Departures**: none.
"""

from typing import ClassVar

from kvjax.cache import LayerCache
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Prompt
from kvjax.protocol.typing import pytree


@pytree
class Full(AppendOnly):
    """Keep all tokens and attend to all of them; see the module docstring."""

    PAPER: ClassVar[str] = "arXiv:1706.03762"

    slot_block = 1

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache, None
