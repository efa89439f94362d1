"""The command line of lm-evaluation-harness with kvjax: `python -m experiments.lm_eval run --model kvjax --model_args ...`.

The harness finds models that are not its own only through Python, so its command line starts here. It takes the harness's own
arguments, and ``--no-cache`` and ``--implementation xla`` like other commands. ``--model_args`` takes the arguments of
`experiments.lm_eval.model.KvjaxLM` and the method's knobs.
"""

import argparse
import sys
from collections.abc import Sequence

from experiments.cli import CompiledPrograms, Operations, guarded


def main(argv: Sequence[str] | None = None) -> int:
    """Run the harness's command line; returns the exit code."""
    return guarded(lambda: _evaluate(sys.argv[1:] if argv is None else list(argv)))


def _evaluate(arguments: list[str]) -> None:
    from experiments.lm_eval.model import register

    ours = argparse.ArgumentParser(prog="python -m experiments.lm_eval", add_help=False, allow_abbrev=False)
    ours.add_argument("--no-cache", action="store_true")
    ours.add_argument("--implementation", choices=("xla",))
    switches, arguments = ours.parse_known_args(arguments)
    CompiledPrograms(cache=not switches.no_cache).switch_on()
    register()
    from lm_eval.__main__ import cli_evaluate

    before, sys.argv = sys.argv, ["python -m experiments.lm_eval", *arguments]  # the harness reads its arguments from there
    try:
        with Operations(switches.implementation).in_force():
            cli_evaluate()
    finally:
        sys.argv = before


if __name__ == "__main__":
    raise SystemExit(main())
