"""Mixtures of experts: a layer's MLP is a set of experts, and every token uses the few that a router chooses.

The router is one product with a kernel [d, E] and a softmax over all E experts in float32. A token goes to the k experts
with the largest probabilities. Its result is the sum of the k experts' results, weighted by the probabilities: unchanged, or
divided by their sum (``norm_topk_prob``; always in Mixtral).

gpt-oss adds biases to the router and to the experts, and another gate (`models.sizes.experts.Clamp`). Its weights are a
softmax over the k best logits, which is the softmax over all, divided by the sum.

Source: Mixtral (arXiv:2401.04088), Qwen3 (arXiv:2505.09388); the order of these operations as in transformers 5.23.

There are three ways to compute the mixture, because no way is fastest everywhere:

* For few tokens (at most E choices) each choice reads the weights of its expert, one choice after the other: a decode step
  reads only the experts that it uses.
* For many tokens the choices are sorted by expert and go through `jax.lax.ragged_dot`.
* On a CPU, where XLA computes a ragged product as masked dense products, all tokens go through all experts, one expert at a
  time: 512 tokens, 8 of 64 experts of [512, 256] in float32 took 1.3 s instead of 12 s on two cores.
"""

import functools
from collections.abc import Callable
from typing import Any, cast

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import axes
from pallas_kernels.numerics import product_precision

from ..sizes.architecture import Architecture
from ..sizes.experts import Clamp, Experts, Router
from .modules import MLP, Dense, Kernel, stored

Gate = Callable[[jax.Array, jax.Array], jax.Array]
_LEAST = 1e-20  # added to a sum of weights before it divides
_UNROLLED = 32  # choices; more choices run as a loop, whose program does not grow


def clamped_gate(clamp: Clamp) -> Gate:
    """Return the gate of gpt-oss, which `models.sizes.experts.Clamp` describes."""

    def gated(gate: jax.Array, up: jax.Array) -> jax.Array:
        gate, up = jnp.minimum(gate, clamp.limit), jnp.clip(up, -clamp.limit, clamp.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(clamp.alpha * gate))

    return gated


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Multiply ``up`` by SiLU of ``gate``, of equal shapes."""
    return jax.nn.silu(gate) * up


def route(x: jax.Array, router: jax.Array, experts: Experts, bias: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token and compute their weights.

    Args:
        x: [N, d], normalised hidden states.
        router: [d, E].
        experts: the mixture.
        bias: [E], added to the logits.

    Returns:
        The experts, int32 [N, k], in falling order of probability (of equal ones the lower index first); and their weights,
        float32 [N, k].
    """
    logits = jnp.matmul(x, router.astype(x.dtype), preferred_element_type=jnp.float32)
    if bias is not None:
        logits = logits + bias.astype(jnp.float32)[None]
    weight, chosen = lax.top_k(jax.nn.softmax(logits, axis=-1), experts.num_experts_per_tok)
    if experts.norm_topk_prob:
        weight = weight / weight.sum(axis=-1, keepdims=True)
    return chosen, weight


def choose(x: jax.Array, kernel: jax.Array, bias: jax.Array | None, experts: Experts) -> tuple[jax.Array, jax.Array]:
    """Choose the experts of each token and compute their weights as DeepSeek does, in float32.

    A score is a softmax over all experts, or a sigmoid of each. Experts may be in groups: then a token first chooses groups,
    and its experts from those. A group counts as its best expert under a softmax, and as the sum of its two best under
    sigmoids. With sigmoids a bias is added to the scores that choose, and not to the weights. The weights may be divided by
    their sum, and are multiplied by a constant.

    Source: DeepSeek-V2 (arXiv:2405.04434), DeepSeek-V3 (arXiv:2412.19437); the order of operations as in transformers 5.24.

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


def mix(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    bias: jax.Array | None = None,
    gate: Gate = silu_gate,
) -> jax.Array:
    """Sum the weighted results of each token's experts, in the fastest way for the platform; see the module's text.

    Args:
        x: [N, d].
        chosen: int32 [N, k].
        weight: float32 [N, k].
        gate_up: [E, d, 2, F], in the dtype of ``x``.
        down: [E, F, d], in the dtype of ``x``.
        bias: [E, 2, F], added to gate and up.
        gate: makes of gate and up what ``down`` multiplies.

    Returns:
        [N, d] in the dtype of ``x``.
    """
    few = chosen.size <= gate_up.shape[0]
    loop = functools.partial(one_by_one, gate=gate, unroll=False)
    unrolled = functools.partial(one_by_one, gate=gate, unroll=chosen.size <= _UNROLLED)
    many = (functools.partial(run, gate=gate) for run in (all_experts, grouped))
    on_cpu, elsewhere = (loop, unrolled) if few else many
    arguments = (x, chosen, weight, gate_up, down, *(() if bias is None else (bias,)))
    return lax.platform_dependent(*arguments, cpu=on_cpu, default=elsewhere)


def mixed_bias(chosen: jax.Array, weight: jax.Array, bias: jax.Array) -> jax.Array:
    """Sum the biases [E, d] of each token's experts, weighted: float32 [N, d]."""
    return jnp.sum(bias[chosen].astype(jnp.float32) * weight[..., None], axis=1)


