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

CHUNK = 8  # channels of a thread


@dataclasses.dataclass(frozen=True)
class Products:
    """How a program of one warpgroup multiplies.

    Attributes:
        group: queries.
        dim: channels of a row.
        steps: rows that each thread reads a chunk of.
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
        """Rows of a program."""
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

    def entries(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Return, for each product of this thread, its row in the program, its query, and whether this thread writes it."""
        entry = arrays.counted(t.THREADS * self.steps * self.each)
        number, thread = entry >> 7, entry & (t.THREADS - 1)
        row = jax.lax.div(number, self.each) * (t.THREADS // self.lanes) + jax.lax.div(thread, self.lanes)
        query, rest = jax.lax.rem(number, self.each), self.lanes - 1
        for at, distance in enumerate(self.halvings):
            query = query + jnp.where((thread & distance) > 0, self.sums >> (at + 1), 0)
            rest -= distance
        return row, query, (thread & rest) == 0

    def step_rows(self) -> jax.Array:
        """Return the row in the program of each step, int32 [128 * steps]."""
        return dataclasses.replace(self, summed=True).entries()[0]

    def run(self, query: Any, vectors: tuple[Any, ...], owner: Any, row: jax.Array, added: Any = None) -> jax.Array:
        """Multiply: float32 [128 * steps * each], in the order of `entries`.

        Args:
            query: [L, G, D] in global memory.
            vectors: one array [N, D], or two if ``bounded``.
            owner: int32, which of the L.
            row: int32 [128 * steps], which of the N, in the order of `step_rows`.
            added: float32 [L, G, D], added to the query; or None.
        """
        queries = (query,) if added is None else (query, added)
        kinds, size = [[jnp.dtype(x.dtype) for x in refs] for refs in (queries, vectors)], t.THREADS * self.steps * self.each
        ref, zero = plgpu.RefType(), lambda: t.float_number(0)

        def load(of, kind, index, chunk):
            return t.load_some(t.at(t.address(of), t.element(index, self.dim, chunk), kind.itemsize), kind, CHUNK)

        @plgpu.inline_mgpu(
            arg_types=((ref,) * len(queries), (ref,) * len(vectors), plgpu.Layout.WG_SPLAT, t.own(self.steps)),
            return_type=plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=t.own(self.steps * self.each)),
        )
        def multiply(ctx, queries, vectors, owner, row):
            chunk, first = t.signed(t.thread() % self.lanes) * CHUNK, t.number(t.value(owner)) * self.group
            loaded = [[load(*x, at, chunk) for x in zip(vectors, kinds[1], strict=True)] for at in t.numbers_of(row)]
            heads = []
            for g in range(self.group):
                head, *more = [load(*x, first + g, chunk) for x in zip(queries, kinds[0], strict=True)]
                heads.append([a + b for a, b in zip(head, more[0], strict=True)] if more else head)
            if self.summed:
                heads = [[functools.reduce(operator.add, column) for column in zip(*heads, strict=True)]]
            parts = [[head] for head in heads]
            if self.bounded:  # max(q * low, q * high) = min(q, 0) * low + max(q, 0) * high
                parts = [
                    [
                        [(x < 0.0).select(*two) for x in head for two in [(x, zero()) if low else (zero(), x)]]
                        for low in (True, False)
                    ]
                    for head in heads
                ]
            found = []
            for rows in loaded:
                found += self._joined(
                    [functools.reduce(t.fused, itertools.chain(*map(zip, part, rows)), zero()) for part in parts]
                )
            return t.made_of(found, floats=True)

        return multiply(queries, vectors, owner, row)

    def largest(self, products: jax.Array) -> jax.Array:
        """Find the largest product of each row, among all queries, for all entries of that row."""

        @plgpu.inline_mgpu(
            arg_types=(t.own(self.steps * self.each),),
            return_type=plgpu.ShapeDtypeStruct(products.shape, jnp.float32, layout=t.own(self.steps * self.each)),
        )
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
