"""Unequal budgets of layers: `LayerBudgets` gives each layer a share; `layer_shares` computes shares from a measurement."""

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np

from kvjax.protocol.method import LayerMethod, Method, check_method, with_inner
from kvjax.protocol.typing import pytree, static, traced
from kvjax.selection import floor_share
from kvjax.wrappers.compose import answers

_GROUPS = 3  # of layers


@answers("method")
@pytree
class LayerBudgets(Method):
    """Give each layer its share of the budget of ``method``: ``LayerBudgets(method=SnapKV(budget=1024), shares=shares)``.

    Layer l runs ``method`` with a budget of ``floor(shares[l] * budget)`` tokens, so ``budget`` is the mean over the layers
    if the mean of ``shares`` is 1. Where ``method`` is made of methods (`Periodic`, `Stages`), every budget in it
    is multiplied. Other knobs stay as they are: ``num_recent`` of `H2O` is half of its own budget, unless it is given. Arrays
    have the size of their own layer's budget. A layer with a sliding window keeps its window.

    SqueezeAttention takes the shares from a prompt: a layer whose attention hardly turns the hidden states gets less.
    `layer_shares` computes shares from such measurements, and ``python -m experiments.heads.layers`` measures a model.

    ``method`` must have a budget and must not decide for all layers at once. Other methods are refused (ValueError), and so
    are shares for another number of layers, and shares with which a layer's budget would be too small for ``method``.

    **Source**: Wang and Gan, "SqueezeAttention: 2D Management of KV-Cache in LLM Inference via Layer-wise Optimal Budget"
    (arXiv:2404.04793, algorithm 1); hetailang/SqueezeAttention a1933d1.

    **Departures**: the shares belong to the model, not to each prompt, because budgets are the sizes of arrays. The
    groups of layers are the best of all divisions into three; the released code draws the first centres of its k-means. It
    groups sliding windows, StreamingLLM and H2O, and here any method with a budget can run in the layers.
    """

    PAPER: ClassVar[str] = "arXiv:2404.04793"

    method: Method = traced("the method inside, which has a budget")
    shares: tuple[float, ...] = static("of each layer, as factors of the budget; their mean is 1", above=0)

    keeps = "in each layer what `method` keeps with the layer's budget"

    def check(self) -> None:
        method = check_method("LayerBudgets: method", self.method)
        name = type(method).__name__
        if method.spans_layers:
            raise ValueError(f"LayerBudgets: {name} chooses for all layers at once and cannot have a budget for each layer")
        if not any(_has_budget(part) for part in with_inner(method)):
            raise ValueError(f"LayerBudgets: method must have a budget in tokens, but {name} has none")
        for share in sorted(set(self.shares)):
            _multiplied(method, share)  # which refuses a budget that the method cannot have

    def offloaded(self, share: float) -> Method | None:
        method = self.method.offloaded(share)
        return None if method is None else dataclasses.replace(self, method=method)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        if len(self.shares) != num_layers:
            raise ValueError(
                f"LayerBudgets: shares must have a number for each of the model's {num_layers} layers, got {len(self.shares)}"
            )
        return _multiplied(self.method, self.shares[layer]).for_layer(layer, num_layers)


def layer_shares(similarity: Sequence[float], share: float = 0.35) -> tuple[float, ...]:
    """Compute the shares of `LayerBudgets` by SqueezeAttention's rule.

    The layers are divided into three groups with the least sum of squared differences from the mean of the own group. The
    layers of the most similar group get ``share`` of the budget; the tokens they save go to all other layers in equal parts.
    So the mean of the shares is 1.

    Args:
        similarity: for each layer the mean cosine of a prompt's hidden states before and after attention.
        share: share of the budget for the layers that attention changes least; above 0 and at most 1.

    Returns:
        A share for each layer.

    Raises:
        ValueError: fewer than three different similarities, or a share outside of its range.
    """
    values = np.asarray([float(x) for x in similarity], np.float64)
    if not np.isfinite(values).all() or len(set(values.tolist())) < _GROUPS:
        raise ValueError(
            f"layer_shares: similarity must have at least {_GROUPS} different finite numbers, one for each layer, got "
            f"{np.round(values, 4).tolist()!s:.80}"
        )
    if not 0 < share <= 1:
        raise ValueError(f"layer_shares: share must be above 0 and at most 1, got {share}")
    order = np.sort(values)
    cuts = itertools.combinations(range(1, len(order)), _GROUPS - 1)
    first = min(cuts, key=lambda cut: sum(np.var(part) * len(part) for part in np.split(order, cut)))[-1]
    similar = values >= order[first]
    rest = (len(values) - similar.sum() * share) / (~similar).sum()
    return tuple(np.where(similar, share, rest).tolist())


def _has_budget(method: Method) -> bool:
    return vars(method).get("budget") is not None


def _multiplied(method: Any, share: float) -> Any:
    """Multiply every budget in a method by ``share``."""
    if isinstance(method, dict):
        return {key: _multiplied(inner, share) for key, inner in method.items()}
    changed: dict[str, Any] = {}
    for field in dataclasses.fields(method):
        value = vars(method)[field.name]
        if isinstance(value, (Method, dict)):
            changed[field.name] = _multiplied(value, share)
    if _has_budget(method):
        changed["capacity"] = floor_share(share, method.capacity)
        budget = floor_share(share, method.budget)
        # In float32 it could be one more.
        changed["budget"] = budget if isinstance(budget, int) else jnp.minimum(budget, changed["capacity"])
    return dataclasses.replace(method, **changed)
