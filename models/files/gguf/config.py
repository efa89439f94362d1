"""The configuration of a decoder from the metadata of a GGUF file.

A setting that this decoder does not compute is an error here, so that a file never runs as a slightly different model.
"""

from typing import Any

from ...sizes.architecture import Architecture
from ..end_tokens import end_ids
from ..hf import config as hf_config
from .families import FAMILIES, PREDICTING, GGUFFamily, shortest
from .reader import GGUFFile

EMBEDDING = "token_embd.weight"
OUTPUT = "output.weight"
_SIZES = {  # key after the architecture's name -> key of config.json
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "context_length": "max_position_embeddings",
}
_EPS = "attention.layer_norm_rms_epsilon"
_NEUTRAL: dict[str, tuple] = {  # keys that can change the arithmetic -> values that leave it unchanged
    "expert_count": (0,),
    PREDICTING: (0,),
    "attention.causal": (True,),
    **dict.fromkeys((
        "attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping", "final_logit_softcapping",
    ), (0.0,)),
    **dict.fromkeys((
        "logit_scale", "residual_scale", "embedding_scale", "rope.scaling.factor", "rope.scale_linear",
        "rope.scaling.attn_factor",
    ), (0.0, 1.0)),
    **dict.fromkeys((
        "attention.scale", "attention.sliding_window_pattern", "attention.temperature_scale", "attention.temperature_length",
        "no_rope_layer_step",
    ), ()),
}  # fmt: skip
_END_KEYS = ("eos_token_id", "eot_token_id", "eom_token_id")


def read_config(file: GGUFFile, dtype: str | None = None) -> Architecture:
    """Read the configuration of the model in ``file``.

    Embeddings are tied if the file has no ``output.weight``. A text ends with any token that the metadata names as end of
    text, of a turn or of a message, and with those that are known by their text (`models.files.end_tokens`).

    Args:
        file: an open GGUF file.
        dtype: dtype of computation. None takes bfloat16 if the file's embedding is stored in bfloat16, and float32
            otherwise, also for quantised files.
    """
    arch = architecture(file)
    try:
        hf = _declared(file, arch, FAMILIES[arch])
        fields = hf_config.read(hf)
        fields["dtype"] = dtype or ("bfloat16" if file.tensors[EMBEDDING].kind.name == "BF16" else "float32")
        return Architecture(**fields)
    except ValueError as error:
        raise ValueError(f"{file.path}: {error}") from error


def architecture(file: GGUFFile) -> str:
    """Return the architecture that the file names."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":
        raise ValueError(f"{file.path} holds a GGUF of type {kind!r}, expected 'model'")
    arch = file.metadata.get("general.architecture")
    if arch not in FAMILIES:
        raise ValueError(
            f"{file.path}: unsupported GGUF architecture {arch!r}, expected one of {', '.join(FAMILIES)} "
            "(llama.cpp writes Mistral as llama)"
        )
    return arch


def _declared(file: GGUFFile, arch: str, family: GGUFFamily) -> dict[str, Any]:
    """Write the metadata of a file as a ``config.json``."""
    absent = [f"{arch}.{key}" for key in (*_SIZES, _EPS) if f"{arch}.{key}" not in file.metadata]
    absent += [name for name in (EMBEDDING,) if name not in file.tensors]
    if absent:
        raise ValueError(f"the file lacks {', '.join(absent)}")
    neutral = {**_NEUTRAL, **family.neutral, "rope.scaling.type": family.scaling}
    for key in neutral.keys() - {*family.keys}:
        value = file.metadata.get(f"{arch}.{key}")
        if value is not None and value not in neutral[key]:
            expected = " or ".join(map(str, neutral[key])) or "none"
            raise ValueError(f"unsupported {arch}.{key}={value!r:.60}, expected {expected}")
    hf = {theirs: _same(file, f"{arch}.{key}") for key, theirs in _SIZES.items()}
    layers, heads = hf["num_hidden_layers"], hf["num_attention_heads"]
    if layers > len(file.tensors):  # a damaged file; a list of so many layers might not fit into memory
        raise ValueError(f"{arch}.block_count is {layers}, but the file has only {len(file.tensors)} tensors")
    hf["num_hidden_layers"] -= predicting(file)
    head_dim = _same(file, f"{arch}.attention.key_length", hf["hidden_size"] // max(1, heads))
    for key in ("attention.value_length", *(() if family.partial else ("rope.dimension_count",))):
        if (size := _same(file, f"{arch}.{key}", head_dim)) != head_dim:
            raise ValueError(f"unsupported {arch}.{key}={size}, expected head_dim {head_dim}")
    hf |= {
        "vocab_size": _vocab_size(file, arch),
        "num_key_value_heads": _same(file, f"{arch}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(file, f"{arch}.{_EPS}"),
        "rope_theta": _decimal(file, f"{arch}.rope.freq_base", 10000.0),
        "tie_word_embeddings": OUTPUT not in file.tensors,
        "eos_token_id": list(_end_ids(file)),
    }

    def number(key: str) -> Any:
        value = file.metadata.get(f"{arch}.{key}")
        if value is not None and type(value) not in (int, float):
            raise ValueError(f"{arch}.{key} must be a number, got {value!r:.60}")
        return shortest(value) if type(value) is float else value

    hf |= family.declared(file, number, hf)
    return {key: value for key, value in hf.items() if value is not None or key in ("rope_scaling", "sliding_window")}


def predicting(file: GGUFFile) -> int:
    """Return how many of the file's last layers only predict tokens after the next: they are not read."""
    arch = file.metadata["general.architecture"]
    value = file.metadata.get(f"{arch}.{PREDICTING}", 0)
    if type(value) is not int or not 0 <= value < max(1, _same(file, f"{arch}.block_count")):
        raise ValueError(f"{arch}.{PREDICTING} must be a whole number below block_count, got {value!r:.60}")
    return value


def _same(file: GGUFFile, key: str, default: int | None = None) -> Any:
    """Return a size, which a file can also give as a list with one value for each layer."""
    value = file.metadata.get(key, default)
    values = value if isinstance(value, list) else [value]
    if {type(item) for item in values} != {int}:
        raise ValueError(f"{key} must be a whole number, got {value!r}")
    if len(set(values)) > 1:
        raise ValueError(f"unsupported {key} that differs between layers: {sorted(set(values))}")
    return values[0]


def _decimal(file: GGUFFile, key: str, default: float | None = None) -> float:
    """Return a float32 of the file as the shortest decimal that rounds to it."""
    value = file.metadata.get(key, default)
    if not isinstance(value, float):
        raise ValueError(f"{key} must be a number, got {value!r}")
    return shortest(value)


def _vocab_size(file: GGUFFile, arch: str) -> int:
    """Return the rows of the embedding: the metadata's size, else the number of tokens, else the rows of the tensor."""
    tokens = file.metadata.get("tokenizer.ggml.tokens")
    rows = file.tensors[EMBEDDING].shape[0] if tokens is None else len(tokens)
    return _same(file, f"{arch}.vocab_size", rows)


def _end_ids(file: GGUFFile) -> tuple[int, ...]:
    """List the ids of the tokens that end a text, without repeats, the metadata's ids first."""
    named = (file.metadata.get(f"tokenizer.ggml.{key}") for key in _END_KEYS)
    tokens = file.metadata.get("tokenizer.ggml.tokens", [])
    by_text = end_ids({text: i for i, text in reversed([*enumerate(tokens)])})
    return tuple(dict.fromkeys(i for i in (*named, *by_text) if i is not None))
