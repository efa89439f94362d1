"""The commands that evaluate: `python -m kvjax {eval,sweep,compare,plot}`."""

from __future__ import annotations

import argparse
import json
import pathlib
import sys
from collections.abc import Sequence
from typing import Any

from experiments.answering.__main__ import parse_knobs

COMMANDS = ("eval", "sweep", "compare", "plot")


def add_commands(commands: Any) -> None:
    """Adds the four parsers to the command line's subparsers."""
    evaluate = commands.add_parser("eval", help="score methods on suites, Full first", allow_abbrev=False)
    _add_settings(evaluate)
    evaluate.add_argument(
        "--methods", help="comma-separated names, or papers, baselines, all (default all); Full always runs first"
    )
    evaluate.add_argument(
        "--set", action="append", default=[], metavar="METHOD.KNOB=VALUE", help="a knob of a method; repeatable"
    )
    evaluate.add_argument("--budgets", help="comma-separated shares of the length or tokens, for methods with a budget")
    evaluate.set_defaults(run=_eval)

    sweep = commands.add_parser("sweep", help="a grid of one method's knobs in one compile", allow_abbrev=False)
    _add_settings(sweep)
    sweep.add_argument("--method", required=True, help="see kvjax ls")
    sweep.add_argument(
        "--grid",
        action="append",
        default=[],
        required=True,
        metavar="KNOB=V1,V2,...",
        help="values, with ; between values that have commas; repeatable",
    )
    sweep.add_argument(
        "--set", action="append", default=[], metavar="KNOB=VALUE", help="a knob that all settings have; repeatable"
    )
    sweep.set_defaults(run=_sweep)

    compare = commands.add_parser("compare", help="methods against Full, example by example", allow_abbrev=False)
    compare.add_argument("folders", nargs="+", type=pathlib.Path, help="result folders of eval or sweep")
    compare.add_argument("--out", type=pathlib.Path, help="Markdown file to write (default: standard output)")
    compare.set_defaults(run=_compare)

    plot = commands.add_parser("plot", help="figures of a result folder or a record", allow_abbrev=False)
    plot.add_argument("path", type=pathlib.Path, help="folder of eval or sweep, or a JSON record of speed or insight")
    plot.add_argument("--kind", action="append", default=[], help="which figure; repeatable (default: all that apply)")
    plot.add_argument("--out", type=pathlib.Path, help="directory (default: the folder, or the record's)")
    plot.add_argument("--format", default="png,pdf", help="comma-separated: png, pdf (default both)")
    plot.set_defaults(run=_plot)


