"""Products of a few float32 queries with rows of bfloat16 numbers on tensor cores: no product is rounded, sums are float32.

A query is the sum of three parts of 8 bits. The parts of four queries are the 16 rows of one product with 8 rows of memory,
which go from there to the registers from which `mma` takes them: it sums over channels in any order, if both sides
have the same. Of each 32 channels lane l has number 8 (l % 4) to 8 (l % 4) + 7 of row l / 4, which are 16 bytes.
"""

import dataclasses
import itertools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.steps import numbers
from pallas_kernels._mosaic_gpu.threads import THREADS

ROWS = 8  # of a tile
CHANNELS = 32  # of a row that four lanes load at once
QUERIES = 4  # of a product
MOST = 8  # queries, in registers
WORDS = 32  # of a block that a thread loads
DIMS = 32, 64, 128


@dataclasses.dataclass(frozen=True)
class ExactProducts:
    """How a program of one warpgroup multiplies. Its methods are those of `Products`.

    Attributes:
        group: queries, up to `MOST`.
        dim: channels of a row, of `DIMS`.
        steps: tiles of a warp, and products of a thread with each of its queries.
    """

    group: int
    dim: int
    steps: int

    sharing = 1, 2, 16  # distances of threads of a warp that have the same queries

    @property
    def each(self) -> int:
        """Queries of a thread."""
        return -(-self.group // QUERIES)

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return 4 * ROWS * self.steps

    def entries(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return, for each product of this thread, its row in the block, its query, and whether this thread writes it."""
        entry = arrays.counted(THREADS * self.steps * self.each)
        number, thread = entry >> 7, entry & (THREADS - 1)
        step, query = jax.lax.div(number, self.each), jax.lax.rem(number, self.each) * QUERIES + ((thread >> 2) & 3)
        tile = (thread >> 5) * self.steps + (step & -2) + ((thread >> 4) & 1)  # lanes from 16 on have every second tile
        return tile * ROWS + 2 * (thread & 3) + (step & 1), query, query < self.group

    def step_rows(self) -> jax.Array:
        """Return the row in the block of each tile that this thread loads of, int32 [128 * steps]."""
        entry = arrays.counted(THREADS * self.steps)
        thread = entry & (THREADS - 1)
        return ((thread >> 5) * self.steps + (entry >> 7)) * ROWS + ((thread >> 2) & (ROWS - 1))

    def queries(self, query, owner) -> jax.Array:
        """Load this thread's parts of the queries [L, G, D] of list ``owner``: int32, two bfloat16 numbers each."""
        kind = jnp.dtype(query.dtype)

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()), return_type=numbers(self.each * self.dim // 4, jnp.int32))
        def load(ctx, query, owner):
            chunk, base, numbers = t.signed(w.lane() % 4) * 8, t.address(query), []
            for first in range(0, self.group, QUERIES):
                head = t.least(t.signed(w.lane() // 4 % QUERIES) + first, self.group - 1)
                head = t.number(t.value(owner)) * self.group + head
                for at in range(0, self.dim, CHANNELS):
                    place = t.at(base, t.element(head, self.dim, chunk + at), kind.itemsize)
                    numbers += t.load_some(place, kind, 8)
            return t.made_of(bfloat16_parts(numbers))

        return load(query, owner)

    def chunks(self, vectors, row: jax.Array) -> tuple[jax.Array]:
        """Load this thread's part of a block of [N, D], int32; ``row``: int32 [128 * steps], in the order of `step_rows`."""

        @plgpu.inline_mgpu(arg_types=(t.ref(), t.own(self.steps)), return_type=numbers(WORDS, jnp.int32))
        def load(ctx, ref, row):
            chunk, found = t.signed(w.lane() % 4) * 8, []
            for x in t.numbers_of(row):
                place = t.at(t.address(ref), t.element(x, self.dim, chunk), 2)
                found += [y for at in range(0, self.dim, CHANNELS) for y in t.load_words(place, 2 * at, 4)]
            return t.made_of(found)

        return (load(vectors[0], row),)

    def multiply(self, queries: jax.Array, chunks: tuple[jax.Array], dtypes) -> jax.Array:
        """Multiply a block: float32 [128 * steps * each], in the order of `entries`."""
        layouts = tuple(t.own(x.shape[0] // THREADS) for x in (queries, *chunks))

        @plgpu.inline_mgpu(arg_types=layouts, return_type=numbers(self.steps * self.each, jnp.float32))
        def run(ctx, queries, words):
            return t.made_of(tile_products(self.each, t.numbers_of(queries), t.numbers_of(words)), floats=True)

        return run(queries, *chunks)


def bfloat16_parts(numbers):
    """List parts of queries' numbers, two words for two numbers: first and second parts, or third ones and zeros."""
    found, upper = [], t.signed(w.lane()) > 15
    for x, y in itertools.batched(numbers, 2):
        words = []
        for _ in range(3):
            words.append(w.pair(x, y, "bfloat16"))
            x, y = (a - b for a, b in zip((x, y), w.parted(words[-1], "bfloat16"), strict=True))
        found += [upper.select(words[2], words[0]), upper.select(t.number(0), words[1])]
    return found


def tile_products(each, queries, words):
    """List this lane's products of what `bfloat16_parts` lists of its queries, ``each``, and the words of its rows."""
    size, upper, found = len(queries) // each, t.signed(w.lane()) > 15, []
    for tiles in itertools.batched(itertools.batched(words, size // 2), 2):
        products = []
        for parts in itertools.batched(queries, size):
            sums = []
            for tile in tiles:
                four = [t.float_number(0.0)] * 4
                for at in range(0, len(tile), 2):
                    four = w.multiply(four, parts[2 * at : 2 * at + 4], tile[at : at + 2], "bfloat16")
                sums.append((four[0] + four[2], four[1] + four[3]))
            # Lanes from 16 on have the third parts of both tiles, and those before them the rest.
            pairs = zip(*sums, strict=True)
            products.append([upper.select(y, x) + t.shuffle(upper.select(x, y), 16) for x, y in pairs])
        found += [x for column in zip(*products, strict=True) for x in column]
    return found
