"""``kvjax ls``: list all methods with their papers and knobs, one method in full, the tasks, or the named models."""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import json
import textwrap
from collections.abc import Sequence
from typing import Any

from experiments.cli.flags import run
from experiments.cli.settings import option

_OTHERS = {"tasks": "experiments.tasks.__main__", "models": "experiments.answering.listing"}  # other lists, by name
_EXPLAINED = "traced: a sweep varies it within one compile; static: it decides a shape, a branch or a kernel"


@dataclasses.dataclass(frozen=True)
class LsCommand:
    """What to list.

    Attributes:
        names: a method to explain, by name or as package.module:Class; 'models'; or 'tasks' and perhaps the name of a task
            (default: all methods)
        json: print JSON
    """

    names: tuple[str, ...] = option((), positional=True, metavar="NAME")
    json: bool = False


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``kvjax ls``; return the exit code."""
    return run(_ls, LsCommand, prog="kvjax ls", about="List methods, tasks or models.", argv=argv)


def _ls(command: LsCommand) -> int | None:
    if command.names and command.names[0] in _OTHERS:
        more = ["--json"] if command.json else []
        return importlib.import_module(_OTHERS[command.names[0]]).main([*command.names[1:], *more])
    from kvjax import registry

    names = [registry.canonical_name(name) for name in command.names]
    known = registry.classes()
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, [*known, *_OTHERS], n=1)
            hint = f" (did you mean {near[0]!r}?)" if near else ""
            raise ValueError(
                f"unknown method {name!r}{hint}; known methods: {', '.join(sorted(known))}; or one of {', '.join(_OTHERS)}"
            )
    ordered = names or sorted(known, key=lambda name: (name != "full", name))
    listed = [_entry(name, known[name]) for name in ordered]
    if command.json:
        print(json.dumps(listed, indent=1))
        return None
    for entry in listed:
        print(_explained(entry) if names else _summary(entry), end="\n\n")
    print(_EXPLAINED)
    return None


def _entry(name: str, cls: Any) -> dict[str, Any]:
    """Describe a method as JSON values."""
    from kvjax import plugins, registry

    knobs = [dataclasses.asdict(knob) for knob in registry.knobs(cls)]
    return {
        "name": name,
        "class": cls.__name__,
        "idea": registry.summary(cls),
        "path": plugins.class_path(cls),
        "outside": cls in plugins.outside().values(),
        "paper": cls.PAPER,
        "keeps": cls.keeps,
        "knobs": [
            {**knob, "default": "required" if knob["default"] is dataclasses.MISSING else knob["default"]}
            for knob in knobs
        ],
    }


def _summary(entry: dict[str, Any]) -> str:
    origin = f"  from {entry['path']}" if entry["outside"] else ""
    lines = [f"{entry['name']}  [{entry['paper']}]{origin}", f"    {entry['idea']}"]
    return "\n".join([*lines, *(f"    {line}" for line in _knob_lines(entry))])


def _explained(entry: dict[str, Any]) -> str:
    arxiv, is_arxiv, number = entry["paper"].partition("arXiv:")
    link = f", https://arxiv.org/abs/{number}" if is_arxiv and not arxiv else ""
    method, cls = (entry["path"], entry["class"]) if entry["outside"] else (entry["name"], f"kvjax.methods.{entry['class']}")
    idea = textwrap.fill(f"{entry['idea'][0].upper()}{entry['idea'][1:]}", 100)
    told = [f"{entry['class']} (--method {method})", "", idea, "", f"paper:  {entry['paper']}{link}"]
    told.append(f"keeps:  {entry['keeps']}")
    if entry["knobs"]:
        told += ["", f"knobs (--set KNOB=VALUE, or {cls}(KNOB=VALUE)):"]
    return "\n".join([*told, *(f"  {line}" for line in _knob_lines(entry))])


def _knob_lines(entry: dict[str, Any]) -> list[str]:
    width = max((len(f"{knob['name']}={knob['default']}") for knob in entry["knobs"]), default=0)
    return [
        f"{knob['name'] + '=' + str(knob['default']):{width}s}  {'traced' if knob['traced'] else 'static'}  {knob['doc']}"
        for knob in entry["knobs"]
    ]
