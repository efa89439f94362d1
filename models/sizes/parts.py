"""The parts in which the layers of decoders differ, beside sizes: `models.sizes.architecture.Architecture` declares them.

`models.layers.transformer` reads each part in one place. A part at its default adds nothing to the program.
"""

import dataclasses
from typing import Any

from .checks import check_kind, check_number
from .rope_scaling import LongRopeScaling, RopeRule

ACTIVATIONS = ("silu", "relu2", "gelu", "gelu_pytorch_tanh")  # on the gate of an MLP, as config.json names them
NORMS = ("rms", "layer")
# Where a layer normalises: what attention and MLP read, what they return, or both. "parallel": attention and MLP read one
# norm of the stream, and the layer adds both.
NORM_PLACES = ("before", "after", "both", "parallel")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerRope:
    """How one layer rotates queries and keys; `kvjax.protocol.typing.Rope` has the same attributes.

    Raises:
        ValueError: the base is not positive, the number of channels is odd or negative, or the rule is none.
    """

    theta: float  # base of the frequencies
    scaling: RopeRule | None = None  # how the frequencies are stretched
    rotated: int | None = None  # channels of a head that rotate; None: all; 0: none, a layer without positions

    def __post_init__(self):
        check_number("LayerRope", "theta", self.theta)
        if self.rotated is not None and (type(self.rotated) is not int or self.rotated < 0 or self.rotated % 2):
            raise ValueError(f"LayerRope: rotated must be an even number of channels or None, got {self.rotated!r}")
        check_kind("LayerRope", "scaling", self.scaling, RopeRule)
        if self.rotated == 0 and self.scaling is not None:
            raise ValueError(f"LayerRope: a layer that rotates nothing must have scaling=None, got {self.scaling!r}")


def check_rope(owner: str, scaling: RopeRule | None, rotated: int) -> None:
    """Refuse a longrope rule without a factor for each of the rotated pairs."""
    if isinstance(scaling, LongRopeScaling) and len(scaling.long_factor) != rotated // 2:
        half = "head_dim / 2" if owner == "ModelConfig" else "rotated / 2"
        raise ValueError(
            f"{owner}: short_factor and long_factor must have {half} = {rotated // 2} numbers, got {len(scaling.long_factor)}"
        )


def check_parts(config: Any) -> None:
    """Refuse parts of a `ModelConfig` that no layer can have."""
    for name, known in (("activation", ACTIVATIONS), ("norm", NORMS), ("norm_place", NORM_PLACES)):
        value = vars(config)[name]
        if value not in known:
            raise ValueError(f"ModelConfig: {name} must be one of {', '.join(known)}, got {value!r}")
    optional = ("query_scale", "logit_softcap", "attention_softcap")
    for name in (*optional, "embedding_multiplier", "residual_multiplier", "logits_multiplier"):
        value = vars(config)[name]
        if value is not None or name not in optional:
            check_number("ModelConfig", name, value)
    if config.qk_norm and config.wide_qk_norm:
        raise ValueError("ModelConfig: expected one of qk_norm and wide_qk_norm, got both True")
    if config.experts is not None and config.activation != "silu":
        raise ValueError(f"ModelConfig: experts are computed with activation='silu', got {config.activation!r}")
    ropes = config.ropes
    if type(ropes) is not tuple or len(ropes) not in (0, config.num_layers):
        raise ValueError(
            f"ModelConfig: ropes must be () or a tuple with an entry for each of {config.num_layers} layers, "
            f"got {ropes!r:.80}"
        )
    for rope in ropes:
        if not isinstance(rope, LayerRope):
            raise ValueError(f"ModelConfig: ropes must hold LayerRope, got {rope!r}")
        rotated = config.head_dim if rope.rotated is None else rope.rotated
        if rotated > config.head_dim:
            raise ValueError(f"ModelConfig: ropes must rotate at most head_dim={config.head_dim} channels, got {rotated}")
        check_rope("LayerRope", rope.scaling, rotated)
