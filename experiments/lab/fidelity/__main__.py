"""``python -m experiments.lab.fidelity``: the distance of methods from Full, step by step along the same texts.

A score says whether an answer came out right, and saturates. Here every method decodes the same text as Full, and each step
compares the next-token distributions of the two over the whole vocabulary: KL(Full || method) in nats, whether the most
likely token is the same, and how likely each finds the text's own token. No task is needed, so any model will do.
"""

import dataclasses
import json
import pathlib
import sys

from experiments.answering import load_model, set_knobs
from experiments.cli import Job, option, read_record, write_figures
from experiments.lab.fidelity.report import cells, fidelity_tables, table
from experiments.lab.fidelity.run import Runner
from experiments.lab.fidelity.settings import FidelitySettings
from experiments.lab.plot import PACKAGES
from experiments.records import with_figures, write_bytes


@dataclasses.dataclass(frozen=True)
class FidelityCommand:
    """Where results go, and what is shown.

    Attributes:
        set: a knob of a method; repeatable
        out: result folder; its rows are not measured again
        force: throw away what the folder holds
        plot: draw figures (needs matplotlib)
        json: print a JSON line instead of the tables
        quiet: show no progress
    """

    set: tuple[str, ...] = option((), repeat=True, metavar="METHOD.KNOB=VALUE")
    out: pathlib.Path = pathlib.Path("runs/fidelity")
    force: bool = False
    plot: bool = True
    json: bool = False
    quiet: bool = False


def _fidelity(settings: FidelitySettings, command: FidelityCommand) -> None:
    command = with_figures(command)
    settings = dataclasses.replace(settings, methods=set_knobs(settings.methods, command.set))
    model = settings.load()
    other = settings.reference
    reference = None if other is None else load_model(other, settings.dtype, offline=settings.offline)
    Runner(settings, model, command.out, reference=reference, force=command.force, progress=not command.quiet).run()
    record = read_record(command.out)
    written = [command.out / "table.md"]
    write_bytes(written[0], fidelity_tables(record).encode())
    if command.plot and any(row["value"] > 0 for row in record["metrics"]):
        written += write_figures(command.out, [], command.out, packages=PACKAGES)
    if command.json:
        print(json.dumps({"folder": str(command.out), "rows": record["metrics"]}))
    else:
        for (stream, length), rows in cells(record["metrics"]).items():
            print(f"{stream}, {length} tokens\n\n{table(rows)}\n")
    if not command.quiet:
        print("written: " + ", ".join(map(str, written)), file=sys.stderr)


main = Job(_fidelity, FidelitySettings, FidelityCommand, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
