"""Renders chat templates with jinja2, in a sandbox, as transformers does; see its `render_jinja_template`."""

import datetime
import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
from jinja2 import nodes, parser, runtime
from jinja2.exceptions import SecurityError, TemplateError
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment

_OPEN = "CONTINUE_FINAL_MESSAGE_TAG "  # marks where the last message ends
_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names of a message's reasoning, in templates


def render(
    template: str, messages: Sequence[Mapping[str, Any]], *, continue_final_message: bool = False, **variables: Any
) -> str:
    """Render a conversation."""
    chat = [_with_reasoning(_plain(message)) for message in messages]
    last = ""
    if continue_final_message:
        last = chat[-1].get("content")
        if not isinstance(last, str):
            raise ValueError(f"the last message must have a text to continue, got {last!r:.60}")
        chat[-1] = {**chat[-1], "content": last + _OPEN}
    known = {"tools": None, "documents": None, **_plain(variables)}  # templates ask whether they are given
    text = _compiled(template).render(messages=chat, **known)
    if not continue_final_message:
        return text
    if last.strip() not in text or _OPEN.strip() not in text:
        raise ValueError("the last message must be shown as it is to be continued, and the template changes it")
    at = text.rindex(_OPEN.strip())
    # A template that trims messages trims the mark's last space too, and the message's own trailing spaces with it.
    return text[:at] if text[at:].startswith(_OPEN) else text[:at].rstrip()


class _Generation(Extension):
    """The block ``{% generation %}``, which marks the assistant's words in templates for training; it changes nothing."""

    tags = {"generation"}

    def parse(self, parser: parser.Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_words"), [], [], body).set_lineno(line)

    def _words(self, caller: runtime.Macro) -> str:
        return caller()


class _Names(jinja2.utils.Namespace):
    """A ``namespace`` without attributes that begin with an underscore, by which a template could leave the sandbox."""

    def __init__(*args: Any, **named: Any) -> None:  # without a named self, which a template may use as a name
        self, *rest = args
        names = dict(*rest, **named)
        for name in names:
            _check_name(name)
        jinja2.utils.Namespace.__init__(self, names)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: Any) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a name in a namespace must not begin with an underscore, got {name!r}")


class _Dict:
    """The functions of ``dict`` that a template may call."""

    def __call__(self, *args: Any, **named: Any) -> dict:
        return dict(*args, **named)

    def fromkeys(self, *args: Any) -> dict:
        return dict.fromkeys(*args)


@functools.lru_cache(maxsize=64)
def _compiled(template: str) -> jinja2.Template:
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
    environment.filters["tojson"] = _to_json
    environment.globals |= {
        "raise_exception": _refuse,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "dict": _Dict(),
        "namespace": _Names,
    }
    return environment.from_string(template)


def _refuse(message: str) -> None:
    raise TemplateError(message)


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    """Write JSON; jinja2's own filter would escape characters of HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _with_reasoning(message: dict[str, Any]) -> dict[str, Any]:
    """Give a message's reasoning under every name by which templates ask for it."""
    reasoning = next((message[name] for name in _REASONING if message.get(name) is not None), None)
    return message if reasoning is None else {"thinking": reasoning, **message, "reasoning_content": reasoning}


def _plain(value: Any) -> Any:
    """Rebuild values from plain types: an object's methods would be callable from within the sandbox."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    for kind in (str, int, float):
        if isinstance(value, kind):
            return kind(value)
    if isinstance(value, Mapping):
        return {_plain(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(_plain(item) for item in value) if type(value) in (list, tuple) else [*map(_plain, value)]
    return f"<{type(value).__name__}>"
