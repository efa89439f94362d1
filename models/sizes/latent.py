"""The sizes of latent attention (MLA), see `models.layers.latent`."""

import dataclasses
import math
from typing import Any

from .checks import check_counts, check_flags
from .rope_scaling import YarnScaling

_SIZES = ("rank", "rotated", "key_dim", "value_dim")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Latent:
    """The sizes of latent attention.

    Raises:
        ValueError: a size is not positive, or ``rank`` or ``rotated`` is odd.
    """

    rank: int  # R, numbers of a latent
    rotated: int  # channels of a key that rotate, one vector for all heads
    key_dim: int  # channels of a head's key that come from the latent
    value_dim: int  # channels of a head's value
    query_rank: int | None = None  # numbers of a query's own latent; None: queries come from the hidden state
    interleaved: bool = True  # whether neighbouring channels of the file are a pair that rotates

    def __post_init__(self):
        for name in (*_SIZES, *(("query_rank",) if self.query_rank is not None else ())):
            check_counts("Latent", **{name: vars(self)[name]})
        for name in ("rank", "rotated"):
            if vars(self)[name] % 2:
                raise ValueError(f"Latent: {name} must be even (RoPE rotates pairs), got {vars(self)[name]}")
        check_flags("Latent", interleaved=self.interleaved)

    @property
    def width(self) -> int:
        """D, the channels of a stored key."""
        return self.rank + self.rotated

    @property
    def query_dim(self) -> int:
        """Channels of a head's query before it is absorbed."""
        return self.key_dim + self.rotated


def check_latent(config: Any) -> None:
    """Refuse a `ModelConfig` whose other fields do not fit its latent."""
    latent = config.latent
    if latent is None:
        return
    if config.query_scale is None:
        raise ValueError(f"ModelConfig: query_scale must be a positive number with {latent}, got None")
    for name, expected in (("num_kv_heads", 1), ("head_dim", latent.width)):
        if vars(config)[name] != expected:
            raise ValueError(f"ModelConfig: {name} must be {expected} with {latent}, got {vars(config)[name]}")
    others = ("qkv_bias", "qk_norm", "wide_qk_norm", "output_gate", "out_bias", "attention_sinks")
    wrong = [name for name in others if vars(config)[name]]
    if wrong:
        raise ValueError(f"ModelConfig: {wrong[0]} must be False with a latent, got True")
    turned = {rope.rotated for rope in config.ropes}
    if turned != {latent.rotated} or any(config.windows):
        raise ValueError(
            f"ModelConfig: every layer must rotate {latent.rotated} channels and have no window with {latent}, got ropes of "
            f"{sorted(turned, key=str)} channels and windows={config.windows!r:.60}"
        )


def query_scale(latent: Latent, scaling: Any) -> float:
    """Compute the factor on the product of query and key, with YaRN's factor on all channels."""
    share = scaling.mscale_all_dim if isinstance(scaling, YarnScaling) else None
    stretch = 0.1 * share * math.log(max(scaling.factor, 1.0)) + 1 if share else 1.0
    return latent.query_dim**-0.5 * stretch**2
