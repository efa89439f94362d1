"""Names of files and folders: what is saved under a name is loaded from it, and nothing appears under another name."""

from __future__ import annotations

import json
import os
import pathlib
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from experiments.benchmarks import parse, read
from experiments.cli import read_record
from experiments.evaluation import Folder, read_predictions
from experiments.records import make_record, write_record
from experiments.tasks import read_text
from models import ChatTemplate, builtin_directory, from_pretrained, load_tokenizer, save_pretrained
from models.files.adapter import AdapterConfig, load_adapter, save_adapter
from tests.fuzz.arguments import World
from tests.fuzz.report import Outcome
from tests.fuzz.verdicts import verify
from tests.fuzz.words import one, random_text

_SPECIAL = "[]{}()*?!~#%&$'\"\\|:;<>,=+@^` .\n\t\r"
_PIECES = (
    "run[1]", "*", "?", "a b", "\\x", "..", "...", "-rf", "--out", "~", "~root", "%20", "$HOME", "${x}", "gs:", "s3:", "c:",
    "x.", " x ", "é", "e\u0301", "日本", "😀",
    ".partial-", ".saving", "tmp", "{a,b}", "file:", "#1", "\u202e", "\u200b", "CON",
    "@0",
)  # fmt: skip
_BYTES = 255  # the longest name of Linux's file systems

_PREDICTIONS = [{"key": "k", "prediction": "p", "score": 1.0}]


