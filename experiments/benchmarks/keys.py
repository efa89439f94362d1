"""Keys of examples: short texts that hold all that decides an example's score, and that no two examples of a cell share.

A key is ``PROMPT-REST``, two digests of 16 hexadecimal digits. The second example with the same digests gets ``#2``.
"""

from __future__ import annotations

import collections
import hashlib
import json
from collections.abc import Iterable, Sequence

from experiments.benchmarks.base import Example


class Keys:
    """The keys of a cell's examples, made in the order of the examples."""

    def __init__(self) -> None:
        self.texts: list[str] = []
        self._before: dict[str, str] = {}  # by group, the key of its last example: a conversation's answers depend on it

    def add(self, example: Example, head: str, tail: str, ids: Sequence[Sequence[int]], new_tokens: int) -> None:
        """Make the next example's key.

        Args:
            head: template and context, before truncation.
            tail: question, the template's end and the answer's opening.
            ids: token ids that a model may read: of the head, of the tail, of both as one text; after truncation.
            new_tokens: most tokens of the answer that are scored.
        """
        prompt = _digest(f"{example.task}\0{head}\0{tail}")
        rest = {
            "ids": [list(part) for part in ids],
            "answers": example.answers,
            "scorer": example.scorer,
            "classes": example.classes,
            "new_tokens": new_tokens,
            "stop": example.stop,
            "labels": dict(example.labels),
            "before": self._before.get(example.group) if example.group else None,
        }
        self.texts.append(f"{prompt}-{_digest(json.dumps(rest, sort_keys=True))}")
        if example.group:
            self._before[example.group] = self.texts[-1]


def _digest(text: str) -> str:
    # A lone surrogate, which JSON can hold, is no text in UTF-8.
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def numbered(keys: Iterable[str]) -> list[str]:
    """Append ``#2`` to the second occurrence of a key, ``#3`` to the third, and so on; the first stays as it is."""
    seen: collections.Counter[str] = collections.Counter()
    texts = []
    for key in keys:
        seen[key] += 1
        texts.append(key if seen[key] == 1 else f"{key}#{seen[key]}")
    return texts


def digest(keys: Sequence[str]) -> str:
    """Compute a digest of the keys of a cell."""
    return _digest("\n".join(keys))
