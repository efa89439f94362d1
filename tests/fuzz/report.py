"""What became of the cases: counts, and one line for each failure with the command that repeats it alone."""

from __future__ import annotations

import collections
import dataclasses

GOOD, WRONG, SILENT, RAW = "good", "wrong", "silent", "raw"
_FAILURES = (WRONG, SILENT, RAW)


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What one case showed.

    Attributes:
        verdict: "good"; "wrong", a law is broken; "silent", a bad input was accepted or changed the result; "raw", an error
            that this project did not raise, or whose message does not say what was wrong.
        text: for failures, the case in words.
    """

    verdict: str = GOOD
    text: str = ""


@dataclasses.dataclass
class Tally:
    """The outcomes of one kind of cases.

    Attributes:
        kind: the name after `--only`.
        counts: cases by verdict.
        failures: number of the case and outcome.
        seconds: how long they took.
    """

    kind: str
    counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
    failures: list[tuple[int, Outcome]] = dataclasses.field(default_factory=list)
    seconds: float = 0.0

    def add(self, number: int, outcome: Outcome) -> None:
        """Counts one case."""
        self.counts[outcome.verdict] += 1
        if outcome.verdict != GOOD:
            self.failures.append((number, outcome))

    @property
    def cases(self) -> int:
        """How many cases there were."""
        return sum(self.counts.values())

    def passes(self, most_raw: float = 0.01) -> bool:
        """Whether nothing was wrong or accepted silently, and at most this share of the errors was raw."""
        return not self.counts[WRONG] and not self.counts[SILENT] and self.counts[RAW] <= most_raw * self.cases


def report(tallies: list[Tally], seed: int, most: int = 40) -> str:
    """The table, and at most so many lines about failures of each kind of cases."""
    lines = [f"{'':10s}{'cases':>8s}" + "".join(f"{name:>8s}" for name in _FAILURES) + f"{'seconds':>9s}"]
    for tally in tallies:
        counts = "".join(f"{tally.counts[name]:8d}" for name in _FAILURES)
        lines.append(f"{tally.kind:10s}{tally.cases:8d}{counts}{tally.seconds:9.1f}")
    for tally in tallies:
        for number, outcome in tally.failures[:most]:
            text = " ".join(outcome.text.split())[:400]
            lines.append(f"{outcome.verdict}: {text}  [kvjax fuzz --only {tally.kind} --seed {seed} --case {number}]")
        if len(tally.failures) > most:
            lines.append(f"... and {len(tally.failures) - most} failures of {tally.kind} more")
    return "\n".join(lines)
