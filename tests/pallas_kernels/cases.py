"""Implementations, tolerances, programs, inputs and oracles that several kernel tests share."""

import functools
from importlib.util import find_spec

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu

from pallas_kernels.dispatch import Implementation, added_implementation
from pallas_kernels.host import Rows, copy_row
from pallas_kernels.machine import current_machine
from tests.pallas_kernels.operations import public, table

ON_GPU = jax.default_backend() == "gpu"
NEEDS_GPU = pytest.mark.skipif(not ON_GPU, reason=f"needs a GPU, got {jax.default_backend()}")
HOPPER = current_machine().capability == (9, 0)
ON_HOPPER = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0")
MOSAIC = "pallas_mosaic_gpu"
NEEDS_JAX_TRITON = pytest.mark.skipif(find_spec("jax_triton") is None, reason="needs the package jax_triton")
NAMES = ["xla", "interpreted", pytest.param("pallas_triton", marks=NEEDS_GPU)]
# The interpreter keeps the memories of a TPU apart. Fast memory is NaN before a copy has arrived there, and a copy is done
# only when the kernel waits for it. A read outside of an array, or while the array is written, is an error.
TPU = tpu.InterpretParams(detect_races=True)
TOLERANCE = {"float32": 2e-5, "bfloat16": 2e-2}
SCALE = 0.11

every_body = pytest.mark.parametrize("name", NAMES)
thorough = pytest.mark.thorough
# A kernel for TPUs runs interpreted too, on arrays that its check would refuse: they are smaller than a tile.
every_body_and_tpu = pytest.mark.parametrize("name", [*NAMES, "interpreted_tpu"])
every_body_and_thorough_tpu = pytest.mark.parametrize("name", [*NAMES, pytest.param("interpreted_tpu", marks=thorough)])
# For laws that hold for the plain implementation if JAX is right, such as that of `jax.vmap`.
every_kernel = pytest.mark.parametrize("name", [pytest.param("xla", marks=thorough), *NAMES[1:]])
# For such laws of kernels that take long to interpret: by default kernels that take less show them.
on_gpu = pytest.mark.parametrize("name", [*(pytest.param(x, marks=thorough) for x in NAMES[:2]), NAMES[2]])


def in_dtypes(bodies, *dtypes):
    """Parametrise by body and dtype: on a GPU all dtypes, elsewhere the first, and thoroughly the others."""
    made = []
    for name, marks in map(name_and_marks, bodies.args[1]):
        for index, dtype in enumerate(dtypes or ("float32", "bfloat16")):
            made.append(pytest.param(name, dtype, marks=[*marks, *[thorough] * (index > 0 and name != "pallas_triton")]))
    return pytest.mark.parametrize(("name", "dtype"), made)


def name_and_marks(body):
    return (body, ()) if isinstance(body, str) else (body.values[0], body.marks)


every_body_and_dtype = in_dtypes(every_body)


@functools.cache
def implementations(name, back_end="pallas_triton", **options):
    """An operation in plain JAX, by a kernel that runs interpreted with ``options`` such as its `Config`, and on a GPU."""
    function, kernel = public(name), table(name).implementations[back_end].run
    entry = Implementation(functools.partial(kernel, **options, interpret=TPU if back_end == "pallas_tpu" else True))

    def interpreted(*args, **kwargs):
        with added_implementation(name, "interpreted", entry):
            return function(*args, **kwargs, implementation="interpreted")

    return {
        "xla": functools.partial(function, implementation="xla"),
        "interpreted": interpreted,
        "pallas_triton": functools.partial(function, implementation="pallas_triton"),
    }


def on_hopper(operation):
    """The implementation on Mosaic GPU of an operation or its function, to be added to a table.

    Then `conftest` tries it where it tries Triton's. A test with arguments that the kernel refuses is skipped.
    """
    function = operation.run if hasattr(operation, "run") else operation

    def run(*args, **kwargs):
        try:
            return function(*args, **kwargs, implementation=MOSAIC)
        except NotImplementedError as refused:
            pytest.skip(str(refused))

    return {MOSAIC: run}


def on_mosaic_alone(operation):
    """An operation that has no Triton kernel: plain JAX in its place, too."""
    return dict.fromkeys(
        ("xla", "interpreted", "pallas_triton"), functools.partial(operation, implementation="xla")
    ) | on_hopper(operation)


def everywhere(run):
    """Call a body of a table so: then all tests of the module that take "interpreted" try it too (`conftest`)."""
    run.everywhere = True
    return run


def one_shape(*shapes):
    """Values for ``pytest.mark.parametrize``: the first shape always, the others with ``--thorough``."""
    first, *others = shapes
    return [first, *(pytest.param(*(x if isinstance(x, tuple) else (x,)), marks=thorough) for x in others)]


def alike(got, expected, rtol=0.0, atol=0.0):
    """Compare two trees, array by array: equal numbers if nothing else is said."""
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(np.asarray(one, np.float64), np.asarray(other, np.float64), rtol=rtol, atol=atol)


def close(got, expected, dtype):
    """Compare two trees with the tolerance of ``dtype``."""
    alike(got, expected, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype])


