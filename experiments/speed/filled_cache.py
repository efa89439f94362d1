"""Caches as prefill would leave them, but with random keys and values: the time of a step does not depend on their content.

Every layer's storage is filled on the device and handed to the method's own `finish`, so that indices, packed vectors and
evicted prompts are real. Rows are made one after the other, so that a batch takes the memory of its cache and of the work
on a single row. Methods whose prompt storage is bounded prefill the first and the last chunks of random tokens. Afterwards,
their sinks and windows hold the positions that they would hold after the whole prompt.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array, lax

from experiments.speed.verified_cache import shares_storage, verified_cache
from kvjax.api.shard_map import SAME, cache_specs, spread
from kvjax.attention.moments import Moments
from kvjax.cache import Cache, LayerStorage
from kvjax.cache.latent import LatentCache
from kvjax.cache.offload import OffloadedLayerCache
from kvjax.decoding.layers import init_shared, is_offloaded, layer_methods, layer_specs, observe
from kvjax.decoding.prefill import prompt_blocks
from kvjax.decoding.recurrent import Memory
from kvjax.exact.verified import Verified
from kvjax.mesh.sharding import Plan
from kvjax.methods import Full
from kvjax.protocol.method import Inputs, LayerMethod, LayerSpec, Method, Prompt
from kvjax.protocol.typing import EMPTY, layer_ropes
from kvjax.rope import frequencies
from models import ModelConfig
from pallas_kernels.formats.quantised import Quantised, stored_like, vectors, with_vectors
from pallas_kernels.host import on_host, to_host


def prompt_slots(methods: Sequence[LayerMethod], length: int) -> int:
    """Return the slots of a prompt of ``length`` tokens, padded to the method's own block as `run_prefill` pads it."""
    chunk, chunks = prompt_blocks(methods, length, length)
    return chunk * chunks


def filled_cache(
    method: Method,
    model: ModelConfig,
    *,
    length: int,
    batch: int,
    max_new_tokens: int,
    weights: str = "",
    seed: int = 0,
    plan: Plan | None = None,
    kv_dtype: str | None = None,
) -> Cache:
    """Make a cache of ``batch`` rows that is ready to decode; each row has seen ``length`` random tokens.

    Args:
        method: the method, made for ``model``.
        model: sizes.
        length: tokens of each prompt.
        batch: rows.
        max_new_tokens: tokens that may follow.
        weights: fingerprint of the parameters.
        seed: of keys, values, queries and tokens.
        plan: the devices on which the cache is; each fills its own part, all with the same values. None means one device.
        kv_dtype: of the stored keys and values, as in `kvjax.prefill`.

    Raises:
        ValueError: rows or heads that cannot be divided over the devices.
    """
    if plan is not None:
        return _filled_on(plan, method, model, (length, batch, max_new_tokens), weights, seed, kv_dtype)
    if method.drafts:
        verified = cast("Verified", method)
        sizes: dict[str, Any] = {"length": length, "batch": batch, "max_new_tokens": max_new_tokens}
        sizes |= {"weights": weights, "seed": seed, "kv_dtype": kv_dtype}
        draft = filled_cache(verified.draft, model, **sizes)
        full = draft if shares_storage(verified, model) else filled_cache(Full(), model, **sizes)
        return verified_cache(verified, full, draft)
    methods = layer_methods(method, model)
    specs = layer_specs(methods, model, batch, prompt_slots(methods, length), max_new_tokens, kv_dtype=kv_dtype)
    layers = tuple(
        _rows(m, spec, _frequencies(model), jax.random.fold_in(jax.random.key(seed), layer), length, model.vocab_size)
        for layer, (m, spec) in enumerate(zip(methods, specs, strict=True))
    )
    return _cache(method, model, specs, layers, length, weights, seed)


