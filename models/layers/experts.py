"""Mixtures of experts: a layer's MLP is a set of experts, and every token uses the few that a router chooses.

The router is one product with a kernel [d, E] and a softmax over all E experts in float32. A token goes to the k experts
with the largest probabilities. Its result is the sum of the k experts' results, weighted by the probabilities: unchanged, or
divided by their sum (``norm_topk_prob``; always in Mixtral).

gpt-oss adds biases to the router and to the experts, and another gate (`Clamp`). Its weights are a softmax over the k best
logits, which is the softmax over all, divided by the sum.

Source: Mixtral (arXiv:2401.04088), Qwen3 (arXiv:2505.09388); the order of these operations as in transformers 5.23.

There are three ways to compute the mixture, because no way is fastest everywhere:

* For few tokens (at most E choices) each choice reads the weights of its expert, one choice after the other: a decode step
  reads only the experts that it uses.
* For many tokens the choices are sorted by expert and go through `jax.lax.ragged_dot`.
* On a CPU, where XLA computes a ragged product as masked dense products, all tokens go through all experts, one expert at a
  time: 512 tokens, 8 of 64 experts of [512, 256] in float32 took 1.3 s instead of 12 s on two cores.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .router import Router, check_router

Gate = Callable[[jax.Array, jax.Array], jax.Array]
_UNROLLED = 32  # choices; more choices run as a loop, whose program does not grow
# A config.json with one of these keys declares another kind of experts; the supported families have none of the keys.
_FOREIGN = ("shared_expert_intermediate_size", "n_shared_experts", "first_k_dense_replace", "n_group", "scoring_func")
_COUNTS = ("num_experts", "num_local_experts")  # both spellings
FAMILIES = {  # model_type -> the key of an expert's intermediate size
    "qwen3_moe": "moe_intermediate_size",
    "mixtral": "intermediate_size",
    "qwen3_next": "moe_intermediate_size",
    "qwen2_moe": "moe_intermediate_size",
    "olmoe": "intermediate_size",
}
_SHARED = "shared_expert_intermediate_size"
_SHARING = ("qwen3_next", "qwen2_moe")  # with an expert that every token uses
_OF_QWEN = ("qwen3_moe", *_SHARING)  # with `mlp_only_layers`


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clamp:
    """The gate of gpt-oss: ``(up + 1) * gate * sigmoid(alpha * gate)``, of clamped values. Such experts have biases.

    Raises:
        ValueError: a number is not positive.
    """

    limit: float = 7.0  # the gate is at most this number, and up lies between it and its negative
    alpha: float = 1.702

    def __post_init__(self):
        for name, value in vars(self).items():
            if type(value) not in (int, float) or not 0 < value < 1e32:
                raise ValueError(f"Clamp: {name} must be a positive number, got {value!r}")

    def __call__(self, gate: jax.Array, up: jax.Array) -> jax.Array:
        """Compute the gated ``up``, of the shape of both arguments."""
        gate, up = jnp.minimum(gate, self.limit), jnp.clip(up, -self.limit, self.limit)
        return (up + 1) * (gate * jax.nn.sigmoid(self.alpha * gate))


def silu_gate(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Multiply ``up`` by SiLU of ``gate``, of equal shapes."""
    return jax.nn.silu(gate) * up


