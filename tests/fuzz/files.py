"""Damaged checkpoints, caches and settings are refused or read as if they were whole, and so are texts in any encoding."""

import codecs
import functools
import json
import operator
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any, cast

import jax
import numpy as np
from hypothesis import strategies as st

import kvjax
from experiments.cli import read_record
from experiments.evaluation import EvaluationSettings
from experiments.tasks import read_text, source_text
from models import ChatTemplate, from_pretrained, save_pretrained
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
_ENCODINGS = (
    "utf-8", "utf-8-sig", "utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-be", "latin-1", "cp1252", "shift_jis",
    "gb18030", "cp437", "mac-roman", "utf-7", "koi8-r",
)  # fmt: skip
_MARKS = {
    codecs.BOM_UTF32_LE: "utf-32", codecs.BOM_UTF32_BE: "utf-32",
    codecs.BOM_UTF16_LE: "utf-16", codecs.BOM_UTF16_BE: "utf-16",
}  # fmt: skip
_ASCII = "abc XYZ 019.,"
_LETTERS = st.sampled_from(_ASCII) | st.sampled_from(_ASCII + "éüßøÅñçæ日本語中文привет😀👩\u200d👧\u2028\u00a0\ufeff“”—…’")
_ENDS = ("\n", "\r\n", "\r", "\n\n")
_TELLS = ("got", "expected", "unknown", "has no")
_Draw = Callable[[st.SearchStrategy], Any]
# The damage in words; what reads the file: True if it is read as the whole file is; and whether it must be read.
_Damaged = tuple[str, Callable[[], Any], bool]


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Damage one file, or write a text in some encoding, and read it."""
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


def _text(draw: _Draw, folder: pathlib.Path) -> _Damaged:
    """A text in any encoding is read as what it is, or refused; never as other letters."""
    name, wide, keys, read = draw(st.sampled_from(_READERS))
    text = draw(st.text(_LETTERS, min_size=1, max_size=60))
    if name.endswith(".yaml"):
        text = text.replace("\u2028", "")  # a line's end in YAML
    record = {"experiment": "speed", "metrics": [{"name": "time", "value": 1.0}]} if len(keys) > 1 else {}
    inner = functools.reduce(lambda value, key: {key: value}, reversed(keys), cast("Any", text))
    content = json.dumps({**record, **inner}, ensure_ascii=False) if keys else f"{text}{draw(st.sampled_from(_ENDS))}end"
    encoding, damage = draw(st.sampled_from(_ENCODINGS)), ""
    written = content.encode(encoding, "replace")
    if draw(st.integers(0, 2)) == 2:
        at, odd = draw(st.integers(0, len(written))), bytes([draw(st.integers(128, 255))])
        head, tail = written[:at], written[at:]
        written = draw(st.sampled_from((head, head + b"\0" + tail, head + odd + tail, tail)))
        damage = f", damaged at byte {at}"
    file = _emptied(folder / "texts") / name
    file.write_bytes(written)
    want = _decoded(written, wide)
    try:
        if want is not None and keys:
            want = functools.reduce(operator.getitem, keys, json.loads(want))
    except (ValueError, TypeError, KeyError):
        want = None  # the damage is in the JSON
    if want is not None and not keys:
        want = want.replace("\r\n", "\n").replace("\r", "\n")
    about = f"{name} in {encoding}{damage}: {written[:60]!r}"

    def same() -> Any:
        got = read(file)
        return (want is not None and got == want) or f"read as {got!r}"

    # A text of damaged letters may be refused for what it says.
    return about, same, want is not None and not damage


def _decoded(written: bytes, wide: bool) -> Any:
    """Decode as UTF-8, or as what a byte-order mark says; None for bytes that are no such text."""
    encoding = next((name for mark, name in _MARKS.items() if written.startswith(mark)), "utf-8-sig") if wide else "utf-8-sig"
    try:
        text = written.decode(encoding)
    except UnicodeDecodeError:
        return None
    return None if wide and "\0" in text else text


def _template(file: pathlib.Path) -> str | None:
    template = ChatTemplate.from_directory(file.parent)
    return template and template.template


# A file's name, whether its reader takes UTF-16 and UTF-32 with a mark, the keys of the text in JSON, and the reader.
_READERS: tuple[tuple[str, bool, tuple[str, ...], Callable[[pathlib.Path], Any]], ...] = (
    ("prompt.txt", True, (), read_text),
    ("haystack.txt", True, (), lambda file: source_text(f"file:{file}")),
    ("chat_template.jinja", False, (), _template),
    ("tokenizer_config.json", False, ("chat_template",), _template),
    ("record.json", False, ("settings", "model"), lambda file: read_record(file)["settings"]["model"]),
    ("settings.yaml", False, ("model",), lambda file: EvaluationSettings.from_yaml(file).model),
)
_KINDS = (_generation, _no_json, _weights, _index, _cache, _settings, *[_text] * 6)


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
