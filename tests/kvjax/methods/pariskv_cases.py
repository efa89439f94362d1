"""What the tests of ParisKV share: drives against the oracle, filled caches, codes of keys compared with the oracle's."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache.storage import empty_cache
from kvjax.methods.pariskv import hashing
from kvjax.protocol.method import Step
from tests.oracles import pariskv as plain

SINK, LOCAL, BUFFER, BUDGET = (plain.KNOBS[x] for x in ("num_sink", "num_local", "buffer", "budget"))  # 2, 4, 4, 5
DENSE = plain.KNOBS["dense_below"]  # 17
DIMS = (8, 16, 64, 128)


def store(k, v, room=0):
    """A cache holding rotated k [B, H, T, D] and v in its first slots."""
    batch, heads, tokens, dim = k.shape
    at = jnp.broadcast_to(jnp.arange(tokens, dtype=jnp.int32)[None], (batch, tokens))
    return empty_cache(batch, heads, tokens + room, dim, "float32").append(jnp.asarray(k), jnp.asarray(v), at, 0)


def step_of(query):
    """A decode step with the rotated query [B, H, G, D]; ParisKV reads nothing else of it."""
    batch = query.shape[0]
    zero = jnp.zeros((batch, 1), jnp.int32)
    return Step(query=jnp.asarray(query)[..., None, :], position=zero, tokens=zero, shared=None)


@functools.partial(jax.jit, static_argnames="room")
def index(method, cache, room=0):
    return method.compress(cache, None, room)[1]


@jax.jit
def select(method, cache, aux, query):
    return method.select(cache, aux, step_of(query))


def positions(cache, chosen, row=0, head=0):
    """Token positions one head attends to; None: all it holds."""
    held = np.asarray(cache.position[row, head])
    if chosen is None:
        return set(held[held >= 0].tolist())
    return set(held[np.asarray(chosen.slots[row, head])][np.asarray(chosen.mask[row, head])].tolist())


def assert_equal_trees(got, want):
    for (path, one), two in zip(jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_array_equal(one, two, err_msg=jax.tree_util.keystr(path))


@functools.partial(jax.jit, static_argnames="rotate")
def encoded(keys, seed=42, rotate=True):
    """`hashing.Codes` of keys float32 [..., D]."""
    dim = keys.shape[-1]
    turned = hashing.rotation(keys, hashing.random_signs(seed, dim)) if rotate else keys
    return hashing.encode(turned, hashing.rotation_scale(dim) if rotate else 1.0)


@jax.jit
def estimated(query, codes):
    """Estimate of q.k of queries [Q, D] with the codes of N keys: [Q, N]."""
    dim = query.shape[-1]
    turned = hashing.rotation(query, hashing.random_signs(42, dim))
    return jax.vmap(
        lambda one: hashing.estimate(
            one[None, None], codes.magnitudes[None, None], codes.weight[None, None], hashing.rotation_scale(dim)
        )[0, 0]
    )(turned)


def assert_same_codes(codes, keys, seed=42, rotate=True):
    """Compare `hashing.Codes` of keys [N, D] with the oracle's, bit for bit."""
    dim = keys.shape[1]
    signs, matrix = plain.random_signs(dim, seed), plain.hadamard(dim)
    for i, key in enumerate(keys):
        want = plain.encode(key, signs, matrix, rotate=rotate)
        np.testing.assert_array_equal(codes.ids[i], want.ids, err_msg=f"ids of key {i}")
        nibble = (want.level + 8 * want.sign).reshape(-1)
        np.testing.assert_array_equal(np.asarray(codes.magnitudes[i]) & 15, nibble[0::2], err_msg=f"key {i}")
        np.testing.assert_array_equal(np.asarray(codes.magnitudes[i]) >> 4, nibble[1::2], err_msg=f"key {i}")
        np.testing.assert_array_equal(np.asarray(codes.weight[i], np.float64), want.weight, err_msg=f"key {i}")
