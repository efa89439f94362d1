"""Small arguments of the operations that are differentiable and have no timed shapes."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from pallas_kernels.choose.sentence_cut import CLOSES
from pallas_kernels.formats.shapes import normal, orthogonal, packed, positions

B, H, G, S, D = 1, 2, 4, 16, 32
ROWS = (B, H)
SPACE = (B,)


def arguments(name, key):
    """Draw arrays by the names of an operation's arguments, and its static arguments."""
    keys = iter(jax.random.split(key, 16))

    def floats(*shape):
        return normal(next(keys), *shape, dtype=jnp.float32)

    def whole(value, *shape):
        return jnp.full(shape or SPACE, value, jnp.int32)

    def stored():
        return {
            "key": floats(*ROWS, S, D),
            "value": floats(*ROWS, S, D),
            "position": positions(ROWS, S),
            "cursor": whole(S),
        }

    angles = jnp.exp(-jnp.arange(D // 2, dtype=jnp.float32))
    heads, token = (*ROWS, G, D), whole(S - 1)
    match name:
        case "add_norm":
            return {"x": floats(3, D), "update": floats(3, D), "scale": floats(D)}, {"eps": 1e-5}
        case "norm_prepared":
            return {"x": floats(3, D), "update": floats(3, D), "scale": floats(D)}, {"eps": 1e-5, "bits": 8}
        case "causal_attention":
            return {"query": floats(*ROWS, G, S, D), "key": floats(*ROWS, S, D), "value": floats(*ROWS, S, D)}, {}
        case "cluster_estimate":
            arrays = {"logits": floats(*ROWS, G, S), "value_sum": floats(*ROWS, S, D), "size": whole(3, *ROWS, S)}
            return arrays | {"chosen": whole(1, *ROWS, S) > 0, "left_out": positions(ROWS, S) < 3}, {}
        case "cluster_rank":
            arrays = {
                "query": floats(*heads),
                "centroid": floats(*ROWS, S, D),
                "size": whole(2, *ROWS, S),
                "used": whole(S),
            }
            shares = {"best": jnp.float32(0.3), "considered": jnp.float32(0.6)}
            return arrays | shares, {"scale": 0.1, "capacity": 8, "room": 12}
        case "chunk_query":
            arrays = {"query": floats(*ROWS, G, 3, D), "real": whole(2), "first": whole(5), "inv_freq": angles}
            return arrays, {"num_local": 8}
        case "step_query":
            arrays = {
                "query": floats(*heads),
                "last": floats(*heads),
                "ready": jnp.ones((B,), bool),
                "inv_freq": angles,
            }
            arrays |= {"hits": whole(0), "refreshes": whole(0), "cursor": whole(S), "position": token}
            return arrays | {"budget": jnp.int32(4), "theta": jnp.float32(0.9)}, {"num_sink": 2, "num_local": 4}
        case "rotated_rows":
            arrays = {"key": floats(*ROWS, S, D), "value": floats(*ROWS, S, D)}
            return arrays | {"token": positions(ROWS, 5)[:, 0], "inv_freq": angles}, {}
        case "evict_alike":
            total = {"total": whole(0, *ROWS, 2, D), "done": whole(0), "newest": token}
            return stored() | total, {"budget": S - 1}
        case "evict_token":
            return stored() | {"score": floats(*ROWS, S)}, {"budget": S - 1}
        case "pack_token":
            buffer = {
                "key": floats(*ROWS, S, D),
                "value": floats(*ROWS, S, D),
                "stored": positions(ROWS, S),
                "place": token,
            }
            bases = {side: orthogonal(next(keys), *ROWS, 1, dim=D) for side in ("basis_key", "basis_value")}
            store = (array for n in (S, S, S // 4) for array in packed(next(keys), (*ROWS, n), D, 8))
            return buffer | bases | {"packed": whole(0), "last": whole(0), "store": (*store,)}, {
                "granule": 4,
                "channels": D,
            }
        case "sentence_add":
            sums = floats(*heads), floats(*ROWS, D), whole(2, *ROWS)
            state = whole(0, *ROWS, S), floats(*ROWS, 4, D), whole(1, *ROWS), *sums
            arrays = {"key": floats(*ROWS, S, D), "query": floats(*heads), "cursor": whole(S)}
            return arrays | {"event": whole(CLOSES), "state": state}, {}
        case "store_buckets":
            arrays = {
                "key": floats(*ROWS, S, D),
                "value": floats(*ROWS, S, D),
                "active": token[:, None],
                "cursor": whole(S),
            }
            tables = {
                "planes": floats(3, 4, D),
                "ids": jnp.zeros((*ROWS, 1, 3 * 16), jnp.uint8),
                "norm": floats(*ROWS, S),
            }
            return arrays | tables, {}
        case "store_partial":
            arrays = {"key": floats(*ROWS, S, D), "position": positions(ROWS, S), "cursor": whole(S), "place": token}
            partial = {"matrix": floats(*ROWS, D, 6), "query": floats(*heads), "partial": floats(*ROWS, 6, S)}
            return arrays | partial | {"last": floats(*heads)}, {}
        case "store_token":
            arrays = {"key": floats(*ROWS, D), "value": floats(*ROWS, D), "place": token, "cursor": token}
            cache = {"cache_key": floats(*ROWS, S, D), "cache_value": floats(*ROWS, S, D)}
            return arrays | cache | {
                "cache_position": positions(ROWS, S),
                "query": floats(*heads),
                "inv_freq": angles,
            }, {}
        case "widen_page":
            bounds = {"low": floats(*ROWS, S // 4, D), "high": floats(*ROWS, S // 4, D)}
            arrays = {"key": floats(*ROWS, S, D), "position": positions(ROWS, S), "cursor": whole(S)}
            return arrays | bounds, {"page_size": 4}
    raise ValueError(f"arguments: got {name!r}, expected a differentiable operation without timed shapes")
