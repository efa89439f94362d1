"""The order in which the prompts of a batch are read; see `kvjax.decoding.prefill`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Literal

from kvjax.decoding.layers import is_offloaded
from kvjax.protocol.method import LayerMethod, Method
from kvjax.protocol.typing import Model, layered

By = Literal["layers", "chunks"]


@dataclasses.dataclass(frozen=True)
class RowBytes:
    """What reading one row takes on the device, in bytes."""

    reading: tuple[int, ...]  # of each layer, while the prompt is read
    kept: tuple[int, ...]  # of each layer, when the prompt has been read
    hidden: int  # of the prompt's hidden states


@dataclasses.dataclass(frozen=True)
class Order:
    """How the prompts of a batch are divided into passes."""

    chunk: int  # tokens of each row in a pass
    chunks: int  # passes of a row with as many tokens as the padded prompt
    rows: int  # rows in a pass, which are a group
    groups: int
    apart: bool  # True: each group has its own storage and is finished before the next group. False: all rows have storage
    by: By = "chunks"  # "chunks": a pass goes through all layers. "layers": a layer reads all chunks, and is then finished

    @property
    def slots(self) -> int:
        """Tokens of a padded prompt, in whole chunks."""
        return self.chunk * self.chunks

    def peak(self, batch: int, row: RowBytes) -> int:
        """Compute the bytes that the states of ``batch`` rows, and hidden states, take at most while prompts are read."""
        if self.by == "layers":
            return self.rows * (max(row.reading) + row.hidden) + batch * sum(row.kept)
        finished = batch * sum(row.kept) if self.apart and self.groups > 1 else 0
        return (self.rows if self.apart else batch) * sum(row.reading) + finished


def prompt_blocks(methods: Sequence[LayerMethod], padded: int, chunk_size: int) -> tuple[int, int]:
    """Return the tokens per chunk and the number of chunks of a prompt of ``padded`` tokens."""
    # A method's own block is part of its definition. The caller may choose only if there is none.
    own = [block for m in methods if (block := m.max_tokens(in_prompt=True)) is not None]
    chunk = min(*own, padded) if own else min(chunk_size, padded)
    return chunk, -(-padded // chunk)


def reading_order(
    each: Sequence[Sequence[LayerMethod]],
    batch: int,
    padded: int,
    chunk_size: int,
    *,
    by: By | None = None,
    row: Callable[[Order], RowBytes] | None = None,
) -> Order:
    """Choose the order for ``batch`` prompts of ``padded`` tokens.

    Args:
        each: for every method, its layers' methods.
        batch: rows.
        padded: tokens.
        chunk_size: the most tokens of a pass.
        by: the order of layers and chunks; None chooses "layers" where prompts have several chunks and it takes less memory.
        row: computes what a row takes; None if the order must be "chunks", see `why_chunks`.
    """
    methods = [m for layers in each for m in layers]
    chunk, chunks = prompt_blocks(methods, padded, chunk_size)
    groups = -(-batch // max(chunk_size // chunk, 1))
    rows = -(-batch // groups)
    groups = -(-batch // rows)
    apart = chunks == 1 or all(m.evicts for m in methods)
    # Host memory is written in slices along the slots. And where a method with a block of its own keeps its prompt, a pass
    # has several rows, but their few tokens would not repay the copies of their storage.
    offloaded = any(is_offloaded(m, at, len(layers)) for layers in each for at, m in enumerate(layers))
    together = Order(chunk=chunk, chunks=chunks, rows=batch, groups=1, apart=True)
    divided = Order(chunk=chunk, chunks=chunks, rows=rows, groups=groups, apart=True)
    whole = groups == 1 or offloaded
    by_layers = dataclasses.replace(together if whole else divided, by="layers")
    if by == "layers":
        return by_layers
    whole = whole or (rows > 1 and not apart)
    by_chunks = together if whole else dataclasses.replace(divided, apart=apart)
    if by == "chunks" or row is None or chunks == 1 or offloaded:
        return by_chunks
    needed = row(by_chunks)
    return min(by_chunks, by_layers, key=lambda order: order.peak(batch, needed))


def why_chunks(methods: Sequence[Method], model: Model, padded: int) -> str | None:
    """Say why prompts of ``padded`` tokens cannot be read layer by layer; None if they can."""
    if layered(model) is None:
        return f"{type(model).__name__} cannot run one layer alone (kvjax.protocol.typing.LayeredModel)"
    again = [type(method).__name__ for method in methods if method.reread_tokens(padded)]
    return f"{again[0]} reads the prompt a second time, for which all layers must have it" if again else None


def check_order(by: str | None, methods: Sequence[Method], model: Model, padded: int) -> None:
    """Refuse an order that is none, or in which prompts of ``padded`` tokens cannot be read.

    Raises:
        ValueError: the message says why.
    """
    if by not in ("layers", "chunks", None):
        raise ValueError(f"order must be 'layers', 'chunks' or None, got {by!r}")
    if by == "layers" and (why := why_chunks(methods, model, padded)):
        raise ValueError(f"order must be 'chunks' or None, got 'layers': {why}")
