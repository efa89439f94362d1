"""Rows in host memory: reading, writing, and which of them have copies on the device."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import host
from tests.pallas_kernels.cases import SINKS


def test_sinks_and_a_ring_of_newest_rows_are_kept_near():
    """Sinks, then a ring in which a new slot replaces the slot of the same row."""
    held = [s for s in range(20) if bool(host.has_copy(jnp.int32(s), jnp.int32(11), SINKS, 6))]
    assert held == [0, 1, *range(7, 20)]
    assert [int(host.copy_row(jnp.int32(s), SINKS, 6)) for s in range(11)] == [0, 1, 2, 3, 4, 5, 2, 3, 4, 5, 2]


def test_host_rows_are_read_and_written():
    """Rows, windows and chunks at the end and past the end, and a row without new tokens; the array stays in its memory."""
    x = np.random.default_rng(0).normal(size=(3, 2, 10, 4)).astype(np.float32)
    there = jax.device_put(x, jax.memory.Space.Host)
    slots = jnp.asarray([[3, 9, 0]] * 3, jnp.int32)[:, None]
    np.testing.assert_array_equal(jax.jit(host.take_rows)(there, slots), x[:, :, [3, 9, 0]])
    start = jnp.asarray([0, 8, 5], jnp.int32)
    window = jax.jit(host.take_window, static_argnums=2)(there, start, 4)
    np.testing.assert_array_equal(window[0], x[0, :, :4])
    np.testing.assert_array_equal(window[1, :, :2], x[1, :, 8:])
    np.testing.assert_array_equal(window[2], x[2, :, 5:9])
    new = np.random.default_rng(1).normal(size=(3, 2, 4, 4)).astype(np.float32)
    count = jnp.asarray([3, 4, 0], jnp.int32)
    after = jax.jit(host.put_rows)(there, jnp.asarray(new), start, count)
    assert after.sharding.memory_kind == "pinned_host"
    want = x.copy()
    want[0, :, :3], want[1, :, 8:] = new[0, :, :3], new[1, :, :2]
    np.testing.assert_array_equal(np.asarray(after), want)
    assert host.to_host(there) is there and host.to_device(jnp.asarray(x)).sharding.memory_kind == "device"


def test_consecutive_rows_of_one_row_and_of_several():
    x = np.random.default_rng(0).normal(size=(3, 2, 10, 4)).astype(np.float32)
    for rows in (1, 3):
        for first, size in ((0, 4), (8, 4), (0, 10), (0, 12)):
            slots = np.broadcast_to(first + np.arange(size, dtype=np.int32), (rows, size))
            inside = min(size, 10 - first)
            got = jax.jit(host.take_between)(x[:rows], slots)
            assert got.shape == (rows, 2, size, 4)
            np.testing.assert_array_equal(got[:, :, :inside], x[:rows, :, first : first + inside])


def test_slices_of_host_memory_refuse_a_mapped_axis():
    """Also in a jitted program, and whichever array is mapped; what is not mapped runs."""
    there = host.to_host(jnp.zeros((2, 1, 20, 4)))
    new, start = jnp.ones((2, 1, 3, 4)), jnp.asarray([1, 2], jnp.int32)
    programs = {
        "put_chunk": lambda x, new, start: host.put_chunk(x, new, 5),
        "put_rows": lambda x, new, start: host.put_rows(x, new, start, start),
        "take_window": lambda x, new, start: host.take_window(x, start, 4),
    }
    for name, program in programs.items():
        used = {"put_chunk": (0, 1), "take_window": (0, 2)}.get(name, (0, 1, 2))
        for at in used:
            given = [there, new, start]
            given[at] = jnp.stack([jax.device_put(given[at], jax.memory.Space.Device)] * 3)
            if at == 0:
                given[0] = host.to_host(given[0])
            axes = [0 if i == at else None for i in range(3)]
            for run in (program, jax.jit(program)):
                with pytest.raises(ValueError, match="do not run under jax.vmap, got a mapped axis of 3; put what is mapped"):
                    jax.eval_shape(jax.vmap(run, axes), *given)
        mapped = jax.vmap(lambda y: program(there, new, start).sum() + y)  # noqa: B023
        assert jax.eval_shape(mapped, jnp.zeros(3)).shape == (3,)
