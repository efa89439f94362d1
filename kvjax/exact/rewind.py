"""Take back the newest tokens of a cache in which nothing has moved since they came: their slots are empty again."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.cache.storage import LayerStorage, put_tokens
from kvjax.protocol.typing import EMPTY


def rewound[Storage: LayerStorage](cache: Storage, count: Array, most: int) -> Storage:
    """Empty the slots of the ``count`` int32 [B] newest tokens of each row, and move the cursor back to the first of them.

    Keys and values stay where they are, so nothing large is copied. Later tokens overwrite them.

    Args:
        cache: its newest tokens are in the slots before the cursor, the same in every head. If it is offloaded, host memory
            has all tokens before them.
        count: tokens to take back, int32 [B].
    """
    changed: Any = cache
    if cache.older is not None:  # the newest tokens are in the part whose keys are whole
        newer = rewound(vars(cache)["newer"], count, most)
        return dataclasses.replace(changed, newer=newer)
    back = jnp.arange(1, most + 1, dtype=jnp.int32)[None]
    slot = cache.here[:, None] - back
    slot = jnp.where((back <= count[:, None]) & (slot >= 0), slot, cache.num_slots)  # past the end, so it is dropped
    empty = jnp.full((*cache.position.shape[:2], most), EMPTY, jnp.int32)
    position = put_tokens(cache.position, empty, slot, None)
    changed = dataclasses.replace(changed, position=position, cursor=cache.cursor - count)
    return changed if cache.rows is None else changed.reread(count, most)
