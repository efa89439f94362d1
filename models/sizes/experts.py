"""The sizes of mixtures of experts (`models.layers.experts`), and how their tokens choose."""

import dataclasses
from typing import Any

from .checks import check_counts, check_flags, check_kind, check_layers, check_number

SCORES = ("softmax", "sigmoid")
_LARGEST = 1e32  # of numbers that scale


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
            check_number("Clamp", name, value, most=_LARGEST)


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
        check_counts("Router", groups=self.groups, groups_per_tok=self.groups_per_tok)
        if self.groups_per_tok > self.groups:
            raise ValueError(f"Router: groups_per_tok must be at most groups={self.groups}, got {self.groups_per_tok}")
        check_number("Router", "multiplier", self.multiplier, most=_LARGEST)


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
            check_counts("Experts", **{name: vars(self)[name]})
        if self.num_experts_per_tok > self.num_experts:
            raise ValueError(
                f"Experts: num_experts_per_tok must be at most num_experts={self.num_experts}, got {self.num_experts_per_tok}"
            )
        check_counts("Experts", least=0, shared_size=self.shared_size)
        check_flags("Experts", norm_topk_prob=self.norm_topk_prob)
        check_layers("Experts", self.layers)
        check_kind("Experts", "clamp", self.clamp, Clamp)
        check_kind("Experts", "router", self.router, Router)
        _check_router(self)

    def unread_bytes(self, params: Any, rows: int) -> int:
        """Estimate the bytes of experts that a decode step of ``rows`` rows does not read.

        One row reads k experts. Several rows share experts: the estimate is an expectation with equally likely experts.
        """
        unread = (1 - self.num_experts_per_tok / self.num_experts) ** rows
        blocks = [params[f"layers_{layer}"]["mlp"] for layer in self.layers]
        kernels = [block[name]["kernel"] for block in blocks for name in ("gate_up", "down")]
        return int(unread * sum(x.size * x.dtype.itemsize for x in kernels))


def _check_router(experts: Experts) -> None:
    """Refuse experts whose number does not fit the groups of their router."""
    router = experts.router
    if router is None:
        return
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
