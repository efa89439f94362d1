"""Kernels of `pallas_kernels._mosaic_gpu.arrays` without a GPU: an array of registers is an array of JAX.

Programs run one after the other, those of a cluster and their warpgroups as threads that meet. What emits instructions is
replaced by what it means. An index out of range is an error, and memory that nothing has written is poison. Instructions, and
barriers, are tried on a card alone.
"""

import contextlib
import importlib
import threading
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, bins, exact_products, key_codes, products, team
from pallas_kernels._mosaic_gpu import assembly as module
from pallas_kernels._mosaic_gpu.exact_products import ExactProducts
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.products import CHUNK
from pallas_kernels._mosaic_gpu.team import BINS, Team
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels.formats.packed_vectors import unpack
from pallas_kernels.machine import assume_machine
from tests.pallas_kernels import instructions
from tests.pallas_kernels.warp import Number, Warp

HERE = threading.local()  # of a warpgroup: places on the axes, those it meets, what they say, shared memory of its cluster


class Memory:
    """An array in global or shared memory."""

    def __init__(self, x):
        if isinstance(x, jax.core.Tracer):
            pytest.skip("mapped and traced kernels run on a card alone")
        self.x = np.array(x)

    @classmethod
    def poison(cls, like):
        fill = np.nan if jnp.issubdtype(like.dtype, jnp.floating) else 77
        return cls(np.full(like.shape, fill).astype(like.dtype))

    shape = property(lambda self: self.x.shape)
    dtype = property(lambda self: self.x.dtype)

    @property
    def at(self):
        """Memory at some place of this one."""

        class At:
            def __getitem__(_, at):
                part = object.__new__(Memory)
                part.x = self.x[int(at) if jnp.ndim(at) == 0 else at]
                return part

        return At()

    def __getitem__(self, at):
        return jnp.asarray(self.x[at])

    def __setitem__(self, at, x):
        self.x[at] = np.asarray(x)

    def rows(self, dim):
        return self.x.reshape(-1, dim)


def _at(ref, index, rows):
    """Flat places in memory, and which of them are meant."""
    index = np.asarray(index, np.int64)
    line, width = (0, 0) if rows is None else rows
    at = np.where(index < 0, 0, np.asarray(line, np.int64) * width + index)
    assert (at >= 0).all() and (at < max(ref.x.size, 1)).all(), f"got {at.min()} to {at.max()} in {ref.shape}"
    return at, index >= 0


def load(ref, index, other=0, rows=None):
    at, shown = _at(ref, index, rows)
    kind = np.float32 if jnp.issubdtype(ref.dtype, jnp.floating) else np.int32
    return jnp.asarray(np.where(shown, ref.x.reshape(-1)[at].astype(kind), np.asarray(other, kind)))


def store(ref, index, x, rows=None):
    at, shown = _at(ref, index, rows)
    at, shown, x = np.broadcast_arrays(at, shown, np.asarray(x))
    ref.x.reshape(-1)[at[shown]] = np.asarray(jnp.asarray(x[shown]).astype(ref.dtype))


def _runs(index, count, rows):
    assert (np.asarray(index) % count == 0)[np.asarray(index) >= 0].all()
    at = np.where(np.asarray(index) < 0, -1, np.asarray(index) + np.arange(count)[:, None]).reshape(-1)
    return at, rows and (np.tile(rows[0], count), rows[1])


def load_run(ref, index, count, rows=None):
    at, rows = _runs(index, count, rows)
    return load(ref, at, rows=rows)


def store_run(ref, index, x, rows=None):
    at, rows = _runs(index, 8, rows)
    store(ref, at, x, rows)


def scalar(ref, index):
    return load(ref, jnp.reshape(index, (1,)))[0]


def put(ref, index, x):
    store(ref, jnp.reshape(index, (1,)), jnp.reshape(x, (1,)))


def load_shared(ref, index):
    return load(ref, index)


def store_shared(ref, index, x):
    assert (np.asarray(index) >= 0).all()
    store(ref, index, x)


