"""Pages of methods for the site, made from docstrings, knobs and records."""

import inspect
import json
import pathlib
import re
import sys
from collections.abc import Sequence

from experiments.cli.ls import idea_of
from experiments.lab.site import records
from experiments.records import markdown_rows
from kvjax import registry
from kvjax.protocol.method import Method

_SCORES = ("qwen-16k", "qwen-32k")  # result folders whose means are shown
_TIMES = "speed-h200.json"
_TITLES = {"Stored": "What is stored", "Score": "Score", "**Source**": "Source", "**Departures**": "Departures"}
_TRACED = (
    "A traced knob is an array to the compiled program: `kvjax.sweep` runs many values of it in one compile. A static knob "
    "decides a shape, a branch or a kernel."
)


def pages(docs: pathlib.Path) -> dict[str, str]:
    """Write the list of methods and the page of every method, by the name of its file.

    Args:
        docs: folder of the documentation, with the folder ``records`` in it.
    """
    known = sorted(registry.builtin())
    measured = _measured(docs)
    toctree = "\n".join(["```{toctree}", ":hidden:", "", *known, "```"])
    index = f"# Methods\n\n{table('{}.md')}\n\n{toctree}\n"
    return {"index.md": index, **{f"{name}.md": page(name, measured.get(name, "")) for name in known}}


def table(link: str, names: Sequence[str] | None = None) -> str:
    """Make a table with a row for each method.

    Args:
        link: where a method's name leads, with ``{}`` for the name in lower case.
        names: the methods; None takes all.

    Raises:
        KeyError: there is no such method.
    """
    classes = registry.builtin()
    head = ("method", "idea", "keeps", "paper")
    body = [
        (f"[`{cls.__name__}`]({link.format(name)})", markdown(_idea(cls)), cls.keeps, markdown(cls.PAPER))
        for name, cls in ((name.lower(), classes[name.lower()]) for name in names or sorted(classes))
    ]
    return "\n".join(markdown_rows([head, *body]))


def knobs(name: str) -> str:
    """Make a table of the knobs of a method or a wrapper; "None." if it has none."""
    listed = registry.knobs(registry.find(name))
    if not listed:
        return "None."
    body = [
        (f"`{x.name}`", f"`{x.default!r}`", "traced" if x.traced else "static", markdown(x.doc).replace("|", "\\|"))
        for x in listed
    ]
    return "\n".join([*markdown_rows([("knob", "default", "kind", "meaning"), *body]), "", _TRACED])


def page(name: str, measured: str = "") -> str:
    """Write the page of a method.

    Args:
        name: the method's name in lower case.
        measured: the part with its scores and times; "" leaves it out.
    """
    cls = registry.builtin()[name]
    facts = {
        "paper": markdown(cls.PAPER),
        "keeps": cls.keeps,
        "made by": f"`kvjax.methods.{cls.__name__}(...)` or `kvjax.make({name!r}, ...)`",
        "code": f"`{cls.__module__.replace('.', '/')}.py`, tested against `tests/oracles/{name}.py`",
    }
    parts = [f"# {cls.__name__}", markdown(_idea(cls)), "\n".join(f"* {label}: {text}" for label, text in facts.items())]
    parts += [f"## {title}\n\n{text}" for title, text in sections(inspect.getdoc(sys.modules[cls.__module__]) or "")]
    parts.append(f"## Knobs\n\n{knobs(name)}")
    return "\n\n".join([*parts, *([f"## Measured\n\n{measured}"] if measured else [])]) + "\n"


def sections(docstring: str) -> list[tuple[str, str]]:
    """Split a method's docstring into titles and Markdown of the parts after its first paragraph, which is the idea.

    A part begins with a paragraph that opens with "Stored", "Score", ``**Source**`` or ``**Departures**``.
    """
    parts: list[tuple[str, list[str]]] = []
    for block in _blocks(docstring)[1:]:
        opening = next((opening for opening in _TITLES if block.startswith(opening)), None)
        if opening is not None and _TITLES[opening] not in [title for title, _ in parts]:
            parts.append((_TITLES[opening], []))
        elif not parts:
            parts.append(("How it works", []))
        text = re.sub(r"^(\*\*(Source|Departures)\*\*:?\s*|Stored:\s+)", "", block)
        text = re.sub(r"^\((.+?)\):", r"\1:", text)  # a remark in brackets that followed the word "Departures"
        parts[-1][1].append(text if text.startswith("```") else markdown(text[0].upper() + text[1:]))
    return [(title, "\n\n".join(texts)) for title, texts in parts]


def markdown(text: str) -> str:
    """Convert a paragraph of a docstring to Markdown: code spans, links to papers and to commits."""

    def prose(piece: str) -> str:
        piece = piece.replace("_", r"\_")
        piece = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", piece)
        return re.sub(r"\b([\w.-]+/[\w.-]+) ([0-9a-f]{7})\b", r"[\1 \2](https://github.com/\1/tree/\2)", piece)

    pieces = re.split(r"(``.+?``|`[^`]+`)", text)
    return "".join(f"`{piece.strip('`')}`" if piece.startswith("`") else prose(piece) for piece in pieces)


def _idea(cls: type[Method]) -> str:
    text = idea_of(cls)
    return text[0].upper() + text[1:]


def _blocks(docstring: str) -> list[str]:
    """Split a docstring into its paragraphs, as single lines, and its literal blocks, as code fences, in order."""
    blocks: list[str] = []
    literal = False
    for chunk in re.split(r"\n\s*\n|\n(?=\*\*Departures)", docstring.strip()):
        if literal and chunk.startswith(" "):
            fenced = inspect.cleandoc(chunk)
            if blocks[-1].endswith("```"):  # a blank line inside one literal block
                blocks[-1] = f"{blocks[-1][:-4]}\n\n{fenced}\n```"
            else:
                blocks.append(f"```text\n{fenced}\n```")
            continue
        paragraph = " ".join(chunk.split())
        literal = paragraph.endswith("::")
        blocks.append(paragraph[:-1] if literal else paragraph)
    return blocks


def _measured(docs: pathlib.Path) -> dict[str, str]:
    """Make the table of each method's means over tasks, and the line with its time for a token, by the method's name."""
    cells: dict[str, list[tuple[str, ...]]] = {}
    for row in (row for name in _SCORES for row in records.rows(docs / "records" / "results" / name)):
        name, _, knobs = row["setting"].partition("(")
        setting = f"`{row['setting']}`" if knobs else "as it is"
        cells.setdefault(name, []).append((setting, f"{row['length']:,}", row["score"], row["read"]))
    head = ("setting", "tokens", "mean score", "read per step")
    about = f"Means over tasks on Qwen2.5-Coder-1.5B ([quality](../quality.md), records {' and '.join(_SCORES)}):\n\n"
    parts = {name: [about + "\n".join(markdown_rows([head, *rows]))] for name, rows in cells.items()}
    for row in json.loads((docs / "records" / _TIMES).read_text(encoding="utf-8"))["metrics"]:
        case = tuple(row.get(name) or None for name in ("name", "length", "batch", "error", "note"))
        if case == ("decode", 131_072, 1, None, None) and len(parts.setdefault(row["method"], [])) < 2:
            line = f"One token after 131,072 takes {1e3 * row['value']:.2f} ms on an H200 ([speed](../speed.md))."
            parts[row["method"]].append(line)
    return {name: "\n\n".join(texts) for name, texts in parts.items()}
