"""Laws of `PlainCache`, against a cache kept as Python dictionaries."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import kvjax
from kvjax.cache.storage import PlainCache, empty_cache
from kvjax.protocol.typing import EMPTY
from kvjax.selection import moved_rows, page_slots, smooth, top_slots
from pallas_kernels.store.evict_token.reference import worst_slot
from tests.harness import example, prompts, read
from tests.kvjax.cases import ONE, go_on

pytestmark = pytest.mark.usefixtures("quick_compile")

SLOTS, HEADS, DIM = 6, 2, 2
QUICK = settings(max_examples=20, deadline=None, database=None)
# One program for each instead of one for each operation in it.
APPEND = jax.jit(PlainCache.append)
COMPACT = jax.jit(PlainCache.compact, static_argnums=3)
IN_PLACE = jax.jit(PlainCache.compact_in_place)
EVICT = jax.jit(PlainCache.evict)
BEST = jax.jit(top_slots, static_argnums=3)


class Model:
    """A cache as a dictionary from slot to position, for every row and head; a token's key is made from its position."""

    def __init__(self, batch):
        self.slots = [[{} for _ in range(HEADS)] for _ in range(batch)]
        self.cursor = [0] * batch
        self.seen = [0] * batch

    def append(self, counts):
        for row, count in enumerate(counts):
            for _ in range(count):
                if self.cursor[row] < SLOTS:
                    for head in self.slots[row]:
                        head[self.cursor[row]] = self.seen[row]
                self.cursor[row] += 1
                self.seen[row] += 1

    def compact(self, wanted, due):
        for row, heads in enumerate(self.slots):
            if not due[row]:
                continue
            for h, head in enumerate(heads):
                kept = [head[slot] for slot in sorted(head) if slot in wanted[row][h]]
                heads[h] = dict(enumerate(kept))
            self.cursor[row] = max(len(head) for head in heads)

    def replace(self, slots, when):
        for row, heads in enumerate(self.slots):
            if when[row]:
                last = self.cursor[row] - 1
                for h, head in enumerate(heads):
                    head.pop(slots[row][h], None)
                    if last in head:
                        head[slots[row][h]] = head.pop(last)
                self.cursor[row] = last


def contents(position):
    """Keys of tokens at ``position``: [B, H, T] to [B, H, T, D], different in every head."""
    head = jnp.arange(HEADS)[None, :, None]
    return jnp.stack([position * 10 + head, -position], axis=-1).astype(jnp.float32)


def append(cache, model, counts, width, start=None):
    batch = len(counts)
    at = np.array(model.seen)[:, None] + np.arange(width)[None]
    position = jnp.asarray(np.where(np.arange(width)[None] < np.array(counts)[:, None], at, EMPTY), jnp.int32)
    key = contents(jnp.broadcast_to(jnp.asarray(at, jnp.int32)[:, None], (batch, HEADS, width)))
    model.append(counts)
    return APPEND(cache, key, key + 1, position, start)


def check(cache, model):
    assert cache.cursor.tolist() == model.cursor
    for row, heads in enumerate(model.slots):
        for h, head in enumerate(heads):
            position = cache.position[row, h].tolist()
            assert {slot: p for slot, p in enumerate(position) if p >= 0} == head
            assert cache.valid[row, h].tolist() == [slot in head for slot in range(cache.num_slots)]
    want = contents(cache.position)
    held = np.asarray(cache.valid)
    np.testing.assert_array_equal(np.asarray(cache.key)[held], np.asarray(want)[held])
    np.testing.assert_array_equal(np.asarray(cache.value)[held], np.asarray(want)[held] + 1)


