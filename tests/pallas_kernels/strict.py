"""Kernels for GPUs interpreted as strictly as a GPU's memory is: what JAX's interpreter forgives becomes a wrong result.

JAX's interpreter lets index -1 read the last element, moves a slice that ends behind its array, and gives a masked load
without ``other`` what stands there. A GPU reads other memory then, or ends the process. Here every read and write is checked:
where a lane that no mask hides is out of range, all results of the kernel are spoilt; a hidden lane without ``other`` reads
a number that spoils what it enters, and a hidden lane writes nothing. Every block must begin in its array.
"""

import contextlib
import itertools
import types
from unittest import mock

import jax
import jax.numpy as jnp

from pallas_kernels._triton import call
from pallas_kernels._triton.pallas import pl, plt

_Slice = type(pl.ds(0, 1))
_program_id = pl.program_id
_WRONG = 1
_MOST_PROGRAMS = 256  # whose blocks are looked at; of a larger grid the programs at its corners


def spoilt(x):
    """What no test expects, in the dtype of ``x``: NaN, a large negative number, or the other truth value."""
    if x.dtype == jnp.bool_:
        return ~x
    return jnp.full_like(x, jnp.nan if jnp.issubdtype(x.dtype, jnp.inexact) else jnp.iinfo(x.dtype).min + 7)


class _Program:
    """One program of a kernel: where wrong accesses are noted, and the axes of its grid, whose numbers are in range."""

    def __init__(self, fault, grid):
        self._fault, self._grid, self._known = fault, grid, {}

    def program_id(self, axis):
        number = _program_id(axis)
        self._known[id(number)] = number, self._grid[axis]
        return number

    def within(self, x, size):
        """Tell whether an index is a program's number on an axis no longer than ``size``: it needs no check."""
        return id(x) in self._known and self._known[id(x)][1] <= size

    def expect(self, right):
        self._fault[0] = jax.lax.select(jnp.all(right), self._fault[0], jnp.int32(_WRONG))


class _Ref:
    """A ref of a kernel, or a part of one, whose accesses are checked."""

    def __init__(self, ref, program, index=...):
        self.ref, self._program, self._index = ref, program, index

    @property
    def at(self):
        assert self._index is ..., "got a part of a part, expected one index"
        return _At(self.ref, self._program)

    def __getattr__(self, name):
        return getattr(self.ref, name)

    def __getitem__(self, index):
        return _load(self.at[index])

    def __setitem__(self, index, value):
        _store(self.at[index], value)

    def checked(self, mask=None):
        """Note lanes that are out of range and not hidden; return an index for each axis."""
        index = self._index if isinstance(self._index, tuple) else (self._index,)
        if any(x is ... for x in index):
            at = next(i for i, x in enumerate(index) if x is ...)
            index = (*index[:at], *[slice(None)] * (len(self.shape) - len(index) + 1), *index[at + 1 :])
        index = (*index, *[slice(None)] * (len(self.shape) - len(index)))
        pieces, inside = False, True
        for x, size in zip(index, self.shape, strict=True):
            if isinstance(x, slice):
                assert x == slice(None), f"got {x}, expected pl.ds"
                pieces = True
            elif isinstance(x, _Slice):
                pieces = True
                inside &= _below(x.start, size - x.size + 1)
            elif not self._program.within(x, size):
                inside &= _below(x, size)
        if inside is not True:
            shown = True if mask is None else jnp.any(mask) if pieces else mask
            self._program.expect(inside if shown is True else inside | ~shown)
        return index


def _below(x, size):
    """Tell where 0 <= x < size."""
    if isinstance(x, int):
        return 0 <= x < size
    return x.astype(jnp.uint32) < size  # a negative number becomes a large one


class _At:
    def __init__(self, *ref):
        self._of = ref

    def __getitem__(self, index):
        return _Ref(*self._of, index)


def _load(part, *, mask=None, other=None, **_):
    found = part.ref[part.checked(mask)]
    if mask is None:
        return found
    return jnp.where(mask, found, spoilt(found) if other is None else jnp.asarray(other, found.dtype))


def _store(part, value, *, mask=None):
    index = part.checked(mask)
    if mask is not None:
        arrays = [i for i, x in enumerate(index) if isinstance(x, jax.Array) and x.ndim]
        if arrays:  # an index behind the array is not written
            first, mask = arrays[0], jnp.broadcast_to(mask, value.shape)
            behind = jnp.where(mask, jnp.broadcast_to(index[first], mask.shape), part.shape[first])
            shapes = {i: behind if i == first else jnp.broadcast_to(index[i], mask.shape) for i in arrays}
            index = tuple(shapes.get(i, x) for i, x in enumerate(index))
        else:
            value = jnp.where(mask, value, part.ref[index])
    part.ref[index] = value


def _unchecked(run):
    """Call ``run(ref, index, value)`` of JAX for a checked ref."""

    def called(ref, index, value, **more):
        return run(ref.ref, ref.at[index].checked(), value, **more)

    return called


def _check_blocks(specs, arrays, grid):
    """Assert that the block of every program begins in its array."""
    few = [range(n) if n * len(grid) <= _MOST_PROGRAMS else (0, n - 1) for n in grid]
    for spec, array in zip(specs, arrays, strict=True):
        for program in itertools.product(*few):
            block = spec.index_map(*program)
            sizes = [1 if size is None else size for size in spec.block_shape]
            there = [0 <= at * size < of for at, size, of in zip(block, sizes, array.shape, strict=True) if of]
            assert all(there), f"program {program} of {grid}: got block {block} of {spec.block_shape} in {array.shape}"


def _strict_call(kernel, *, out_shape, interpret, grid, in_specs=None, out_specs=None, **options):
    """Make a ``pallas_call`` whose interpreted kernel is checked."""
    if not interpret:
        more = {name: x for name, x in (("in_specs", in_specs), ("out_specs", out_specs)) if x is not None}
        return pl.pallas_call(kernel, out_shape=out_shape, interpret=False, grid=grid, **more, **options)
    leaves, structure = jax.tree.flatten(out_shape)
    more = {}
    if out_specs is not None:
        own = jax.tree.leaves(out_specs)
        more = {"in_specs": in_specs, "out_specs": [*own, pl.BlockSpec((1,), lambda *_: (0,))]}
        _check_blocks(own, leaves, grid)

    def checked(*refs):
        *refs, fault = refs
        program = _Program(fault, grid)
        with (
            mock.patch.multiple(plt, load=_load, store=_store, atomic_add=_unchecked(plt.atomic_add)),
            mock.patch.object(jax.ref, "addupdate", _unchecked(jax.ref.addupdate)),
            mock.patch.object(pl, "program_id", program.program_id),
        ):
            kernel(*(_Ref(ref, program) for ref in refs))

    run = pl.pallas_call(
        checked, out_shape=[*leaves, jax.ShapeDtypeStruct((1,), jnp.int32)], interpret=True, grid=grid, **more, **options
    )

    def called(*operands):
        if in_specs is not None:
            _check_blocks(jax.tree.leaves(in_specs), operands, grid)
        *results, fault = run(*operands)
        results = [jnp.where(fault[0] == _WRONG, spoilt(x), x) for x in results]
        return jax.tree.unflatten(structure, results)

    return called


@contextlib.contextmanager
def strict():
    """Check every access of the kernels for GPUs that are interpreted within."""
    with mock.patch.object(call, "pl", types.SimpleNamespace(pallas_call=_strict_call)):
        yield
