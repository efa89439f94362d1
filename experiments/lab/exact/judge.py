"""The time of the judge's attention over several tokens beside one token's, on one device or over slots on several."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import AxisType, PartitionSpec

from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.timed import Say
from experiments.records import Results
from experiments.speed.device_time import loop_seconds
from experiments.speed.settings import MODELS
from kvjax.attention.over_cache import attend_stored
from kvjax.cache import PlainCache
from kvjax.cache.divided import PartCache
from pallas_kernels import axes

_QUERIES = 1, 2, 6, 8


def measure_judge(settings: ExactSettings, results: Results, say: Say) -> None:
    """Time a layer's attention over a cache of random keys, for one query of a row and for several.

    With ``--slot-parts N`` the slots of each row are divided over N devices, and each result crosses between them.
    """
    config, parts = MODELS[settings.shape](), settings.slot_parts
    if parts > len(jax.devices()):
        raise ValueError(f"judge needs {parts} devices for slot_parts={parts}, got {len(jax.devices())}")
    for length, batch in settings.sized():
        one = None
        for queries in _QUERIES:
            identity = {
                "name": "judge", "model": settings.shape, "length": length, "batch": batch, "parts": parts,
                "queries": queries,
            }  # fmt: skip
            if (found := results.find(identity)) is not None:
                one = one or found["value"]
                continue
            seconds = loop_seconds(_attention(parts), *_operands(config, length, batch, queries, parts)).median
            one = one or seconds
            results.add({**identity, "value": seconds, "unit": "s", "over_one": seconds / one}, identity)
            say(
                f"judge {batch} x {length} over {parts}: {queries} queries {1e6 * seconds:.1f} us, {seconds / one:.3f} of one"
            )


def _operands(config: Any, length: int, batch: int, queries: int, parts: int) -> tuple[Array, ...]:
    """Make a query, keys, values, the positions of slots, cursors, and the positions of queries, as `_attend` takes them."""
    heads, group = config.num_kv_heads, config.num_q_heads // config.num_kv_heads
    shape = batch, heads, length, config.head_dim
    put: Any = lambda x, spec: x  # noqa: E731
    if parts > 1:
        mesh = _mesh(parts)
        put = lambda x, spec: jax.device_put(x, jax.NamedSharding(mesh, spec))  # noqa: E731
    slots = PartitionSpec(None, None, axes.SLOTS)

    def normal(seed: int, *shape: int) -> Array:
        return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(config.dtype)

    make = jax.jit(normal, static_argnums=range(1, 1 + len(shape)))
    position = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), shape[:3])
    newest = jnp.broadcast_to(jnp.arange(length - queries, length, dtype=jnp.int32), (batch, queries))
    return (
        put(normal(0, batch, heads, group, queries, config.head_dim), PartitionSpec()),
        put(make(1, *shape), slots),
        put(make(2, *shape), slots),
        put(position, slots),
        put(jnp.full((batch,), length, jnp.int32), PartitionSpec()),
        put(newest, PartitionSpec()),
    )


def _mesh(parts: int) -> jax.sharding.Mesh:
    return jax.make_mesh((parts,), (axes.SLOTS,), axis_types=(AxisType.Auto,), devices=jax.devices()[:parts])


def _attend(parts: int, query: Array, key: Array, value: Array, position: Array, cursor: Array, newest: Array) -> Array:
    stored = {"key": key, "value": value, "position": position, "cursor": cursor}
    cache = PlainCache(**stored) if parts == 1 else PartCache(**stored, parts=parts)
    return attend_stored(query, cache, newest, observes=False)[0]


@functools.cache
def _attention(parts: int) -> Any:
    """Return the attention as a function of `_operands`."""
    run = functools.partial(_attend, parts)
    if parts == 1:
        return run
    same, slots = PartitionSpec(), PartitionSpec(None, None, axes.SLOTS)
    specs = same, slots, slots, slots, same, same
    return jax.shard_map(run, mesh=_mesh(parts), in_specs=specs, out_specs=same, check_vma=False)
