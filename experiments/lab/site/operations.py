"""The page of operations: what each computes, what it runs on, which methods call it, and on which cards it was timed."""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
import models
import pallas_kernels
from experiments.answering import paper_method
from experiments.records import make_record, markdown_rows, write_record
from experiments.speed import uneven_scores
from kvjax import registry
from kvjax.wrappers.named import EXAMPLES, PATTERNS
from pallas_kernels.dispatch import XLA, Implementation, Operation, added_implementation

FILE = "operations.json"  # in docs/records: the methods that call each operation
_LENGTH = 4096  # tokens of the traced prompt
_SOURCES = "../pallas_kernels"
_PLATFORMS = {"gpu": "GPU", "tpu": "TPU"}


def operations() -> dict[str, tuple[str, Operation, Callable[..., Any]]]:
    """Find the room, the table and the public function of every operation, by name."""
    made = {}
    for room, name in pallas_kernels.operations():
        module = importlib.import_module(f"pallas_kernels.{room}.{name}")
        made[name] = room, vars(module)[name.upper()], vars(module)[name]
    return made


def uses(name: str) -> set[str]:
    """Trace prefill, in one chunk and in two, two questions and a decode step; return the operations that a method calls.

    Nothing is computed: shapes alone are traced, as plain JAX on a machine without kernels calls the operations.

    Args:
        name: a method's name, or a text such as "twilight(quest)".
    """
    config = models.ModelConfig(
        vocab_size=5120, hidden_size=256, intermediate_size=256, num_layers=3, num_q_heads=4, num_kv_heads=2, head_dim=64,
        max_position_embeddings=2 * _LENGTH,
    )  # fmt: skip
    seen: set[str] = set()

    def note(operation: str, run: Callable[..., Any]) -> Callable[..., Any]:
        def noted(*args: Any, **given: Any) -> Any:
            seen.add(operation)
            return run(*args, **given)

        return noted

    def run(params: Any, tokens: jax.Array) -> Any:
        caches = [
            kvjax.prefill(params, tokens, config=config, method=method, max_new_tokens=64, chunk_size=size)
            for size in (_LENGTH, _LENGTH // 2)
        ]
        cache = kvjax.extend(params, caches[0], tokens[:, :8])  # as few tokens as a decode kernel takes at once
        cache = kvjax.extend(params, cache, tokens[:, :32])
        return caches[1], kvjax.decode_step(params, cache, tokens[:, 0])

    method = _method(name, config)
    with contextlib.ExitStack() as stack:
        for operation, (_, table, _) in operations().items():
            entry = Implementation(note(operation, table.implementations[XLA].run))
            stack.enter_context(added_implementation(operation, "noted", entry))
        jax.eval_shape(run, models.param_shapes(config), jax.ShapeDtypeStruct((1, _LENGTH), jnp.int32))
    return seen


def _method(name: str, config: models.ModelConfig) -> Any:
    cls = registry.find(name)
    given: dict[str, Any] = {"trigger": "fixed"} if name == "chess" else {}
    if "scores" in cls.__dataclass_fields__:
        given["scores"] = uneven_scores(config)
    if name == "layerbudgets":
        given["shares"] = (1.5, 1.0, 0.5)
    if name == "prefill":
        given["pattern"] = {"kind": "vertical_slash", "columns": 64, "diagonals": 128}  # its own would have room for all
    tokenizer = models.load_tokenizer(models.builtin_directory()) if cls.needs_tokenizer else None
    text = EXAMPLES.get(name, f"{name}(full)" if name in PATTERNS else name)
    return paper_method(text, _LENGTH, tokenizer=tokenizer, config=config, given=given).method


def record(docs: pathlib.Path) -> pathlib.Path:
    """Trace every method and every wrapper, and write which operations they call; return the file."""
    names = [*sorted(registry.builtin()), *registry.WRAPPERS]
    called = {name: uses(name) for name in names}
    rows = []
    for operation in operations():
        mine = [name for name in names if operation in called[name]]
        rows.append({"name": operation, "value": len(mine), "unit": "methods and wrappers", "methods": mine})
    file = docs / "records" / FILE
    write_record(file, make_record("operations", {"length": _LENGTH}, rows))
    return file


def parts(docs: pathlib.Path) -> dict[str, Callable[[], str]]:
    """List the function that makes the table of operations."""
    return {"operations": functools.partial(table, docs)}


def table(docs: pathlib.Path) -> str:
    """Write the tables of all operations, a table for each room."""
    called = {row["name"]: row["methods"] for row in _read(docs, FILE)["metrics"]}
    cards = _cards(_read(docs, "kernels.json"))
    lines: list[str] = []
    for room in pallas_kernels.ROOMS:
        head = ("operation", "what it computes", "kernels besides `xla`", "methods", "timed on")
        body = [
            (
                f"[`{name}`]({_SOURCES}/{room}/{name}/__init__.py)",
                _first(function),
                ", ".join(_kernels(operation)),
                _names(called.get(name, [])),
                ", ".join(cards.get(name, ())),
            )
            for name, (mine, operation, function) in sorted(operations().items())
            if mine == room
        ]
        lines += [f"## {room}", "", *markdown_rows([head, *body]), ""]
    return "\n".join(lines).rstrip()


def _first(function: Callable[..., Any]) -> str:
    """Return the first paragraph of a docstring as a cell of a table."""
    text = (inspect.getdoc(function) or "").split("\n\n")[0]
    return " ".join(text.split()).replace("|", "\\|").replace("``", "`")


def _kernels(operation: Operation) -> list[str]:
    """Write the implementations other than plain JAX, with their platforms."""
    return [
        f"`{name}` ({' and '.join(_PLATFORMS.get(platform, platform) for platform in entry.platforms) or 'everywhere'})"
        for name, entry in operation.implementations.items()
        if name != XLA
    ]


def _names(called: list[str]) -> str:
    """Write the names of methods and wrappers; "all" if every method calls the operation."""
    classes = {**registry.builtin(), **registry.WRAPPERS}
    if set(registry.builtin()) <= set(called):
        return "all"
    return ", ".join(classes[name].__name__ for name in called if name in classes)


def _cards(kernels: Mapping[str, Any]) -> dict[str, tuple[str, ...]]:
    """List the devices of a record's rows, by operation."""
    runs, found = kernels["notes"]["runs"], {}
    for row in kernels["metrics"]:
        device = runs[row["run"]]["device"]
        found[row["name"]] = tuple(dict.fromkeys((*found.get(row["name"], ()), device)))
    return found


def _read(docs: pathlib.Path, name: str) -> dict[str, Any]:
    return json.loads((docs / "records" / name).read_text(encoding="utf-8"))
