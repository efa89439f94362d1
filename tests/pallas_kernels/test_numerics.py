"""Merged attention against the softmax over the union in float64: the output, and the log of the denominator."""

import jax
import numpy as np
import pytest

from pallas_kernels.numerics import merge_pair, merge_partials, merge_with

MERGES = {
    "pair": lambda out, lse: merge_pair(*merge_pair(out[0], lse[0], out[1], lse[1]), out[2], lse[2]),
    "partials": merge_partials,
    "with": lambda out, lse: merge_with(out[0], lse[0], np.moveaxis(out[1:], 0, 2), np.moveaxis(lse[1:], 0, 2)),
}


@pytest.mark.parametrize("merge", MERGES)
def test_merged_parts_are_attention_to_their_union(merge):
    """Three parts of 5, 0 and 4 slots with logits up to 200; the last query head sees no slot at all."""
    rng = np.random.default_rng(0)
    logits, value = rng.normal(size=(2, 2, 3, 9)) * 80, rng.normal(size=(2, 2, 1, 9, 8))
    logits[:, :, -1] = -np.inf

    def softmax(slots):
        with np.errstate(divide="ignore", invalid="ignore"):
            total = np.logaddexp.reduce(logits[..., slots], axis=-1)
            share = np.exp(logits[..., slots] - total[..., None])
        return np.nan_to_num((share[..., None] * value[..., slots, :]).sum(axis=-2)), total

    parts = [softmax(slots) for slots in (slice(0, 5), slice(5, 5), slice(5, 9))]
    out, lse = (np.stack(x).astype(np.float32) for x in zip(*parts, strict=True))
    with jax.debug_nans(True):
        got = MERGES[merge](out, lse)
    for mine, expected in zip(got, softmax(slice(None)), strict=True):
        np.testing.assert_allclose(mine, expected, rtol=2e-5, atol=2e-5)
    ahead = jax.jvp(MERGES[merge], (out, lse), (np.ones_like(out), np.ones_like(lse)))[1]
    assert all(np.isfinite(x).all() for x in ahead), "what sees no slot has a derivative of 0"
