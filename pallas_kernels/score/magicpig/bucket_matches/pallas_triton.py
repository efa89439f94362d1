"""MagicPIG's scan as one Pallas Triton kernel: in how many tables tokens and queries have the same bucket.

A thread has eight neighbouring tokens, and adds up their counts for all query heads while it goes through the tables. One
instruction compares two buckets, and another raises two counts. A bucket of 16 bits is taken for the float16 with these bits:
below infinity, different buckets are different floats. The comparison gives 1.0 or 0.0, and sums are exact up to 2048 tables.
Two buckets are read as a word, because the compiler would take a pair of 16-bit values apart and put it together again.

For the kernels that select, a token's result is packed into a word. The high half has the largest count, 0 if no query head
has sampled the token; the low half has a bit for each head that has sampled it.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._triton.assembly import assembly
from pallas_kernels._triton.block_specs import of_head, whole
from pallas_kernels._triton.call import triton_call
from pallas_kernels._triton.kth_histogram import histogram
from pallas_kernels._triton.pallas import pl, plt

MOST_HEADS = 8  # query heads whose counts a thread holds, four registers each
MOST_TABLES = 2047
MOST_BITS = 14  # with more, some buckets would be infinite or NaN as float16
HALF = 16  # bits of half a word
_PACK = 8  # tokens of a thread
_TOGETHER = 5  # tables whose buckets a thread asks for together
_NEVER = 0x7FFF  # NaN, which is equal to nothing
_ENOUGH = 256  # programs that keep a large GPU busy

# Of two tokens: their counts, their buckets; the query's bucket. The result is the new counts.
ADD = """{ .reg .b16 bucket, none; .reg .b32 both, same; mov.b32 {bucket, none}, $3; mov.b32 both, {bucket, bucket};
set.eq.f16x2.f16x2 same, $2, both; add.rn.f16x2 $0, $1, same; }"""


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        num_warps: warps per program of 256 tokens each, a power of two.
    """

    num_warps: int = 8

    def __post_init__(self):
        if not 1 <= self.num_warps <= 16 or self.num_warps & (self.num_warps - 1):
            raise ValueError(f"bucket_matches: got num_warps={self.num_warps}, expected 1, 2, 4, 8 or 16")

    @property
    def block(self) -> int:
        """The tokens per program."""
        return 32 * _PACK * self.num_warps


