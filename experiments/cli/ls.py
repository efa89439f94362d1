"""List methods and wrappers with their papers and knobs, or one in full; or tasks, models, files of suites, caches.

`kvjax ls tasks` lists the tasks, or those of a group, and `kvjax ls tasks NAME` shows an example of one. `kvjax ls models`
lists the named models, `kvjax ls families` the families of checkpoints that load. `kvjax ls FORMAT:PATH` shows what a suite's
file holds. `kvjax ls cache` shows the models and compiled programs that are kept on disk, and with --clear deletes them.
`kvjax ls --fits 24GB --model MODEL` shows what fits a device: the longest prompt and the most rows under each method, from
sizes alone.
"""

import dataclasses
import importlib
import inspect
import json
import sys
import textwrap
from typing import Any

from jsonargparse.typing import PositiveInt

from experiments.cli import kept
from experiments.cli.job import Job
from experiments.cli.settings import nearest, option

_OTHERS = ("tasks", "models", "families", "cache")
_EXPLAINED = (
    "--set KNOB=VALUE sets a knob; traced: a sweep varies it within a compile, static: it decides a shape or a branch"
)


@dataclasses.dataclass(frozen=True)
class LsCommand:
    """What to list.

    Attributes:
        names: a method or a wrapper to explain, by name or as package.module:Class; 'tasks', perhaps with a task or a group;
            'models'; 'families'; FORMAT:PATH of a suite's file; or 'cache' (default: all methods and wrappers)
        clear: comma-separated, what 'cache' deletes: programs, models, all, or a model's folder as 'cache' shows it
        fits: bytes of a device, such as 24GB: what fits it under the methods
        model: with --fits: a size such as qwen3-8b, a directory or its config.json, a GGUF file, or a name
        length: with --fits: tokens of the prompts whose rows are counted (default 32768)
        tokens: with --fits: tokens that may follow a prompt (default 256)
        kv_dtype: with --fits: dtype of stored keys and values, such as int8
        weight_dtype: with --fits: weights in int8 or int4
        json: print JSON
    """

    names: tuple[str, ...] = option((), positional=True, metavar="NAME")
    clear: tuple[str, ...] = ()
    fits: str | None = None
    model: str | None = None
    length: PositiveInt | None = None
    tokens: PositiveInt | None = None
    kv_dtype: str | None = None
    weight_dtype: str | None = option(None, choices=("int8", "int4"))
    json: bool = False

    def __post_init__(self) -> None:
        given = [name for name in ("model", "length", "tokens", "kv_dtype", "weight_dtype") if vars(self)[name] is not None]
        if self.fits is None and given:
            raise ValueError(f"--{given[0].replace('_', '-')} belongs to kvjax ls --fits SIZE")
        if self.fits is not None and self.model is None:
            raise ValueError("--fits needs --model: a size such as qwen3-8b, a directory, a GGUF file or a name")
        if self.clear and self.names != ("cache",):
            raise ValueError(f"--clear belongs to kvjax ls cache, got {' '.join(self.names) or 'the methods'}")


def _ls(command: LsCommand) -> None:
    print(_other(command) or _methods(command))


def _other(command: LsCommand) -> str:
    """Show what is no method; "" for methods. The packages that know it are imported only for it."""
    if command.fits is not None:
        return importlib.import_module("experiments.answering.fits").list_fits(
            command.fits, command.model, command.names, length=command.length or 32768, tokens=command.tokens or 256,
            kv_dtype=command.kv_dtype, weight_dtype=command.weight_dtype, as_json=command.json,
        )  # fmt: skip
    first, *rest = command.names or ("",)
    if rest and first in _OTHERS and first != "tasks":
        raise ValueError(f"kvjax ls {first} takes no further name, got {rest[0]!r}")
    if first == "cache":
        return kept.clear(command.clear) if command.clear else kept.show()
    if first == "tasks":
        return importlib.import_module("experiments.benchmarks.explain").explain_tasks(rest, command.json)
    if first in ("models", "families"):
        return vars(importlib.import_module("experiments.answering.listing"))[f"list_{first}"](command.json)
    if first.partition(":")[0] in importlib.import_module("experiments.benchmarks").READERS:
        return importlib.import_module("experiments.benchmarks.explain").explain_file(first)
    return ""


