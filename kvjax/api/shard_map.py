"""The traced core on many devices: every device of a mesh runs the program of one device, on its rows and its KV heads.

Inside `jax.shard_map` kernels see the arrays of one device, and the model's description is cut down to the part of one device
(`Plan.part`). XLA divides nothing. Collectives stand where their operands are computed (`pallas_kernels.axes`).

No method says how its state is divided. Every leaf has the rows first. A leaf also has an axis of heads if its shape follows
the number of heads, and an axis of slots if its shape follows the devices along ``slots`` (`cache_specs`). All other leaves
are equal on the devices that share a row.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.accounting.stats import Stats, step_cost
from kvjax.cache.whole_model import Cache, repeat_rows
from kvjax.decoding.decode import Decoded, run_decode, run_extend, run_step
from kvjax.decoding.layers import blank_cache, fingerprint
from kvjax.decoding.prefill import run_prefill_each
from kvjax.decoding.shared_storage import Once
from kvjax.exact.verify import drafts_tokens, run_verified
from kvjax.mesh.sharding import Plan, on_each
from kvjax.protocol.describe import describe
from kvjax.protocol.method import Method, num_bytes
from kvjax.protocol.typing import Model, not_none
from pallas_kernels.axes import MODEL, SLOTS

SAME: Any = PartitionSpec()  # the same on every device


def cache_specs(method: Method, model: Model, plan: Plan, kv_dtype: str | None = None) -> Cache:
    """Derive how a cache is split: a `Cache` whose leaves are specs, some of which stand for a whole tree of equal specs.

    Raises:
        ValueError: the model cannot be divided, or the method's state has another structure for fewer heads.
    """
    bare = jax.tree.map(shape_of, method)  # a tracer's type may say on which mesh it is

    def blank(method: Method, model: Model = model) -> Any:
        made = blank_cache(method, model, plan=plan, kv_dtype=kv_dtype)
        return made.layers, made.shared

    state = of_slots = jax.eval_shape(blank, bare)
    of_heads = jax.eval_shape(functools.partial(blank, model=plan.part(model)), bare)
    if plan.parts > 1:
        of_slots = jax.eval_shape(on_each(plan.mesh, blank), bare)
    if jax.tree.structure(state) != jax.tree.structure(of_heads):
        raise ValueError(
            f"{describe(method, brief=True)} cannot be divided over devices: its state depends on the number of KV heads "
            "beyond the shapes of its arrays"
        )

    def spec(one: Any, heads: Any, slots: Any) -> PartitionSpec:
        sizes = zip(one.shape[1:], heads.shape[1:], slots.shape[1:], strict=True)
        split = [MODEL if a != b else SLOTS if a != c else None for a, b, c in sizes]
        while split and split[-1] is None:
            split.pop()
        return PartitionSpec(*(plan.row or (None,)), *split) if split else plan.row

    layers, shared = jax.tree.map(spec, state, of_heads, of_slots)
    row = cast("Any", plan.row)
    return Cache(
        layers=layers, shared=shared, method=SAME, length=row, logits=row, model=model, plan=plan, kv_dtype=kv_dtype
    )


def shardings(cache: Cache) -> Cache:
    """Derive the sharding of every leaf of a cache, or of its shapes; its plan is not None."""
    plan = not_none("plan", cache.plan)
    split = cache_specs(cache.method, cache.model, plan, cache.kv_dtype)
    specs = dataclasses.replace(split, weights=cache.weights)
    return jax.tree.map(lambda spec: NamedSharding(plan.mesh, spec), jax.tree.broadcast(specs, cache))


def prefill_each(
    params: Any,
    tokens: Array,
    length: Array,
    methods: tuple[Method, ...],
    *,
    model: Model,
    max_new_tokens: int,
    chunk_size: int,
    plan: Plan | None = None,
    kv_dtype: str | None = None,
) -> tuple[Cache, ...]:
    """Run `run_prefill_each` on the devices of ``plan``; on one device without a plan."""
    parts = 1 if plan is None else plan.parts
    sizes = {"max_new_tokens": max_new_tokens, "chunk_size": chunk_size, "parts": parts, "kv_dtype": kv_dtype}
    run = functools.partial(run_prefill_each, **sizes)
    if plan is None:
        return run(params, tokens, length, methods, model=model)
    weights, part = fingerprint(params), plan.part(model)

    def one(params: Any, tokens: Array, length: Array, methods: tuple[Method, ...]) -> tuple[Cache, ...]:
        made = run(params, tokens, length, methods, model=part)
        return tuple(dataclasses.replace(cache, model=model, weights=weights, plan=plan) for cache in made)

    specs = tuple(
        dataclasses.replace(cache_specs(method, model, plan, kv_dtype), weights=weights) for method in methods
    )
    return spread(plan, one, params, (tokens, length, methods), (plan.row, plan.row, SAME), specs)


def prefill_once(*args: Any, **sizes: Any) -> Once:
    """Run `prefill_each`, and return what several caches have in common as one array."""
    return Once.of(prefill_each(*args, **sizes))


def step(params: Any, cache: Cache, tokens: Array, active: Array) -> Cache:
    """Run `run_step` on the devices that hold the cache."""
    return on_devices(run_step, params, cache, (tokens, active), _rows, _cache)


def extend(params: Any, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Run `run_extend` on the devices that hold the cache."""
    return on_devices(run_extend, params, cache, (tokens, length), _rows, _cache)


def decode(params: Any, cache: Cache, *args: Any, **static: Any) -> Decoded:
    """Run `run_decode` on the devices that hold the cache, with the same arguments."""
    if cache.plan is not None:
        run = functools.partial(decode, **static)
        return on_devices(run, params, cache, args, _decode_args, _decoded)
    return _run(cache)(params, cache, *args, **static)


