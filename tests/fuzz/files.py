"""Damaged files: checkpoints, caches, settings and records, each with one fault."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import shutil
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

import kvjax
from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings
from models import from_pretrained, save_pretrained
from tests.fuzz.arguments import World
from tests.fuzz.values import nested

_CONFIG, _WEIGHTS, _GENERATION = "config.json", "model.safetensors", "generation_config.json"
_NO_SIZE = (None, 0, -1, 1.5, "4", True, [4], {}, float("nan"), 10**400)
_NO_FLAG = ("false", 1.5, [], {}, "x")
# The values that a key of config.json must not have.
_KEYS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"), _NO_SIZE),
    **dict.fromkeys(("num_key_value_heads", "head_dim"), _NO_SIZE[1:]),
    "max_position_embeddings": _NO_SIZE,
    "rms_norm_eps": ("1e-6", 0, -1, [], {}, float("nan"), float("inf")),
    "rope_theta": ("1e4", 0, -1, [1], {}, float("nan")),
    "tie_word_embeddings": _NO_FLAG,
    "model_type": (None, "bert", 3, [], {}),
    "eos_token_id": ([[1]], 1.5, "a", -1, 10**9, {}, ["x"]),
    "rope_scaling": ("x", 3, [1], {"rope_type": "unknown"}, {"rope_type": 3}, {"rope_type": "llama3"}),
    "torch_dtype": (3, "int8", []),
    "hidden_act": ("gelu", 3),
    "quantization_config": ({"bits": 4},),
}  # fmt: skip
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "lengths": ("x", [1.5], [[1]], {}, -1, [True]), "samples": ("x", 1.5, [1, 2], -1, None, True),
    "seed": ("x", 1.5, [], None),
    "methods": (7, [7], ["ques"], [{"quest": {"bugdet": 3}}], [{"quest": 3}], {"quest": 1}), "budgets": ("x", ["1/0"], [-1]),
    "model": (3.5, [], {}, None), "no_such_key": (1,), "tasks": ("no-such-task", [3.5], {}),
}  # fmt: skip
_RECORD: dict[str, Any] = {
    "experiment": "speed",
    "settings": {"model": "tiny"},
    "metrics": [{"name": "time", "value": 1.0}],
}


@dataclasses.dataclass(frozen=True)
class Damaged:
    """A damaged file.

    Attributes:
        about: the damage in words.
        read: reads the file; returns False if what it gives is what the whole file gives.
    """

    about: str
    read: Callable[[], Any]


class Files:
    """Makes damaged files, one at a time, in a folder.

    Args:
        world: the model and the cache that are saved.
        folder: for the files.
    """

    def __init__(self, world: World, folder: pathlib.Path) -> None:
        self.world, self.folder = world, folder
        self._kinds = (
            self._config,
            self._generation,
            self._text,
            self._weights,
            self._index,
            self._cache,
            self._yaml,
            self._record,
        )

    def damage(self, rng: np.random.Generator) -> Damaged:
        """A random damage of a random kind of file."""
        return self._kinds[int(rng.integers(len(self._kinds)))](rng)

    @functools.cached_property
    def _model(self) -> pathlib.Path:
        save_pretrained(self.folder / "model", self.world.params, self.world.config)
        return self.folder / "model"

    @functools.cached_property
    def _saved(self) -> pathlib.Path:
        kvjax.save_cache(self.folder / "cache", self.world.cache)
        return self.folder / "cache"

    def _copy(self, of: pathlib.Path) -> pathlib.Path:
        """A copy of a folder, which replaces the last."""
        target = self.folder / "damaged"
        shutil.rmtree(target, ignore_errors=True)
        return pathlib.Path(shutil.copytree(of, target))

    def _config(self, rng: np.random.Generator) -> Damaged:
        folder = self._copy(self._model)
        config = json.loads((folder / _CONFIG).read_text())
        config |= {"model_type": "llama", "attention_bias": False}
        config.pop("rope_parameters", None)
        key = _one(rng, list(_KEYS))
        value = _one(rng, _KEYS[key])
        if key == "torch_dtype":
            config.pop("dtype", None)
        (folder / _CONFIG).write_text(json.dumps(config | {key: value}))
        return Damaged(f"config.json with {key}={value!r:.40}", lambda: from_pretrained(folder))

    def _generation(self, rng: np.random.Generator) -> Damaged:
        folder = self._copy(self._model)
        value = _one(rng, _KEYS["eos_token_id"])
        (folder / _GENERATION).write_text(json.dumps({"eos_token_id": value}))
        return Damaged(f"generation_config.json with eos_token_id={value!r:.40}", lambda: from_pretrained(folder))

    def _text(self, rng: np.random.Generator) -> Damaged:
        """A JSON file of a model that is no JSON object any more."""
        folder = self._copy(self._model)
        name = _one(rng, (_CONFIG, _GENERATION))
        whole = (folder / _CONFIG).read_bytes() if name == _CONFIG else b'{"eos_token_id": 60}'
        about, data = _broken_json(whole, rng)
        (folder / name).write_bytes(data)
        return Damaged(f"{name}: {about}", lambda: from_pretrained(folder))

    def _weights(self, rng: np.random.Generator) -> Damaged:
        folder = self._copy(self._model)
        file = folder / _WEIGHTS
        data = bytearray(file.read_bytes())
        header = 8 + int.from_bytes(data[:8], "little")
        kind = int(rng.integers(4))
        if kind == 0:
            size = int(rng.integers(len(data)))
            about, data = f"cut to {size} bytes", data[:size]
        elif kind == 1:
            at, bit = int(rng.integers(header)), int(rng.integers(8))
            data[at] ^= 1 << bit
            about = f"bit {bit} of byte {at} flipped"
        elif kind == 2:
            text = b"[" * int(rng.choice((100, 100_000)))
            about, data = "a nested header", bytearray(len(text).to_bytes(8, "little") + text)
        else:
            about, data = "more bytes at the end", data + bytes(int(rng.integers(1, 99)))
        file.write_bytes(bytes(data))
        return Damaged(f"model.safetensors: {about}", lambda: self._same_params(folder))

    def _index(self, rng: np.random.Generator) -> Damaged:
        folder = self._copy(self._model)
        (folder / _WEIGHTS).rename(folder / "a.safetensors")
        wrong = ("../a.safetensors", "/a.safetensors", "b.safetensors", 3, None, ["a.safetensors"], "", ".", "a\0b")
        whole = {"weight_map": {"lm_head.weight": _one(rng, wrong), "x": "a.safetensors"}}
        content = _one(rng, (whole, whole, whole, {"weight_map": 3}, {}, {"weight_map": []}, {"weight_map": {}}, [1]))
        (folder / "model.safetensors.index.json").write_text(json.dumps(content))
        return Damaged(f"model.safetensors.index.json {content!r:.90}", lambda: from_pretrained(folder))

    def _same_params(self, folder: pathlib.Path) -> bool:
        params, config = from_pretrained(folder)
        return config != from_pretrained(self._model)[1] or not _equal(params, self.world.params)

    def _cache(self, rng: np.random.Generator) -> Damaged:
        folder = self._copy(self._saved)
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        file = files[int(rng.integers(len(files)))] if rng.random() < 0.7 else folder / "kvjax.json"
        data, kind = bytearray(file.read_bytes()), int(rng.integers(4))
        if kind == 0 or not data:
            about = "removed"
            file.unlink()
        elif kind == 1:
            size = int(rng.integers(len(data)))
            about = f"cut to {size} bytes"
            file.write_bytes(bytes(data[:size]))
        elif kind == 2 and file.suffix == ".json":
            about, content = _broken_json(bytes(data), rng)
            file.write_bytes(content)
        else:
            at, bit = int(rng.integers(len(data))), int(rng.integers(8))
            data[at] ^= 1 << bit
            about = f"bit {bit} of byte {at} flipped"
            file.write_bytes(bytes(data))
        return Damaged(f"a saved cache: {file.relative_to(folder)}: {about}", lambda: self._same_cache(folder))

    def _same_cache(self, folder: pathlib.Path) -> bool:
        cache = kvjax.load_cache(folder, config=self.world.config, method="full")
        return not _equal(cache, self.world.cache)

    def _yaml(self, rng: np.random.Generator) -> Damaged:
        file = self.folder / "settings.yaml"
        key = _one(rng, list(_SETTINGS))
        value = _one(rng, _SETTINGS[key])
        text = json.dumps({key: value})
        if rng.random() < 0.3:
            text = _one(
                rng, ("[1, 2]", "3", "a: [", "\tx: 1", "a: &b [*b]", "seed: 1\nseed: 2", "? [a]\n: b", "[" * 300, "\0")
            )
        file.write_text(text)
        return Damaged(f"settings {text!r:.90}", lambda: EvaluationSettings.from_yaml(file))

    def _record(self, rng: np.random.Generator) -> Damaged:
        file = self.folder / "record.json"
        if rng.random() < 0.5:
            about, data = _broken_json(json.dumps(_RECORD).encode(), rng)
        else:
            key, value = _one(rng, list(_RECORD)), _one(rng, (None, 3, "x", 1.5, True))
            value = 3 if key == "experiment" else value
            about, data = f"{key}={value!r}", json.dumps(_RECORD | {key: value}).encode()
        file.write_bytes(data)
        return Damaged(f"a record: {about}", lambda: read_record(file))


def _one(rng: np.random.Generator, options: Any) -> Any:
    return options[int(rng.integers(len(options)))]


def _broken_json(whole: bytes, rng: np.random.Generator) -> tuple[str, bytes]:
    """What was done, and bytes that are no JSON object."""
    kind = int(rng.integers(5))
    if kind == 0:
        size = int(rng.integers(len(whole.rstrip())))
        return f"cut to {size} bytes", whole[:size]
    if kind == 1:
        return "nested lists", b"[" * int(rng.choice((1000, 100_000)))
    if kind == 2:
        return "a list", json.dumps(nested(3)).encode()
    if kind == 3:
        return "a number or a text", _one(rng, (b"3", b'"x"', b"null", b"true", b"NaN"))
    at = whole.index(b'"') + 1
    return "not UTF-8", whole[:at] + b"\xff\xfe" + whole[at:]


def _equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same leaves, bit for bit."""
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(
        np.array_equal(x, y) and x.dtype == y.dtype for x, y in zip(left, right, strict=True)
    )
