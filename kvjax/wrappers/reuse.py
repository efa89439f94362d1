"""A selection that serves other layers and later tokens: `Reuse` lets one layer in ``every`` select."""

import dataclasses
import json
import pathlib
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.protocol.method import LayerMethod, Method, Prompt, Step
from kvjax.protocol.slots import Reads, SlotMethod, SlotState, count_all
from kvjax.protocol.typing import Model, method_layers, pytree, static
from kvjax.wrappers.compose import Around, answers, inner_of_layer, passes, slot_method
from pallas_kernels import axes

_NONE = jnp.iinfo(jnp.int32).max  # above all slots


@pytree
class Choice:
    """The state that `Reuse` keeps in addition to the cache."""

    inner: Any  # the metadata of the inner method
    chosen: Selection  # what the inner method selected last; without entries if it attends to all slots at this size
    at: Array  # int32 [B], slots in use when it did; 0 if the next step must select

    @property
    def dense(self) -> bool:
        """Whether the inner method attends to all slots at this size."""
        return self.chosen.slots.shape[2] == 0


@answers("method")
@pytree
class Reuse(Around):
    """Let one layer in ``every`` select for the layers behind it, and a selection serve ``steps`` tokens.

    Example: ``Reuse(method=Quest(budget=2048), every=4, join=True)``.

    The layers in which ``method`` selects are counted from the first, without layers that have a window or no attention:
    number 0, ``every``, 2 * ``every`` and so on are *anchors*, or the layers that ``anchors`` lists. In a decode step an
    anchor selects as ``method`` does. The layers behind it, up to the next anchor, attend to the same slots, each with its
    own keys, values and queries; they keep no metadata. KV head h takes the list of the anchor's KV head h, or of
    ``head_map[layer][h]``. What ``method`` leaves dense stays dense.

    With ``steps`` above 1 an anchor selects in its first step and in every ``steps``-th step after it, and attends in between
    to its last list and to all tokens that came since. A row that gets several tokens at once (`kvjax.extend`) selects anew.

    Anchors and a map of heads belong to a model, and ``every`` alone may lose most needles. ``python -m
    experiments.heads.sharing`` searches for anchors by what answers lose, prints them, and writes a file, which commands take
    for ``head_map`` and `read_head_map` reads. With a quarter of a model's layers so found the score is Quest's
    (docs/quality.md). With ``join`` the heads of a layer attend to the lists of all of the anchor's KV heads, up to H times
    as many tokens, which forgives badly placed anchors in part: ``every=4`` then is 3 points below Quest.

    ``method`` selects slots in each step and keeps every token: `Quest`, `ParisKV`, `RetrievalAttention`, `PQCache`,
    `SOCKET`, `InfiniGen`, `Oracle`, or `Twilight` and `DenseBelow` around them. Other methods are refused when the wrapper is
    made (ValueError). With ``every=1`` it may evict first, as `Stages` does, because then no layer reads another's list.

    The accounting counts the tokens of the last step, and in an anchor a share 1/``steps`` of the metadata of ``method``.

    **Source**: Deshmukh et al., "Kascade: A Practical Sparse Attention Method for Long-Context LLM Inference"
    (arXiv:2512.16391); microsoft/kascade 695b8c9 for anchors by dynamic programming and maps of KV heads.

    **Departures**: Kascade's anchors compute exact attention to find the best tokens, and its first layer is dense; here
    ``method`` selects, and layers are dense where it leaves them dense. Kascade also reuses lists while it reads a prompt,
    and has no ``steps``.
    """

    every: int = static("layers that one selection serves", default=4, least=1)
    steps: int = static("tokens that one selection serves", default=1, least=1)
    anchors: tuple[int, ...] | None = static("layers that select; None = by `every`", default=None, least=0)
    head_map: tuple[tuple[int, ...], ...] | None = static(
        "per layer the anchor's KV head for each; None = h", default=None, least=0
    )
    join: bool = static("whether each head attends to the lists of all of the anchor's KV heads", default=False)

    PAPER: ClassVar[str] = "arXiv:2512.16391"
    composable = False
    spans_layers = True
    slot_block = None  # a list stays in the state, and each device would have another one

    keeps = "what `method` keeps"

    reread_tokens = passes("method", SlotMethod.reread_tokens)
    reread = passes("method", SlotMethod.reread)

    def check(self) -> None:
        method = slot_method("Reuse: method", self.method)
        name = type(method).__name__
        if not method.selects:
            raise ValueError(f"Reuse: method must select slots in each step, but {name} attends to all that it keeps")
        if method.moves_slots or method.packs:
            does = "moves slots while decoding" if method.moves_slots else "stores keys in channels of its own"
            raise ValueError(
                f"Reuse: {name} {does}, so a list of slots cannot serve later; method must leave slots as they are"
            )
        if method.evicts and self._across:
            raise ValueError(
                f"Reuse: {name} evicts in each layer for itself, so a slot is another token in another layer; got "
                f"every={self.every}, expected every=1 without anchors, or a method that keeps every token"
            )

    def check_sizes(self, model: Model) -> None:
        runs, count = method_layers(model), model.num_layers
        if self.anchors is not None and not set(self.anchors) <= set(runs):
            which = f"below {count}" if len(runs) == count else f"that attend to the whole context, {list(runs)}"
            raise ValueError(f"Reuse: anchors must be layers {which}, got {list(self.anchors)}")
        if self.head_map is not None:
            sizes, most = [len(row) for row in self.head_map], max(max(row, default=0) for row in self.head_map)
            if sizes != [model.num_kv_heads] * count or most >= model.num_kv_heads:
                raise ValueError(
                    f"Reuse: head_map must have {model.num_kv_heads} KV heads below {model.num_kv_heads} for each of the "
                    f"model's {count} layers, got {len(sizes)} rows of {sorted(set(sizes))} entries up to {most}"
                )

    @property
    def _across(self) -> bool:
        return self.every > 1 or self.anchors is not None

    def on_layers(self, layers: tuple[int, ...], num_layers: int) -> Method:
        if self.every == 1 or self.anchors is not None:
            return self
        selecting = [at for at in layers if inner_of_layer(self.method, at, num_layers).selects]
        return dataclasses.replace(self, anchors=tuple(selecting[:: self.every])) if selecting else self

    def source(self, layer: int, num_layers: int) -> int | None:
        if not self._across:
            return None
        selecting = [at for at in range(num_layers) if inner_of_layer(self.method, at, num_layers).selects]
        anchors = selecting[:: self.every] if self.anchors is None else self.anchors
        earlier = [at for at in anchors if at <= layer and at in selecting]
        return max(earlier) if layer in selecting and earlier and max(earlier) < layer else None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        inner = inner_of_layer(self.method, layer, num_layers)
        if not inner.selects:
            return inner
        if self.source(layer, num_layers) is None:
            return Reuse(method=inner, every=1, steps=self.steps, join=self.join)
        return Follower(method=inner, heads=None if self.head_map is None or self.join else self.head_map[layer])

    def signal(self, state: SlotState) -> Selection | None:
        if state.aux.dense:
            return None
        chosen = self._extended(state.cache, state.aux)
        return joined(chosen) if self.join else chosen

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerStorage, Choice]:
        cache, inner = self.method.compress(cache, prompt, room)
        chosen = no_selection(self.method, cache, inner, prompt)
        return cache, Choice(inner=inner, chosen=chosen, at=jnp.zeros((len(chosen.slots),), jnp.int32))

    def select(self, cache: LayerStorage, aux: Choice, step: Step) -> Selection | None:
        if aux.dense:
            return None
        active = step.position[:, 0] >= 0
        if self.steps == 1:
            due, fresh = active, self.method.select(cache, aux.inner, step)
        else:
            due = active & ((aux.at == 0) | (cache.cursor - aux.at >= self.steps))
            # A branch reads the cache and returns a short list, so nothing is copied.
            fresh = lax.cond(due.any(), lambda: self.method.select(cache, aux.inner, step), lambda: aux.chosen)
        chosen = jax.tree.map(lambda x, y: jnp.where(due.reshape(-1, *(1,) * (x.ndim - 1)), x, y), fresh, aux.chosen)
        aux = Choice(inner=None, chosen=chosen, at=jnp.where(due, cache.cursor, aux.at))
        return dataclasses.replace(self._extended(cache, aux), select_aux=aux)

    def update(self, cache: LayerStorage, aux: Choice, step: Step, mass: Array | None) -> tuple[LayerStorage, Choice]:
        listed = step.select_aux
        if listed is None:  # several tokens, or tokens that another method has read: the list does not know of them
            listed = dataclasses.replace(aux, at=jnp.where((step.position >= 0).any(axis=1), 0, aux.at))
        inner = None if step.select_aux is None else listed.chosen.select_aux
        cache, inner = self.method.update(cache, aux.inner, dataclasses.replace(step, select_aux=inner), mass)
        return cache, dataclasses.replace(listed, inner=inner)

    def drafted(self, before: Choice, after: Choice) -> Choice:
        return dataclasses.replace(before, inner=self.method.drafted(before.inner, after.inner))

    def count(self, cache: LayerStorage, aux: Choice, shared: Any) -> tuple[Array, Array]:
        slots, metadata = self.method.count(cache, aux.inner, shared)
        if not aux.dense:
            _, mask = self._extended(cache, aux).tokens(cache)
            last = jnp.sum(mask, axis=2, dtype=jnp.int32)
            slots = jnp.where((aux.at > 0)[:, None], last, slots)
        return slots, metadata.astype(jnp.float32) / self.steps

    def counters(self, aux: Choice, shared: Any) -> dict[str, Array]:
        return self.method.counters(aux.inner, shared)

    def _extended(self, cache: LayerStorage, aux: Choice) -> Selection:
        """Return the last list and, behind it, the slots or pages that came since."""
        chosen = aux.chosen
        size = chosen.page_size
        more = -(-(self.steps - 1) // size)
        if not more:
            return chosen
        first = jnp.maximum(aux.at - 1, 0) // size + 1
        slots = first[:, None, None] + jnp.arange(more, dtype=jnp.int32)[None, None]
        slots = jnp.broadcast_to(slots, (*chosen.slots.shape[:2], more))
        mask = slots * size < cache.cursor[:, None, None]
        bias = chosen.bias
        if bias is not None:
            bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, more)))
        return dataclasses.replace(
            chosen,
            slots=jnp.concatenate([chosen.slots, jnp.where(mask, slots, 0)], axis=2),
            mask=jnp.concatenate([chosen.mask, mask], axis=2),
            bias=bias,
        )


