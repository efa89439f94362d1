"""Arrays in the registers of a warpgroup: thread t of 128 has the entries t, 128 + t, 256 + t, ... of each.

Pallas computes with such arrays and sums them up. What it has no operation for is here: loads and stores at any places.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.pallas import mgpu, pl, plgpu
from pallas_kernels._triton import rotate
from pallas_kernels.machine import current_machine

NAMES = "x", "y", "z"
MOST_PARTS = 8  # programs of a cluster
HOPPER = "a Hopper GPU"  # the only cards where these kernels have run


def check_hopper():
    """Raise ``NotImplementedError`` for other GPUs than those of compute capability 9.0."""
    if (capability := current_machine().capability) != (9, 0):
        raise NotImplementedError(f"got compute capability {capability}, expected (9, 0), where this kernel has run")


def program(body, out_type, *, grid, names=NAMES, scratch=(), parts=1, groups=1, approx=False):
    """Make a function that launches a program of 128 threads, or of several warpgroups, for each place of ``grid``.

    Args:
        body: the kernel, of refs of the operands, the results and the scratch memory.
        out_type: shapes and dtypes of the results, a list.
        grid: numbers of programs.
        names: of the axes of the grid.
        scratch: shared memory.
        parts: programs of a cluster, axis "part".
        groups: warpgroups of a program, axis "group". The compiler gives a thread of 3 at most 168 registers, and of 4 128.
        approx: exponentials and logarithms are one instruction, right to 2**-22.
    """
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        grid=grid,
        grid_names=names[: len(grid)],
        cluster=(parts,) if parts > 1 else (),
        cluster_names=("part",) if parts > 1 else (),
        num_threads=groups if groups > 1 else None,
        thread_name="group" if groups > 1 else None,
        kernel_name=_name_of(body),
        compiler_params=plgpu.CompilerParams(approx_math=approx, lowering_semantics=plgpu.LoweringSemantics.Lane),
    )


def _name_of(body):
    """Return the name of a kernel: that of its operation's folder, and of its function if that is not ``_body``."""
    body = getattr(body, "func", body)
    return body.__module__.split(".")[-2] + body.__name__.removeprefix("_body")


def in_place(body, states, *, grid, names=NAMES, out_type=(), scratch=(), parts=1):
    """Make a function like `program`'s, whose kernel also writes ``states``, arrays that it returns before its results.

    The body takes the operands, the states, the results and the scratch memory. XLA copies a state that its caller does not
    give up.
    """

    @jax.custom_batching.custom_vmap
    def launch(operands, states):
        kernel = program(body, [], grid=grid, names=names, scratch=scratch, parts=parts)
        return pl.run_state(lambda refs: kernel(*operands, *refs))(states)

    @launch.def_vmap
    def launch_all(size, mapped, operands, states):
        states = [
            x if is_mapped else jnp.broadcast_to(x, (size, *x.shape)) for x, is_mapped in zip(states, mapped[1], strict=True)
        ]
        axis, whole = f"of {size} at {len(grid)}", [*mapped[0], *[True] * len(states), *[False] * len(scratch)]

        @functools.partial(functools.update_wrapper, wrapped=getattr(body, "func", body))
        def one(*refs):
            at = lax.axis_index(axis)
            body(*(ref.at[at] if is_mapped else ref for ref, is_mapped in zip(refs, whole, strict=True)))

        results = in_place(one, states, grid=(size, *grid), names=(axis, *names), scratch=scratch, parts=parts)(*operands)
        return results, [True] * len(states)

    states = [*states, *(lax.empty(x.shape, x.dtype) for x in out_type)]

    def run(*operands):
        # In a loop XLA makes one fusion of a kernel and the slices that it reads or writes, and forgets which result is which
        # operand: the results would be memory that nobody wrote (findings/). The barriers keep the slices outside.
        return lax.optimization_barrier(launch(*lax.optimization_barrier((list(operands), states))))

    return run


FLOATS = frozenset(("bfloat16", "float16", "float32"))  # what `load` makes float32 of


def check_floats(*operands: jax.Array) -> None:
    """Raise ``NotImplementedError`` for dtypes that `load` does not take as floats."""
    if not (dtypes := {str(x.dtype) for x in operands}) <= FLOATS:
        raise NotImplementedError(f"got dtypes {sorted(dtypes)}, expected {sorted(FLOATS)}")