@QUICK
@given(st.data(), st.sampled_from([1, 2]))
def test_any_sequence_of_operations(data, batch):
    """Ragged appends, running out of room, compaction with holes, online eviction."""
    cache, model = empty_cache(batch, HEADS, SLOTS, DIM, "float32"), Model(batch)
    for _ in range(data.draw(st.integers(1, 5))):
        act = data.draw(st.sampled_from(["append", "append", "compact", "replace"]))
        if act == "append":
            width = data.draw(st.sampled_from([1, 3]))
            counts = [data.draw(st.integers(0, width)) for _ in range(batch)]
            cache = append(cache, model, counts, width)
        elif act == "compact":
            score = np.array(
                [[[data.draw(st.integers(0, 3)) for _ in range(SLOTS)] for _ in range(HEADS)] for _ in range(batch)],
                np.float32,
            )
            budget = data.draw(st.integers(0, 4))
            slots, keep = BEST(jnp.asarray(score), cache.valid, budget, 4)
            best = [
                [sorted(model.slots[b][h], key=lambda s, b=b, h=h: (-score[b, h, s], s))[:budget] for h in range(HEADS)]
                for b in range(batch)
            ]
            due = data.draw(st.lists(st.booleans(), min_size=batch, max_size=batch))
            whole = all(due) and data.draw(st.booleans())
            cache = COMPACT(cache, slots, keep, SLOTS - 4) if whole else IN_PLACE(cache, slots, keep, jnp.array(due))
            model.compact(best, due)
        else:
            budget = data.draw(st.integers(0, SLOTS))
            when = [budget < cursor <= SLOTS for cursor in model.cursor]
            if any(cursor > SLOTS for cursor in model.cursor) or not all(head for row in model.slots for head in row):
                continue
            slots = [[data.draw(st.sampled_from(sorted(head))) for head in row] for row in model.slots]
            worst = np.arange(SLOTS)[None, None] == np.array(slots)[..., None]
            cache, _ = EVICT(cache, jnp.asarray(1.0 - worst, jnp.float32), budget=budget)
            model.replace(slots, when)
        assert cache.num_slots == SLOTS
        check(cache, model)


@pytest.mark.parametrize("kept", [1, 1024, 2100], ids="{} kept".format)
def test_rows_move_to_the_front_block_by_block(kept):
    """No row is overwritten before it has moved, whatever the number of blocks; rows of the batch that are not due stay."""
    rng = np.random.default_rng(kept)
    store = rng.normal(size=(2, 2, 2500, 3)).astype(np.float32)
    slots = np.stack([np.sort(rng.choice(2500, kept, replace=False)) for _ in range(4)]).reshape(2, 2, kept).astype(np.int32)
    moved = np.asarray(jax.jit(moved_rows)(store, slots, np.array([True, False])))
    np.testing.assert_array_equal(moved[0, :, :kept], np.take_along_axis(store[0], slots[0, :, :, None], axis=1))
    np.testing.assert_array_equal(moved[0, :, kept:], store[0, :, kept:])
    np.testing.assert_array_equal(moved[1], store[1])


@QUICK
@given(st.lists(st.integers(0, 3), min_size=2, max_size=2), st.integers(0, 3))
def test_contiguous_append_equals_scatter(counts, start):
    """A prompt chunk written at a common start holds what row-wise writes hold."""
    first, model = empty_cache(2, HEADS, SLOTS, DIM, "float32"), Model(2)
    first = append(first, model, [start, start], 3) if start else first
    again = Model(2)
    again.append([start, start])
    scattered = append(first, model, counts, 3)
    together = append(first, again, counts, 3, start=jnp.int32(start))
    check(scattered, model)
    check(together, again)


def test_a_full_cache_drops_what_does_not_fit():
    """Out of room, in the row-wise and in the single-token path, nothing that is stored changes."""
    for batch, width in ((2, 3), (1, 1)):
        cache, model = empty_cache(batch, HEADS, SLOTS, DIM, "float32"), Model(batch)
        for _ in range(8):
            cache = append(cache, model, [width] * batch, width)
            check(cache, model)


@QUICK
@given(st.data())
def test_worst_slot_is_what_top_slots_leaves_out(data):
    """Evicting slot by slot agrees with keeping the best slots, also in ties, while slots are in order of position."""
    score = jnp.asarray([[[data.draw(st.integers(-2, 2)) for _ in range(SLOTS)]]], jnp.float32)
    position = jnp.arange(SLOTS, dtype=jnp.int32)[None, None]
    valid = jnp.ones((1, 1, SLOTS), bool)
    slots, keep = BEST(score, valid, SLOTS - 1, SLOTS)
    assert set(range(SLOTS)) - set(slots[keep].tolist()) == {int(worst_slot(score, valid, position)[0, 0])}


