"""What the strict interpreter finds in kernels that read or write out of range, or use what a mask hides."""

import ast
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.pallas import pl, plt

X = jnp.arange(8, dtype=jnp.float32)


def behind():
    """Half of these indices are behind the array."""
    return jnp.arange(4, 12)


def load(x, out, index, **mask):
    out[...] = plt.load(x.at[index], **mask)


def store(x, out, index, **mask):
    out[...] = jnp.zeros((8,), jnp.float32)
    plt.store(out.at[index], x[jnp.arange(8)], **mask)


ALLOWED = {
    "hidden lanes behind the array": lambda x, out: load(x, out, behind(), mask=behind() < 8, other=0),
    "a slice": lambda x, out: out.__setitem__(pl.ds(x[0].astype(jnp.int32), 8), x[...]),
    "hidden writes behind the array": lambda x, out: store(x, out, behind(), mask=behind() < 8),
    "hidden writes to what others write": lambda x, out: store(x, out, jnp.arange(8) // 4, mask=jnp.arange(8) % 4 == 1),
    "a branch not taken": lambda x, out: (
        out.__setitem__(..., x[...]),
        pl.when(x[0] > 0)(lambda: out.__setitem__(0, x[x[0].astype(jnp.int32) - 1])),
    ),
}
WRONG = {
    "index -1": lambda x, out: load(x, out, jnp.arange(-1, 7)),
    "an index behind the array": lambda x, out: load(x, out, jnp.arange(1, 9)),
    "a hidden lane without other": lambda x, out: load(x, out, jnp.arange(8), mask=jnp.arange(8) < 4),
    "an index that is shown": lambda x, out: load(x, out, behind(), mask=behind() < 9, other=0),
    "what no result uses": lambda x, out: (
        out.__setitem__(..., x[...]),
        out.__setitem__(0, x[0] + 0 * x[x[7].astype(int) + 1]),
    ),
    "a slice behind the array": lambda x, out: out.__setitem__(..., x[pl.ds(x[1].astype(jnp.int32), 8)]),
    "a write at -1": lambda x, out: store(x, out, jnp.arange(-1, 7)),
    "a write that is shown": lambda x, out: store(x, out, behind(), mask=behind() < 9),
    "a sum at -1": lambda x, out: (out.__setitem__(..., x[...]), jax.ref.addupdate(out, (x[0].astype(int) - 1,), x[0])),
    "in a loop": lambda x, out: jax.lax.fori_loop(0, 9, lambda i, _: out.__setitem__(i, x[jnp.minimum(i, 7)]), None),
}


def run(kernel):
    call = triton_call(kernel, grid=(1,), out_shape=jax.ShapeDtypeStruct((8,), jnp.float32), name="tried", interpret=True)
    return np.asarray(call(X))


@pytest.mark.parametrize("kernel", ALLOWED.values(), ids=ALLOWED)
def test_what_a_gpu_allows_is_computed(kernel):
    assert np.isfinite(run(kernel)).all()


@pytest.mark.parametrize("kernel", WRONG.values(), ids=WRONG)
def test_what_a_gpu_does_not_forgive_spoils_the_result(kernel):
    assert np.isnan(run(kernel)).any()


@pytest.mark.parametrize("block", [-1, 2])
def test_a_block_out_of_range_is_refused(block):
    spec = pl.BlockSpec((4,), lambda i: (block,))
    call = triton_call(
        lambda x, out: out.__setitem__(..., x[...]), grid=(1,), in_specs=[spec], out_specs=pl.BlockSpec((4,), lambda i: (0,)),
        out_shape=jax.ShapeDtypeStruct((4,), jnp.float32), name="tried", interpret=True,
    )  # fmt: skip
    with pytest.raises(AssertionError, match="block"):
        call(X)


def test_every_masked_load_says_what_hidden_lanes_read():
    """Of all kernels for GPUs, those in Triton's own language too, which run on none of these machines.

    Two loads need not: hidden lanes of both are never used.
    """
    allowed = {"bucket_score/pallas_triton.py": 1, "kth_select/jax_triton_body.py": 2}
    for path in pathlib.Path(pallas_kernels.__path__[0]).rglob("*.py"):
        calls = [x for x in ast.walk(ast.parse(path.read_text())) if isinstance(x, ast.Call)]
        loads = [x for x in calls if isinstance(x.func, ast.Attribute) and x.func.attr == "load"]
        given = [{at.arg for at in x.keywords} for x in loads]
        bare = [x for x in given if "mask" in x and "other" not in x]
        assert len(bare) == allowed.get("/".join(path.parts[-2:]), 0), f"{path}: got {len(bare)} loads without other"