def size_of(entries: int) -> int:
    """Return the size of an array with at least so many entries."""
    return -(-entries // t.THREADS) * t.THREADS


def _own(size):
    return t.own(size // t.THREADS)


def _type(size, dtype=jnp.int32):
    return plgpu.ShapeDtypeStruct((size,), dtype, layout=_own(size))


def spread(x: jax.Array | float, size: int, dtype=jnp.int32) -> jax.Array:
    """Return an array of ``size`` times the same number."""
    return plgpu.layout_cast(jnp.broadcast_to(jnp.asarray(x, dtype), (size,)), _own(size))


def counted(size: int) -> jax.Array:
    """Return 0, 1, 2, ... as an array."""
    return plgpu.layout_cast(lax.iota(jnp.int32, size), _own(size))


def load(ref, index: jax.Array, other: float = 0, rows: tuple[jax.Array, int] | None = None) -> jax.Array:
    """Load the elements of an array in global memory at a flat ``index`` int32 [N]; where it is negative, return ``other``.

    Numbers of 16 bits become float32, and truth values int32.

    Args:
        ref: of any shape.
        index: below 2**31; with ``rows`` it counts from the beginning of a row.
        other: what stands for elements that are not read.
        rows: int32 [N], a row for each index, and the elements of a row. Then the array may have 2**31 elements or more.
    """
    size, dtype = index.shape[0], jnp.dtype(ref.dtype)
    floats, line, width = jnp.issubdtype(dtype, jnp.floating), *(rows or (index, 0))

    @plgpu.inline_mgpu(
        arg_types=(t.ref(), _own(size), _own(size)), return_type=_type(size, jnp.float32 if floats else jnp.int32)
    )
    def run(ctx, ref, index, line):
        places = _places(t.address(ref), index, line, width, dtype.itemsize)
        return t.made_of([t.load_at(place, dtype, x >= 0, other) for x, place in places], floats)

    return run(ref, index, line)


def store(ref, index: jax.Array, x: jax.Array, rows: tuple[jax.Array, int] | None = None) -> None:
    """Store numbers [N] in an array in global memory at a flat ``index`` int32 [N], where it is not negative; see `load`."""
    size, dtype = index.shape[0], jnp.dtype(ref.dtype)
    line, width = rows or (index, 0)

    @plgpu.inline_mgpu(arg_types=(t.ref(), _own(size), _own(size), _own(size)))
    def run(ctx, ref, index, line, x):
        numbers = t.numbers_of(x, jnp.issubdtype(dtype, jnp.floating))
        places = _places(t.address(ref), index, line, width, dtype.itemsize)
        for (at, place), number in zip(places, numbers, strict=True):
            t.store_at(place, number, dtype, at >= 0)

    run(ref, index, line, x)


def load_run(ref, index: jax.Array, count: int, rows: tuple[jax.Array, int] | None = None) -> jax.Array:
    """Load ``count`` neighbouring floats each from flat places ``index`` int32 [N] on, multiples of ``count``, as float32.

    Entry i * N + n of the result is number i at place n. ``rows`` as in `load`; ``count`` is a power of two up to 8.
    """
    size, dtype, (line, width) = index.shape[0], jnp.dtype(ref.dtype), rows or (index, 0)

    @plgpu.inline_mgpu(arg_types=(t.ref(), _own(size), _own(size)), return_type=_type(count * size, jnp.float32))
    def run(ctx, ref, index, line):
        places = _places(t.address(ref), index, line, width, dtype.itemsize)
        runs = [t.load_some(place, dtype, count) for _, place in places]
        return t.made_of([x for numbers in zip(*runs, strict=True) for x in numbers], floats=True)

    return run(ref, index, line)


def store_run(ref, index: jax.Array, x: jax.Array, rows: tuple[jax.Array, int] | None = None) -> None:
    """Store 8 neighbouring floats each, where ``index`` is not negative, as `load_run` loads them."""
    dtype, (line, width) = jnp.dtype(ref.dtype), rows or (index, 0)

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.own(1), t.own(1), t.own(8)))
    def run(ctx, ref, index, line, x):
        (at, place), *_ = _places(t.address(ref), index, line, width, dtype.itemsize)
        words = t.numbers_of(x, floats=True)
        if dtype.itemsize == 2:
            words = [w.pair(low, high, dtype) for low, high in itertools.batched(words, 2)]
        for first in range(0, len(words), 4):
            t.ptx(
                f"st.global.v4.b32 [$0 + {4 * first}], {{$1, $2, $3, $4}};", place, *words[first : first + 4], where=at >= 0
            )

    run(ref, index, line, x)


def _places(base, index, line, width, itemsize):
    """Yield the numbers of ``index`` and the addresses of their elements."""
    for x, row in zip(t.numbers_of(index), t.numbers_of(line), strict=True):
        yield x, t.at(base, t.element(row, width, x) if width else x, itemsize)


