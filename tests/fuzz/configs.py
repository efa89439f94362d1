"""Model files that say one thing twice, in keys of a config.json or as tokens that end an answer: joined, or refused."""

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from hypothesis import strategies as st

from models import ModelConfig, from_pretrained, save_pretrained
from tests.fuzz.arguments import world
from tests.fuzz.verdicts import judge
from tests.models import gguf_writing
from tests.models.test_families import edges
from tests.tiny_models import HF

_Draw = Callable[[st.SearchStrategy], Any]
_OLD = "original_max_position_embeddings"
_RULES = st.one_of(
    st.fixed_dictionaries({"rope_type": st.sampled_from(("linear", "dynamic")), "factor": st.sampled_from((2.0, 4.0))}),
    st.fixed_dictionaries(
        {"rope_type": st.just("yarn"), "factor": st.sampled_from((2.0, 4.0)), _OLD: st.sampled_from((32, 64))},
        optional={"beta_fast": st.just(16.0), "attention_factor": st.just(1.5), "rope_theta": st.sampled_from((1e3, 1e6))},
    ),
    st.fixed_dictionaries({
        "rope_type": st.just("longrope"), "short_factor": st.just([1.0] * 4), _OLD: st.sampled_from((32, 64)),
        "long_factor": st.sampled_from(([2.0] * 4, [3.0] * 4)),
    }),
)  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Thing:
    """Something that a file can say in several places.

    Attributes:
        base: a config.json without it.
        values: of the thing.
        places: each writes a value into keys of the file; the first alone is enough.
        named: a refusal tells one of these texts.
    """

    base: Callable[[], dict[str, Any]]
    values: st.SearchStrategy[Any]
    places: Sequence[Callable[[Any], dict[str, Any]]]
    named: Sequence[str]


def _keys(base: Callable[[], dict[str, Any]], values: st.SearchStrategy[Any], *keys: str) -> Thing:
    return Thing(base, values, [functools.partial(lambda key, value: {key: value}, key) for key in keys], keys)


def _without(name: str, *keys: str, **change: Any) -> Callable[[], dict[str, Any]]:
    return lambda: {key: value for key, value in {**edges(name), **change}.items() if key not in keys}


def _named(rule: dict[str, Any]) -> dict[str, Any]:
    """A rule under its old name."""
    return {"type": rule["rope_type"], **{key: value for key, value in rule.items() if key != "rope_type"}}


def _gemma() -> dict[str, Any]:
    return {"model_type": "gemma3", "text_config": edges("gemma3_text")}


def _in_text(key: str, values: st.SearchStrategy[Any]) -> Thing:
    def base() -> dict[str, Any]:
        return {**_gemma(), "text_config": {name: x for name, x in _gemma()["text_config"].items() if name != key}}

    return Thing(base, values, (lambda x: {key: x}, lambda x: {"text_config": {**base()["text_config"], key: x}}), (key,))


_THINGS = (
    _keys(lambda: HF, st.sampled_from(("float32", "bfloat16")), "dtype", "torch_dtype"),
    _keys(_without("gemma2", "hidden_act", "hidden_activation"), st.sampled_from(("gelu_pytorch_tanh", "silu")),
          "hidden_activation", "hidden_act"),
    _keys(_without("gpt_oss", "num_experts_per_tok"), st.sampled_from((1, 2)), "num_experts_per_tok", "experts_per_token"),
    _keys(_without("gpt_oss", "num_local_experts"), st.sampled_from((4, 8)), "num_local_experts", "num_experts"),
    _keys(lambda: {**HF, "model_type": "mixtral", "num_experts_per_tok": 2}, st.sampled_from((4, 8)),
          "num_local_experts", "num_experts"),
    _keys(_without("glm4_moe", "n_routed_experts"), st.sampled_from((8, 16)), "n_routed_experts", "num_local_experts"),
    _keys(_without("gemma2", "sliding_window"), st.sampled_from((4, 6)), "sliding_window", "sliding_window_size"),
    Thing(_without("minimax_m2", "rotary_dim", "rope_parameters"), st.sampled_from((2, 4)),
          (lambda x: {"rotary_dim": x}, lambda x: {"partial_rotary_factor": x / 8}), ("rotary_dim",)),
    Thing(lambda: HF, _RULES, (
        lambda x: {"rope_parameters": x}, lambda x: {"rope_scaling": x}, lambda x: {"rope_scaling": _named(x)},
    ), ("rope_parameters",)),
    Thing(lambda: HF, st.sampled_from(("linear", "dynamic")), (
        lambda x: {"rope_scaling": {"factor": 2.0, "type": x}}, lambda x: {"rope_scaling": {"factor": 2.0, "rope_type": x}},
    ), ("rope_type",)),
    _in_text("tie_word_embeddings", st.booleans()),
    _in_text("dtype", st.sampled_from(("float32", "bfloat16"))),
)  # fmt: skip


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Say a thing in two places of a file: if they agree, it is what the first alone says, else a sentence names one."""
    draw = data.draw
    thing = draw(st.sampled_from(_THINGS))
    first, second = draw(thing.values), draw(thing.values)
    alone, also = thing.places[0](first), draw(st.sampled_from(thing.places[1:]))(second)
    base = thing.base()
    both = _joined(_joined(base, alone), also)
    keys = [*alone, *also]
    both = dict(draw(st.permutations([*both.items()])))
    same, value = first == second, first
    if isinstance(first, dict):  # a rule may say more in one place
        same, value = all(first.get(key, x) == x for key, x in second.items()), first | second
    about = f"{base['model_type']} with {', '.join(keys)} of {first!r} and {second!r}"
    want = ModelConfig.from_hf(_joined(base, thing.places[0](value))) if same else None
    right = (lambda got: None if got == want else f"read as {got}, expected {want}") if same else None
    judge(about, lambda: ModelConfig.from_hf(both), right=right, named=() if same else thing.named)
    yield


def _joined(hf: dict[str, Any], more: dict[str, Any]) -> dict[str, Any]:
    """The file with more keys; an object gets keys of its own."""
    joined = dict(hf)
    for key, value in more.items():
        inner = joined.get(key)
        joined[key] = {**inner, **value} if isinstance(inner, dict) and isinstance(value, dict) else value
    return joined


# ---- tokens that end an answer ------------------------------------------------------------------------------------

_LLAMA_CPP = (  # llama.cpp's list of tokens that end a generation, src/llama-vocab.cpp
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<end_of_turn>", "<|endoftext|>", "<|eom_id|>", "<EOT>",
    "_<EOT>", "<|end_of_text|>", "<end_of_utterance>",
)  # fmt: skip
_NONE = ("<|user|>", "<|im_start|>", "<|END|>", "<|eot_id|", "end", "</s>", "<eos>", "<|end|> ", "<start_of_turn>")
_ENDS = st.none() | st.integers(0, 60) | st.lists(st.integers(0, 60), max_size=3, unique=True)


def check_ends(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Ends of an answer come from numbers and texts of all files of a folder, or of a GGUF file, and none is forgotten."""
    draw = data.draw
    texts = draw(st.lists(st.sampled_from(_LLAMA_CPP * 2 + _NONE), max_size=6, unique=True))
    ids = dict(zip(draw(st.permutations(range(20, 60)))[: len(texts)], texts, strict=True))
    harmony = {"<|return|>", "<|call|>"} <= {*texts}  # whose <|end|> ends a message of several
    by_text = {i for i, text in ids.items() if text in _LLAMA_CPP and not (harmony and text == "<|end|>")}
    write = draw(st.sampled_from((_write_folder, _write_folder, _write_gguf)))
    path, numbers = write(draw, folder, ids)
    want = by_text | numbers
    about = f"{path.name} with {ids} and numbers {sorted(numbers)}"

    def right(got: set[int]) -> str | None:
        return None if got == want else f"ends at {sorted(got)}, expected {sorted(want)}"

    judge(about, lambda: {*from_pretrained(path)[1].eos_token_ids}, right=right)
    yield


