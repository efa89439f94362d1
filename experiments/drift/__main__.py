"""Does search by clusters survive a long generation? `python -m experiments.drift`.

Full samples a long text after a prompt of prose. At checkpoints of that text, a search by cluster votes and the 4-bit
estimate looks for the keys with the largest q.k in ParisKV's retrieval zone, in every layer and KV head, with five kinds of
clusters:

* ``rotated``: ParisKV's own, sign clusters of rotated keys, for which nothing is learned;
* ``plain``: sign clusters of the keys as they are;
* ``learned``: 256 k-means clusters for each slice of 8 channels, learned on the keys of the prompt only;
* ``learned rotated``: learned on directions of rotated keys of the prompt, as ParisKV rotates them;
* ``relearned``: as ``learned``, but on all keys at every checkpoint; its lead over ``learned`` is the loss by drift.

Candidates of the learned clusters are ranked by the estimate from rotated keys. The "fixed" shares are those that ParisKV
uses for long zones; "schedule" is its schedule by the zone's length, which changes within the text.
"""

from __future__ import annotations

import dataclasses
import pathlib
from collections.abc import Sequence

from experiments.answering import load_model
from experiments.cli import Against, run
from experiments.drift.report import table
from experiments.drift.run import run_drift
from experiments.drift.settings import DriftSettings
from experiments.records import check_installed


@dataclasses.dataclass(frozen=True)
class DriftCommand:
    """Where `experiments.drift` writes.

    Attributes:
        out: OUT.json and OUT.png are written
        plot: draw the figure (needs matplotlib)
    """

    out: pathlib.Path = pathlib.Path("runs/drift")
    plot: bool = True


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    about = "Recall of cluster votes over a long generation."
    return run(_drift, DriftSettings, DriftCommand, Against, prog="kvjax drift", about=about, argv=argv, compiles=True)


def _drift(settings: DriftSettings, command: DriftCommand, against: Against) -> None:
    if command.plot:
        check_installed()
    model = load_model(settings.model, settings.dtype, offline=settings.offline)
    record = run_drift(model, settings, command.out, plot=command.plot)
    print(table(record))
    against.show(command.out.with_suffix(".json"))


if __name__ == "__main__":
    raise SystemExit(main())