def ballots(bit):
    words = ((np.asarray(bit).reshape(-1, 32) != 0).astype(np.int64) << np.arange(32)).sum(axis=1)
    return jnp.asarray(np.repeat(words.astype(np.uint32).view(np.int32), 32))


def exchanged(x, distance):
    assert distance < 32
    return x[np.arange(x.shape[0]) ^ distance]


def wait(parts):
    if parts > 1:
        HERE.cluster.wait()


def _of_groups(x):
    """What each warpgroup of the program has."""
    HERE.said[HERE.axes["group"]] = x
    HERE.block.wait()
    found = [*HERE.said]
    HERE.block.wait()
    return found


def team_load(self, ref, line, other=0):
    slot = self.entries()
    return load(ref, jnp.where(slot < ref.shape[1], slot, -1), other, (line, ref.shape[1]))


def joined(self, sums, scratch, first=0):
    folds = {"add": np.sum, "min": np.min, "max": np.max}
    columns = zip(*_of_groups([x for x, _ in sums]), strict=True)
    return [jnp.asarray(folds[fold](np.stack(x)), x[0].dtype) for x, (_, fold) in zip(columns, sums, strict=True)]


def team_before(self, words, scratch, small=True):
    places, counts = np.asarray(order(words.shape[0])), np.empty(words.shape, np.int32)
    counts[places] = words
    totals = [np.sum(x, dtype=np.int32) for x in _of_groups(words)]
    earlier = np.cumsum(counts) - counts + sum(totals[: HERE.axes["group"]])
    return jnp.asarray(earlier[places], jnp.int32), jnp.int32(sum(totals))


def order(size):
    each, chunk = size // THREADS, np.gcd(size // THREADS, 4)
    number, (warp, lane) = np.arange(each)[:, None, None], np.indices((4, 32))[:, None]
    place = warp * (32 * each) + number // chunk * (32 * chunk) + lane * chunk + number % chunk
    return jnp.asarray(place.reshape(-1), jnp.int32)


@staticmethod
def folded(x, each, fold):
    return {"add": jnp.sum, "max": jnp.max}[fold](x.reshape(-1, each * THREADS), axis=0)


def clear(self, bins):
    bins.x[...] = 0


def tally(self, bins, first, key, low, high, shift):
    offset = np.asarray(key).view(np.uint32) - np.asarray(low).view(np.uint32)
    inside = offset < np.asarray(high).view(np.uint32) - np.asarray(low).view(np.uint32)
    with HERE.lock:
        np.add.at(bins.x, int(first) + (offset[inside] >> np.uint32(shift)), 1)


def counts(self, bins, first):
    each = BINS // self.groups
    number = BINS - 1 - (HERE.axes["group"] * each + np.asarray(order(each)))
    at = next(i for i, x in enumerate(HERE.memory[HERE.axes["part"]]) if x is bins)
    found = sum(x[at].x[int(first) + number] for x in HERE.memory)
    bins.x[BINS - int(first) + number] = 0
    return jnp.asarray(found, jnp.int32), jnp.asarray(number)


def together(self, numbers, folds, scratch, first):
    HERE.numbers[HERE.axes["part"]] = numbers
    HERE.cluster.wait()
    found = np.asarray([[int(x) for x in HERE.numbers[part]] for part in range(self.parts)])
    HERE.cluster.wait()
    pieces = {"min": np.min, "max": np.max, "low": lambda x: (x & 0xFFFF).sum(), "high": lambda x: (x >> 16).sum()}
    mine = HERE.axes["part"]
    return [jnp.int32(pieces[fold](found[: mine if earlier else None, at])) for at, fold, earlier in folds]


def team_meet(self):
    HERE.cluster.wait()


TEAM = {
    "load": team_load, "joined": joined, "before": team_before, "folded": folded, "clear": clear, "tally": tally,
    "counts": counts, "meet": team_meet, "end": team_meet, "together": together,
}  # fmt: skip