class Paths:
    """Random names for all that is written and read.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder, self.world = seed, folder, World()
        self._cheap: tuple[Callable[[pathlib.Path], str | None], ...] = (
            self._record, self._folder, self._table, self._text, self._adapter, self._model,
        )  # fmt: skip
        self._slow: tuple[Callable[[pathlib.Path], str | None], ...] = (self._cache, self._tokenizer)

    def check(self, number: int) -> Iterator[Outcome]:
        """Give the outcome of one name and one thing to save."""
        rng = np.random.default_rng([self.seed, 6, number])
        name = random_name(rng)
        kind = one(rng, self._slow if rng.random() < 0.15 else self._cheap)
        home = self.folder / "home"
        shutil.rmtree(home, ignore_errors=True)
        home.mkdir()
        target = home / name
        before = set(os.listdir(os.fsencode(self.folder)))
        about = f"{kind.__name__.strip('_')} called {name!r}"
        if (what := _why_not(name)) is None:

            def call() -> str | None:
                wrong = kind(target)
                there = os.listdir(os.fsencode(home))
                if wrong is None and there != [os.fsencode(name)]:
                    wrong = f"expected that name alone, got {there}"
                if wrong is None and (more := set(os.listdir(os.fsencode(self.folder))) - before):
                    wrong = f"wrote {more} elsewhere"
                return wrong

            yield verify(about, call, right=lambda wrong: wrong, named=None)
        else:
            yield verify(f"{about}, {what}", lambda: kind(target), right=None, named="", expected=(OSError, ValueError))

    # ---- what is saved --------------------------------------------------------------------------------------------

    def _cache(self, target: pathlib.Path) -> str | None:
        cache = self.world.cache
        kvjax.save_cache(target, cache)
        back = kvjax.load_cache(target, config=self.world.config, method="full")
        return None if _equal(cache, back) else "another cache was loaded"

    def _model(self, target: pathlib.Path) -> str | None:
        save_pretrained(target, self.world.params, self.world.config)
        params, config = from_pretrained(target)
        return None if _equal(params, self.world.params) and config == self.world.config else "another model was loaded"

    def _tokenizer(self, target: pathlib.Path) -> str | None:
        """A tokenizer and its chat template, copied from a folder of this name to a folder of this name."""
        target.mkdir()
        for name in ("tokenizer.json", "tokenizer_config.json"):
            shutil.copy(builtin_directory() / name, target / name)
        (target / "chat_template.jinja").write_text("{{ messages[0].content }}!", encoding="utf-8")
        shutil.copy(builtin_directory() / "config.json", target / "config.json")
        text = "Numbers 1234 and words"
        ids = load_tokenizer(target).encode(text).ids
        if ids != load_tokenizer(builtin_directory()).encode(text).ids:
            return "another tokenizer was loaded"
        template = ChatTemplate.from_directory(target)
        return None if template and template.around() == ("", "!") else "another chat template was loaded"

    def _adapter(self, target: pathlib.Path) -> str | None:
        factors = {"layers": {"a": jnp.ones((1, 2), jnp.bfloat16)}}
        save_adapter(target, factors, AdapterConfig(base="b", fingerprint="f", rank=2, stretch=1.0))
        return None if _equal(load_adapter(target)[0], factors) else "another adapter was loaded"

    def _record(self, target: pathlib.Path) -> str | None:
        made = make_record("speed", {"model": target.name.encode(errors="replace").decode()}, [])
        write_record(target, made)
        return None if read_record(target)["settings"] == made["settings"] else "another record was read"

    def _folder(self, target: pathlib.Path) -> str | None:
        """The folder of `kvjax eval --out`, whose second run finds the cell of the first."""
        key = {"name": "a task", "length": 64, "method": "full", "budget": None}
        row = {**key, "value": 1.0, "unit": "percent", "question": "after", "seconds": 0.5, "compile_seconds": 0.0}
        Folder(target, "eval", {"model": "m"}, "model: m\n", {}).add(row, key, _PREDICTIONS)
        again = Folder(target, "eval", {"model": "m"}, "model: m\n", {})
        found = again.find(key)
        if found is None or found["value"] != 1.0:
            return "the finished cell was not found"
        return None if read_predictions(target, found) == _PREDICTIONS else "other predictions were read"

    def _table(self, target: pathlib.Path) -> str | None:
        """A file of `kvjax eval --files`, in a folder of this name."""
        target.mkdir()
        values = {"context": "c", "question": "q", "answer_prefix": "", "answer": "a", "task": "vt", "max_new_tokens": 4}
        (target / "rows.jsonl").write_text(json.dumps(values), encoding="utf-8")
        one_file, folder = f"kvpress:{target / 'rows.jsonl'}", f"kvpress:{target}"
        if parse(folder)[1] != target:
            return f"the path became {parse(folder)[1]}"
        return None if read(one_file) == read(folder) and len(read(folder)) == 1 else "the table was not read"

    def _text(self, target: pathlib.Path) -> str | None:
        text = "one\ntwo ü\n"
        target.write_bytes(text.encode())
        return None if read_text(target) == text else "another text was read"


def random_name(rng: np.random.Generator) -> str:
    """Draw the name of a file, which Linux may refuse."""
    name = _random_name(rng)
    return name if name.strip(".") else f"{name}x"  # dots alone are other folders


def _random_name(rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.35:
        return "".join(one(rng, _PIECES) for _ in range(int(rng.integers(1, 4))))
    if kind < 0.7:
        return "".join(rng.choice([*_SPECIAL, *"abXé日😀"], int(rng.integers(1, 12))))
    if kind < 0.8:
        return "n" * int(one(rng, (100, 200, 210, 240, 250, 254, 255, 256, 300)))
    if kind < 0.86:
        return "日" * int(one(rng, (50, 68, 80, 84, 85, 86)))
    if kind < 0.92:
        letters = rng.choice([*b"ab\xff\xfe\xe9 "], int(rng.integers(1, 8)))
        return os.fsdecode(bytes(letters.tolist()))  # Latin-1 in a system of UTF-8
    return random_text(rng, 12).replace("/", "").replace("\0", "") or "x"


def _why_not(name: str) -> str | None:
    """Say why a system refuses the name; None if it takes it."""
    return "which is too long" if len(os.fsencode(name)) > _BYTES else None


def _equal(a: Any, b: Any) -> bool:
    left, right = jax.tree.leaves(a), jax.tree.leaves(b)
    return len(left) == len(right) and all(
        np.array_equal(np.asarray(x), np.asarray(y)) for x, y in zip(left, right, strict=True)
    )