def default_config(lists: int, slots: int, tables: int) -> Config:
    """Choose large programs if there are enough; each has at least as many tokens as there are counts, for `histogram`."""
    least = max(pl.next_power_of_2(tables + 1) // (32 * _PACK), 1)
    enough = [n for n in (8, 4, 2) if lists * slots >= _ENOUGH * n * 32 * _PACK]
    return Config(num_warps=max(enough[0] if enough else 2, least))


def bins_of(tables: int) -> int:
    """Return the length of the histogram of a block's counts."""
    return max(pl.next_power_of_2(tables + 1), 16)


def _kernel(query_ref, ids_ref, near_ref, word_ref, *count_ref, first, threads, interpret):
    # Of one head: query [G, L]; ids [L, N / 2], of two tokens each; word [N]; counts [blocks, C] if wanted. Of all rows: near
    # [B].
    block, number = threads * _PACK, pl.program_id(2)
    (tables, held), group = ids_ref.shape, query_ref.shape[0]
    near = near_ref[pl.program_id(0)]
    begin = number * block
    pair = number * (block // 2) + jnp.arange(block // 2, dtype=jnp.int32)

    def load(step):  # they are read only once
        rows = (jnp.minimum(step * _TOGETHER + i, tables - 1) for i in range(_TOGETHER))
        return [plt.load(ids_ref.at[t, pair], mask=pair < held, other=0, eviction_policy="evict_first") for t in rows]

    def add(step, carry):
        # Buckets are loaded in the step before, all at once. Loads in their own step would share registers, and the compiler
        # would wait for each load.
        counts, ids = carry
        for i, own in enumerate(ids):
            table = step * _TOGETHER + i
            asked = (plt.load(query_ref.at[jnp.int32(g), table], mask=table < tables, other=_NEVER) for g in range(group))
            counts = [_raised(x, own, bucket, interpret) for x, bucket in zip(counts, asked, strict=True)]
        return counts, load(step + 1)

    some = (begin < near) & (begin + block > first)
    start = [jnp.zeros((block // 2,), jnp.int32)] * group, load(0)
    counts, _ = lax.fori_loop(0, some.astype(jnp.int32) * pl.cdiv(tables, _TOGETHER), add, start)
    slot = begin + jnp.arange(block, dtype=jnp.int32)
    inside = (slot >= first) & (slot < near)
    most, heads = jnp.zeros((block,), jnp.int32), jnp.zeros((block,), jnp.int32)
    for g, x in enumerate(counts):
        count = jnp.stack(_halves(x), axis=-1).reshape(block).astype(jnp.int32)
        sampled = inside & (count >= 2)
        most = jnp.maximum(most, jnp.where(sampled, count, 0))
        heads |= jnp.where(sampled, 1 << g, 0)
    plt.store(word_ref.at[slot], (most << HALF) | heads, mask=slot < word_ref.shape[0])
    if count_ref:
        bins = count_ref[0].shape[1]
        at = jnp.arange(block, dtype=jnp.int32)
        number_of = histogram(jnp.where(most > 0, most, -1), threads, interpret).astype(jnp.int16)
        plt.store(count_ref[0].at[number, jnp.minimum(at, bins - 1)], number_of, mask=at < bins)


def _halves(word):
    """Unpack the float16 in the low and in the high halves of words int32 [N], as float32."""
    parts = (word.astype(jnp.int16), (word >> HALF).astype(jnp.int16))
    return [lax.bitcast_convert_type(x, jnp.float16).astype(jnp.float32) for x in parts]


def _raised(count, ids, asked, interpret):
    """Add 1 to counts, two float16 in a word int32 [N], where the half of ``ids`` int32 [N] is ``asked`` uint16."""
    asked = jnp.broadcast_to(asked.astype(jnp.int32), ids.shape)
    if not interpret:
        return assembly(ADD, [count, ids, asked])
    both = zip(_halves(count), _halves(ids), strict=True)
    sums = ((x + (own == _halves(asked)[0]).astype(jnp.float32)).astype(jnp.float16) for x, own in both)
    low, high = (lax.bitcast_convert_type(x, jnp.int16).astype(jnp.int32) for x in sums)
    return low | high << HALF


def words(query, ids, near, *, first, counted=False, config: Config | None = None, interpret=False):
    """Compute the word of each token, int32 [B, H, N].

    With ``counted`` also count how many tokens of each block have each largest count: int16 [B, H, blocks, C].
    """
    batch, heads, tables, held = ids.shape
    config = default_config(batch * heads, held, tables) if config is None else config
    blocks = pl.cdiv(held, config.block)
    pairs = jnp.pad(ids, ((0, 0), (0, 0), (0, 0), (0, held % 2))).reshape(*ids.shape[:3], -1, 2)
    pairs = lax.bitcast_convert_type(pairs, jnp.int32)  # costs nothing, unless the number of slots is odd
    results = [jax.ShapeDtypeStruct((batch, heads, held), jnp.int32)]
    if counted:
        results.append(jax.ShapeDtypeStruct((batch, heads, blocks, bins_of(tables)), jnp.int16))
    return triton_call(
        functools.partial(_kernel, first=first, threads=32 * config.num_warps, interpret=interpret),
        grid=(batch, heads, blocks),
        in_specs=[*map(of_head, (query, pairs)), whole(near)],
        out_specs=[*map(of_head, results)],
        out_shape=results,
        name="bucket_matches",
        num_warps=config.num_warps,
        interpret=interpret,
    )(query, pairs, near)


def bucket_matches(query, ids, near, *, first, num_bits, config: Config | None = None, interpret=False):
    """Mark the query heads that share a token's bucket in two tables or more; ``interpret=True`` runs anywhere, slowly."""
    (word,) = words(query, ids, near, first=first, config=config, interpret=interpret)
    head = jnp.arange(query.shape[2], dtype=jnp.int32).reshape(1, 1, -1, 1)
    return (word[:, :, None] >> head) & 1 > 0


def check(query, ids, near, *, first, num_bits):
    """Raise ``NotImplementedError`` for sizes that the kernel does not take."""
    group, tables = query.shape[2:]
    if ids.dtype != jnp.uint16 or num_bits > MOST_BITS:
        raise NotImplementedError(f"got buckets of {num_bits} bits in {ids.dtype}, expected uint16 and at most {MOST_BITS}")
    if group > MOST_HEADS or tables > MOST_TABLES:
        raise NotImplementedError(
            f"got {group} query heads and {tables} tables, expected at most {MOST_HEADS} and {MOST_TABLES}"
        )
    if ids.size >= 1 << 31 or not ids.size:
        raise NotImplementedError(f"got {ids.size} buckets, expected 1 to 2**31")  # 4 GiB
