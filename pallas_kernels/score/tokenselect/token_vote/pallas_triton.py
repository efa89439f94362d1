"""The vote as two Pallas Triton kernels that read the keys once.

The votes need each head's softmax denominator, which is known only after all keys are read. At 131,072 tokens the keys are
268 MB (8 KV heads of 128 bfloat16 channels), and two passes would read them twice. The logits of 32 heads are 17 MB, which
stay in the L2 cache of an H100. So the first kernel writes the logits, and the log-sum-exp of each of its programs. The
second kernel merges the log-sum-exps and adds the heads. For a row without a candidate, the programs of the first kernel end
at once, and the second kernel only fills in -inf.

A query of 24 mantissa bits is divided into three bfloat16 parts of 8 bits, which are stacked as rows of one product. Each
product of a part and a bfloat16 key is exact in float32, so nothing is lost against a float32 product. It costs no more
either: a step of the tensor cores has 16 rows, whether they are used or not.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_head_dim
from pallas_kernels._triton.pallas import pl, plt
from pallas_kernels._triton.shared_memory import fitting_block

PROGRAMS = 512  # about four per streaming multiprocessor of an H100 or H200
FLOOR = -1e30  # a running maximum below every logit that keeps -inf - (-inf) from arising


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: tokens per step of the first kernel, a power of two of at least 16.
        splits: programs per KV head, a power of two.
        num_warps: warps per program of the first kernel.
        num_stages: depth of the first kernel's software pipeline.
        merge_block: tokens per program of the second kernel, a power of two.
        merge_warps: warps per program of the second kernel.
    """

    block: int = 64
    splits: int = 1
    num_warps: int = 4
    num_stages: int = 4
    merge_block: int = 512
    merge_warps: int = 4

    def __post_init__(self):
        for field in ("block", "splits", "merge_block"):
            if (value := vars(self)[field]) & (value - 1) or value < (16 if field == "block" else 1):
                raise ValueError(f"token_vote: got {field}={value}, expected a power of two, of at least 16 for the block")


def default_config(lists: int, tokens: int) -> Config:
    """Choose a config for B*H ``lists`` of S ``tokens``: enough programs to fill the GPU, and a block or more for each."""
    blocks = pl.next_power_of_2(pl.cdiv(max(tokens, 1), Config.block))
    fill = pl.next_power_of_2(pl.cdiv(PROGRAMS, lists))
    return Config(splits=max(1, min(fill, blocks, 256)))


def fitted(config: Config, query: jax.Array, key: jax.Array) -> Config:
    """Shrink the config's blocks to fit the GPU's shared memory; raise ``NotImplementedError`` if none fits."""
    group, dim = query.shape[-2:]
    rows, size = pl.next_power_of_2(group), key.dtype.itemsize
    parts = 4 * 2 if key.dtype == jnp.bfloat16 else 4  # bytes of a query's channel in the product
    widened = 4 if key.dtype == jnp.float16 else 0  # bytes of a key's channel in the product, if it is cast

    def needed(block):
        # The pipeline's blocks of keys, and one that is widened; the queries; the logits of a block.
        return block * dim * ((config.num_stages - 1) * size + widened) + parts * rows * dim + 4 * rows * block

    return dataclasses.replace(config, block=fitting_block(config.block, needed))


def _parts(query: jax.Array, rows: int) -> jax.Array:
    """Split a query into parts, bfloat16 [4 * rows, D]: high, middle and low 8 bits of the mantissa, then zeros.

    Args:
        query: float32 [4 * rows, D], the same ``rows`` four times.
        rows: query heads, padded.
    """
    # Every row computes all parts and keeps its own.
    part = jax.lax.broadcasted_iota(jnp.int32, query.shape, 0) // rows
    high = query.astype(jnp.bfloat16)
    rest = query - high.astype(jnp.float32)
    middle = rest.astype(jnp.bfloat16)
    low = (rest - middle.astype(jnp.float32)).astype(jnp.bfloat16)
    low = jnp.where(part == 2, low, jnp.zeros_like(low))
    return jnp.where(part == 0, high, jnp.where(part == 1, middle, low))


