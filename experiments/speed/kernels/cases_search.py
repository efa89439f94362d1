"""Cases of the searches of retrieval systems at 128K tokens: ShadowKV's, PQCache's, InfiniGen's and MagicPIG's."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from experiments.speed.kernels.case import BYTES, GROUP, Case, Sizes, listed, normal
from pallas_kernels.attend.low_rank_attention import LOW_RANK_ATTENTION, low_rank_attention
from pallas_kernels.choose.code_select import CODE_SELECT, code_bits, code_select
from pallas_kernels.choose.match_select import MATCH_SELECT, match_select
from pallas_kernels.choose.partial_select import PARTIAL_SELECT, partial_select
from pallas_kernels.formats import bit_codes
from pallas_kernels.score.page_logits import PAGE_LOGITS, page_logits
from pallas_kernels.score.partial_score import PARTIAL_SCORE, partial_score
from pallas_kernels.score.sampled_bias import SAMPLED_BIAS, sampled_bias


def search_cases(sizes: Sizes) -> Iterator[Case]:
    """The steps of a search that are kernels, in the sizes of the methods' defaults."""
    yield from _shadow(sizes)
    yield _codes(sizes)
    yield from _partial(sizes)
    yield from _sampling(sizes)


def _shadow(sizes: Sizes) -> Iterator[Case]:
    """Logits of all chunks of 8 tokens; then attention to 256 of them, whose keys have rank 160."""
    chunk, rows, scale = 8, (1, sizes.heads), 1 / math.sqrt(sizes.dim)
    slots, rank = sizes.count(131072), 16 if sizes.tiny else 160
    pages, chosen = slots // chunk, sizes.count(2048) // chunk

    def vectors() -> tuple:
        query, landmarks = normal(0, *rows, GROUP, sizes.dim), normal(1, *rows, pages, sizes.dim)
        return query, landmarks, jnp.full((1,), pages, jnp.int32)

    def logits(*given: Array, **how: Any) -> Any:
        return page_logits(*given, scale=scale, **how)

    def whole(result: tuple) -> tuple:  # implementations divide the pages into different parts
        return result[0], jax.nn.logsumexp(result[1], axis=2)

    read = sizes.heads * pages * sizes.dim * BYTES
    yield Case(PAGE_LOGITS, f"{pages} pages per KV head", vectors, logits, read, defined=whole)

    def factors() -> tuple:
        query, value = normal(0, *rows, GROUP, sizes.dim), normal(3, *rows, slots, sizes.dim)
        left, right = normal(1, 1, slots, rank), normal(2, *rows, rank, sizes.dim) / math.sqrt(rank)
        lists = listed(4, rows, pages, chosen)
        return query, left, right, value, lists, jnp.ones(lists.shape, bool)

    def attend(*given: Array, **how: Any) -> Any:
        angles = jnp.exp(-jnp.arange(sizes.dim // 2, dtype=jnp.float32))
        return low_rank_attention(*given, page_size=chunk, inv_freq=angles, scale=scale, **how)

    read = sizes.heads * chosen * chunk * (rank + sizes.dim) * BYTES
    name = f"{chosen} pages of {chunk} per KV head of {slots} tokens, rank {rank}"
    yield Case(LOW_RANK_ATTENTION, name, factors, attend, read)


def _codes(sizes: Sizes) -> Case:
    """PQCache: a twentieth of the tokens by two numbers of 6 bits, and as many of the newest."""
    slots, parts, count = sizes.count(131072), 2, 8 if sizes.tiny else 64
    first, most, bits = max(slots // 4096, 1), slots // 20, code_bits(parts, count)

    def make() -> tuple:
        query = normal(0, 1, sizes.heads, GROUP, sizes.dim)
        centroids = normal(1, 1, sizes.heads, parts, count, sizes.dim // parts, dtype=jnp.float32)
        code = jax.random.randint(jax.random.key(2), (1, sizes.heads, slots), 0, 1 << bits, jnp.int32)
        numbers = (jnp.full((1,), x, jnp.int32) for x in (slots - most, slots, most))
        return query, centroids, bit_codes.pack(code, bits), *numbers

    def select(*given: Array, **how: Any) -> Any:
        return code_select(*given, first=first, capacity=most, room=most, **how)

    def exact(result: tuple) -> tuple:  # of the best slots, those at the cut may be others: sums round otherwise
        best = jnp.arange(result[0].shape[2]) - first
        return jnp.where((best >= 0) & (best < most), 0, result[0]), result[1]

    name = f"{most} of {slots} keys by {bits} bits"
    reference = functools.partial(select, implementation="xla")
    return Case(CODE_SELECT, name, make, select, sizes.heads * slots * bits // 8, defined=exact, reference=reference)


def _partial(sizes: Sizes) -> Iterator[Case]:
    """InfiniGen: a fifth of the channels of all keys; then its lists, too."""
    slots, channels = sizes.count(131072), sizes.dim // 5
    rows = (1, sizes.heads)

    def make() -> tuple:
        position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (*rows, slots))
        query, key = normal(0, *rows, GROUP, channels), normal(1, *rows, channels, slots)
        return query, key, position, jnp.full((1,), slots, jnp.int32), jnp.float32(4)

    def score(*given: Array, **how: Any) -> Any:
        return partial_score(*given, scale=1 / math.sqrt(sizes.dim), **how)

    def scores(result: tuple) -> tuple:  # rounding decides whether a logit at the edge is near; the newest token's is inf
        return jnp.where(jnp.isfinite(result[0]), result[0], 0), result[2]

    read = sizes.heads * slots * (channels * BYTES + 4)  # keys and positions
    yield Case(PARTIAL_SCORE, f"{channels} channels of {slots} keys", make, score, read, defined=scores)
    budget = sizes.count(1024)

    def lists(*given: Array, **how: Any) -> Any:
        options = {"scale": 1 / math.sqrt(sizes.dim), "total": _alone, "query_heads": sizes.heads * GROUP}
        return partial_select(*given, jnp.int32(budget), capacity=budget + 1, **options, **how)

    def lengths(result: tuple) -> Any:  # rounding decides between scores at the cut
        return result[1]

    yield Case(PARTIAL_SELECT, f"{budget} of {slots} keys by {channels} channels", make, lists, read, defined=lengths)


def _alone(x: Array) -> Array:
    """The sum over one device."""
    return x


def _sampling(sizes: Sizes) -> Iterator[Case]:
    """MagicPIG: a sixteenth of the tokens, by their buckets in 150 tables; then the corrections of these."""
    slots, (tables, bits) = sizes.count(131072), (20, 10) if sizes.tiny else (150, 10)
    rows, most, first, room = (1, sizes.heads), slots // 16, max(slots // 32768, 1), slots // 1024 + 1

    def buckets() -> tuple:
        # With a tenth of as many buckets as 10 bits allow, some tokens are sampled and not all.
        made = (jax.random.randint(jax.random.key(i), (*rows, *n), 0, 100, jnp.int32) for i, n in shapes)
        near, length = (jnp.full((1,), x, jnp.int32) for x in (slots - room, slots))
        return jnp.zeros((1,), jnp.float32), *(x.astype(jnp.uint16) for x in made), near, length

    def select(_: Array, *given: Array, **how: Any) -> Any:
        return match_select(*given, first=first, capacity=most, room=room, num_bits=bits, **how)

    shapes = ((0, (GROUP, tables)), (1, (tables, slots)))
    read = sizes.heads * slots * tables * 2
    yield Case(MATCH_SELECT, f"{most} of {slots} keys by {tables} tables", buckets, select, read)

    def keys() -> tuple:
        query, key = normal(0, *rows, GROUP, sizes.dim), normal(1, *rows, slots, sizes.dim)
        centre, own = jnp.zeros((*rows, sizes.dim), jnp.float32), normal(2, *rows, GROUP, most) > 0
        return query, key, centre, listed(4, rows, slots, most), own, jnp.full((1,), slots - room, jnp.int32)

    def correct(*given: Array, **how: Any) -> Array:
        return sampled_bias(*given, first=first, num_tables=tables, num_bits=bits, **how)

    read = sizes.heads * most * sizes.dim * BYTES
    yield Case(SAMPLED_BIAS, f"{most} of {slots} keys", keys, correct, read, defined=lambda bias: jnp.exp(-bias))
