"""Which layers may share a selection? `python -m experiments.heads.sharing --method quest`, for `kvjax.wrappers.Reuse`.

The model prefills prompts of a task and decodes under a method that selects. In each step, with p the attention of layer m in
the step's own state, averaged over the query heads of KV head g, and C the tokens that the method selects::

    agreement[l, m, h, g] = sum of p[m, g] over C[l, h]  /  sum of p[m, g] over C[m, g]

is the share of the attention which head g of layer m keeps if it takes the list of head h of layer l; means over prompts and
steps. The anchors, one layer in ``every``, are the layers that have the largest sum of agreements, each layer under the last
anchor before it and with its best head, weighted by how much its attention turns the hidden states
(`experiments.heads.layers`). A dynamic programme finds them, as in microsoft/kascade 695b8c9, which takes the smallest
agreement of a prompt's queries where this takes their mean. The file has the knobs of `kvjax.wrappers.Reuse`,
``{"anchors": [...], "head_map": [[...], ...]}``, and the agreement of each pair of layers with the best heads.
"""

import dataclasses
import json
import pathlib
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jsonargparse.typing import PositiveInt

import kvjax
from experiments.answering import choices_of
from experiments.cli import Job
from experiments.heads.layers import attention_similarity
from experiments.heads.monitor import MonitorLayer
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows, write_bytes
from kvjax.cache import Cache
from kvjax.methods.oracle import logits_of
from kvjax.protocol.method import Inputs, LayerMethod, LayerSpec, Method
from kvjax.protocol.slots import SlotMethod
from kvjax.protocol.typing import method_layers, pytree
from kvjax.rope import rotate
from kvjax.wrappers.compose import answers

_DISTANCES = (1, 2, 3, 4, 6, 8)  # between layers, in the printed table


@dataclasses.dataclass(frozen=True)
class SharingSettings(PromptSettings):
    """The settings of `experiments.heads.sharing`.

    Attributes:
        method: the method that selects, with its knobs
        every: layers to an anchor, on average
        steps: decode steps that are measured
        out: the file of anchors and heads
    """

    method: str = "quest(budget=1/8)"
    every: PositiveInt = 4
    steps: PositiveInt = 16
    out: pathlib.Path = pathlib.Path("runs/sharing.json")


@pytree
class Pair:
    """The state of a layer that is compared with others."""

    inner: Any  # the method's own state
    weight: Array  # float32 [B, H, S], attention of the last step, mean over the group; slot s is position s
    chosen: Array  # bool [B, H, S], the tokens that the method selected