def joined(chosen: Selection) -> Selection:
    """Join the lists of all KV heads, on all devices, into one: slots and mask [B, 1, H * K], each entry once."""
    slots, mask = (axes.joined(x, 1).reshape(len(x), 1, -1) for x in (chosen.slots, chosen.mask))
    slots = jnp.sort(jnp.where(mask, slots, _NONE), axis=2)
    first = jnp.pad(slots[..., 1:] != slots[..., :-1], ((0, 0), (0, 0), (1, 0)), constant_values=True)
    mask = first & (slots < _NONE)
    return Selection(slots=jnp.where(mask, slots, 0), mask=mask, page_size=chosen.page_size)


def no_selection(method: SlotMethod, cache: LayerStorage, inner: Any, prompt: Prompt) -> Selection:
    """Make a `Selection` in the shapes of ``method``'s that lists nothing; without entries if it attends to all slots."""
    batch, heads, group, _, dim = prompt.query.shape
    query = jnp.zeros((batch, heads, group, 1, dim), prompt.query.dtype)
    at = jnp.zeros((batch, 1), jnp.int32)
    step = Step(query=query, position=at, tokens=at, shared=None, guess=query)
    shapes = jax.eval_shape(method.select, cache, inner, step)
    if shapes is None:  # a tree as at other sizes, or a saved cache could not be loaded
        shapes = Selection(slots=jnp.zeros((batch, 1, 0), jnp.int32), mask=jnp.zeros((batch, 1, 0), bool))
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)


