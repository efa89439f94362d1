"""The page of each method for the documentation site, made from its docstring, its knobs and the records in ``docs``."""

from __future__ import annotations

import inspect
import pathlib
import re
import sys
import textwrap

from experiments.answering import PAPERS
from experiments.lab.site.method_costs import memory, speed
from experiments.lab.site.method_scores import scores
from experiments.records import markdown_rows
from kvjax import registry
from kvjax.protocol.method import Method

_FINDINGS = (  # pages that may mention a method
    "five-papers", "tables/ablations", "speed", "offload", "notebook/retrieval", "notebook/eviction",
)  # fmt: skip


def page(name: str, docs: pathlib.Path) -> str:
    """Write the page of a method as MyST markdown.

    Args:
        name: a method's name, in any case.
        docs: folder of the documentation, with the folder ``records`` in it.

    Raises:
        ValueError: there is no such method.
    """
    known = registry.builtin()
    cls = known.get(name.lower())
    if cls is None:
        raise ValueError(f"expected a method, one of {', '.join(sorted(known))}, got {name!r}")
    name = name.lower()
    idea = registry.summary(cls)
    parts = [f"# {cls.__name__}", markdown(idea[0].upper() + idea[1:], name), _facts(name, cls)]
    parts += [f"## {title}\n\n{text}" for title, text in sections(inspect.getdoc(sys.modules[cls.__module__]), name)]
    parts.append(f"## Knobs\n\n{knob_table(cls, name)}")
    measured = (
        ("Memory", memory(name)),
        ("Speed", speed(name, docs)),
        ("Scores", scores(name, docs)),
        ("See also", _see_also(cls.__name__, docs)),
    )
    parts += [f"## {title}\n\n{text}" for title, text in measured if text]
    return "\n\n".join(parts) + "\n"


def index() -> str:
    """Write the page that lists all methods: a table of every method, with links to their pages."""
    known = registry.builtin()
    table = re.sub(r"\]\(kvjax/methods/(\w+)[\w/]*\.py\)", r"](\1.md)", registry.markdown())
    listed = "\n".join(sorted(known))
    return f"# Methods\n\n{table}\n\n```{{toctree}}\n:hidden:\n\n{listed}\n```\n"


def front() -> str:
    """Write the README's part: a row for Full and for each of the papers' methods, and the names of all other methods."""
    known = registry.builtin()
    shown = {"full", *PAPERS}
    others = ", ".join(cls.__name__ for name, cls in sorted(known.items()) if name not in shown)
    others = textwrap.fill(f"To compare with, in [kvjax/methods](kvjax/methods): {others}.", 120)
    return f"{registry.markdown(shown)}\n\n{others}"


def pages(docs: pathlib.Path) -> dict[str, str]:
    """Write `index` and the page of every method, by the name of its file."""
    return {"index.md": index(), **{f"{name}.md": page(name, docs) for name in registry.builtin()}}


def sections(docstring: str, name: str = "") -> list[tuple[str, str]]:
    """Split a method's docstring into titles and markdown of the parts that follow its first paragraph, the idea.

    A part begins with a paragraph that opens with "Stored", "Score", ``**Source**`` or ``**Departures**``. A score that has
    no paragraph of its own belongs to the part about storage.

    Args:
        docstring: the docstring of a method's module, cleaned of indentation.
        name: the method, which is not linked from its own page.
    """
    blocks = _blocks(docstring)[1:]
    apart = any(block.startswith("Score") for block in blocks)
    stored = "What is stored" if apart else "What is stored and how it is scored"
    openings = (("Stored", stored), ("Score", "Score"), ("**Source**", "Source"), ("**Departures**", "Departures"))
    parts: list[tuple[str, list[str]]] = []
    for block in blocks:
        title = next((title for opening, title in openings if block.startswith(opening)), None)
        if title and title not in [old for old, _ in parts]:
            parts.append((title, []))
        elif not parts:
            parts.append(("How it works", []))
        text = re.sub(r"^(\*\*(Source|Departures)\*\*:?\s*|Stored:\s+)", "", block)
        text = re.sub(r"^\((.+?)\):", r"\1:", text)  # a remark in brackets that followed the word "Departures"
        parts[-1][1].append(text if text.startswith("```") else markdown(text[0].upper() + text[1:], name))
    return [(title, "\n\n".join(texts)) for title, texts in parts]