def _add_settings(parser: argparse.ArgumentParser) -> None:
    """Flags of `experiments.evaluation.settings.Settings`; they go before the keys of --config."""
    parser.add_argument("--config", type=pathlib.Path, help="YAML file with the same names (flags go before it)")
    parser.add_argument("--model", help="Hugging Face directory, or 'builtin' (default)")
    parser.add_argument(
        "--tasks",
        help="comma-separated: task names, groups (ruler, infinitebench, shared, trained), perplexity, or FORMAT:PATH of a "
        "file (ruler, kvpress, longbench, longbench2, infinitebench, scbench)",
    )
    parser.add_argument("--lengths", help="comma-separated, tokens of prompt and answer (default 4096)")
    parser.add_argument("--samples", type=int, help="contexts of a cell (default 20)")
    parser.add_argument("--questions", type=int, help="about each context (default 1)")
    parser.add_argument("--depths", help="comma-separated, where needles go, 0 to 1; a cell each (default: drawn)")
    parser.add_argument(
        "--question",
        help="prefill: in the prompt that is compressed, as in the papers (default); extend: asked of the compressed "
        "cache; turns: one after the other in one cache; auto: prefill for methods that choose by the prompt's end",
    )
    parser.add_argument("--template", choices=("auto", "none"), help="chat template, if the checkpoint has one (auto)")
    parser.add_argument("--system", help="text of the template's system turn")
    parser.add_argument(
        "--template-set",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="what else the template reads, such as enable_thinking=false (Qwen3); repeatable",
    )
    parser.add_argument(
        "--haystack", help="'noise', 'prose' or file:PATH, also TASK=KIND, comma-separated (default: each task's own)"
    )
    parser.add_argument("--max-length", type=int, help="tokens of prompt and answer at most (default: the model's)")
    parser.add_argument("--truncation", help="of longer prompts: middle (default), head, tail, error")
    parser.add_argument("--max-new-tokens", type=int, help="default: each task's")
    parser.add_argument("--perplexity-tokens", type=int, help="tokens scored after each of --lengths (default 1024)")
    parser.add_argument("--seed", type=int, help="of generated examples (default 0)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: bfloat16 on a GPU, else float32")
    parser.add_argument("--batch-tokens", type=int, help="rows x length generated together (default 65536)")
    parser.add_argument("--workers", type=int, help="processes that make prompts (default 2)")
    parser.add_argument(
        "--out", type=pathlib.Path, required=True, help="result folder; a finished cell is not run again"
    )
    parser.add_argument("--force", action="store_true", help="throw away what the folder holds")
    parser.add_argument("--no-plot", action="store_true", help="draw nothing (needs no matplotlib)")
    parser.add_argument("--quiet", action="store_true", help="no progress and no table, only the JSON line")


_LISTS = {"tasks": str, "lengths": int, "depths": float, "budgets": str, "haystack": str}
_PLAIN = (
    "model", "samples", "questions", "question", "template", "system", "max_length", "truncation",
    "max_new_tokens", "perplexity_tokens", "seed", "dtype", "batch_tokens", "workers",
)  # fmt: skip


