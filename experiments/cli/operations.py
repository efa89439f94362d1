"""How a command runs the operations of a model: by kernels wherever they can run, or as plain JAX."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from experiments.cli.settings import option


@dataclasses.dataclass(frozen=True)
class Operations:
    """How a command runs the operations of a model.

    Attributes:
        implementation: xla runs every operation as plain JAX, on any device (default: kernels wherever they can run)
    """

    implementation: str | None = option(None, choices=("xla",))

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Set the implementation for all threads of this process inside the block; without one, change nothing."""
        if self.implementation is None:
            yield
            return
        # Imported here, because it imports JAX, which only commands that run models need.
        from pallas_kernels.dispatch import set_default_implementation

        set_default_implementation(self.implementation)
        try:
            yield
        finally:
            set_default_implementation(None)
