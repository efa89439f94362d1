"""The soft cap on logits of attention: a model that has one squashes every logit to ``cap * tanh(logit / cap)``.

It belongs to a model, and every softmax of its attention needs it. So it is a setting of a context, as the default
implementation is: operations read it when they are traced, and no method passes it on. Only plain JAX computes it: kernels of
an operation that computes logits (`pallas_kernels.dispatch.Operation.logits`) do not run in such a context.

Source: Gemma 2 (arXiv:2408.00118), section 2.
"""

import contextlib
from collections.abc import Iterator

import jax
import jax.numpy as jnp

# A value of this kind is part of the key of every trace and program that JAX keeps.
_CAP = jax.make_user_context(None)


@contextlib.contextmanager
def soft_cap(cap: float | None) -> Iterator[None]:
    """Set the cap on the logits of attention of operations within this context and this thread; None sets none.

    The cap is applied to the logit after its scale, before masks and before what is added to the logit.

    Raises:
        ValueError: the cap is no positive number.
    """
    if cap is not None and not (isinstance(cap, (int, float)) and cap > 0):
        raise ValueError(f"soft_cap: got {cap!r}, expected a positive number or None")
    with _CAP(None if cap is None else float(cap)):
        yield


def get_soft_cap() -> float | None:
    """Return the cap that `soft_cap` has set here, or None."""
    return _CAP.value


def capped(logits: jax.Array) -> jax.Array:
    """Return the scaled ``logits``, float32 of any shape, under the cap of `soft_cap`, or as they are."""
    cap = _CAP.value
    return logits if cap is None else jnp.tanh(logits / cap) * cap
