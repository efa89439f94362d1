"""Every field of every method refuses what it cannot hold, by name. Nothing here is compiled."""

import dataclasses
import math
import types
import typing

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax import registry
from kvjax.methods import H2O, PQCache, Quest, RetroInfer, SnapKV
from kvjax.protocol.describe import describe
from kvjax.protocol.fields import Limits, at_length, check_within, known, number, share
from kvjax.protocol.method import Method
from kvjax.protocol.typing import pytree, static, traced
from kvjax.wrappers import DenseBelow, Periodic, Prefill, Twilight
from tests.harness import NAMES, example, oracle

CLASSES = {
    **registry.classes(), "dense_below": DenseBelow, "periodic": Periodic, "twilight": Twilight,
    "prefill": Prefill,
}  # fmt: skip
NEEDED = {  # fields without a default
    "dense_below": {"method": Quest(), "length": 9}, "periodic": {"evict": SnapKV()}, "twilight": {"method": Quest()},
    "prefill": {"method": Quest()},
}  # fmt: skip
ALWAYS = (math.nan, math.inf, -math.inf, [12], {}, object(), 1j, np.float32("nan"), jnp.float32(jnp.inf), Quest, Quest())


def kinds_of(cls):
    """The kinds of each field, from its annotation and a default of None; fields that hold methods are left out."""
    for name, hint in typing.get_type_hints(cls).items():
        if name in cls.__dataclass_fields__ and typing.get_origin(hint) is not typing.ClassVar:
            kinds = set(typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,))
            kinds |= {type(None)} if cls.__dataclass_fields__[name].default is None else set()
            if not any(isinstance(kind, type) and issubclass(kind, Method) for kind in kinds):
                yield name, kinds


def wrong(kinds):
    """Values that no field of these kinds can hold."""
    yield from ALWAYS
    if typing.Any in kinds:  # an array of truth values
        return
    if float not in kinds:
        yield from (4.0, 1.5, np.float64(4.0), jnp.float32(4.0), np.array(4.0))
    if int in kinds and float not in kinds:
        yield from (2**40, -(2**40), 2**70, np.int64(2**40))
    if not kinds & {int, float}:
        yield from (12, np.int64(12), jnp.int32(12))
    if str not in kinds:
        yield from ("12", np.str_("12"))
    if bool not in kinds:
        yield from (True, np.bool_(False), jnp.bool_(True))
    if type(None) not in kinds:
        yield None
    yield from ((0.5, 0.5, math.nan), (0.5, 0.5, "x"))
    if tuple[float, ...] not in kinds:
        yield (0.5, 0.5)
    if not kinds & {tuple[int, ...], tuple[float, ...]}:
        yield from ((12,), ())
    if jax.Array not in kinds:
        yield from (np.array([12]), jnp.array([12]))
    else:
        yield from (np.array([math.nan, 1]), np.array([True]), np.array(["12"]))


def refuses(name, field, value):
    cls = CLASSES[name]
    with pytest.raises((ValueError, TypeError)) as error:
        cls(**{**NEEDED.get(name, {}), field: value})
    text = str(error.value)
    assert text.startswith(cls.__name__) and field in text and "must be" in text and "got" in text, text
    assert "\n" not in text and len(text) < 400, text


@pytest.mark.parametrize("name", CLASSES)
def test_other_kinds_are_refused(name):
    for field, kinds in kinds_of(CLASSES[name]):
        for value in wrong(kinds):
            refuses(name, field, value)


