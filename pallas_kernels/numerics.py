"""Numerics that implementations share: precision of products, shares, rotary embedding, merged attention."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array
from jax.typing import DTypeLike

from pallas_kernels.soft_cap import get_soft_cap, soft_cap

LOG2_E = math.log2(math.e)


def product_precision(dtype: DTypeLike) -> jax.lax.Precision:
    """Return the precision of matrix products of ``dtype``: full float32 for float32, where a GPU would use TF32."""
    return jax.lax.Precision.HIGHEST if dtype == jnp.float32 else jax.lax.Precision.DEFAULT


def finite_or_zero(maximum: jax.Array) -> jax.Array:
    """Make the maximum a shift for ``exp``: 0 where it is -inf, because ``-inf - (-inf)`` is NaN."""
    return jnp.where(maximum == -jnp.inf, jnp.zeros_like(maximum), maximum)


def log_denominator(maximum: jax.Array, total: jax.Array) -> jax.Array:
    """Return the log of a softmax' denominator: -inf where ``total`` is 0, whose logarithm would have no derivative.

    Args:
        maximum: of the logits, float32.
        total: float32 like it, the sum of exp(logit - `finite_or_zero` (maximum)).
    """
    some = total > 0
    return jnp.where(some, maximum + jnp.log(jnp.where(some, total, 1)), -jnp.inf)


def ceil_share(fraction: jax.Array, count: jax.Array) -> jax.Array:
    """Compute ``ceil(fraction * count)``, at least 1 if ``count`` is: float32 and int32 that broadcast, to int32.

    The product is lowered by a millionth first, so that 0.1 * 10 gives 1 in float32 too.
    """
    product = fraction * count.astype(jnp.float32)
    return jnp.clip(jnp.ceil(product * (1 - 1e-6)).astype(jnp.int32), jnp.minimum(count, 1), count)


def group_share(logits: jax.Array, searched: jax.Array) -> jax.Array:
    """Compute the log of the attention that the query heads of a group together pay to each slot.

    The attention is the sum over the group of the softmax over the searched slots. Its logarithm keeps apart the many shares
    that are too small for float32.

    Args:
        logits: float32 [B, H, G, S].
        searched: bool [B, H, S], the slots over which the softmax goes.

    Returns:
        float32 [B, H, S], -inf for slots that are not searched.
    """
    logits = jnp.where(searched[:, :, None], logits, -jnp.inf)
    total = finite_or_zero(jax.nn.logsumexp(logits, axis=3, keepdims=True))
    # Head by head, because a reduction over the few heads of a group would be kernels of its own.
    shares = [logits[:, :, head] - total[:, :, head] for head in range(logits.shape[2])]
    most = finite_or_zero(functools.reduce(jnp.maximum, shares))
    return most + jnp.log(functools.reduce(operator.add, (jnp.exp(share - most) for share in shares)))


def rotate_halves(x: jax.Array, angle: jax.Array) -> jax.Array:
    """Rotate pairs (i, i + D/2) of ``x`` [..., D] by ``angle`` float32 [..., D/2] in radians: a rotary embedding.

    The leading axes of ``x`` and ``angle`` broadcast. The result is float32 [..., D].
    """
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def bounded_loop(body: Callable[..., Any], most: int, count: jax.Array, carry: Any, operands: Any) -> Any:
    """Run ``carry = body(index, carry, operands)`` for each index below ``count``: a loop whose length is known at run time.

    JAX does not differentiate such a loop in reverse. If an argument is differentiated, the loop has ``most`` steps, of which
    the steps from ``count`` on change nothing.

    Args:
        body: closes over no traced array.
        most: the largest ``count``.
        count: int32 scalar.
        carry: a pytree.
        operands: a pytree.
    """
    return _bounded_loop(_under_cap(body), most, count, carry, operands)


def _under_cap(body: Callable[..., Any]) -> Callable[..., Any]:
    """Return ``body`` under the soft cap of now: JAX traces the rule of a derivative when the context has ended."""
    cap = get_soft_cap()

    def run(*args: Any) -> Any:
        with soft_cap(cap):
            return body(*args)

    return run


@functools.partial(jax.custom_jvp, nondiff_argnums=(0, 1))
def _bounded_loop(body: Callable[..., Any], most: int, count: jax.Array, carry: Any, operands: Any) -> Any:
    return jax.lax.fori_loop(0, count, lambda index, carry: body(index, carry, operands), carry)


@_bounded_loop.defjvp
def _(body: Callable[..., Any], most: int, primals: tuple, tangents: tuple) -> tuple:
    def run(count: jax.Array, carry: Any, operands: Any) -> Any:
        def step(carry: Any, index: jax.Array) -> tuple[Any, None]:
            return jax.lax.cond(index < count, lambda now: body(index, now, operands), lambda now: now, carry), None

        return jax.lax.scan(step, carry, jnp.arange(most, dtype=jnp.int32))[0]

    return jax.jvp(run, primals, tangents)


def made_after[Tree](before: Any, tree: Tree) -> Tree:
    """Let arrays of constants depend on what exists ``before`` them.

    Else XLA makes equal constants once, at the start of the program, and a copy there for each loop that changes them.
    """
    _, zero = jax.lax.optimization_barrier((before, jnp.zeros((), jnp.int32)))

    def one(x: jax.Array) -> jax.Array:
        return x | zero.astype(x.dtype) if jnp.issubdtype(x.dtype, jnp.bool_) else x + zero.astype(x.dtype)

    return jax.tree.map(one, tree)


def filled(run: Callable[[jax.Array], Any], count: int, before: Any) -> Any:
    """Return `jax.lax.map` of ``run`` over ``count`` indices, in arrays that are made after what exists ``before`` them."""

    def put(at: jax.Array, out: Any) -> Any:
        return jax.tree.map(lambda x, new: jax.lax.dynamic_update_index_in_dim(x, new, at, 0), out, run(at))

    shapes = jax.eval_shape(run, jnp.int32(0))
    empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    return jax.lax.fori_loop(0, count, put, made_after(before, empty))


def even_block(count: int, most: int) -> int:
    """Divide ``count`` by the fewest blocks of at most ``most``: how many each has, so that the last one is nearly full."""
    return -(-count // max(-(-count // most), 1))


def join_pieces(run: Callable[..., jax.Array], block: int, *lists: jax.Array | None) -> jax.Array:
    """Return ``run(*lists)`` [..., K] of ``lists`` [..., K], computed from at most ``block`` entries at a time."""
    pieces, count = _pieces(block, lists), _entries(lists)
    if pieces is None:
        return run(*lists)
    number = jax.tree.leaves(pieces)[0].shape[0]
    out = filled(lambda at: run(*jax.tree.map(lambda x: x[at], pieces)), number, lists)
    out = jnp.moveaxis(out, 0, -2)
    return out.reshape(*out.shape[:-2], -1)[..., :count]


def sum_pieces(run: Callable[..., jax.Array], block: int, *lists: jax.Array | None) -> jax.Array:
    """Return ``run(*lists)``, a sum over the entries of ``lists`` [..., K], computed from at most ``block`` at a time.

    The last piece is filled up with zeros, which have to add nothing.
    """
    pieces = _pieces(block, lists)
    if pieces is None:
        return run(*lists)
    sums = jax.eval_shape(lambda pieces: run(*jax.tree.map(lambda x: x[0], pieces)), pieces)
    return jax.lax.scan(lambda out, piece: (out + run(*piece), None), jnp.zeros(sums.shape, sums.dtype), pieces)[0]


def _entries(lists: tuple[jax.Array | None, ...]) -> int:
    return jax.tree.leaves(lists)[0].shape[-1]


def _pieces(block: int, lists: tuple[jax.Array | None, ...]) -> Any:
    """Cut arrays [..., K] into pieces [N, ..., block], the last one filled up with zeros; None if they fit into one."""
    count = _entries(lists)
    block = even_block(count, block)

    def cut(x: jax.Array) -> jax.Array:
        x = jnp.pad(x, ((0, 0),) * (x.ndim - 1) + ((0, -count % block),))
        return jnp.moveaxis(x.reshape(*x.shape[:-1], -1, block), -2, 0)

    return None if count <= block else jax.tree.map(cut, lists)


def run_if(body: Callable[..., Any], wanted: jax.Array, carry: Any, operands: Any) -> Any:
    """Return ``body(carry, operands)`` if ``wanted`` bool is true, else ``carry``; the body closes over no traced array.

    It is a loop of at most one round, because a branch of `jax.lax.cond` that does nothing copies ``carry``. JAX does not
    differentiate such a loop in reverse, so if an argument is differentiated it is a `jax.lax.cond`.
    """
    return _run_if(_under_cap(body), wanted, carry, operands)


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _run_if(body: Callable[..., Any], wanted: jax.Array, carry: Any, operands: Any) -> Any:
    return jax.lax.while_loop(
        lambda state: state[1], lambda state: (body(state[0], operands), jnp.zeros((), bool)), (carry, wanted)
    )[0]


@_run_if.defjvp
def _(body: Callable[..., Any], primals: tuple, tangents: tuple) -> tuple:
    def run(wanted: jax.Array, carry: Any, operands: Any) -> Any:
        return jax.lax.cond(wanted, body, lambda carry, operands: carry, carry, operands)

    return jax.jvp(run, primals, tangents)


def merge_partials(out: jax.Array, lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge attention over disjoint parts of the cache into attention over their union.

    Part p has out_p, the softmax average over its own slots, and lse_p, the log of its softmax denominator. The merged output
    is sum_p exp(lse_p - lse) out_p with lse = logsumexp_p lse_p (FlashDecoding's split-K step).

    Args:
        out: [N, ..., D] float32, one row per part.
        lse: [N, ...] float32; -inf where a part is empty, whose ``out`` is then ignored.

    Returns:
        out [..., D] float32 and lse [...] float32; 0 and -inf where every part is empty.

    Raises:
        ValueError: the leading axes disagree.
    """
    if out.shape[:-1] != lse.shape:
        raise ValueError(f"merge_partials: got out {out.shape} and lse {lse.shape}, expected [N, ..., D] and [N, ...]")
    maximum = finite_or_zero(jax.lax.stop_gradient(jnp.max(lse, axis=0)))
    weight = jnp.exp(lse - maximum[None])
    total = jnp.sum(weight, axis=0)
    kept = jnp.where((weight > 0)[..., None], out, 0)
    merged = jnp.sum(kept * weight[..., None], axis=0) / jnp.where(total > 0, total, 1)[..., None]
    return merged, log_denominator(maximum, total)


