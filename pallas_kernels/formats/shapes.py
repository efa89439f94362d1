"""The language in which operations declare the shapes at which they are timed: sizes, fills of arguments, `Timed`.

Every operation declares its shapes in the file ``timed.py`` of its folder. No kernel imports that file: whoever times the
kernels does. Sizes go by the axis letters of the operation's docstring: a fill of "B H S D" is an array of these sizes.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.formats.packed_vectors import words_of
from pallas_kernels.formats.quantised import quantise

CONTEXT = 131072  # tokens of a long context
# Of Llama-3.1-8B: rows, KV heads, query heads of each, channels, and the dtype of vectors.
LAYER = {"B": 1, "H": 8, "G": 4, "D": 128, "dtype": "bfloat16"}


class Sizes(types.SimpleNamespace):
    """The sizes of a shape as attributes: axis letters, and whatever else tells shapes apart."""

    @property
    def scale(self) -> float:
        """The factor of the logits."""
        return 1 / math.sqrt(self.D)

    def along(self, axes: str) -> tuple[int, ...]:
        """Return the sizes of axes such as "B H S D"; a number stands for itself."""
        return tuple(int(axis) if axis.isdigit() else getattr(self, axis) for axis in axes.split())

    def amount(self, value: Any) -> Any:
        """Return the size of that name, the result of a function of the sizes, or any other value as it is."""
        return getattr(self, value) if isinstance(value, str) else value(self) if callable(value) else value


class Drawing(Sizes):
    """Sizes with a source of randomness, and the arguments that are drawn already.

    Attributes:
        keys: PRNG keys, each for one array.
        random: the functions of `jax.random`, or others of their names.
        arrays: arguments in the order of the declaration, so far.
    """

    keys: Iterator[Array]
    random: Any
    arrays: dict[str, Any]


type Fill = Callable[[Drawing], Any]
type Amount = str | float | Callable[[Sizes], Any]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Timed:
    """The declaration of an operation's timed shapes.

    Attributes:
        label: a shape in words, unique among the operation's: a template such as "{S} tokens", or a function of the sizes.
        sizes: by name, besides `LAYER`: a size of all shapes, or a function of the sizes in front of it.
        shapes: the sizes in which each shape differs from these.
        tiny: sizes that a test can run, besides two heads of 16 channels: a value, or a function of the full size.
        arrays: how each array that the operation takes is drawn, by the names of its arguments; None leaves one out.
        options: arguments of the operation that are no arrays, from the sizes.
        reads: the arrays that every implementation must read once, or a function that counts bytes.
        chained: the float argument that a timing loop makes depend on the run before; None if the loop passes another array.
        tolerance: largest relative error of floats; integers and truth values must be equal.
        float32: whether the reference is plain JAX on float32; otherwise it is plain JAX on the same arrays.
        defined: from a result and the sizes, the part of the result that all implementations agree on.
    """

    label: str | Callable[[Sizes], str]
    sizes: Mapping[str, Any]
    shapes: tuple[Mapping[str, Any], ...] = ({},)
    tiny: Mapping[str, Any]
    arrays: Mapping[str, Fill]
    options: Callable[[Sizes], dict[str, Any]] = lambda n: {}
    reads: tuple[str, ...] | Callable[[Sizes], int]
    chained: str | None = "query"
    tolerance: float = 0.02
    float32: bool = True
    defined: Callable[[Any, Sizes], Any] = lambda result, n: result

    def listed(self, tiny: bool = False, wide: bool = False) -> list[Shape]:
        """Return the shapes at which the operation is timed.

        Args:
            tiny: make them in sizes that a test can run.
            wide: leave the channels of a head as they are: kernels for TPUs take whole tiles only.
        """
        small = {**self.tiny, "H": lambda H: min(H, 2), **({} if wide else {"D": 16})} if tiny else {}
        return [self.at(**{**shape, **_resized({**LAYER, **self.sizes, **shape}, small)}) for shape in self.shapes]

    def at(self, **sizes: Any) -> Shape:
        """Return a shape that has these sizes, and all others as they are declared."""
        resolved = Sizes()
        for name, size in {**LAYER, **self.sizes, **sizes}.items():
            setattr(resolved, name, size(resolved) if callable(size) else size)
        return Shape(self, resolved)


def _resized(full: Mapping[str, Any], small: Mapping[str, Any]) -> dict[str, Any]:
    return {name: size(full[name]) if callable(size) else size for name, size in small.items()}


@dataclasses.dataclass(frozen=True)
class Shape:
    """A shape at which an operation is timed.

    Attributes:
        timed: the declaration.
        sizes: by name.
    """

    timed: Timed
    sizes: Sizes

    @property
    def name(self) -> str:
        """The shape in words, unique among the shapes of an operation."""
        label = self.timed.label
        return label.format_map(vars(self.sizes)) if isinstance(label, str) else label(self.sizes)

    @property
    def options(self) -> dict[str, Any]:
        """Arguments of the operation that are no arrays, by name."""
        return self.timed.options(self.sizes)

    @property
    def bytes_read(self) -> int:
        """Bytes that every implementation must read: over the bandwidth, the floor of its time."""
        if callable(self.timed.reads):
            return self.timed.reads(self.sizes)
        arrays = jax.eval_shape(self.draw, jax.random.key(0))
        return sum(x.size * x.dtype.itemsize for x in jax.tree.leaves([arrays[name] for name in self.timed.reads]))

    def draw(self, key: Array, random: Any = jax.random) -> dict[str, Any]:
        """Draw the arrays that the operation takes, by the names of its arguments.

        Args:
            key: a typed PRNG key, as ``jax.random.key`` makes it.
            random: has the functions of `jax.random` that fills call.
        """
        arrays: dict[str, Any] = {}
        drawing = Drawing(**vars(self.sizes), keys=_keys(key, random), random=random, arrays=arrays)
        for name, fill in self.timed.arrays.items():
            array = fill(drawing)
            if array is not None:
                arrays[name] = array
        return arrays


def _keys(key: Array, random: Any) -> Iterator[Array]:
    while True:
        key, one = random.split(key)
        yield one


def few(number: int) -> int:
    """Divide a number of slots or pages by 512, to 16 at least."""
    return max(16, number // 512)


def normal(axes: str, dtype: DTypeLike | None = None) -> Fill:
    """Standard normal values, in the dtype of vectors if no other is named."""
    return lambda d: d.random.normal(next(d.keys), d.along(axes), jnp.float32).astype(dtype or d.dtype)


def rounded(axes: str) -> Fill:
    """Standard normal values, in codes of 8 bits where the size ``kind`` names a format of them."""

    def fill(d: Drawing) -> Any:
        values = normal(axes)(d)
        return values if d.kind is None else quantise(values, d.kind)

    return fill


def integers(axes: str, below: Amount, dtype: DTypeLike = jnp.int32) -> Fill:
    """Random integers from 0 to ``below`` - 1."""
    return lambda d: d.random.randint(next(d.keys), d.along(axes), 0, d.amount(below), jnp.int32).astype(dtype)


def full(axes: str, value: Amount, dtype: DTypeLike = jnp.int32) -> Fill:
    """The same value everywhere."""
    return lambda d: jnp.full(d.along(axes), d.amount(value), dtype)


def counted(axes: str, first: Amount = 0) -> Fill:
    """int32: the integers from ``first`` along the last axis, such as the positions of a full cache."""

    def fill(d: Drawing) -> Array:
        shape = d.along(axes)
        return jnp.broadcast_to(d.amount(first) + jnp.arange(shape[-1], dtype=jnp.int32), shape)

    return fill


def lists(axes: str, below: Amount, first: Amount = 0) -> Fill:
    """int32: along the last axis different random numbers in ascending order, below ``below``; ``first`` is added."""

    def fill(d: Drawing) -> Array:
        *rows, count = d.along(axes)

        def draw(key: Array) -> Array:
            return jnp.sort(d.random.choice(key, d.amount(below), (count,), replace=False))

        drawn = jax.vmap(draw)(d.random.split(next(d.keys), math.prod(rows))).reshape(*rows, count)
        return d.amount(first) + drawn.astype(jnp.int32)

    return fill


def frequencies(d: Drawing) -> Array:
    """Frequencies of a rotary embedding: float32 [D / 2]."""
    return jnp.exp(-jnp.arange(d.D // 2, dtype=jnp.float32))


def orthogonal(axes: str) -> Fill:
    """Orthogonal bases in the last two axes: float32."""
    return lambda d: jnp.linalg.qr(normal(axes, jnp.float32)(d))[0]


def packed(axes: str, rank: Amount) -> Fill:
    """Packed vectors of D channels for ``axes``: random values [..., r], and bitmaps of r different channels."""

    def fill(d: Drawing) -> tuple[Array, Array]:
        lead, r = d.along(axes), d.amount(rank)
        odd, shift = (d.random.randint(next(d.keys), (*lead, 1), 0, d.D, jnp.int32) for _ in range(2))
        channel = jnp.arange(d.D, dtype=jnp.int32).reshape((1,) * len(lead) + (d.D,))
        # Below a power of two, multiplication by an odd number is a permutation of the integers.
        kept = (channel * (2 * odd + 1) + shift) % d.D < r
        bit = jnp.left_shift(jnp.int32(1), jnp.arange(8, dtype=jnp.int32)).reshape((1,) * (len(lead) + 1) + (8,))
        bitmap = jnp.sum(jnp.where(kept.reshape(*lead, d.D // 8, 8), bit, 0), axis=-1).astype(jnp.uint8)
        return d.random.normal(next(d.keys), (*lead, r), jnp.float32).astype(d.dtype), words_of(bitmap)

    return fill