@pytest.mark.parametrize("name", CLASSES)
def test_numbers_beyond_their_limits_are_refused(name):
    """The limits that a field declares hold for Python's, NumPy's and JAX's numbers, and in arrays."""
    for field in dataclasses.fields(CLASSES[name]):
        limits = field.metadata.get("limits", Limits())
        kinds = dict(kinds_of(CLASSES[name])).get(field.name, ())
        beyond = [] if limits.least is None else [limits.least - 1]
        beyond += [] if limits.above is None else [limits.above, limits.above - 1]
        beyond += [] if limits.most is None else [limits.most + 1]
        beyond += [2, 4] if limits.odd else []
        for value in beyond:
            whole = int in kinds
            made = [value, np.int64(value), jnp.int32(value)] if whole else [value, np.float32(value), jnp.float32(value)]
            made += [np.array([value, value])] if jax.Array in kinds else []
            for one in [(0.5, 0.5, x) for x in made] if not kinds & {int, float} else made:
                refuses(name, field.name, one)
        if limits.choices:
            refuses(name, field.name, "no such choice")


@pytest.mark.parametrize("name", CLASSES)
def test_every_number_is_limited(name):
    """A field for a number says its range, unless every finite number means something."""
    free = {"chess": {"tau_entropy", "tau_varentropy"}, "freekv": {"tau"}, "pariskv": {"seed"}, "tokenselect": {"theta"}}
    for field in dataclasses.fields(CLASSES[name]):
        if dict(kinds_of(CLASSES[name])).get(field.name, set()) & {int, float}:
            assert (field.metadata.get("limits", Limits()) == Limits()) == (field.name in free.get(name, ())), field.name


@pytest.mark.parametrize("name", NAMES)
def test_values_that_cannot_be_read_pass(name):
    """JAX rebuilds a method from tracers, shapes and sentinels; and from arrays, for which it must not wait."""
    method = kvjax.make(name)
    for leaf in (object(), None, jax.ShapeDtypeStruct((), jnp.int32), -1):
        rebuilt = jax.tree.map(lambda x, leaf=leaf: leaf, method)
        assert type(rebuilt) is type(method) and all(x is leaf for x in jax.tree.leaves(rebuilt))
    same = jax.eval_shape(lambda method: dataclasses.replace(method), method)  # the leaves are traced, and checked again
    assert jax.tree.structure(same) == jax.tree.structure(method)


@pytree
class Mine(Method):
    """A method of somebody else, who declares fields and gets their checks."""

    size: int = static(default=3, least=1)
    share: float | jax.Array = traced(default=0.5, above=0, within="largest")
    largest: float | None = static(default=None)
    pair: tuple[int, ...] = static(default=(1, 2), most=9)

    def check(self):
        if self.size > 8:
            raise ValueError(f"Mine: size must be at most 8, got {self.size}")

    def for_layer(self, layer, num_layers):
        raise NotImplementedError


def test_a_declared_field_is_checked():
    made = Mine(size=np.int64(4), share=1, pair=(np.int32(3),))
    assert repr(made) == describe(made) == "Mine(size=4, share=1.0, largest=1.0, pair=(3,))"
    assert hash(made.pair) == hash((3,)) and type(made.pair[0]) is int
    for knobs, message in (
        ({"size": 9}, "Mine: size must be at most 8, got 9"),
        ({"size": 2.5}, "Mine: size must be a whole number of at least 1, got 2.5"),
        ({"size": 2**31}, "Mine: size must be a whole number from 1 to 2147483647, got 2147483648"),
        ({"share": 0}, "Mine: share must be a finite number above 0, got 0"),
        ({"share": 0.5, "largest": 0.25}, "Mine: share must be at most largest=0.25, got 0.5"),
        ({"largest": math.inf}, "Mine: largest must be a finite number or None, got inf"),
        ({"pair": (1, 10)}, "Mine: pair must be a tuple of whole numbers, each at most 9, got (1, 10)"),
        ({"sise": 2}, "Mine has no knob 'sise' (did you mean 'size'?); it has: size, share, largest, pair"),
    ):
        with pytest.raises(ValueError) as error:
            Mine(**knobs)
        assert str(error.value) == message