def markdown(text: str, name: str = "") -> str:
    """Convert a paragraph of a docstring to MyST: code spans, links to papers, to commits and to pages of other methods.

    Args:
        text: a paragraph without line breaks.
        name: the method on whose page the paragraph stands.
    """
    known = registry.builtin()

    def code(match: re.Match[str]) -> str:
        inner = match[1] or match[2]
        if match[2] and match[2].lower() in known and match[2].lower() != name:
            return f"[`{inner}`]({inner.lower()}.md)"
        return f"`{inner}`"

    def prose(piece: str) -> str:
        piece = piece.replace("_", r"\_")
        piece = re.sub(r"arXiv:(\d{4}\.\d{5})", r"[arXiv:\1](https://arxiv.org/abs/\1)", piece)
        return re.sub(r"\b([\w.-]+/[\w.-]+) ([0-9a-f]{7})\b", r"[\1 \2](https://github.com/\1/tree/\2)", piece)

    spans = re.compile(r"``(.+?)``|`([^`]+)`")
    out, at = [], 0
    for match in spans.finditer(text):
        out += [prose(text[at : match.start()]), code(match)]
        at = match.end()
    return "".join([*out, prose(text[at:])])


def knob_table(cls: type[Method], name: str = "") -> str:
    """Write the knobs of a method as a markdown table, or the word "None." if it has no knobs."""
    knobs = registry.knobs(cls)
    if not knobs:
        return "None."
    head = ("knob", "default", "kind", "meaning")
    body = [
        (
            f"`{knob.name}`",
            f"`{knob.default!r}`",
            "traced" if knob.traced else "static",
            _cell(markdown(knob.doc, name)),
        )
        for knob in knobs
    ]
    traced = (
        "A traced knob is an array to the compiled program: `kvjax.sweep` runs many values of it in one compile. "
        "A static knob decides a shape, a branch or a kernel."
    )
    return "\n".join([*markdown_rows([head, *body]), "", traced])


def _facts(name: str, cls: type[Method]) -> str:
    knobs = [knob.name for knob in registry.knobs(cls)]
    said = {True: "yes", False: "no"}
    body = [
        ("paper", markdown(cls.PAPER)),
        ("keeps", cls.keeps),
        ("gives tokens up for good", said[cls.evicts]),
        ("may run beyond the trained length", said[cls.extrapolates]),
        ("may keep keys and values in host memory", said["offload" in knobs]),
        ("needs a tokenizer", said[cls.needs_tokenizer]),
        ("made by", f"`kvjax.methods.{cls.__name__}(...)` or `kvjax.make({name!r}, ...)`"),
        ("code", f"`{cls.__module__.replace('.', '/')}.py`, tested against `tests/oracles/{name}.py`"),
    ]
    return "\n".join(f"* {label}: {text}" for label, text in body)


def _see_also(title: str, docs: pathlib.Path) -> str:
    """List links to the pages that name the method."""
    links = []
    for stem in _FINDINGS:
        path = docs / f"{stem}.md"
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        if re.search(rf"\b{title}\b", text, re.IGNORECASE):
            links.append(f"* [{text.splitlines()[0].lstrip('# ')}](../{stem}.md)")
    return "\n".join(links)


def _blocks(docstring: str) -> list[str]:
    """Split a docstring into its paragraphs, as single lines, and its literal blocks, as code fences, in order."""
    blocks: list[str] = []
    literal = False
    for chunk in re.split(r"\n\s*\n", docstring.strip()):
        if literal and chunk.startswith(" "):
            fenced = inspect.cleandoc(chunk)
            if blocks[-1].endswith("```"):  # a blank line inside one literal block
                blocks[-1] = f"{blocks[-1][:-4]}\n\n{fenced}\n```"
            else:
                blocks.append(f"```text\n{fenced}\n```")
            continue
        for paragraph in re.split(r"\n(?=\*\*\w+\*\*)", chunk):
            literal = paragraph.endswith("::")
            blocks.append(" ".join(line.strip() for line in paragraph.removesuffix(":").splitlines()))
    return blocks


def _cell(text: str) -> str:
    """Escape the vertical bars of a text, so that it does not end a table's cell."""
    return text.replace("|", r"\|")
