"""How a command runs programs: compiled ones are kept on disk, in JAX's cache; operations run by kernels or as plain JAX."""

import contextlib
import dataclasses
import pathlib
import sys
from collections.abc import Iterator

import platformdirs

from experiments.cli.settings import option

MAX_BYTES = 4 << 30  # of a larger cache, JAX deletes the programs that were not used for the longest time
_MIN_SECONDS = 0.1  # a program with a shorter compile time is compiled about as fast as it is loaded


@dataclasses.dataclass(frozen=True)
class CompiledPrograms:
    """Whether a command keeps the programs that it compiles.

    Attributes:
        cache: keep compiled programs on disk, for the next run
    """

    cache: bool = True

    @contextlib.contextmanager
    def in_force(self) -> Iterator[None]:
        """Do `switch_on`; the cache stays on after the block, because JAX opens it once for a process."""
        self.switch_on()
        yield

    def switch_on(self) -> None:
        """Turn JAX's cache on, in the user's cache directory; a directory that the user has given to JAX stays.

        A line on standard error names the directory when it is made. If it cannot be made, no program is kept.
        """
        import jax  # only for commands that compile

        if not self.cache:
            jax.config.update("jax_enable_compilation_cache", False)
            return
        if jax.config.jax_compilation_cache_dir is not None or not jax.config.jax_enable_compilation_cache:
            return
        directory = cache_directory()
        try:
            if not directory.is_dir():
                directory.mkdir(parents=True)
                _say(f"compiled programs are kept in {directory}, {MAX_BYTES >> 30} GiB at most; --no-cache keeps none")
        except OSError as error:
            _say(f"compiled programs are not kept: {error}")
            return
        jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
        jax.config.update("jax_persistent_cache_min_compile_time_secs", _MIN_SECONDS)
        jax.config.update("jax_compilation_cache_dir", str(directory))


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


def cache_directory() -> pathlib.Path:
    """Return the directory of compiled programs, in the user's cache directory."""
    return platformdirs.user_cache_path("kvjax") / "xla"


def _say(text: str) -> None:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
