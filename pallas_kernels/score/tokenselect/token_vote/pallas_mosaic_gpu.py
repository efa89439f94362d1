"""The vote through Mosaic GPU: two kernels, as for Triton, of which the first reads the keys once.

The first writes the logits, and the log-sum-exp of each of its programs; the second merges these and adds up the heads.
Products are float32, and memory is what limits the first kernel all the same.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.products import CHUNK, Products
from pallas_kernels._mosaic_gpu.team import Team
from pallas_kernels._mosaic_gpu.threads import THREADS

STEPS = 8  # keys of a block that a thread reads a part of; as many are on their way
PROGRAMS = 396  # of the first kernel: three for each streaming multiprocessor of an H100 or H200
MOST_SPLITS = 128  # programs for one KV head
BLOCK = 512  # tokens of a program of the second kernel
TOGETHER = 8  # heads whose logits it loads together
MOST_QUERIES = 16  # of a KV head, in registers
FLOOR = -1e30  # a running maximum below every logit that keeps -inf - (-inf) from arising
TAKES = f"{arrays.HOPPER}, D a power of two from {CHUNK} to {32 * CHUNK}, G up to {MOST_QUERIES}, H * G up to {THREADS}"


def _bounds(stop_ref, start_ref, first, row, tokens):
    start = arrays.scalar(start_ref[0], row) if start_ref else jnp.int32(first)
    return start, jnp.minimum(arrays.scalar(stop_ref, row), tokens)


def _score(query_ref, key_ref, stop_ref, *refs, n, heads, tokens, first, splits):
    # query [L, G, D]; key [L * S, D]; stop [B], and start [B] if it is an array; logits [L, G, S]; lse [L, G, splits].
    *start_ref, logits_ref, lse_ref = refs
    owner, split = lax.axis_index("x"), lax.axis_index("y")
    start, stop = _bounds(stop_ref, start_ref, first, lax.div(owner, heads), tokens)
    begin = lax.div(start, n.rows)  # the first block with a candidate; the row's blocks are shared out evenly
    blocks = lax.div(stop + (n.rows - 1), n.rows) - begin
    share = lax.div(blocks + (splits - 1), splits)
    row, head, writes = n.entries()

    queries, step_row = n.queries(query_ref, owner), n.step_rows()

    def load(step):
        return n.chunks((key_ref,), owner * tokens + jnp.minimum(step * n.rows + step_row, tokens - 1))

    lower, upper = (begin + jnp.minimum(split * share + i, blocks) for i in (0, share))

    def add_block(step, carry):
        total, maximum, chunks = carry
        ahead = load(jnp.minimum(step + 1, upper - 1))
        logits, token = n.multiply(queries, chunks, [key_ref.dtype]), step * n.rows + row
        inside = writes & (token >= start) & (token < stop)
        arrays.store(logits_ref, jnp.where(inside, (owner * n.group + head) * tokens + token, -1), logits)
        logits = jnp.where(inside, logits, -jnp.inf)
        risen = jnp.maximum(maximum, Team.folded(logits, n.each, "max"))
        shares = Team.folded(jnp.exp(logits - arrays.repeated(risen, n.steps)), n.each, "add")
        return total * jnp.exp(maximum - risen) + shares, risen, ahead

    @pl.when(stop > start)
    def _():
        sums = (arrays.spread(x, THREADS * n.each, jnp.float32) for x in (0.0, FLOOR))
        total, maximum, _ = lax.fori_loop(lower, upper, add_block, (*sums, load(lower)))
        _, own, _ = dataclasses.replace(n, steps=1).entries()
        for g in range(n.group):
            mine = own == g
            peak = jnp.max(jnp.where(mine, maximum, FLOOR))
            mass = jnp.sum(jnp.where(mine, total * jnp.exp(maximum - peak), 0.0))
            arrays.put(lse_ref, (owner * n.group + g) * splits + split, peak + jnp.log(mass))


def _merge(logits_ref, lse_ref, stop_ref, *refs, lines, tokens, first, splits):
    # logits [B, H * G, S]; lse [B, H * G, splits]; stop [B], and start [B] if it is an array; vote [B, S].
    *start_ref, vote_ref, shared = refs
    row, begin = lax.axis_index("x"), lax.axis_index("y") * BLOCK
    start, stop = _bounds(stop_ref, start_ref, first, row, tokens)
    token = begin + arrays.counted(BLOCK)
    at = jnp.where(token < tokens, row * tokens + token, -1)
    candidate, some = (token >= start) & (token < stop), (stop > start) & (begin < stop) & (begin + BLOCK > start)

    def add_heads(step, vote):
        """Add up the probabilities of the next heads."""
        found = []
        for line in (step * TOGETHER + i for i in range(TOGETHER)):
            place = jnp.where(candidate & (line < lines), (row * lines + line) * tokens + token, -1)
            found.append((arrays.load(logits_ref, place, -jnp.inf), shared[line]))
        return vote + functools.reduce(jnp.add, [jnp.exp(logit - lse) for logit, lse in found])

    @pl.when(some)
    def _():
        line = arrays.counted(THREADS)
        place = jnp.where(line < lines, (row * lines + line) * splits, -splits)
        parts = [arrays.load(lse_ref, place + i) for i in range(splits)]
        peak = jnp.maximum(functools.reduce(jnp.maximum, parts), FLOOR)
        lse = peak + jnp.log(functools.reduce(jnp.add, [jnp.exp(x - peak) for x in parts]))
        shared[...] = lse
        arrays.meet()
        vote = arrays.spread(0.0, BLOCK, jnp.float32)
        vote = lax.fori_loop(0, -(-lines // TOGETHER), add_heads, vote)
        arrays.store(vote_ref, at, jnp.where(candidate, vote, -jnp.inf))

    @pl.when(~some)  # a block without a candidate reads nothing; its logits were never written
    def _():
        arrays.store(vote_ref, at, arrays.spread(-jnp.inf, BLOCK, jnp.float32))


def token_vote(query, key, *, start, stop):
    """Add up the softmax of every query head over the candidates."""
    batch, heads, group, dim = query.shape
    lists, tokens, n = batch * heads, key.shape[2], Products(group, dim, STEPS)
    splits = max(1, min(PROGRAMS // lists, -(-tokens // n.rows), MOST_SPLITS))
    options = {"tokens": tokens, "splits": splits, "first": start if isinstance(start, int) else 0}
    bounds = [stop] if isinstance(start, int) else [stop, jnp.broadcast_to(start, (batch,))]
    shapes = [jax.ShapeDtypeStruct((lists, group, last), jnp.float32) for last in (tokens, splits)]
    score, merge = (
        functools.partial(_score, n=n, heads=heads, **options),
        functools.partial(_merge, lines=heads * group, **options),
    )
    parts = arrays.program(score, shapes, grid=(lists, splits))(
        query.reshape(lists, group, dim), key.reshape(lists * tokens, dim), *bounds
    )
    out = [jax.ShapeDtypeStruct((batch, tokens), jnp.float32)]
    shared = [plgpu.SMEM((THREADS,), jnp.float32)]
    return arrays.program(merge, out, grid=(batch, -(-tokens // BLOCK)), scratch=shared)(*parts, *bounds)[0]


def check(query, key, *, start, stop):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, head dims and groups than the kernels take."""
    arrays.check_hopper()
    if str(query.dtype) not in ("float32", "bfloat16") or str(key.dtype) not in ("float32", "float16", "bfloat16"):
        raise NotImplementedError(f"got query {query.dtype} and key {key.dtype}, expected floats of at most 32 bits")
    batch, heads, group, dim = query.shape
    if dim & (dim - 1) or not CHUNK <= dim <= 32 * CHUNK:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {CHUNK} to {32 * CHUNK}")
    if group > MOST_QUERIES or heads * group > THREADS or batch * heads * group * key.shape[2] >= 2**31 or not key.shape[2]:
        raise NotImplementedError(f"got query {query.shape} and key {key.shape}, expected at most {THREADS} query heads")