def _score_kernel(query_ref, key_ref, stop_ref, *refs, first, group, block, splits):
    # Of one head: query [G, D]; key [S, D]; logits [Gp, Sp]; lse [Gp, splits]. Of all rows: stop [B], and start [B] if it
    # is an array.
    *start_ref, logits_ref, lse_ref = refs
    batch, split = pl.program_id(0), pl.program_id(2)
    start = start_ref[0][batch] if start_ref else first
    stop = jnp.minimum(stop_ref[batch], key_ref.shape[0])

    @pl.when(stop > start)
    def _():
        _score(query_ref, key_ref, logits_ref, lse_ref, start, stop, split, splits, group, block)


def _score(query_ref, key_ref, logits_ref, lse_ref, start, stop, split, splits, group, block):
    """Score one program's share of a head's blocks: write their logits, and the log-sum-exp over its candidates."""
    rows, tokens = logits_ref.shape[0], key_ref.shape[0]
    begin = start // block  # the first block with a candidate; the row's blocks are shared out evenly
    blocks = pl.cdiv(stop, block) - begin
    share = pl.cdiv(blocks, splits)
    exact = key_ref.dtype == jnp.bfloat16
    # Rows that pad the group repeat its last head; the second kernel leaves them out.
    lines = jnp.arange(4 * rows if exact else rows, dtype=jnp.int32) % rows
    query = query_ref[jnp.minimum(lines, group - 1), :].astype(jnp.float32)
    query = _parts(query, rows) if exact else query

    def add_block(step, carry):
        total, maximum = carry
        token = step * block + jnp.arange(block, dtype=jnp.int32)
        keys = key_ref[jnp.minimum(token, tokens - 1), :]  # behind the last key lies memory of another array
        if exact:
            logits = plt.dot(query, keys, trans_b=True)
            logits = jnp.sum(logits.reshape(4, rows, block), axis=0)  # the parts of each query head
        else:
            logits = plt.dot(query, keys.astype(jnp.float32), trans_b=True, precision=jax.lax.Precision.HIGHEST)
        logits_ref[:, pl.ds(step * block, block)] = logits
        # The stored logits of other tokens are masked by the second kernel; here they must not enter the sum.
        inside = (token >= start) & (token < stop)
        logits = jnp.where(inside[None, :], logits, -jnp.inf)
        risen = jnp.maximum(maximum, logits)
        return total * jnp.exp(maximum - risen) + jnp.exp(logits - risen), risen

    # There is a sum and a maximum for each token of a block, so that no step waits for a reduction over threads.
    carry = jnp.zeros((rows, block), jnp.float32), jnp.full((rows, block), FLOOR, jnp.float32)
    lower = begin + jnp.minimum(split * share, blocks)
    upper = begin + jnp.minimum(split * share + share, blocks)
    total, maximum = jax.lax.fori_loop(lower, upper, add_block, carry)
    peak = jnp.max(maximum, axis=1)
    mass = jnp.sum(total * jnp.exp(maximum - peak[:, None]), axis=1)
    lse_ref[:, split] = peak + jnp.log(mass)