def _given(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings that flags and --config give."""
    from experiments.evaluation import settings

    made = settings.read_yaml(arguments.config) if arguments.config else {}
    for name, kind in _LISTS.items():
        if (text := vars(arguments).get(name)) is not None:
            try:
                made[name] = tuple(kind(part.strip()) for part in text.split(","))
            except ValueError as error:
                raise ValueError(f"--{name} takes {kind.__name__}s with commas between them, got {text!r}") from error
    for pair in arguments.template_set:
        name, equals, value = pair.partition("=")
        if not equals:
            raise ValueError(f"--template-set takes NAME=VALUE, got {pair!r}")
        known = {"true": True, "false": False, "none": None}
        made["template_variables"] = made.get("template_variables", {}) | {name: known.get(value.lower(), value)}
    return made | {name: vars(arguments)[name] for name in _PLAIN if vars(arguments)[name] is not None}


def _knob(method: str, pair: str) -> dict[str, Any]:
    """``knob=value`` with the knob's type; a budget may be a share."""
    knob, _, value = pair.partition("=")
    if knob.strip() == "budget" and ("/" in value or "." in value):
        return {"budget": value.strip()}
    return parse_knobs(method, [pair])


def _runner(arguments: argparse.Namespace, given: dict[str, Any]) -> Any:
    import models
    from experiments.answering.cell import load_model
    from experiments.demo.report import check_installed
    from experiments.evaluation.runner import Runner
    from experiments.evaluation.settings import from_mapping

    settings = from_mapping(given, str(arguments.config or "the command line"))
    if not arguments.no_plot:
        check_installed()
    model = load_model(settings.model, settings.dtype)
    directory = (
        models.builtin_directory() if settings.model == "builtin" else models.checkpoint_directory(settings.model)
    )
    return Runner(settings, model, directory, arguments.out, force=arguments.force, progress=not arguments.quiet)


def _eval(arguments: argparse.Namespace) -> None:
    from experiments.answering.presets import METHODS, read_settings
    from experiments.evaluation.settings import Choice, choices_of

    given = _given(arguments)
    if arguments.methods is not None:
        given["methods"] = arguments.methods.split(",")
    chosen = list(choices_of(given.get("methods", METHODS)))
    extra = read_settings(arguments.set, lambda name, texts: {k: v for t in texts for k, v in _knob(name, t).items()})
    for name, knobs in extra.items():
        if not any(choice.name == name for choice in chosen):
            raise ValueError(f"--set names {name!r}, which is none of the methods {', '.join(c.name for c in chosen)}")
        chosen = [Choice(c.name, {**c.knobs, **knobs}) if c.name == name else c for c in chosen]
    given["methods"] = [{c.name: dict(c.knobs)} if c.knobs else c.name for c in chosen]
    runner = _runner(arguments, given)
    runner.run()
    _finish(runner.folder, arguments)


def _sweep(arguments: argparse.Namespace) -> None:
    from experiments.evaluation.sweeps import Grid, run_sweep

    varied: dict[str, list[Any]] = {}
    for text in arguments.grid:
        knob, equals, values = text.partition("=")
        if not equals or not values.strip():
            raise ValueError(f"--grid takes KNOB=V1,V2,..., got {text!r}")
        if knob.strip() in varied:
            raise ValueError(f"--grid names {knob.strip()} twice; give all its values at once: {knob.strip()}=V1,V2,...")
        varied[knob.strip()] = [
            _knob(arguments.method, f"{knob.strip()}={value}")[knob.strip()]
            for value in values.split(";" if ";" in values else ",")
        ]
    fixed = {knob: value for pair in arguments.set for knob, value in _knob(arguments.method, pair).items()}
    given = _given(arguments)
    given["methods"] = ["full"]
    runner = _runner(arguments, given)
    run_sweep(runner, Grid(arguments.method.lower(), fixed, varied))
    _finish(runner.folder, arguments)


def _finish(folder: Any, arguments: argparse.Namespace) -> None:
    """Table and plots into the folder, the table to people, one JSON line to programs."""
    from experiments.evaluation import tables
    from experiments.evaluation.comparison import averages, compare, load

    folder.keep_examples()
    written = [folder.write("table.md", tables.report([folder.path]))]
    if not arguments.no_plot:
        written += _figures(folder.path, [], folder.path, ("png", "pdf"))
    found = compare(load([folder.path]))
    if not arguments.quiet:
        scored = any(one.row["unit"] == "percent" for one in found)
        print(tables.summary_table(found) if scored else tables.cell_table(found), file=sys.stderr)
        print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)
    if arguments.quiet or not sys.stdout.isatty():  # a person has read the table
        print(json.dumps({"folder": str(folder.path), "means": averages(found), "rows": folder.rows}))


def _compare(arguments: argparse.Namespace) -> None:
    from experiments.evaluation import tables
    from experiments.records import record

    text = tables.report(arguments.folders)
    if arguments.out is None:
        print(text, end="")
    else:
        record.write_bytes(arguments.out, text.encode())
        print(f"written: {arguments.out}", file=sys.stderr)


def _plot(arguments: argparse.Namespace) -> None:
    from experiments.demo.report import check_installed

    check_installed()
    formats = tuple(part.strip() for part in arguments.format.split(","))
    if unknown := set(formats) - {"png", "pdf"}:
        raise ValueError(f"--format takes png and pdf, got {sorted(unknown)[0]!r}")
    out = arguments.out or (arguments.path if arguments.path.is_dir() else arguments.path.parent)
    written = _figures(arguments.path, arguments.kind, out, formats)
    print("written: " + ", ".join(str(path) for path in written), file=sys.stderr)


def _figures(path: pathlib.Path, kinds: Sequence[str], out: pathlib.Path, formats: Sequence[str]) -> list[pathlib.Path]:
    from experiments.cli.plot import figures
    from experiments.records import record

    written = []
    for name, draw in figures(path, kinds):
        for kind in formats:
            written.append(out / f"{name}.{kind}")
            record.write_bytes(written[-1], draw(kind))
    return written