def _run(body, refs, grid, names, scratch, parts, groups):
    def one(part, group, failures, place, **shared):
        vars(HERE).update(axes=dict(zip(names, place, strict=False)) | {"part": part, "group": group}, refs=refs, **shared)
        try:
            with jax.disable_jit():
                body(*refs, *shared["memory"][part])
        except BaseException as failure:
            failures.append(failure)
            shared["cluster"].abort()
            shared["block"].abort()

    for place in np.ndindex(*grid):
        failures, cluster = [], {"cluster": threading.Barrier(parts * groups), "numbers": [None] * parts}
        memory, lock = [[*map(Memory.poison, scratch)] for _ in range(parts)], threading.Lock()
        others = []
        for part in range(parts):
            block = {"block": threading.Barrier(groups), "said": [None] * groups, "memory": memory, "lock": lock}
            given = cluster | block | {"failures": failures, "place": place}
            others += [threading.Thread(target=one, args=(part, group), kwargs=given) for group in range(groups)]
        for x in others:
            x.start()
        for x in others:
            x.join()
        for failure in sorted(failures, key=lambda x: isinstance(x, threading.BrokenBarrierError)):
            raise failure


def program(body, out_type, *, grid, names=arrays.NAMES, scratch=(), parts=1, groups=1, approx=False):
    def run(*operands):
        results = [Memory.poison(x) for x in out_type]
        _run(body, [*map(Memory, operands), *results], grid, names, scratch, parts, groups)
        return [x[...] for x in results]

    return run


def in_place(body, states, *, grid, names=arrays.NAMES, out_type=(), scratch=(), parts=1):
    def run(*operands):
        written = [*map(Memory, states), *map(Memory.poison, out_type)]
        _run(body, [*map(Memory, operands), *written], grid, names, scratch, parts, 1)
        return [x[...] for x in written]

    return run


