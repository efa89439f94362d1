"""The command line: ``kvjax COMMAND ...``, which is also ``python -m kvjax COMMAND ...``.

Results go to standard output, messages about them to standard error. Bad input ends with one line and exit code 2, an
interrupt with exit code 130; neither leaves a partial file.
"""

import atexit
import gc
import importlib
import sys
from collections.abc import Sequence

from experiments.cli.job import guarded
from experiments.cli.settings import nearest

# Each command's module, whose `main` is imported only for this command, and a few words for the help.
COMMANDS = {
    "demo": ("experiments.demo.__main__", "find needles in prose under each method"),
    "generate": ("experiments.answering.__main__", "continue or answer a text under a method"),
    "answer": ("experiments.answering.answer", "answer questions about a text under a method"),
    "eval": ("experiments.evaluation.__main__", "score methods on suites, Full first, or a grid of one method's knobs"),
    "compare": ("experiments.evaluation.compare", "compare methods with Full, or a record with another, or show one"),
    "plot": ("experiments.cli.plot", "draw the figures of a result folder or of a record"),
    "ls": ("experiments.cli.ls", "list methods, tasks, models, what a file or the cache holds"),
    "doctor": ("experiments.doctor.__main__", "test this machine: versions, devices, every operation once"),
    "fetch": ("experiments.answering.fetch", "download a model, and nothing else"),
    "speed": ("experiments.speed.__main__", "time decoding and prefill of every method"),
    "kernels": ("experiments.speed.kernels.__main__", "time kernels against their floors"),
    "offload": ("experiments.speed.offload", "time decoding from host memory"),
    "fuzz": ("experiments.cli.fuzz", "try random cases against laws, and bad inputs against checks"),
}

_FULL = 10_000  # full collections of garbage go through a million objects of traces again and again, and find next to nothing


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; return the exit code: 0, 2 for bad input, 130 when interrupted."""
    argv = list(sys.argv[1:] if argv is None else argv)
    gc.set_threshold(*gc.get_threshold()[:2], _FULL)
    atexit.register(gc.freeze)  # what is left goes with the process
    return guarded(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(_help())
        return 0
    if argv[:1] == ["--version"]:
        from kvjax.version import __version__  # `kvjax.__version__` would import JAX

        print(f"kvjax {__version__}")
        return 0
    if not argv:
        raise ValueError(f"a command is missing; commands: {', '.join(COMMANDS)} (see kvjax --help)")
    if argv[0] not in COMMANDS:
        raise ValueError(f"unknown command {argv[0]!r}{nearest(argv[0], COMMANDS)}; commands: {', '.join(COMMANDS)}")
    return importlib.import_module(COMMANDS[argv[0]][0]).main(argv[1:], prog=f"kvjax {argv[0]}")


def _help() -> str:
    width = max(map(len, COMMANDS))
    return "\n".join(
        [
            "usage: kvjax COMMAND ...",
            "",
            "KV-cache methods for long-context decoding in JAX.",
            "",
            *(f"  {name:{width}s}  {about}" for name, (_, about) in COMMANDS.items()),
            "",
            "kvjax COMMAND --help explains a command; kvjax --version tells the version.",
        ]
    )
