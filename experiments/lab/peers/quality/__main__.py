"""Scores kvpress's presses on kvjax's prompts: `python -m experiments.lab.peers.quality FOLDER`.

FOLDER is a result folder of `kvjax eval`. Its prompts are made again, and checked against the folder's keys. The folder's
model answers them under presses of kvpress, unmodified and with their defaults, and under transformers alone as a control.
Answers are greedy, and the tasks' own scorers score them. A row is written as soon as it is finished, and is not run again.

This job needs torch, transformers and kvpress, which kvjax does not need. JAX starts no device in it, so torch has all of the
memory.
"""

from __future__ import annotations

from experiments.cli import Job, read_record
from experiments.evaluation.folder import read_runs
from experiments.lab.peers.quality import report
from experiments.lab.peers.quality.prompts import find_weights, read_model, read_prompts
from experiments.lab.peers.quality.settings import PeersCommand, PeersSettings
from experiments.lab.peers.torch_device import PACKAGES, check_torch, describe_device, the_device
from experiments.records import Results, table_file, write_bytes


def _peers(settings: PeersSettings, command: PeersCommand) -> None:
    check_torch("experiments.lab.peers.quality", "torch transformers kvpress")
    from experiments.lab.peers.quality.bench import Bench

    device, ours = the_device(), read_record(command.folder)
    directory = find_weights(command.folder, command.weights, command.out.with_name(f"{command.out.stem}-model"))
    model = read_model(command.folder, directory)
    asked = read_prompts(command.folder, settings, model)
    print(f"{len(asked)} cells, prompts as kvjax answered them; kvjax's rows beside: {sum(len(x.ours) for x in asked)}")
    described = describe_device(device)
    same = {name: ours["settings"].get(name) for name in ("model", "weights", "dtype", "template")}
    same |= {"samples": settings.samples, "attention": settings.attention, "decoding": "greedy", "device": described["kind"]}
    results = Results(command.out, "peers-quality", same, device=described, packages=PACKAGES)
    commits = ", ".join(dict.fromkeys(str(run["commit"]) for run in read_runs(command.folder))) or str(ours["commit"])
    about = {"model": same["model"], "dtype": same["dtype"], "device": ours["device"]["kind"], "commit": commits}
    results.note("beside", about)
    bench = Bench(settings, results, model, device)
    for one in asked:
        bench.cell(one)
        tables = report.peer_scores(results.metrics, results.notes)
        write_bytes(table_file(results.path), tables.encode())
    print(f"{tables}\nrecord: {results.path}")
    if bench.failed:
        raise SystemExit(f"{bench.failed} rows failed; their errors are in the record")


main = Job(_peers, PeersSettings, PeersCommand)


if __name__ == "__main__":
    raise SystemExit(main())
