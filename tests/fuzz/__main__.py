"""Random methods against the laws, and arguments and damaged files against the checks: `python -m tests.fuzz`.

A law that does not hold is "wrong", and so is a right input that is refused or read as something else. A bad input must be
refused by a sentence of this project that says what was given or what was expected: it is "silent" if it is accepted, and
"raw" if the error comes from elsewhere. hypothesis draws the cases and makes a failing one smaller. It keeps failing cases
in the folder .hypothesis, and the next run begins with them; elsewhere the same seed finds them. The exit code is 1 if any
failed.
"""

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

import hypothesis
import jax
from hypothesis import HealthCheck, Phase, errors
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from experiments.cli import Job, Settings, option
from tests.fuzz import arguments, files, laws

Check = Callable[[st.DataObject, pathlib.Path], Iterator[None]]  # draws a case, gets a folder; yields behind each law
KINDS: dict[str, tuple[Check, float]] = {  # and their shares of the time
    "arguments": (arguments.check, 0.1),
    "files": (files.check, 0.2),
    "laws": (laws.check, 0.3),
}
_GRACE = 20.0  # seconds in which a failing case is made smaller after its time


class _Over(KeyboardInterrupt):
    """The time is over. hypothesis passes an interrupt on; it takes any other error for a failure of the case."""


@dataclasses.dataclass
class Tally:
    """What one kind of cases showed: how many laws held, texts of failures, and how long it took."""

    laws: int = 0
    failures: list[str] = dataclasses.field(default_factory=list)
    seconds: float = 0.0


def run(
    kind: str,
    folder: pathlib.Path,
    *,
    seed: int = 0,
    seconds: float = float("inf"),
    cases: int = 10**9,
    remember: bool = False,
) -> Tally:
    """Draw cases of a kind until the time is over, there were so many, or one fails.

    Args:
        kind: of `KINDS`.
        folder: for the files of the cases.
        seed: of all cases.
        seconds: for all cases.
        cases: how many.
        remember: begin with the failing cases of earlier runs, which are kept in the folder .hypothesis.
    """
    tally, begun, failing = Tally(), time.monotonic(), []

    def once(data: st.DataObject) -> None:
        try:
            for _ in KINDS[kind][0](data, folder):
                tally.laws += not failing
                if time.monotonic() - begun > seconds + _GRACE * bool(failing):
                    raise _Over
        except Exception as error:
            if not isinstance(error, errors.HypothesisException):
                failing.append(error)
            raise

    settings = hypothesis.settings(
        max_examples=cases,
        deadline=None,
        phases=[Phase.reuse, Phase.generate, *[Phase.shrink] * (kind != "laws")],  # whose programs compile too long
        database=DirectoryBasedExampleDatabase(f".hypothesis/{kind}") if remember else None,
        suppress_health_check=list(HealthCheck),
    )
    found: tuple[Exception, ...] = ()
    try:
        settings(hypothesis.seed(seed)(hypothesis.given(st.data())(once)))()
    except _Over:
        found = tuple(failing[-1:])
    except ExceptionGroup as group:
        found = group.exceptions
    except Exception as error:
        found = (error,)
    for error in found:
        about = str(error) if isinstance(error, AssertionError) else f"raw: {type(error).__name__}: {error}"
        tally.failures.append(f"{' '.join(about.split())[:600]}  [kvjax fuzz --only {kind} --seed {seed}]")
    tally.seconds = time.monotonic() - begun
    return tally


@dataclasses.dataclass(frozen=True)
class FuzzSettings(Settings):
    """How long, and what.

    Attributes:
        seconds: time for all cases
        cases: most cases of each kind (default: no limit)
        seed: seed of all cases
        only: cases of one kind

    Raises:
        ValueError: a number out of range.
    """

    seconds: float = 60.0
    cases: int | None = None
    seed: int = 0
    only: str | None = option(None, choices=(None, *KINDS))

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be above 0 and finite, got {self.seconds}")
        if self.cases is not None and self.cases < 1:
            raise ValueError(f"cases must be at least 1, got {self.cases}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")


def _fuzz(settings: FuzzSettings) -> int:
    # Programs run once or a few times here.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    kinds = tuple(KINDS) if settings.only is None else (settings.only,)
    run_kind = functools.partial(run, seed=settings.seed, cases=settings.cases or 10**9, remember=True)
    failures, left = [], settings.seconds
    try:
        for at, kind in enumerate(kinds):
            share = KINDS[kind][1] / sum(KINDS[other][1] for other in kinds[at:])  # of the time that is left
            with tempfile.TemporaryDirectory() as folder:
                tally = run_kind(kind, pathlib.Path(folder), seconds=left * share)
            left = max(left - tally.seconds, 0.0)
            failures += tally.failures
            print(f"{kind:10s}{tally.laws:8d} laws held, {len(tally.failures)} failures, {tally.seconds:.1f} s", flush=True)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    print("\n".join([*failures, f"seed {settings.seed}"]))
    return 1 if failures else 0


main = Job(_fuzz, FuzzSettings)


if __name__ == "__main__":
    raise SystemExit(main())
