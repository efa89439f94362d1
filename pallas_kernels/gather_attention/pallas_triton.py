"""Decode attention over index lists as one Pallas Triton kernel: no gathered copy of the cache.

Grid (B*H, splits): each program walks a contiguous share of one list and writes a float32 partial with its
log-sum-exp (FlashDecoding's split-K); ``merge_partials`` joins them. Only what lowers on JAX 0.11.2 and 0.12
and also runs interpreted is used: indices are clamped, rows are read by plain ``ref[index, :]``, then masked
by ``where``.
"""

from __future__ import annotations

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels.numerics import finite_or_zero, merge_partials, product_precision

PROGRAMS = 264  # two per streaming multiprocessor of an H100 or H200
MOST_SPLITS = 16  # enough for 2048 slots at B*H = 8; each further partial is more to merge


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is cut.

    Attributes:
        block: listed slots read per step, a power of two of at least 16.
        splits: programs per list.
        num_warps: warps per program.
        num_stages: depth of Triton's software pipeline.
    """

    block: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 3

    def __post_init__(self):
        if self.block < 16 or self.block & (self.block - 1):
            raise ValueError(f"gather_attention: got block={self.block}, expected a power of two of at least 16")
        if self.splits < 1:
            raise ValueError(f"gather_attention: got splits={self.splits}, expected at least 1")


def default_config(lists: int, listed: int) -> Config:
    """Config for B*H ``lists`` of K ``listed`` slots: enough splits to fill the GPU, none idle."""
    blocks = pl.cdiv(max(listed, 1), Config.block)
    steps = pl.cdiv(blocks, min(pl.cdiv(PROGRAMS, lists), MOST_SPLITS, blocks))
    return Config(splits=pl.cdiv(blocks, steps))


def _kernel(query_ref, key_ref, value_ref, index_ref, *refs, scale, block, steps):
    # query [Gp, D]; key and value [S, D]; index and bias [Kp]; out [Gp, D]; lse [Gp]; bias is optional
    *bias_ref, out_ref, lse_ref = refs
    query = query_ref[...]
    precision = product_precision(query.dtype)
    first = pl.program_id(1) * steps

    def add_block(step, carry):
        total, maximum, out = carry
        at = pl.ds((first + step) * block, block)
        index = index_ref[at]
        listed = index >= 0
        row = jnp.maximum(index, 0)  # a negative index would read out of bounds, it does not wrap
        keys = jnp.where(listed[:, None], key_ref[row, :], 0)
        logits = plt.dot(query, keys, trans_b=True, precision=precision) * scale
        if bias_ref:
            logits = logits + bias_ref[0][at][None, :]
        logits = jnp.where(listed[None, :], logits, -jnp.inf)
        risen = jnp.maximum(maximum, jnp.max(logits, axis=1))
        shift = finite_or_zero(risen)
        decay = jnp.exp(maximum - shift)
        weight = jnp.exp(logits - shift[:, None])
        values = jnp.where(listed[:, None], value_ref[row, :], 0)
        added = plt.dot(weight.astype(values.dtype), values, precision=precision)
        return total * decay + jnp.sum(weight, axis=1), risen, out * decay[:, None] + added

    group = query.shape[0]
    carry = (
        jnp.zeros((group,), jnp.float32),
        jnp.full((group,), -jnp.inf, jnp.float32),
        jnp.zeros(query.shape, jnp.float32),
    )
    total, maximum, out = jax.lax.fori_loop(0, steps, add_block, carry)
    out_ref[...] = out / jnp.where(total > 0, total, 1)[:, None]
    lse_ref[...] = finite_or_zero(maximum) + jnp.log(total)


def _call(kernel, config: Config, interpret: bool, **kwargs):
    """The one place that enters the Triton back end of Pallas, which JAX deprecates but replaces by
    nothing that gathers rows on Hopper. The warning comes while lowering: inside this call when it runs
    eagerly, after it under an outer ``jit``, where Python's default filters hide it.
    """
    call = pl.pallas_call(
        kernel,
        compiler_params=plt.CompilerParams(num_warps=config.num_warps, num_stages=config.num_stages),
        interpret=interpret,
        **kwargs,
    )

    def run(*args):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)
            return call(*args)

    return run


def gather_attention(query, key, value, slots, mask, *, scale, bias, config: Config | None = None, interpret=False):
    """See ``pallas_kernels.gather_attention.gather_attention``; ``interpret=True`` runs anywhere, slowly."""
    rows, heads, group, dim = query.shape
    lists, listed, padded_group = rows * heads, slots.shape[2], pl.next_power_of_2(group)
    config = default_config(lists, listed) if config is None else config
    steps = max(1, pl.cdiv(listed, config.block * config.splits))
    short = steps * config.block * config.splits - listed

    # One operand says both which row and whether: -1 is masked, or padding up to whole blocks.
    index = jnp.where(mask, jnp.clip(slots, 0, key.shape[2] - 1), -1).reshape(lists, listed)
    operands = [
        jnp.pad(query, [(0, 0), (0, 0), (0, padded_group - group), (0, 0)]).reshape(lists, padded_group, dim),
        key.reshape(lists, -1, dim),
        value.reshape(lists, -1, dim),
        jnp.pad(index, [(0, 0), (0, short)], constant_values=-1),
    ]
    if bias is not None:
        operands.append(jnp.pad(bias.reshape(lists, listed), [(0, 0), (0, short)]))
    out, lse = _call(
        functools.partial(_kernel, scale=scale, block=config.block, steps=steps),
        config,
        interpret,
        grid=(lists, config.splits),
        # A block spec only offsets a pointer here: no block is copied.
        in_specs=[pl.BlockSpec((None, *x.shape[1:]), lambda i, j, n=x.ndim: (i,) + (0,) * (n - 1)) for x in operands],
        out_specs=[
            pl.BlockSpec((None, None, padded_group, dim), lambda i, j: (j, i, 0, 0)),
            pl.BlockSpec((None, None, padded_group), lambda i, j: (j, i, 0)),
        ],
        out_shape=[
            jax.ShapeDtypeStruct((config.splits, lists, padded_group, dim), jnp.float32),
            jax.ShapeDtypeStruct((config.splits, lists, padded_group), jnp.float32),
        ],
        name="gather_attention",
    )(*operands)
    out, lse = merge_partials(out, lse)
    out = out[:, :group].astype(query.dtype).reshape(query.shape)
    return out, lse[:, :group].reshape(rows, heads, group)


def check(query, key, value, slots, mask, *, scale, bias):
    """Raise ``NotImplementedError`` for dtypes and head dims the kernel does not take."""
    dtypes = {str(x.dtype) for x in (query, key, value)}
    if dtypes not in ({"bfloat16"}, {"float16"}, {"float32"}):
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected one of bfloat16, float16, float32 for all")
    dim = query.shape[-1]
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
