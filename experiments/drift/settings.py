"""What `experiments.drift` measures: its settings, and the kinds of clusters."""

from __future__ import annotations

import dataclasses

from experiments.answering import ModelSettings

CLUSTERS = ("rotated", "plain", "learned", "learned rotated", "relearned")
_SHORT_PROMPT = 512  # where the default prompt would leave too little of the model's window


@dataclasses.dataclass(frozen=True)
class DriftSettings(ModelSettings):
    """What `experiments.drift` measures.

    Attributes:
        prompt_tokens: tokens of prose
        new_tokens: tokens sampled
        every: tokens between checkpoints
        k: keys to find
        num_sink: tokens before the zone
        num_local: tokens behind the zone
        rho: share of keys that get votes, per slice
        beta: share of the zone that becomes candidates
        temperature: temperature of the sampling
        seed: seed of the prompt and of the sampling
        haystack: 'prose' or file:PATH

    Raises:
        ValueError: a number out of range, or a first checkpoint whose zone is smaller than k.
    """

    prompt_tokens: int = 2048
    new_tokens: int = 8000
    every: int = 500
    k: int = 100
    num_sink: int = 64
    num_local: int = 256
    rho: float = 0.20
    beta: float = 0.10
    temperature: float = 1.0
    seed: int = 0
    haystack: str = "prose"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "every", "k", "num_sink", "num_local"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.beta <= self.rho <= 1:
            raise ValueError(f"shares must be 0 < beta <= rho <= 1, got beta={self.beta} and rho={self.rho}")
        zone = self.prompt_tokens + min(self.every, self.new_tokens) - self.num_sink - self.num_local
        if zone < self.k:
            raise ValueError(f"the zone at the first checkpoint must hold at least k={self.k} tokens, got {zone}")

    @classmethod
    def within(cls, window: int) -> DriftSettings:
        """The defaults, or a shorter prompt and text that fit the window of a model, in tokens."""
        made = cls()
        if made.prompt_tokens + made.new_tokens <= window:
            return made
        room = (window - _SHORT_PROMPT) // made.every * made.every
        return cls(prompt_tokens=_SHORT_PROMPT, new_tokens=max(room, made.every))

    @property
    def checkpoints(self) -> list[int]:
        """Numbers of generated tokens at which recall is measured."""
        return list(range(self.every, self.new_tokens + 1, self.every)) or [self.new_tokens]
