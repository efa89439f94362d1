"""Declared signatures: the language on one example, and for every operation that what is declared is refused otherwise."""

import importlib
import inspect
import math
import typing
from typing import Annotated, Literal, NamedTuple

import jax
import jax.numpy as jnp
import pytest
from jax import Array

import pallas_kernels
from pallas_kernels.dispatch import Implementation, Operation
from pallas_kernels.formats.quantised import quantise
from pallas_kernels.signature import _parts, declared, forward

SIZES = {
    "B": 2, "C": 12, "D": 32, "E": 16, "G": 4, "H": 3, "K": 9, "L": 10, "M": 2, "N": 23, "P": 11, "R": 8, "S": 7, "T": 5,
    "W": 6, "Z": 13, "block": 4, "page_size": 3,
}  # fmt: skip


class Turn(NamedTuple):
    speed: Array
    first: int


OPERATION = Operation("op", {"xla": Implementation(lambda *args, **kwargs: (args, kwargs))})


@declared(OPERATION)
def op(
    query: Annotated[Array, "float32|bfloat16 B G D; B G T D with place"],
    key: Annotated[Array, "like query B H|1 S>=K D"],
    mask: Annotated[Array | None, "bool like key or B S"],
    *,
    rate: Annotated[Array, "floating D/2"],
    block: Annotated[int, ">=2"] = 4,
    pages: Annotated[Array | None, "int32 B ceil(S/block)"] = None,
    place: Annotated[Array | None, "int32 B T"] = None,
    pair: Annotated[tuple[Array, Array] | None, "B K _", "like rate"] = None,
    turn: Annotated[Turn | None, "speed: float32 H"] = None,
    count: Annotated[Array | int, "int32 [] or B"] = 1,
    reduce: Literal["max", "sum"] = "max",
    implementation: str | None = None,
    platform: str | None = None,
) -> tuple:
    """Say what it gets.

    Args:
        key: may be long.
        place: in tokens,
            of the row.
        implementation: it is fast.

    Returns:
        The arguments.
    """
    if block == 13:
        raise ValueError("op: got block=13, expected luck")
    return forward(lambda result: result[1], block=block + 1) if reduce == "sum" else forward()


def arguments(**changes):
    plain = {"query": jnp.ones((2, 4, 8)), "key": jnp.ones((2, 3, 10, 8)), "mask": None, "rate": jnp.ones(4)}
    return plain | changes


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"key": jnp.ones((2, 1, 10, 8))},
        {"key": quantise(jnp.ones((2, 3, 10, 8)), "int8")},
        {"mask": jnp.ones((2, 3, 10, 8), bool)},
        {"mask": jnp.ones((2, 10), bool)},
        {"pages": jnp.ones((2, 3), jnp.int32)},
        {"pages": jnp.ones((2, 5), jnp.int32), "block": 2},
        {"place": jnp.ones((2, 5), jnp.int32), "query": jnp.ones((2, 4, 5, 8))},
        {"pair": (jnp.ones((2, 10, 7)), jnp.ones(4))},
        {"turn": Turn(jnp.ones(3), 1)},
        {"count": jnp.int32(3)},
        {"count": jnp.ones(2, jnp.int32)},
    ],
)
def test_what_is_declared_reaches_the_operation(changes):
    passed = arguments(**changes)
    (query, key, mask), rest = op(**passed)
    assert query is passed["query"] and key is passed["key"] and mask is passed["mask"]
    assert rest.keys() == {"rate", "block", "pages", "place", "pair", "turn", "count", "reduce"}
    assert all(rest[name] is value for name, value in passed.items() if name in rest)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"query": jnp.ones((2, 4, 5, 8))}, r"op: got query float32 \(2, 4, 5, 8\), .* \[B, G, D\]"),
        ({"query": jnp.ones((2, 4, 8), jnp.float16)}, "query float16"),
        ({"query": None}, "query None"),
        ({"key": jnp.ones((2, 3, 10, 6))}, r"key .* in the dtype of query, B=2, D=8"),
        ({"key": jnp.ones((2, 3, 10, 8), jnp.bfloat16)}, "key bfloat16"),
        ({"key": jnp.ones((2, 3, 2, 8)), "pair": (jnp.ones((2, 3, 1)), jnp.ones(4))}, "key"),
        ({"mask": jnp.ones((2, 3, 9, 8), bool)}, "mask"),
        ({"rate": jnp.ones(3)}, r"rate float32 \(3,\), expected floating \[D/2\], D=8"),
        ({"rate": jnp.ones(4, jnp.int32)}, "rate int32"),
        ({"block": 1}, "block=1, expected at least 2"),
        ({"block": 13}, "block=13, expected luck"),
        ({"pages": jnp.ones((2, 4), jnp.int32)}, "pages"),
        ({"place": jnp.ones((2, 5), jnp.int32)}, r"query .*\[B, G, T, D\] with place"),
        ({"pair": (jnp.ones((2, 11, 7)), jnp.ones(4))}, "key"),
        ({"pair": (jnp.ones((2, 10, 7)),)}, r"pair\[1\] None"),
        ({"turn": Turn(jnp.ones(2), 1)}, "turn.speed"),
        ({"count": jnp.ones((2, 1), jnp.int32)}, "count"),
        ({"count": 1.5 * jnp.ones(())}, "count float32"),
        ({"reduce": "mean"}, "reduce='mean', expected 'max' or 'sum'"),
        ({"implementation": "fast"}, "implementation"),
    ],
)
def test_what_is_not_declared_is_refused(changes, told):
    with pytest.raises(ValueError, match=told):
        op(**arguments(**changes))


