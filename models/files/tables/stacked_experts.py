"""Families whose files have all experts of a layer in one tensor: their tensors.

Source: the classes of transformers 5.24, and the files of the published models.
"""

from __future__ import annotations

import dataclasses

from ...sizes.architecture import Architecture
from .leaf import StackedLeaf


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertFiles:
    """The names of a layer's tensors behind ``model.layers.N.``, and their layout; see `StackedLeaf`."""

    router: str
    gate_up: str
    down: str
    gates: str
    turned: bool = False
    clamped: bool = False  # gpt-oss: biases, and the gate of `models.sizes.experts.Clamp`


GPT_OSS = ExpertFiles(
    router="mlp.router.weight", gate_up="mlp.experts.gate_up_proj", down="mlp.experts.down_proj", gates="neighbours",
    clamped=True,
)  # fmt: skip
GRANITE = ExpertFiles(
    router="block_sparse_moe.router.layer.weight", gate_up="block_sparse_moe.input_linear.weight",
    down="block_sparse_moe.output_linear.weight", gates="halves", turned=True,
)  # fmt: skip


def stacked(config: Architecture, files: ExpertFiles, layer: int) -> list[StackedLeaf]:
    """List the parameters of a layer's experts, without the router's kernel."""
    ours, theirs, experts = f"layers_{layer}/mlp", f"model.layers.{layer}", config.experts
    if experts is None:
        raise ValueError(f"model_type {config.family!r} has experts in every layer, got experts=None")
    count, hidden, inner = experts.num_experts, config.hidden_size, experts.intermediate_size

    def leaf(path: str, name: str, shape: tuple[int, ...], gates: str = "", turned: bool = False) -> StackedLeaf:
        return StackedLeaf(path=f"{ours}/{path}", names=(f"{theirs}.{name}",), shape=shape, gates=gates, turned=turned)

    leaves = [
        leaf("gate_up/kernel", files.gate_up, (count, hidden, 2, inner), files.gates, files.turned),
        leaf("down/kernel", files.down, (count, inner, hidden), "", files.turned),
    ]
    if files.clamped:
        router = files.router.removesuffix("weight") + "bias"
        leaves += [
            leaf("router_bias/bias", router, (count,)),
            leaf("gate_up_bias/bias", files.gate_up + "_bias", (count, 2, inner), files.gates),
            leaf("down_bias/bias", files.down + "_bias", (count, hidden)),
        ]
    return leaves
