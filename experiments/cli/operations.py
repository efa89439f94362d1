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
        """A context in which all threads of this process do so; it changes nothing where nothing was given."""
        if self.implementation is None:
            yield
            return
        # It imports JAX: only for commands that run models.
        from pallas_kernels.dispatch import set_default_implementation

        set_default_implementation(self.implementation)
        try:
            yield
        finally:
            set_default_implementation(None)
