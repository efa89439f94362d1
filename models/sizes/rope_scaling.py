"""The rules that stretch RoPE to longer texts than a model was made for, as ``config.json`` declares them.

A rule holds parameters; `kvjax.rope` computes frequencies from them. The names and defaults of the fields follow transformers
5.23 (``modeling_rope_utils``).
"""

import dataclasses
from typing import ClassVar

from .checks import check_counts, check_flags, check_number


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeRule:
    """The base of every rule. Subclasses are final."""

    rope_type: ClassVar[str]  # its name in config.json

    def context(self, declared: int) -> int:
        """Return the longest context in tokens of a model whose file declares ``declared`` positions."""
        return declared


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling(RopeRule):
    """The ``llama3`` rule for stretching RoPE: slow frequencies are divided by ``factor``, and fast frequencies stay.

    Raises:
        ValueError: the factors are not positive, or not ordered ``low < high``.
    """

    rope_type = "llama3"

    factor: float  # the context becomes longer by this factor
    low_freq_factor: float  # a frequency with fewer turns in the old context is divided by `factor`
    high_freq_factor: float  # a frequency with more turns in the old context stays
    original_max_position_embeddings: int  # tokens of the old context

    def __post_init__(self):
        check_counts("RopeScaling", original_max_position_embeddings=self.original_max_position_embeddings)
        check_number("RopeScaling", "factor", self.factor, 1)
        check_number("RopeScaling", "low_freq_factor", self.low_freq_factor, zero=True)
        check_number("RopeScaling", "high_freq_factor", self.high_freq_factor, zero=True)
        if not 0 < self.low_freq_factor < self.high_freq_factor:
            raise ValueError(
                "RopeScaling: expected 0 < low_freq_factor < high_freq_factor, "
                f"got {self.low_freq_factor!r} and {self.high_freq_factor!r}"
            )


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling(RopeRule):
    """Position interpolation (arXiv:2306.15595): every frequency is divided by ``factor``.

    Raises:
        ValueError: the factor is below 1.
    """

    rope_type = "linear"

    factor: float

    def __post_init__(self):
        check_number("LinearScaling", "factor", self.factor, 1)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DynamicScaling(RopeRule):
    """Dynamic NTK: the base of the frequencies grows with the text, from ``original_max_position_embeddings`` tokens on.

    Raises:
        ValueError: the factor is below 1, or the number of tokens is not positive.
    """

    rope_type = "dynamic"

    factor: float
    original_max_position_embeddings: int  # `max_position_embeddings` of config.json: longer texts are stretched

    def __post_init__(self):
        check_number("DynamicScaling", "factor", self.factor, 1)
        check_counts("DynamicScaling", original_max_position_embeddings=self.original_max_position_embeddings)

    def context(self, declared: int) -> int:
        return int(declared * self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling(RopeRule):
    """YaRN (arXiv:2309.00071), static: fast frequencies stay, slow ones are divided by ``factor``, and logits are scaled.

    Raises:
        ValueError: a number is out of its range.
    """

    rope_type = "yarn"

    factor: float
    original_max_position_embeddings: int  # tokens of the old context
    attention_factor: float | None = None  # scales cosine and sine; None: from `factor` and the two mscales
    beta_fast: float = 32.0  # a frequency with more turns in the old context stays
    beta_slow: float = 1.0  # a frequency with fewer turns in the old context is divided by `factor`
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool = True  # whether the bounds between the two kinds are whole channels

    def __post_init__(self):
        check_number("YarnScaling", "factor", self.factor, 1)
        check_counts("YarnScaling", original_max_position_embeddings=self.original_max_position_embeddings)
        for name in ("attention_factor", "mscale", "mscale_all_dim"):
            if vars(self)[name] is not None:
                check_number("YarnScaling", name, vars(self)[name], zero=True)
        for name in ("beta_fast", "beta_slow"):
            check_number("YarnScaling", name, vars(self)[name], zero=True)
        if not 0 < self.beta_slow <= self.beta_fast:
            raise ValueError(
                f"YarnScaling: expected 0 < beta_slow <= beta_fast, got {self.beta_slow!r} and {self.beta_fast!r}"
            )
        check_flags("YarnScaling", truncate=self.truncate)

    def context(self, declared: int) -> int:
        # Qwen's instructions add the rule to a file and leave its number of positions as it was.
        return max(declared, int(self.original_max_position_embeddings * self.factor))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LongRopeScaling(RopeRule):
    """LongRoPE (arXiv:2402.13753): a divisor for each frequency, and a second one for texts longer than the old context.

    Raises:
        ValueError: a number is out of its range.
    """

    rope_type = "longrope"

    short_factor: tuple[float, ...]  # D/2 divisors, in texts of at most `original_max_position_embeddings` tokens
    long_factor: tuple[float, ...]  # D/2 divisors, in longer texts
    original_max_position_embeddings: int  # tokens of the old context
    factor: float  # the context became longer by this factor; only the attention factor reads it
    attention_factor: float | None = None  # scales cosine and sine; None: from `factor`

    def __post_init__(self):
        check_number("LongRopeScaling", "factor", self.factor, zero=True)
        check_counts("LongRopeScaling", original_max_position_embeddings=self.original_max_position_embeddings)
        if self.attention_factor is not None:
            check_number("LongRopeScaling", "attention_factor", self.attention_factor, zero=True)
        for name in ("short_factor", "long_factor"):
            if not isinstance(vars(self)[name], tuple):
                raise ValueError(f"LongRopeScaling: {name} must be a tuple of numbers, got {vars(self)[name]!r}")
            for value in vars(self)[name]:
                check_number("LongRopeScaling", name, value, 1e-6)
        if len(self.short_factor) != len(self.long_factor):
            raise ValueError(
                "LongRopeScaling: short_factor and long_factor must have one length, "
                f"got {len(self.short_factor)} and {len(self.long_factor)}"
            )