def _methods(command: LsCommand) -> str:
    """Show all methods, or the named ones in full.

    Raises:
        ValueError: an unknown method; the message has the nearest known name.
    """
    from kvjax import registry

    names = [registry.canonical_name(name).partition("(")[0] for name in command.names]  # may register a class
    known = {entry["name"]: entry for entry in entries()}
    for name in names:
        if name not in known:
            more = f"known methods: {', '.join(sorted(known))}; or one of {', '.join(_OTHERS)}"
            raise ValueError(f"unknown method {name!r}{nearest(name, [*known, *_OTHERS])}; {more}")
    for text in command.names:
        if "(" in text:
            registry.make(text)  # refuses what its brackets may not hold
    listed = [known[name] for name in names] if names else list(known.values())
    if command.json:
        return json.dumps(listed, indent=1)
    return "\n\n".join([*map(_explained, listed), _EXPLAINED])


def entries() -> list[dict[str, Any]]:
    """Describe all methods, Full first, and then all wrappers, as JSON values."""
    from kvjax import registry

    known, methods = registry.known(), registry.classes()
    return [_entry(name, known[name]) for name in sorted(known, key=lambda name: (name not in methods, name != "full", name))]


def _entry(name: str, cls: Any) -> dict[str, Any]:
    """Describe a method as JSON values."""
    from kvjax import plugins, registry
    from kvjax.wrappers.named import EXAMPLES, PATTERNS

    wrapper, (fixed, source) = cls in registry.WRAPPERS.values(), PATTERNS.get(name, ({}, ""))
    idea, paper = idea_of(cls), cls.PAPER
    if source:
        paper, _, pattern = source.partition(", ")
        idea = f"`Prefill` with the pattern of the paper: {pattern}."
    return {
        "name": name,
        "class": cls.__name__,
        "idea": idea,
        "path": plugins.class_path(cls),
        "outside": cls in plugins.outside().values(),
        "wrapper": wrapper,
        "example": f"{name}(quest)" if source else EXAMPLES.get(name, name),
        "paper": paper,
        "keeps": cls.keeps,
        "knobs": [
            {"name": knob.name, "default": fixed.get(knob.name, _json(knob.default)), "traced": knob.traced, "doc": knob.doc}
            for knob in registry.knobs(cls)
        ],
    }


def idea_of(cls: Any) -> str:
    """Return the idea of a method in one line: the first paragraph of its module's docstring, without the name.

    If the module's docstring does not begin with the name of the class, it is the first paragraph of the class's docstring.
    """
    of_module, of_class = (inspect.getdoc(owner) or "" for owner in (sys.modules[cls.__module__], cls))
    text = of_module if of_module.startswith(f"{cls.__name__}: ") else of_class
    if text.startswith(f"{cls.__name__}("):  # a dataclass without a docstring
        return "no docstring"
    return text.split("\n\n")[0].replace("\n", " ").removeprefix(f"{cls.__name__}: ") or "no docstring"


def _json(value: Any) -> Any:
    """Return a default as a JSON value: "required" if there is none; a dataclass becomes its fields."""
    if value is dataclasses.MISSING:
        return "required"
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _explained(entry: dict[str, Any]) -> str:
    room = entry["path"].partition(":")[0].rpartition(".")[0] if entry["wrapper"] else "kvjax.methods"
    method, cls = entry["example"], f"{room}.{entry['class']}"
    if entry["outside"]:
        method, cls = entry["path"], entry["class"]
    arxiv, is_arxiv, number = entry["paper"].partition("arXiv:")
    link = f", https://arxiv.org/abs/{number}" if is_arxiv and not arxiv else ""
    shown = [f"{knob['name']}={_text(knob['default'])}" for knob in entry["knobs"]]
    width = max(map(len, shown), default=0)
    lines = [
        f'{entry["name"]}  (--method "{method}", or {cls})',
        *textwrap.wrap(entry["idea"][0].upper() + entry["idea"][1:], 100),
        f"paper: {entry['paper']}{link}",
        f"keeps: {entry['keeps']}",
        *(
            f"  {text:{width}s}  {'traced' if knob['traced'] else 'static'}  {knob['doc']}"
            for text, knob in zip(shown, entry["knobs"], strict=True)
        ),
    ]
    return "\n    ".join(lines)


def _text(default: Any) -> Any:
    return default["kind"] if isinstance(default, dict) else default


main = Job(_ls, LsCommand)
