"""Arrays of 32 bits, whatever ``jax_enable_x64`` says, and programs for the platform where the arrays are."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer

from kvjax.protocol.describe import is_known
from pallas_kernels.machine import default_platform

_INT32 = np.iinfo(np.int32)


def in_32_bits[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Run ``function`` as JAX runs it without ``jax_enable_x64``: programs, kernels and caches have numbers of 32 bits.

    Under ``jax_enable_x64`` a Python number would enter a program with 64 bits, and a sum of int32 would have 64. Then
    kernels would refuse their arguments, and tokens would differ. JAX arrays of 64 bits among the arguments are converted,
    also traced arrays; integers that int32 cannot hold stay as they are, for `kvjax.decoding.checks` to refuse.

    If the caller has put arrays on another platform than JAX's default, as on the CPU beside a GPU, implementations are
    chosen for that platform.
    """

    @functools.wraps(function)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        with _platform_of((args, kwargs)):
            if not jax.config.jax_enable_x64:
                return function(*args, **kwargs)
            args, kwargs = jax.tree.map(_narrow, (args, kwargs))
            with jax.enable_x64(False):
                return function(*args, **kwargs)

    return run


def _platform_of(tree: Any) -> contextlib.AbstractContextManager[Any]:
    """Make the device of the arrays that a caller has placed the default of a context, if it is of another platform."""
    arrays = (x for x in jax.tree.leaves(tree) if isinstance(x, jax.Array) and not isinstance(x, Tracer))
    placed = next((x for x in arrays if x.committed), None)
    device = None if placed is None else min(placed.sharding.addressable_devices, key=lambda x: x.id, default=None)
    same = device is None or device.platform == default_platform()
    return contextlib.nullcontext() if same else jax.default_device(device)


def _narrow(leaf: Any) -> Any:
    """Convert a JAX array of 64 bits."""
    if not isinstance(leaf, jax.Array) or jnp.issubdtype(leaf.dtype, jax.dtypes.extended) or leaf.dtype.itemsize < 8:
        return leaf
    if jnp.issubdtype(leaf.dtype, jnp.floating):
        return leaf.astype(jnp.float32)
    if is_known(leaf) and leaf.size and not (_INT32.min <= np.min(leaf) and np.max(leaf) <= _INT32.max):
        return leaf
    return leaf.astype(jnp.int32)
