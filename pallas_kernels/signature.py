'''The signature of an operation, declared once: the dtype and the axes of an argument stand in its annotation.

::

    @declared(PAGE_LOGITS)
    def page_logits(
        query: Annotated[Array, "floating B H G D"],
        vector: Annotated[Array, "like query B H P D"],
        limit: Annotated[Array, "int32 B"],
        *,
        scale: float,
        held: Annotated[Array | None, "bool B H P"] = None,
        implementation: str | None = None,
        platform: str | None = None,
    ) -> tuple[Array, Array]:
        """Compute the logit of each page for each query head, and the log of the sum of their exponentials."""
        return forward()

A call checks all arguments, and then runs the body, which has the checks that shapes cannot say. By `forward` the body names
the arguments that it changes; the operation runs with these and all others. ``help`` shows the docstring with the declared
dtypes and axes before the text of each argument, and with what holds for all operations (`_ARGUMENTS`, `_RAISES`).

A declaration has dtypes, then axes; either may be missing, or be that of another argument:

* ``uint8|uint16 B H L``: one of several dtypes. ``floating`` is any dtype of real numbers.
* ``like query B H S D``: the dtype of ``query``. ``bool like slots``: the shape of ``slots``. ``like query``: both.
* A capital is the size of an axis, the same in all arguments. ``_`` is any size, and ``...`` any axes in front.
* ``H|1`` is H or 1. ``D/2``, ``256``, ``ceil(T/block)``: a size that follows from others, or from static arguments.
  ``N>=S``: N, at least S. ``[]``: no axes; an argument annotated as ``int`` or ``float`` too may be such a number instead.
* ``B or B H``: the first that fits. ``B H S D; B H R D with rows``: the second where the argument ``rows`` is given.

``Annotated[int, ">=1"]`` is a least value, and ``Literal["max", "sum"]`` lists values. A tuple has a declaration for each
member, and another object has ``"field: declaration"`` for its fields. Codes count as the array that they stand for.
'''

import functools
import inspect
import math
import numbers
import re
import types
import typing
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, NamedTuple

import jax.numpy as jnp

from pallas_kernels.dispatch import Operation

# What an argument of this name is where the docstring of an operation says nothing else.
_ARGUMENTS = {
    "cursor": "the slot behind the newest token.",
    "platform": "see ``Operation.run``.",
    "position": "negative for an empty slot.",
    "rows": "the rows of an offloaded cache, if ``key`` is its copies; None if ``key`` has all slots.",
    "scale": "factor of the logits, a Python number.",
}
# Why an operation has no derivative.
INTEGERS = "none: its results are integers and truth values"
LOOP = "none: ``xla`` loops over blocks of keys up to a traced bound"
_RAISES = """
Raises:
    ValueError: shapes, dtypes or options are not as above, or the implementation is unknown.
    NotImplementedError: the named implementation cannot run here.
"""
_DTYPES = frozenset(("bool", "int8", "uint8", "uint16", "int32", "bfloat16", "float16", "float32", "floating"))


class _Forward(NamedTuple):
    finish: Callable[[Any], Any] | None
    changes: dict[str, Any]


def forward(finish: Callable[[Any], Any] | None = None, /, **changes: Any) -> Any:
    """End the body of a `declared` function: run the operation with the arguments of the call, but for the ``changes``.

    Args:
        finish: makes the call's result of the operation's. None: they are the same.
        **changes: arguments by name.
    """
    return _Forward(finish, changes)


def declared[F: Callable[..., Any]](operation: Operation, *, derivative: str = "through ``xla``") -> Callable[[F], F]:
    """Make a function with a declared signature the front door of ``operation``, see this module.

    The operation gets positional arguments by position, and all others by name. A result that is not from `forward` is the
    result of the call.

    Args:
        operation: the table of implementations.
        derivative: through which implementations the function is differentiable, and with respect to what; or "none: " and
            the reason.
    """

    def decorate(function: F) -> F:
        name, signature = function.__name__, inspect.signature(function)
        parts = list(_parts(typing.get_type_hints(function, include_extras=True)))
        front = [x.name for x in signature.parameters.values() if x.kind is x.POSITIONAL_OR_KEYWORD]
        front = [x for x in front if x not in ("implementation", "platform")]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError as error:
                raise TypeError(f"{name}: {error}") from None
            bound.apply_defaults()
            arguments = bound.arguments
            _check(name, parts, arguments)
            result = function(*args, **kwargs)
            if not isinstance(result, _Forward):
                return result
            arguments.update(result.changes)
            positional = [arguments.pop(x) for x in front]
            out = operation.run(*positional, **arguments)
            return out if result.finish is None else result.finish(out)

        call.__doc__ = _document(function.__doc__ or "", signature, parts, operation, derivative)
        return typing.cast(F, call)

    return decorate


