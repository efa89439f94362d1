"""Decode attention over lists of pages as one kernel for TPUs: no gathered copy of the cache.

Grid (B*H), one list after the other. The page numbers of all lists are in scalar memory. Keys and values stay in the device's
memory (HBM). The kernel copies the pages of a block into fast memory (VMEM) while it attends to earlier blocks, also across
lists. Each page is copied with a row of 128 positions that holds its own: no fewer positions can be copied.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp

from pallas_kernels._mosaic import softmax
from pallas_kernels._mosaic.batching import rows_together
from pallas_kernels._mosaic.limits import LANES, check_cache, check_dtypes, tile_rows, where_it_is
from pallas_kernels._mosaic.pallas import pl, plt

_SCALAR_BYTES = 1 << 18  # of scalar memory for page numbers; a TPU v5e has 1 MiB


@dataclasses.dataclass(frozen=True)
class Config:
    """How the work is divided.

    Attributes:
        block: slots that are attended to together, a multiple of 128.
        buffers: blocks in fast memory; all but one are being copied.
    """

    block: int = 512
    buffers: int = 4

    def __post_init__(self):
        if self.block < LANES or self.block % LANES:
            raise ValueError(f"Config: got block={self.block}, expected a multiple of {LANES}")
        if self.buffers < 2:
            raise ValueError(f"Config: got buffers={self.buffers}, expected at least 2")


@dataclasses.dataclass(frozen=True)
class _Windows:
    """How one array is copied page by page.

    Attributes:
        size: slots of a window, which is copied at once: a page of keys or values; whole pages of at least 128 positions.
        slots: slots S of the array. The rest behind the last whole window is in an array of its own, padded to a window.
    """

    size: int
    slots: int

    @property
    def cut(self) -> bool:
        return self.slots % self.size > 0

    def rest(self, x: jax.Array, empty: int) -> jax.Array:
        """Pad the slots of ``x`` [B, H, S, ...] behind its last whole window to a window: [B, H, size, ...]."""
        rest = x[:, :, self.slots - self.slots % self.size :]
        fill = ((0, 0), (0, 0), (0, self.size - rest.shape[2]), *((0, 0),) * (x.ndim - 3))
        return jnp.pad(rest, fill, constant_values=empty)

    def copy(self, refs, b, h, first, buffer, semaphore):
        """Start to copy the window that holds slot ``first``, from the array or from the rest, into ``buffer``."""
        window = first // self.size
        whole = self.slots // self.size

        def start(source):
            plt.make_async_copy(source, buffer, semaphore).start()

        if whole:

            @pl.when(window < whole)
            def _():
                start(refs[0].at[b, h, pl.ds(pl.multiple_of(window * self.size, self.size), self.size)])

        if self.cut:

            @pl.when(window == whole)
            def _():
                start(refs[1].at[b, h])


def _kernel(pages_ref, query_ref, *refs, windows, shared, heads, steps, page_size, scale, buffers):
    # Operands:
    #   pages int32 [L * steps * N], -1 for entries that are not listed
    #   query [1, G, D]
    #   keys [B, H, S, D], values [B, H, S, D], positions [B, H, S], each followed by its rest if it is cut
    # Results: out [1, G, D], lse [1, G, 1]
    # Scratch:
    #   blocks of keys and of values [buffers, N, page_size, D], and of positions [buffers, N, W]
    #   a semaphore for each buffer
    sources, refs = [], list(refs)
    for window in windows:
        sources.append([refs.pop(0) for _ in range(1 + window.cut)])
    out_ref, lse_ref, *blocks, semaphores = refs
    here, lists = pl.program_id(0), pl.num_programs(0)
    count = blocks[0].shape[1]
    group, dim = query_ref.shape[1:]

    def page_of(step, i):
        """Return entry ``i`` of block ``step``; blocks are counted over all lists."""
        if shared:
            step = step // (steps * heads) * steps + step % steps
        return pages_ref[step * count + i]

    def fetch(step):
        row, slot = step // steps, step % buffers

        def entry(i, _):
            page = page_of(step, i)

            @pl.when(page >= 0)
            def _():
                for window, source, block in zip(windows, sources, blocks, strict=True):
                    first, at = page * page_size, block.at[slot, i]
                    window.copy(source, row // heads, row % heads, first, at, semaphores.at[slot])

        jax.lax.fori_loop(0, count, entry, None)

    def arrive(step):
        slot = step % buffers

        def entry(i, _):
            @pl.when(page_of(step, i) >= 0)
            def _():
                for block in blocks:
                    plt.make_async_copy(block.at[slot, i], block.at[slot, i], semaphores.at[slot]).wait()

        jax.lax.fori_loop(0, count, entry, None)

    @pl.when(here == 0)
    def _():
        for step in range(buffers - 1):
            pl.when(step < lists * steps)(functools.partial(fetch, jnp.int32(step)))

    def attend(j, sums):
        step = here * steps + j
        ahead = step + buffers - 1
        pl.when(ahead < lists * steps)(functools.partial(fetch, ahead))
        arrive(step)
        slot = step % buffers
        keys, values = (block[slot].reshape(-1, dim) for block in blocks[:2])
        held = _held(blocks[2], slot, [page_of(step, i) for i in range(count)], page_size)
        return softmax.add_block(sums, query_ref[0], keys, values, held, scale)

    out, lse = softmax.result(jax.lax.fori_loop(0, steps, attend, softmax.nothing(group, dim)))
    out_ref[0] = out.astype(out_ref.dtype)
    lse_ref[0] = lse


def _held(positions, slot, pages, page_size):
    """Mask the slots of a block that hold a token, bool [1, N * page_size]; positions [buffers, N, W] have a page per row."""
    size = positions.shape[2]
    together = size // page_size  # pages side by side in a row of the result
    lane = jax.lax.broadcasted_iota(jnp.int32, (1, size), 1)
    rows = []
    for first in range(0, len(pages), together):
        row = jnp.full((1, size), -1, jnp.int32)
        for i, page in enumerate(pages[first : first + together]):
            found = positions[slot, pl.ds(first + i, 1), :]
            if together > 1:  # move the page to its place
                found = plt.roll(found, (i - jnp.maximum(page, 0) % together) % together * page_size, 1)
            row = jnp.where((lane // page_size == i) & (page >= 0), found, row)
        rows.append(row)
    return jnp.concatenate(rows, axis=1) >= 0


def gather_attention(
    query, key, value, slots, mask, *, scale, page_size, position, config: Config | None = None, interpret=False, **_
):
    """Attend to the listed slots only; ``interpret`` as in ``pallas_call`` runs anywhere."""
    if not slots.shape[2] or not key.shape[2]:
        return jnp.zeros_like(query), jnp.full(query.shape[:3], -jnp.inf, jnp.float32)
    config = Config() if config is None else config
    run = functools.partial(_attend, scale=scale, page_size=page_size, config=config, interpret=interpret)
    return rows_together(run)(query, key, value, slots, mask, position)


def _attend(query, key, value, slots, mask, position, *, scale, page_size, config, interpret):
    batch, heads, group, dim = query.shape
    lists, num_slots, listed = batch * heads, key.shape[2], slots.shape[2]
    size = max(page_size, LANES)
    count = min(max(config.block, size), pl.cdiv(listed * page_size, size) * size) // page_size
    steps = pl.cdiv(listed, count)
    pages = jnp.where(mask, jnp.clip(slots, 0, (num_slots - 1) // page_size), -1)
    pages = jnp.pad(pages, ((0, 0), (0, 0), (0, steps * count - listed)), constant_values=-1)
    windows = [_Windows(page_size, num_slots)] * 2 + [_Windows(size, num_slots)]
    operands = []
    for window, x, empty in zip(windows, (key, value, position), (0, 0, -1), strict=True):
        operands += [x, window.rest(x, empty)] if window.cut else [x]
    buffers = [plt.VMEM((config.buffers, count, page_size, dim), key.dtype)] * 2
    out, lse = pl.pallas_call(
        functools.partial(
            _kernel,
            windows=windows,
            shared=slots.shape[1] == 1,
            heads=heads,
            steps=steps,
            page_size=page_size,
            scale=scale,
            buffers=config.buffers,
        ),
        grid_spec=plt.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(lists,),
            in_specs=[
                pl.BlockSpec((1, group, dim), lambda i, _: (i, 0, 0)),
                *[pl.BlockSpec(memory_space=pl.ANY)] * len(operands),
            ],
            out_specs=(
                pl.BlockSpec((1, group, dim), lambda i, _: (i, 0, 0)),
                pl.BlockSpec((1, group, 1), lambda i, _: (i, 0, 0)),
            ),
            scratch_shapes=[
                *buffers,
                plt.VMEM((config.buffers, count, size), jnp.int32),
                plt.SemaphoreType.DMA((config.buffers,)),
            ],
        ),
        out_shape=(
            jax.ShapeDtypeStruct((lists, group, dim), query.dtype),
            jax.ShapeDtypeStruct((lists, group, 1), jnp.float32),
        ),
        cost_estimate=_cost(query, key, lists * listed, page_size),
        interpret=interpret,
        name="gather_attention",
    )(pages.reshape(-1), query.reshape(lists, group, dim), *map(where_it_is, operands))
    return out.reshape(query.shape), lse.reshape(query.shape[:3])


def _cost(query, key, pages, page_size):
    """Estimate the work for the compiler, as if every listed page were read."""
    group, dim = query.shape[2:]
    rows = pages * page_size
    read = 2 * rows * dim * key.dtype.itemsize + 4 * pages * (max(page_size, LANES) + 1)
    return pl.CostEstimate(
        flops=4 * rows * group * dim,
        transcendentals=rows * group,
        bytes_accessed=read + 2 * query.size * query.dtype.itemsize + 4 * query.size // dim,
    )


def check(query, key, value, slots, mask, *, page_size=1, position=None, rows=None, partials=None, logits=False, **_):
    """Raise ``NotImplementedError`` for dtypes, head dims, pages and lists that the kernel does not take."""
    check_dtypes(query, key, value)
    if logits or rows is not None or partials is not None:
        raise NotImplementedError("got rows in host memory, partials or logits, expected none of them")
    check_cache(key)
    if position is None:
        raise NotImplementedError("got position=None, expected an array")
    least = tile_rows(key)
    whole = page_size % least == 0 and (LANES % page_size == 0 or page_size % LANES == 0)
    if not whole or page_size > Config.block:
        raise NotImplementedError(
            f"got page_size {page_size}, expected a multiple of {least} for {key.dtype} that divides {LANES}, or a multiple "
            f"of {LANES} up to {Config.block}"
        )
    if 4 * slots.size > _SCALAR_BYTES:
        raise NotImplementedError(f"got {4 * slots.size:,} bytes of page numbers, expected at most {_SCALAR_BYTES:,}")
