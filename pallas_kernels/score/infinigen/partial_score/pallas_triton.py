"""Values of tokens by partial keys as two Pallas Triton kernels: programs for each list of slots.

1. ``partial_score``: a program has every P-th block of slots. It reads their keys once, and writes logits, scores, the
   largest logit of each query head in each block, and the number of tokens; for `partial_select` maxima of scores, too.
2. ``partial_near``: a program compares the logits of a few blocks with the largest of all blocks. In each block it reads only
   query heads whose largest logit comes near. Programs add up their counts, and integers have one sum in any order.

The tokens of a channel are neighbours in memory, so a thread reads up to 16 bytes of each channel and computes all logits of
its tokens: no thread waits for another. A group of query heads is small, so products are sums in registers; tensor cores
would need keys in shared memory, and compute 16 query heads.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.checks import check_dtypes
from pallas_kernels._triton.kth_search import NEVER, order_key
from pallas_kernels._triton.pallas import pl, plt

MOST_CHANNELS = 256
MOST_GROUP = 32  # query heads; the program is unrolled over them, and takes long to compile for more
MOST_HEADS = 8  # query heads whose sums a thread holds at once; for more heads the keys are read again
UNROLLED = 32  # up to so many channels, all loads can begin before the first product
LOWEST = -3.4028234663852886e38  # the most negative finite float32


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided; sizes are powers of two.

    Attributes:
        block: slots per step for groups of up to 4 query heads; larger groups take half as many, because of the registers.
        programs: programs of each kernel over all heads of all rows, approximately.
        num_warps: warps per program.
    """

    block: int = 1024
    programs: int = 1056  # eight per streaming multiprocessor of an H100 or H200
    num_warps: int = 4

    def block_of(self, group: int) -> int:
        """Return the slots per step for a group of query heads."""
        return self.block if group <= 4 else self.block // 2


