"""Shared by the tests of kvjax: an example of every method, a tiny model that counts its traces, a one-layer driver."""

from __future__ import annotations

import dataclasses
import functools
import importlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.cache import LayerCache
from kvjax.method import Inputs, LayerSpec
from kvjax.methods import H2O, Full, Quest, SnapKV, StreamingLLM
from kvjax.typing import EMPTY
from models import ModelConfig, random_params

NAMES = sorted(registry.classes())
TRACES: list[tuple[int, ...]] = []  # shape of the tokens of every trace of a `CountingConfig` model


def oracle(name: str) -> Any:
    """The oracle module of a method. A method without an oracle fails here."""
    return importlib.import_module(f"tests.oracles.{name}")


def example(name: str, **knobs: Any) -> kvjax.methods.Full:
    """The method at the small setting its oracle declares, some knobs changed."""
    return kvjax.make(name, **{**oracle(name).KNOBS, **knobs})


WRAPPERS = {
    "stages": kvjax.Stages(
        evict=SnapKV(budget=20, obs_window=5), retrieve=Quest(budget=8, page_size=4, num_dense_layers=0)
    ),
    "per_layer": kvjax.PerLayer(layers={0: StreamingLLM(budget=12, chunk=8)}, default=H2O(budget=12)),
    "dense_below": kvjax.DenseBelow(length=20, method=Quest(budget=8, page_size=4, num_dense_layers=0)),
}


def group(name: str) -> Any:
    """A parameter whose tests run on the same worker, so that they share compiled programs."""
    return pytest.param(name, marks=pytest.mark.xdist_group(name))


# Laws of these run under --thorough: each shares its code with a method or wrapper whose laws always run.
REPEATED = ("full", "snapkv", "h2o", "keydiff", "streamingllm", "per_layer", "dense_below")


def law(params: Any) -> list[Any]:
    """Parameters of a law, the `REPEATED` ones only under ``--thorough``."""
    return repeated(params, but=[x.values[0] for x in params if x.values[0] not in REPEATED])


def repeated(params: Any, but: Any) -> list[Any]:
    """Parameters of a law that the names in ``but`` show, the others only under ``--thorough``."""
    return [
        x if x.values[0] in but else pytest.param(*x.values, marks=[*x.marks, pytest.mark.thorough]) for x in params
    ]


METHODS = [group(name) for name in NAMES]
ONE_LAYER = [x for x in METHODS if not registry.classes()[x.values[0]].spans_layers]  # can be driven layer by layer
ALL = METHODS + [group(name) for name in WRAPPERS]


def any_example(name: str) -> Any:
    """An example of a method or of a wrapper."""
    return WRAPPERS[name] if name in WRAPPERS else example(name)


def generous(name: str) -> Any:
    """The example with room for everything in any test here; None if nothing limits it."""
    big = 96
    if name == "stages":
        return kvjax.Stages(
            evict=SnapKV(budget=big, obs_window=5), retrieve=Quest(budget=big, page_size=4, num_dense_layers=0)
        )
    if name == "per_layer":
        return kvjax.PerLayer(layers={0: StreamingLLM(budget=big, chunk=8)}, default=H2O(budget=big))
    if name == "dense_below":
        return kvjax.DenseBelow(length=big, method=Quest(budget=8, page_size=4, num_dense_layers=0))
    everything = {
        "chess": {"ratios": (1.0, 1.0, 1.0)},
        "mosaickv": {"channels": 1.0, "fraction": 1.0},
    }
    return example(name, **everything.get(name, {"budget": big} if "budget" in oracle(name).KNOBS else {}))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CountingConfig(ModelConfig):
    """A model description that notes every time it is traced."""

    def apply(self, params: Any, tokens: jax.Array, attend: Any, states: tuple, *, last: jax.Array | None = None):
        TRACES.append(tokens.shape)
        return ModelConfig.apply(self, params, tokens, attend, states, last=last)


TINY = CountingConfig(
    vocab_size=61,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_q_heads=4,
    num_kv_heads=2,
    head_dim=8,
    qk_norm=True,
    max_position_embeddings=160,
    eos_token_ids=(60,),
)


@functools.cache
def tiny_params() -> Any:
    """Parameters of `TINY`, large enough that attention is not flat."""
    params = random_params(TINY, jax.random.key(1))
    return jax.tree.map(lambda x: x * 4 if x.ndim > 1 else x, params)


@functools.cache
def prompts() -> tuple[tuple[int, ...], ...]:
    """Three prompts of different length."""
    rng = np.random.default_rng(3)
    return tuple(tuple(rng.integers(0, 60, n).tolist()) for n in (40, 23, 9))


def padded(rows: Any, width: int = 48) -> tuple[np.ndarray, np.ndarray]:
    """Token lists as an array of ``width`` columns, and their lengths."""
    out = np.zeros((len(rows), width), np.int32)
    for at, row in enumerate(rows):
        out[at, : len(row)] = row
    return out, np.array([len(row) for row in rows], np.int32)


