"""The traced core on many devices: every device of a mesh runs the program of one device, on its rows and its KV heads.

Inside `jax.shard_map` kernels see the arrays of one device, and the model's description is cut down to the part of one device
(`Plan.part`). XLA divides nothing. Collectives stand where their operands are computed (`pallas_kernels.axes`).

No method says how its state is divided. Every leaf has the rows first. A leaf also has an axis of heads if its shape follows
the number of heads, and an axis of slots if its shape follows the devices along ``slots`` (`cache_specs`). All other leaves
are equal on the devices that share a row.
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, cast

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import NamedSharding, PartitionSpec

from kvjax.accounting.stats import Stats, step_cost
from kvjax.cache.whole_model import Cache, repeat_rows
from kvjax.decoding.decode import Decoded, run_decode, run_extend, run_step
from kvjax.decoding.history import Memory
from kvjax.decoding.layers import blank_cache, fingerprint
from kvjax.decoding.prefill import run_prefill_each
from kvjax.decoding.reading_order import By
from kvjax.decoding.sampling import Sampler, has_row_keys
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
        cache = blank_cache(method, model, plan=plan, kv_dtype=kv_dtype)
        return cache.layers, cache.shared

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
    return Cache(layers=layers, shared=shared, method=SAME, length=row, logits=row, model=model, plan=plan, kv_dtype=kv_dtype)


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
    order: By | None = None,
    inputs: tuple[Array, ...] = (),
) -> tuple[Cache, ...]:
    """Run `run_prefill_each` on the devices of ``plan``; on one device without a plan."""
    parts = 1 if plan is None else plan.parts
    sizes: dict[str, Any] = {"max_new_tokens": max_new_tokens, "chunk_size": chunk_size, "parts": parts, "kv_dtype": kv_dtype}
    run = functools.partial(run_prefill_each, order=order, inputs=inputs, **sizes)
    if plan is None:
        return run(params, tokens, length, methods, model=model)
    weights, part = fingerprint(params), plan.part(model)

    def one(params: Any, tokens: Array, length: Array, methods: tuple[Method, ...]) -> tuple[Cache, ...]:
        caches = run(params, tokens, length, methods, model=part)
        return tuple(dataclasses.replace(cache, model=model, weights=weights, plan=plan) for cache in caches)

    specs = tuple(dataclasses.replace(cache_specs(method, model, plan, kv_dtype), weights=weights) for method in methods)
    return spread(plan, one, params, specs, tokens=(plan.row, tokens), length=(plan.row, length), methods=(SAME, methods))


def prefill_once(*args: Any, **sizes: Any) -> Once:
    """Run `prefill_each`, and return what several caches have in common as one array."""
    return Once.of(prefill_each(*args, **sizes))


def step(params: Any, cache: Cache, tokens: Array, active: Array) -> Cache:
    """Run `run_step` on the devices that hold the cache."""
    return on_devices(run_step, params, cache, rows={"tokens": tokens, "active": active})


def extend(params: Any, cache: Cache, tokens: Array, length: Array) -> Cache:
    """Run `run_extend` on the devices that hold the cache."""
    return on_devices(run_extend, params, cache, rows={"tokens": tokens, "length": length})


def decode(
    params: Any,
    cache: Cache,
    sampler: Sampler,
    key: Array | None,
    eos: Array,
    done: Array,
    limits: Array | None = None,
    memory: Memory | None = None,
    **static: Any,
) -> Decoded:
    """Run `run_decode` on the devices that hold the cache, with the same arguments."""
    run = functools.partial(run_decode, advance=_loop(cache), **static)
    rows, same = {"done": done, "limits": limits, "memory": memory}, {"sampler": sampler, "eos": eos}
    by_row = has_row_keys(key)
    (rows if by_row else same)["key"] = key

    def split(cache: Cache, row: Any) -> Decoded:
        names = "tokens", "num_tokens", "done", "bad_step", "log_probs", "memory"
        return Decoded(cache=cache, key=row if by_row else SAME, step=SAME, **{name: row for name in names})

    return on_devices(run, params, cache, rows=rows, same=same, split=split)


def score(params: Any, cache: Cache, tokens: Array, length: Array, done: Array, *, stop_early: bool) -> tuple[Array, Array]:
    """Decode ``length`` int32 [B] given ``tokens`` int32 [B, N], one in a step, on the devices that hold the cache.

    Returns:
        Their log-probabilities float32 [B, N], and the first bad step of each row int32 [B], see `Decoded`.
    """

    def run(params: Any, cache: Cache, tokens: Array, done: Array, length: Array) -> tuple[Array, Array]:
        eos, steps = jnp.zeros((0,), jnp.int32), tokens.shape[1]
        static = {"steps": steps, "stop_early": stop_early, "top": 0, "forced": tokens}
        end = run_decode(params, cache, Sampler(), None, eos, done, length, **static)
        return not_none("log_probs", end.log_probs).model, end.bad_step

    rows = {"tokens": tokens, "done": done, "length": length}
    return on_devices(run, params, cache, rows=rows, split=lambda cache, row: (row, row))


def decode_and_measure(params: Any, cache: Cache, *args: Any, **static: Any) -> tuple[Decoded, Stats]:
    """Run `decode`, and compute the cost of the step after it: one program instead of many small ones."""
    if cache.plan is None:
        end = run_decode(params, cache, *args, advance=_loop(cache), **static)
        return end, step_cost(end.cache)
    end = decode(params, cache, *args, **static)
    return end, cost(end.cache)


def _loop(cache: Cache) -> Callable[..., Decoded] | None:
    """Return the loop of a method that drafts tokens; None for all others."""
    return run_verified if drafts_tokens(cache) else None


def cost(cache: Cache) -> Stats:
    """Run `kvjax.accounting.stats.step_cost` on the devices that hold the cache, and count the bytes of all of them."""
    stats = on_devices(lambda params, cache: step_cost(cache), (), cache, split=lambda cache, row: row)
    return dataclasses.replace(stats, resident_bytes=num_bytes((cache.layers, cache.shared)))


def repeat(cache: Cache, copies: int) -> Cache:
    """Run `kvjax.cache.whole_model.repeat_rows` on the devices that hold the cache."""
    return on_devices(lambda params, cache: repeat_rows(cache, copies), (), cache)


def on_devices(
    run: Callable[..., Any],
    params: Any,
    cache: Cache,
    *,
    rows: Mapping[str, Any] = MappingProxyType({}),
    same: Mapping[str, Any] = MappingProxyType({}),
    split: Callable[[Cache, PartitionSpec], Any] = lambda cache, row: cache,
) -> Any:
    """Run ``run(params, cache, **rows, **same)`` on each device that holds the cache, with its part of all arguments.

    Args:
        run: the program of one device: its cache has no plan. It returns a tree; a `Cache` in the tree is a later state of
            this cache.
        params: model parameters, or nothing.
        cache: its plan has the devices; without a plan ``run`` is called directly.
        rows: arrays with axis B first.
        same: arrays, or trees of arrays, that are equal on all devices.
        split: makes the specs of the result from the specs of the cache and the spec of rows; by default it is a cache.
    """
    plan, model = cache.plan, cache.model
    if plan is None:
        return run(params, cache, **rows, **same)
    part = plan.part(model)
    specs = dataclasses.replace(cache_specs(cache.method, model, plan, cache.kv_dtype), weights=cache.weights)

    def whole(x: Any) -> Any:
        return dataclasses.replace(x, model=model, plan=plan) if _is_cache(x) else x

    def one(params: Any, cache: Cache, **args: Any) -> Any:
        out = run(params, dataclasses.replace(cache, model=part, plan=None), **args)
        return jax.tree.map(whole, out, is_leaf=_is_cache)

    args = {name: (plan.row, x) for name, x in rows.items()} | {name: (SAME, x) for name, x in same.items()}
    return spread(plan, one, params, split(specs, plan.row), cache=(specs, cache), **args)


def spread(plan: Plan, run: Callable[..., Any], params: Any, split: Any, **args: tuple[Any, Any]) -> Any:
    """Run ``run(params, **args)`` on every device of the plan, with the device's parts of the arguments.

    Args:
        plan: says how ``params`` are split.
        run: the program of one device.
        params: model parameters, or nothing.
        split: the specs of the result.
        **args: further arguments, each with its specs: ``tokens=(specs, tokens)``.
    """
    specs, values = {name: one for name, (one, _) in args.items()}, {name: x for name, (_, x) in args.items()}
    # An array of size 0 is made inside: XLA's partitioner in JAX 0.11 crashes on an input that is not used.
    empty = {name: x for name, x in values.items() if isinstance(x, jax.Array) and x.size == 0}

    def one(params: Any, args: dict[str, Any]) -> Any:
        return run(params, **args | {name: jnp.zeros(x.shape, x.dtype) for name, x in empty.items()})

    of_params = jax.tree.unflatten(jax.tree.structure(params), plan.params) if jax.tree.leaves(params) else params
    # Kernels do not say along which axes their results differ, so nothing checks it.
    mapped = jax.shard_map(one, mesh=plan.mesh, in_specs=(of_params, specs), out_specs=split, check_vma=False)
    return mapped(params, values | dict.fromkeys(empty))


def total_bytes(cache: Cache, model: Model, plan: Plan) -> int:
    """Count the bytes of the layers and the shared state on all devices; ``cache`` is one device's part, with whole rows."""
    specs = cache_specs(cache.method, model, plan, cache.kv_dtype)
    parts = jax.tree.map(
        lambda spec, x: num_bytes(x) * plan.groups * (plan.shards if MODEL in spec else 1),
        (specs.layers, specs.shared),
        (cache.layers, cache.shared),
    )
    return sum(jax.tree.leaves(parts))


def _is_cache(x: Any) -> bool:
    return isinstance(x, Cache)


def shape_of(x: Any) -> jax.ShapeDtypeStruct:
    """Return the shape and dtype of an array, without the devices on which it is."""
    kind = jax.typeof(x)
    return jax.ShapeDtypeStruct(kind.shape, kind.dtype, weak_type=kind.weak_type)