def _sums(query_ref, key_ref, b, h, heads, slot, interpret):
    """Multiply the query ``heads`` with the keys at ``slot``: float32 [block] each, 0 behind the last slot."""
    channels, inside = key_ref.shape[2], slot < key_ref.shape[3]

    def load(channel):
        return plt.load(key_ref.at[b, h, channel, slot], mask=inside, other=0.0)

    def add(channel, key, sums):
        key = key.astype(jnp.float32)
        asked = [query_ref[b, h, head, channel].astype(jnp.float32) for head in heads]
        if interpret:
            return tuple(x + q * key for q, x in zip(asked, sums, strict=True))
        # Otherwise a product and a sum would be two instructions each: the compiler may not join them.
        product = functools.partial(assembly, "fma.rn.f32 $0, $1, $2, $3;", result=jnp.float32)
        return tuple(product([jnp.full(key.shape, q), key, x]) for q, x in zip(asked, sums, strict=True))

    def several(first, count, sums):
        keys = [load(first + i) for i in range(count)]
        for i, key in enumerate(keys):
            sums = add(first + i, key, sums)
        return sums

    sums = (jnp.zeros(slot.shape, jnp.float32),) * len(heads)
    if channels <= UNROLLED:
        return several(0, channels, sums)
    step = UNROLLED // 2
    sums = lax.fori_loop(0, channels // step, lambda i, sums: several(i * step, step, sums), sums)
    return several(channels // step * step, channels % step, sums)


def _score(*refs, scale, block, nodes, interpret):
    # Operands: query [B, H, G, C]; key [B, H, C, N]; position [B, H, S]; cursor [B].
    # Results: logits [B, H, G, N]; score [B, H, N]; most [B, H, blocks, G]; count [B, H, P]; near [B], zeros for the next
    # kernel; if there are nodes, node [B, H, P * nodes].
    query_ref, key_ref, position_ref, cursor_ref, logits_ref, score_ref, most_ref, count_ref, near_ref, *node_ref = refs
    program, b, h = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    group, slots, room = query_ref.shape[2], position_ref.shape[2], key_ref.shape[3]
    blocks, programs, newest = most_ref.shape[2], count_ref.shape[2], cursor_ref[b] - 1

    def add(step, found):
        count, node = found
        part = program + step * programs
        slot = part * block + jnp.arange(block, dtype=jnp.int32)
        inside = slot < room
        held = plt.load(position_ref.at[b, h, slot], mask=slot < slots, other=-1) >= 0
        others = held & (slot != newest)
        total = jnp.zeros((block,), jnp.float32)
        for first in range(0, group, MOST_HEADS):
            heads = range(first, min(first + MOST_HEADS, group))
            for head, product in zip(heads, _sums(query_ref, key_ref, b, h, heads, slot, interpret), strict=True):
                logits = jnp.where(others, product * scale, -jnp.inf)
                total += logits
                plt.store(logits_ref.at[b, h, head, slot], logits, mask=inside)
                most_ref[b, h, part, head] = jnp.max(logits)
        score = jnp.where(others, jnp.maximum(total / group, LOWEST), jnp.where(held, jnp.inf, -jnp.inf))
        plt.store(score_ref.at[b, h, slot], score, mask=inside)
        if nodes:
            node = jnp.maximum(node, jnp.max(order_key(score).reshape(block // nodes, nodes), axis=0))
        return count + jnp.sum(others.astype(jnp.int32), dtype=jnp.int32), node

    near_ref[b] = jnp.int32(0)  # every program of the row writes it
    nothing = jnp.int32(0), jnp.full((max(nodes, 1),), NEVER, jnp.int32)
    count_ref[b, h, program], node = lax.fori_loop(0, pl.cdiv(blocks - program, programs), add, nothing)
    if nodes:
        plt.store(node_ref[0].at[b, h, program * nodes + jnp.arange(nodes, dtype=jnp.int32)], node)


def count_near(logits_ref, most_ref, alpha, first, last, block):
    """Count the logits in blocks ``first`` to ``last - 1`` that come near the largest of their query head, int32.

    The refs belong to one list: logits [G, N]; most [blocks, G].
    """
    (group, slots), blocks = logits_ref.shape, most_ref.shape[0]
    part = jnp.arange(pl.next_power_of_2(blocks), dtype=jnp.int32)
    most = [plt.load(most_ref.at[part, head], mask=part < blocks, other=-jnp.inf) for head in range(group)]
    edges = [jnp.max(x) - alpha for x in most]

    def add(part, near):
        slot = part * block + jnp.arange(block, dtype=jnp.int32)
        for head, edge in enumerate(edges):
            wanted = (slot < slots) & (most_ref[part, head] >= edge)
            logits = plt.load(logits_ref.at[head, slot], mask=wanted, other=-jnp.inf)
            near += ((logits >= edge) & (logits > -jnp.inf)).astype(jnp.int32)
        return near

    return jnp.sum(lax.fori_loop(first, last, add, jnp.zeros((block,), jnp.int32)), dtype=jnp.int32)


def stored_of(count_ref):
    """Sum count int32 [P] to the number of tokens before the newest."""
    part, parts = jnp.arange(pl.next_power_of_2(count_ref.shape[0]), dtype=jnp.int32), count_ref.shape[0]
    return jnp.sum(plt.load(count_ref.at[part], mask=part < parts, other=0), dtype=jnp.int32)


def _near(logits_ref, most_ref, count_ref, alpha_ref, _, near_ref, stored_ref, *, block, steps):
    # Of one list: logits [G, N]; most [blocks, G]; count [P]. Of all: alpha [1]; near [B], before and after, in the same
    # memory; stored [B, H].
    b, h, program = pl.program_id(0), pl.program_id(1), pl.program_id(2)
    first, last = program * steps, jnp.minimum((program + 1) * steps, most_ref.shape[0])
    jax.ref.addupdate(near_ref, (b,), count_near(logits_ref, most_ref, alpha_ref[0], first, last, block))

    @pl.when(program == 0)
    def _():
        stored_ref[b, h] = stored_of(count_ref)


def score_blocks(query, key, position, cursor, *, scale, config, wanted=0, interpret=False):
    """Run the first kernel.

    Args:
        query: [B, H, G, C], floating point.
        key: [B, H, C, N], same dtype.
        position: int32 [B, H, S].
        cursor: int32 [B].
        scale: factor of the logits.
        config: how the work is divided.
        wanted: static; if not 0, at least as many maxima of scores are computed.
        interpret: run as plain JAX operations.

    Returns:
        logits float32 [B, H, G, N], score float32 [B, H, N], the largest logits float32 [B, H, blocks, G], the number of
        tokens before the newest int32 [B, H, P], zeros int32 [B]; and with ``wanted`` maxima of scores, int32 [B, H, M], keys
        (`order_key`), M a power of two. Slot s belongs to maximum ``s % block % n`` of the ``n`` of program
        ``s // block % P``.
    """
    (batch, heads, group, _), room = query.shape, key.shape[3]
    block = config.block_of(group)
    blocks = pl.cdiv(room, block)
    programs = max(1, min(config.programs // (batch * heads), blocks))
    programs = pl.next_power_of_2(programs + 1) // 2
    nodes = min(max(pl.next_power_of_2(wanted) // programs, 1), block) if wanted else 0
    lists, floats = (batch, heads), jnp.float32
    shapes = [(*lists, group, room), (*lists, room), (*lists, blocks, group), (*lists, programs), (batch,)]
    shapes, dtypes = [*shapes, (*lists, programs * nodes)], [floats, floats, floats, jnp.int32, jnp.int32, jnp.int32]
    made = [jax.ShapeDtypeStruct(*x) for x in zip(shapes, dtypes, strict=True)]
    return triton_call(
        functools.partial(_score, scale=scale, block=block, nodes=nodes, interpret=interpret),
        grid=(programs, batch, heads),  # in the order of the last axis first: programs with one more block begin early
        out_shape=made if nodes else made[:-1],
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name="partial_score",
    )(query, key, position, cursor)


def partial_score(query, key, position, cursor, alpha, *, scale, config: Config | None = None, interpret=False):
    """Score tokens by partial keys, and count those near the largest logit; ``interpret=True`` runs anywhere, slowly."""
    config = Config() if config is None else config
    given = query, key, position, cursor
    logits, score, most, count, near = score_blocks(*given, scale=scale, config=config, interpret=interpret)
    (batch, heads, group), blocks = query.shape[:3], most.shape[2]
    steps = pl.cdiv(blocks, max(1, min(config.programs // (batch * heads), blocks)))
    alpha, sums = alpha.reshape(1), [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((batch,), (batch, heads))]
    near, stored = triton_call(
        functools.partial(_near, block=config.block_of(group), steps=steps),
        grid=(batch, heads, pl.cdiv(blocks, steps)),
        in_specs=[*map(of_head, (logits, most, count)), whole(alpha), whole(near)],
        out_specs=[*map(whole, sums)],
        out_shape=sums,
        input_output_aliases={4: 0},
        num_warps=config.num_warps,
        num_stages=1,
        interpret=interpret,
        name="partial_near",
    )(logits, most, count, alpha, near)
    return score[..., : position.shape[2]], near, stored


def check(query, key, position, cursor, alpha, *, scale):
    """Raise ``NotImplementedError`` for dtypes and sizes that the kernels do not take."""
    check_dtypes(query)
    channels, slots = key.shape[2:]
    if not 0 < channels <= MOST_CHANNELS or not slots:
        raise NotImplementedError(f"got {slots} keys of {channels} channels, expected 1 to {MOST_CHANNELS} channels")
    if query.shape[2] > MOST_GROUP:
        raise NotImplementedError(f"got groups of {query.shape[2]} query heads, expected at most {MOST_GROUP}")
