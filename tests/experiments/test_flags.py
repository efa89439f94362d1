"""Flags and YAML keys from settings: laws of every job, the types of values, errors in one line, how a job ends."""

import argparse
import dataclasses
import importlib
import io
import pathlib
import re
import shlex
import sys
import threading
from collections.abc import Mapping

import pytest

from experiments.answering.answer import AnswerSettings
from experiments.cli import Job, Settings, guarded, option, read_yaml
from experiments.cli.main import COMMANDS, main
from experiments.cli.settings import attribute_docs, flag_of, make_parser, option_of

ROOT = pathlib.Path(__file__).parents[2]
JOBS = sorted(
    str(path.relative_to(ROOT).with_suffix("")).replace("/", ".")
    for folder in ("experiments", "tests/fuzz")
    for path in (ROOT / folder).rglob("*.py")
    if "\nmain = Job(" in path.read_text()
)
GIVEN = {  # values of settings without defaults
    "GenerateSettings": {"prompt_file": "-"},
    "AnswerSettings": {"file": "-", "question": ["Who?"]},
}


def job_of(module):
    return importlib.import_module(module).main


@pytest.mark.parametrize("module", JOBS)
def test_flags_and_yaml_keys_are_the_fields_of_the_settings(module):
    """Every field is a flag and is explained, nothing else is a flag; settings come back from what they write."""
    kinds = job_of(module).kinds
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    assert len({field.name for field in fields}) == len(fields), "two fields with the same name"
    flags = {flag_of(field) for field in fields if not option_of(field).positional}
    strings = {string for action in make_parser(kinds)._actions for string in action.option_strings}
    off = {flag.replace("--", "--no-", 1) for flag in flags}  # of truth values that are True by default
    assert flags <= strings <= flags | off | {"--help", "-h", "--config"}
    assert ("--config" in strings) == any(issubclass(kind, Settings) for kind in kinds)
    for kind in kinds:
        assert kind.__dataclass_params__.frozen
        assert {field.name for field in dataclasses.fields(kind)} == attribute_docs(kind).keys(), kind
        if issubclass(kind, Settings):
            settings = kind.from_mapping(GIVEN.get(kind.__name__, {}), "here")
            written = settings.as_dict()
            assert list(written) == [field.name for field in dataclasses.fields(kind)]
            assert kind.from_mapping(written, "here") == settings
            with pytest.raises(ValueError, match=f"here: .*'{next(iter(written))}_'.*{next(iter(written))}"):
                kind.from_mapping({f"{next(iter(written))}_": 1}, "here")


