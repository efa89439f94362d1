"""Random configurations against the laws of methods, and inputs of eight kinds against the checks: `python -m tests.fuzz`.

A law that does not hold is "wrong", and so is a right input that is refused or read as something else. A bad input must be
refused by a sentence of this project that says what was given or what was expected: it is "silent" if it is accepted, and
"raw" if the error comes from elsewhere. Each failure is shown with the command that repeats it alone. The exit code is 1 if
anything was wrong or silent, or more than one case in a hundred was raw.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import tempfile
import time
from collections.abc import Callable, Iterator

import jax

from experiments.cli import Job, Settings, option
from tests.fuzz import laws, names, suites, switches
from tests.fuzz.inputs import Inputs
from tests.fuzz.paths import Paths
from tests.fuzz.report import Outcome, Tally, report
from tests.fuzz.tables import Tables
from tests.fuzz.texts import Texts
from tests.fuzz.tokenizers import Tokenizers

# The kinds, and their shares of the time. A kind makes what gives the outcomes of the case of a number, from the seed and a
# folder for files.
_Check = Callable[[int], Iterator[Outcome]]
_KINDS: dict[str, tuple[Callable[[int, pathlib.Path], _Check], float]] = {
    "inputs": (lambda seed, folder: Inputs(seed, folder).check, 0.2),
    "tables": (lambda seed, folder: Tables(seed, folder).check, 0.05),
    "suites": (lambda seed, folder: functools.partial(suites.check, seed, folder=folder), 0.05),
    "names": (lambda seed, folder: functools.partial(names.check, seed), 0.05),
    "paths": (lambda seed, folder: Paths(seed, folder).check, 0.1),
    "texts": (lambda seed, folder: Texts(seed, folder).check, 0.05),
    "tokenizers": (lambda seed, folder: Tokenizers(seed, folder).check, 0.1),
    "switches": (lambda seed, folder: functools.partial(switches.check, seed), 0.15),
    "laws": (lambda seed, folder: functools.partial(laws.check, seed), 0.3),
}


@dataclasses.dataclass(frozen=True)
class FuzzSettings(Settings):
    """How long, and what.

    Attributes:
        seconds: time for all cases
        cases: most cases of each kind (default: no limit)
        seed: seed of all cases
        only: cases of one kind
        case: only the case of this number; needs --only

    Raises:
        ValueError: a number out of range, or a case without its kind.
    """

    seconds: float = 60.0
    cases: int | None = None
    seed: int = 0
    only: str | None = option(None, choices=(None, *_KINDS))
    case: int | None = None

    def __post_init__(self) -> None:
        if not 0 < self.seconds < float("inf"):
            raise ValueError(f"seconds must be above 0 and finite, got {self.seconds}")
        for name, least in (("cases", 1), ("seed", 0), ("case", 0)):
            value = vars(self)[name]
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, got {value}")
        if self.case is not None and self.only is None:
            raise ValueError(f"a case has a number among its kind: case={self.case} needs only={', only='.join(_KINDS)}")


def _fuzz(settings: FuzzSettings) -> int:
    # Programs run once or a few times here.
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", jax.default_backend() == "cpu")
    kinds = tuple(_KINDS) if settings.only is None else (settings.only,)
    tallies, left = [], settings.seconds
    try:
        for at, kind in enumerate(kinds):
            share = _KINDS[kind][1] / sum(_KINDS[other][1] for other in kinds[at:])  # of the time that is left
            tallies.append(_tally(kind, settings, left * share))
            left -= tallies[-1].seconds
    finally:
        jax.config.update("jax_disable_most_optimizations", before)
    print(report(tallies, settings.seed))
    return 0 if all(tally.passes() for tally in tallies) else 1


def _tally(kind: str, settings: FuzzSettings, seconds: float) -> Tally:
    tally, begun = Tally(kind), time.monotonic()
    for number, outcome in _cases(kind, settings):
        tally.add(number, outcome)
        tally.seconds = time.monotonic() - begun
        if settings.case is None and (tally.seconds >= seconds or tally.cases == settings.cases):
            break
    return tally


def _cases(kind: str, settings: FuzzSettings) -> Iterator[tuple[int, Outcome]]:
    """Numbers and outcomes, without an end unless one case is asked for."""
    number, only = (0, False) if settings.case is None else (settings.case, True)
    with tempfile.TemporaryDirectory() as folder:
        check = _KINDS[kind][0](settings.seed, pathlib.Path(folder))
        while True:
            yield from ((number, outcome) for outcome in check(number))
            if only:
                return
            number += 1


main = Job(_fuzz, FuzzSettings)


if __name__ == "__main__":
    raise SystemExit(main())
