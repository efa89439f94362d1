"""``kvjax ls``: list all methods and wrappers with their papers and knobs, one in full, the tasks, named models, families."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.cli.job import Job
from experiments.cli.settings import option

_OTHERS = {  # other lists, by name
    "tasks": "experiments.tasks.__main__",
    "models": "experiments.answering.listing",
    "families": "experiments.answering.families",
}
_WRAPPERS = 'Wrappers, which are made of methods: --methods "twilight(quest)", --method "periodic(snapkv, interval=128)"'
_EXPLAINED = "traced: a sweep varies it within one compile; static: it decides a shape, a branch or a kernel"


@dataclasses.dataclass(frozen=True)
class LsCommand:
    """What to list.

    Attributes:
        names: a method or a wrapper to explain, by name or as package.module:Class; 'models'; 'families' (of models); or
            'tasks' and perhaps the name of a task (default: all methods and wrappers)
        json: print JSON
    """

    names: tuple[str, ...] = option((), positional=True, metavar="NAME")
    json: bool = False


def _ls(command: LsCommand) -> int | None:
    if command.names and command.names[0] in _OTHERS:
        more = ["--json"] if command.json else []
        return importlib.import_module(_OTHERS[command.names[0]]).main([*command.names[1:], *more])
    names, known = _all_known(command.names)
    listed = [known[name] for name in names] if names else list(known.values())
    if command.json:
        print(json.dumps(listed, indent=1))
        return None
    told = False
    for entry in listed:
        if entry["wrapper"] and not names and not told:
            told = True
            print(_WRAPPERS, end="\n\n")
        print(_explained(entry) if names else _summary(entry), end="\n\n")
    print(_EXPLAINED)
    return None


def _all_known(given: Sequence[str]) -> tuple[list[str], dict[str, dict[str, Any]]]:
    """Find the canonical names of methods, and all known methods by name, plug-ins too.

    Raises:
        ValueError: an unknown method; the message has the nearest known name.
    """
    from kvjax import registry

    names = [registry.canonical_name(name).partition("(")[0] for name in given]  # may import and register a class
    known = {entry["name"]: entry for entry in entries()}
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *_OTHERS], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"unknown method {name!r}{hint}; known methods: {', '.join(sorted(known))}; or one of {', '.join(_OTHERS)}"
            )
    return names, known


def entries() -> list[dict[str, Any]]:
    """Describe all methods, Full first, and then all wrappers, as JSON values."""
    from kvjax import registry
    from kvjax.wrappers.named import PATTERNS

    known = {**dict.fromkeys(PATTERNS, registry.WRAPPERS["prefill"]), **registry.WRAPPERS, **registry.classes()}
    methods = registry.classes()
    return [_entry(name, known[name]) for name in sorted(known, key=lambda name: (name not in methods, name != "full", name))]


def _entry(name: str, cls: Any) -> dict[str, Any]:
    """Describe a method as JSON values."""
    from kvjax import plugins, registry
    from kvjax.wrappers.named import EXAMPLES, PATTERNS

    wrapper, (fixed, source) = cls in registry.WRAPPERS.values(), PATTERNS.get(name, ({}, ""))
    idea, paper = registry.summary(cls), cls.PAPER
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
            {
                "name": knob.name,
                "default": fixed.get(knob.name, _json(knob.default)),
                "traced": knob.traced,
                "doc": knob.doc,
            }
            for knob in registry.knobs(cls)
        ],
    }


def _json(value: Any) -> Any:
    """Return a default as a JSON value: "required" if there is none; a dataclass becomes its fields."""
    if value is dataclasses.MISSING:
        return "required"
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value


def _summary(entry: dict[str, Any]) -> str:
    origin = f"  from {entry['path']}" if entry["outside"] else ""
    lines = [f"{entry['name']}  [{entry['paper']}]{origin}", f"    {entry['idea']}"]
    lines += [f"    --methods \"{entry['example']}\""] * entry["wrapper"]
    return "\n".join([*lines, *(f"    {line}" for line in _knob_lines(entry))])


def _explained(entry: dict[str, Any]) -> str:
    arxiv, is_arxiv, number = entry["paper"].partition("arXiv:")
    link = f", https://arxiv.org/abs/{number}" if is_arxiv and not arxiv else ""
    method, cls = (entry["path"], entry["class"]) if entry["outside"] else (entry["name"], f"kvjax.methods.{entry['class']}")
    if entry["wrapper"]:
        method, cls = f'"{entry["example"]}"', f"kvjax.{entry['class']}"
    idea = textwrap.fill(f"{entry['idea'][0].upper()}{entry['idea'][1:]}", 100)
    told = [f"{entry['class']} (--method {method})", "", idea, "", f"paper:  {entry['paper']}{link}"]
    told.append(f"keeps:  {entry['keeps']}")
    if entry["knobs"]:
        told += ["", f"knobs (--set KNOB=VALUE, or {cls}(KNOB=VALUE)):"]
    return "\n".join([*told, *(f"  {line}" for line in _knob_lines(entry))])


def _knob_lines(entry: dict[str, Any]) -> list[str]:
    shown = [f"{knob['name']}={_text(knob['default'])}" for knob in entry["knobs"]]
    width = max(map(len, shown), default=0)
    return [
        f"{text:{width}s}  {'traced' if knob['traced'] else 'static'}  {knob['doc']}"
        for text, knob in zip(shown, entry["knobs"], strict=True)
    ]


def _text(default: Any) -> Any:
    return default["kind"] if isinstance(default, dict) else default


main = Job(_ls, LsCommand)
