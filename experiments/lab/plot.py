"""Draw the figures of the lab's records: `python -m experiments.lab.plot RECORD`, as `kvjax plot` draws all others."""

import sys

from experiments.cli import Job
from experiments.cli.plot import PlotCommand, plot

PACKAGES = {"fidelity": "experiments.lab.fidelity", "insight": "experiments.lab.insight"}


def _plot(command: PlotCommand) -> None:
    plot(command, PACKAGES)


main = Job(_plot, PlotCommand)


if __name__ == "__main__":
    sys.exit(main())