def _filled_on(
    plan: Plan,
    method: Method,
    model: ModelConfig,
    sizes: tuple[int, int, int],
    weights: str,
    seed: int,
    kv_dtype: str | None,
) -> Cache:
    """Make a `filled_cache` on many devices; ``sizes`` are prompt tokens, rows, and tokens that may follow."""
    length, batch, max_new_tokens = sizes
    plan.check_rows(batch)
    part, rows, split = plan.part(model), batch // plan.groups, cache_specs(method, model, plan, kv_dtype)
    methods = layer_methods(method, part)
    specs = layer_specs(methods, part, rows, prompt_slots(methods, length), max_new_tokens, plan.parts, kv_dtype)
    makers: dict[Any, Any] = {}  # layers of one kind share a compiled program
    layers = []
    for layer, (m, spec, where) in enumerate(zip(methods, specs, split.layers, strict=True)):
        kind = jax.tree.structure(m), spec, *jax.tree.flatten(where)
        make = makers.setdefault(str(kind), _maker(plan, spec, model.vocab_size, where))
        key = jax.random.fold_in(jax.random.key(seed), layer)
        layers.append(make(method=m, inv_freq=_frequencies(model), key=key, length=length))

    def one(_: tuple, layers: tuple, method: Method) -> Cache:
        made = observe(_start(method, part, specs, layers, length, weights, seed), decoding=False)
        return dataclasses.replace(made, model=model, plan=plan)

    def join(layers: tuple, method: Method) -> Cache:
        specs = dataclasses.replace(split, weights=weights)
        return spread(plan, one, (), specs, layers=(split.layers, layers), method=(SAME, method))

    return jax.jit(join, donate_argnums=0)(tuple(layers), method)


def _maker(plan: Plan, spec: LayerSpec, vocab_size: int, split: Any) -> Any:
    """Make a jitted function that fills a layer on each device, one row after the other."""

    def fill(method: LayerMethod, inv_freq: Array, key: Array, length: Array) -> Any:
        def row(number: Array) -> Any:
            mine, own = jax.random.fold_in(key, number), dataclasses.replace(spec, batch=1)
            made = _row(method, mine, inv_freq, length, spec=own, vocab_size=vocab_size, finished=True)
            return jax.tree.map(lambda x: x[0], made)

        return lax.map(row, jnp.arange(spec.batch))

    def run(**args: Any) -> Any:
        return spread(plan, lambda _, **given: fill(**given), (), split, **{name: (SAME, x) for name, x in args.items()})

    return jax.jit(run)


def one_layer_cache(
    method: Method,
    model: ModelConfig,
    *,
    length: int,
    max_new_tokens: int,
    in_prompt: bool = False,
    seed: int = 0,
    kv_dtype: str | None = None,
) -> tuple[LayerMethod, Cache]:
    """Make the last layer of a model with a single row: the layer's method, and a cache of this layer only.

    Args:
        method: for the whole model.
        model: sizes.
        length: tokens that the row has seen.
        max_new_tokens: tokens that may follow.
        in_prompt: the cache is as it is before the prompt's end; the tokens that may follow belong to the prompt.
        seed: of keys, values, queries and tokens.
        kv_dtype: of the stored keys and values.
    """
    chosen = layer_methods(method, model)[-1]
    offloaded = is_offloaded(chosen, model.num_layers - 1, model.num_layers)
    model = dataclasses.replace(
        model, num_layers=1, windows=model.windows[-1:], ropes=model.ropes[-1:], linear=None, experts=None
    )
    slots = prompt_slots([chosen], length) + (max_new_tokens if in_prompt else 0)
    specs = tuple(
        dataclasses.replace(spec, offloaded=offloaded)
        for spec in layer_specs([chosen], model, 1, slots, max_new_tokens, kv_dtype=kv_dtype)
    )
    layer = _row(
        chosen,
        jax.random.key(seed),
        _frequencies(model),
        length,
        spec=specs[0],
        vocab_size=model.vocab_size,
        finished=not in_prompt,
    )
    if in_prompt:  # the state that all layers share is made at the prompt's end
        return chosen, _start(method, model, specs, (layer,), length, "", seed)
    return chosen, _cache(method, model, specs, (layer,), length, "", seed)


def state_bytes(
    method: Method, model: ModelConfig, *, length: int, max_new_tokens: int, kv_dtype: str | None = None
) -> int:
    """Count the bytes on the device of the states of all layers for a single row; nothing is allocated."""
    if method.drafts:
        verified = cast("Verified", method)
        parts = [verified.draft, *[Full()] * (not shares_storage(verified, model))]
        sizes = {"length": length, "max_new_tokens": max_new_tokens}
        return sum(state_bytes(part, model, kv_dtype=kv_dtype, **sizes) for part in parts)
    methods = layer_methods(method, model)
    specs = layer_specs(methods, model, 1, prompt_slots(methods, length), max_new_tokens, kv_dtype=kv_dtype)
    total = 0
    for m, spec in zip(methods, specs, strict=True):
        own = dataclasses.replace(spec, batch=1)
        make = functools.partial(_row, spec=own, vocab_size=model.vocab_size, finished=True)
        kinds: Any = jax.make_jaxpr(make)(m, jax.random.key(0), _frequencies(model), length).out_avals
        total += sum(x.size * x.dtype.itemsize for x in kinds if x.memory_space != jax.memory.Space.Host)
    return total


