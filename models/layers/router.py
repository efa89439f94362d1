"""The router of DeepSeek's mixtures of experts.

A score is a softmax over all experts, or a sigmoid of each. Experts may be in groups: then a token first chooses groups, and
its experts from those. A group counts as its best expert under a softmax, and as the sum of its two best under sigmoids. With
sigmoids a bias is added to the scores that choose, and not to the weights. The weights may be divided by their sum, and are
multiplied by a constant.

Source: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437); the order of operations as in transformers 5.24.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import product_precision

_LEAST = 1e-20  # added to a sum of weights before it divides
SCORES = ("softmax", "sigmoid")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Router:
    """How tokens choose experts in place of `models.layers.experts.route`.

    Raises:
        ValueError: a number is not positive, the score is unknown, or a token chooses more groups than there are.
    """

    score: str = "softmax"  # or "sigmoid", which has a bias for each expert
    groups: int = 1  # groups of experts; 1: a token chooses from all experts
    groups_per_tok: int = 1  # groups that a token chooses
    multiplier: float = 1.0  # on the weights

    def __post_init__(self):
        if self.score not in SCORES:
            raise ValueError(f"Router: score must be one of {', '.join(SCORES)}, got {self.score!r}")
        for name in ("groups", "groups_per_tok"):
            value = vars(self)[name]
            if type(value) is not int or not 1 <= value < 2**31:
                raise ValueError(f"Router: {name} must be a whole number of at least 1, got {value!r}")
        if self.groups_per_tok > self.groups:
            raise ValueError(f"Router: groups_per_tok must be at most groups={self.groups}, got {self.groups_per_tok}")
        if type(self.multiplier) not in (int, float) or not 0 < self.multiplier < 1e32:
            raise ValueError(f"Router: multiplier must be a positive number, got {self.multiplier!r}")


def check_router(experts: Any) -> None:
    """Refuse `models.layers.experts.Experts` whose number does not fit the groups of their router.

    Raises:
        ValueError: the message has both numbers.
    """
    router = experts.router
    if router is None:
        return
    if not isinstance(router, Router):
        raise ValueError(f"Experts: router must be a Router or None, got {router!r}")
    if experts.clamp is not None:
        raise ValueError(f"Experts: expected one of router and clamp, got {router} and {experts.clamp}")
    least = 2 if router.score == "sigmoid" else 1
    if experts.num_experts % router.groups or experts.num_experts // router.groups < least:
        raise ValueError(
            f"Experts: num_experts must be a multiple of groups={router.groups}, with at least {least} in each group, got "
            f"{experts.num_experts}"
        )
    if experts.num_experts_per_tok > experts.num_experts // router.groups * router.groups_per_tok:
        raise ValueError(
            f"Experts: num_experts_per_tok must be at most the experts of {router.groups_per_tok} of {router.groups} groups, "
            f"got {experts.num_experts_per_tok} of {experts.num_experts} experts"
        )


def choose(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, experts: Any) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token and compute their weights, in float32.

    Args:
        x: [N, d], normalised hidden states.
        kernel: [d, E].
        bias: [E], added to the scores that choose; None under a softmax.
        experts: the mixture, with a router.

    Returns:
        The experts, int32 [N, k], and their weights, float32 [N, k].
    """
    router: Router = experts.router
    x, kernel = x.astype(jnp.float32), kernel.astype(jnp.float32)
    logits = jnp.matmul(x, kernel, precision=product_precision(jnp.float32))
    score = jax.nn.softmax(logits, axis=-1) if bias is None else jax.nn.sigmoid(logits)
    ranked = score if bias is None else score + bias.astype(jnp.float32)[None]
    if router.groups > 1:
        each = ranked.reshape(len(x), router.groups, -1)
        best = each.max(axis=-1) if bias is None else lax.top_k(each, 2)[0].sum(axis=-1)
        group = lax.top_k(best, router.groups_per_tok)[1]
        taken = jnp.zeros(best.shape, bool).at[jnp.arange(len(x))[:, None], group].set(True)
        ranked = jnp.where(taken[..., None], each, -jnp.inf).reshape(ranked.shape)
    chosen = lax.top_k(ranked, experts.num_experts_per_tok)[1]
    weight = jnp.take_along_axis(score, chosen, axis=1)
    if experts.norm_topk_prob:
        weight = weight / (weight.sum(axis=-1, keepdims=True) + _LEAST)
    return chosen, weight * router.multiplier