@pytest.mark.parametrize("module", JOBS)
def test_every_job_has_help_and_refuses_an_unknown_flag(module, capsys):
    with pytest.raises(SystemExit) as ended:
        job_of(module)(["--help"])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m {module.removesuffix('.__main__')} ") and "knobs={" not in out
    assert job_of(module)(["--nonsense"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvjax: error: ") and "--nonsense" in err and err.count("\n") == 1


def shown_commands():
    """(job, arguments) of every command line with arguments that README.md and the pages of docs/ show."""
    modules = {f"kvjax {name}": module for name, (module, _) in COMMANDS.items()}
    modules |= {module.removesuffix(".__main__"): module for module in JOBS}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("settings/*.yaml"))]
    for page in pages:
        text = re.sub(r"at commit [0-9a-f]{8}: `[^`]+`", "", page.read_text())  # of finished studies
        for line in re.findall(r"python -m ((?:kvjax|experiments)[^`\n]*)", text):
            line = re.sub(r"(?<!\.)\.$", "", line.strip())  # the end of a sentence; three points stand for more words
            words = shlex.split(re.sub(r"\bRECORD\b", "record.json", line), comments=True)
            command = " ".join(words[: 2 if words[0] == "kvjax" else 1])
            argv = words[len(command.split()) :]
            if modules.get(command) in JOBS and argv and "..." not in argv and not set("|&$") & set("".join(argv)):
                yield modules[command], argv


@pytest.mark.parametrize("module, argv", list(shown_commands()))
def test_commands_of_the_pages_have_known_flags(module, argv):
    job = job_of(module)
    make_parser((*job.kinds, *job.switches)).parse_args(argv)  # raises an error of an unknown flag, or of a bad value


@dataclasses.dataclass(frozen=True, kw_only=True)
class Base(Settings):
    """What stands in a base class.

    Attributes:
        size: how large,
            in metres
    """

    size: int = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class Example(Base):
    """An example of every type.

    Attributes:
        name: its name
        shares: shares in %
        words: some words
        colour: its colour
        limit: a limit (default: none)
        variables: more values
        path: where it is
        draw: draw it
        loud: say it
        item: an item; repeatable
    """

    name: str
    shares: tuple[float, ...] = (0.5, 1.0)
    words: tuple[str, ...] = ()
    colour: str = option("red", choices=("red", "blue"))
    limit: int | None = None
    variables: Mapping[str, object] = option(factory=dict, flag="set-variable")
    path: pathlib.Path | None = None
    draw: bool = True
    loud: bool = False
    item: tuple[str, ...] = option((), repeat=True)

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


def call(*argv):
    """(exit code, settings) of a job with these settings."""
    seen = []

    def run(settings):
        seen.append(settings)

    return Job(run, Example)(argv, "kvjax example"), seen


def test_every_type_of_value_is_parsed():
    code, (settings,) = call(
        "--name", "n", "--size", "7", "--shares", "0.25, 1", "--words", "a,b(c, d)", "--colour", "blue", "--limit", "9",
        "--set-variable", "quiet=true", "--set-variable", "tone=low", "--path", "x/y", "--no-draw", "--loud", "--item", "a,b",
        "--item", "c",
    )  # fmt: skip
    assert code == 0
    assert settings == Example(
        name="n", size=7, shares=(0.25, 1.0), words=("a", "b(c, d)"), colour="blue", limit=9,
        variables={"quiet": True, "tone": "low"}, path=pathlib.Path("x/y"), draw=False, loud=True, item=("a,b", "c"),
    )  # fmt: skip


@pytest.mark.parametrize("is_last", (False, True))
def test_flags_replace_the_values_of_a_file(is_last, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("name: n\nsize: 5\nwords: [256, b]\nvariables: {tone: low, quiet: false}\ndraw: false\n")
    flags, config = ["--size", "6", "--set-variable", "tone=high", "--draw"], ["--config", str(file)]
    code, (settings,) = call(*(flags + config if is_last else config + flags))
    assert code == 0 and settings.name == "n" and settings.size == 6 and settings.words == ("256", "b") and settings.draw
    assert settings.variables == {"tone": "high", "quiet": False}
    (tmp_path / "again.yaml").write_text(settings.to_yaml())
    assert Example.from_yaml(tmp_path / "again.yaml") == settings


@pytest.mark.parametrize(
    "given, words",
    [
        ((), ("required", "name")),
        (("--name", "n", "--size", "x"), ("size", "int", "x")),
        (("--name", "n", "--shares", "1,x"), ("--shares", "numbers", "'x'")),
        (("--name", "n", "--words", "a,,b"), ("--words", "a,,b")),
        (("--name", "n", "--colour", "green"), ("--colour", "red, blue", "green")),
        (("--name", "n", "--set-variable", "quiet"), ("--set-variable", "NAME=VALUE", "quiet")),
        (("--name", "n", "--siz", "3"), ("--siz", "'--size'")),
        (("--name", "n", "--config", "nowhere.yaml"), ("nowhere.yaml",)),
        ("nam: n", ("'nam'", "'name'", "shares")),
        ("name: n\nsize: yes", ("size", "int", "True")),
        ("name: n\nvariables: 3", ("variable", "3")),
        ("name: n\ncolour: green", ("colour", "red, blue", "green")),
        ("name: n\ndraw: 1", ("draw", "true or false", "1")),
        ("size: 3", ("required", "name")),
        ("- name", ("settings.yaml", "by name", "list")),
        ("name: n\nsize: 2\nname: m", ("settings.yaml", "'name'", "lines 1 and 3")),
        ("[" * 500, ("settings.yaml", "recursion")),
        ("name: 2024-13-45", ("settings.yaml", "month")),
    ],
)
def test_a_bad_flag_or_value_of_a_file_is_a_line_and_exit_code_2(given, words, tmp_path, capsys):
    if isinstance(given, str):
        (tmp_path / "settings.yaml").write_text(given)
        given = ("--config", str(tmp_path / "settings.yaml"))
    code, seen = call(*given)
    out, err = capsys.readouterr()
    assert code == 2 and not seen and out == ""
    assert err.startswith("kvjax: error: ") and err.count("\n") == 1 and all(word in err for word in words), err


def test_a_key_of_a_merged_mapping_may_be_replaced(tmp_path):
    """YAML's merge is no key that stands twice."""
    (tmp_path / "settings.yaml").write_text("base: &base {samples: 2}\nmore:\n  <<: *base\n  samples: 3\n")
    assert read_yaml(tmp_path / "settings.yaml")["more"] == {"samples": 3}


def test_help_comes_from_the_docstring():
    helps = {action.dest: action.help for action in make_parser([Example])._actions}
    assert helps["size"] == "how large, in metres (default 3)"
    assert helps["shares"] == "shares in %% (default 0.5,1.0)" and helps["limit"] == "a limit (default: none)"
    assert helps["name"] == "its name (required)" and helps["words"] == "some words"
    assert "shares in %" in make_parser([Example]).format_help()
    assert " FILE" in make_parser([AnswerSettings], for_help=True).format_usage(), "it is required: without brackets"


def test_a_job_ends_with_its_exit_code(capsys):
    def ends(outcome):
        def run(settings):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return Job(run, Example)(["--name", "n"])

    assert (ends(None), ends(3)) == (0, 3)
    assert ends(KeyboardInterrupt()) == 130 and ends(FileNotFoundError("no such file")) == 2
    assert capsys.readouterr().err == "kvjax: interrupted\nkvjax: error: no such file\n"
    full = type("JaxRuntimeError", (RuntimeError,), {})
    assert ends(full("RESOURCE_EXHAUSTED: out of memory")) == 2 and ends(MemoryError("Full needs 9 GiB")) == 2
    assert "fewer or shorter prompts" in capsys.readouterr().err
    assert ends(RuntimeError("Unable to initialize backend 'cdua': not in the list of known backends")) == 2
    for bug in (RuntimeError("a bug"), ImportError("no symbol"), argparse.ArgumentTypeError("of no flag")):
        with pytest.raises(type(bug)):  # an error of the program keeps its traceback
            ends(bug)


def test_a_terminal_that_lacks_a_character_shows_its_escape(monkeypatch):
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    assert guarded(lambda: print("café \u2018")) == 0
    assert sys.stdout.buffer.getvalue() == b"caf\xe9 \\u2018\n"
    monkeypatch.setattr("sys.stdout", None)
    assert guarded(lambda: 4) == 4


def test_commands_that_run_models_have_a_switch_to_plain_jax_for_their_own_time(capsys):
    from pallas_kernels.dispatch import get_default_implementation

    seen = []

    def run(_):
        thread = threading.Thread(target=lambda: seen.append(get_default_implementation()))
        thread.start()
        thread.join()

    job = Job(run, Example, models=True)
    for argv in (["--implementation", "xla"], []):
        assert job(["--name", "n", *argv]) == 0
    assert seen == ["xla", None] and get_default_implementation() is None
    assert job(["--name", "n", "--implementation", "cudnn"]) == 2
    assert "cudnn" in capsys.readouterr().err
    for command in ("demo", "eval", "generate", "speed", "offload"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--implementation {xla}" in capsys.readouterr().out, command