def read(method: Any, rows: Any = None, max_new_tokens: int = 24, **options: Any) -> kvjax.Cache:
    """`kvjax.prefill` of the tiny model on ``rows`` (the three prompts), padded to one width."""
    tokens, lengths = padded(prompts() if rows is None else rows)
    options = {"pad_multiple": 1, **options}
    return kvjax.prefill(
        tiny_params(), tokens, lengths=lengths, config=TINY, method=method, max_new_tokens=max_new_tokens, **options
    )


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
) -> Drive:
    """Run one layer on rows of given q [B, H, G, T, D], k and v [B, H, T, D]: ``lengths`` prompt tokens, then decoding.

    Row b decodes its tokens from ``lengths[b]`` on, ``T - prompt`` of them; ``prompt`` is the padded prompt length.
    ``poison`` puts NaN wherever nothing is stored, before the prompt, after it, and after every step.
    """
    method = method.for_layer(0, 2)
    if inv_freq is None:
        inv_freq = frequencies(q.shape[-1])
    out = _drive(
        method,
        *(jnp.asarray(x, jnp.float32) for x in (q, k, v)),
        jnp.asarray(lengths, jnp.int32),
        jnp.asarray(inv_freq, jnp.float32),
        jnp.asarray(poison),
        prompt=prompt,
        chunk=chunk or prompt,
    )
    return Drive(*jax.tree.map(np.asarray, out[:5]), state=out[5])


def frequencies(dim: int) -> np.ndarray:
    """RoPE frequencies of the drives, base 100 so that rotation matters at these lengths."""
    return (1.0 / 100.0 ** (np.arange(0, dim, 2) / dim)).astype(np.float32)


def stored(state: Any) -> LayerCache:
    """The exact storage inside a layer's state."""
    found = [
        x for x in jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, LayerCache)) if isinstance(x, LayerCache)
    ]
    assert len(found) == 1
    return found[0]


@functools.partial(jax.jit, static_argnames=("prompt", "chunk"))
def _drive(method, q, k, v, lengths, inv_freq, poison, *, prompt, chunk):
    batch, heads, groups, total, dim = q.shape
    steps = total - prompt
    most = method.max_tokens(in_prompt=True)
    chunk = chunk if most is None else min(chunk, most)
    slots = -(-prompt // chunk) * chunk
    spec = LayerSpec(
        layer=0,
        batch=batch,
        num_kv_heads=heads,
        group_size=groups,
        head_dim=dim,
        dtype="float32",
        prompt_slots=slots,
        max_new_tokens=steps,
    )

    def soil(state):
        def one(x):
            if not isinstance(x, LayerCache):
                return x
            bad = (poison & (x.position < 0))[..., None]
            return dataclasses.replace(x, key=jnp.where(bad, jnp.nan, x.key), value=jnp.where(bad, jnp.nan, x.value))

        return jax.tree.map(one, state, is_leaf=lambda x: isinstance(x, LayerCache))

    def inputs(at, position, start=None):
        def pick(x):
            index = jnp.minimum(at, total - 1).reshape(batch, *(1,) * (x.ndim - 3), -1, 1)
            return jnp.take_along_axis(x, index, axis=-2)

        return Inputs(
            query=pick(q),
            key=pick(k),
            value=pick(v),
            position=position,
            tokens=at,
            inv_freq=inv_freq,
            shared=None,
            start=start,
        )

    def piece(index, carry):
        state, outs = carry
        start = index * chunk
        at = jnp.broadcast_to(start + jnp.arange(chunk, dtype=jnp.int32)[None], (batch, chunk))
        position = jnp.where(at < lengths[:, None], at, EMPTY)
        out, state = method.attend(state, inputs(at, position, start))
        return state, jax.lax.dynamic_update_slice_in_dim(outs, out, start, 3)

    carry = soil(method.init(spec)), jnp.zeros((batch, heads, groups, slots, dim), jnp.float32)
    state, outs = jax.lax.fori_loop(0, slots // chunk, piece, carry) if slots > chunk else piece(0, carry)
    state = soil(method.finish(state, spec))

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
        state = soil(state)
        kept = (
            held(stored(state).position) if method.evicts else jnp.broadcast_to(everything <= at[:, None], seen.shape)
        )
        return state, (out[..., 0, :], seen, kept, position)

    state, (out, seen, kept, chosen) = jax.lax.scan(step, state, jnp.arange(steps, dtype=jnp.int32))
    return outs[..., :prompt, :], out, seen, kept, chosen, state


def random_tokens(seed: int, batch: int, heads: int, groups: int, total: int, dim: int) -> tuple[np.ndarray, ...]:
    """float32 q [B, H, G, T, D], k and v [B, H, T, D]; logits spread enough for attention to be uneven."""
    rng = np.random.default_rng(seed)
    q = rng.normal(size=(batch, heads, groups, total, dim)) * 1.5
    k = rng.normal(size=(batch, heads, total, dim))
    v = rng.normal(size=(batch, heads, total, dim))
    return tuple(x.astype(np.float32) for x in (q, k, v))


__all__ = [name for name in dir() if not name.startswith("_")] + ["Full"]
