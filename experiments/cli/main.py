"""The command line: `python -m kvjax {demo,eval,sweep,compare,plot,generate,ls}`.

Results go to standard output, everything said about them to standard error. Bad input ends with one line and
exit code 2, an interrupt with exit code 130; neither leaves a partial file.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import json
import os
import pathlib
import sys
from collections.abc import Sequence
from typing import NoReturn

import jax

from experiments.answering import __main__ as cli_generate
from experiments.evaluation import __main__ as cli_eval
from kvjax import registry

COMMANDS = ("demo", *cli_eval.COMMANDS, "generate", "ls")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: arguments without the program's name; None takes the process's.

    Returns:
        The exit code: 0, 2 for bad input, 130 when interrupted.
    """
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        if argv and not argv[0].startswith("-") and argv[0] not in COMMANDS:
            close = difflib.get_close_matches(argv[0], COMMANDS, n=1)
            hint = f" (did you mean {close[0]!r}?)" if close else ""
            raise ValueError(f"unknown command {argv[0]!r}{hint}; commands: {', '.join(COMMANDS)}")
        arguments = _parser().parse_args(argv)
        arguments.run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:
        return _say("interrupted", 130)
    except BrokenPipeError:  # the reader went away, as in `... | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (ValueError, OSError, ModuleNotFoundError, FloatingPointError, NotImplementedError) as error:
        return _say(f"error: {_one_line(error)}", 2)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return _say(f"error: the device ran out of memory; use fewer or shorter prompts ({_one_line(error)[:200]})", 2)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="kvjax", description="KV-cache methods for long-context decoding in JAX.")
    commands = parser.add_subparsers(required=True, metavar="{" + ",".join(COMMANDS) + "}")

    demo = commands.add_parser("demo", help="find needles in prose under each method", allow_abbrev=False)
    _add_model(demo)
    demo.add_argument(
        "--length", type=int, default=2048, help="tokens of context, questions and answers (default 2048)"
    )
    demo.add_argument("--samples", type=int, default=2, help="contexts per task (default 2)")
    demo.add_argument("--questions", type=int, default=5, help="questions, and needles, per context (default 5)")
    demo.add_argument(
        "--budget", default="1/8,1/4", help="comma-separated shares of the length or tokens (default 1/8,1/4)"
    )
    demo.add_argument(
        "--methods",
        default="streamingllm,snapkv,h2o,keydiff,quest",
        help="comma-separated; Full is always run first (default streamingllm,snapkv,h2o,keydiff,quest)",
    )
    demo.add_argument("--tasks", default="niah_single_2", help="comma-separated task names (default niah_single_2)")
    demo.add_argument("--haystack", default="prose", help="'prose' (Python's documentation), 'noise' or file:PATH")
    demo.add_argument(
        "--question",
        choices=("auto", "prefill", "extend"),
        default="auto",
        help="where the question stands: in the prompt that is compressed, after it, or (auto) in the prompt "
        "only for methods that choose by the prompt's last queries",
    )
    demo.add_argument("--seed", type=int, default=0)
    demo.add_argument(
        "--out",
        type=pathlib.Path,
        default=pathlib.Path("runs/demo"),
        help="directory for demo.json and demo.png (default runs/demo)",
    )
    demo.add_argument("--no-plot", action="store_true", help="write no PNG (needs no matplotlib)")
    demo.add_argument(
        "--quiet",
        action="store_true",
        help="no progress bar and no table, only the JSON line (which otherwise goes to pipes and files)",
    )
    demo.set_defaults(run=_demo)

    listing = commands.add_parser("ls", help="list methods, their papers and knobs", allow_abbrev=False)
    listing.add_argument("--json", action="store_true", help="one JSON array")
    listing.set_defaults(run=_ls)

    generate = commands.add_parser("generate", help="continue a text under a method", allow_abbrev=False)
    _add_model(generate)
    generate.add_argument("--prompt-file", required=True, help="text to continue, UTF-8; - reads standard input")
    generate.add_argument("--method", default="full", help="see kvjax ls (default full)")
    generate.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="a knob of the method; repeatable"
    )
    generate.add_argument("--max-new-tokens", type=int, default=128)
    generate.add_argument("--temperature", type=float, help="default: greedy")
    generate.add_argument("--top-k", type=int)
    generate.add_argument("--top-p", type=float)
    generate.add_argument("--seed", type=int, default=0, help="of sampling")
    generate.add_argument(
        "--stream", action=argparse.BooleanOptionalAction, default=True, help="show text as it is generated"
    )
    generate.set_defaults(run=cli_generate.run)
    cli_eval.add_commands(commands)
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin' (default)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: float32 on CPU, bfloat16 elsewhere")


def _ls(arguments: argparse.Namespace) -> None:
    listed = []
    for name, cls in sorted(registry.classes().items(), key=lambda item: (item[0] != "full", item[0])):
        knobs = [dataclasses.asdict(knob) for knob in registry.knobs(cls)]
        listed.append(
            {
                "name": name,
                "class": cls.__name__,
                "idea": registry.summary(cls),
                "paper": cls.PAPER,
                "knobs": [
                    {
                        **knob,
                        "default": "required" if knob["default"] is dataclasses.MISSING else knob["default"],
                    }
                    for knob in knobs
                ],
            }
        )
    if arguments.json:
        print(json.dumps(listed, indent=1))
        return
    for entry in listed:
        print(f"{entry['name']}  [{entry['paper']}]\n    {entry['idea']}")
        width = max((len(f"{knob['name']}={knob['default']}") for knob in entry["knobs"]), default=0)
        for knob in entry["knobs"]:
            kind = "traced" if knob["traced"] else "static"
            print(f"    {knob['name'] + '=' + str(knob['default']):{width}s}  {kind}  {knob['doc']}")
        print()
    print("traced: a sweep varies it within one compile; static: decides a shape, a branch or a kernel")


def _demo(arguments: argparse.Namespace) -> None:
    from experiments.demo import report as demo_report
    from experiments.demo import run as demo
    from experiments.demo import settings as demo_settings

    settings = demo_settings.Settings(
        length=arguments.length,
        samples=arguments.samples,
        questions=arguments.questions,
        budgets=tuple(arguments.budget.split(",")),
        methods=tuple(arguments.methods.split(",")),
        tasks=tuple(arguments.tasks.split(",")),
        haystack=arguments.haystack,
        question=arguments.question,
        seed=arguments.seed,
    )
    files = demo_report.output_files(arguments.out, plot=not arguments.no_plot)
    params, config, tokenizer = cli_generate.load(arguments)
    result = demo.run(
        params,
        config,
        tokenizer,
        settings,
        model=pathlib.Path(arguments.model).name,
        progress=not arguments.quiet,
    )
    demo_report.write(result, files)
    if not arguments.quiet:
        print(demo_report.table(result), file=sys.stderr)
        print("written: " + ", ".join(str(path) for path in files), file=sys.stderr)
    if arguments.quiet or not sys.stdout.isatty():  # a person has read the table
        print(json.dumps({"files": [str(path) for path in files], "rows": result["metrics"]}))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__


def _say(text: str, code: int = 0) -> int:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
    return code