@answers("inner")
@pytree
class PairedLayer(MonitorLayer):
    """A layer of `Paired`."""

    def init(self, spec: LayerSpec) -> Pair:
        shape = spec.batch, spec.num_kv_heads, spec.prompt_slots + spec.max_new_tokens
        return Pair(inner=self.inner.init(spec), weight=jnp.zeros(shape, jnp.float32), chosen=jnp.zeros(shape, bool))

    def attend(self, state: Pair, inputs: Inputs) -> tuple[Array, Pair]:
        decodes = inputs.start is None and inputs.query.shape[3] == 1
        positions = self.inner.chosen(state.inner, inputs) if decodes else None
        out, inner = self.inner.attend(state.inner, inputs)
        state = dataclasses.replace(state, inner=inner)
        if positions is None:
            return out, state
        query, cache, (batch, heads, slots) = inputs.rotated()[0], inner.cache, state.weight.shape
        key = rotate(cache.key, cache.position, inputs.inv_freq) if self.inner.extrapolates else cache.key
        weight = jax.nn.softmax(logits_of(query[..., 0, :], key, cache.valid), axis=-1).mean(axis=2)
        at = jnp.where(positions >= 0, positions, slots)
        row, entry = jnp.arange(batch)[:, None, None], jnp.arange(at.shape[1])[None, :, None]
        lists = jnp.zeros((batch, at.shape[1], slots), bool).at[row, entry, at].set(True, mode="drop")
        lists = jnp.broadcast_to(
            lists.reshape(batch, -1, max(at.shape[1] // heads, 1), slots).any(axis=2), state.chosen.shape
        )
        return out, Pair(inner=inner, weight=weight[..., :slots], chosen=lists)


@answers("method")
@pytree
class Paired(Method):
    """Any method that keeps every token, with what `agreements` reads."""

    method: Method

    dense_prompt = False

    def check(self) -> None:
        method, name = self.method, type(self.method).__name__
        if method.evicts or method.drafts or type(method).observe is not Method.observe:
            raise ValueError(f"lists are compared of methods that keep every token and select in each layer, got {name}")

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return PairedLayer(inner=self.method.for_layer(layer, num_layers))


@jax.jit
def agreements(cache: Cache) -> Array:
    """Compute ``agreement`` of the last step, see the module docstring: float32 [L, L, H, H], a mean over the rows."""
    pairs = [state for state in cache.layers if isinstance(state, Pair)]
    chosen, weight = (jnp.stack([getattr(pair, name) for pair in pairs]).astype(jnp.float32) for name in ("chosen", "weight"))
    kept = jnp.einsum("lbhs,mbgs->lmhgb", chosen, weight, precision="highest")
    most = jnp.einsum("mbgs,mbgs->mgb", chosen, weight, precision="highest")
    return (kept / most[None, :, None]).mean(axis=-1)


def measured(params: Any, config: Any, method: Method, prompts: Any, steps: int) -> np.ndarray:
    """Decode ``steps`` tokens after each prompt, and average the agreements.

    Returns:
        float64 [L, L, H, H], 0 for layers that have a window or no attention.
    """
    tokens, lengths = kvjax.pad_tokens(prompts)
    cache = kvjax.prefill(params, tokens, lengths=lengths, config=config, method=Paired(method=method), max_new_tokens=steps)
    total = np.zeros(())
    for _ in range(steps):
        cache = kvjax.decode_step(params, cache, jnp.argmax(cache.logits, axis=-1).astype(jnp.int32))
        total = total + np.asarray(agreements(cache), np.float64)
    runs, count = list(method_layers(config)), config.num_layers
    every = np.zeros((count, count, *total.shape[2:]))
    every[np.ix_(runs, runs)] = total / steps
    return every


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


def shared(agreement: np.ndarray, importance: np.ndarray, every: int, apart: list[int]) -> dict[str, Any]:
    """Choose anchors and heads; see the module docstring.

    Args:
        agreement: float64 [L, L, H, H].
        importance: float64 [L], the weight of each layer.
        every: layers to an anchor.
        apart: layers that do not select, and are left out.
    """
    selecting = [layer for layer in range(len(agreement)) if layer not in apart]
    pairs = agreement.max(axis=2).mean(axis=2)  # each head with the best head of the other layer
    among = np.ix_(selecting, selecting)
    chosen = best_anchors(pairs[among] * importance[selecting][None], -(-len(selecting) // every))
    anchors = [selecting[at] for at in chosen]
    heads = []
    for layer in range(len(agreement)):
        before = [at for at in anchors if at < layer]
        alone = layer in anchors or layer in apart or not before
        heads.append(list(range(agreement.shape[3])) if alone else agreement[before[-1], layer].argmax(axis=0).tolist())
    return {"anchors": anchors, "head_map": heads, "agreement": np.round(pairs, 3).tolist()}


def _sharing(settings: SharingSettings) -> None:
    model = settings.load()
    (choice,) = choices_of(settings.method)
    method = choice.at(settings.length, model.tokenizer, model.config).method
    count = model.config.num_layers
    inner = {layer: method.for_layer(layer, count) for layer in method_layers(model.config)}
    idle = [layer for layer, each in inner.items() if each.composable and not cast("SlotMethod", each).selects]
    apart = [layer for layer in range(count) if layer not in inner or layer in idle]
    if len(apart) == count:
        raise ValueError(f"expected a method that selects in a layer of {settings.model}, got {settings.method}")
    prompts = encode_prompts(model, settings).wholes
    agreement = measured(model.params, model.config, method, prompts, settings.steps)
    importance = 1 - np.asarray(attention_similarity(model.params, prompts, model.config))
    choices = shared(agreement, importance, settings.every, apart)
    write_bytes(settings.out, (json.dumps(choices) + "\n").encode())
    pairs = np.asarray(choices["agreement"])
    rows = [("layer", "anchor", *(f"under layer -{d}" for d in _DISTANCES))]
    for layer in range(count):
        seen = [layer - d if layer >= d and not {layer, layer - d} & {*apart} else None for d in _DISTANCES]
        under = ("" if other is None else f"{pairs[other, layer]:.2f}" for other in seen)
        rows.append((str(layer), "left out" if layer in apart else "yes" if layer in choices["anchors"] else "", *under))
    print("\n".join(markdown_rows(rows)))
    print(f"\nanchors={tuple(choices['anchors'])}, head_map={settings.out}")


main = Job(_sharing, SharingSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
