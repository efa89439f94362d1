"""Products of a few queries with many rows of memory, in float32: each row is read once, by D / 8 threads of a warp."""

import dataclasses
import functools
import itertools
import operator
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic_gpu import arrays
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.steps import numbers

CHUNK = 8  # channels of a thread


@dataclasses.dataclass(frozen=True)
class Products:
    """How a program of one warpgroup multiplies.

    Attributes:
        group: queries.
        dim: channels of a row.
        steps: rows of a block that each thread has a chunk of.
        bounded: a row is a lower bound in one array and an upper bound in another, and a product is the largest between them.
        summed: the queries are added up first.
    """

    group: int
    dim: int
    steps: int
    bounded: bool = False
    summed: bool = False

    @property
    def sums(self) -> int:
        """Products of a row."""
        return 1 if self.summed else self.group

    @property
    def lanes(self) -> int:
        """Threads of a row."""
        return self.dim // CHUNK

    @property
    def rows(self) -> int:
        """Rows of a block."""
        return self.steps * t.THREADS // self.lanes

    @property
    def halvings(self) -> list[int]:
        """Distances of threads that share out the queries of a row between them."""
        found, rest, distance = [], self.sums, self.lanes // 2
        while distance and rest % 2 == 0:
            found, rest, distance = [*found, distance], rest // 2, distance // 2
        return found

    @property
    def each(self) -> int:
        """Queries whose products with a row one thread has."""
        return self.sums >> len(self.halvings)

    @property
    def sharing(self) -> list[int]:
        """Distances of threads of a warp that have the same queries."""
        return [x for x in (1, 2, 4, 8, 16) if x not in self.halvings]

    def entries(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return, for each product of this thread, its row in the block, its query, and whether this thread writes it."""
        entry = arrays.counted(t.THREADS * self.steps * self.each)
        number, thread = entry >> 7, entry & (t.THREADS - 1)
        row = jax.lax.div(number, self.each) * (t.THREADS // self.lanes) + jax.lax.div(thread, self.lanes)
        query, rest = jax.lax.rem(number, self.each), self.lanes - 1
        for at, distance in enumerate(self.halvings):
            query = query + jnp.where((thread & distance) > 0, self.sums >> (at + 1), 0)
            rest -= distance
        return row, query, (thread & rest) == 0

    def step_rows(self) -> jax.Array:
        """Return the row in the block of each step, int32 [128 * steps]."""
        return dataclasses.replace(self, summed=True).entries()[0]

    def queries(self, query: Any, owner: Any, added: Any = None) -> jax.Array:
        """Load this thread's chunk of the queries, float32; with bounds the part below 0 and the part above it.

        Args:
            query: [L, G, D] in global memory.
            owner: int32, which of the L.
            added: float32 [L, G, D], added to the query; or None.
        """
        refs, zero = (query,) if added is None else (query, added), lambda: t.float_number(0)
        kinds = [jnp.dtype(x.dtype) for x in refs]

        @plgpu.inline_mgpu(
            arg_types=((t.ref(),) * len(refs), t.splat()),
            return_type=numbers(self.sums * (1 + self.bounded) * CHUNK, jnp.float32),
        )
        def load(ctx, refs, owner):
            chunk, first, heads = t.signed(t.thread() % self.lanes) * CHUNK, t.number(t.value(owner)) * self.group, []
            for g in range(self.group):
                index = t.element(first + g, self.dim, chunk)
                places = [(t.at(t.address(x), index, kind.itemsize), kind) for x, kind in zip(refs, kinds, strict=True)]
                head, *more = [t.load_some(place, kind, CHUNK) for place, kind in places]
                heads.append([a + b for a, b in zip(head, more[0], strict=True)] if more else head)
            if self.summed:
                heads = [[functools.reduce(operator.add, column) for column in zip(*heads, strict=True)]]
            if self.bounded:  # max(q * low, q * high) = min(q, 0) * low + max(q, 0) * high
                below = [[(x < 0.0).select(x, zero()) for x in head] for head in heads]
                above = [[(x < 0.0).select(zero(), x) for x in head] for head in heads]
                heads = [x for pair in zip(below, above, strict=True) for x in pair]
            return t.made_of([x for head in heads for x in head], floats=True)

        return load(refs, owner)

    def chunks(self, vectors: tuple[Any, ...], row: jax.Array) -> tuple[jax.Array, ...]:
        """Load this thread's chunks of a block, as they lie in memory; nothing waits for them.

        Args:
            vectors: one array [N, D] in global memory, or two if ``bounded``.
            row: int32 [128 * steps], which of the N, in the order of `step_rows`.
        """
        kinds = [jnp.dtype(x.dtype) for x in vectors]

        @plgpu.inline_mgpu(
            arg_types=((t.ref(),) * len(vectors), t.own(self.steps)),
            return_type=tuple(numbers(self.steps * _words(kind), jnp.int32) for kind in kinds),
        )
        def load(ctx, vectors, row):
            chunk, found = t.signed(t.thread() % self.lanes) * CHUNK, []
            for ref, kind in zip(vectors, kinds, strict=True):
                places = [t.at(t.address(ref), t.element(x, self.dim, chunk), kind.itemsize) for x in t.numbers_of(row)]
                words = [x for place in places for at in range(0, _words(kind), 4) for x in t.load_words(place, 4 * at, 4)]
                found.append(t.made_of(words))
            return tuple(found)

        return load(vectors, row)

    def multiply(self, queries: jax.Array, chunks: tuple[jax.Array, ...], dtypes: list[Any]) -> jax.Array:
        """Multiply a block of rows of ``dtypes``: float32 [128 * steps * each], in the order of `entries`."""
        kinds, number = [jnp.dtype(x) for x in dtypes], self.sums * (1 + self.bounded)
        layouts = t.own(number * CHUNK), tuple(t.own(self.steps * _words(kind)) for kind in kinds)

        @plgpu.inline_mgpu(arg_types=layouts, return_type=numbers(self.steps * self.each, jnp.float32))
        def run(ctx, queries, chunks):
            parts = list(itertools.batched(itertools.batched(t.numbers_of(queries, floats=True), CHUNK), 1 + self.bounded))
            words, found = [t.numbers_of(x) for x in chunks], []
            for step in range(self.steps):
                pieces = [x[step * _words(kind) : (step + 1) * _words(kind)] for x, kind in zip(words, kinds, strict=True)]
                rows = [t.floats_of(x, kind) for x, kind in zip(pieces, kinds, strict=True)]
                factors = [itertools.chain.from_iterable(map(zip, part, rows)) for part in parts]
                found += self._joined([functools.reduce(t.fused, x, t.float_number(0)) for x in factors])
            return t.made_of(found, floats=True)

        return run(queries, chunks)

    def largest(self, products: jax.Array) -> jax.Array:
        """Find the largest product of each row, among all queries, for all entries of that row."""
        size = self.steps * self.each

        @plgpu.inline_mgpu(arg_types=(t.own(size),), return_type=numbers(size, jnp.float32))
        def find(ctx, products):
            numbers, found = t.numbers_of(products, floats=True), []
            for step in range(self.steps):
                best = functools.reduce(t.greatest, numbers[step * self.each : (step + 1) * self.each])
                for distance in self.halvings:
                    best = t.greatest(best, t.shuffle(best, distance))
                found += [best] * self.each
            return t.made_of(found, floats=True)

        return products if self.sums == 1 else find(products)

    def _joined(self, sums):
        """Add up the sums of a row's threads; a thread keeps those of its own queries."""
        distance = self.lanes // 2
        while distance:
            if distance in self.halvings:
                half, upper = len(sums) // 2, (t.signed(t.thread()) & distance) > 0
                pairs = zip(sums[:half], sums[half:], strict=True)
                sums = [upper.select(b, a) + t.shuffle(upper.select(a, b), distance) for a, b in pairs]
            else:
                sums = [x + t.shuffle(x, distance) for x in sums]
            distance //= 2
        return sums


def _words(kind):
    """Count the words of a chunk."""
    return CHUNK * kind.itemsize // 4