def test_a_body_may_change_arguments_and_the_result():
    assert op(**arguments(reduce="sum", block=5))["block"] == 6
    with pytest.raises(TypeError, match="op: missing a required .*'rate'"):
        op(jnp.ones((2, 4, 8)), jnp.ones((2, 3, 10, 8)), None)


def test_traced_and_mapped_arguments_are_checked():
    query, rest = jnp.ones((5, 2, 4, 8)), arguments()
    assert jax.vmap(lambda x: op(**rest | {"query": x})[0][0])(query).shape == query.shape
    with pytest.raises(ValueError, match="query"):
        jax.jit(lambda x: op(**rest | {"query": x})[0][0])(query)


def test_help_shows_what_is_declared():
    text = inspect.getdoc(op)
    assert "    key: [B, H or 1, S>=K, D] in the dtype of query; may be long.\n" in text
    assert "    place: int32 [B, T]; in tokens,\n        of the row.\n" in text
    assert "    query: float32 or bfloat16 [B, G, D]; float32 or bfloat16 [B, G, T, D] with place\n" in text
    assert "    reduce: 'max' or 'sum'\n" in text and "one of xla; None takes the first that runs. it is fast." in text
    assert text.index("Returns:") < text.index("Raises:")


def functions():
    """The public functions of all operations that have a declared signature."""
    for room, name in pallas_kernels.operations():
        module = importlib.import_module(f"pallas_kernels.{room}.{name}")
        for at, function in sorted(vars(module).items()):
            if getattr(function, "__module__", None) == module.__name__ and hasattr(function, "__wrapped__"):
                yield pytest.param(function.__wrapped__ if isinstance(function, jax.custom_jvp) else function, id=at)


def size(axis):
    if axis.text == "_":
        return SIZES["Z"]
    return SIZES[axis.letter] if axis.letter else int(eval(axis.rule, {"ceil": math.ceil}, SIZES))


def draw(function):
    """Arguments that fit the declaration: a tree of shapes for each part of an argument, and numbers for what is static."""
    parts = list(_parts(typing.get_type_hints(inspect.unwrap(function), include_extras=True)))
    arguments = {x.name: None for x in inspect.signature(function).parameters.values()}
    shapes = {}
    for part in parts:
        if part.values or part.least is not None:
            arguments[part.name] = part.values[0] if part.values else SIZES.get(part.name, part.least)
        elif not isinstance(part.member, str):
            form = part.forms[-1]  # without a condition
            dtype = (form.dtypes[0] if form.dtypes else "float32").replace("floating", "float32")
            dtype = shapes[form.like, None].dtype if form.like else dtype
            axes = form.shapes[0]
            shape = shapes[axes, None].shape if isinstance(axes, str) else tuple(size(x) for x in axes if x.text != "...")
            shapes[part.name, part.member] = jax.ShapeDtypeStruct(shape, dtype)
    return parts, arguments, shapes


def call(function, arguments, shapes):
    for (name, member), shape in shapes.items():
        arguments = arguments | {name: shape if member is None else (*(arguments[name] or ()), shape)}
    return function(**arguments)


@pytest.mark.parametrize("function", list(functions()))
def test_every_declared_argument_is_checked(function):
    """Another word, a lower number; of an array, another rank, dtype, and size of an axis that another array has too."""
    parts, arguments, shapes = draw(function)
    conditions = {form.condition for part in parts for form in part.forms}
    shapes = {at: shape for at, shape in shapes.items() if at[0] not in conditions}
    forms = {(part.name, part.member): part.forms[-1] for part in parts if part.forms}
    drawn = [forms[at].shapes[0] for at in shapes]
    letters = [x.letter for axes in drawn if not isinstance(axes, str) for x in axes if x.letter]
    seen = 0
    for part in parts:
        if not part.forms:
            with pytest.raises(ValueError, match=part.name):
                call(function, arguments | {part.name: "other" if part.values else part.least - 1}, shapes)
            seen += 1
    for at, shape in shapes.items():
        form, other = forms[at], []
        axes = form.shapes[0]
        if len(form.shapes) == 1 and not (axes and not isinstance(axes, str) and axes[0].text == "..."):
            other.append((at[0], jax.ShapeDtypeStruct((1, *shape.shape), shape.dtype)))
        if form.dtypes or form.like:
            other.append((at[0], jax.ShapeDtypeStruct(shape.shape, "complex64")))
        if len(form.shapes) == 1 and not isinstance(axes, str):
            for index, axis in enumerate(x for x in axes if x.text != "..."):
                if (letters.count(axis.letter) > 1 and ">=" not in axis.text) or (axis.letter is None and axis.rule):
                    grown = tuple(x + (place == index) for place, x in enumerate(shape.shape))
                    other.append(("got", jax.ShapeDtypeStruct(grown, shape.dtype)))
        for told, changed in other:
            with pytest.raises(ValueError, match=told):
                call(function, arguments, shapes | {at: changed})
            seen += 1
    assert seen
