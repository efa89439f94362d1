"""One layer of a method on given q, k and v, without a model: its outputs, and the tokens that it attends to and keeps."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from kvjax.cache import LayerCache, PlainCache
from kvjax.cache.packed_keys import ThinCache
from kvjax.cache.quantised import QuantisedCache
from kvjax.decoding.settle import settle_due
from kvjax.protocol.method import Inputs, LayerSpec
from kvjax.protocol.typing import EMPTY
from pallas_kernels.formats.quantised import MOST, Quantised, pack


@dataclasses.dataclass
class Drive:
    """The outputs of one layer and the tokens that it held, per decode step."""

    prompt: np.ndarray  # [B, H, G, T, D], meaningful below each row's length
    outputs: np.ndarray  # [N, B, H, G, D]
    attended: np.ndarray  # bool [N, B, H, positions]
    kept: np.ndarray  # bool [N, B, H, positions], after the step
    chosen: np.ndarray  # int32 [N, B, H, K], `LayerMethod.chosen`
    state: Any  # after the last step


def drive(
    method: Any,
    q: Any,
    k: Any,
    v: Any,
    lengths: Any,
    *,
    prompt: int,
    inv_freq: Any = None,
    chunk: int | None = None,
    poison: bool = False,
    kv_dtype: str | None = None,
) -> Drive:
    """Run one layer on rows of given q [B, H, G, T, D], k and v [B, H, T, D]: ``lengths`` prompt tokens, then decoding.

    Row b decodes its tokens from ``lengths[b]`` on, ``T - prompt`` of them; ``prompt`` is the padded prompt length.
    ``poison`` puts NaN into empty slots: before the prompt, between its last token and ``finish`` (so that ``compress`` meets
    them), after ``finish``, and after every step. ``kv_dtype`` has the meaning it
    has in `kvjax.prefill`.
    """
    method = method.for_layer(0, 2)
    if inv_freq is None:
        inv_freq = frequencies(q.shape[-1])
    out = _drive(
        method, *(jnp.asarray(x, jnp.float32) for x in (q, k, v)), jnp.asarray(lengths, jnp.int32),
        jnp.asarray(inv_freq, jnp.float32), jnp.asarray(poison), prompt=prompt, chunk=chunk or prompt, kv_dtype=kv_dtype,
    )  # fmt: skip
    return Drive(*jax.tree.map(np.asarray, out[:5]), state=out[5])


def frequencies(dim: int) -> np.ndarray:
    """Compute the RoPE frequencies of the runs, with base 100 so that rotation matters at these lengths."""
    return (1.0 / 100.0 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def stored(state: Any) -> LayerCache | ThinCache | QuantisedCache:
    """Find the exact storage inside a layer's state."""
    found = [x for x in jax.tree.leaves(state, is_leaf=_is_stored) if _is_stored(x)]
    assert len(found) == 1
    return found[0]


def _is_stored(x: Any) -> bool:
    return isinstance(x, (PlainCache, ThinCache, QuantisedCache))


def _soiled(x: Quantised, empty: jax.Array) -> Quantised:
    """Set scales to NaN and codes to the largest where ``empty`` bool [B, H, S]."""
    largest = jnp.asarray(MOST[x.kind], x.codes.dtype)
    codes = jnp.where(empty[..., None], pack(largest, largest) if x.packed else largest, x.codes)
    return dataclasses.replace(x, codes=codes, scale=jnp.where(empty[..., None] if x.grouped else empty, jnp.nan, x.scale))


@functools.partial(jax.jit, static_argnames=("prompt", "chunk", "kv_dtype"))
def _drive(method, q, k, v, lengths, inv_freq, poison, *, prompt, chunk, kv_dtype):
    batch, heads, groups, total, dim = q.shape
    steps = total - prompt
    most = method.max_tokens(in_prompt=True)
    chunk = chunk if most is None else min(chunk, most)
    slots = -(-prompt // chunk) * chunk
    spec = LayerSpec(
        batch=batch, num_kv_heads=heads, group_size=groups, head_dim=dim, dtype="float32", prompt_slots=slots,
        max_new_tokens=steps, kv_dtype=kv_dtype,
    )  # fmt: skip

    def soil(state):
        def one(x):
            if not _is_stored(x):
                return x
            if isinstance(x, QuantisedCache):
                empty = poison & (x.position < 0)
                return dataclasses.replace(x, codes=tuple(_soiled(codes, empty) for codes in x.codes))
            if isinstance(x, ThinCache):
                return dataclasses.replace(x, newer=rows(x.newer), older=rows(x.older))
            return rows(x)

        def rows(x):
            bad = (poison & (x.position < 0))[..., None]
            return dataclasses.replace(x, key=jnp.where(bad, jnp.nan, x.key), value=jnp.where(bad, jnp.nan, x.value))

        return jax.tree.map(one, state, is_leaf=_is_stored)

    def inputs(at, position, start=None):
        def pick(x):
            index = jnp.minimum(at, total - 1).reshape(batch, *(1,) * (x.ndim - 3), -1, 1)
            return jnp.take_along_axis(x, index, axis=-2)

        return Inputs(
            query=pick(q), key=pick(k), value=pick(v), position=position, tokens=at, inv_freq=inv_freq, shared=None,
            start=start,
        )  # fmt: skip

    def piece(index, carry):
        state, outs = carry
        start = index * chunk
        at = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32)[None], (batch, chunk))
        position = jnp.where(at < lengths[:, None], at, EMPTY)
        out, state = method.attend(state, inputs(at, position, start))
        return state, jax.lax.dynamic_update_slice_in_dim(outs, out, start, 3)

    carry = soil(method.init(spec)), jnp.zeros((batch, heads, groups, slots, dim), jnp.float32)
    state, outs = jax.lax.fori_loop(0, slots // chunk, piece, carry) if slots > chunk else piece(0, carry)
    state = soil(method.finish(soil(state), spec))

    everything = jnp.arange(total, dtype=jnp.int32)[None, None]

    def held(position):  # [B, H', K]; H' is H or H * G, and then a KV head holds the union of its query heads
        position = position.reshape(batch, heads, -1)
        row, head = jnp.arange(batch)[:, None, None], jnp.arange(heads)[None, :, None]
        where = jnp.where(position >= 0, position, total)
        return jnp.zeros((batch, heads, total), bool).at[row, head, where].set(True, mode="drop")

    def step(state, index):
        at = (lengths + index)[:, None]
        given = inputs(at, at)
        position = method.chosen(state, given)
        seen = held(position)
        out, state = method.attend(state, given)
        (state,) = settle_due((method,), (soil(state),))
        state = soil(state)
        kept = held(stored(state).position) if method.evicts else jnp.broadcast_to(everything <= at[:, None], seen.shape)
        return state, (out[..., 0, :], seen, kept, position)

    state, (out, seen, kept, chosen) = jax.lax.scan(step, state, jnp.arange(steps, dtype=jnp.int32))
    return outs[..., :prompt, :], out, seen, kept, chosen, state


def random_tokens(seed: int, batch: int, heads: int, groups: int, total: int, dim: int) -> tuple[np.ndarray, ...]:
    """Draw float32 q [B, H, G, T, D], k and v [B, H, T, D]; logits spread enough for attention to be uneven."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, heads, groups, total, dim)) * 1.5
    k = rng.normal(size=(batch, heads, total, dim))
    v = rng.normal(size=(batch, heads, total, dim))
    return tuple(x.astype(np.float32) for x in (q, k, v))
