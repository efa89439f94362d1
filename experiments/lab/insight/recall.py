"""Measures how much of exact attention a method's selection covers, while the unchanged method runs.

`Watched` wraps any method. In addition to the method's own state, each layer keeps every key that it was ever given, rotated
to its true position. At a decode step, with the step's own query, for each query head::

    p = softmax over every token seen so far of (q . k) / sqrt(D)         exact attention
    c = `LayerMethod.chosen`                                               the method's selection

    mass    = sum of p over c
    recall  = |c and the k largest of p| / min(k, tokens seen)             for each k in `top`
    own     = recall with k = |c|: the share of the best list of that size

The logits have the model's soft cap, and no sink is among them. Each of the three is averaged over the query heads of a KV
head. Each query head has its own best tokens, so a method that shares a list among the heads of a group is charged for
sharing. Of equal tokens, the earlier token ranks first.

**The meaning of these values.** Query and keys are the run's own. They differ from the queries and keys of a run under `Full`
as soon as an earlier layer or step left a token out. So the values measure the error of the *selection* in the state that the
method has reached; they do not tell how far that state has drifted. Feeding both runs the same text removes the drift of the
tokens, but not the drift of the hidden states. A method that selects during prefill (TokenSelect, StreamingLLM, KeyDiff) has
drifted keys already after the prompt. Methods that re-number positions are compared with attention at true positions. The
loss of a method that stores tokens inexactly (MosaicKV) is not seen here.
"""

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.heads.monitor import MonitorLayer
from kvjax.cache import Cache
from kvjax.protocol.method import Inputs, LayerMethod, LayerSpec, Method, Reading, check_method
from kvjax.protocol.typing import pytree, static
from kvjax.rope import rotate
from kvjax.wrappers.compose import answers, passes
from pallas_kernels.soft_cap import capped


@pytree
class Watch:
    """The state of a watched layer: the method's own, every key, and the measurements of the first N decode steps."""

    inner: Any  # the method's own state
    key: Array  # [B, H, S, D], rotated; a slot is a position, so no key is ever moved or dropped
    mass: Array  # float32 [B, H, N], share of exact attention on chosen tokens
    attended: Array  # float32 [B, H, N], number of chosen tokens
    recall: Array  # float32 [B, H, N, R], share of the k best tokens that were chosen, for each of R values of k
    own: Array  # float32 [B, H, N], share of the best tokens that were chosen, for as many best tokens as were chosen
    steps: Array  # int32 [B], decode steps so far


@answers("inner")
@pytree
class WatchedLayer(MonitorLayer):
    """A layer of `Watched`."""

    top: tuple[int, ...] = static()
    steps: int = static()

    evicts = False  # it keeps every key
    slot_block = None  # it needs every key on one device

    @property
    def lacks(self) -> tuple[str, ...]:
        return (*self.inner.lacks, "codes")  # its keys are exact

    def init(self, spec: LayerSpec) -> Watch:
        shape = (spec.batch, spec.num_kv_heads, self.steps)
        slots = spec.prompt_slots + spec.max_new_tokens
        return Watch(
            inner=self.inner.init(spec),
            key=jnp.zeros((spec.batch, spec.num_kv_heads, slots, spec.head_dim), spec.dtype),
            mass=jnp.zeros(shape, jnp.float32),
            attended=jnp.zeros(shape, jnp.float32),
            recall=jnp.zeros((*shape, len(self.top)), jnp.float32),
            own=jnp.zeros(shape, jnp.float32),
            steps=jnp.zeros((spec.batch,), jnp.int32),
        )

    def attend(self, state: Watch, inputs: Inputs) -> tuple[Array, Watch]:
        state = dataclasses.replace(state, key=_stored(state.key, inputs))
        if inputs.start is None and inputs.query.shape[3] == 1:  # a decode step: in the prompt there is a start
            state = self._measured(state, inputs)
        out, inner = self.inner.attend(state.inner, inputs)
        return out, dataclasses.replace(state, inner=inner)

    def _measured(self, state: Watch, inputs: Inputs) -> Watch:
        """Add the measurements of a decode step to the state, in the rows that take this step."""
        measured = coverage(
            rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)[..., 0, :],
            state.key,
            inputs.position[:, 0],
            self.inner.chosen(state.inner, inputs),
            self.top,
        )
        moves = inputs.position[:, 0] >= 0
        at = jnp.where(moves, state.steps, self.steps)  # index `self.steps` does not exist, so its value is dropped
        row = jnp.arange(len(at))
        new = {name: vars(state)[name].at[row, :, at].set(value, mode="drop") for name, value in measured.items()}
        return dataclasses.replace(state, steps=state.steps + moves.astype(jnp.int32), **new)