@dataclasses.dataclass(frozen=True, kw_only=True)
class Experts:
    """The experts of a model's layers.

    Raises:
        ValueError: a size is not positive, a token uses more experts than there are, or ``layers`` is not ascending.
    """

    num_experts: int  # E, in each layer that has experts
    num_experts_per_tok: int  # k, experts that a token uses
    intermediate_size: int  # F of one expert
    norm_topk_prob: bool  # whether the weights of a token's experts are divided by their sum
    layers: tuple[int, ...]  # layers with experts; every other layer has the model's dense MLP
    shared_size: int = 0  # F of an expert that every token uses, times the sigmoid of a product without a `router`; 0 = none
    clamp: Clamp | None = None  # gpt-oss: biases, and this gate; None: no biases, and SiLU
    router: Router | None = None  # DeepSeek's choice of experts; None: `route`

    def __post_init__(self):
        for name in ("num_experts", "num_experts_per_tok", "intermediate_size"):
            value = vars(self)[name]
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ValueError(f"Experts: {name} must be a positive integer, got {value!r}")
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"Experts: num_experts_per_tok must be at most num_experts={self.num_experts}, "
                f"got {self.num_experts_per_tok}"
            )
        if type(self.shared_size) is not int or self.shared_size < 0:
            raise ValueError(f"Experts: shared_size must be a whole number of at least 0, got {self.shared_size!r}")
        if not isinstance(self.norm_topk_prob, bool):
            raise ValueError(f"Experts: norm_topk_prob must be true or false, got {self.norm_topk_prob!r}")
        good = type(self.layers) is tuple and all(type(layer) is int and layer >= 0 for layer in self.layers)
        if not good or not self.layers or list(self.layers) != sorted(set(self.layers)):
            raise ValueError(f"Experts: layers must be a tuple of ascending layer numbers, got {self.layers!r}")
        if self.clamp is not None and not isinstance(self.clamp, Clamp):
            raise ValueError(f"Experts: clamp must be a Clamp or None, got {self.clamp!r}")
        check_router(self)

    def unread_bytes(self, params: Any, rows: int) -> int:
        """Estimate the bytes of experts that a decode step of ``rows`` rows does not read.

        One row reads k experts. Several rows share experts: the estimate is an expectation with equally likely experts.
        """
        unread = (1 - self.num_experts_per_tok / self.num_experts) ** rows
        blocks = [params[f"layers_{layer}"]["mlp"] for layer in self.layers]
        kernels = [block[name]["kernel"] for block in blocks for name in ("gate_up", "down")]
        return int(unread * sum(x.size * x.dtype.itemsize for x in kernels))


def route(
    x: jax.Array, router: jax.Array, experts: Experts, bias: jax.Array | None = None
) -> tuple[jax.Array, jax.Array]:
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
    given = (x, chosen, weight, gate_up, down, *(() if bias is None else (bias,)))
    return lax.platform_dependent(*given, cpu=on_cpu, default=elsewhere)


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
        made = _expert(row, gate, *(lax.dynamic_index_in_dim(w, expert, keepdims=False) for w in kernels))
        return total.at[token].add(made[0] * weight[token, place])

    return lax.fori_loop(0, chosen.size, add, jnp.zeros(x.shape, jnp.float32), unroll=unroll).astype(x.dtype)


