"""A prefill layer by layer, of which each layer is a program of its own; equal layers are one program.

One program of all layers takes XLA as long as there are layers: for 28 layers under ten methods more than a minute, although
the layers differ in nothing but their parameters. The computation is that of `kvjax.decoding.prefill`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache, LayerSpec
from kvjax.decoding.layers import fingerprint, init_shared, layer_methods, layer_specs, observe
from kvjax.decoding.passes import last_logits, put_rows
from kvjax.decoding.prefill import Run, Sized
from kvjax.decoding.reading_order import By, Order, chosen_order, why_chunks
from kvjax.decoding.shared_storage import Common, common_storage, finish
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, attention_soft_cap, layered, not_none, position_option
from pallas_kernels.soft_cap import soft_cap

_KINDS = 4  # of layers, or a third of the layers; with more, one program compiles sooner
Call = Callable[..., Any]  # (program, arguments, static=...) -> results, or their shapes


@dataclasses.dataclass(frozen=True)
class OneLayer:
    """What is static of a layer while its rows are read; equal layers have equal values."""

    model: Model  # the layer alone, as a model of one layer
    specs: tuple[LayerSpec, ...]  # of all rows, for each method
    holders: tuple[int, ...]  # `Common.holders` of the layer
    padded: int
    sizes: tuple
    order: Order

    def of(self, params: Any, methods: Sequence[Any], shared: tuple, rows: int) -> tuple[Run, Sized]:
        """Return the run of the layer alone, and its sizes for some rows."""
        each, specs = tuple((method,) for method in methods), of_rows((self.specs,), rows)[0]
        run = Run(params, tuple(methods), each, self.model, self.padded, self.sizes, self.order)
        return run, Sized(rows, tuple((spec,) for spec in specs), shared, Common((self.holders,)))

    def blank(self, methods: Sequence[Any]) -> tuple[tuple, Common]:
        """Return the shapes of the finished states [method] of all rows, and the storage that they have in common."""
        run, sized = self.of(None, methods, (None,) * len(methods), self.specs[0].batch)
        shapes, kept = run.blank(sized)
        return kept.strip_layer(0, shapes[0]), kept


class Layers(NamedTuple):
    """What is static of a prefill."""

    order: Order
    layers: tuple[OneLayer, ...]
    kept: tuple[Common, ...]  # of each layer, the storage that its finished states have in common
    specs: tuple[tuple[LayerSpec, ...], ...]  # [method][layer] of all rows


def of_rows(specs: Sequence[Sequence[LayerSpec]], rows: int) -> tuple[tuple[LayerSpec, ...], ...]:
    """Return specs for another number of rows."""
    return tuple(tuple(dataclasses.replace(spec, batch=rows) for spec in own) for own in specs)


def begin(params: Any, tokens: Array, length: Array, *, model: Model, slots: int) -> tuple[Array, Array, Array]:
    """Pad tokens int32 [B, T] to whole chunks [B, S], embed them [B, S, E], and copy ``length``, which caches consume."""
    tokens = jnp.pad(tokens, ((0, 0), (0, slots - tokens.shape[1])))
    at = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), tokens.shape)  # that of padding has no effect
    return tokens, not_none("model", layered(model)).embed(params, tokens, **position_option(model, at)), length


def read(
    params: Any, hidden: Array, tokens: Array, length: Array, methods: tuple, shared: tuple, *, layer: OneLayer, onward: bool
) -> tuple[Array | None, tuple]:
    """Run a layer on hidden states [B, S, E], group by group; return those behind it, and finished states [method].

    ``onward`` is that of `Run.read_layer`.
    """
    order = layer.order
    run, sized = layer.of(params, methods, shared, order.rows)
    blank, kept = layer.blank(methods)

    def group(hidden: Array, tokens: Array, length: Array) -> tuple[Array | None, tuple]:
        hidden, begun = run.read_layer(0, hidden, tokens, length, sized, embeds=False, onward=onward)
        begun = zip(methods, sized.common.restore_layer(0, begun), sized.specs, strict=True)
        return hidden, kept.strip_layer(0, tuple(finish(method, state, spec) for method, state, (spec,) in begun))

    def body(index: Array, made: tuple) -> tuple:
        # The last group begins earlier if the batch has no whole groups: its first rows are read twice.
        rows = lax.dynamic_slice_in_dim(by_length, index * order.rows, order.rows)
        return put_rows(made, group(hidden[rows], tokens[rows], length[rows]), rows)

    with soft_cap(attention_soft_cap(layer.model)):
        if order.groups == 1:
            return group(hidden, tokens, length)
        by_length = jnp.argsort(length, descending=True).astype(jnp.int32)
        room = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), (hidden if onward else None, blank))
        return lax.fori_loop(0, order.groups, body, room)


def observed(cache: Cache) -> Cache:
    """Run `observe` at the prompt's end; without the layers where they stay as they are."""
    made = observe(cache, decoding=False)
    same = all(x is y for x, y in zip(jax.tree.leaves(made.layers), jax.tree.leaves(cache.layers), strict=True))
    return dataclasses.replace(made, layers=()) if same else made