def merge_with(out: jax.Array, lse: jax.Array, partials: jax.Array, partials_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge one part with N partial softmaxes, as `merge_partials` does.

    Args:
        out: [B, H, G, D], of any dtype.
        lse: float32 [B, H, G].
        partials: float32 [B, H, N, G, D].
        partials_lse: float32 [B, H, N, G].

    Returns:
        out [B, H, G, D] in the dtype of the argument ``out``, and lse float32 [B, H, G].
    """
    merged, lse = merge_partials(
        jnp.concatenate([out.astype(jnp.float32)[None], jnp.moveaxis(partials, 2, 0)]),
        jnp.concatenate([lse[None], jnp.moveaxis(partials_lse, 2, 0)]),
    )
    return merged.astype(out.dtype), lse


def merge_pair(out: jax.Array, lse: jax.Array, other: jax.Array, other_lse: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Merge two parts as `merge_partials` does, in one pass over them that needs no stacked copy.

    Args:
        out: [..., D], of any dtype.
        lse: [...] float32; -inf where the part is empty, whose ``out`` must then be finite.
        other: like ``out``; ignored where ``other_lse`` is -inf.
        other_lse: like ``lse``.

    Returns:
        out [..., D] in the dtype of the argument ``out``, and lse [...] float32; 0 and -inf where both parts are empty.
    """
    shift = finite_or_zero(jax.lax.stop_gradient(jnp.maximum(lse, other_lse)))
    weight, other_weight = jnp.exp(lse - shift), jnp.exp(other_lse - shift)
    total = weight + other_weight
    share, other_share = ((x / jnp.where(total > 0, total, 1))[..., None] for x in (weight, other_weight))
    other = jnp.where(other_share > 0, other, 0)
    merged = out.astype(jnp.float32) * share + other.astype(jnp.float32) * other_share
    return merged.astype(out.dtype), log_denominator(shift, total)


def drawn[T](draw: Callable[[Array], T], seed: Array | int) -> T:
    """Draw what depends on a seed alone: ``draw`` gets a key whose numbers JAX's switches of random numbers do not change.

    A cache stores codes of these numbers, and must be read with the same ones in another process.
    """
    with jax.threefry_partitionable(True):
        return draw(jax.random.key(seed, impl="threefry2x32"))