class _Axis(NamedTuple):
    """An axis of a declaration: any size, a letter for its size, or a size that follows."""

    text: str
    letter: str | None = None
    rule: types.CodeType | None = None  # its size, or the least size where it has a letter


class _Form(NamedTuple):
    """Dtypes, and shapes of which one must fit; with a ``condition``, where the argument of this name is given."""

    condition: str | None
    dtypes: tuple[str, ...]
    like: str | None  # the argument that has the dtype
    shapes: tuple[tuple[_Axis, ...] | str, ...]  # a name: the argument that has the shape

    def __str__(self) -> str:
        shapes = [f"the shape of {x}" if isinstance(x, str) else f"[{', '.join(y.text for y in x)}]" for x in self.shapes]
        text = " ".join(filter(None, [" or ".join(self.dtypes), " or ".join(shapes).replace("|", " or ")]))
        text = f"{text} in the dtype of {self.like}" if self.like else text
        return f"{text} with {self.condition}" if self.condition else text


class _Part(NamedTuple):
    """What is declared of an argument, or of a member of it."""

    name: str
    member: int | str | None  # an index of a tuple, or a field
    none: bool  # the argument may be None
    number: bool  # or a Python number
    forms: tuple[_Form, ...] = ()
    least: int | None = None
    values: tuple[Any, ...] = ()

    def __str__(self) -> str:
        if self.values:
            return " or ".join(map(repr, self.values))
        return f"at least {self.least}" if self.least is not None else "; ".join(map(str, reversed(self.forms)))

    @property
    def label(self) -> str:
        """The part's name in messages."""
        if self.member is None:
            return self.name
        return f"{self.name}[{self.member}]" if isinstance(self.member, int) else f"{self.name}.{self.member}"

    def of(self, value: Any) -> Any:
        """Take the part out of its argument."""
        if isinstance(self.member, int):
            return value[self.member] if self.member < len(value) else None
        return value if self.member is None else getattr(value, self.member)


def _parts(hints: dict[str, Any]) -> Iterator[_Part]:
    """Read the annotations of a function."""
    for name, hint in hints.items():
        kind, texts = (hint.__origin__, hint.__metadata__) if typing.get_origin(hint) is Annotated else (hint, ())
        kinds = typing.get_args(kind) if typing.get_origin(kind) in (types.UnionType, typing.Union) else (kind,)
        none, number = type(None) in kinds, bool({int, float} & {*kinds})
        if values := tuple(x for each in kinds if typing.get_origin(each) is Literal for x in typing.get_args(each)):
            yield _Part(name, None, none, number, values=values)
        for index, text in enumerate(texts):
            if text.startswith(">="):
                yield _Part(name, None, none, number, least=int(text.removeprefix(">=")))
                continue
            field, _, text = text.rpartition(": ")
            member = field or (index if len(texts) > 1 else None)
            yield _Part(name, member, none, number, forms=_forms(text))


def _forms(text: str) -> tuple[_Form, ...]:
    """Read a declaration; the forms with a condition come first."""
    forms, dtypes, like = [], (), None
    for case in text.split("; "):
        case, _, condition = case.partition(" with ")
        words = case.split()
        if {*words[0].split("|")} <= _DTYPES:
            dtypes, words = tuple(words[0].split("|")), words[1:]
        elif words[0] == "like":
            like, words = words[1], words[2:] or words
        texts = [shape.split() for shape in " ".join(words).split(" or ")] if words else []
        shapes = tuple(x[1] if x[0] == "like" else tuple(_axis(y) for y in x if y != "[]") for x in texts)
        forms.append(_Form(condition or None, dtypes, like, shapes))
    return tuple(sorted(forms, key=lambda form: form.condition is None))


def _axis(text: str) -> _Axis:
    if text in ("_", "..."):
        return _Axis(text)
    letter, least = (text.removesuffix("|1"), "") if ">=" not in text else text.split(">=")
    letter = letter if letter.isidentifier() else None
    rule = least if letter else text
    return _Axis(text, letter, compile(rule, text, "eval") if rule else None)