def _cache(
    method: Method, model: ModelConfig, specs: tuple, layers: tuple, length: int, weights: str, seed: int
) -> Cache:
    return _observe(_start(method, model, specs, layers, length, weights, seed))


def _start(
    method: Method, model: ModelConfig, specs: tuple, layers: tuple, length: int, weights: str, seed: int
) -> Cache:
    batch = specs[0].batch
    # Copies, because donation must take neither the caller's arrays nor a buffer that several fields share.
    method, shared = jax.tree.map(jnp.copy, (method, init_shared(method, model, specs)))
    return Cache(
        layers=layers,
        shared=shared,
        method=method,
        length=jnp.full((batch,), length, jnp.int32),
        logits=jax.random.normal(jax.random.key(seed), (batch, model.vocab_size), jnp.float32),
        model=model,
        weights=weights,
        kv_dtype=specs[0].kv_dtype,
    )


@functools.partial(jax.jit, donate_argnums=0)
def _observe(cache: Cache) -> Cache:
    return observe(cache, decoding=False)


def _frequencies(model: ModelConfig) -> Array:
    return jnp.asarray(frequencies(layer_ropes(model)[-1], model.head_dim))


def _rows(method: LayerMethod, spec: LayerSpec, inv_freq: Array, key: Array, length: int, vocab_size: int) -> Any:
    """Make the state of a layer, row after row."""
    make = functools.partial(_row, spec=dataclasses.replace(spec, batch=1), vocab_size=vocab_size, finished=True)
    if spec.batch == 1:
        return make(method, key, inv_freq, length)
    state = None
    for row in range(spec.batch):
        made = make(method, jax.random.fold_in(key, row), inv_freq, length)
        state = _put(_room(made, spec.batch) if state is None else state, made, row)
    return state


@functools.partial(jax.jit, static_argnums=1)
def _room(row: Any, batch: int) -> Any:
    """Make zeros for ``batch`` rows like ``row``, in the same kind of memory."""

    def zeros(x: Array) -> Array:
        room = jnp.zeros((batch, *x.shape[1:]), x.dtype)
        return to_host(room) if on_host(x) else room

    return jax.tree.map(zeros, row)


@functools.partial(jax.jit, donate_argnums=0)
def _put(state: Any, row: Any, at: Array | int) -> Any:
    def put(x: Array, new: Array) -> Array:
        return lax.dynamic_update_slice(x, new, (at, *[0] * (x.ndim - 1)), allow_negative_indices=False)

    return jax.tree.map(put, state, row)


@functools.partial(jax.jit, static_argnames=("spec", "vocab_size", "finished"))
def _row(
    method: LayerMethod,
    key: Array,
    inv_freq: Array,
    length: Array | int,
    *,
    spec: LayerSpec,
    vocab_size: int,
    finished: bool,
) -> Any:
    """Make a row of a layer after ``length`` random tokens.

    ``length`` is traced: otherwise a compiler would fold constants that are as large as a cache.
    """
    state = method.init(spec)
    parts = [x for x in jax.tree.leaves(state, is_leaf=_is_part) if isinstance(x, LayerStorage)]
    stores = [x.row_slots for x in parts]
    if all(slots >= spec.prompt_slots for slots in stores):
        fill = functools.partial(_filled, key=key, length=length, vocab_size=vocab_size)
        state = jax.tree.map(fill, state, is_leaf=_is_part)
    else:
        state = _read(method, state, key, inv_freq, spec, max(stores), length, vocab_size)
    return method.finish(state, spec) if finished else state


def _is_part(x: Any) -> bool:
    return isinstance(x, (LayerStorage, Prompt, Memory))


