"""Checks of fields: a field of a method declares which values it may hold, and `check_fields` checks them.

The annotation of a field gives its kind: ``int`` is a whole number of int32, ``float`` a finite number of float32. `Limits`
give its range. Python, NumPy and JAX scalars are checked alike. What Python cannot read passes: shapes without values, and
arrays that were consumed. A traced value outside of its range becomes the nearest value in it.

A field whose default is None may be given None. If the method replaces this None when it is made, as `Limits.within` does,
the annotation is what the field holds then: ``capacity: int``.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Iterable
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

_INT32 = np.iinfo(np.int32)
_FLOAT32 = float(np.finfo(np.float32).max)
_ABOVE = 1e-6  # how far a traced value is moved above a bound that it must not have
_PLAIN = (int, float, bool)  # need no conversion


@dataclasses.dataclass(frozen=True)
class Limits:
    """The range of a field. It holds for every number of an array or a tuple."""

    least: float | None = None  # the smallest value
    above: float | None = None  # less than every value
    most: float | None = None  # the largest value
    odd: bool = False  # whether even numbers are refused
    empty: bool = False  # whether a tuple may have no numbers
    choices: tuple[Any, ...] = ()  # the only numbers, or the only texts; () = all
    within: str | None = None  # a static field that bounds the value; if it is None, it is set to the value

    def allow(self, value: float) -> bool:
        """Tell whether a number lies in the range."""
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and not (self.odd and value % 2 == 0)
        )

    def words(self) -> str:
        """Write the range so that it can follow the words "a number"."""
        if self.least is not None and self.most is not None:
            return f" from {self.least:.10g} to {self.most:.10g}"
        bounds = (("of at least", self.least), ("above", self.above), ("at most", self.most))
        parts = [f"{word} {bound:.10g}" for word, bound in bounds if bound is not None]
        return f" {' and '.join(parts)}" if parts else ""


@dataclasses.dataclass(frozen=True)
class Share:
    """A part of a prompt's tokens, in place of a budget in tokens; see `share`."""

    part: float

    def __repr__(self) -> str:
        return f"share({self.part:.6g})"

    def tokens(self, length: int) -> int:
        """Return this share of ``length`` tokens, rounded to whole tokens, at least 1."""
        return max(1, round(self.part * length))


def share(part: float) -> Any:
    """Give a budget as a share of the prompt: ``SnapKV(budget=share(1/8))``, or just ``budget=1/8``, keeps an eighth of it.

    `kvjax.prefill` and `kvjax.sweep` replace the share by tokens of the batch's longest prompt, and check the method then.
    Prompts that are padded to one length share a compiled program. A wrapper may have methods with shares inside.

    Args:
        part: above 0, at most 1.

    Returns:
        A `Share`, for the knob ``budget`` of any method.

    Raises:
        ValueError: ``part`` is something else.
    """
    return Share(float(check_value("share", part, (float,), Limits(above=0, most=1), static=True)))


def has_shares(method: Any) -> bool:
    """Tell whether a budget of a method, or of a method inside of it, is a `share`."""
    for value in vars(method).values():
        for inner in value.values() if isinstance(value, dict) else (value,):
            if isinstance(inner, Share) or (dataclasses.is_dataclass(inner) and has_shares(inner)):
                return True
    return False


def at_length[T](method: T, length: int, room: int | None = None) -> T:
    """Replace every `share` of a method, and of the methods inside of it, by tokens.

    Args:
        method: the method, which is returned itself if it has no share.
        length: tokens of the prompt.
        room: tokens of the padded prompt, of which the static ``capacity`` is a share, unless it is given; None means
            ``length``.

    Raises:
        ValueError: the method refuses a budget.
    """
    if not has_shares(method):
        return method
    changed: dict[str, Any] = {}
    for name, value in vars(method).items():
        if isinstance(value, Share):
            changed[name] = value.tokens(length)
            if vars(method)["capacity"] is None:
                changed["capacity"] = value.tokens(max(length, room or 0))
        elif isinstance(value, dict):
            changed[name] = {at: at_length(inner, length, room) for at, inner in value.items()}
        elif dataclasses.is_dataclass(value):
            changed[name] = at_length(value, length, room)
    return dataclasses.replace(cast("Any", method), **changed)