def has_few_kinds(method: Method, model: Model) -> bool:
    """Tell whether a method runs in few kinds of layers; methods that do not spoil the programs of those beside them."""
    return len({jax.tree.structure(layer) for layer in layer_methods(method, model)}) <= _KINDS


def each_layer(methods: tuple[Method, ...], *, model: Model) -> tuple:
    """Copy the methods, which caches consume, and return those of the layers, [method][layer]."""
    return methods, tuple(layer_methods(method, model) for method in methods)


def read_by_layer(
    call: Call,
    params: Any,
    tokens: Any,
    length: Any,
    methods: tuple[Method, ...],
    *,
    model: Model,
    max_new_tokens: int,
    chunk_size: int,
    kv_dtype: str | None,
    order: By | None,
    inputs: list[Array] | None = None,
) -> list[Cache] | None:
    """Do what `kvjax.decoding.prefill.run_prefill_each` does, by a program for each kind of layer.

    Args:
        call: runs a program of this module on arguments; or returns the shapes of its results, to compile it ahead.
        inputs: of `kvjax.api.prefill.prefill_each`.

    Returns:
        The caches, which have the arrays in common that are equal; None where one program must read all layers: in another
        order, with layers in host memory, if the model does not say which of its layers are equal, or many differ.
    """
    if (alone := getattr(model, "alone", None)) is None:
        return None
    batch, padded = tokens.shape
    methods, each = call(each_layer, methods, model=model)
    leaves, structure = jax.tree.flatten((methods, each))
    shapes = tuple((x.shape, x.dtype) for x in leaves)
    sizes = (max_new_tokens, 1, kv_dtype)
    plan = _planned(structure, shapes, model, batch, padded, sizes, chunk_size, order)
    if plan is None:
        return None
    known, fills = list(inputs or ())[1:], inputs if inputs == [] else None
    if fills is not None:
        fills.append(tokens)
    tokens, hidden, length = call(begin, params, tokens, length, model=model, slots=plan.order.slots)
    shared, every = (
        tuple(map(init_shared, methods, (model,) * len(methods), of_rows(plan.specs, rows)))
        for rows in (plan.order.rows, batch)
    )
    whole = []
    known = known if known and known[0].shape == hidden.shape else []
    for at, own in enumerate(zip(*each, strict=True)):
        if fills is not None:
            fills.append(hidden)
        given = alone(params, at)[1], known[at] if known else hidden, tokens, length, own, shared
        hidden, made = call(read, *given, layer=plan.layers[at], onward=not known)
        whole.append(plan.kept[at].restore_layer(0, made))
    if fills is not None:
        fills.append(hidden)
    logits = call(last_logits, params, known[-1] if known else hidden, length, model=model)
    caches = []
    for at, method in enumerate(methods):
        layers = tuple(layer[at] for layer in whole)
        cache = Cache(
            layers=layers, shared=every[at], method=method, length=length, logits=logits, model=model,
            weights=fingerprint(params), kv_dtype=kv_dtype,
        )  # fmt: skip
        if type(method).observe is not Method.observe:
            made = call(observed, cache)
            cache = made if made.layers else dataclasses.replace(made, layers=layers)
        caches.append(cache)
    return caches


@functools.lru_cache(64)
def _planned(
    structure: Any, shapes: tuple, model: Model, batch: int, padded: int, sizes: tuple, chunk_size: int, by: By | None
) -> Layers | None:
    """Plan a prefill from shapes; see `read_by_layer`."""
    found: list[Layers | None] = []

    def plan(given: tuple) -> None:
        methods, each = given
        found.append(_plan(methods, each, model, batch, padded, sizes, chunk_size, by))

    jax.eval_shape(plan, jax.tree.unflatten(structure, [jax.ShapeDtypeStruct(*x) for x in shapes]))
    return found[0]


def _plan(
    methods: tuple, each: tuple, model: Any, batch: int, padded: int, sizes: tuple, chunk_size: int, by: By | None
) -> Layers | None:
    room, parts, kv_dtype = sizes
    options: dict[str, Any] = {"max_new_tokens": room, "parts": parts, "kv_dtype": kv_dtype}
    if by is None and why_chunks(methods, model, padded) is None:
        by = "layers"  # it needs no more than a row's hidden states besides
    order = chosen_order(methods, each, model, batch, padded, **options, chunk_size=chunk_size, order=by)
    if order.by != "layers" or order.offloaded or model.alone(None, 0) is None:
        return None
    specs = tuple(layer_specs(own, model, batch, order.slots, room, parts, kv_dtype) for own in each)
    common, known = common_storage(each, specs, [False] * len(methods)), dict[Hashable, Common]()
    layers, kept = [], []
    for at, of_layer in enumerate(zip(*each, strict=True)):
        own = tuple(x[at] for x in specs)
        layer = OneLayer(model.alone(None, at)[0], own, common.holders[at], padded, sizes, order)
        kind = layer, jax.tree.structure(of_layer)
        if kind not in known:
            known[kind] = layer.blank(of_layer)[1]
        layers.append(layer)
        kept.append(known[kind])
    return Layers(order, tuple(layers), tuple(kept), specs) if len(known) <= max(_KINDS, len(layers) // 3) else None