def softmax_attention(query, key, value, seen, bias=0.0):
    """Float64: query [..., M, D], key, value [..., N, D], seen [..., M or 1, N] -> out, lse, probabilities."""
    query, key, value = (np.asarray(x, np.float64) for x in (query, key, value))
    logits = np.where(seen, SCALE * query @ np.nan_to_num(key).swapaxes(-1, -2) + bias, -np.inf)
    peak = np.max(logits, axis=-1, keepdims=True, initial=-1e30)
    weight = np.exp(logits - peak)
    total = weight.sum(-1, keepdims=True)
    chance = weight / np.where(total > 0, total, 1)
    with np.errstate(divide="ignore"):
        return chance @ np.nan_to_num(value), (peak + np.log(total))[..., 0], chance


def joined(beside, out, lse):
    """Float64: attention to two disjoint sets, one of which may be empty."""
    parts = [[np.asarray(x, np.float64) for x in part] for part in (beside, (out, lse))]
    peak = np.maximum(np.maximum(parts[0][1], parts[1][1]), -1e30)
    weight = [np.exp(part[1] - peak) for part in parts]
    total = sum(weight)
    sums = sum(np.where(w[..., None] > 0, part[0], 0) * w[..., None] for w, part in zip(weight, parts))
    with np.errstate(divide="ignore"):
        return sums / np.where(total > 0, total, 1)[..., None], peak + np.log(total)


def positioned_cache(seed, group=4, dim=64, length=5, slots=50, dtype="float32", rows=2, heads=2):
    """Random queries and a cache with holes, its slots in no order; empty slots hold NaN."""
    rng = np.random.default_rng(seed)
    query = rng.normal(size=(rows, heads, group, length, dim)).astype(np.float32)
    key, value = rng.normal(size=(2, rows, heads, slots, dim)).astype(np.float32)
    position = np.argsort(rng.random((rows, heads, slots)), axis=-1).astype(np.int32)
    position[rng.random(position.shape) < 0.3] = -1
    position[0, 1] = -1  # an empty cache
    asked = np.sort(rng.integers(0, slots, (rows, length)), axis=-1).astype(np.int32)
    asked[1, 0] = -1  # a padding query
    key[position < 0], value[position < 0] = np.nan, np.nan
    arrays = [jnp.asarray(x, dtype) for x in (query, key, value)]
    return arrays, {"query_position": jnp.asarray(asked), "key_position": jnp.asarray(position)}


def dense_oracle(query, key, value, query_position, key_position, query_first=None):
    asked, held = (np.asarray(query_position)[:, None, None, :, None], np.asarray(key_position)[:, :, None, None])
    first = 0 if query_first is None else np.asarray(query_first)[:, None, None, :, None]
    seen = np.broadcast_to((held >= 0) & (held >= first) & (held <= asked), (*query.shape[:4], key.shape[2]))
    query, key, value = (np.asarray(x, np.float32) for x in (query, key[:, :, None], value[:, :, None]))
    return softmax_attention(query, key, value, seen)


def rotated(x, place, inv_freq):
    """Float64 rotary embedding of x [..., T, D] at ``place`` [T]; the angle is a float32 product, as it is everywhere."""
    angle = np.float64(np.asarray(place, np.float32)[:, None] * np.asarray(inv_freq, np.float32))
    first, second = np.split(np.asarray(x, np.float64), 2, axis=-1)
    cos, sin = np.cos(angle), np.sin(angle)
    return np.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


@functools.cache
def compiled(run, **static):
    """``run`` with static arguments, jitted; tests that ask for the same program share it, so it compiles once."""
    return jax.jit(functools.partial(run, **static))


def one_by_one(run, *calls, rtol=1e-6, atol=1e-6):
    """Compare ``run`` under `jax.vmap` with single calls; each of ``calls`` has the positional arguments of one."""
    together = jax.jit(jax.vmap(run))(*jax.tree.map(lambda *x: jnp.stack(x), *calls))
    for at, arrays in enumerate(calls):
        alike(jax.tree.map(lambda x, at=at: x[at], together), run(*arrays), rtol=rtol, atol=atol)


SINKS = 2  # first slots of which an offloaded cache in these tests has copies


def near(x, cursor, rows, sinks=SINKS, fill=np.nan):
    """The copies [B, H, R, D] on the device of x [B, H, S, D], with R = ``rows``; ``fill`` in rows without a copy."""
    slot, end = np.arange(x.shape[2]), np.asarray(cursor)
    row, x = np.asarray(copy_row(jnp.asarray(slot), sinks, rows)), np.asarray(x)
    kept = np.full((*x.shape[:2], rows, x.shape[3]), fill, x.dtype)
    for b, copied in enumerate((slot < end[:, None]) & ((slot < sinks) | (slot >= end[:, None] - (rows - sinks)))):
        kept[b][:, row[copied]] = x[b][:, copied]
    return jnp.asarray(kept)


def offloaded(cursor):
    """The `Rows` of an offloaded cache for operations that read no row of host memory."""
    return Rows(host=jnp.zeros((len(cursor), 1, 1, 1)), newest=cursor, sinks=SINKS)