def known(value: Any) -> np.ndarray | None:
    """Read the values of a scalar or an array; None if Python cannot read them, and for anything else."""
    if isinstance(value, (int, float, np.generic, np.ndarray)):
        return np.asarray(value)
    if not isinstance(value, jax.Array) or _is_abstract(value) or jnp.issubdtype(value.dtype, jax.dtypes.prng_key):
        return None
    return jax.device_get(value)


def number(value: Any) -> Any:
    """Convert a Python, NumPy or JAX scalar to a Python scalar; None for anything else, traced values included."""
    if type(value) in _PLAIN:
        return value
    read = known(value)
    return None if read is None or read.ndim else read.item()


def positive_int(name: str, value: Any) -> int:
    """Return ``value`` as a Python integer if it is a whole number of at least 1 that int32 can hold.

    Raises:
        ValueError: ``value`` is anything else; the message calls it ``name``.
    """
    return check_value(name, value, (int,), Limits(least=1), static=True)


def check_names(owner: type, names: Iterable[str]) -> None:
    """Refuse names that are no fields of the dataclass ``owner``.

    Raises:
        ValueError: a name is no field; the message has the nearest field.
    """
    fields = [field.name for field in dataclasses.fields(owner)]
    for name in names:
        if name not in fields:
            raise ValueError(
                f"{owner.__name__} has no knob {name!r}{nearest(name, fields)}; it has: {', '.join(fields) or 'none'}"
            )


