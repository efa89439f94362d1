"""Which layers may share a selection? `python -m experiments.heads.sharing --method quest`, for `kvjax.wrappers.Reuse`.

The model answers prompts of tasks under a method that selects. Then the answers are scored while layers share lists: the loss
is how much -log p of an answer grows, a mean over answers in nats. A token counts at most 6 nats, since one that is lost for
certain says no more. Under ``every`` layers to an anchor, the anchors are found together: first every layer selects; the
layer that costs least follows the last anchor before it, again and again; at last single anchors move while the loss falls.

The table has the loss if one layer alone follows another, each KV head with its best head. The file has the knobs of
`kvjax.wrappers.Reuse`, ``{"anchors": [...], "head_map": [[...], ...]}``; the loss of all followers together is printed for
the same heads and for these best heads.

microsoft/kascade 695b8c9 finds anchors by a dynamic programme over the attention that a layer keeps under another's list.
That says less: layers may agree to 97 % of their attention, and most answers are lost, because few layers find what an answer
needs, and their losses do not add up.
"""

import dataclasses
import json
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jsonargparse.typing import PositiveInt

import kvjax
from experiments.answering import Choice
from experiments.cli import Job, option, output_file
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows, write_bytes
from kvjax.attention.over_cache import Selection
from kvjax.cache import Cache, LayerCache, LayerStorage
from kvjax.protocol.method import LayerMethod, Prompt, Step
from kvjax.protocol.slots import SlotMethod, SlotState
from kvjax.protocol.typing import method_layers, not_none, pytree, static, traced
from kvjax.wrappers import Reuse
from kvjax.wrappers.compose import Around, answers, inner_of_layer
from kvjax.wrappers.reuse import no_selection

_DISTANCES = (1, 2, 3, 4, 6, 8)  # between layers, in the printed table
_MOST = 6.0  # nats that a token counts at most
_MOVE = 3  # selecting layers by which an anchor moves at most

type Anchors = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class SharingSettings(PromptSettings):
    """The settings of `experiments.heads.sharing`.

    Attributes:
        method: the method that selects, with its knobs
        every: layers to an anchor, on average
        task: tasks of the prompts, with commas between them
        samples: prompts of each task
        steps: tokens of an answer that count
        rows: answers that are scored at once
        out: the file of anchors and heads
    """

    method: str = "quest(budget=1/8)"
    task: str = "niah_multikey_2,niah_single_3,niah_multivalue,vt"
    samples: PositiveInt = 4
    every: PositiveInt = 4
    steps: PositiveInt = 24
    rows: PositiveInt = 64
    out: pathlib.Path = option(pathlib.Path("runs/sharing.json"), read=output_file)


@pytree
class Lists:
    """What a layer of `Swapped` keeps in addition to the cache."""

    inner: Any  # the metadata of the inner method
    lists: Selection  # of the last step, of this layer and those before it: [B, L * H, K]
    source: Array  # int32 [B, H], layer * H + head: whose list each head takes


@answers("method")
@pytree
class Swapped(Around):
    """Select in each layer as ``method`` does, and let each head of each row take the list that its state names.

    So one program, and one batch, measures many ways to share. In the beginning each head takes its own list.
    """

    layer: int | Array = traced("which layer this is", default=0)
    layers: int = static("layers of the model", default=0)

    composable = False
    spans_layers = True
    keeps = "what `method` keeps"

    def check(self) -> None:
        Reuse(method=self.method)  # refuses methods whose lists cannot serve other layers

    def source(self, layer: int, num_layers: int) -> int | None:
        selecting = [at for at in range(layer + 1) if inner_of_layer(self.method, at, num_layers).selects]
        return selecting[-2] if layer in selecting[1:] else None

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        inner = inner_of_layer(self.method, layer, num_layers)
        return Swapped(method=inner, layer=layer, layers=num_layers) if inner.selects else inner

    def signal(self, state: SlotState) -> Selection:
        return state.aux.lists

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerStorage, Lists]:
        cache, inner = self.method.compress(cache, prompt, room)
        chosen = dataclasses.replace(no_selection(self.method, cache, inner, prompt), select_aux=None)
        heads = chosen.slots.shape[1]
        own = self.layer * heads + jnp.arange(heads, dtype=jnp.int32)
        lists = jax.tree.map(lambda x: jnp.repeat(x[:, :1], self.layers * heads, axis=1), chosen)
        return cache, Lists(inner=inner, lists=lists, source=jnp.broadcast_to(own, chosen.slots.shape[:2]))

    def select(self, cache: LayerStorage, aux: Lists, step: Step) -> Selection:
        own = not_none("a list at this size", self.method.select(cache, aux.inner, step))
        earlier = aux.lists if step.signal is None else step.signal
        row, heads = jnp.arange(len(own.slots))[:, None], jnp.arange(own.slots.shape[1])
        plain = dataclasses.replace(own, select_aux=None)
        lists = jax.tree.map(lambda x, y: x.at[:, self.layer * len(heads) + heads].set(y), earlier, plain)
        chosen = jax.tree.map(lambda x: x[row, aux.source], lists)
        return dataclasses.replace(chosen, select_aux=(lists, own.select_aux))

    def update(self, cache: LayerStorage, aux: Lists, step: Step, mass: Array | None) -> tuple[LayerStorage, Lists]:
        lists, inner = (aux.lists, None) if step.select_aux is None else step.select_aux
        cache, inner = self.method.update(cache, aux.inner, dataclasses.replace(step, select_aux=inner), mass)
        return cache, dataclasses.replace(aux, inner=inner, lists=lists)

    def count(self, cache: LayerStorage, aux: Lists, shared: Any) -> tuple[Array, Array]:
        return self.method.count(cache, aux.inner, shared)