def _check(operation: str, parts: list[_Part], arguments: dict[str, Any]) -> None:
    """Raise ``ValueError`` where arguments are not as declared. Axes that follow from others are checked last."""
    sizes: dict[str, Any] = {name: x for name, x in arguments.items() if isinstance(x, int)}
    later = []
    for part in parts:
        value = arguments[part.name]
        if value is None and part.none:
            continue
        if not part.forms:
            if value not in part.values if part.values else value < part.least:
                raise ValueError(f"{operation}: got {part.name}={value!r}, expected {part}")
            continue
        value = part.of(value)
        form = next(x for x in part.forms if x.condition is None or arguments[x.condition] is not None)
        if part.number and isinstance(value, numbers.Number) and () in form.shapes:
            continue
        axes = _fit(form, value, arguments, sizes)
        if axes is None:
            raise _error(operation, part.label, value, form, sizes)
        later += [(axis, size, part, value, form) for axis, size in axes if axis.rule is not None]
    for axis, size, part, value, form in later:
        try:
            right = eval(axis.rule, {"ceil": math.ceil}, sizes)
        except NameError:  # it follows from an argument that is not given
            continue
        if size != right if axis.letter is None else size < right:
            raise _error(operation, part.label, value, form, sizes)


def _fit(form: _Form, value: Any, arguments: dict[str, Any], sizes: dict[str, Any]) -> list[tuple[_Axis, int]] | None:
    """Return the declared axes of a value with their sizes, and note the sizes of letters; None if the value does not fit."""
    shape, dtype = getattr(value, "shape", None), getattr(value, "dtype", None)
    if shape is None or dtype is None or (form.like is not None and dtype != arguments[form.like].dtype):
        return None
    if form.dtypes and dtype not in form.dtypes and not ("floating" in form.dtypes and jnp.issubdtype(dtype, jnp.floating)):
        return None
    for axes in form.shapes:
        if isinstance(axes, str):
            if tuple(shape) == tuple(arguments[axes].shape):
                return []
            continue
        tail = axes[1:] if axes and axes[0].text == "..." else axes
        if len(shape) < len(tail) or (tail is axes and len(shape) > len(tail)):
            continue
        pairs = list(zip(tail, shape[len(shape) - len(tail) :], strict=True))
        new: dict[str, int] = {}
        for axis, size in pairs:
            if axis.letter is not None and not (size == 1 and axis.text.endswith("|1")):
                if size != sizes.get(axis.letter, new.setdefault(axis.letter, size)):
                    break
        else:
            sizes.update(new)
            return pairs
    return None if form.shapes else []


def _error(operation: str, label: str, value: Any, form: _Form, sizes: dict[str, Any]) -> ValueError:
    got = f"{value.dtype} {tuple(value.shape)}" if hasattr(value, "shape") and hasattr(value, "dtype") else repr(value)
    known = [f"{letter}={sizes[letter]}" for letter in re.findall(r"\b[A-Z]\b", str(form)) if letter in sizes]
    return ValueError(f"{operation}: got {label} {got}, expected {', '.join([str(form), *dict.fromkeys(known)])}")


def _document(text: str, signature: inspect.Signature, parts: list[_Part], operation: Operation, derivative: str) -> str:
    """Complete a docstring by what is declared of the function and each argument, and by what holds for all operations."""
    head, body, rest = re.findall(r"\A(.*?)(?:\s+Args:\n(.*?))?(?:\s+(Returns:.*))?\Z", inspect.cleandoc(text), re.DOTALL)[0]
    texts = dict(re.findall(r"^    (\w+): (.*(?:\n     .*)*)", body, re.MULTILINE))
    names = f"one of {', '.join(operation.implementations)}; None takes the first that runs. "
    takes = [f'"{name}" takes {entry.takes}.' for name, entry in operation.implementations.items() if entry.takes]
    texts["implementation"] = "\n        ".join([(names + texts.get("implementation", "")).strip(), *takes])
    lines = []
    for name in signature.parameters:
        axes = " and ".join(str(x) for x in parts if x.name == name)
        lines += [f"    {name}: {'; '.join(filter(None, [axes, {**_ARGUMENTS, **texts}.get(name, '')]))}".rstrip()]
    none = derivative.startswith("none: ")
    slope = f"Not differentiable: {derivative.removeprefix('none: ')}" if none else f"Differentiable: {derivative}"
    return "\n".join([head, f"\n{slope}.\n", "Args:", *lines, *(["", rest] if rest else []), _RAISES])