def nearest(name: str, names: Iterable[str]) -> str:
    """Suggest the entry of ``names`` that is most like ``name``, as a question to append to a message; "" if none is."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f" (did you mean {close[0]!r}?)" if close else ""


def check_fields(owner: Any, prefix: str | None = None) -> None:
    """Check the fields of a frozen dataclass when it is made.

    NumPy scalars become Python scalars; JAX scalars become Python scalars in static fields.

    Args:
        owner: the dataclass; its fields are replaced.
        prefix: begins the messages; None means the name of the class.

    Raises:
        ValueError: a value of another kind, or out of its range.
    """
    for name in declared(type(owner)):
        object.__setattr__(owner, name, check_field(type(owner), name, vars(owner)[name], prefix))
    for name, (_, limits, _) in declared(type(owner)).items():
        if limits.within is not None:
            check_within(owner, name, limits.within)


def check_field(owner: type, name: str, value: Any, prefix: str | None = None) -> Any:
    """Return ``value`` as the field ``name`` of the dataclass ``owner`` keeps it; see `check_fields`.

    Raises:
        ValueError: a value that the field refuses whatever the other fields are.
    """
    if name not in declared(owner):
        return value
    kinds, limits, static = declared(owner)[name]
    if limits.within is not None and int in kinds:
        if isinstance(value, (float, np.floating)) and 0 < value < 1:
            value = share(float(value))
        if isinstance(value, Share):
            return value
    return check_value((f"{owner.__name__}: " if prefix is None else prefix) + name, value, kinds, limits, static)


def check_within(owner: Any, name: str, bound: str) -> None:
    """Refuse values of field ``name`` above the static field ``bound``, which is set to these values if it is None.

    A traced value above ``bound`` becomes ``bound``.

    Raises:
        ValueError: a value is too large; or ``bound`` is None and the values are not known.
    """
    value, who = vars(owner)[name], f"{type(owner).__name__}: "
    if value is None or isinstance(value, Share):
        return
    values = value if isinstance(value, tuple) else (value,)
    if vars(owner)[bound] is None:
        plain = tuple(map(number, values))
        if None in plain:
            raise ValueError(f"{who}{bound} (static) must be given when {name} is an array or traced")
        object.__setattr__(owner, bound, plain if isinstance(value, tuple) else plain[0])
    most = vars(owner)[bound]
    limits = most if isinstance(most, tuple) else (most,)
    moved = tuple(clamped(one, None, limit) for one, limit in zip(values, limits, strict=True))
    object.__setattr__(owner, name, moved if isinstance(value, tuple) else moved[0])
    for one, limit in zip(values, limits, strict=True):
        # On the device a share is float32, which can be a little above the same share in Python.
        if (read := known(one)) is not None and (read.astype(np.float32) > np.float32(limit)).any():
            raise ValueError(f"{who}{name} must be at most {bound}={most}, got {shown(value)}")


def check_value(name: str, value: Any, kinds: tuple[Any, ...], limits: Limits, static: bool = False) -> Any:
    """Return ``value`` as a field keeps it: NumPy scalars as Python scalars, and whole numbers in ``float`` fields as floats.

    Args:
        name: what the message calls it.
        value: what was given.
        kinds: the types it may have: None, bool, int, float, str, tuples of these, arrays.
        limits: its range.
        static: whether it must be known. JAX scalars become Python scalars, too.

    Raises:
        ValueError: it is of another kind, or out of range.
    """
    try:
        return _kept(value, kinds, limits, static)
    except _UnfitError:
        who = name + " (static)" * (static and _is_abstract(value))
        raise ValueError(f"{who} must be {_expected(value, kinds, limits)}, got {shown(value)}") from None


def is_traced(value: Any) -> bool:
    """Tell whether ``value`` is a traced array."""
    return isinstance(value, Tracer)


def clamped(value: Any, least: Any, most: Any) -> Any:
    """Move a traced value, which cannot be refused, to the nearest value from ``least`` to ``most``; None is no bound.

    All other values are returned unchanged.
    """
    if not is_traced(value) or not jnp.issubdtype(value.dtype, jnp.number):
        return value
    value = value if least is None else jnp.maximum(value, jnp.asarray(least, value.dtype))
    return value if most is None else jnp.minimum(value, jnp.asarray(most, value.dtype))


class _UnfitError(Exception):
    """A value that a field cannot hold."""


def _kept(value: Any, kinds: tuple[Any, ...], limits: Limits, static: bool) -> Any:
    """Return ``value`` as a field keeps it, or raise `_UnfitError`; see `check_value`."""
    if _is_abstract(value) and not static:
        if is_traced(value) and int in kinds and float not in kinds and jnp.issubdtype(value.dtype, jnp.floating):
            raise _UnfitError  # a traced share would be a number of tokens
        least = limits.above + _ABOVE if limits.least is None and limits.above is not None else limits.least
        return clamped(value, least, limits.most)
    if isinstance(value, tuple):
        pairs = _parts(value, kinds)
        if pairs or (pairs is not None and limits.empty):
            return tuple(_kept(one, options, limits, static) for one, options in pairs)
    elif isinstance(value, str):
        texts = [choice for choice in limits.choices if isinstance(choice, str)]
        if str in kinds and (not texts or value in texts):
            return str(value)
    elif value is None and type(None) in kinds:
        return None
    elif (read := known(value)) is not None and (read.ndim == 0 or jax.Array in kinds):
        if all(_is_number(one, kinds, limits) for one in read.ravel().tolist()):
            plain = number(value) if static or not isinstance(value, jax.Array) else None
            if plain is None:
                return value
            return float(plain) if type(plain) is int and float in kinds else plain
    raise _UnfitError


def _is_number(value: Any, kinds: tuple[Any, ...], limits: Limits) -> bool:
    if type(value) is bool:
        return bool in kinds
    if float in kinds:
        fine = type(value) in (int, float) and abs(value) <= _FLOAT32
    else:
        fine = int in kinds and type(value) is int and _INT32.min <= value <= _INT32.max
    chosen = [choice for choice in limits.choices if not isinstance(choice, str)]
    return fine and limits.allow(value) and (not chosen or value in chosen)


def _parts(value: tuple, kinds: tuple[Any, ...]) -> list[tuple[Any, tuple[Any, ...]]] | None:
    """Pair each entry of a tuple with its kinds; None if no tuple of this length may be given."""
    for kind in kinds:
        parts = typing.get_args(kind)
        if parts[1:] == (...,):
            return [(one, _kinds(parts[0])) for one in value]
        if typing.get_origin(kind) is tuple and len(parts) == len(value):
            return list(zip(value, map(_kinds, parts), strict=True))
    return None


def _expected(value: Any, kinds: tuple[Any, ...], limits: Limits) -> str:
    """Describe the kinds and the range in words."""
    if float not in kinds and type(number(value)) is int and limits.allow(number(value)):  # int32 cannot hold it
        least = _INT32.min if limits.least is None else limits.least
        limits = dataclasses.replace(limits, least=least, most=_INT32.max if limits.most is None else limits.most)
    noun = f"{'an odd' if limits.odd else 'a'} whole number" if float not in kinds else "a finite number"
    words = ["True or False"] * (bool in kinds)
    for parts in (typing.get_args(kind) for kind in kinds if typing.get_origin(kind) is tuple):
        count = "" if ... in parts else f"{len(parts)} "
        inner = "tuples of " * (typing.get_origin(parts[0]) is tuple) + "whole " * (parts[0] is int)
        words.append(f"a tuple of {count}{inner}numbers, each{limits.words() or ' finite'}")
    if limits.choices:
        words.append(f"one of {', '.join(map(repr, limits.choices))}")
    elif int in kinds or float in kinds:
        near = isinstance(value, str) or type(number(value)) is float
        shares = ", or a share between 0 and 1" * (limits.within is not None and near)
        words.append(noun + limits.words() + (shares if int in kinds else ""))
    elif str in kinds:
        words.append("a text")
    return " or ".join(words + ["None"] * (type(None) in kinds))


def shown(value: Any) -> str:
    """Write ``value`` for a message: a scalar by its value, an array by its dtype, shape and values, a class by its name."""
    if _is_abstract(value):
        return f"a traced value of {value.dtype}"
    if isinstance(value, type):
        return f"the class {value.__name__}"
    if isinstance(value, (np.ndarray, jax.Array)) and value.ndim:
        return f"{value.dtype}{list(value.shape)} {known(value)!s:.60}"
    read = number(value)
    try:
        return f"{value if read is None else read!r:.80}"
    except RecursionError:  # lists in lists, thousands deep
        return f"a {type(value).__name__} that is nested too deeply to show"


def _is_abstract(value: Any) -> bool:
    """Tell whether ``value`` stands for values that Python cannot read."""
    return isinstance(value, (Tracer, jax.ShapeDtypeStruct)) or (isinstance(value, jax.Array) and value.is_deleted())


def _kinds(hint: Any) -> tuple[Any, ...]:
    """List the members of a union, or the only type."""
    return typing.get_args(hint) if typing.get_origin(hint) in (types.UnionType, typing.Union) else (hint,)


@functools.cache
def declared(owner: type) -> dict[str, tuple[tuple[Any, ...], Limits, bool]]:
    """Collect the kinds and the limits of each field that holds numbers or texts, and whether the field is static."""
    try:
        hints = typing.get_type_hints(owner)
    except NameError as error:
        raise TypeError(
            f"{owner.__name__}: an annotation cannot be read, expected names that its module imports, got: {error}"
        ) from error
    fields = {}
    for field in dataclasses.fields(owner):
        kinds = _kinds(hints[field.name])
        if {bool, int, float, str} & {*kinds} or any(typing.get_origin(kind) is tuple for kind in kinds):
            kinds = kinds if field.default is not None or type(None) in kinds else (*kinds, type(None))
            fields[field.name] = kinds, field.metadata.get("limits", Limits()), field.metadata.get("static", False)
    return fields
