"""Which layers may share a selection? `python -m experiments.heads.sharing --method quest`, for `kvjax.wrappers.Reuse`.

The model answers prompts of a task under a method that selects. Then each answer is scored while single heads share::

    loss[l, m, h, g] = how much -log p of the answer grows if head g of layer m takes in each step head h's list of layer l

a mean over answers, in nats; a token counts at most 6 nats, since one that is lost for certain says no more. A layer's
attention under another's list says less: layers may agree to 97 % of their attention and lose most answers together, because
few layers find what an answer needs. The anchors, one layer in ``every``, are those under which the layers lose least
together, each under the last anchor before it and with its best head. A dynamic programme finds them, as in
microsoft/kascade 695b8c9, which takes attention instead. The file has the knobs of `kvjax.wrappers.Reuse`,
``{"anchors": [...], "head_map": [[...], ...]}``, and the loss of each pair of layers with the best heads.
"""

import dataclasses
import json
import pathlib
from collections.abc import Sequence
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jsonargparse.typing import PositiveInt

import kvjax
from experiments.answering import choices_of
from experiments.cli import Job
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
_FAR = 1e3  # nats, of a layer that was not measured under another


@dataclasses.dataclass(frozen=True)
class SharingSettings(PromptSettings):
    """The settings of `experiments.heads.sharing`.

    Attributes:
        method: the method that selects, with its knobs
        every: layers to an anchor, on average
        steps: tokens of an answer that count
        rows: answers that are scored at once
        out: the file of anchors and heads
    """

    method: str = "quest(budget=1/8)"
    task: str = "niah_multikey_2"
    every: PositiveInt = 4
    steps: PositiveInt = 16
    rows: PositiveInt = 64
    out: pathlib.Path = pathlib.Path("runs/sharing.json")


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
        rows: answers that are scored at once.
    """
    found: list[float] = []
    for at in range(0, len(sources), max(rows // cache.batch, 1)):
        some = jnp.asarray(sources[at : at + max(rows // cache.batch, 1)], jnp.int32)
        tried = kvjax.fork(cache, len(some))
        layers = [
            dataclasses.replace(x, aux=dataclasses.replace(x.aux, source=jnp.tile(some[:, layer], (cache.batch, 1))))
            if isinstance(getattr(x, "aux", None), Lists)
            else x
            for layer, x in enumerate(tried.layers)
        ]
        tokens = [answer for answer in answers for _ in some]
        logs = kvjax.score(params, dataclasses.replace(tried, layers=tuple(layers)), tokens)
        lost = np.minimum(-np.asarray(logs, np.float64), _MOST).sum(axis=1)
        found += lost.reshape(cache.batch, -1).mean(axis=0).tolist()
    return np.array(found)


def best_anchors(worth: np.ndarray, count: int) -> tuple[int, ...]:
    """Choose ``count`` anchors among N layers: the first, and those under which the layers are worth most together.

    Args:
        worth: float [N, N], of layer m under anchor l at [l, m].
        count: from 1 to N.
    """
    size = len(worth)
    # best[n][end]: the most that the layers before `end` are worth under n anchors, and the last of these anchors.
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, -1)}]
    for number in range(count):
        at: dict[int, tuple[float, int]] = {}
        for end in range(number + 1, size + 1):
            at[end] = max((most + float(worth[x, x:end].sum()), x) for x, (most, _) in best[-1].items() if x < end)
        best.append(at)
    anchors, end = [], size
    for at in reversed(best[1:]):
        end = at[end][1]
        anchors.append(end)
    return tuple(reversed(anchors))


def pair_losses(
    params: Any, cache: Cache, answers: Sequence[Sequence[int]], selecting: Sequence[int], apart: int, rows: int
) -> np.ndarray:
    """Measure ``loss`` of the module docstring: float64 [L, L, H, H], inf for layers more than ``apart`` apart.

    Args:
        cache, answers, rows: as for `losses`.
        selecting: layers that select, of all L.
    """
    count = len(cache.layers)
    heads = cache.layers[selecting[0]].aux.source.shape[1]
    own = np.arange(count * heads).reshape(count, heads)
    pairs = [(one, other) for one in selecting for other in selecting if 0 < other - one <= apart]
    places = [(one, other, h, g) for one, other in pairs for h in range(heads) for g in range(heads)]
    sources = np.repeat(own[None], len(places) + 1, axis=0)
    for at, (one, other, h, g) in enumerate(places):
        sources[at, other, g] = own[one, h]
    found = losses(params, cache, answers, sources, rows)
    loss = np.full((count, count, heads, heads), np.inf)
    loss[tuple(np.array(places).T)] = found[:-1] - found[-1]
    return loss


def shared(loss: np.ndarray, every: int, selecting: Sequence[int]) -> dict[str, Any]:
    """Choose anchors and heads; see the module docstring.

    Args:
        loss: float64 [L, L, H, H], of `pair_losses`.
        every: layers to an anchor.
        selecting: layers that select.
    """
    pairs = loss.min(axis=2).sum(axis=2)  # each head with the best head of the other layer
    np.fill_diagonal(pairs, 0)
    worth = -np.minimum(pairs[np.ix_(selecting, selecting)], _FAR)
    anchors = [selecting[at] for at in best_anchors(worth, -(-len(selecting) // every))]
    heads = []
    for layer in range(len(loss)):
        before = [at for at in anchors if at < layer]
        alone = layer in anchors or layer not in selecting or not before
        heads.append(list(range(loss.shape[3])) if alone else loss[before[-1], layer].argmin(axis=0).tolist())
    return {
        "anchors": anchors,
        "head_map": heads,
        "loss": [[None if np.isinf(x) else round(x, 3) for x in row] for row in pairs],
    }


def _sharing(settings: SharingSettings) -> None:
    model = settings.load()
    (choice,) = choices_of(settings.method)
    method = choice.at(settings.length, model.tokenizer, model.config).method
    count = model.config.num_layers
    inner = {layer: method.for_layer(layer, count) for layer in method_layers(model.config)}
    selecting = [layer for layer, each in inner.items() if not each.composable or cast("SlotMethod", each).selects]
    if not selecting:
        raise ValueError(f"expected a method that selects in a layer of {settings.model}, got {settings.method}")
    prompts = encode_prompts(model, settings).wholes
    swapped = Swapped(method=cast("SlotMethod", method), layers=count)
    cache = kvjax.prefill(model.params, prompts, config=model.config, method=swapped, max_new_tokens=settings.steps)
    answers = kvjax.generate(model.params, kvjax.fork(cache), max_new_tokens=settings.steps).rows()
    loss = pair_losses(model.params, cache, answers, selecting, 2 * settings.every, settings.rows)
    choices = shared(loss, settings.every, selecting)
    write_bytes(settings.out, (json.dumps(choices) + "\n").encode())
    rows = [("layer", "anchor", *(f"under layer -{d}" for d in _DISTANCES))]
    for layer in range(count):
        seen = [choices["loss"][layer - d][layer] if layer >= d else None for d in _DISTANCES]
        chosen = "left out" if layer not in selecting else "yes" if layer in choices["anchors"] else ""
        rows.append((str(layer), chosen, *("" if x is None else f"{x:.2f}" for x in seen)))
    print("\n".join(markdown_rows(rows)))
    print(f"\nanchors={tuple(choices['anchors'])}, head_map={settings.out}")


main = Job(_sharing, SharingSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