def losses(params: Any, cache: Cache, answers: Sequence[Sequence[int]], sources: np.ndarray, rows: int = 64) -> np.ndarray:
    """Score the answers of each row under each way to share: a mean over the rows, float64 [N], in nats.

    Args:
        cache: of `Swapped`, of B rows; it is not consumed.
        answers: B token lists.
        sources: int [N, L, H], as `Lists.source`.
        rows: answers that are scored at once; more take more memory, a copy of a row's cache each.

    Raises:
        FloatingPointError: a loss is NaN.
    """
    ways, batch = max(rows // cache.batch, 1), cache.batch
    padded = jnp.asarray([[*x, *[0] * (max(map(len, answers)) - len(x))] for x in answers], jnp.int32)
    length = jnp.asarray([len(x) for x in answers], jnp.int32)
    filled = np.concatenate([sources, np.repeat(sources[-1:], -len(sources) % ways, axis=0)])
    lost = []
    for some in filled.reshape(-1, ways, *sources.shape[1:]):
        logs = np.asarray(score_ways(params, cache, padded, length, jnp.asarray(some, jnp.int32)), np.float64)
        lost.append(np.minimum(-logs, _MOST).sum(axis=1).reshape(batch, ways).mean(axis=0))
    found = np.concatenate(lost)[: len(sources)]
    if np.isnan(found).any():
        raise FloatingPointError(f"the answers' losses are not finite: check the parameters and the dtype, got {found}")
    return found


@jax.jit
def score_ways(params: Any, cache: Cache, tokens: Array, length: Array, sources: Array) -> Array:
    """Score answers under N ways to share: log-probabilities float32 [B * N, T]. Copying rows here makes one copy of them.

    Args:
        cache: of `Swapped`, of B rows.
        tokens: int32 [B, T], padded on the right.
        length: int32 [B].
        sources: int32 [N, L, H].
    """
    tried = kvjax.fork(cache, len(sources))
    layers = [
        dataclasses.replace(x, aux=dataclasses.replace(x.aux, source=jnp.tile(sources[:, layer], (cache.batch, 1))))
        if isinstance(getattr(x, "aux", None), Lists)
        else x
        for layer, x in enumerate(tried.layers)
    ]
    tokens, length = (jnp.repeat(x, len(sources), axis=0) for x in (tokens, length))
    return kvjax.score(params, dataclasses.replace(tried, layers=tuple(layers)), tokens, lengths=length)


def search(lost: Callable[[list[Anchors]], np.ndarray], selecting: Anchors, count: int) -> Anchors:
    """Choose ``count`` anchors: the layer that costs least follows, again and again; then anchors move while the loss falls.

    Args:
        lost: computes the loss of each of several sets of anchors, float [N].
        selecting: all layers that select, ascending; the first is an anchor.
        count: from 1.
    """
    anchors = selecting
    while len(anchors) > count:
        fewer = [tuple(at for at in anchors if at != gone) for gone in anchors[1:]]
        anchors = fewer[int(lost(fewer).argmin())]
    least = float(lost([anchors])[0])
    while True:
        others = [at for at in selecting if at not in anchors]
        moves = [(a, b) for a in anchors[1:] for b in others if abs(selecting.index(a) - selecting.index(b)) <= _MOVE]
        moved = [tuple(sorted({*anchors, b} - {a})) for a, b in moves]
        found = lost(moved) if moved else np.array([np.inf])
        if found.min() >= least:
            return anchors
        least, anchors = float(found.min()), moved[int(found.argmin())]


def followed(own: np.ndarray, selecting: Anchors, anchors: Anchors, best: Mapping[tuple[int, int], np.ndarray]) -> np.ndarray:
    """Return the sources [L, H] if layers follow the last anchor before them, with the heads ``best``, or the same ones.

    Args:
        own: int [L, H], the sources of layers that share nothing.
        selecting: layers that select.
        anchors: some of them.
        best: int [H] for an anchor and a layer: the anchor's head for each head.
    """
    sources = own.copy()
    for layer in selecting:
        before = [at for at in anchors if at <= layer]
        if before and before[-1] < layer:
            sources[layer] = own[before[-1]][best.get((before[-1], layer), np.arange(own.shape[1]))]
    return sources


def _sharing(settings: SharingSettings) -> None:
    model = settings.load()
    choice = Choice.parse(settings.method).check()
    method = choice.at(settings.length, model.tokenizer, model.config).method
    count = model.config.num_layers
    inner = {layer: method.for_layer(layer, count) for layer in method_layers(model.config)}
    selecting = tuple(at for at, each in inner.items() if not each.composable or cast("SlotMethod", each).selects)
    if not selecting:
        raise ValueError(f"expected a method that selects in a layer of {settings.model}, got {settings.method}")
    tasks = (dataclasses.replace(settings, task=task) for task in settings.task.split(","))
    prompts = [prompt for each in tasks for prompt in encode_prompts(model, each).wholes]
    swapped = Swapped(method=cast("SlotMethod", method), layers=count)
    cache = kvjax.prefill(model.params, prompts, config=model.config, method=swapped, max_new_tokens=settings.steps)
    answers = kvjax.generate(model.params, kvjax.fork(cache), max_new_tokens=settings.steps).rows()
    heads = cache.layers[selecting[0]].aux.source.shape[1]
    own = np.arange(count * heads).reshape(count, heads)

    def lost(sources: Sequence[np.ndarray]) -> np.ndarray:
        found = losses(model.params, cache, answers, np.array([*sources, own]), settings.rows)
        return found[:-1] - found[-1]

    def best_heads(pairs: Sequence[tuple[int, int]]) -> dict[tuple[int, int], tuple[np.ndarray, float]]:
        """Return the best head of layer l for each head of layer m, int [H], and what they lose, for pairs (l, m)."""
        sources = np.repeat(own[None], len(pairs) * heads * heads, axis=0).reshape(len(pairs), heads, heads, *own.shape)
        for at, (one, other) in enumerate(pairs):
            for head in range(heads):
                sources[at, :, head, other, head] = own[one]
        loss = lost(list(sources.reshape(-1, *own.shape))).reshape(len(pairs), heads, heads)
        return {pair: (x.argmin(axis=0), float(x.min(axis=0).sum())) for pair, x in zip(pairs, loss, strict=True)}

    anchors = search(
        lambda sets: lost([followed(own, selecting, x, {}) for x in sets]), selecting, -(-len(selecting) // settings.every)
    )
    near = [(one, other) for other in selecting for one in selecting if other - one in _DISTANCES]
    last = [(max(at for at in anchors if at < layer), layer) for layer in selecting if layer > anchors[0]]
    pairs = best_heads(sorted({*near, *last}))
    mapped = followed(own, selecting, anchors, {pair: best for pair, (best, _) in pairs.items()})
    plain = followed(own, selecting, anchors, {})
    write_bytes(settings.out, (json.dumps({"anchors": anchors, "head_map": (mapped % heads).tolist()}) + "\n").encode())
    rows = [("layer", "anchor", *(f"under layer -{d}" for d in _DISTANCES))]
    for layer in range(count):
        chosen = "left out" if layer not in selecting else "yes" if layer in anchors else ""
        seen = (pairs.get((layer - d, layer)) for d in _DISTANCES)
        rows.append((str(layer), chosen, *("" if x is None else f"{x[1]:.2f}" for x in seen)))
    print("\n".join(markdown_rows(rows)))
    together = lost([plain, mapped])
    print(f"\nanchors={anchors}: {together[0]:.2f} nats an answer; with head_map={settings.out}: {together[1]:.2f}")


main = Job(_sharing, SharingSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