def one_by_one(
    x: jax.Array, chosen: jax.Array, weight: jax.Array, *kernels: jax.Array, gate: Gate = silu_gate, unroll: bool = False
) -> jax.Array:
    """Compute `mix` for one token and expert after the other; an expert's weights are read in place."""
    count = chosen.shape[1]

    def add(index: Any, total: jax.Array) -> jax.Array:
        token, place = index // count, index % count
        expert = chosen[token, place]
        row = lax.dynamic_slice_in_dim(x, token, 1, 0)
        result = _expert(row, gate, *(lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in kernels))
        return total.at[token].add(result[0] * weight[token, place])

    return lax.fori_loop(0, chosen.size, add, jnp.zeros(x.shape, jnp.float32), unroll=unroll).astype(x.dtype)


def grouped(
    x: jax.Array,
    chosen: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    *bias: jax.Array,
    gate: Gate = silu_gate,
) -> jax.Array:
    """Compute `mix` by ragged products: tokens are sorted by expert, and each group reads its expert's weights once."""
    flat = chosen.reshape(-1)
    order = jnp.argsort(flat, stable=True)
    sizes = jnp.bincount(flat, length=gate_up.shape[0]).astype(jnp.int32)
    matrices = gate_up.reshape(*gate_up.shape[:2], -1)
    both = lax.ragged_dot(x[order // chosen.shape[1]], matrices, sizes)
    for each in bias:
        both = both + each.reshape(len(each), -1)[flat[order]]
    results = lax.ragged_dot(gate(*jnp.split(both, 2, axis=-1)), down, sizes, preferred_element_type=jnp.float32)
    results = jnp.zeros_like(results).at[order].set(results, unique_indices=True).reshape(*chosen.shape, -1)
    return jnp.sum(results * weight[..., None], axis=1).astype(x.dtype)


def all_experts(x: jax.Array, chosen: jax.Array, weight: jax.Array, *kernels: jax.Array, gate: Gate = silu_gate) -> jax.Array:
    """Compute `mix` by dense products: all tokens go through all experts; the weight of an unchosen expert is 0."""
    row = jnp.arange(len(x))[:, None]
    share = jnp.zeros((len(x), len(kernels[0])), jnp.float32).at[row, chosen].set(weight)

    def add(total: jax.Array, each: tuple) -> tuple[jax.Array, None]:
        kernels, share = each
        return total + _expert(x, gate, *kernels) * share[:, None], None

    return lax.scan(add, jnp.zeros(x.shape, jnp.float32), (kernels, share.T))[0].astype(x.dtype)


def _expert(x: jax.Array, gate: Gate, gate_up: jax.Array, down: jax.Array, *bias: jax.Array) -> jax.Array:
    """Apply one expert, a gated MLP: [N, d] to float32 [N, d]."""
    both = jnp.einsum("nd,dgf->ngf", x, gate_up)
    for each in bias:
        both = both + each[None]
    return jnp.matmul(gate(both[:, 0], both[:, 1]), down, preferred_element_type=jnp.float32)


class RouterKernel(nn.Module):
    """The kernel [d, E] of a router, and the bias [E] of one with sigmoids, else None."""

    config: Architecture
    experts: Experts

    @nn.compact
    def __call__(self) -> tuple[jax.Array, jax.Array | None]:
        config, count = self.config, self.experts.num_experts
        kernel = stored(self, "router/kernel", config, (config.hidden_size, count))
        biased = self.experts.router is not None and self.experts.router.score == "sigmoid"
        return kernel, stored(self, "router/bias", config, (count,)) if biased else None


class MixtureMLP(nn.Module):
    """A layer's MLP as a mixture of experts, with an expert that every token uses, or without.

    Parameters: router/kernel [d, E], gate_up/kernel [E, d, 2, F], down/kernel [E, F, d]; shared/... as in `MLP`, and
    shared_gate/kernel [d, 1] without an `Experts.router`; router/bias [E] with one of sigmoids. With `Experts.clamp`:
    router_bias/bias [E], gate_up_bias/bias [E, 2, F], down_bias/bias [E, d].
    """

    config: Architecture
    experts: Experts

    @nn.compact
    def __call__(self, x: jax.Array) -> jax.Array:
        """Apply each token's experts to ``x`` [B, T, d]; return [B, T, d]."""
        config, experts, hidden = self.config, self.experts, self.config.hidden_size
        count, inner = experts.num_experts, experts.intermediate_size

        def part(name: str, *shape: int, leaf: str = "kernel") -> jax.Array:
            return Kernel(config, shape, leaf, name=name)().astype(config.dtype)

        gate_up, down = part("gate_up", count, hidden, 2, inner), part("down", count, inner, hidden)
        rows = x.reshape(-1, hidden).astype(config.dtype)
        if experts.router is not None:
            chosen, weight = choose(rows, *RouterKernel(config, experts, name="router")(), experts)
        else:
            bias = None if experts.clamp is None else part("router_bias", count, leaf="bias")
            chosen, weight = route(rows, part("router", hidden, count), experts, bias)
        if experts.clamp is None:
            mixed = axes.total(mix(rows, chosen, weight, gate_up, down))
        else:
            of_gates = part("gate_up_bias", count, 2, inner, leaf="bias")
            mixed = axes.total(mix(rows, chosen, weight, gate_up, down, of_gates, clamped_gate(experts.clamp)))
            mixed = mixed + mixed_bias(chosen, weight, part("down_bias", count, hidden, leaf="bias")).astype(x.dtype)
        mixed = mixed.reshape(x.shape)
        if not experts.shared_size:
            return mixed
        shared = MLP(config, experts.shared_size, name="shared")(x)
        if experts.router is None:
            shared = jax.nn.sigmoid(Dense(config, 1, name="shared_gate")(x.astype(config.dtype))) * shared
        return mixed + shared