def _numbers(value: Any) -> set[int]:
    return set() if value is None else {*value} if isinstance(value, list) else {value}


def _write_folder(draw: _Draw, folder: pathlib.Path, ids: dict[int, str]) -> tuple[pathlib.Path, set[int]]:
    """A checkpoint whose tokens stand in two files, each in one of them or in both; and the numbers that it names."""
    path = pathlib.Path(shutil.copytree(_whole(folder), folder / "ends", dirs_exist_ok=True))
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        (path / name).unlink(missing_ok=True)
    stated, generation = draw(_ENDS), draw(_ENDS)
    config = json.loads((path / "config.json").read_text()) | {"eos_token_id": stated}
    (path / "config.json").write_text(json.dumps(config))
    if draw(st.booleans()):
        (path / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    else:
        generation = None
    places = {i: draw(st.sampled_from(("whole", "settings", "both"))) for i in ids}
    whole = [{"id": i, "content": text} for i, text in ids.items() if places[i] != "settings"]
    listed = {str(i): {"content": text} for i, text in ids.items() if places[i] != "whole"}
    settings: dict[str, Any] = {"added_tokens_decoder": listed} if listed or draw(st.booleans()) else {}
    named = draw(st.sampled_from((None, *ids)))
    if named is not None:
        settings["eos_token"] = draw(st.sampled_from((ids[named], {"content": ids[named]})))
    if whole or draw(st.booleans()):
        (path / "tokenizer.json").write_text(json.dumps({"added_tokens": whole}))
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    return path, _numbers(stated) | _numbers(generation) | _numbers(named)


def _write_gguf(draw: _Draw, folder: pathlib.Path, ids: dict[int, str]) -> tuple[pathlib.Path, set[int]]:
    """A GGUF file, and the numbers that its metadata names."""
    path, size = folder / "ends.gguf", world().config.vocab_size
    tokens = [ids.get(i, f"t{i}") for i in range(size)]
    named = {key: draw(st.none() | st.integers(0, 19)) for key in ("eos", "eot", "eom")}
    more = {f"{key}_token_id": i for key, i in named.items() if i is not None}
    hf = json.loads((_whole(folder) / "config.json").read_text()) | {"eos_token_id": None}
    values = gguf_writing.metadata(hf) | gguf_writing.tokenizer_metadata(tokens, [], "default", **more)
    gguf_writing.write(path, values, _tensors(folder))
    return path, {i for i in named.values() if i is not None}


@functools.lru_cache(maxsize=1)
def _whole(folder: pathlib.Path) -> pathlib.Path:
    save_pretrained(folder / "model", world().params, world().config)
    return folder / "model"


@functools.lru_cache(maxsize=1)
def _tensors(folder: pathlib.Path) -> dict[str, np.ndarray]:
    from safetensors.numpy import load_file

    hf = json.loads((_whole(folder) / "config.json").read_text())
    return gguf_writing.stored(hf, load_file(_whole(folder) / "model.safetensors"))
