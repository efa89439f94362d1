"""Damaged checkpoints, caches and settings are refused or read as if they were whole."""

import functools
import json
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from hypothesis import strategies as st

import kvjax
from experiments.evaluation import EvaluationSettings
from models import from_pretrained, save_pretrained
from tests.fuzz.arguments import world
from tests.fuzz.values import nested
from tests.fuzz.verdicts import judge

_CONFIG, _WEIGHTS, _GENERATION, _INDEX = (
    "config.json", "model.safetensors", "generation_config.json", "model.safetensors.index.json",
)  # fmt: skip
_NO_TOKENS: tuple[Any, ...] = ([[1]], 1.5, "a", -1, 10**9, {}, ["x"])
_SETTINGS: dict[str, tuple[Any, ...]] = {
    "lengths": ("x", [1.5], [[1]], {}, -1, [True]), "samples": ("x", 1.5, [1, 2], -1, None, True),
    "seed": ("x", 1.5, [], None),
    "methods": (7, [7], ["ques"], [{"quest": {"bugdet": 3}}], [{"quest": 3}], {"quest": 1}), "budgets": ("x", ["1/0"], [-1]),
    "model": (3.5, [], {}, None), "no_such_key": (1,), "tasks": ("no-such-task", [3.5], {}),
}  # fmt: skip
_NO_SETTINGS = ("[1, 2]", "3", "a: [", "\tx: 1", "a: &b [*b]", "seed: 1\nseed: 2", "? [a]\n: b", "[" * 300, "\0")
_NO_FILES = (
    "../a.safetensors", "/a.safetensors", "b.safetensors", 3, None, ["a.safetensors"], "", ".", "a\0b", "a/../../b",
    "..\\model", "C:\\model",
)  # fmt: skip
_TELLS = ("got", "expected", "unknown", "has no")
_Draw = Callable[[st.SearchStrategy], Any]
# The damage in words; what reads the file: True if it is read as the whole file is; and whether it must be read.
_Damaged = tuple[str, Callable[[], Any], bool]


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Damage one file, and read it."""
    about, read, whole = data.draw(st.sampled_from(_KINDS))(data.draw, folder)
    named = () if whole else (*_TELLS, str(folder))
    judge(about, read, named=named, right=lambda same: None if same is True else f"was accepted: {same!r:.200}")
    yield


def _generation(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    damaged, value = _copied(_model(folder)), draw(st.sampled_from(_NO_TOKENS))
    (damaged / _GENERATION).write_text(json.dumps({"eos_token_id": value}))
    return f"generation_config.json with eos_token_id={value!r:.40}", lambda: from_pretrained(damaged), False


def _no_json(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    damaged, name = _copied(_model(folder)), draw(st.sampled_from((_CONFIG, _GENERATION)))
    whole = (damaged / _CONFIG).read_bytes() if name == _CONFIG else b'{"eos_token_id": 60}'
    about, content = broken_json(draw, whole)
    (damaged / name).write_bytes(content)
    return f"{name}: {about}", lambda: from_pretrained(damaged), False


def _weights(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    damaged = _copied(_model(folder))
    whole = (damaged / _WEIGHTS).read_bytes()
    kind = draw(st.sampled_from(("cut", "flipped", "nested", "longer")))
    if kind == "nested":
        header = b"[" * draw(st.sampled_from((100, 100_000)))
        content = len(header).to_bytes(8, "little") + header
    elif kind == "longer":
        content = whole + bytes(draw(st.integers(1, 98)))
    elif kind == "cut":
        content = whole[: draw(st.integers(0, len(whole) - 1))]
    else:
        content = _flipped(draw, whole, 8 + int.from_bytes(whole[:8], "little"))  # in the header
    (damaged / _WEIGHTS).write_bytes(content)

    def same() -> bool:
        params, config = from_pretrained(damaged)
        return config == from_pretrained(_model(folder))[1] and equal(params, world().params)

    return f"model.safetensors: {kind}, {len(content)} of {len(whole)} bytes", same, False


def _index(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    damaged = _copied(_model(folder))
    (damaged / _WEIGHTS).rename(damaged / "a.safetensors")
    whole = {"weight_map": {"lm_head.weight": draw(st.sampled_from(_NO_FILES)), "x": "a.safetensors"}}
    others = ({"weight_map": 3}, {}, {"weight_map": []}, {"weight_map": {}}, [1])
    content = draw(st.just(whole) | st.sampled_from(others))
    (damaged / _INDEX).write_text(json.dumps(content))
    return f"{_INDEX} {content!r:.90}", lambda: from_pretrained(damaged), False


def _cache(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    damaged = _copied(_cache_of(folder))
    files = sorted(path for path in damaged.rglob("*") if path.is_file())
    file = draw(st.sampled_from(files) | st.just(damaged / "kvjax.json"))
    whole = file.read_bytes()
    about = draw(st.sampled_from(("removed", "cut", "flipped", "no JSON"))) if whole else "removed"
    if about == "removed":
        file.unlink()
    elif about == "cut":
        file.write_bytes(whole[: draw(st.integers(0, len(whole) - 1))])
    elif about == "no JSON" and file.suffix == ".json":
        file.write_bytes(broken_json(draw, whole)[1])
    else:
        file.write_bytes(_flipped(draw, whole, len(whole)))
    config = world().config
    load = functools.partial(kvjax.load_cache, damaged, config=config, method="full")
    return f"a saved cache: {file.relative_to(damaged)}: {about}", lambda: equal(load(), world().cache), False


def _settings(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    file, key = folder / "settings.yaml", draw(st.sampled_from(list(_SETTINGS)))
    text = json.dumps({key: draw(st.sampled_from(_SETTINGS[key]))})
    file.write_text(draw(st.just(text) | st.sampled_from(_NO_SETTINGS)))
    return f"settings {file.read_text()!r:.90}", lambda: EvaluationSettings.from_yaml(file), False


_KINDS = (_generation, _no_json, _weights, _index, _cache, _settings)


def broken_json(draw: _Draw, whole: bytes) -> tuple[str, bytes]:
    """What was done, and bytes that are no JSON object."""
    at, size = whole.index(b'"') + 1, draw(st.integers(0, len(whole.rstrip()) - 1))
    depth = draw(st.sampled_from((1000, 100_000)))
    other = draw(st.sampled_from((b"3", b'"x"', b"null", b"true", b"NaN")))
    return draw(st.sampled_from((
        (f"cut to {size} bytes", whole[:size]), ("nested lists", b"[" * depth), ("a list", json.dumps(nested(3)).encode()),
        ("a number or a text", other), ("not UTF-8", whole[:at] + b"\xff\xfe" + whole[at:]),
    )))  # fmt: skip


def _flipped(draw: _Draw, whole: bytes, size: int) -> bytes:
    """Flip a bit of the first bytes."""
    at, bit = draw(st.integers(0, size - 1)), draw(st.integers(0, 7))
    return whole[:at] + bytes([whole[at] ^ 1 << bit]) + whole[at + 1 :]


@functools.lru_cache(maxsize=1)
def _model(folder: pathlib.Path) -> pathlib.Path:
    save_pretrained(folder / "model", world().params, world().config)
    return folder / "model"


@functools.lru_cache(maxsize=1)
def _cache_of(folder: pathlib.Path) -> pathlib.Path:
    kvjax.save_cache(folder / "cache", world().cache)
    return folder / "cache"


def _copied(whole: pathlib.Path) -> pathlib.Path:
    """A copy of a folder, which replaces the last."""
    return pathlib.Path(shutil.copytree(whole, _emptied(whole.parent / "damaged"), dirs_exist_ok=True))


def _emptied(folder: pathlib.Path) -> pathlib.Path:
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def equal(a: Any, b: Any) -> bool:
    """Whether two trees have the same leaves, bit for bit."""
    left, right = ([np.asarray(leaf) for leaf in jax.tree.leaves(tree)] for tree in (a, b))
    return len(left) == len(right) and all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in zip(left, right))
