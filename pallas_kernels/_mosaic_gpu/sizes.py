"""What a kernel of `decode.attend` is made for: its sizes, where a warp's ring lies, and the lists that it reads."""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w

ENTRIES = 16  # of a step of a warp: a product of 16-bit numbers sums over 16
TILES = ENTRIES // 8  # a product has 8 of them as columns
SPARE = 2048  # bytes of shared memory that rings do not take
LINE = 128  # bytes of a line of a tile of the copy engine
ROWS = 4096  # of a query, times channels: more sums do not fit into the registers of a warp


@dataclasses.dataclass(frozen=True)
class Lists:
    """Which rows of the cache a program reads, in blocks of entries.

    Attributes:
        operands: arrays.
        entries: of refs of ``operands``, row and KV head to the number of entries, and scalars that the next two get.
        row: inside of `plgpu.inline_mgpu`, of scalars, an entry and what was loaded for it to its row of the cache, or -1.
        load: inside, of refs, scalars and an entry to int32 numbers, loaded a step ahead; a bias or place is the last one.
        loads: how many.
        biased: whether there is a bias, a float32 that is added to the logits.
        turned: whether there is a place instead, to which the key is rotated.
        block_number: of refs, row, KV head, number and size of blocks to how many are read, and a function from 0, 1, ... to
            these; None: all are.
        tiled: whether the entries of a block are neighbouring rows, from the row of the block's first entry on.
        live: of refs, row and KV head to how many entries are enough: no later one is read. None: all are.
        host: all rows, in host memory, where keys and values are copies of some; as in `pallas_kernels.host.Rows`.
        copy: inside, of scalars and a row to the row of its copy, or -1 if there is none.
    """

    operands: tuple[jax.Array, ...]
    entries: Callable[..., tuple[Any, tuple[Any, ...]]]
    row: Callable[..., Any]
    load: Callable[..., list[Any]] | None = None
    loads: int = 0
    biased: bool = False
    turned: bool = False
    block_number: Callable[..., Any] | None = None
    tiled: bool = False
    live: Callable[..., Any] | None = None
    host: jax.Array | None = None
    copy: Callable[..., Any] | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
    """Static sizes of a kernel.

    Attributes:
        heads: KV heads.
        group: rows of a query.
        dim: channels.
        slots: of the cache.
        dtype: of query, keys and values.
        shared: bytes of shared memory that a program may have.
        splits: programs in a cluster.
        clusters: of a list.
        queries: positions of a query; 0: none are given.
        first: the query's first row among those that share the positions.
        kind: of codes of 8 bits, in which keys and values are; None: they are numbers of ``dtype``.
        logits: whether the logits are a result, too; then entries are slots.
        most: warpgroups that it may have.
        tiled: whether the copy engine brings blocks of neighbouring rows, which all warps of a program share.
    """

    heads: int
    group: int
    dim: int
    slots: int
    dtype: Any
    shared: int
    splits: int = 1
    clusters: int = 1
    queries: int = 0
    first: int = 0
    kind: str | None = None
    logits: bool = False
    most: int = 3
    tiled: bool = False

    @property
    def warpgroups(self) -> int:
        """Warpgroups that attend, each of four warps: as many as registers and shared memory are enough for."""
        most = 3 if max(self.halves, 2) * self.dim <= 256 and not self.tiled else 2
        return max((x for x in range(1, min(self.most, most) + 1) if self._fits(x)), default=1)

    def _fits(self, warpgroups: int) -> bool:
        """Return whether so many have enough stages, in which there is room for sums, and for edges two times."""
        stages = self._stages(warpgroups)
        return stages > 1 + self.tiled and stages * self._rows >= self.group * (4 * self.dim + 16)

    @property
    def fits(self) -> bool:
        """Whether there is a ring for one warpgroup."""
        return self._fits(1)

    @property
    def warps(self) -> int:
        """Warps of a program."""
        return 4 * self.warpgroups

    @property
    def block(self) -> int:
        """Entries that the warps of a program read in a step."""
        return ENTRIES * self.warps

    @property
    def halves(self) -> int:
        """Parts of a query of 8 rows; a product has 16, so two of them."""
        return -(-self.group // 8)

    @property
    def width(self) -> int:
        """Bytes of a row of keys or values."""
        return self.dim * (2 if self.kind is None else 1)

    @property
    def lines(self) -> int:
        """Tiles of a block of keys or values; a row has a line in each."""
        return self.width // LINE

    @property
    def pitch(self) -> int:
        """Bytes from a row to the next in a ring; 16 more than a row, so that rows read at once lie in other banks."""
        return self.width + 16

    @property
    def tags(self) -> int:
        """Where the positions of a stage begin: behind its keys and values, if these are not in tiles of their own."""
        return 0 if self.tiled else 2 * ENTRIES * self.pitch

    @property
    def biases(self) -> int:
        """Where the biases of a stage begin, or the places."""
        return self.tags + 4 * ENTRIES

    @property
    def scales(self) -> int:
        """Where words begin that have scales of keys, scales of values, and which half of both words it is."""
        return self.biases + 4 * ENTRIES

    @property
    def stage(self) -> int:
        """Bytes of a stage of a ring, which is what a warp copies in a step."""
        return self.scales + (0 if self.kind is None else 12 * ENTRIES)

    @property
    def stages(self) -> int:
        """Stages of a ring, of which all but one are on their way."""
        return self._stages(self.warpgroups)

    def _stages(self, warpgroups: int) -> int:
        tiles = 2 * ENTRIES * self.width if self.tiled else 0
        return (self.shared - SPARE) // (4 * warpgroups * (self.stage + tiles))

    @property
    def _rows(self) -> int:
        """Bytes of a stage of a warp in which it publishes its sums."""
        return ENTRIES * self.width if self.tiled else self.stage

    @property
    def room(self) -> int:
        """Bytes in which a warp publishes its sums: its ring, or its part of the tiles of keys."""
        return self.stages * self._rows

    @property
    def memory(self) -> int:
        """Bytes of the rings of all warps of a program."""
        return self.warps * self.stages * self.stage

    def place(self, ring, stage=0):
        """Return the address of a stage of this warp's ring."""
        return t.number(t.address(ring)) + w.warp() * (self.stages * self.stage) + stage * self.stage
