"""The gated delta rule: a linear attention whose state forgets, and whose new keys replace what the state had for them.

With the state S [K, M], a decay exp(g) with g <= 0, a rate b in [0, 1], and a key k of length 1, a token does::

    S <- exp(g) S;    S <- S + k (b (v - S^T k))^T;    output = S^T q

`delta_step` is this for one token. `delta_chunks` computes the same for many tokens by products of matrices. Within a chunk
of C tokens let d be the running sum of g. The values that the tokens write, u [C, M], solve a triangular system::

    u_i = b_i (v_i - exp(d_i) S^T k_i - sum_{j < i} exp(d_i - d_j) (k_i . k_j) u_j)

Its solution is linear in S, so all chunks solve their systems at once, and only products with S are left for the scan over
chunks.

Source: Yang et al., "Gated Delta Networks" (arXiv:2412.06464), section 3; the chunked form without gates is of "Parallelizing
Linear Transformers with the Delta Rule" (arXiv:2406.06484). All arithmetic is in float32, as in transformers 5.24.
"""

import jax
import jax.numpy as jnp
from jax import lax

CHUNK = 64  # tokens whose keys meet each other directly
_EPS = 1e-6  # added to the squared length of queries and keys
_BLOCK = 8  # rows of a triangular system that are inverted at once
_PRECISION = lax.Precision.HIGHEST  # a GPU would multiply in TF32


def unit(x: jax.Array) -> jax.Array:
    """Divide vectors [..., K] by their length; float32."""
    wide = x.astype(jnp.float32)
    return wide * lax.rsqrt(jnp.sum(wide * wide, axis=-1, keepdims=True) + _EPS)


def gated_delta(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    decay: jax.Array,
    rate: jax.Array,
    state: jax.Array,
    real: jax.Array,
    chunk: int = CHUNK,
) -> tuple[jax.Array, jax.Array]:
    """Run the gated delta rule over tokens.

    Args:
        query: [B, T, N, K], normalised here, and divided by sqrt(K).
        key: [B, T, N, K], normalised here.
        value: [B, T, N, R, M]; R value heads share a key head.
        decay: float32 [B, T, N, R], the logarithm g of the decay.
        rate: float32 [B, T, N, R], b.
        state: float32 [B, N, R, K, M], before the first token.
        real: bool [B, T], False on padding, which comes last in a row, may be anything, and changes no state.
        chunk: tokens of a chunk.

    Returns:
        Float32 [B, T, N, R, M], meaningless on padding, and the state after the last real token.
    """
    count = query.shape[1]
    query, key, value = (
        jnp.where(real.reshape(*real.shape, *(1,) * (x.ndim - 2)), x.astype(jnp.float32), 0) for x in (query, key, value)
    )
    decay, rate = (jnp.where(real[:, :, None, None], x, 0) for x in (decay, rate))
    query, key = unit(query) * query.shape[-1] ** -0.5, unit(key)
    if count == 1:
        out, state = delta_step(query[:, 0], key[:, 0], value[:, 0], decay[:, 0], rate[:, 0], state)
        return out[:, None], state
    return delta_chunks(query, key, value, decay, rate, state, min(chunk, count))


