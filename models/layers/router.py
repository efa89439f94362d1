"""The router of DeepSeek's mixtures of experts.

A score is a softmax over all experts, or a sigmoid of each. Experts may be in groups: then a token first chooses groups, and
its experts from those. A group counts as its best expert under a softmax, and as the sum of its two best under sigmoids. With
sigmoids a bias is added to the scores that choose, and not to the weights. The weights may be divided by their sum, and are
multiplied by a constant.

Source: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437); the order of operations as in transformers 5.24.
"""

from __future__ import annotations

from typing import cast

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.numerics import product_precision

from ..sizes.experts import Experts, Router

_LEAST = 1e-20  # added to a sum of weights before it divides


def choose(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token and compute their weights, in float32.

    Args:
        x: [N, d], normalised hidden states.
        kernel: [d, E].
        bias: [E], added to the scores that choose; None under a softmax.
        experts: the mixture, with a router.

    Returns:
        The experts, int32 [N, k], and their weights, float32 [N, k].
    """
    router = cast("Router", experts.router)
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
