"""Names of files and folders: what is saved under a name is loaded from it, and nothing appears under another name."""

import functools
import json
import os
import pathlib
import shutil
from collections.abc import Iterator

import jax.numpy as jnp
from hypothesis import strategies as st

import kvjax
from experiments.benchmarks import parse, read
from experiments.cli import read_record
from experiments.evaluation import Folder, read_predictions
from experiments.records import make_record, write_record
from models import ChatTemplate, builtin_directory, from_pretrained, load_tokenizer, save_pretrained
from models.files.adapter import AdapterConfig, load_adapter, save_adapter
from tests.fuzz.arguments import world
from tests.fuzz.files import equal
from tests.fuzz.values import texts
from tests.fuzz.verdicts import judge

_PIECES = (
    "run[1]", "*", "\\x", "..", "...", "-rf", "--out", "~", "~root", "%20", "$HOME", "gs:", "s3:", "c:", "x.", " x ", "@0",
    ".partial-", ".saving", "tmp", "{a,b}", "file:", "#1", "CON",
)  # fmt: skip
_BYTES = 255  # the longest name of Linux's file systems
_LATIN_1 = st.lists(st.sampled_from(b"ab\xff\xfe\xe9 "), min_size=1, max_size=7).map(lambda x: os.fsdecode(bytes(x)))
_NAMES = (
    st.lists(st.sampled_from(_PIECES), min_size=1, max_size=3).map("".join)
    | st.sampled_from((100, 200, 210, 240, 250, 254, 255, 256, 300)).map(lambda size: "n" * size)
    | st.sampled_from((50, 68, 80, 84, 85, 86)).map(lambda size: "日" * size)
    | _LATIN_1  # in a system of UTF-8
    | texts(12).map(lambda text: text.replace("/", "").replace("\0", "") or "x")
).map(lambda name: name if name.strip(".") else f"{name}x")  # dots alone are other folders


def check(data: st.DataObject, folder: pathlib.Path) -> Iterator[None]:
    """Save one thing under one name, and load it."""
    name = data.draw(_NAMES)
    save = data.draw(st.sampled_from(_SLOW if data.draw(st.integers(0, 6)) == 6 else _CHEAP))
    home = folder / "home"
    shutil.rmtree(home, ignore_errors=True)
    home.mkdir()
    before, about = set(os.listdir(os.fsencode(folder))), f"{save.__name__.strip('_')} called {name!r}"

    def call() -> str | None:
        fault, there = save(home / name), os.listdir(os.fsencode(home))
        if fault is None and there != [os.fsencode(name)]:
            fault = f"expected that name alone, got {there}"
        if fault is None and (more := set(os.listdir(os.fsencode(folder))) - before):
            fault = f"wrote {more} elsewhere"
        return fault

    if len(os.fsencode(name)) <= _BYTES:
        judge(about, call, right=lambda fault: fault)
    else:
        judge(f"{about}, which is too long", lambda: save(home / name), named=("",), errors=(OSError, ValueError))
    yield


# ---- what is saved ------------------------------------------------------------------------------------------------


def _cache(target: pathlib.Path) -> str | None:
    cache = world().cache
    kvjax.save_cache(target, cache)
    back = kvjax.load_cache(target, config=world().config, method="full")
    return None if equal(cache, back) else "another cache was loaded"


def _model(target: pathlib.Path) -> str | None:
    save_pretrained(target, world().params, world().config)
    params, config = from_pretrained(target)
    return None if equal(params, world().params) and config == world().config else "another model was loaded"


def _tokenizer(target: pathlib.Path) -> str | None:
    """A tokenizer and its chat template, copied from a folder of this name to a folder of this name."""
    target.mkdir()
    for name in ("tokenizer.json", "tokenizer_config.json", "config.json"):
        shutil.copy(builtin_directory() / name, target / name)
    (target / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
    text = "Numbers 1234 and words"
    if load_tokenizer(target).encode(text).ids != load_tokenizer(builtin_directory()).encode(text).ids:
        return "another tokenizer was loaded"
    template = ChatTemplate.from_directory(target)
    return None if template and template.around() == ("", "!") else "another chat template was loaded"


def _adapter(target: pathlib.Path) -> str | None:
    factors = {"layers": {"a": jnp.ones((1, 2), jnp.bfloat16)}}
    save_adapter(target, factors, AdapterConfig(base="b", fingerprint="f", rank=2, stretch=1.0))
    return None if equal(load_adapter(target)[0], factors) else "another adapter was loaded"


def _record(target: pathlib.Path) -> str | None:
    record = make_record("speed", {"model": target.name.encode(errors="replace").decode()}, [])
    write_record(target, record)
    return None if read_record(target)["settings"] == record["settings"] else "another record was read"


def _folder(target: pathlib.Path) -> str | None:
    """The folder of `kvjax eval --out`, whose second run finds the cell of the first."""
    key = {"name": "a task", "length": 64, "method": "full", "budget": None}
    row = {**key, "value": 1.0, "unit": "percent", "question": "after", "seconds": 0.5, "compile_seconds": 0.0}
    predictions = [{"key": "k", "prediction": "p", "score": 1.0}]
    start = functools.partial(Folder, target, {"model": "m"}, "model: m\n", {})
    start().add(row, key, predictions)
    cell = start().find(key)
    if cell is None or cell["value"] != 1.0:
        return "the finished cell was not found"
    return None if read_predictions(target, cell) == predictions else "other predictions were read"


def _table(target: pathlib.Path) -> str | None:
    """A file of `kvjax eval --tasks kvpress:PATH`, in a folder of this name."""
    target.mkdir()
    values = {"context": "c", "question": "q", "answer_prefix": "", "answer": "a", "task": "vt", "max_new_tokens": 4}
    (target / "rows.jsonl").write_text(json.dumps(values), encoding="utf-8")
    file, folder = f"kvpress:{target / 'rows.jsonl'}", f"kvpress:{target}"
    if parse(folder)[1] != target:
        return f"the path became {parse(folder)[1]}"
    return None if read(file) == read(folder) and len(read(folder)) == 1 else "the table was not read"


_CHEAP, _SLOW = (_record, _folder, _table, _adapter, _model), (_cache, _tokenizer)
