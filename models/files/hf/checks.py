"""Types of the values in a ``config.json``, checked before anything is computed from them.

The translation in `models.files.hf.config` may then compare and divide. A value of the wrong type is refused: Python takes
the text ``"false"`` for true, and the text ``"4"`` is no number of heads.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

_Kind = tuple[Callable[[Any], bool], str]
_COUNT: _Kind = (lambda x: type(x) is int and x >= 1, "a positive whole number")
_WHOLE: _Kind = (lambda x: type(x) is int, "a whole number")
# math.isfinite fails for huge whole numbers
_NUMBER: _Kind = (lambda x: type(x) in (int, float) and abs(x) <= sys.float_info.max, "a finite number")
_BOOL: _Kind = (lambda x: type(x) is bool, "true or false")
_TEXT: _Kind = (lambda x: isinstance(x, str), "a text")
_OBJECT: _Kind = (lambda x: isinstance(x, Mapping), "an object")
_TEXTS: _Kind = (lambda x: isinstance(x, list | tuple) and all(isinstance(y, str) for y in x), "a list of texts")

_NEVER_NULL: dict[str, _Kind] = {
    **dict.fromkeys((
        "vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "max_position_embeddings",
    ), _COUNT),
    "rms_norm_eps": _NUMBER, "hidden_act": _TEXT, "max_window_layers": _WHOLE,
}  # fmt: skip
_OR_NULL: dict[str, _Kind] = {
    **dict.fromkeys((
        "num_key_value_heads", "head_dim", "num_local_experts", "num_experts_per_tok", "no_rope_layer_interval", "rotary_dim",
        "full_attention_interval", "query_pre_attn_scalar", "original_max_position_embeddings",
    ), _COUNT),
    **dict.fromkeys((
        "rope_theta", "partial_rotary_factor", "layer_norm_eps", "rope_local_base_freq", "attn_logit_softcapping",
        "final_logit_softcapping", "embedding_multiplier", "residual_multiplier", "attention_multiplier", "logits_scaling",
        "logit_scale", "swiglu_limit", "swiglu_alpha",
    ), _NUMBER),
    **dict.fromkeys((
        "use_sliding_window", "tie_word_embeddings", "attention_bias", "attention_out_bias", "qkv_bias", "mlp_bias",
        "use_bidirectional_attention",
    ), _BOOL),
    **dict.fromkeys(("dtype", "torch_dtype", "hidden_activation"), _TEXT),
    **dict.fromkeys(("rope_parameters", "rope_scaling", "quantization_config"), _OBJECT),
    "layer_types": _TEXTS, "sliding_window": _WHOLE,
}  # fmt: skip
_OF_ROPE: dict[str, _Kind] = {
    **dict.fromkeys(("rope_theta", "factor", "low_freq_factor", "high_freq_factor", "partial_rotary_factor"), _NUMBER),
    "original_max_position_embeddings": _COUNT, "rope_type": _TEXT, "type": _TEXT,
}  # fmt: skip


NAMES = (  # of one thing: a file that states two of them means one value
    ("dtype", "torch_dtype"), ("hidden_act", "hidden_activation"), ("num_experts_per_tok", "experts_per_token"),
    ("num_experts", "num_local_experts", "n_routed_experts"), ("sliding_window", "sliding_window_size"),
)  # fmt: skip


def check_names(hf: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` in which two names of one thing have different values: one would be ignored unseen."""
    for names in NAMES:
        stated = {name: hf[name] for name in names if hf.get(name) is not None}
        if any(value != next(iter(stated.values())) for value in stated.values()):
            told = " and ".join(f"{name}={value!r:.60}" for name, value in stated.items())
            raise ValueError(f"{told} are names of one thing and differ, expected one value")


def check_types(hf: Mapping[str, Any]) -> None:
    """Refuse a ``config.json`` in which a known key has a value of the wrong type."""
    for key, kind in _NEVER_NULL.items():
        if key in hf:
            _check(key, hf[key], kind)
    for key, kind in _OR_NULL.items():
        if hf.get(key) is not None:
            _check(key, hf[key], kind)
    for name in ("rope_parameters", "rope_scaling"):
        rope = hf.get(name) or {}
        # of a kind of layers
        nested = [(f"{name}.{kind}", of_kind) for kind, of_kind in rope.items() if isinstance(of_kind, Mapping)]
        for place, values in ((name, rope), *nested):
            for key, kind in _OF_ROPE.items():
                if values.get(key) is not None:
                    _check(f"{place}.{key}", values[key], kind)


def _check(key: str, value: Any, kind: _Kind) -> None:
    fits, expected = kind
    if not fits(value):
        raise ValueError(f"{key} must be {expected}, got {value!r:.60}")


def eos_ids(value: Any) -> tuple[int, ...]:
    """Return ``eos_token_id`` as a tuple. In a file it can be absent, null, a number or a list."""
    ids = () if value is None else tuple(value) if isinstance(value, (list, tuple)) else (value,)
    for item in ids:
        if type(item) is not int:
            raise ValueError(f"eos_token_id must be a whole number or a list of them, got {value!r:.60}")
    return ids