def grouped(
    x: jax.Array, chosen: jax.Array, weight: jax.Array, gate_up: jax.Array, down: jax.Array, *bias: jax.Array,
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
    made = lax.ragged_dot(gate(*jnp.split(both, 2, axis=-1)), down, sizes, preferred_element_type=jnp.float32)
    made = jnp.zeros_like(made).at[order].set(made, unique_indices=True).reshape(*chosen.shape, -1)
    return jnp.sum(made * weight[..., None], axis=1).astype(x.dtype)


def all_experts(
    x: jax.Array, chosen: jax.Array, weight: jax.Array, *kernels: jax.Array, gate: Gate = silu_gate
) -> jax.Array:
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


def read(hf: dict[str, Any]) -> Experts | None:
    """Read the experts that ``config.json`` declares; None if no layer has experts.

    Args:
        hf: the file as a dict, with ``model_type`` and ``num_hidden_layers``.

    Raises:
        ValueError: keys are missing or contradict each other, or a family without experts declares experts.
    """
    kind = hf["model_type"]
    counts = {key: hf[key] for key in _COUNTS if hf.get(key) is not None}
    if kind not in FAMILIES:
        declared = {key: value for key, value in counts.items() if value}
        if declared:
            raise ValueError(f"model_type {kind!r} has no experts, got {declared}")
        return None
    foreign = [key for key in _FOREIGN if hf.get(key) and not (kind in _SHARING and key == _SHARED)]
    if foreign:
        raise ValueError(f"unsupported {foreign[0]}={hf[foreign[0]]!r} for model_type {kind!r}, expected none")
    absent = [key for key in (FAMILIES[kind], "num_experts_per_tok") if hf.get(key) is None]
    absent += [] if counts else [" or ".join(_COUNTS)]
    if absent:
        raise ValueError(f"config.json of model_type {kind!r} lacks {', '.join(absent)}")
    if any(value != next(iter(counts.values())) for value in counts.values()):
        raise ValueError(f"expected one number of experts, got {counts}")
    count, layers = next(iter(counts.values())), range(hf["num_hidden_layers"])
    if kind in _OF_QWEN:
        dense, step = hf.get("mlp_only_layers") or [], hf.get("decoder_sparse_step", 1)
        if not isinstance(dense, list) or any(type(layer) is not int or layer not in layers for layer in dense):
            raise ValueError(f"mlp_only_layers must be a list of layers below {len(layers)}, got {dense!r}")
        if type(step) is not int or step < 1:
            raise ValueError(f"decoder_sparse_step must be a whole number of at least 1, got {step!r}")
        layers = [layer for layer in layers if layer not in dense and (layer + 1) % step == 0]
    if not layers or (kind in _OF_QWEN and count == 0):
        return None
    return Experts(
        num_experts=count,
        num_experts_per_tok=hf["num_experts_per_tok"],
        intermediate_size=hf[FAMILIES[kind]],
        norm_topk_prob=hf.get("norm_topk_prob", False) if kind != "mixtral" else True,
        layers=tuple(layers),
        shared_size=(hf.get(_SHARED) or 0) if kind in _SHARING else 0,
    )


def write(fields: dict[str, Any], model_type: str) -> tuple[str, dict[str, Any]]:
    """Return the model type, and the keys of ``config.json`` for the experts of a model.

    Args:
        fields: the fields of a ModelConfig.
        model_type: the type of the same model without experts.

    Raises:
        ValueError: no family of transformers has these experts.
    """
    experts: Experts | None = fields["experts"]
    if experts is None:
        return model_type, {}
    keys = {"num_experts_per_tok": experts.num_experts_per_tok}
    plain = not experts.shared_size and experts.router is None
    if model_type == "qwen3" and plain:
        return "qwen3_moe", {**qwen_keys(experts, fields["num_layers"]), "attention_bias": False}
    whole = len(experts.layers) == fields["num_layers"] and experts.intermediate_size == fields["intermediate_size"]
    if model_type in ("qwen2", "qwen3") or not experts.norm_topk_prob or not whole or not plain:
        raise ValueError(
            "no Hugging Face family has these experts: expected qk_norm (Qwen3-MoE), or no qkv_bias, norm_topk_prob and "
            f"experts of the model's intermediate_size in every layer (Mixtral), got {experts}"
        )
    return "mixtral", {"num_local_experts": experts.num_experts, **keys}


def qwen_keys(experts: Experts | None, count: int) -> dict[str, Any]:
    """Return the keys of ``config.json`` for experts of Qwen's kind in a model of ``count`` layers."""
    if experts is None:
        return {"num_experts": 0}
    return {
        "num_experts": experts.num_experts,
        "num_experts_per_tok": experts.num_experts_per_tok,
        "moe_intermediate_size": experts.intermediate_size,
        "norm_topk_prob": experts.norm_topk_prob,
        "mlp_only_layers": [layer for layer in range(count) if layer not in experts.layers],
        "decoder_sparse_step": 1,
    }


def family_keys(experts: Experts | None, count: int, kind: str) -> dict[str, Any]:
    """Return the keys of ``config.json`` for the experts of a family of `models.files.tables.families`, in a model of ``count`` layers."""
    made = qwen_keys(experts, count)
    if kind in _SHARING:
        return made | {_SHARED: 0 if experts is None else experts.shared_size}
    return {key: made[key] for key in ("num_experts", "num_experts_per_tok", "norm_topk_prob") if key in made}


def tensor_names(layer: str, count: int, qwen: bool) -> tuple[str, list[str], list[str]]:
    """Name the file's tensors of one layer's experts.

    Args:
        layer: "model.layers.3".
        count: E.
        qwen: whether the family is Qwen3-MoE, else Mixtral.

    Returns:
        The router's tensor; gate and up of each expert in turn; down of each expert.
    """
    block = f"{layer}.mlp" if qwen else f"{layer}.block_sparse_moe"
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    each = [f"{block}.experts.{expert}" for expert in range(count)]
    return (
        f"{block}.gate.weight",
        [f"{one}.{name}.weight" for one in each for name in (gate, up)],
        [f"{one}.{down}.weight" for one in each],
    )