def test_top_slots_keeps_valid_slots_of_any_score():
    score = jnp.asarray([[[-jnp.inf, 5.0, jnp.nan, 1.0, -jnp.inf]]], jnp.float32)
    valid = jnp.asarray([[[True, True, False, True, False]]])
    slots, keep = top_slots(score, valid, 5, 5)
    assert slots[keep].tolist() == [0, 1, 3]


@pytest.mark.parametrize("pooling", ["avg", "max"])
@pytest.mark.parametrize("kernel", [1, 3, 5])
def test_smoothing_averages_or_takes_the_largest_neighbour(pooling, kernel):
    x = np.random.default_rng(0).normal(size=(2, 7)).astype(np.float32)
    want = np.zeros_like(x)
    for row, i in np.ndindex(x.shape):
        near = x[row, max(0, i - kernel // 2) : i + kernel // 2 + 1]
        want[row, i] = near.sum() / kernel if pooling == "avg" else near.max()
    np.testing.assert_allclose(smooth(jnp.asarray(x), kernel, pooling), want, atol=1e-6)


def test_pages_name_their_slots():
    assert page_slots(jnp.asarray([[2, 0]], jnp.int32), 3).tolist() == [[6, 7, 8, 0, 1, 2]]


def test_fork_repeats_rows_and_owns_its_arrays():
    """A fork survives the donation of its original, and the original survives the donation of its fork."""
    cache = read(example("h2o"), config=ONE)
    copy, three = kvjax.fork(cache), kvjax.fork(cache, 3)
    assert three.batch == 9
    for one, many in zip(jax.tree.leaves(cache.layers), jax.tree.leaves(three.layers), strict=True):
        np.testing.assert_array_equal(np.repeat(one, 3, axis=0), many)
    first, second = go_on(cache), go_on(copy)
    np.testing.assert_array_equal(first.tokens, second.tokens)
    assert three.batch == 9 and jax.tree.leaves(three.layers)[0].sum() != 0


def test_repr_says_what_a_cache_is_and_shows_no_arrays():
    """Rows, tokens, method, layers and bytes; also of tracers and of a cache that was consumed."""
    cache = read(example("quest"), config=ONE)
    size = sum(x.nbytes for x in jax.tree.leaves((cache.layers, cache.shared)))
    tail = f"1 layers of 2 KV heads x 8, {size / 1e6:.3f} MB)"
    assert repr(cache) == f"Cache(3 rows, 9 to 40 tokens, Quest(budget=12, ...), {tail}"
    seen = []
    jax.jit(lambda traced: seen.append(repr(traced)))(cache)
    assert seen[0].startswith("Cache(3 rows, traced tokens, Quest(budget=traced")
    out = go_on(cache)
    assert repr(cache).startswith("Cache(3 rows, consumed tokens,") and repr(cache).endswith(tail)
    assert repr(out).startswith("Generation(10 tokens in 3 rows, Cache(3 rows, 19 to 50 tokens, Quest(")
    assert repr(out.stats).startswith("Stats(3 rows, ") and "of 19 to 50 tokens attended, " in repr(out.stats)
    assert len(repr(out)) < 250 and repr(jax.tree.map(type, out.stats)).startswith("Stats(")


def test_repr_says_which_bytes_are_in_host_memory():
    """Of an offloaded cache, and of one row or two."""
    cache = read(example("quest", offload=True), rows=prompts()[:2], config=ONE)
    assert repr(cache).startswith("Cache(2 rows, 40 and 23 tokens, Quest(budget=12, ...), ")
    assert repr(cache).endswith(" MB of them in host memory)")
    assert repr(read(example("full"), rows=prompts()[:1], config=ONE)).startswith("Cache(1 row, 40 tokens, Full(), ")