def read_head_map(path: str | pathlib.Path, config: Model) -> tuple[tuple[int, ...], ...]:
    """Read the knob ``head_map`` of `Reuse` from a file of ``experiments.heads.sharing``.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file holds something else.
    """
    file = pathlib.Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"no map of heads in {file}: expected a file, which experiments.heads.sharing writes")
    try:
        return tuple(map(tuple, json.loads(file.read_text(encoding="utf-8"))["head_map"]))
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{file} must hold {{"head_map": [[...], ...]}}, got: {error!r:.80}') from error


@answers("method")
@pytree
class Follower(Around):
    """A layer that attends to the slots which an earlier layer has selected in the same step; see `Reuse`."""

    heads: tuple[int, ...] | None = static("the anchor's KV head for each KV head; None = the same", default=None)

    composable = False
    needs_guess = False
    keys_stay = False
    obs_window = 0
    reads = Reads()
    observes = 0

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache, None

    def select(self, cache: LayerStorage, aux: None, step: Step) -> Selection | None:
        chosen = step.signal
        return None if chosen is None else self._mapped(chosen)

    def update(self, cache: LayerStorage, aux: None, step: Step, mass: Array | None) -> tuple[LayerStorage, None]:
        return cache, None

    def with_signal(self, state: SlotState, signal: Selection | None) -> SlotState:
        return dataclasses.replace(state, aux=signal)

    def count(self, cache: LayerStorage, aux: Selection | None, shared: Any) -> tuple[Array, Array]:
        """Count the tokens of the anchor's last list, or all that are stored if there is none."""
        stored, nothing = count_all(cache)
        if aux is None:
            return stored, nothing
        _, mask = self._mapped(aux).tokens(cache)
        return jnp.sum(mask, axis=2, dtype=jnp.int32), nothing

    def _mapped(self, chosen: Selection) -> Selection:
        """Give each KV head the list of the anchor's head that it follows; heads may be on other devices."""
        if self.heads is None or chosen.slots.shape[1] * axes.size(axes.MODEL) < len(self.heads):  # one list for all heads
            return chosen
        first, size = axes.index(axes.MODEL) * chosen.slots.shape[1], chosen.slots.shape[1]
        own = lax.dynamic_slice_in_dim(jnp.asarray(self.heads, jnp.int32), first, size)
        slots, mask, bias = (
            None if x is None else jnp.take(axes.joined(x, 1), own, axis=1) for x in (chosen.slots, chosen.mask, chosen.bias)
        )
        return dataclasses.replace(chosen, slots=slots, mask=mask, bias=bias)