@answers("method")
@pytree
class Watched(Method):
    """Any method, watched: it chooses the same tokens, and is measured against exact attention; see the module docstring.

    Watching costs memory for the keys of all tokens, and time for exact scores and their sorting in each layer and step, no
    matter how much the method saves.
    """

    method: Method
    top: tuple[int, ...] = static("values of k", default=(16, 64, 256), least=1)
    steps: int = static("decode steps that are measured; later steps are not", default=64, least=1)

    dense_prompt = False  # each watched method prefills its prompt alone

    @property
    def lacks(self) -> tuple[str, ...]:
        return (*self.method.lacks, "codes")  # its keys are exact

    init_shared = passes("method", Method.init_shared)
    reread_tokens = passes("method", Method.reread_tokens)
    source = passes("method", Method.source)

    def check(self) -> None:
        check_method("Watched: method", self.method)
        if self.method.drafts:
            raise ValueError("Watched: method must choose tokens in every step, got Verified: watch its draft")
        if not self.top:
            raise ValueError(f"Watched: top must be whole numbers of tokens from 1 on, got {self.top}")

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return WatchedLayer(inner=self.method.for_layer(layer, num_layers), top=self.top, steps=self.steps)

    def reread(self, states: tuple[Watch, ...], reading: Reading) -> tuple[Watch, ...]:
        inner = self.method.reread(tuple(watch.inner for watch in states), reading)
        return tuple(dataclasses.replace(watch, inner=new) for watch, new in zip(states, inner, strict=True))

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        watches = cache.layers
        bare = dataclasses.replace(cache, method=self.method, layers=tuple(watch.inner for watch in watches))
        seen = self.method.observe(bare, decoding)
        layers = tuple(dataclasses.replace(w, inner=new) for w, new in zip(watches, seen.layers, strict=True))
        return dataclasses.replace(seen, method=self, layers=layers)


def coverage(query: Array, key: Array, position: Array, chosen: Array, top: tuple[int, ...]) -> dict[str, Array]:
    """Measure the part of exact attention that a selection covers at a decode step.

    Args:
        query: [B, H, G, D], rotated.
        key: [B, H, S, D], rotated; slot s holds the token at position s.
        position: int32 [B], the query's position; tokens up to it have been seen.
        chosen: int32 [B, C, K] positions, EMPTY where there is no entry. C is H, or a multiple of H if a method keeps
            several lists for each KV head; every list then serves the same number of query heads.
        top: R values of k.

    Returns:
        "mass", "attended" and "own" float32 [B, H], "recall" float32 [B, H, R]; see `Watch`.
    """
    batch, heads, group, dim = query.shape
    size, lists = key.shape[2], chosen.shape[1]
    logits = jnp.einsum(
        "bhgd,bhsd->bhgs", query.astype(jnp.float32), key.astype(jnp.float32), precision=lax.Precision.HIGHEST
    )
    seen = (jnp.arange(size, dtype=jnp.int32)[None] <= position[:, None])[:, None, None]
    logits = jnp.where(seen, capped(logits / math.sqrt(dim)), jnp.finfo(jnp.float32).min)
    at = jnp.where(chosen >= 0, chosen, size)
    row, head = jnp.arange(batch)[:, None, None], jnp.arange(lists)[None, :, None]
    mask = jnp.zeros((batch, lists, size), bool).at[row, head, at].set(True, mode="drop")
    mask = jnp.repeat(mask, heads * group // lists, axis=1).reshape(batch, heads, group, size)
    mass = jnp.where(mask, jax.nn.softmax(logits, axis=-1), 0).sum(axis=-1)
    # Sorted by logits, because probabilities far below the largest underflow to equal values.
    order = jnp.argsort(logits, axis=-1, descending=True, stable=True)
    hits = jnp.cumsum(jnp.take_along_axis(mask, order, axis=-1), axis=-1, dtype=jnp.int32)
    count = mask.sum(axis=-1, dtype=jnp.int32)
    stored = jnp.maximum(position + 1, 1)[:, None, None, None]
    best = jnp.asarray(top, jnp.int32)[None, None, None]
    among = jnp.take_along_axis(hits, jnp.broadcast_to(jnp.minimum(best, size) - 1, (*count.shape, len(top))), axis=-1)
    recall = among.astype(jnp.float32) / jnp.minimum(best, stored).astype(jnp.float32)
    same = jnp.take_along_axis(hits, jnp.maximum(count - 1, 0)[..., None], axis=-1)[..., 0]
    own = same.astype(jnp.float32) / jnp.maximum(count, 1).astype(jnp.float32)
    return {
        "mass": mass.mean(axis=2),
        "attended": count.astype(jnp.float32).mean(axis=2),
        "recall": recall.mean(axis=2),
        "own": own.mean(axis=2),
    }


@dataclasses.dataclass(frozen=True)
class Recall:
    """The measurements of a watched run by layer, row, KV head and decode step; zero at steps that a row did not take."""

    mass: np.ndarray  # float32 [L, B, H, N]
    attended: np.ndarray  # float32 [L, B, H, N]
    recall: np.ndarray  # float32 [L, B, H, N, R]
    own: np.ndarray  # float32 [L, B, H, N]
    steps: np.ndarray  # int32 [B]


def readings(cache: Cache) -> Recall:
    """Read the measurements of a cache made under `Watched`.

    Layers with a sliding window or without attention are not watched, and not among L.

    Raises:
        ValueError: there is no other layer.
    """
    names = [field.name for field in dataclasses.fields(Recall)]
    watches = [layer for layer in cache.layers if isinstance(layer, Watch)]
    if not watches:
        raise ValueError("expected a model in which a layer attends in full, got no such layer")
    layers = jax.device_get([{name: vars(watch)[name] for name in names} for watch in watches])
    stacked = {name: np.stack([layer[name] for layer in layers]) for name in names}
    return Recall(**{**stacked, "steps": stacked["steps"][0]})


def _stored(store: Array, inputs: Inputs) -> Array:
    """Store the keys of the given tokens; padding goes to a slot that does not exist, and is dropped."""
    key = rotate(inputs.key, inputs.position[:, None], inputs.inv_freq)
    slot = jnp.where(inputs.position >= 0, inputs.position, store.shape[2])
    return store.at[jnp.arange(len(slot))[:, None], :, slot].set(key.swapaxes(1, 2), mode="drop")