def queries(self, query, owner, added=None):
    found = [x.x.reshape(-1, self.group, self.dim)[int(owner)].astype(np.float32) for x in (query, added) if x is not None]
    whole = sum(found).sum(axis=0, keepdims=True) if self.summed else sum(found)
    number, thread = np.divmod(np.arange(THREADS * self.sums * CHUNK), THREADS)
    return jnp.asarray(whole[number // CHUNK, thread % self.lanes * CHUNK + number % CHUNK])


def chunks(self, vectors, row):
    return tuple(x.rows(self.dim)[np.asarray(row)].astype(np.float32) for x in vectors)


def multiply(self, query, blocks, dtypes):
    whole = (
        np.asarray(query).reshape(self.sums, CHUNK, THREADS)[..., : self.lanes].swapaxes(1, 2).reshape(self.sums, self.dim)
    )
    parts = [np.minimum(whole, 0), np.maximum(whole, 0)] if self.bounded else [whole]
    row, head, _ = (np.asarray(x) for x in self.entries())
    with np.errstate(invalid="ignore"):  # of rows that are hidden later
        found = sum(part @ x[:: self.lanes].T for part, x in zip(parts, blocks, strict=True))  # all threads of a row have it
    return jnp.asarray(found[head, row])


def largest(self, found):
    row, head, _ = (np.asarray(x) for x in self.entries())
    table = np.zeros((self.rows, self.sums), np.float32)
    table[row, head] = found
    return jnp.asarray(table.max(axis=1)[row])


def exact_queries(self, query, owner):
    lane, heads = np.arange(32), query.x.reshape(-1, self.group, self.dim // 32, 4, 8)[int(owner)].astype(np.float32)
    own = [heads[np.minimum(lane // 4 % 4 + first, self.group - 1), :, lane % 4] for first in range(0, self.group, 4)]
    return exact_products.bfloat16_parts([Number(x) for x in np.concatenate(own, axis=1).reshape(32, -1).T])


def exact_multiply(self, queries, blocks, dtypes):
    lane, rows = np.arange(32), np.asarray(blocks[0]).astype(dtypes[0]).reshape(self.steps, 4, 32, -1, 4, 8)
    words = np.ascontiguousarray(rows[:, :, lane, :, lane % 4]).view(np.int32).astype(np.int64)
    warps = [[Number(x) for x in words[:, :, warp].reshape(32, -1).T] for warp in range(4)]
    found = [[x.each for x in exact_products.tile_products(self.each, queries, warp)] for warp in warps]
    return jnp.asarray(np.swapaxes(found, 0, 1).reshape(-1))


def butterflies(x, lanes):
    warps = np.asarray(x).reshape(-1, 4, 32).swapaxes(0, 1)
    found = [[y.each for y in key_codes.mixed([Number(y) for y in warp], lanes)] for warp in warps]
    return jnp.asarray(np.swapaxes(found, 0, 1).reshape(-1))


def _unpacked(values, bitmap, row):
    pairs = (x.rows(x.shape[-1])[row] for x in (values, bitmap))
    return np.asarray(unpack(*map(jnp.asarray, pairs), 32 * bitmap.shape[-1]).astype(jnp.float32))


_TOKEN = np.arange(4)[:, None, None] * 32 + np.arange(2)[:, None] * THREADS + np.arange(8) * 4  # entries of a step's vectors


def load_queries(n, parts, head):
    terms = parts.rows(n.dim)[int(head) :][: n.group * n.stored].astype(np.float32)
    return terms.reshape(n.group, n.stored, n.dim).sum(axis=1)


def score_step(n, blocks, reduce):
    def load(refs, where):
        line, begin, count = map(int, where)
        row = begin + np.arange(64)
        return np.where((row < count)[:, None], _unpacked(*refs, line * blocks + np.where(row < count, row, 0)), 0)

    def score(ref, shared, loaded, query, mine, where):
        line, begin, count = map(int, where)
        row, found = begin + np.arange(64), loaded @ query.T
        if reduce:
            found = getattr(found, reduce)(axis=1, keepdims=True)
        at = (line * found.shape[1] + np.arange(found.shape[1])) * blocks + row[:, None]
        shown = np.asarray(mine)[_TOKEN.reshape(-1), None] > 0
        store(ref, np.where(shown, at, -1), np.where(row[:, None] < count, found, -np.inf))

    return load, score


def attention_step(n, scale, packed):
    def load(refs, rows):
        rows = np.asarray(rows)[_TOKEN].reshape(4, 16)
        read = np.maximum(rows, 0).reshape(-1)
        found = _unpacked(*refs, read) if packed else refs[0].rows(n.dim)[read].astype(np.float32)
        return np.where(rows[..., None] >= 0, found.reshape(4, 16, n.dim), 0)

    def begin():
        return np.zeros((4, n.group, n.dim)), np.full((4, n.group), -np.inf), np.zeros((4, n.group))

    def weigh(shared, key, query, rows, maximum, total):
        logits = np.einsum("wtd,gd->wgt", key, query) * scale * np.log2(np.e)
        logits = np.where(np.asarray(rows)[_TOKEN].reshape(4, 1, 16) >= 0, logits, -np.inf)
        risen = np.maximum(maximum, logits.max(axis=2))
        shift = np.where(risen > -np.inf, risen, 0)
        weights, decays = np.exp2(logits - shift[..., None]), np.exp2(maximum - shift)
        return risen, total * decays + weights.sum(axis=2), decays, weights

    def add(shared, value, right, decays, sums):
        return sums * decays[..., None] + np.einsum("wgt,wtd->wgd", right, value)

    def publish(shared, edges, state):
        sums, maximum, total = state
        shared.x[: sums.size], edges.x[: 2 * total.size] = sums.reshape(-1), np.stack([maximum, total], -1).reshape(-1)

    return load, load, begin, weigh, add, publish


def address(ref):
    """Return where memory is: an int for the program's own shared memory, or a larger one for an array of all programs."""
    kinds, begin = ((HERE.memory[HERE.axes["part"]], 20), (HERE.refs, 40)), ref.x.ctypes.data
    places = ((i, begin - x.x.ctypes.data, x.x.nbytes, bits) for held, bits in kinds for i, x in enumerate(held))
    return next(((1 + i) << bits) + at for i, at, size, bits in places if 0 <= at < max(size, 1))


def _memory(place, shared):
    peer, place = divmod(place, 1 << 24) if shared else (0, place)
    held = HERE.memory[peer - 1 if peer else HERE.axes["part"]] if shared else HERE.refs
    number, at = divmod(place, 1 << (20 if shared else 40))
    return held[number - 1].x.reshape(-1).view(np.uint8), at


def assembly(lines, refs=(), numbers=(), results=()):
    threads = instructions.Threads(HERE.axes["group"], _memory, HERE.block.wait, HERE.lock)
    count = max((len(x) // THREADS for x in numbers if np.ndim(x)), default=1)
    columns = [np.asarray(x).reshape(-1, THREADS if np.ndim(x) else 1) for x in numbers]
    kinds = ["s32" if x is None or not jnp.issubdtype(x, jnp.floating) else "f32" for x in results]
    rounds = [[*map(address, refs), *(x[i % len(x)] for x in columns)] for i in range(count)]
    found = [*zip(*(threads.run(" ".join(lines), x, kinds) for x in rounds), strict=True)]
    for x, dtype in zip(found, results, strict=True):
        assert dtype is not None or (x[0] == x[0][0]).all(), "got a scalar that is not the same in all threads"
    return [jnp.concatenate(x) if dtype is not None else jnp.int32(x[0][0]) for x, dtype in zip(found, results, strict=True)]


KERNELS = {  # functions of kernels that emit instructions themselves
    "attend.mosaickv.packed_attention": {"load_queries": load_queries, "step_functions": attention_step},
    "score.mosaickv.packed_score": {"load_queries": load_queries, "step_functions": score_step},
    "query.mosaickv.project_query": {"rounded": lambda x, dtype: x.astype(dtype).astype(jnp.float32)},
}


@contextlib.contextmanager
def emulated():
    """Run kernels of `arrays` here, for an H100, within this context."""
    here = globals()
    changed = {
        arrays: {
            **{x: here[x] for x in (*"load load_run store store_run scalar put load_shared store_shared ballots".split(),)},
            **{x: here[x] for x in ("exchanged", "wait", "program", "in_place")},
            "spread": lambda x, size, dtype=jnp.int32: jnp.broadcast_to(jnp.asarray(x, dtype), (size,)),
            "counted": lambda size: jnp.arange(size, dtype=jnp.int32),
            "repeated": jnp.tile,
            **dict.fromkeys(("meet", "arrive"), lambda *_: None),
        },
        plgpu: {"load": lambda ref, **_: ref[...]},
        module: {"run": assembly},
        bins: dict.fromkeys(("meet_all", "meet_memory"), lambda parts: (HERE.cluster if parts > 1 else HERE.block).wait()),
        Team: TEAM,
        team: {"order": order},
        products.Products: {x: here[x] for x in ("queries", "chunks", "multiply", "largest")},
        key_codes: {"butterflies": butterflies, "t": Warp(0), "w": Warp(0)},
        exact_products: {"t": Warp(0), "w": Warp(0)},
        ExactProducts: {"queries": exact_queries, "chunks": chunks, "multiply": exact_multiply},
        lax: {"axis_index": lambda name: jnp.int32(HERE.axes[name])},
        **{importlib.import_module(f"pallas_kernels.{x}.pallas_mosaic_gpu"): names for x, names in KERNELS.items()},
    }
    with contextlib.ExitStack() as stack:
        for owner, names in changed.items():
            for name, x in names.items():
                stack.enter_context(mock.patch.object(owner, name, x))
        stack.enter_context(assume_machine("gpu", (9, 0)))
        stack.enter_context(jax.disable_jit())
        yield
