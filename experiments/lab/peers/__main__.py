"""Times decoding in PyTorch: `python -m experiments.lab.peers --lengths 131072 --methods full,snapkv`.

Shapes are the same as in `experiments.speed`. Weights are random, and the cache is filled as prefill would leave it, so that
only decoding costs time. Full is Hugging Face's `generate`, with its default cache and with a static cache, for which
`generate` switches torch.compile on by itself. Other methods are presses of kvpress, which compress the prompt once; then
`generate` decodes over the tokens that the press left. A row is written as soon as it is finished, and is not measured
again. A row that does not fit into memory, or whose package is missing, is recorded as such.

This job needs torch and transformers, which kvjax does not need. JAX starts no device in it, so torch has all of the memory.
"""

from __future__ import annotations

import importlib

from experiments.cli import Job
from experiments.lab.peers import report
from experiments.lab.peers.settings import METHODS, PACKAGES, PeersCommand, PeersSettings
from experiments.records import Results
from experiments.speed.rows import finish
from experiments.speed.settings import MODELS


def _peers(settings: PeersSettings, command: PeersCommand) -> None:
    for name in ("torch", "transformers"):
        try:
            importlib.import_module(name)
        except ModuleNotFoundError as error:
            told = f"experiments.lab.peers needs {name}, which is not installed here: pip install torch transformers"
            raise ModuleNotFoundError(told) from error
    import torch

    from experiments.lab.peers.bench import Bench

    device, described = torch.device("cpu"), {"platform": "cpu", "kind": "cpu", "count": 1}
    if torch.cuda.is_available():
        device = torch.device("cuda", 0)
        described = {"platform": "gpu", "kind": torch.cuda.get_device_name(device), "count": 1}
    same = {"device": described["kind"], "weights": "random", "dtype": MODELS[settings.model]().dtype, "decoding": "greedy"}
    results = Results(command.out, "peers", same, device=described, packages=PACKAGES)
    bench = Bench(settings, results, device)
    for method in sorted(settings.methods, key=METHODS.index):  # Full first: kvpress changes transformers' attention
        for length in settings.lengths:
            for batch in settings.batches:
                for cache in settings.caches:
                    bench.row(method, length, batch, cache)
    finish(results, report.peer_tables(results.metrics, results.notes), bench.failed)


main = Job(_peers, PeersSettings, PeersCommand)


if __name__ == "__main__":
    raise SystemExit(main())
