"""Token ids as users give them: lists of lists, or padded arrays."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.decoding.checks import as_jax, check_int32, int32_rows, read_array
from kvjax.protocol.describe import is_known
from kvjax.protocol.fields import positive_int, shown

Tokens = Array | np.ndarray | Sequence[Sequence[int]]
Integers = Array | np.ndarray | Sequence[int]


def pad_tokens(tokens: Tokens, lengths: Integers | None = None, multiple: int = 1) -> tuple[Array, Array]:
    """Pad prompts on the right to one length.

    Args:
        tokens: list of token lists, or an integer array [B, T] that is padded on the right.
        lengths: int [B], real tokens in each row of an array; None means all T.
        multiple: the padded length is rounded up to a multiple of this.

    Returns:
        tokens int32 [B, T] and lengths int32 [B].
    """
    multiple = positive_int("multiple", multiple)
    if isinstance(tokens, (np.ndarray, jax.Array)):
        if tokens.ndim != 2 or not tokens.shape[0] or not jnp.issubdtype(tokens.dtype, jnp.integer):
            hint = " (for one prompt: tokens[None])" if tokens.ndim == 1 else ""
            raise ValueError(f"tokens must be integers of shape [B, T]{hint}, got {tokens.dtype} {list(tokens.shape)}")
        rows, padded = tokens.shape
        check_int32("token ids", tokens)
        given = np.full(rows, padded, np.int32) if lengths is None else lengths
        length = int32_rows("lengths", given, rows, most=padded, bound="T")
        widths = (0, 0), (0, -padded % multiple)
        if is_known(tokens):
            return as_jax(np.pad(jax.device_get(tokens), widths), jnp.int32), length
        return jnp.pad(jnp.asarray(tokens, jnp.int32), widths), length
    if not isinstance(tokens, Sequence) or isinstance(tokens, str) or not len(tokens):
        raise ValueError(f"tokens must be a list of token lists, one per row (for one prompt: [prompt]), got {shown(tokens)}")
    rows = [_row(row) for row in tokens]
    if lengths is not None:
        raise ValueError("lengths belong to a padded array of tokens; lists carry their own length")
    sizes = [len(row) for row in rows]
    padded = np.zeros((len(rows), -(-max(sizes) // multiple) * multiple), np.int32)
    for row, values in enumerate(rows):
        padded[row, : len(values)] = values
    return as_jax(padded), as_jax(np.asarray(sizes, np.int32))


def _row(row: Any) -> np.ndarray:
    """Convert one row of token ids to an integer array."""
    array = np.asarray(read_array(row))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise ValueError(f"tokens must be a list of integers per row (for one prompt: [prompt]), got the row {shown(row)}")
    check_int32("token ids", array)
    return array
