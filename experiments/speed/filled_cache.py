"""Caches as prefill would leave them, but with random keys and values: the time of a step does not depend on their content.

Every layer's storage is filled on the device and handed to the method's own `finish`, so that indices, packed vectors and
evicted prompts are real. Rows are made one after the other, so that a batch takes the memory of its cache and of the work
on a single row. Methods whose prompt storage is bounded prefill the first and the last chunks of random tokens. Afterwards,
their sinks and windows hold the positions that they would hold after the whole prompt.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.api.shard_map import SAME, cache_specs, spread
from kvjax.attention.moments import Moments
from kvjax.cache import Cache, LayerStorage
from kvjax.cache.latent import LatentCache
from kvjax.cache.offload import OffloadedLayerCache
from kvjax.decoding.layers import init_shared, layer_methods, layer_specs, observe
from kvjax.decoding.reading_order import prompt_blocks
from kvjax.decoding.recurrent import Memory
from kvjax.mesh.sharding import Plan
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
    part, rows, parts = model, batch, 1
    if plan is not None:
        plan.check_rows(batch)
        part, rows, parts = plan.part(model), batch // plan.groups, plan.parts
    methods = layer_methods(method, part)
    specs = layer_specs(methods, part, rows, prompt_slots(methods, length), max_new_tokens, parts, kv_dtype)
    keys = [jax.random.fold_in(jax.random.key(seed), layer) for layer in range(len(specs))]
    if plan is None:
        layers = tuple(
            _rows(m, spec, _frequencies(model), key, length, model.vocab_size)
            for m, spec, key in zip(methods, specs, keys, strict=True)
        )
        return _observe(_start(method, model, specs, layers, length, weights, seed))
    split = cache_specs(method, model, plan, kv_dtype)
    makers: dict[str, Any] = {}  # layers of one kind share a compiled program
    shards = []
    for m, spec, where, key in zip(methods, specs, split.layers, keys, strict=True):
        kind = str((jax.tree.structure(m), spec, *jax.tree.flatten(where)))
        maker = makers.setdefault(kind, _maker(plan, spec, model.vocab_size, where))
        shards.append(maker(method=m, inv_freq=_frequencies(model), key=key, length=length))

    def join(_: tuple, layers: tuple, method: Method) -> Cache:
        cache = observe(_start(method, part, specs, layers, length, weights, seed), decoding=False)
        return dataclasses.replace(cache, model=model, plan=plan)

    def joined(layers: tuple, method: Method) -> Cache:
        whole = dataclasses.replace(split, weights=weights)
        return spread(plan, join, (), whole, layers=(split.layers, layers), method=(SAME, method))

    return jax.jit(joined, donate_argnums=0)(tuple(shards), method)


def _maker(plan: Plan, spec: LayerSpec, vocab_size: int, split: Any) -> Any:
    """Make a jitted function that fills a layer on each device, one row after the other."""

    def fill(_: tuple, method: LayerMethod, inv_freq: Array, key: Array, length: Array) -> Any:
        def row(number: Array) -> Any:
            one, of_row = dataclasses.replace(spec, batch=1), jax.random.fold_in(key, number)
            state = _row(method, of_row, inv_freq, length, spec=one, vocab_size=vocab_size)
            return jax.tree.map(lambda x: x[0], state)

        return lax.map(row, jnp.arange(spec.batch))

    return jax.jit(lambda **args: spread(plan, fill, (), split, **{name: (SAME, x) for name, x in args.items()}))


def _start(method: Method, model: ModelConfig, specs: tuple, layers: tuple, length: int, weights: str, seed: int) -> Cache:
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
    make = functools.partial(_row, spec=dataclasses.replace(spec, batch=1), vocab_size=vocab_size)
    if spec.batch == 1:
        return make(method, key, inv_freq, length)
    state = None
    for number in range(spec.batch):
        row = make(method, jax.random.fold_in(key, number), inv_freq, length)
        state = _put(_room(row, spec.batch) if state is None else state, row, number)
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


@functools.partial(jax.jit, static_argnames=("spec", "vocab_size"))
def _row(method: LayerMethod, key: Array, inv_freq: Array, length: Array | int, *, spec: LayerSpec, vocab_size: int) -> Any:
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
    return method.finish(state, spec)


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
            near = [x if near.shape[2] else with_vectors(x, vectors(near)) for x, near in zip(rows, part.stored, strict=True)]
            hosted = jnp.concatenate([vectors(x) for x in rows], axis=3)[..., -part.host.shape[3] :]
            filled |= {"near_key": near[0], "near_value": part.near_value if part.once else near[1], "host": to_host(hosted)}
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