def _merge_kernel(logits_ref, lse_ref, stop_ref, *refs, first, group, block):
    # Of one row: logits [H, Gp, Sp]; lse [H, Gp, splits]; vote [S]. Of all rows: stop [B], and start [B] if it is an array.
    *start_ref, vote_ref = refs
    heads, rows, _ = lse_ref.shape
    batch = pl.program_id(0)
    start = start_ref[0][batch] if start_ref else first
    stop = stop_ref[batch]
    base = pl.program_id(1) * block
    token = base + jnp.arange(block, dtype=jnp.int32)
    real = (jnp.arange(rows, dtype=jnp.int32) < group)[:, None]

    def add_heads():
        """Add up the probabilities of all heads for this block, in the order of the heads."""
        vote = jnp.zeros((block,), jnp.float32)
        for head in range(heads):
            parts = lse_ref[head]
            peak = jnp.maximum(jnp.max(parts, axis=1), FLOOR)
            lse = peak + jnp.log(jnp.sum(jnp.exp(parts - peak[:, None]), axis=1))
            weight = jnp.exp(logits_ref[head, :, pl.ds(base, block)] - lse[:, None])
            vote = vote + jnp.sum(jnp.where(real, weight, 0.0), axis=0)
        return jnp.where((token >= start) & (token < stop), vote, -jnp.inf)

    # A block without a candidate reads nothing; its logits were never written.
    some = (stop > start) & (base < stop) & (base + block > start)
    vote = jax.lax.cond(some, add_heads, lambda: jnp.full((block,), -jnp.inf, jnp.float32))
    plt.store(vote_ref.at[token], vote, mask=token < vote_ref.shape[0])


def token_vote(query, key, *, start, stop, config: Config | None = None, interpret=False):
    """Add up the softmax of every query head over the candidates; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, group, dim = query.shape
    tokens, rows = key.shape[2], pl.next_power_of_2(group)
    config = fitted(default_config(batch * heads, tokens), query, key) if config is None else config
    unit = max(config.block, config.merge_block)
    width = pl.cdiv(tokens, unit) * unit  # of the logits, so that blocks of both kernels lie within them
    first = start if isinstance(start, int) else None
    bounds = [stop] if isinstance(start, int) else [stop, start]
    whole = [pl.BlockSpec(x.shape, lambda *_: (0,)) for x in bounds]
    splits = config.splits

    def of_head(*shape):
        return pl.BlockSpec((None, None, *shape), lambda b, h, s: (b, h, 0, 0))

    logits, lse = triton_call(
        functools.partial(_score_kernel, first=first, group=group, block=config.block, splits=splits),
        grid=(batch, heads, splits),
        in_specs=[of_head(group, dim), of_head(tokens, dim), *whole],
        out_specs=[of_head(rows, width), of_head(rows, splits)],
        out_shape=[
            jax.ShapeDtypeStruct((batch, heads, rows, width), jnp.float32),
            jax.ShapeDtypeStruct((batch, heads, rows, splits), jnp.float32),
        ],
        name="token_vote_score",
        num_warps=config.num_warps,
        num_stages=config.num_stages,
        interpret=interpret,
    )(query, key, *bounds)
    return triton_call(
        functools.partial(_merge_kernel, first=first, group=group, block=config.merge_block),
        grid=(batch, pl.cdiv(tokens, config.merge_block)),
        in_specs=[
            pl.BlockSpec((None, heads, rows, width), lambda b, t: (b, 0, 0, 0)),
            pl.BlockSpec((None, heads, rows, splits), lambda b, t: (b, 0, 0, 0)),
            *whole,
        ],
        out_specs=pl.BlockSpec((None, tokens), lambda b, t: (b, 0)),
        out_shape=jax.ShapeDtypeStruct((batch, tokens), jnp.float32),
        name="token_vote_merge",
        num_warps=config.merge_warps,
        interpret=interpret,
    )(logits, lse, *bounds)


def check(query, key, *, start, stop):
    """Raise ``NotImplementedError`` for dtypes, head dims and groups that the kernels do not take."""
    if str(query.dtype) not in ("float32", "bfloat16") or str(key.dtype) not in ("float32", "float16", "bfloat16"):
        raise NotImplementedError(
            f"got query {query.dtype} and key {key.dtype}, "
            "expected a query of float32 or bfloat16 and keys of float32, float16 or bfloat16"
        )
    dim = query.shape[-1]
    check_head_dim(dim)
    fitted(Config(), query, key)