def _filled(part: Any, *, key: Array, length: Array | int, vocab_size: int) -> Any:
    """Fill storage, observations of the prompt, or a recurrent state with random content; any other part stays as it is."""
    keys = [jax.random.fold_in(key, index) for index in range(4)]
    if isinstance(part, LayerStorage):
        slot = part.first + jnp.arange(part.num_slots, dtype=jnp.int32)[None, None]
        held = slot < length

        shape = (*part.position.shape, part.key.shape[3])

        def random(key: Array, like: Array | Quantised) -> Array | Quantised:
            numbers = jax.random.normal(key, shape, jnp.float32).astype(like.dtype)
            return stored_like(jnp.where(held[..., None], numbers, 0), like)

        rows = random(keys[0], part.stored[0]), random(keys[1], part.stored[1])
        filled = {
            "position": jnp.broadcast_to(jnp.where(held, slot, EMPTY), part.position.shape),
            "cursor": jnp.full_like(part.cursor, length),
        }
        if isinstance(part, OffloadedLayerCache):  # it has no copies yet, but may have all keys
            made = [x if near.shape[2] else with_vectors(x, vectors(near)) for x, near in zip(rows, part.stored, strict=True)]
            hosted = jnp.concatenate([vectors(x) for x in rows], axis=3)[..., -part.host.shape[3] :]
            filled |= {"near_key": made[0], "near_value": part.near_value if part.once else made[1], "host": to_host(hosted)}
        elif isinstance(part, LatentCache):
            filled |= {"held": rows[0]}
        else:
            filled |= {"key": rows[0], "value": rows[1]} if part.codes is None else {"codes": rows}
        return dataclasses.replace(part, **filled)
    if isinstance(part, Memory):
        return Memory(arrays=tuple(_normal(jax.random.fold_in(key, at), x) for at, x in enumerate(part.arrays)))
    if isinstance(part, Prompt):
        window, slots = part.query_position.shape[1], part.tokens.shape[1]
        newest = length - window + jnp.arange(window, dtype=jnp.int32)[None]
        held = jnp.arange(slots, dtype=jnp.int32)[None] < length
        tokens = jax.random.randint(keys[3], part.tokens.shape, 0, vocab_size, jnp.int32)
        return Prompt(
            query=_normal(keys[2], part.query),
            query_position=jnp.broadcast_to(jnp.maximum(newest, EMPTY), part.query_position.shape),
            mass=jnp.abs(_normal(keys[2], part.mass)),
            tokens=jnp.where(held, tokens, 0),
            moments=None if part.moments is None else _spread(part.moments, length),
        )
    return part


def _spread(moments: Moments, length: Array | int) -> Moments:
    """Return the moments of ``length`` queries with the distribution of `_normal`."""
    unit = jnp.eye(moments.mean.shape[3], dtype=jnp.float32) * length
    scatter = None if moments.scatter is None else jnp.broadcast_to(unit, moments.scatter.shape)
    return dataclasses.replace(moments, count=jnp.full_like(moments.count, length), scatter=scatter)


def _normal(key: Array, like: Array) -> Array:
    """Draw standard normal values, like the rotated keys of a model with random weights or with normalised keys."""
    return jax.random.normal(key, like.shape, jnp.float32).astype(like.dtype)


def _read(
    method: LayerMethod,
    state: Any,
    key: Array,
    inv_freq: Array,
    spec: LayerSpec,
    slots: int,
    length: Array | int,
    vocab_size: int,
) -> Any:
    """Prefill random tokens by the method's own attention: the first chunk, and the last chunks that fill its storage."""
    chunk = min(method.max_tokens(in_prompt=True) or slots, spec.prompt_slots)
    chunks = -(-spec.prompt_slots // chunk)
    last = min(-(-slots // chunk) + 1, chunks - 1)
    heads = (spec.batch, spec.num_kv_heads)

    def body(index: Array, state: Any) -> Any:
        start = jnp.where(index == 0, 0, chunks - last - 1 + index) * chunk
        at = start + jnp.arange(chunk, dtype=jnp.int32)[None]
        q, k, v, t = (jax.random.fold_in(jax.random.fold_in(key, index), part) for part in range(4))
        inputs = Inputs(
            query=jax.random.normal(q, (*heads, spec.group_size, chunk, spec.head_dim), jnp.float32).astype(spec.dtype),
            key=jax.random.normal(k, (*heads, chunk, spec.head_dim), jnp.float32).astype(spec.dtype),
            value=jax.random.normal(v, (*heads, chunk, spec.head_dim), jnp.float32).astype(spec.dtype),
            position=jnp.where(at < length, at, EMPTY),
            tokens=jax.random.randint(t, at.shape, 0, vocab_size, jnp.int32),
            inv_freq=inv_freq,
            shared=None,
            start=start,
        )
        _, state = method.attend(state, inputs)
        return state

    return lax.fori_loop(0, last + 1, body, state)
