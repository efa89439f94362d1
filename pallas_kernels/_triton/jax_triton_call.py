"""The only call into jax-triton, an optional package: for comparison, and in case Pallas drops its Triton back end.

Its kernels do not run interpreted. The package has no batching rule, so ``launch`` has one.
"""

import inspect
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap


def package() -> Any:
    """Import the module ``jax_triton``; raise ``NotImplementedError`` where it or Triton is missing."""
    try:
        import jax_triton
        import triton  # noqa: F401
    except ImportError as error:
        raise NotImplementedError(f"needs the package jax_triton (pip install kvjax[triton]): {error}") from error
    return jax_triton


def launch(body: Any, operands: tuple[jax.Array, ...], outputs: tuple[Any, ...], **options: Any) -> tuple[jax.Array, ...]:
    """Run a Triton kernel, jitted: ``options`` are its compile-time parameters, grid, warps and stages.

    The first axis of the grid counts rows, and so does the first axis of every operand and output. Under ``jax.vmap`` one
    launch has the rows of all members, and an operand without the mapped axis is not copied: the kernel gets the number of
    ``ROWS`` of a member and ``MAPPED``, a bit for each operand that has rows of each member (`jax_triton_language.row`).
    Only where two axes are mapped, an operand with one of them is repeated along the other.
    """
    return _launch(body, options["grid"][0], (True,) * len(operands), tuple(outputs), options, operands)


def _launch(
    body: Any, rows: int, mapped: tuple[bool, ...], outputs: tuple[Any, ...], options: dict[str, Any], operands: tuple
) -> tuple[jax.Array, ...]:
    call = package().triton_call
    renamed = "out_type" if "out_type" in inspect.signature(call).parameters else "out_shape"  # before version 0.4
    bits = sum(1 << place for place, each in enumerate(mapped) if each)
    more = options | {renamed: outputs, "ROWS": rows, "MAPPED": bits}

    @custom_vmap
    def run(*operands: jax.Array) -> tuple[jax.Array, ...]:
        return call(*operands, kernel=body, **more)

    @run.def_vmap
    def members(size: int, batched: list[bool], *operands: jax.Array) -> tuple[tuple[jax.Array, ...], tuple[bool, ...]]:
        count = options["grid"][0] // rows  # members of the axes that are mapped already
        before = [each and count > 1 for each in mapped]
        taken = [outer or inner for outer, inner in zip(batched, before, strict=True)]
        joined = [
            _joined(x, size, outer, 1 if inner else count) if either else x
            for x, outer, inner, either in zip(operands, batched, before, taken, strict=True)
        ]
        shapes = tuple(jax.ShapeDtypeStruct((size * x.shape[0], *x.shape[1:]), x.dtype) for x in outputs)
        grid = (size * options["grid"][0], *options["grid"][1:])
        out = _launch(body, rows, tuple(taken), shapes, options | {"grid": grid}, tuple(joined))
        return tuple(x.reshape(size, -1, *x.shape[1:]) for x in out), (True,) * len(out)

    return run(*operands)


def _joined(x: jax.Array, size: int, outer: bool, count: int) -> jax.Array:
    """Join the axis of ``size`` members, which x has first if ``outer``, with the rows; repeat the rows ``count`` times."""
    x = x if outer else jnp.broadcast_to(x, (size, *x.shape))
    rest = x.shape[1:]
    return jnp.broadcast_to(x[:, None], (size, count, *rest)).reshape(size * count * rest[0], *rest[1:])
