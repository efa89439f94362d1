"""The order in which the prompts of a batch are read; see `kvjax.decoding.prefill`."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Literal

import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.decoding.layer_bytes import Stored, layer_bytes
from kvjax.decoding.layers import is_offloaded, layer_specs
from kvjax.protocol.method import LayerMethod, LayerSpec, Method
from kvjax.protocol.typing import Model, layered, not_none

By = Literal["layers", "chunks"]


@dataclasses.dataclass(frozen=True)
class RowBytes:
    """What reading one row takes on the device, in bytes."""

    reading: tuple[int, ...]  # of each layer, while the prompt is read
    kept: tuple[int, ...]  # of each layer, when the prompt has been read
    made: tuple[int, ...]  # the part of these that the end of the prompt makes anew
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
    offloaded: bool = False  # whether a layer goes to host memory, and hidden states that wait for the next layer with it
    waiting: int = 0  # first layers, whose finished states wait in host memory until all layers have read

    @property
    def slots(self) -> int:
        """Tokens of a padded prompt, in whole chunks."""
        return self.chunk * self.chunks

    def peak(self, batch: int, row: RowBytes) -> int:
        """Compute the bytes that the states of ``batch`` rows, and hidden states, take at most while prompts are read."""
        if self.by == "layers":
            hidden = 0 if self.offloaded else row.hidden
            return self.rows * (max(row.reading) + hidden) + batch * sum(row.kept[self.waiting :])
        rows = self.rows if self.apart else batch
        finished = batch * sum(row.kept) if self.apart and self.groups > 1 else 0
        return rows * (sum(row.reading) + sum(row.made)) + finished


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
        by: the order of layers and chunks; None chooses "layers" where prompts have several chunks, and it takes less memory,
            or a layer is offloaded.
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
    together = Order(chunk=chunk, chunks=chunks, rows=batch, groups=1, apart=True, offloaded=offloaded)
    divided = Order(chunk=chunk, chunks=chunks, rows=rows, groups=groups, apart=True)
    whole = groups == 1 or offloaded
    by_layers = dataclasses.replace(together if whole else divided, by="layers")
    if by == "layers":
        return by_layers
    whole = whole or (rows > 1 and not apart)
    by_chunks = together if whole else dataclasses.replace(divided, apart=apart)
    if by == "chunks" or row is None or chunks == 1:
        return by_chunks
    if offloaded:  # each chunk would bring all of the layer back
        return by_layers
    needed = row(by_chunks)
    return min(by_chunks, by_layers, key=lambda order: order.peak(batch, needed))


def chosen_order(
    methods: Sequence[Method],
    each: Sequence[Sequence[LayerMethod]],
    model: Model,
    batch: int,
    padded: int,
    *,
    max_new_tokens: int,
    chunk_size: int,
    parts: int = 1,
    kv_dtype: str | None = None,
    order: By | None = None,
    mesh: Mesh | AbstractMesh | None = None,
) -> Order:
    """Choose the order in which a prefill reads ``batch`` prompts of ``padded`` tokens, from shapes alone.

    Args:
        methods: which share the prefill.
        each: for every method, its layers' methods.
        model: the description of a device's part of the model.
        batch: rows of a device.
        padded: tokens.
        max_new_tokens, chunk_size, kv_dtype, order: as in `kvjax.prefill`.
        parts: devices that divide the slots of a row.
        mesh: their mesh, outside of `jax.shard_map`.
    """

    def row(order: Order) -> RowBytes:
        found = []
        for layers in each:
            specs = layer_specs(layers, model, 1, order.slots, max_new_tokens, parts, kv_dtype)
            own = zip(layers, specs, strict=True)
            found.append([layer_bytes(one, reading=reading_spec(x, order), spec=x, mesh=mesh) for one, x in own])
        of_layers = list(zip(*found, strict=True))
        hidden = order.slots * not_none("model", layered(model)).hidden_size * jnp.dtype(model.dtype).itemsize
        return RowBytes(
            reading=tuple(_together([x.reading for x in own]) for own in of_layers),
            kept=tuple(_together([x.kept for x in own]) for own in of_layers),
            made=tuple(sum(x.made for x in own) for own in of_layers),
            hidden=hidden,
        )

    allowed = None if why_chunks(methods, model, padded) else row
    chosen = reading_order(each, batch, padded, chunk_size, by=order, row=allowed)
    # A method that observes the layers (`Method.observe`) needs them all on the device, before the program ends.
    if chosen.by == "chunks" or not chosen.offloaded or [type(m).observe for m in methods] != [Method.observe]:
        return chosen
    needed = row(chosen)
    space = 2 * max(needed.reading)  # keys and values, and once more joined for host memory
    short = sum(1 for freed in itertools.accumulate(needed.kept) if freed < space)
    return dataclasses.replace(chosen, waiting=min(short + 1, len(needed.kept) - 1))


def _together(states: Sequence[Stored]) -> int:
    """Add up the bytes on the device of a layer's states under several methods; equal storage exists once."""
    shared = {state.key: state.common for state in states if state.key is not None}
    return sum(state.device - state.common * (state.key is not None) for state in states) + sum(shared.values())


def reading_spec(spec: LayerSpec, order: Order) -> LayerSpec:
    """Return the sizes of a layer's storage while its prompt is read; ``spec`` has those of the finished layer."""
    return dataclasses.replace(spec, offloaded=False) if order.by == "layers" else spec


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
