"""`gather_attention` of bfloat16 queries over codes against float64: the kernel that reads codes in pairs, mixed ones too."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.gather_attention import code_kernel, gather_attention, pallas_triton
from pallas_kernels.formats.quantised import Quantised, quantise, whole
from pallas_kernels.host import Rows
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels.cases import NAMES, SCALE, close, compiled, implementations, softmax_attention

CONFIG = pallas_triton.Config(block=16, splits=2)
INT8, FLOAT8, PLAIN = ("int8",) * 2, ("float8_e4m3fn",) * 2, ("int4",) * 2  # keys, values
MIXED8, MIXED4 = (("int8", True), ("int4", True)), (("int4", True), ("int4", True))


def run_of(name, **static):
    return compiled(implementations("gather_attention", config=CONFIG)[name], **static)


def drawn(kinds, group=3, dim=64, listed=37, slots=96, seed=0):
    """A query, codes whose scales are NaN where no list asks for them, lists with masked entries, and the float64 cache."""
    rng = np.random.default_rng(seed)
    query = jnp.asarray(rng.normal(size=(2, 2, group, dim)), "bfloat16")
    items = np.argsort(rng.random((2, 2, slots)), axis=-1)[..., :listed].astype(np.int32)
    mask = rng.random(items.shape) < 0.7
    mask[0, 1] = False  # an empty list
    seen = np.zeros((2, 2, slots), bool)
    for at in np.ndindex(2, 2):
        seen[at][items[at][mask[at]]] = True
    stored, exact = [], []
    for kind in kinds:
        numbers = rng.normal(size=(2, 2, slots, dim)) * np.exp(rng.normal(size=(2, 2, slots, 1)) / 2)
        coded = quantise(jnp.asarray(numbers, jnp.float32), *([kind] if isinstance(kind, str) else kind))
        exact.append(np.asarray(whole(coded), np.float64))
        scale = jnp.where(jnp.asarray(seen), coded.scale, jnp.nan)
        stored.append(dataclasses.replace(coded, scale=scale, of="bfloat16"))
    return query, stored, jnp.asarray(items), jnp.asarray(mask), exact


def expected(query, exact, items, mask, bias=0.0):
    rows = [np.take_along_axis(x, np.asarray(items)[..., None], 2) for x in exact]
    return softmax_attention(query, *rows, np.asarray(mask)[:, :, None], bias)[:2]


@pytest.mark.parametrize("name", NAMES[1:])
@pytest.mark.parametrize(
    ("kinds", "group", "dim"),
    [
        (INT8, 3, 32),
        (MIXED8, 4, 64),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((MIXED4, 1, 128), (PLAIN, 12, 64), (FLOAT8, 8, 64))),
        *(pytest.param(*x, marks=pytest.mark.thorough) for x in ((MIXED8, 17, 256), (MIXED4, 4, 64))),
    ],
)
def test_attention_over_codes_equals_float64(name, kinds, group, dim):
    query, stored, items, mask, exact = drawn(kinds, group, dim)
    assert code_kernel.takes(query, *stored, None, None)
    got = run_of(name, scale=SCALE)(query, *stored, items, mask)
    close(got, expected(query, exact, items, mask), "bfloat16")
    assert not np.any(got[0][0, 1]) and np.all(got[1][0, 1] == -np.inf)


@pytest.mark.parametrize("name", NAMES[1:])
def test_bias_logits_and_parts_beside_the_list(name):
    """Keys and values are mixed; the logits and the parts beside belong to numbers that are not."""
    query, stored, items, mask, exact = drawn(MIXED4)
    rng = np.random.default_rng(1)
    bias = rng.normal(size=(2, 2, 3, 37)).astype(np.float32)
    bias[1, 0, 2] = -np.inf
    out, lse = rng.normal(size=(2, 2, 1, 3, 64)).astype(np.float32), rng.normal(size=(2, 2, 1, 3)).astype(np.float32)
    run = run_of(name, scale=SCALE, logits=True)
    got, total, logits = run(
        query, *stored, items, mask, bias=jnp.asarray(bias), partials=(jnp.asarray(out), jnp.asarray(lse))
    )
    listed, own = expected(query, exact, items, mask, bias.astype(np.float64))
    whole_lse = np.logaddexp(own, lse[:, :, 0])
    shares = [np.exp(x - whole_lse)[..., None] for x in (own, lse[:, :, 0])]
    close(got, shares[0] * listed + shares[1] * out[:, :, 0], "bfloat16")
    close(total, whole_lse, "bfloat16")
    keys = np.take_along_axis(exact[0], np.asarray(items)[..., None], 2)
    want = SCALE * np.asarray(query, np.float64) @ keys.swapaxes(2, 3) + bias
    close(logits, np.where(np.asarray(mask)[:, :, None], want, -np.inf), "bfloat16")


@pytest.mark.parametrize("name", NAMES[1:])
def test_pages_with_empty_slots(name):
    query, stored, _, _, exact = drawn(MIXED8, seed=2)
    rng, page = np.random.default_rng(2), 10  # the last page is cut
    items = np.argsort(rng.random((2, 2, 10)), axis=-1)[..., :6].astype(np.int32)
    items[..., 0] = np.where((items == 9).any(-1), items[..., 0], 9)
    mask = rng.random(items.shape) < 0.8
    position = np.where(rng.random((2, 2, 96)) < 0.8, 1, -1).astype(np.int32)
    slots = items[..., None] * page + np.arange(page)
    held = (mask[..., None] & (slots < 96)).reshape(2, 2, -1)
    slots = np.minimum(slots, 95).reshape(2, 2, -1)
    held &= np.take_along_axis(position, slots, 2) >= 0
    stored = [
        dataclasses.replace(quantise(jnp.asarray(x, jnp.float32), *kind), of="bfloat16")
        for x, kind in zip(exact, MIXED8, strict=True)
    ]
    stored = [dataclasses.replace(x, scale=jnp.where(jnp.asarray(position) < 0, jnp.nan, x.scale)) for x in stored]
    run = run_of(name, scale=SCALE, page_size=page)
    got = run(query, *stored, jnp.asarray(np.where(mask, items, 2**30)), jnp.asarray(mask), position=jnp.asarray(position))
    close(got, expected(query, exact, slots, held), "bfloat16")


def test_other_calls_run_the_kernel_that_casts_codes():
    query, (key, value), items, mask, _ = drawn(MIXED8)
    assert not code_kernel.takes(query.astype("float32"), key, value, None, None)
    assert not code_kernel.takes(query, key, value, items, None)
    assert not code_kernel.takes(query, key, value, None, Rows(host=items, newest=items, sinks=0))
    narrow = Quantised(codes=value.codes[..., :16], scale=value.scale, of="bfloat16", packed=True)
    assert not code_kernel.takes(query[..., :32], key, narrow, None, None)
    odd = [dataclasses.replace(x, codes=x.codes[:1, :1, :95], scale=x.scale[:1, :1, :95]) for x in (key, value)]
    assert not code_kernel.takes(query[:1, :1], *odd, None, None)  # scales are read in pairs


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_mixing_takes_no_launch_beside_the_kernel(dtype):
    query, stored, items, mask, _ = drawn(MIXED8)
    stored = [dataclasses.replace(x, of=dtype) for x in stored]
    with assume_machine("gpu", (9, 0)):
        traced = jax.make_jaxpr(lambda *args: gather_attention(*args, scale=SCALE))(query.astype(dtype), *stored, items, mask)
    names = [x.primitive.name for x in _equations(traced.jaxpr)]
    assert names.count("pallas_call") == 1
    assert names.count("dot_general") == (0 if dtype == "bfloat16" else 2)


def _equations(jaxpr):
    """The equations outside of kernels."""
    for equation in jaxpr.eqns:
        yield equation
        inner = equation.params.get("jaxpr", equation.params.get("call_jaxpr"))
        if inner is not None and equation.primitive.name != "pallas_call":
            yield from _equations(inner.jaxpr)
