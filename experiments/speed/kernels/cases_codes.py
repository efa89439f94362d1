"""Cases of the operations on compressed keys: ParisKV's codes and MosaicKV's packed vectors."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from experiments.speed.kernels.case import BYTES, GROUP, Case, Sizes, normal
from pallas_kernels.attend.packed_attention import PACKED_ATTENTION, packed_attention
from pallas_kernels.choose.collision import COLLISION, collision
from pallas_kernels.choose.rerank import RERANK, Regions, rerank
from pallas_kernels.formats.key_codes import rows as rows_of
from pallas_kernels.formats.packed_vectors import words_of
from pallas_kernels.formats.sign_codes import BLOCK
from pallas_kernels.query.project_query import PROJECT_QUERY, project_query
from pallas_kernels.score.bucket_score import BUCKET_SCORE, bucket_score
from pallas_kernels.score.packed_score import PACKED_SCORE, packed_score
from pallas_kernels.store.encode import ENCODE, encode

_SHARES = (2**31 - 1, 100_000, 10_000, 30_000, 60_000, 100_000, 150_000, 200_000)  # ParisKV's shares for a long zone
_SEGMENTS = 2


def code_cases(sizes: Sizes) -> Iterator[Case]:
    """ParisKV's two stages and SOCKET's search at 128K tokens; MosaicKV at 25 % of channels and 10 % of blocks."""
    yield from _paris(sizes)
    yield from _socket(sizes)
    yield from _mosaic(sizes)


def _paris(sizes: Sizes) -> Iterator[Case]:
    slots, slices = sizes.count(131072), sizes.dim // 8
    first, stop = slots // 16, slots - slots // 16
    room = math.ceil((stop - first) / 10)
    rows = (1, sizes.heads)
    position = np.broadcast_to(np.arange(slots, dtype=np.int32), (*rows, slots))

    def cluster() -> tuple:
        ids = np.random.default_rng(0).integers(0, 256, (*rows, slots, slices)).astype(np.uint8)
        zone = ids[:, :, first:stop].swapaxes(2, 3).reshape(-1, stop - first)
        counts = np.stack([np.bincount(x, minlength=256) for x in zone]).reshape(*rows, slices, 256)
        query, signs = normal(0, *rows, GROUP, sizes.dim), jnp.ones((sizes.dim,), jnp.float32)
        rest = (counts.astype(np.int32), ids, position, np.full((1,), stop, np.int32), np.asarray([_SHARES], np.int32))
        return query, signs, *map(jnp.asarray, rest)

    def vote(*given: Array, **how: Any) -> Any:
        return collision(*given, first=first, capacity=room, **how)

    def listed(result: tuple) -> tuple:
        query, slots, count = result
        return query, jnp.where(jnp.arange(room)[None, None] < count[..., None], slots, 0), count

    read = sizes.heads * (stop - first) * slices
    yield Case(COLLISION, f"{room} of {slots} keys", cluster, vote, read, tolerance=1e-5, defined=listed)

    def keys() -> tuple:
        signs = jax.random.rademacher(jax.random.key(2), (sizes.dim,), jnp.float32)
        return jnp.zeros((1,), jnp.float32), normal(1, *rows, slots, sizes.dim), jnp.ones((*rows, slots), bool), signs

    def coded(first: Array, *given: Array, **how: Any) -> Any:
        return encode(*given, scale=sizes.dim**-0.5, **how)

    def levels(result: tuple) -> tuple:  # at the edge of a level, rounding decides on which side a channel falls
        return result[0], *(x.astype(jnp.float32) for x in result[1:])

    read = sizes.heads * slots * sizes.dim * BYTES
    yield Case(ENCODE, f"{slots} keys", keys, coded, read, defined=levels)

    regions = Regions(sinks=first, best=8, tail=8, size=first + 16) if sizes.tiny else Regions(64, 100, 768, 1999)

    def candidates() -> tuple:
        rng = np.random.default_rng(1)
        chosen = np.stack([np.sort(rng.choice(stop - first, room, replace=False) + first) for _ in range(sizes.heads)])
        magnitudes = rng.integers(0, 256, (*rows, slots, sizes.dim // 2)).astype(np.uint8)
        weight = jnp.abs(normal(2, *rows, slots, slices))
        count, cursor = jnp.full(rows, room, jnp.int32), jnp.full((1,), slots, jnp.int32)
        query, chosen = normal(0, *rows, sizes.dim, dtype=jnp.float32), jnp.asarray(chosen[None], jnp.int32)
        stops = jnp.full((1,), stop, jnp.int32)
        return query, chosen, count, rows_of(jnp.asarray(magnitudes), weight), jnp.asarray(position), cursor, stops

    def rank(*given: Array, **how: Any) -> Any:
        return rerank(*given, regions.best, 1, regions=regions, scale=1e-4, **how)

    def attended(result: tuple) -> Array:
        return jnp.sort(jnp.where(result[1], result[0], -1), axis=-1)

    read = sizes.heads * room * (sizes.dim + 4)
    shape = f"{regions.best} of {room} candidates of {slots} keys"
    yield Case(
        RERANK, shape, candidates, rank, read, defined=attended, reference=functools.partial(rank, implementation="xla")
    )


def _socket(sizes: Sizes) -> Iterator[Case]:
    tables, bits = (6, 3) if sizes.tiny else (60, 8)

    def case(batch: int) -> Case:
        lists, slots = (batch, sizes.heads), sizes.count(131072)

        def make() -> tuple:
            planes = normal(1, tables, bits, sizes.dim, dtype=jnp.float32)
            shape = (*lists, -(-slots // BLOCK), tables * BLOCK)
            ids = jax.random.randint(jax.random.key(2), shape, 0, 1 << bits, jnp.int32).astype(jnp.uint8)
            position = jnp.broadcast_to(jnp.arange(slots, dtype=jnp.int32), (*lists, slots))
            cursor = jnp.full((batch,), slots, jnp.int32)
            query, norm = normal(0, *lists, GROUP, sizes.dim), jnp.abs(normal(3, *lists, slots))
            return query, planes, jnp.float32(0.3), ids, norm, position, cursor

        def score(*given: Array, **how: Any) -> Array:
            return bucket_score(*given, first=slots // 16, num_local=slots // 16, **how)

        searched = slots - 2 * (slots // 16)
        read = batch * sizes.heads * searched * (tables + BYTES + 4)  # ids, norms and positions
        return Case(BUCKET_SCORE, f"{tables} tables of {slots} keys, {batch} rows", make, score, read, tolerance=1e-5)

    yield case(1)
    yield case(8)


def _packed(seed: int, lead: tuple[int, ...], dim: int, rank: int) -> tuple[Array, Array]:
    """Random values [*lead, r], and bitmaps of r different channels each."""
    odd, shift = (jax.random.randint(jax.random.key(seed + index), (*lead, 1), 0, dim, jnp.int32) for index in range(2))
    channel = jnp.arange(dim, dtype=jnp.int32).reshape((1,) * len(lead) + (dim,))
    # Below a power of two, multiplication by an odd number is a permutation of the whole numbers.
    kept = (channel * (2 * odd + 1) + shift) % dim < rank
    bit = jnp.left_shift(jnp.int32(1), jnp.arange(8, dtype=jnp.int32)).reshape((1,) * (len(lead) + 1) + (8,))
    bitmap = jnp.sum(jnp.where(kept.reshape(*lead, dim // 8, 8), bit, 0), axis=-1).astype(jnp.uint8)
    return normal(seed + 2, *lead, rank), words_of(bitmap)


def _mosaic(sizes: Sizes) -> Iterator[Case]:
    dim, granule = sizes.dim, 8
    slots, rank = sizes.count(131072), sizes.dim // 4
    blocks, rows = slots // granule, (1, sizes.heads)
    chosen, span = math.ceil(blocks / 10), blocks // _SEGMENTS
    row = rank * BYTES + dim // 8

    def bases(seed: int) -> Array:
        return jnp.linalg.qr(normal(seed, *rows, _SEGMENTS, dim, dim, dtype=jnp.float32))[0]

    def query() -> Array:
        return normal(0, *rows, GROUP, dim)

    def project(query: Array, basis: Array, **how: Any) -> Array:
        return project_query(query, basis, dtype=jnp.bfloat16, **how)

    read = 4 * sizes.heads * _SEGMENTS * dim * dim
    alone = functools.partial(project, implementation="xla")
    yield Case(
        PROJECT_QUERY,
        f"{_SEGMENTS} segments",
        lambda: (query(), bases(1)),
        project,
        read,
        reference=alone,
        defined=_total,
    )

    def means() -> tuple:
        count, last = jnp.full((1,), blocks, jnp.int32), jnp.full((1,), _SEGMENTS - 1, jnp.int32)
        return alone(query(), bases(1)), *_packed(3, (*rows, blocks), dim, rank), count, last

    def score(*given: Array, **how: Any) -> Array:
        return packed_score(*given, span=span, **how)

    same = functools.partial(score, implementation="xla")
    yield Case(
        PACKED_SCORE, f"{blocks} blocks", means, score, sizes.heads * blocks * row, reference=same, tolerance=1e-4
    )

    def store() -> tuple:
        rng = np.random.default_rng(5)
        listed = np.stack([np.sort(rng.choice(blocks, chosen, replace=False)) for _ in range(sizes.heads)])
        key, value = (_packed(seed, (*rows, slots), dim, rank) for seed in (6, 9))
        recent = normal(12, *rows, 64, dim), normal(13, *rows, 64, dim)
        held = jnp.broadcast_to(jnp.arange(64, dtype=jnp.int32), (*rows, 64))
        count, last = jnp.full(rows, chosen, jnp.int32), jnp.full((1,), _SEGMENTS - 1, jnp.int32)
        parts = alone(query(), bases(1))
        return parts, query(), *key, *value, bases(2), jnp.asarray(listed[None], jnp.int32), count, last, *recent, held

    def attend(*given: Array, **how: Any) -> Array:
        parts, query, key, key_bits, value, value_bits, basis, listed, count, last, *recent = given
        return packed_attention(
            parts, query, (key, key_bits), (value, value_bits), basis, listed, count, last, tuple(recent),
            scale=1 / math.sqrt(dim), granule=granule, span=span, **how,
        )  # fmt: skip

    read = 2 * sizes.heads * (chosen * granule * row + 64 * dim * BYTES)
    exact = functools.partial(attend, implementation="xla")
    yield Case(PACKED_ATTENTION, f"{chosen} of {blocks} blocks of {granule}", store, attend, read, reference=exact)


def _total(parts: Array) -> Array:
    """The sum of the terms of each query."""
    return parts.astype(jnp.float32).sum(axis=-2)
