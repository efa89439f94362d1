"""Layers of linear attention in Hugging Face's files: keys of ``config.json``, and the tensors of a checkpoint."""

from __future__ import annotations

from typing import Any

from ...sizes.linear import LinearLayers
from .leaf import Leaf

_LINEAR, _FULL = "linear_attention", "full_attention"
KEYS = {  # of config.json -> our field
    "linear_num_key_heads": "num_key_heads",
    "linear_num_value_heads": "num_value_heads",
    "linear_key_head_dim": "key_dim",
    "linear_value_head_dim": "value_dim",
    "linear_conv_kernel_dim": "conv_width",
}


def read(hf: dict[str, Any]) -> LinearLayers | None:
    """Read the layers of linear attention that ``config.json`` declares; None if every layer has attention."""
    count, named = hf["num_hidden_layers"], hf.get("layer_types")
    if named is None:
        every = hf["full_attention_interval"]
        named = [_FULL if (layer + 1) % every == 0 else _LINEAR for layer in range(count)]
    other = [name for name in named if name not in (_FULL, _LINEAR)]
    if len(named) != count or other:
        raise ValueError(f"layer_types must name {_FULL!r} or {_LINEAR!r} for each of {count} layers, got {named!r:.80}")
    layers = tuple(layer for layer, name in enumerate(named) if name == _LINEAR)
    return LinearLayers(layers=layers, **{field: hf[key] for key, field in KEYS.items()}) if layers else None


def write(linear: LinearLayers | None, count: int) -> dict[str, Any]:
    """Return the keys of ``config.json`` for a model of ``count`` layers; `read` reads them."""
    if linear is None:
        return {"layer_types": [_FULL] * count}
    named = [_LINEAR if layer in linear.layers else _FULL for layer in range(count)]
    return {"layer_types": named, **{key: vars(linear)[field] for key, field in KEYS.items()}}


def leaves(linear: LinearLayers, hidden: int, layer: int, fused: bool) -> list[Leaf]:
    """List the parameters of a layer with their tensors."""
    ours, theirs = f"layers_{layer}/linear", f"model.layers.{layer}.linear_attn"
    heads, group, key, value = linear.num_key_heads, linear.group, linear.key_dim, linear.value_dim
    qkv, width = (key, key, group * value), linear.conv_width

    def projection(name: str, files: list[str], rows: tuple[int, ...]) -> Leaf:
        if fused:
            files, rows = [f"in_proj_{name}"], (sum(rows),)
        names = tuple(f"{theirs}.{file}.weight" for file in files)
        folds = tuple((heads, count, 1, hidden) for count in rows)
        return Leaf(f"{ours}/{name}/kernel", names, folds, axis=1, transpose=True)

    return [
        projection("qkvz", ["in_proj_qkv"] * 3 + ["in_proj_z"], (*qkv, group * value)),
        projection("ba", ["in_proj_b", "in_proj_a"], (group, group)),
        Leaf(f"{ours}/conv/taps", (f"{theirs}.conv1d.weight",) * 3, tuple((heads, count, 1, width) for count in qkv), axis=1),
        Leaf(f"{ours}/decay/log_rate", (f"{theirs}.A_log",), ((heads * group,),)),
        Leaf(f"{ours}/decay/bias", (f"{theirs}.dt_bias",), ((heads * group,),)),
        Leaf(f"{ours}/norm/scale", (f"{theirs}.norm.weight",), ((value,),)),
        Leaf(f"{ours}/out/kernel", (f"{theirs}.out_proj.weight",), ((hidden, heads * group * value),), transpose=True),
    ]
