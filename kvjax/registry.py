"""Methods by name: look-up with near misses, and what each one's knobs are.

The list is whatever `kvjax.methods` imports; nothing else has to be registered.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import re
import sys
from typing import Any

from kvjax import methods
from kvjax.method import Method
from kvjax.typing import static


@dataclasses.dataclass(frozen=True)
class Knob:
    """One hyper-parameter of a method."""

    name: str
    default: Any
    traced: bool  # a sweep can vary it within one compile
    doc: str


def classes() -> dict[str, type[Method]]:
    """Method classes by lower-case name."""
    return {name.lower(): cls for name, cls in vars(methods).items() if inspect.isclass(cls)}


def make(name: str, tokenizer: Any = None, vocab_size: int | None = None, **knobs: Any) -> Method:
    """Build a method from its name (any case) and knobs.

    Args:
        name: see `classes`.
        tokenizer: gives the knobs that a method takes from a tokenizer, unless they are among ``knobs``; see
            `Method.needs_tokenizer`. Other methods ignore it.
        vocab_size: entries of the model's vocabulary; None takes the tokenizer's.
        **knobs: hyper-parameters.

    Raises:
        ValueError: unknown method or knob (with the nearest known name), or a value the method refuses.
    """
    known = classes()
    cls = known.get(name.lower())
    if cls is None:
        raise ValueError(
            f"unknown method {name!r}{_nearest(name.lower(), known)}; known methods: {', '.join(sorted(known))}"
        )
    fields = [field.name for field in dataclasses.fields(cls)]
    for knob in knobs:
        if knob not in fields:
            raise ValueError(
                f"{cls.__name__} has no knob {knob!r}{_nearest(knob, fields)}; it has: {', '.join(fields)}"
            )
    if cls.needs_tokenizer and tokenizer is not None:
        size = 1 + max(tokenizer.get_vocab().values()) if vocab_size is None else vocab_size
        made = cls.tokenizer_knobs(tokenizer, size)
        knobs = made | {knob: x for knob, x in knobs.items() if x is not None or knob not in made}
    return cls(**knobs)


def resolve(method: Method | str) -> Method:
    """The method itself, or the one of that name with its defaults."""
    if isinstance(method, str):
        return make(method)
    if not isinstance(method, Method):
        raise ValueError(f"method must be a kvjax method or its name, got {method!r}")
    return method


def knobs(cls: type[Method]) -> list[Knob]:
    """Every knob of a method class, with the meaning its field comment gives."""
    comments: dict[str, str] = {}
    for owner in reversed(cls.__mro__):
        if owner.__module__ in sys.modules and dataclasses.is_dataclass(owner):
            found = re.findall(r"^    (\w+):[^=\n#]*(?:=[^#\n]*)?  # (.+)$", inspect.getsource(owner), re.MULTILINE)
            comments.update(found)
    traced = static().metadata.keys()
    return [
        Knob(
            name=field.name,
            default=field.default,
            traced=not (field.metadata.keys() & traced),
            doc=comments.get(field.name, ""),
        )
        for field in dataclasses.fields(cls)
    ]


def summary(cls: type[Method]) -> str:
    """The one-line idea of a method: the first paragraph of its module's docstring, without the name."""
    text = inspect.getdoc(sys.modules[cls.__module__]).split("\n\n")[0].replace("\n", " ")
    return text.partition(": ")[2] or text


def _nearest(name: str, known: Any) -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def markdown() -> str:
    """The README's table of methods."""
    lines = ["| method | idea | keeps | paper |", "|---|---|---|---|"]
    for _, cls in sorted(classes().items()):
        path = f"{cls.__module__.replace('.', '/')}.py"
        idea = summary(cls)
        lines.append(
            f"| [`{cls.__name__}`]({path}) | {idea[0].upper()}{idea[1:]} | {cls.keeps} "
            f"| [{cls.PAPER}](https://arxiv.org/abs/{cls.PAPER.removeprefix('arXiv:')}) |"
        )
    return "\n".join(lines)
