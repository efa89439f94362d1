"""Random configurations against the laws of methods, and inputs of eight kinds against the checks: `python -m tests.fuzz`.

A law that does not hold is "wrong", and so is a right input that is refused or read as something else. A bad input must be
refused by a sentence of this project that says what was given or what was expected: it is "silent" if it is accepted, and
"raw" if the error comes from elsewhere. hypothesis draws the cases and makes a failing one smaller; each failure is shown
with the command that repeats it alone. The exit code is 1 if there was any.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import tempfile
import time
from collections.abc import Callable, Iterator

import hypothesis
import jax
from hypothesis import HealthCheck, Phase, errors
from hypothesis import strategies as st
from hypothesis.database import DirectoryBasedExampleDatabase

from experiments.cli import Job, Settings, option
from tests.fuzz import arguments, files, laws, names, paths, suites, switches, tables, texts, tokenizers

Check = Callable[[st.DataObject, pathlib.Path], Iterator[None]]  # draws a case, gets a folder; yields behind each law


@dataclasses.dataclass(frozen=True)
class Kind:
    """One kind of cases.

    Attributes:
        check: draws a case and raises an error where it breaks a law.
        share: of the time.
        shrinks: whether failing cases are made smaller, which programs that must be compiled are too slow for.
    """

    check: Check
    share: float
    shrinks: bool = True


KINDS = {
    "arguments": Kind(arguments.check, 0.15),
    "files": Kind(files.check, 0.05),
    "tables": Kind(tables.check, 0.05),
    "suites": Kind(suites.check, 0.05),
    "names": Kind(names.check, 0.05),
    "paths": Kind(paths.check, 0.1),
    "texts": Kind(texts.check, 0.05),
    "tokenizers": Kind(tokenizers.check, 0.1),
    "switches": Kind(switches.check, 0.15, shrinks=False),
    "laws": Kind(laws.check, 0.25, shrinks=False),
}
_GRACE = 20.0  # seconds in which a failing case is made smaller after its time
_BLOB = re.compile(r"@reproduce_failure\('[^']*', b'([^']*)'\)")


class _Over(KeyboardInterrupt):
    """The time is over. hypothesis passes an interrupt on; it takes any other error for a failure of the case."""


@dataclasses.dataclass
class Tally:
    """What one kind of cases showed.

    Attributes:
        kind: its name.
        laws: how many held.
        failures: texts.
        seconds: how long they took.
    """

    kind: str
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
    case: str | None = None,
    remember: bool = False,
) -> Tally:
    """Draw cases of a kind until the time is over, there were so many, or one fails.

    Args:
        kind: of `KINDS`.
        folder: for the files of the cases.
        seed: of all cases.
        seconds: for all cases.
        cases: how many.
        case: only this case, as the text of an earlier failure has it.
        remember: begin with the failing cases of earlier runs, which are kept in the folder .hypothesis.
    """
    tally, begun, failing = Tally(kind), time.monotonic(), []

    def once(data: st.DataObject) -> None:
        try:
            for _ in KINDS[kind].check(data, folder):
                tally.laws += not failing
                if time.monotonic() - begun > seconds + _GRACE * bool(failing):
                    raise _Over
        except Exception as error:
            if not isinstance(error, errors.HypothesisException):
                failing.append(error)
            raise

    phases = [Phase.reuse, Phase.generate, *[Phase.shrink] * KINDS[kind].shrinks]
    test = hypothesis.seed(seed)(hypothesis.given(st.data())(once))
    if case is not None:
        test = hypothesis.reproduce_failure(hypothesis.__version__, case.encode())(test)
    repeat = f"--seed {seed}" if case is None else f"--case {case}"
    database = DirectoryBasedExampleDatabase(f".hypothesis/{kind}") if remember else None
    try:
        hypothesis.settings(
            max_examples=cases,
            deadline=None,
            phases=phases,
            database=database,
            suppress_health_check=list(HealthCheck),
            print_blob=True,
        )(test)()
    except _Over:
        tally.failures += [_told(failing[-1], kind, repeat)] if failing else []
    except (errors.DidNotReproduce, errors.InvalidArgument) as error:
        raise ValueError(f"case must be of a failure of the kind {kind} that is still there, got {case}") from error
    except ExceptionGroup as group:
        tally.failures += [_told(error, kind, repeat) for error in group.exceptions]
    except Exception as error:
        tally.failures.append(_told(error, kind, repeat))
    tally.seconds = time.monotonic() - begun
    return tally


def _told(error: Exception, kind: str, repeat: str) -> str:
    """Write what failed, and the command that repeats it: with the case that hypothesis noted, else with ``repeat``."""
    blob = _BLOB.search("\n".join(getattr(error, "__notes__", ())))
    repeat = f"--case {blob[1]}" if blob else repeat
    about = str(error) if isinstance(error, AssertionError) else f"raw: {type(error).__name__}: {error}"
    return f"{' '.join(about.split())[:600]}  [kvjax fuzz --only {kind} {repeat}]"


def report(tallies: list[Tally]) -> str:
    """The table, and a line for each failure."""
    lines = [f"{'':10s}{'laws':>8s}{'failures':>10s}{'seconds':>9s}"]
    lines += [f"{tally.kind:10s}{tally.laws:8d}{len(tally.failures):10d}{tally.seconds:9.1f}" for tally in tallies]
    return "\n".join([*lines, *(text for tally in tallies for text in tally.failures)])


@dataclasses.dataclass(frozen=True)
class FuzzSettings(Settings):
    """How long, and what.

    Attributes:
        seconds: time for all cases
        cases: most cases of each kind (default: no limit)
        seed: seed of all cases
        only: cases of one kind
        case: only this case, which the text of a failure names; needs --only

    Raises:
        ValueError: a number out of range, or a case without its kind.
    """

    seconds: float = 60.0
    cases: int | None = None
    seed: int = 0
    only: str | None = option(None, choices=(None, *KINDS))
    case: str | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be above 0 and finite, got {self.seconds}")
        if self.cases is not None and self.cases < 1:
            raise ValueError(f"cases must be at least 1, got {self.cases}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if self.case is not None and self.only is None:
            raise ValueError(f"a case is one of its kind: case={self.case} needs only={', only='.join(KINDS)}")


def _fuzz(settings: FuzzSettings) -> int:
    # Programs run once or a few times here.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    kinds = tuple(KINDS) if settings.only is None else (settings.only,)
    run_kind = functools.partial(run, seed=settings.seed, cases=settings.cases or 10**9, case=settings.case, remember=True)
    tallies, left = [], settings.seconds
    try:
        for at, kind in enumerate(kinds):
            share = KINDS[kind].share / sum(KINDS[other].share for other in kinds[at:])  # of the time that is left
            with tempfile.TemporaryDirectory() as folder:
                tallies.append(run_kind(kind, pathlib.Path(folder), seconds=left * share))
            left = max(left - tallies[-1].seconds, 0.0)
            print(f"{kind}: {tallies[-1].laws} laws held in {tallies[-1].seconds:.1f} s", flush=True)
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    print(f"{report(tallies)}\nseed {settings.seed}")
    return 1 if any(tally.failures for tally in tallies) else 0


main = Job(_fuzz, FuzzSettings)


if __name__ == "__main__":
    raise SystemExit(main())