def decode_and_measure(params: Any, cache: Cache, *args: Any, **static: Any) -> tuple[Decoded, Stats]:
    """Run `decode`, and compute the cost of the step after it: one program instead of many small ones."""
    if cache.plan is not None:
        run = functools.partial(decode_and_measure, **static)
        end, stats = on_devices(run, params, cache, args, _decode_args, lambda specs, row: (_decoded(specs, row), row))
        return end, _of_all(stats, end.cache)
    end = _run(cache)(params, cache, *args, **static)
    return end, step_cost(end.cache)


def _run(cache: Cache) -> Callable[..., Decoded]:
    """Return the loop over tokens of the cache's method."""
    return run_verified if drafts_tokens(cache) else run_decode


def cost(cache: Cache) -> Stats:
    """Run `kvjax.accounting.stats.step_cost` on the devices that hold the cache."""
    stats = on_devices(lambda params, cache: step_cost(cache), (), cache, (), _rows, lambda specs, row: row)
    return _of_all(stats, cache)


def repeat(cache: Cache, copies: int) -> Cache:
    """Run `kvjax.cache.whole_model.repeat_rows` on the devices that hold the cache."""
    return on_devices(lambda params, cache: repeat_rows(cache, copies), (), cache, (), _rows, _cache)


def on_devices(
    run: Callable[..., Any],
    params: Any,
    cache: Cache,
    args: tuple,
    given: Callable[[PartitionSpec, int], tuple],
    made: Callable[[Cache, PartitionSpec], Any],
) -> Any:
    """Run ``run(params, cache, *args)`` on each device that holds the cache, with its part of all arguments.

    Args:
        run: the program of one device: its cache has no plan. It returns a tree; a `Cache` in the tree is a later state of
            this cache.
        params: model parameters, or nothing.
        cache: its plan has the devices; without a plan ``run`` is called directly.
        args: arrays, or trees of arrays.
        given: makes the specs of ``args`` from the spec of rows and the number of ``args``.
        made: makes the specs of the result from the specs of the cache and the spec of rows.
    """
    plan, model = cache.plan, cache.model
    if plan is None:
        return run(params, cache, *args)
    part = plan.part(model)
    specs = dataclasses.replace(cache_specs(cache.method, model, plan, cache.kv_dtype), weights=cache.weights)

    def whole(x: Any) -> Any:
        return dataclasses.replace(x, model=model, plan=plan) if _is_cache(x) else x

    def one(params: Any, cache: Cache, *args: Any) -> Any:
        out = run(params, dataclasses.replace(cache, model=part, plan=None), *args)
        return jax.tree.map(whole, out, is_leaf=_is_cache)

    in_specs = specs, *given(plan.row, len(args))
    return spread(plan, one, params, (cache, *args), in_specs, made(specs, plan.row))


def spread(
    plan: Plan, run: Callable[..., Any], params: Any, args: tuple, in_specs: tuple, out_specs: Any
) -> Any:
    """Run ``run(params, *args)`` on every device of the plan, with the device's parts of the arguments.

    Args:
        plan: says how ``params`` are split.
        run: the program of one device.
        params: model parameters, or nothing.
        args: further arguments.
        in_specs: the specs of ``args``.
        out_specs: the specs of the result.
    """
    # An array of size 0 is made inside: XLA's partitioner in JAX 0.11 crashes on an input that is not used.
    empty = {at: x for at, x in enumerate(args) if isinstance(x, jax.Array) and x.size == 0}

    def one(params: Any, *args: Any) -> Any:
        return run(params, *(jnp.zeros(empty[at].shape, empty[at].dtype) if at in empty else x for at, x in enumerate(args)))

    of_params = jax.tree.unflatten(jax.tree.structure(params), plan.params) if jax.tree.leaves(params) else params
    # Kernels do not say along which axes their results differ, so nothing checks it.
    mapped = jax.shard_map(
        one, mesh=plan.mesh, in_specs=(of_params, *in_specs), out_specs=out_specs, check_vma=False
    )
    return mapped(params, *(None if at in empty else x for at, x in enumerate(args)))


def total_bytes(cache: Cache, model: Model, plan: Plan) -> int:
    """Count the bytes of the layers and the shared state on all devices; ``cache`` is one device's part, with whole rows."""
    specs = cache_specs(cache.method, model, plan, cache.kv_dtype)
    parts = jax.tree.map(
        lambda spec, x: num_bytes(x) * plan.groups * (plan.shards if MODEL in spec else 1),
        (specs.layers, specs.shared),
        (cache.layers, cache.shared),
    )
    return sum(jax.tree.leaves(parts))


def _decode_args(row: PartitionSpec, count: int) -> tuple:
    """Give the specs of `run_decode`'s arguments after the cache: sampler, key, eos, done and, if given, limits."""
    return (SAME, SAME, SAME, row, row)[:count]


def _decoded(specs: Cache, row: Any) -> Decoded:
    """Make the specs of a `Decoded` from the specs of its cache."""
    return Decoded(cache=specs, tokens=row, num_tokens=row, done=row, bad_step=row, key=SAME, step=SAME)


def _rows(row: PartitionSpec, count: int) -> tuple:
    return (row,) * count


def _cache(specs: Cache, row: PartitionSpec) -> Cache:
    return specs


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, without the devices on which it is."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)


def _of_all(stats: Stats, cache: Cache) -> Stats:
    """Set the resident bytes of the statistics to the bytes of all devices."""
    return dataclasses.replace(stats, resident_bytes=num_bytes((cache.layers, cache.shared)))
