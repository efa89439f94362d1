"""SnapKV: at the prompt's end keep the tokens that its last queries attend to, and the last tokens themselves.

Stored after the prompt: ``budget`` slots, chosen for each KV head separately, and every later token.

The last W = ``obs_window`` tokens of the prompt are the window, and the tokens before them the prefix. Score of prefix token
i for KV head h, where p is the causal softmax over all prompt keys::

    s[h, i] = mean over the group's query heads of pool( sum over the last W queries of p[i] )

The window is always kept, and with it the ``budget - W`` best tokens of the prefix.

**Source**: Li et al., "SnapKV: LLM Knows What You are Looking for Before Generation" (arXiv:2404.14469, section 4);
FasterDecoding/SnapKV e216ddc for window, kernel and pooling defaults.

**Departures**: each KV head keeps one set (mean over the group, as in NVIDIA/kvpress 8bb29b9). The released code repeats the
cache for every query head and keeps a set for each, which multiplies a GQA cache by the group size.
"""

from typing import ClassVar

from kvjax.protocol.families import WindowEviction
from kvjax.protocol.typing import pytree, static


@pytree
class SnapKV(WindowEviction):
    """Keep the tokens that the end of the prompt attends to; see the module docstring."""

    kernel: int = static("pooling window over neighbouring tokens", default=5, least=1, odd=True)  # pyright: ignore[reportGeneralTypeIssues]

    PAPER: ClassVar[str] = "arXiv:2404.14469"
    slot_block = 1