def test_a_budget_may_be_a_share_in_all_methods():
    """A number between 0 and 1, as `share` makes it of the batch's longest prompt; there is no other budget of tokens."""
    for name, cls in registry.known().items():
        for field in dataclasses.fields(cls):
            assert ("budget" in field.name) == (field.metadata.get("limits", Limits()).within == "capacity" and "int" in str(
                field.type)), f"{name}.{field.name}"  # fmt: skip
    for part in (0.25, np.float32(0.25)):
        quest = Quest(budget=part)
        assert quest == Quest(budget=share(0.25)) and at_length(quest, 1000, 1024) == Quest(budget=250, capacity=256)
    for wrong in (0.0, 1.0, 1.5, -0.25, math.nan, True):
        with pytest.raises(ValueError, match="budget"):
            Quest(budget=wrong)
    with pytest.raises(ValueError, match=r"a whole number of at least 1, or a share between 0 and 1, got '1/8'"):
        Quest(budget="1/8")


def test_a_share_of_float32_is_within_the_same_share_of_float64():
    """float32's 0.1 is above Python's. A cache's method has float32 leaves under a bound from Python."""
    made = Mine(share=jnp.float32(0.1), largest=0.1)
    assert dataclasses.replace(made).largest == 0.1
    check_within(made, "share", "largest")


def test_only_numbers_that_can_be_read_are_known():
    assert number(np.float32(2)) == number(jnp.float32(2)) == number(2.0) == 2.0
    assert number(None) is number("2") is number([2]) is number(np.array([2])) is number(jax.random.key(0)) is None
    assert known(jnp.array([1, 2])).tolist() == [1, 2]
    consumed = jnp.int32(3)
    consumed.delete()
    assert known(consumed) is None
    assert Mine(share=consumed, largest=1.0).share is consumed, "a consumed number cannot be read"
    assert jax.eval_shape(lambda x: jnp.int32(known(x) is None), 3).shape == ()


@pytest.mark.parametrize("name", [name for name in NAMES if "budget" in oracle(name).KNOBS])
def test_a_traced_value_is_moved_into_its_range(name):
    """Both ends are what Python numbers may be; the knob's text says so."""
    most = oracle(name).KNOBS["budget"]
    made = jax.vmap(lambda budget: example(name, budget=budget, capacity=most).budget)(jnp.array([-3, most, 10 * most]))
    least = int(made[0])
    assert made.tolist() == [least, most, most] and example(name, budget=least, capacity=most)
    with pytest.raises(ValueError, match="budget"):
        example(name, budget=least - 1, capacity=most)
    (knob,) = [knob for knob in registry.knobs(registry.classes()[name]) if knob.name == "budget"]
    assert "nearest allowed" in knob.doc


def test_traced_numbers_of_other_kinds_are_moved_too():
    def made(share):
        return RetroInfer(estimated=share).estimated, PQCache(fraction=share, capacity=0.5).fraction

    estimated, fraction = jax.vmap(made)(jnp.array([-1.0, 0.25, 2.0]))
    np.testing.assert_allclose(estimated, [0, 0.25, 1])
    np.testing.assert_allclose(fraction, [1e-6, 0.25, 0.5])
    recent = jax.vmap(lambda few: H2O(budget=8, num_recent=few).num_recent)(jnp.array([0, 3, 8]))
    assert recent.tolist() == [1, 3, 7]
    with pytest.raises(ValueError, match="capacity must be a whole number of at least 32 tokens"):
        jax.vmap(lambda budget: SnapKV(budget=budget, capacity=8).budget)(jnp.array([8]))


def test_what_cannot_be_traced_is_refused():
    for kind, message in (
        (
            lambda x: SnapKV(budget=x, capacity=64),
            "SnapKV: budget must be a whole number of at least 1, got a traced value of f",
        ),
        (
            lambda x: Quest(page_size=x),
            r"Quest: page_size \(static\) must be a whole number of at least 1, got a traced value of",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            jax.vmap(lambda x, kind=kind: kind(x).budget)(jnp.array([0.25, 0.5]))
