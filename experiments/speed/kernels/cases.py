"""The cases of `experiments.speed.kernels`: operations, their shapes when an 8B model decodes, the bytes they read."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.speed.kernels.case import BYTES, GROUP, Case, Sizes, listed, normal, store
from experiments.speed.kernels.cases_8_bits import cases_8_bits
from experiments.speed.kernels.cases_codes import code_cases
from experiments.speed.kernels.cases_evict import evict_cases
from experiments.speed.kernels.cases_search import search_cases
from pallas_kernels.attend.dense_decode import DENSE_DECODE, dense_decode
from pallas_kernels.attend.gather_attention import GATHER_ATTENTION, gather_attention
from pallas_kernels.attend.merge_splits import MERGE_SPLITS, merge_splits
from pallas_kernels.attend.past_attention import PAST_ATTENTION, past_attention
from pallas_kernels.attend.prefix_attention import PREFIX_ATTENTION, prefix_attention
from pallas_kernels.attend.sparse_attention import SPARSE_ATTENTION, sparse_attention
from pallas_kernels.choose.compact import COMPACT, compact
from pallas_kernels.choose.kth_select import KTH_SELECT, kth_select
from pallas_kernels.choose.sentence_cut import JOINS, SENTENCE_CUT, Rules, sentence_cut
from pallas_kernels.score.page_score import PAGE_SCORE, page_score
from pallas_kernels.score.token_vote import TOKEN_VOTE, token_vote
from pallas_kernels.score.window_score import WINDOW_SCORE, window_score


def cases(tiny: bool = False) -> list[Case]:
    """All cases.

    Args:
        tiny: make them in sizes that a test can run.
    """
    sizes = Sizes(tiny)
    makers = (_gather, _dense, _merge, _select, _scores, _votes, _prompts, _sparse, _sentences)
    makers = (*makers, code_cases, search_cases, evict_cases, cases_8_bits)
    return [case for maker in makers for case in maker(sizes)]


def _gather(sizes: Sizes) -> Iterator[Case]:
    scale = 1 / math.sqrt(sizes.dim)
    slots = sizes.count(131072)

    def case(
        name: str, batch: int, entries: int, page_size: int = 1, shared: bool = False, rotate: bool = False
    ) -> Case:
        entries = max(1, sizes.count(entries * page_size) // page_size)

        def make() -> tuple:
            lists = listed(3, (batch, 1 if shared else sizes.heads), slots // page_size, entries)
            position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, sizes.heads, slots))
            return *store(sizes, batch, slots), lists, jnp.ones(lists.shape, bool), position

        def run(query: Array, key: Array, value: Array, lists: Array, mask: Array, position: Array, **how: Any) -> Any:
            place = jnp.broadcast_to(jnp.arange(lists.shape[2], dtype=jnp.int32), lists.shape)
            angles = jnp.exp(-jnp.arange(sizes.dim // 2, dtype=jnp.float32))
            more = {"place": place, "inv_freq": angles} if rotate else {}
            where = position if page_size > 1 else None
            return gather_attention(
                query, key, value, lists, mask, scale=scale, page_size=page_size, position=where, **more, **how
            )

        read = 2 * batch * sizes.heads * entries * page_size * sizes.dim * BYTES
        return Case(GATHER_ATTENTION, name.format(rows=batch, n=entries, S=slots), make, run, read)

    yield case("{n} of {S} tokens per KV head, {rows} row", 1, 2048)
    yield case("{n} of {S} tokens per KV head, {rows} rows", 8, 2048)
    yield case("{n} pages of 16 per KV head of {S} tokens, {rows} row", 1, 128, page_size=16)
    yield case("{n} pages of 32 for all heads of {S} tokens, {rows} row", 1, 64, page_size=32, shared=True)
    yield case("{n} of {S} tokens for all heads, rotated on read, {rows} row", 1, 2688, shared=True, rotate=True)


def _dense(sizes: Sizes) -> Iterator[Case]:
    scale = 1 / math.sqrt(sizes.dim)
    for batch, size in ((1, 131072), (8, 131072), (1, 524288), (1, 1280)):
        slots = sizes.count(size)

        def make(batch: int = batch, slots: int = slots) -> tuple:
            position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (batch, sizes.heads, slots))
            return *store(sizes, batch, slots), position, jnp.full((batch,), slots, jnp.int32)

        def run(query: Array, key: Array, value: Array, position: Array, limit: Array, **how: Any) -> Any:
            return dense_decode(query, key, value, position=position, limit=limit, scale=scale, **how)

        read = 2 * batch * sizes.heads * slots * sizes.dim * BYTES
        yield Case(DENSE_DECODE, f"{slots} tokens, {batch} rows", make, run, read)


def _merge(sizes: Sizes) -> Iterator[Case]:
    shape = (sizes.heads, 32, GROUP, sizes.dim)

    def make() -> tuple:
        return normal(0, *shape, dtype=jnp.float32), normal(1, *shape[:3], dtype=jnp.float32)

    def run(out: Array, lse: Array, **how: Any) -> Any:
        return merge_splits(out, lse, **how)

    read = 4 * math.prod(shape[:3]) * (sizes.dim + 1)
    yield Case(MERGE_SPLITS, f"{shape[1]} parts, {shape[0]} lists", make, run, read, tolerance=1e-4)


def _select(sizes: Sizes) -> Iterator[Case]:
    for rows, size, budget in (
        (sizes.heads, 131072, 2048),
        (sizes.heads, 1048576, 2048),
        (1, 131072, 2048),
        (sizes.heads, 8192, 128),
    ):
        slots, best = sizes.count(size), sizes.count(budget)

        def make(rows: int = rows, slots: int = slots) -> tuple:
            return (normal(0, 1, rows, slots, dtype=jnp.float32),)

        def run(score: Array, best: int = best, **how: Any) -> Any:
            return kth_select(score, best, best, **how)

        yield Case(
            KTH_SELECT,
            f"{best} of [{rows}, {slots}]",
            make,
            run,
            4 * rows * slots,
            reference=functools.partial(_sorted_best, best=best),
            others={"lax.top_k": functools.partial(_top_k, best=best)},
        )
    slots, most = sizes.count(131072), sizes.count(2048)

    def listed() -> tuple:
        score = jax.random.uniform(jax.random.key(0), (1, sizes.heads, slots))
        return jnp.zeros((1,), jnp.float32), score < 0.9 * most / slots

    def lists(first: Array, mask: Array, **how: Any) -> Any:
        return compact(mask, most, **how)

    yield Case(COMPACT, f"{most} of [{sizes.heads}, {slots}]", listed, lists, sizes.heads * slots)


def _sorted_best(score: Array, *, best: int) -> tuple[np.ndarray, np.ndarray]:
    """The same by a stable sort of whole rows: ascending lists, and the number of their entries."""
    order = np.argsort(-np.asarray(score), axis=-1, kind="stable")[..., :best]
    return np.sort(order, axis=-1).astype(np.int32), np.full(score.shape[:2], best, np.int32)


def _top_k(score: Array, *, best: int) -> tuple[Array, Array]:
    _, index = lax.top_k(score, best)
    return jnp.sort(index, axis=-1), jnp.full(score.shape[:2], best, jnp.int32)


def _scores(sizes: Sizes) -> Iterator[Case]:
    for size in (8192, 65536):
        pages = sizes.count(size)

        def make(pages: int = pages) -> tuple:
            query, low, more = store(sizes, 1, pages)
            return query, low, low + jnp.abs(more), jnp.full((1,), pages, jnp.int32)

        def run(query: Array, low: Array, high: Array, limit: Array, **how: Any) -> Any:
            return page_score(query, low, high, limit, **how)

        read = 2 * sizes.heads * pages * sizes.dim * BYTES
        yield Case(PAGE_SCORE, f"bounds of {pages} pages", make, run, read)


def _votes(sizes: Sizes) -> Iterator[Case]:
    for size in (131072, 1048576):
        slots = sizes.count(size)

        def make(slots: int = slots) -> tuple:
            query, key, _ = store(sizes, 1, slots)
            return query.astype(jnp.float32), key, jnp.full((1,), slots, jnp.int32)

        def run(query: Array, key: Array, stop: Array, **how: Any) -> Any:
            return token_vote(query, key, start=0, stop=stop, **how)

        read = sizes.heads * slots * sizes.dim * BYTES
        yield Case(TOKEN_VOTE, f"{slots} tokens", make, run, read, tolerance=1e-3)


def _prompts(sizes: Sizes) -> Iterator[Case]:
    scale = 1 / math.sqrt(sizes.dim)
    slots, window = sizes.count(131072), 8 if sizes.tiny else 32

    def observed() -> tuple:
        _, key, _ = store(sizes, 1, slots)
        position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (1, sizes.heads, slots))
        asked = jnp.arange(slots - window, slots, dtype=jnp.int32)[None]
        return normal(5, 1, sizes.heads, GROUP, window, sizes.dim), key, asked, position

    def votes(query: Array, key: Array, asked: Array, position: Array, **how: Any) -> Any:
        return window_score(query, key, query_position=asked, key_position=position, scale=scale, **how)

    read = sizes.heads * slots * sizes.dim * BYTES
    yield Case(WINDOW_SCORE, f"{window} queries over {slots} tokens", observed, votes, read)
    for queries, size in ((512, 131072), (512, 1048576), (8192, 131072)):
        before, tokens = sizes.count(size), queries // 64 if sizes.tiny else queries

        def make(before: int = before, tokens: int = tokens) -> tuple:
            _, key, value = store(sizes, 1, before + tokens)
            start, length = jnp.full((), before, jnp.int32), jnp.full((1,), tokens, jnp.int32)
            return normal(5, 1, sizes.heads, GROUP, tokens, sizes.dim), key, value, start, length

        def run(query: Array, key: Array, value: Array, start: Array, length: Array, **how: Any) -> Any:
            return prefix_attention(query, key, value, start=start, length=length, scale=scale, **how)

        read = 2 * sizes.heads * (before + tokens) * sizes.dim * BYTES
        yield Case(PREFIX_ATTENTION, f"{tokens} queries after {before} tokens", make, run, read)
    before, tokens = sizes.count(131072), 128 if sizes.tiny else 8192

    def past() -> tuple:
        _, key, value = store(sizes, 1, before)
        return normal(5, 1, sizes.heads, GROUP, tokens, sizes.dim), key, value, jnp.full((1,), before, jnp.int32)

    def over(query: Array, key: Array, value: Array, count: Array, **how: Any) -> Any:
        return past_attention(query, key, value, count=count, scale=scale, **how)

    read = 2 * sizes.heads * before * sizes.dim * BYTES
    yield Case(PAST_ATTENTION, f"{tokens} queries over {before} tokens", past, over, read)


def _sparse(sizes: Sizes) -> Iterator[Case]:
    scale, block, most = 1 / math.sqrt(sizes.dim), 64, 16 if sizes.tiny else 1000
    # Blocks beside the query, or scattered over the whole prompt; and columns.
    for near, scattered, size in ((96, False, 131072), (96, False, 524288), (512, True, 131072)):
        slots = max(4 * block, sizes.count(size))
        tokens = 2 * block if sizes.tiny else 8192
        before = (slots - tokens) // block
        far = min(near, before)

        def make(slots: int = slots, tokens: int = tokens, far: int = far, of: int = before if scattered else far) -> tuple:
            _, key, value = store(sizes, 1, slots)
            heads, blocks = (1, sizes.heads, GROUP), tokens // block
            first, columns = jnp.zeros((*heads, blocks), jnp.int32), listed(4, heads, slots, most)
            return (
                normal(5, *heads, tokens, sizes.dim), key, value, 1 + listed(3, heads, of, far), first, first + far,
                columns, jnp.full(heads, most, jnp.int32), jnp.full((), slots - tokens, jnp.int32),
                jnp.full((1,), tokens, jnp.int32),
            )  # fmt: skip

        def run(query: Array, key: Array, value: Array, *lists: Array, **how: Any) -> Any:
            names = ("distances", "first", "count", "columns", "num_columns", "start", "length")
            given = dict(zip(names, lists, strict=True))
            return sparse_attention(query, key, value, **given, block=block, scale=scale, **how)

        read = 2 * sizes.heads * slots * sizes.dim * BYTES
        kind = "scattered" if scattered else "near"
        shape = f"{tokens} queries, {far} {kind} blocks and {most} columns of {slots} tokens"
        yield Case(SPARSE_ATTENTION, shape, make, run, read)


def _sentences(sizes: Sizes) -> Iterator[Case]:
    slots, size = sizes.count(2048) + 64, 16
    sentences, budget = slots // size, slots // 2
    rules = Rules(sinks=4, recent=4, open_cap=8, whole=0) if sizes.tiny else Rules(32, 32, 256, 0)

    def make() -> tuple:
        rows = (1, sizes.heads)
        slot = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (*rows, slots))
        count, length = jnp.full(rows, sentences, jnp.int32), jnp.full(rows, 3, jnp.int32)
        cursor, event = jnp.full((1,), slots, jnp.int32), jnp.full((1,), JOINS, jnp.int32)
        return normal(0, *rows, sentences, dtype=jnp.float32), slot // size, slot, count, length, cursor, event

    def run(*given: Array, **how: Any) -> Any:
        return sentence_cut(*given, budget, rules=rules, **how)

    read = 4 * sizes.heads * (2 * slots + sentences)
    yield Case(SENTENCE_CUT, f"{budget} of {slots} slots, {sentences} sentences", make, run, read)