def scalar(ref, index: jax.Array) -> jax.Array:
    """Load one element of an array in global memory, at a flat index of all threads; as `load`, without masking."""
    dtype = jnp.dtype(ref.dtype)
    floats = jnp.issubdtype(dtype, jnp.floating)
    kind = plgpu.ShapeDtypeStruct((), jnp.float32 if floats else jnp.int32, layout=t.splat())

    @plgpu.inline_mgpu(arg_types=(t.ref(), t.splat()), return_type=kind)
    def run(ctx, ref, index):
        place = t.at(t.address(ref), t.number(t.value(index)), dtype.itemsize)
        return t.load_at(place, dtype, t.number(0) < 1, 0)

    return run(ref, index)


def put(ref, index: jax.Array, x: jax.Array) -> None:
    """Store one number in an array in global memory at a flat index, if that is not negative."""
    one = counted(t.THREADS)
    store(ref, jnp.where(one < 1, spread(index, t.THREADS), -1), spread(x, t.THREADS, x.dtype))


def repeated(x: jax.Array, times: int) -> jax.Array:
    """Repeat an array [N]: [N * times]."""
    floats = jnp.issubdtype(x.dtype, jnp.floating)

    @plgpu.inline_mgpu(arg_types=(_own(x.shape[0]),), return_type=_type(x.shape[0] * times, x.dtype))
    def run(ctx, x):
        return t.made_of(t.numbers_of(x, floats) * times, floats)

    return run(x)


def exchanged(x: jax.Array, distance: int) -> jax.Array:
    """Return for each entry of a float32 array that of the thread whose index differs by the bit ``distance``, below 32."""

    @plgpu.inline_mgpu(arg_types=(_own(x.shape[0]),), return_type=_type(x.shape[0], jnp.float32))
    def run(ctx, x):
        return t.made_of([t.shuffle(number, distance) for number in t.numbers_of(x, floats=True)], floats=True)

    return run(x)


def ballots(bit: jax.Array) -> jax.Array:
    """Return for each thread a word of its warp, int32 [128]: bit i tells whether entry i of the warp, int32, is not 0."""

    @plgpu.inline_mgpu(arg_types=(_own(t.THREADS),), return_type=_type(t.THREADS))
    def run(ctx, bit):
        return t.made_of([t.ballot(*t.numbers_of(bit))])

    return run(bit)


def meet() -> None:
    """Wait for all threads of the program: what they have read may be written then."""
    plgpu.inline_mgpu()(lambda ctx: mgpu.utils.warpgroup_barrier())()


def arrive(parts: int) -> None:
    """Say that this program has read what another one of the cluster may write after its `wait`, which has to follow."""
    if parts > 1:
        plgpu.inline_mgpu()(lambda ctx: t.ptx("barrier.cluster.arrive.aligned;"))()


def wait(parts: int) -> None:
    """Wait until all threads of all programs of the cluster have arrived."""
    if parts > 1:
        plgpu.inline_mgpu()(lambda ctx: t.ptx("barrier.cluster.wait.aligned;"))()
    else:
        meet()


def cosine_sine(angle: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Compute cosine and sine of float32 radians without the branches of the library functions."""
    return rotate.cosine_sine(angle, lambda x: lax.round(x, lax.RoundingMethod.TO_NEAREST_EVEN))


def load_shared(ref, index: jax.Array) -> jax.Array:
    """Load int32 or float32 numbers of an array in shared memory at a flat ``index`` int32 [N]."""
    size, floats = index.shape[0], jnp.issubdtype(ref.dtype, jnp.floating)

    @plgpu.inline_mgpu(arg_types=(t.ref(), _own(size)), return_type=_type(size, ref.dtype))
    def run(ctx, ref, index):
        base, one = t.number(t.address(ref)), t.load_shared_float if floats else t.load_shared
        return t.made_of([one(base + x * 4) for x in t.numbers_of(index)], floats)

    return run(ref, index)


def store_shared(ref, index: jax.Array, x: jax.Array) -> None:
    """Store int32 or float32 numbers [N] in an array in shared memory at a flat ``index`` int32 [N]."""
    size, floats = index.shape[0], jnp.issubdtype(ref.dtype, jnp.floating)

    @plgpu.inline_mgpu(arg_types=(t.ref(), _own(size), _own(size)))
    def run(ctx, ref, index, x):
        base = t.number(t.address(ref))
        for at, number in zip(t.numbers_of(index), t.numbers_of(x, floats), strict=True):
            t.ptx(f"st.shared.{'f32' if floats else 'b32'} [$0], $1;", base + at * 4, number)

    run(ref, index, x)
