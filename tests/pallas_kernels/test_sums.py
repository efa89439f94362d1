"""Ways to sum over devices: what each can take, and names that are refused. `tests/experiments/eight_devices.py` sums."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels import axes
from pallas_kernels.peer_sum import can_take, peer_sum
from pallas_kernels.sums import SUMS


def like(size, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((1, size), dtype)


@pytest.mark.parametrize(
    ("x", "takes"),
    [
        (like(4096), True),
        (like(4096, jnp.float32), True),
        (like(16 * 4096), True),
        (like(128 * 4096), True),
        (like(129 * 4096), False),  # more blocks than run at once
        (like(512), True),
        (like(128), True),
        (like(64), False),  # fewer than the threads
        (like(200), False),
        (like(4096 + 128), False),  # the last block would be smaller
        (like(0), False),
        (like(4096, jnp.int32), False),
        (like(4096, jnp.float64), False),
    ],
)
def test_what_the_kernel_takes(x, takes):
    assert can_take(x, 2) == takes
    assert SUMS["scatter"].takes(x, 3) == (x.size % 3 == 0)


def test_what_the_kernel_cannot_take_is_refused():
    mesh = jax.make_mesh((1,), ("model",))
    same = jax.sharding.PartitionSpec()
    run = jax.shard_map(lambda x: peer_sum(x, "model"), mesh=mesh, in_specs=same, out_specs=same)
    with pytest.raises(NotImplementedError, match=r"peer_sum sums 2- and 4-byte floats, .*, got int32\[1, 4096\]"):
        jax.eval_shape(run, like(4096, jnp.int32))


def test_an_unknown_way_is_refused():
    with pytest.raises(ValueError, match="unknown sum 'nccl', expected one of psum, gather, scatter, permute, peer"):
        with axes.summed_by("nccl"):
            pass


def test_a_way_changes_nothing_on_one_device():
    x = jnp.arange(3.0)
    with axes.summed_by("peer"):
        assert axes.total(x) is x
