"""SOCKET's search as two Pallas Triton kernels: the votes of every bucket, then the sums of all tokens.

The second kernel is bound by its look-ups, one for each byte of ids. Where 32 threads look up words of shared memory at
random, some of its 32 banks is asked for three or four words, one after the other. So a table is held in 32 copies, one in
each bank, and every thread looks up in a bank of its own. There is room for one table at a time. A program therefore goes
through the tables one by one, and has as many tokens as its registers can hold sums of.
"""

from __future__ import annotations

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plt

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call

BANKS = 32  # of shared memory, each of them a word wide
PACK = 16  # tokens of a thread
BYTES = 4  # of a word
_WORDS = PACK // BYTES  # of a table, which a thread copies into shared memory
_BUCKETS = 256  # the most of a table
_QUAD = 4 * BYTES  # bytes that an instruction stores
_ENOUGH = 96  # programs that keep a large GPU busy


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        num_warps: warps per program of 512 tokens each: 4, 8 or 16.
    """

    num_warps: int

    def __post_init__(self):
        if self.num_warps not in (4, 8, 16):
            raise ValueError(f"bucket_score: got num_warps={self.num_warps}, expected 4, 8 or 16")


def default_config(lists: int, slots: int) -> Config:
    """The largest programs of which there are enough: to copy a table costs a program the same for few tokens as for many."""
    enough = [n for n in (16, 8) if lists * slots >= _ENOUGH * n * 32 * PACK]
    return Config(num_warps=enough[0] if enough else 4)


def _tables_kernel(query_ref, planes_ref, temperature_ref, table_ref):
    # Of one head: query [G, D], table [L * C * 4]. Of all: planes [L, P, D], temperature [1].
    table = pl.program_id(2)
    (group, dim), bits = query_ref.shape, planes_ref.shape[1]
    heads, sides = pl.next_power_of_2(group), pl.next_power_of_2(bits)  # the last head and plane are repeated
    pair = jnp.arange(heads * sides, dtype=jnp.int32)
    head, side = jnp.minimum(pair // sides, group - 1), jnp.minimum(pair % sides, bits - 1)
    product = jnp.sum(query_ref[head, :].astype(jnp.float32) * planes_ref[table, side, :], axis=1)
    soft = jnp.tanh(product) / dim**0.5 / temperature_ref[0]
    soft = jnp.where(pair % sides < bits, soft, 0.0).reshape(heads, 1, sides)
    bucket = jnp.arange(1 << bits, dtype=jnp.int32)
    place = jnp.maximum(bits - 1 - jnp.arange(sides, dtype=jnp.int32), 0)
    corner = ((bucket[:, None] >> place[None, :]) & 1) == 1
    logits = jnp.sum(jnp.where(corner[None], soft, -soft), axis=2)  # [G, C]
    likely = jnp.exp(logits - jnp.max(logits, axis=1)[:, None])
    likely = likely / jnp.sum(likely, axis=1)[:, None]
    real = jnp.arange(heads, dtype=jnp.int32) < group
    votes = jnp.sum(jnp.where(real[:, None], likely, 0.0), axis=0)
    word = lax.bitcast_convert_type(votes, jnp.int32)
    for byte in range(BYTES):
        table_ref[(table * (1 << bits) + bucket) * BYTES + byte] = (word >> 8 * byte).astype(jnp.uint8)


def _sums_kernel(table_ref, ids_ref, norm_ref, position_ref, cursor_ref, score_ref, *, first, num_local, threads, interpret):
    # Of one list: table [L * C * 4] bytes, ids [L, N], norm, position and score [S]. Of all: cursor [B].
    b, begin = pl.program_id(0), pl.program_id(2) * threads * PACK
    (tables, held), slots = ids_ref.shape, position_ref.shape[0]
    size = table_ref.shape[0] // tables  # bytes of a table
    near = jnp.minimum(cursor_ref[b] - num_local, slots)
    row, column = jnp.arange(threads, dtype=jnp.int32)[:, None], jnp.arange(PACK, dtype=jnp.int32)[None, :]
    slot = begin + row * PACK + column
    inside = slot < slots

    source, place = copying(row, column, threads, size)

    def ids_of(table):  # they are read only once
        table = jnp.minimum(table, tables - 1)
        return plt.load(ids_ref.at[table, slot], mask=slot < held, other=0, eviction_policy="evict_first")

    def words_of(table):
        return table_ref[jnp.minimum(table, tables - 1) * size + source]

    def add(table, carry):
        sums, ids, next_ids, words = carry
        if interpret:
            at = table * size + ids.astype(jnp.int32) * BYTES
            word = sum(table_ref[at + byte].astype(jnp.int32) << 8 * byte for byte in range(BYTES))
            more = sums + lax.bitcast_convert_type(word, jnp.float32)
        else:
            more = assembly(look_up(threads, size), [ids, words, place, sums], PACK, jnp.float32)
        return more, next_ids, ids_of(table + 2), words_of(table + 1)

    some = (begin < near) & (begin + threads * PACK > first)
    start = (jnp.zeros((threads, PACK), jnp.float32), ids_of(0), ids_of(1), words_of(0))
    sums = lax.fori_loop(0, some.astype(jnp.int32) * tables, add, start)[0]
    norm = plt.load(norm_ref.at[slot], mask=inside, other=0).astype(jnp.float32)
    stored = plt.load(position_ref.at[slot], mask=inside, other=-1) >= 0
    score = jnp.where(stored & (slot >= first) & (slot < near), sums * norm, -jnp.inf)
    plt.store(score_ref.at[slot], score, mask=inside)


def copying(row, column, threads, size):
    """Which bytes of a table of ``size`` a thread copies, and where its words go; ``row`` is its number.

    Args:
        row: int32 [T, 1].
        column: int32 [1, PACK].
        threads: T.
        size: bytes of the table.

    Returns:
        int32 [T, PACK] twice: which byte of the table each of its bytes is, and the first place of that byte's word among the
        copies, in bytes; -1 for a thread that copies nothing.
    """
    parts, turns = _sharing(threads)
    share, part = row // parts, row % parts
    turned = (part + parts * (share % turns)) * _QUAD  # neighbouring threads begin in different banks
    place = (share * _WORDS + column // BYTES) * BANKS * BYTES + turned
    return jnp.minimum(share * PACK, size - PACK) + column, jnp.where(share * PACK < size, place, -1)


def _sharing(threads: int) -> tuple[int, int]:
    """How many threads share the copies of a word, and how many instructions each of them needs for its part of them."""
    parts = threads * _WORDS // _BUCKETS
    return parts, BANKS * BYTES // _QUAD // parts


def look_up(threads: int, size: int) -> str:
    """Assembly that copies a table of ``size`` bytes into every bank, and adds an entry to each of `PACK` sums.

    Operands: ids and the thread's bytes of the table, `PACK` each; the places of its words; sums. All ``threads`` of the
    program wait for each other twice: until the last table is read, and until this one is there.
    """
    parts, turns = _sharing(threads)
    ids, words, place, sums = (first + PACK for first in (0, _WORDS, 2 * _WORDS, 2 * _WORDS + PACK))
    lines = [f".shared .align 128 .b8 copies[{size * BANKS}]; .reg .b32 base, bank, at; .reg .f32 found; .reg .pred has;"]
    lines.append("mov.b32 base, copies; bar.sync 0;")
    for i in range(_WORDS):
        lines.append(f"setp.ge.s32 has, ${place + BYTES * i}, 0;")
        for turn in range(turns):
            lines.append(f"xor.b32 at, ${place + BYTES * i}, {turn * parts * _QUAD}; add.s32 at, at, base;")
            lines.append(f"@has st.shared.v4.b32 [at], {{{', '.join([f'${words + i}'] * 4)}}};")
    lines.append(f"bar.sync 0; mov.u32 bank, %laneid; mad.lo.s32 base, bank, {BYTES}, base;")
    for i in range(PACK):
        lines.append(f"prmt.b32 at, ${ids + i // BYTES}, 0, {0x4440 + i % BYTES:#x};")
        lines.append(f"mad.lo.s32 at, at, {BANKS * BYTES}, base; ld.shared.f32 found, [at];")
        lines.append(f"add.f32 ${i}, ${sums + i}, found;")
    return "{" + " ".join(lines) + "}"


def bucket_score(
    query, planes, temperature, ids, norm, position, cursor, *, first, num_local,
    config: Config | None = None, interpret=False,
):  # fmt: skip
    """See ``pallas_kernels.bucket_score.bucket_score``; ``interpret=True`` runs anywhere, slowly."""
    batch, heads, tables, _ = ids.shape
    slots = position.shape[2]
    bits = planes.shape[1]
    config = default_config(batch * heads, slots) if config is None else config
    threads = 32 * config.num_warps
    temperature = temperature.reshape(1)
    flat = jax.ShapeDtypeStruct((batch, heads, (tables << bits) * BYTES), jnp.uint8)
    table = triton_call(
        _tables_kernel,
        grid=(batch, heads, tables),
        in_specs=[of_head(query), whole(planes), whole(temperature)],
        out_specs=of_head(flat),
        out_shape=flat,
        name="bucket_tables",
        interpret=interpret,
    )(query, planes, temperature)
    return triton_call(
        functools.partial(_sums_kernel, first=first, num_local=num_local, threads=threads, interpret=interpret),
        grid=(batch, heads, pl.cdiv(slots, threads * PACK)),
        in_specs=[*map(of_head, (table, ids, norm, position)), whole(cursor)],
        out_specs=of_head(position),
        out_shape=jax.ShapeDtypeStruct(position.shape, jnp.float32),
        name="bucket_sums",
        num_warps=config.num_warps,
        interpret=interpret,
    )(table, ids, norm, position, cursor)


def check(query, planes, temperature, ids, norm, position, cursor, *, first, num_local):
    """Raise ``NotImplementedError`` for sizes that the kernels do not take."""
    bits, dim = planes.shape[1:]
    if ids.dtype != jnp.uint8 or not 2 <= bits <= 8:
        raise NotImplementedError(f"got {bits} bits in {ids.dtype}, expected 2 to 8 in uint8")
    if dim < 16 or dim > 256 or dim & (dim - 1):
        raise NotImplementedError(f"got head_dim {dim}, expected a power of two from 16 to 256")
    if 1 << 31 <= ids.size < 1 << 32:
        raise NotImplementedError(f"got {ids.size} bytes of ids, expected below 2 GiB or at least 4 GiB")