def delta_step(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, rate: jax.Array, state: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Run the rule for one token; the arguments have no axis T, and are else as in `delta_chunks`."""
    # Sums of products instead of products of matrices: a GPU reads the state once for both.
    old = state * jnp.exp(decay)[..., None, None]
    key, query = key[:, :, None, :, None], query[:, :, None, :, None]
    recalled = jnp.sum(old * key, axis=-2)
    asked = jnp.sum(old * query, axis=-2)
    written = (value - recalled) * rate[..., None]
    out = asked + jnp.sum(key * query, axis=-2) * written
    return out, old + key * written[..., None, :]


def delta_chunks(
    query: jax.Array, key: jax.Array, value: jax.Array, decay: jax.Array, rate: jax.Array, state: jax.Array, chunk: int
) -> tuple[jax.Array, jax.Array]:
    """Run the rule for many tokens, in chunks.

    Args:
        query: float32 [B, T, N, K].
        key: float32 [B, T, N, K].
        value: float32 [B, T, N, R, M].
        decay: float32 [B, T, N, R].
        rate: float32 [B, T, N, R]; with a decay of 0, a rate of 0 leaves the state as it is.
        state: float32 [B, N, R, K, M].
        chunk: C, tokens of a chunk; T need not be a multiple.

    Returns:
        Float32 [B, T, N, R, M] and the state after all tokens.
    """
    batch, total = query.shape[:2]
    chunks = -(-total // chunk)

    def cut(x: jax.Array) -> jax.Array:
        """Reshape [B, T, N, ...] to [X, B, N, ..., C, last], with X chunks."""
        x = jnp.pad(x, ((0, 0), (0, chunks * chunk - total), *((0, 0),) * (x.ndim - 2)))
        x = jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)
        return jnp.moveaxis(x, 2, -2)

    query, key, value = cut(query), cut(key), cut(value)  # [X, B, N, C, K], and [X, B, N, R, C, M] of values
    decay, rate = (cut(x[..., None])[..., 0] for x in (decay, rate))  # [X, B, N, R, C]
    since = jnp.cumsum(decay, axis=-1)
    earlier = jnp.tril(jnp.ones((chunk, chunk), bool)).reshape((1,) * 4 + (chunk, chunk))
    left = jnp.exp(jnp.where(earlier, since[..., :, None] - since[..., None, :], -jnp.inf))  # of token j at token i >= j
    alike = _product("xbnik,xbnjk->xbnij", key, key)[:, :, :, None]
    system = jnp.where(jnp.tril(earlier, -1), rate[..., None] * alike * left, 0)  # without its diagonal, which is 1
    keys = key[:, :, :, None] * (rate * jnp.exp(since))[..., None]
    both = jnp.concatenate([value * rate[..., None], keys], axis=-1)
    solved = _product("xbnrij,xbnrjm->xbnrim", unit_lower_inverse(system), both)
    fresh, replaced = jnp.split(solved, [value.shape[-1]], axis=-1)  # u = fresh - replaced S
    meets = _product("xbnik,xbnjk->xbnij", query, key)[:, :, :, None] * left
    asks = query[:, :, :, None] * jnp.exp(since)[..., None]
    last = since[..., -1:]
    writes = key[:, :, :, None] * jnp.exp(last - since)[..., None]

    def step(state: jax.Array, each: tuple) -> tuple[jax.Array, jax.Array]:
        fresh, replaced, meets, asks, writes, last = each
        written = fresh - _product("bnrck,bnrkm->bnrcm", replaced, state)
        out = _product("bnrck,bnrkm->bnrcm", asks, state) + _product("bnrij,bnrjm->bnrim", meets, written)
        state = state * jnp.exp(last)[..., None] + _product("bnrck,bnrcm->bnrkm", writes, written)
        return state, out

    state, out = lax.scan(step, state, (fresh, replaced, meets, asks, writes, last))
    out = jnp.moveaxis(jnp.moveaxis(out, -2, 2), 0, 1)  # [B, X, C, N, R, M]
    return out.reshape(batch, chunks * chunk, *out.shape[3:])[:, :total], state


def unit_lower_inverse(below: jax.Array) -> jax.Array:
    """Invert I + ``below`` [..., C, C], whose entries on and above the diagonal are 0, by products of matrices.

    Blocks of 8 are inverted by a product of three factors, because the eighth power of such a block is 0. Then pairs of
    neighbours become blocks of twice the size. On two busy CPU cores, 512 systems of 64 equations with 256 right sides took
    XLA's solver 363 ms, and this inverse and its product 63 ms.
    """
    shape, size = below.shape, below.shape[-1]
    padded = max(_BLOCK, 1 << (size - 1).bit_length())
    # One leading axis: XLA for CPUs (jaxlib 0.12) aborts while it compiles some products of seven dimensions.
    below = jnp.pad(below.reshape(-1, size, size), [(0, 0), (0, padded - size), (0, padded - size)])

    def diagonal(width: int) -> jax.Array:
        """Take the blocks [X, n, width, width] on the diagonal."""
        count = padded // width
        blocks = below.reshape(-1, count, width, count, width)
        return jnp.moveaxis(jnp.diagonal(blocks, axis1=-4, axis2=-2), -1, -3)

    def times(one: jax.Array, two: jax.Array) -> jax.Array:
        return jnp.matmul(one, two, precision=_PRECISION)

    power = -diagonal(_BLOCK)
    inverse = power + jnp.eye(_BLOCK)[None, None]
    for _ in range(2):
        power = times(power, power)
        inverse = inverse + times(inverse, power)
    width = _BLOCK
    while width < padded:
        upper, lower = inverse[:, ::2], inverse[:, 1::2]
        corner = -times(times(lower, diagonal(2 * width)[..., width:, :width]), upper)
        top = jnp.concatenate([upper, jnp.zeros_like(upper)], axis=-1)
        inverse = jnp.concatenate([top, jnp.concatenate([corner, lower], axis=-1)], axis=-2)
        width *= 2
    return inverse[:, 0, :size, :size].reshape(shape)


def _product(axes: str, *arrays: jax.Array) -> jax.Array:
    return jnp.einsum(axes, *arrays, precision=_PRECISION)
