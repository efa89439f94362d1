"""4-bit codes of keys in arrays of registers, see `pallas_kernels.formats.key_codes`: a thread has all channels of a slice.

Of [8 * N] numbers entry i * N + n is channel i of slice n. The additions have the same order as in plain JAX, whatever the
array.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels._mosaic_gpu import arrays, assembly
from pallas_kernels._mosaic_gpu import threads as t
from pallas_kernels._mosaic_gpu import warps as w
from pallas_kernels._mosaic_gpu.pallas import plgpu
from pallas_kernels._mosaic_gpu.team import Team
from pallas_kernels._mosaic_gpu.threads import THREADS
from pallas_kernels._triton.key_codes import parts_of
from pallas_kernels.formats.key_codes import LEVEL, LEVELS, SLICE, THRESHOLDS

DIMS = 8, 16, 32, 64, 128, 256  # channels, so that lanes of a warp have the slices of a vector


def rotated(x: jax.Array, signs: Any, dim: int) -> jax.Array:
    """Rotate vectors float32 [8 * N] as `formats.key_codes.rotation` does; ``signs`` float32 [D] in global memory."""
    lanes, size = dim // SLICE, x.shape[0]
    first = (arrays.counted(size // SLICE) & (lanes - 1)) * SLICE
    return butterflies(x * arrays.load_run(signs, first, SLICE), lanes)


def butterflies(x: jax.Array, lanes: int) -> jax.Array:
    """Multiply vectors of ``lanes`` slices by a Hadamard matrix, float32 [8 * N]."""
    layout = t.own(x.shape[0] // THREADS)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct(x.shape, jnp.float32, layout=layout))
    def run(ctx, x):
        return t.made_of(mixed(t.numbers_of(x, floats=True), lanes), floats=True)

    return run(x)


def mixed(numbers: list[Any], lanes: int) -> list[Any]:
    """Return what `butterflies` makes of the numbers of this lane."""
    distance = len(numbers) // SLICE
    while distance < len(numbers):
        for i, j in ((i, i + distance) for i in range(len(numbers)) if not i & distance):
            numbers[i], numbers[j] = numbers[i] + numbers[j], numbers[i] - numbers[j]
        distance *= 2
    distance = 1
    while distance < lanes:  # the upper lane has what is subtracted
        sign = ((t.signed(w.lane()) & distance) > 0).select(t.float_number(-1), t.float_number(1))
        numbers = [t.fused(t.shuffle(y, distance), (y, sign)) for y in numbers]
        distance *= 2
    return numbers


def codes(y: jax.Array, scale: float) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Encode rotated vectors float32 [8 * N]: int32 [N], for each slice its cluster, and the two words of its codes."""
    size = y.shape[0]
    each = size // (SLICE * THREADS)
    channel = lax.div(arrays.counted(size), size // SLICE)

    def added(x):
        for part in (4, 2, 1):
            x = Team.folded(x, part * each, "add")
        return x

    def exact_dot(a, b):  # the small products first
        return added(sum(x * z for x in reversed(a) for z in reversed(b)))

    parts = parts_of(y)
    radius = jnp.sqrt(exact_dot(parts, parts))
    length = jnp.abs(y) / arrays.repeated(jnp.maximum(radius, 1e-8), SLICE)
    above = [length > threshold for threshold in THRESHOLDS]
    rank = sum(x.astype(jnp.int32) for x in above)
    steps = zip(above, LEVELS, LEVELS[1:], strict=False)
    level = sum((jnp.where(x, float(high - low), 0.0) for x, low, high in steps), start=jnp.full_like(y, LEVELS[0]))
    alpha = jnp.maximum(exact_dot((level,), parts_of(length)), 1e-6 / LEVEL)
    positive = (y >= 0).astype(jnp.int32)
    weight = lax.bitcast_convert_type(parts_of(radius * (scale / LEVEL) / alpha)[0], jnp.int32)
    levels = added((rank | positive << 3) << (4 * channel))
    return added(positive << channel), levels, lax.shift_right_logical(weight, 16)


def store(ids: Any, rows: Any, row: jax.Array, piece: jax.Array, coded: tuple[jax.Array, ...]) -> None:
    """Store what `codes` found for slice ``piece`` int32 [N] of a ``row``, where it is not negative.

    Args:
        ids: uint8 [R, D / 8] in global memory.
        rows: uint8 [R, D].
        row: int32 [N].
        piece: int32 [N].
        coded: three int32 [N].
    """
    arrays.store(ids, piece, coded[0], (row, ids.shape[-1]))
    text = f".reg .pred p; .reg .b64 a; mad.wide.s32 a, $1, {rows.shape[-1]}, $0; mad.wide.s32 a, $2, {SLICE}, a;"
    assembly.run([text, "setp.ge.s32 p, $2, 0; @p st.global.v2.b32 [a], {$3, $4};"], (rows,), (row, piece, *coded[1:]))
