"""Offloaded caches: the same tokens as resident ones, whatever the method, the batch, the chunks and the calls."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from harness import TINY, example, padded, prompts, read, tiny_params

import kvjax
from kvjax.cache import LayerCache
from kvjax.typing import EMPTY

OFFLOADED = {
    "pariskv": {},
    "sentencekv": {},
    "quest": {},
    "chess": {},
    "tokenselect": {},
    "mosaickv": {"strategy": "dynamic", "buffer": 16, "segment": 32, "lifetime": 4.0},
}


def memory_kinds(cache):
    kinds = [x.sharding.memory_kind for state in cache.layers for x in jax.tree.leaves(state)]
    return {kind: kinds.count(kind) for kind in sorted(set(kinds))}


def both(name, **knobs):
    return example(name, **knobs), example(name, offload=True, **knobs)


def tokens_of(method, chunk_size=512, rows=None, new=24, parts=(24,), extend=None):
    cache = read(method, rows=rows, chunk_size=chunk_size, max_new_tokens=64)
    if extend is not None:
        cache = kvjax.extend(tiny_params(), cache, extend)
    out = []
    for part in parts:
        made = kvjax.generate(tiny_params(), cache, max_new_tokens=part, eos_token_ids=())
        out.append(np.asarray(made.tokens))
        cache = made.cache
    return np.concatenate(out, axis=1), cache


@pytest.mark.parametrize("name", OFFLOADED)
@pytest.mark.parametrize("chunk", [512, 16])
def test_offloaded_equals_resident(name, chunk):
    """Ragged rows, one chunk and several, generation in parts that are no multiple of anything, a question in between."""
    resident, offloaded = both(name, **OFFLOADED[name])
    question = [[3, 1, 4, 1, 5], [9, 2], [6]]
    plain, kept = tokens_of(resident, chunk, parts=(7, 1, 24), extend=question)
    hosted, cache = tokens_of(offloaded, chunk, parts=(7, 1, 24), extend=question)
    np.testing.assert_array_equal(hosted, plain)
    kinds = memory_kinds(cache)
    assert kinds.get("pinned_host", 0) >= len(cache.layers)
    assert "pinned_host" not in memory_kinds(kept)
