"""The command line: ``kvjax COMMAND ...``, which is also ``python -m kvjax COMMAND ...``.

Results go to standard output, messages about them to standard error. Bad input ends with one line and exit code 2, an
interrupt with exit code 130; neither leaves a partial file.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import os
import signal
import sys
import threading
import types
from collections.abc import Sequence
from typing import NoReturn

from experiments.cli import shown
from experiments.cli.flags import guarded


@dataclasses.dataclass(frozen=True)
class Command:
    """A command of the command line.

    Attributes:
        module: the module whose ``main(argv)`` runs the command; it is imported only for this command.
        about: a few words for the help.
    """

    module: str
    about: str


USE = {  # for everybody, first
    "demo": Command("experiments.demo.__main__", "find needles in prose under each method"),
    "generate": Command("experiments.answering.__main__", "continue or answer a text under a method"),
    "eval": Command("experiments.evaluation.__main__", "score methods on suites, Full first"),
    "sweep": Command("experiments.evaluation.sweep", "score a grid of one method's knobs in one compile"),
    "compare": Command("experiments.evaluation.compare", "compare methods with Full, or a record with another"),
    "plot": Command("experiments.cli.plot", "draw the figures of a result folder or of a record"),
    "ls": Command("experiments.cli.ls", "list methods with their papers and knobs, tasks, or models"),
    "fetch": Command("experiments.answering.fetch", "download a model, and nothing else"),
    "cache": Command("experiments.cli.cache", "show what is kept on disk, or clear it"),
    "suites": Command("experiments.benchmarks.__main__", "show what a suite's file holds"),
    "records": Command("experiments.records.__main__", "show what a JSON record holds"),
}
STUDY = {  # for those who study methods, write kernels, or work on kvjax
    "fidelity": Command("experiments.lab.fidelity.__main__", "measure distances from Full along texts, in nats"),
    "insight": Command("experiments.lab.insight.__main__", "measure where a method loses attention"),
    "ablations": Command("experiments.lab.ablations.__main__", "measure the parts of methods one at a time"),
    "speed": Command("experiments.speed.__main__", "time decoding and prefill of every method"),
    "offload": Command("experiments.speed.offload", "time decoding from host memory"),
    "kernels": Command("experiments.speed.kernels.__main__", "time kernels against their floors"),
    "peers": Command("experiments.lab.peers.speed.__main__", "time what PyTorch users have instead (needs torch)"),
    "peers-eval": Command("experiments.lab.peers.quality.__main__", "score kvpress's methods beside ours (needs torch)"),
    "lm-eval": Command("experiments.lm_eval.__main__", "run the harness lm-evaluation-harness under a method"),
    "train": Command("experiments.lab.training.__main__", "train the model that ships"),
    "train-adapter": Command("experiments.lab.training.adapter", "train an adapter on the retrieval tasks"),
    "fuzz": Command("experiments.cli.fuzz", "try random cases against laws, and bad inputs against checks"),
    "site": Command("experiments.lab.site.__main__", "write the generated pages of the documentation"),
}
COMMANDS = {**USE, **STUDY}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, 2 for bad input, 130 when interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    return guarded(lambda: _run(argv))


def _run(argv: list[str]) -> int:
    if argv[:1] in (["-h"], ["--help"]):
        print(_help())
        return 0
    if argv[:1] == ["--version"]:
        print(f"kvjax {_version()}")
        return 0
    if not argv:
        raise ValueError(f"a command is missing; commands: {', '.join(COMMANDS)} (see kvjax --help)")
    if argv[0] not in COMMANDS:
        close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
        hint = f" (did you mean {close[0]!r}?)" if close else ""
        raise ValueError(f"unknown command {argv[0]!r}{hint}; commands: {', '.join(COMMANDS)}")
    if (told := shown.help_of(argv[0], argv[1:])) is not None:
        print(told, end="")
        return 0
    return _imported(COMMANDS[argv[0]].module).main(argv[1:]) or 0


def _imported(module: str) -> types.ModuleType:
    """Import a command's module. An interrupt meanwhile ends the process at once, and there is nothing yet to clean up.

    As an exception, the interrupt would reach compiled modules while they start, which print it, abort, or raise an
    ImportError.
    """
    in_main = threading.current_thread() is threading.main_thread()
    if not in_main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        return importlib.import_module(module)
    signal.signal(signal.SIGINT, _end)
    try:
        importlib.import_module("numpy")  # a command that imports JAX later does so from compiled modules, too
        return importlib.import_module(module)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _end(number: int, frame: object) -> NoReturn:
    os.write(2, b"kvjax: interrupted\n")
    os._exit(130)


def _version() -> str:
    from kvjax.version import __version__  # `kvjax.__version__` would import JAX

    return __version__


def _help() -> str:
    width = max(map(len, COMMANDS))

    def listed(commands: dict[str, Command]) -> list[str]:
        return [f"  {name:{width}s}  {command.about}" for name, command in commands.items()]

    return "\n".join(
        [
            "usage: kvjax COMMAND ...",
            "",
            "KV-cache methods for long-context decoding in JAX.",
            "",
            "Use methods, and score them:",
            *listed(USE),
            "",
            "Study methods, time kernels, and work on kvjax:",
            *listed(STUDY),
            "",
            "kvjax COMMAND --help explains a command; kvjax --version tells the version.",
        ]
    )
