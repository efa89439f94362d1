"""A case of `experiments.speed.kernels`: an operation at a shape, with random arguments."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from pallas_kernels.dispatch import Operation

Run = Callable[..., Any]


@dataclasses.dataclass(frozen=True)
class Case:
    """An operation at a shape.

    Attributes:
        operation: the operation, all of whose implementations are compared.
        shape: the shape in words, unique among the operation's cases.
        make: makes the arguments; the first is a float array.
        run: calls the operation with the arguments, and with ``implementation``.
        bytes_read: bytes that every implementation must read.
        tolerance: largest relative error of floats; integers and booleans must be equal.
        reference: makes the result to compare with; None takes "xla" on the same arguments in float32.
        others: implementations that are not in the operation's table, by name.
        defined: the part of a result that is defined, which is compared; None compares all.
    """

    operation: Operation
    shape: str
    make: Callable[[], tuple]
    run: Run
    bytes_read: int
    tolerance: float = 0.02
    reference: Run | None = None
    others: Mapping[str, Run] = dataclasses.field(default_factory=dict)
    defined: Run | None = None


@dataclasses.dataclass(frozen=True)
class Sizes:
    """Sizes of a Llama-3.1-8B layer; with ``tiny``, sizes that a test can run."""

    tiny: bool = False

    @property
    def heads(self) -> int:
        """KV heads H."""
        return 2 if self.tiny else 8

    @property
    def dim(self) -> int:
        """Channels D."""
        return 16 if self.tiny else 128

    def count(self, number: int) -> int:
        """Return ``number`` slots or pages, or a small number of them with ``tiny``."""
        return max(16, number // 512) if self.tiny else number


GROUP = 4  # query heads per KV head
BYTES = 2  # of a bfloat16


def normal(seed: int, *shape: int, dtype: Any = jnp.bfloat16) -> Array:
    """Draw standard normal values."""
    return jax.random.normal(jax.random.key(seed), shape, jnp.float32).astype(dtype)


def store(sizes: Sizes, batch: int, slots: int) -> tuple[Array, Array, Array]:
    """Draw a query [B, H, G, D], a key and a value [B, H, S, D]."""
    rows = (batch, sizes.heads)
    return (
        normal(0, *rows, GROUP, sizes.dim),
        normal(1, *rows, slots, sizes.dim),
        normal(2, *rows, slots, sizes.dim),
    )


def listed(seed: int, rows: tuple[int, ...], most: int, count: int) -> Array:
    """Draw lists of ``count`` different integers below ``most`` in ascending order: int32 [*rows, K]."""
    rng = np.random.default_rng(seed)
    lists = [np.sort(rng.choice(most, count, replace=False)) for _ in range(math.prod(rows))]
    return jnp.asarray(np.reshape(lists, (*rows, count)), jnp.int32)
