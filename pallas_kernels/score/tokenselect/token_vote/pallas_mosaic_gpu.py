"""The vote through Mosaic GPU: two kernels, as for Triton, of which the first reads the keys once.

The first writes the logits to base 2, and the log-sum-exp of each of its warps; the second merges these and adds up the
heads. Bfloat16 keys are multiplied on tensor cores, others in float32.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, exact_products
from pallas_kernels._mosaic_gpu.exact_products import ExactProducts
from pallas_kernels._mosaic_gpu.pallas import pl, plgpu
from pallas_kernels._mosaic_gpu.products import CHUNK, Products
from pallas_kernels._mosaic_gpu.team import Team
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.numerics import LOG2_E

STEPS = 8  # keys of a block that a thread reads a part of, if products are float32
WARPS = 4  # of a program
AHEAD = 2  # blocks that a thread of the first kernel has on their way
PROGRAMS = 264  # of the first kernel: two for each streaming multiprocessor of an H100 or H200
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
    # query [L, G, D]; key [L * S, D]; stop [B], and start [B] if it is an array; logits [L, G, W]; lse [L, G, parts].
    *start_ref, logits_ref, lse_ref = refs
    owner, split, rows = lax.axis_index("x"), lax.axis_index("y"), AHEAD * n.rows
    start, stop = _bounds(stop_ref, start_ref, first, lax.div(owner, heads), tokens)
    begin = lax.div(start, rows)  # the first step with a candidate; the row's steps are shared out evenly
    steps = lax.div(stop + (rows - 1), rows) - begin
    row, head, writes = n.entries()
    line = jnp.where(writes, (owner * n.group + head) * logits_ref.shape[2] + row, -1)

    queries, step_row = n.queries(query_ref, owner), n.step_rows()

    def load(step, block):
        first = step * rows + block * n.rows
        return n.chunks((key_ref,), owner * tokens + jnp.minimum(first + step_row, tokens - 1))

    lower, upper = (begin + lax.div(steps * i, splits) for i in (split, split + 1))

    def add_blocks(step, carry):
        total, maximum, *blocks = carry
        following = jnp.minimum(step + 1, upper - 1)
        for block in range(AHEAD):
            logits, first = n.multiply(queries, blocks[block], [key_ref.dtype]) * LOG2_E, step * rows + block * n.rows
            blocks[block] = load(following, block)
            arrays.store(logits_ref, jnp.where(writes, line + first, -1), logits)
            inside = writes & (first + row >= start) & (first + row < stop)
            logits = jnp.where(inside, logits, -jnp.inf)
            risen = jnp.maximum(maximum, Team.folded(logits, n.each, "max"))
            shares = Team.folded(jnp.exp2(logits - arrays.repeated(risen, n.steps)), n.each, "add")
            total, maximum = total * jnp.exp2(maximum - risen) + shares, risen
        return total, maximum, *blocks

    @pl.when(stop > start)
    def _():
        sums = (arrays.spread(x, THREADS * n.each, jnp.float32) for x in (0.0, FLOOR))
        total, maximum, *_ = lax.fori_loop(lower, upper, add_blocks, (*sums, *(load(lower, x) for x in range(AHEAD))))
        total, maximum = _over_lanes(total, maximum, n.sharing)
        thread, (_, own, _) = arrays.counted(THREADS * n.each) & (THREADS - 1), dataclasses.replace(n, steps=1).entries()
        place = ((owner * n.group + own) * splits + split) * WARPS + (thread >> 5)
        first = ((thread & sum(n.sharing)) < 1) & (own < n.group)
        arrays.store(lse_ref, jnp.where(first, place, -1), maximum + jnp.log2(total))


def _over_lanes(total, maximum, distances):
    """Join denominators of lanes that are so far apart, each of them relative to its ``maximum``."""
    for distance in distances:
        other, more = (arrays.exchanged(x, distance) for x in (maximum, total))
        risen = jnp.maximum(maximum, other)
        total, maximum = total * jnp.exp2(maximum - risen) + more * jnp.exp2(other - risen), risen
    return total, maximum


def _merge(logits_ref, lse_ref, stop_ref, *refs, tokens, first):
    # logits [B, H * G, W]; lse [B, H * G, parts]; stop [B], and start [B] if it is an array; vote [B, S].
    *start_ref, vote_ref, shared = refs
    row, begin = lax.axis_index("x"), lax.axis_index("y") * BLOCK
    start, stop = _bounds(stop_ref, start_ref, first, row, tokens)
    entry, (_, lines, width), parts = arrays.counted(BLOCK), logits_ref.shape, lse_ref.shape[2]
    token = begin + 4 * (entry & (THREADS - 1)) + (entry >> 7)
    at = jnp.where(token < tokens, row * tokens + token, -1)
    candidate, some = (token >= start) & (token < stop), (stop > start) & (begin < stop) & (begin + BLOCK > start)
    four = jnp.minimum(begin + 4 * arrays.counted(THREADS), width - 4)

    def add_heads(step, vote):
        """Add up the probabilities of the next heads."""
        found = []
        for line in (step * TOGETHER + i for i in range(TOGETHER)):
            place = (row * lines + jnp.minimum(line, lines - 1)) * width + four
            found.append((arrays.load_run(logits_ref, place, 4), shared[line]))
        return vote + functools.reduce(jnp.add, [jnp.exp2(logit - lse) for logit, lse in found])

    @pl.when(some)
    def _():
        thread, each = arrays.counted(THREADS), min(1 << ((THREADS // lines).bit_length() - 1), THREADS // TOGETHER)
        line, part = lax.div(thread, each), lax.rem(thread, each)  # some threads for each query head
        places = [
            jnp.where((line < lines) & (part < parts - i), (row * lines + line) * parts + part + i, -1)
            for i in range(0, parts, each)
        ]
        found = [arrays.load(lse_ref, place, -jnp.inf) for place in places]
        peak = jnp.maximum(functools.reduce(jnp.maximum, found), FLOOR)
        mass = functools.reduce(jnp.add, [jnp.exp2(x - peak) for x in found])
        mass, peak = _over_lanes(mass, peak, [1 << i for i in range(each.bit_length() - 1)])
        # Behind the last head nothing is added.
        arrays.store_shared(shared, line, jnp.where(line < lines, peak + jnp.log2(mass), jnp.inf))
        arrays.meet()
        vote = arrays.spread(0.0, BLOCK, jnp.float32)
        vote = lax.fori_loop(0, -(-lines // TOGETHER), add_heads, vote)
        arrays.store(vote_ref, at, jnp.where(candidate, vote, -jnp.inf))

    @pl.when(~some)  # a block without a candidate reads nothing; its logits were never written
    def _():
        arrays.store(vote_ref, at, arrays.spread(-jnp.inf, BLOCK, jnp.float32))


def _products(group, dim, dtype):
    """Choose how keys of ``dtype`` are multiplied."""
    if dtype == jnp.bfloat16 and dim in exact_products.DIMS and group <= exact_products.MOST:
        return ExactProducts(group, dim, exact_products.WORDS * exact_products.ROWS // dim)
    return Products(group, dim, STEPS // AHEAD)


def token_vote(query, key, *, start, stop):
    """Add up the softmax of every query head over the candidates."""
    batch, heads, group, dim = query.shape
    lists, tokens, n = batch * heads, key.shape[2], _products(group, dim, key.dtype)
    rows = AHEAD * n.rows
    steps = -(-tokens // rows)
    splits = max(1, min(PROGRAMS // lists, steps, MOST_SPLITS))
    options = {"tokens": tokens, "first": start if isinstance(start, int) else 0}
    bounds = [stop] if isinstance(start, int) else [stop, jnp.broadcast_to(start, (batch,))]
    shapes = [jax.ShapeDtypeStruct((lists, group, last), jnp.float32) for last in (steps * rows, splits * WARPS)]
    score = functools.partial(_score, n=n, heads=heads, splits=splits, **options)
    parts = arrays.program(score, shapes, grid=(lists, splits), approx=True)(
        query.reshape(lists, group, dim), key.reshape(lists * tokens, dim), *bounds
    )
    parts = [x.reshape(batch, heads * group, -1) for x in parts]
    out, shared = [jax.ShapeDtypeStruct((batch, tokens), jnp.float32)], [plgpu.SMEM((THREADS,), jnp.float32)]
    merge, grid = functools.partial(_merge, **options), (batch, -(-tokens // BLOCK))
    return arrays.program(merge, out, grid=grid, scratch=shared, approx=True)(*parts, *bounds)[0]


def check(query, key, *, start, stop):
    """Raise ``NotImplementedError`` for other GPUs, dtypes, head dims and groups than the kernels take."""
    arrays.check_hopper()
    if str(query.dtype) not in ("float32", "bfloat16") or str(key.dtype) not in ("float32", "float16", "bfloat16"):
        raise NotImplementedError(f"got query {query.dtype} and key {key.dtype}, expected floats of at most 32 bits")
    batch, heads, group, dim = query.shape
    if dim & (dim - 1) or not CHUNK <= dim <= 32 * CHUNK:
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from {CHUNK} to {32 * CHUNK}")
    padded = key.shape[2] + AHEAD * _products(group, dim, key.dtype).rows  # more than the logits of a head
    if group > MOST_QUERIES or heads * group > THREADS or batch * heads * group * padded >= 2**31 or not key.shape[2]:
        raise NotImplementedError(f"got query {query.shape} and key {key.shape}, expected at most {THREADS} query heads")
