"""Attention over lists of pages by the kernel for TPUs, interpreted, against float64 NumPy."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.attend.gather_attention import pallas_tpu
from tests.pallas_kernels.attend.test_gather_attention import pages
from tests.pallas_kernels.cases import SCALE, TPU, close, compiled, one_shape, softmax_attention

SMALL = pallas_tpu.Config(block=128, buffers=2)


@pytest.mark.parametrize(
    ("dtype", "page_size", "listed", "slots", "shared", "group", "dim", "config"),
    one_shape(
        ("float32", 64, 3, 328, False, 4, 128, SMALL),
        ("float32", 16, 9, 200, False, 4, 128, SMALL),
        ("float32", 8, 20, 176, False, 3, 128, pallas_tpu.Config(block=128, buffers=3)),
        ("bfloat16", 16, 5, 96, True, 1, 128, SMALL),
        ("bfloat16", 16, 30, 512, False, 8, 64, SMALL),
        ("bfloat16", 32, 9, 328, False, 4, 128, SMALL),
        ("float32", 32, 6, 256, True, 8, 64, pallas_tpu.Config()),
        ("bfloat16", 64, 5, 520, False, 1, 128, pallas_tpu.Config(block=256, buffers=5)),
        ("bfloat16", 128, 3, 512, False, 4, 256, SMALL),
        ("float32", 256, 3, 900, True, 4, 128, SMALL),
    ),
)
def test_attention_equals_float64(dtype, page_size, listed, slots, shared, group, dim, config):
    """Rows with lists of several lengths, an empty list, holes, a last page that is cut; NaN in all that is not seen."""
    args, position, seen = pages(page_size, page_size, shared, listed, slots=slots, dim=dim, group=group)
    mask = np.array(args[4])
    mask[1, 0] = False
    seen[1, :1] = False
    if shared:
        seen[1] = False
    args = [*(x.astype(dtype) for x in args[:3]), args[3], jnp.asarray(mask)]
    run = compiled(pallas_tpu.gather_attention, scale=SCALE, page_size=page_size, config=config, interpret=TPU)
    out, lse = run(*args, position=position)
    assert out.dtype == dtype and lse.dtype == jnp.float32
    close((out, lse), softmax_attention(*args[:3], seen[:, :, None])[:2], dtype)
    assert not np.any(out[1, 0]) and np.all(lse[1, 0] == -np.inf)


def test_an_empty_list_gives_zeros():
    (query, key, value, slots, mask), position, _ = pages(1, 16, False)
    out, lse = pallas_tpu.gather_attention(
        query, key, value, slots[..., :0], mask[..., :0], scale=SCALE, page_size=16, position=position
    )
    assert out.shape == query.shape and not np.any(out) and np.all(lse == -np.inf)
