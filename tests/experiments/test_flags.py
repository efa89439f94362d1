"""Flags and YAML keys from settings: the law that they are the fields of the settings, the types of values, errors."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib
import io
import pathlib
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Mapping

import pytest

from experiments.cli import Settings, flags, option, read_yaml, run
from experiments.cli.main import COMMANDS
from experiments.cli.settings import option_of
from experiments.evaluation.settings import EvaluationSettings

ROOT = pathlib.Path(__file__).parents[2]
NOT_OF_SETTINGS = {"--help", "-h", "--config"}
GIVEN = {  # values of settings without defaults
    "AblationSettings": {"names": ["votes"]},
    "GenerateSettings": {"prompt_file": "-"},
    "SweepSettings": {"method": "quest", "grid": ["budget=64,128"]},
}


def kinds_of(command, monkeypatch):
    """The dataclasses of a command, as its ``main`` gives them to the generator of flags; empty if it has no settings."""
    seen = []
    true = flags.make_parser

    def spy(kinds, **about):
        seen.extend(kinds)
        return true(kinds, **about)

    monkeypatch.setattr(flags, "make_parser", spy)
    with contextlib.redirect_stdout(io.StringIO()), contextlib.suppress(SystemExit):
        importlib.import_module(COMMANDS[command].module).main(["--help"])
    monkeypatch.setattr(flags, "make_parser", true)
    return seen


def option_strings(parser):
    return [string for action in parser._actions for string in action.option_strings]


@pytest.mark.parametrize("command", COMMANDS)
def test_flags_and_yaml_keys_are_the_fields_of_the_settings(command, monkeypatch):
    """Every field is a flag, and a key if it is of a `Settings`; nothing else is; and every field is explained."""
    kinds = kinds_of(command, monkeypatch)
    if not kinds:
        pytest.skip("this command takes names only")
    parser = flags.make_parser(kinds, prog="p", about="")
    fields = [field for kind in kinds for field in dataclasses.fields(kind)]
    named = {flags.flag_of(field) for field in fields if not option_of(field).positional}
    assert len(named) == sum(not option_of(field).positional for field in fields), "two fields with the same flag"
    off = {flag.replace("--", "--no-", 1) for flag in named}  # of truth values that are True by default
    strings = set(option_strings(parser))
    assert named <= strings <= named | off | NOT_OF_SETTINGS
    assert ("--config" in strings) == any(issubclass(kind, Settings) for kind in kinds)
    for kind in kinds:
        told = flags.attribute_docs(kind)
        assert {field.name for field in dataclasses.fields(kind)} == told.keys(), kind
        assert dataclasses.is_dataclass(kind) and kind.__dataclass_params__.frozen
        if issubclass(kind, Settings):
            made = kind.from_mapping(GIVEN.get(kind.__name__, {}), "here")
            written = made.as_dict()
            assert list(written) == [field.name for field in dataclasses.fields(kind)]
            assert kind.from_mapping(written, "here") == made
            with pytest.raises(ValueError, match=f"here: unknown setting '{next(iter(written))}_', did you mean"):
                kind.from_mapping({f"{next(iter(written))}_": 1}, "here")


def shown_commands():
    """(command, arguments) of every command line with arguments that README.md and the pages of docs/ show."""
    by_module = {command.module.removesuffix(".__main__"): name for name, command in COMMANDS.items()}
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), *sorted((ROOT / "docs").glob("settings/*.yaml"))]
    for page in pages:
        for line in re.findall(r"python -m ((?:kvjax|experiments)[^`\n]*)", page.read_text()):
            shown = re.sub(r"\bRECORD\b", "record.json", line.strip().rstrip("."))
            program, *argv = shlex.split(shown, comments=True)
            command = argv.pop(0) if program == "kvjax" and argv else by_module.get(program)
            if argv and command in COMMANDS and "..." not in argv and not set(argv) & set("|&"):
                yield command, argv


@pytest.mark.parametrize("command, argv", list(shown_commands()))
def test_commands_of_the_pages_have_known_flags(command, argv, monkeypatch):
    kinds = kinds_of(command, monkeypatch)
    if not kinds:
        pytest.skip("this command takes names only")
    flags.make_parser(kinds, prog=command, about="").parse_args(argv)  # unknown flags end it with SystemExit


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
        slow: run slowly
        fast: run fast
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
    slow: bool = option(False, group="speed")
    fast: bool = option(False, group="speed")

    def __post_init__(self) -> None:
        if self.size < 1:
            raise ValueError(f"size must be at least 1, got {self.size}")


def call(*argv):
    """(exit code, settings, standard error) of a command with these settings."""
    seen, said = [], io.StringIO()
    with contextlib.redirect_stderr(said):
        try:
            code = run(seen.append, Example, prog="kvjax example", about="An example.", argv=argv)
        except SystemExit as ended:
            code = ended.code
    return code, seen, said.getvalue()


def test_every_type_of_value_is_parsed():
    code, (made,), _ = call(
        "--name", "n", "--size", "7", "--shares", "0.25, 1", "--words", "a,b", "--colour", "blue", "--limit", "9",
        "--set-variable", "quiet=true", "--set-variable", "tone=low", "--path", "x/y", "--no-draw", "--loud", "--item", "a,b",
        "--item", "c", "--fast",
    )  # fmt: skip
    assert code == 0
    assert made == Example(
        name="n", size=7, shares=(0.25, 1.0), words=("a", "b"), colour="blue", limit=9,
        variables={"quiet": True, "tone": "low"}, path=pathlib.Path("x/y"), draw=False, loud=True, item=("a,b", "c"),
        fast=True,
    )  # fmt: skip


def test_flags_replace_the_values_of_a_file(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("name: n\nsize: 5\nwords: [256, b]\nvariables: {tone: low, quiet: false}\ndraw: false\n")
    code, (made,), _ = call("--config", str(file), "--size", "6", "--set-variable", "tone=high", "--draw")
    assert code == 0 and made.name == "n" and made.size == 6 and made.words == ("256", "b") and made.draw
    assert made.variables == {"tone": "high", "quiet": False}
    (tmp_path / "again.yaml").write_text(made.to_yaml())
    assert Example.from_yaml(tmp_path / "again.yaml") == made


@pytest.mark.parametrize(
    "argv, said",
    [
        ((), "the following arguments are required: --name"),
        (("--name", "n", "--size", "x"), "argument --size: invalid int value: 'x'"),
        (("--name", "n", "--shares", "1,x"), "expected numbers with commas between them, got '1,x'"),
        (("--name", "n", "--words", "a,,b"), "expected names with commas between them, got 'a,,b'"),
        (("--name", "n", "--colour", "green"), "invalid choice: 'green'"),
        (("--name", "n", "--set-variable", "quiet"), "expected NAME=VALUE, got 'quiet'"),
        (("--name", "n", "--slow", "--fast"), "not allowed with argument --slow"),
        (("--name", "n", "--siz", "3"), "unrecognized arguments: --siz 3"),
        (("--name", "n", "--size", "0"), "kvjax: error: size must be at least 1, got 0"),
        (("--name", "n", "--config", "nowhere.yaml"), "nowhere.yaml"),
    ],
)
def test_errors_are_a_line_and_exit_code_2(argv, said):
    code, seen, error = call(*argv)
    assert code == 2 and not seen and said in error and error.count("\n") == 1 and error.startswith("kvjax")


@pytest.mark.parametrize(
    "text, said",
    [
        ("nam: n", "unknown setting 'nam', did you mean 'name'? expected some of size, name, shares"),
        ("name: 3", "name must be str, got 3"),
        ("name: n\nsize: yes", "size must be int, got True"),
        ("name: n\nlimit: x", "limit must be int or None, got 'x'"),
        ("name: n\nvariables: 3", "variables must be values by name, got 3"),
        ("name: n\ncolour: green", "colour must be one of red, blue, got 'green'"),
        ("name: n\ndraw: 1", "draw must be bool, got 1"),
        ("size: 3", "the following arguments are required: --name"),
        ("- name", "must hold settings by name, got list"),
        ("{", "is not YAML"),
    ],
)
def test_errors_name_the_file_and_what_was_expected(text, said, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(text)
    code, seen, error = call("--config", str(file))
    assert code == 2 and not seen and said in error and error.count("\n") == 1


def test_help_comes_from_the_docstring():
    parser = flags.make_parser([Example], prog="p", about="")
    told = {action.dest: action.help for action in parser._actions}
    assert told["size"] == "how large, in metres (default 3)"
    assert told["shares"] == "shares in %% (default 0.5,1.0)" and told["limit"] == "a limit (default: none)"
    assert told["name"] == "its name (required)"
    assert told["colour"] == "its colour (default red)" and told["words"] == "some words"
    assert "shares in %" in parser.format_help()


def test_a_job_ends_with_its_exit_code(capsys):
    def ends(outcome):
        def job(settings):
            if isinstance(outcome, BaseException):
                raise outcome
            return outcome

        return run(job, Example, prog="kvjax example", about="", argv=["--name", "n"])

    assert (ends(None), ends(3)) == (0, 3)
    assert ends(KeyboardInterrupt()) == 130 and ends(FileNotFoundError("no such file")) == 2
    assert capsys.readouterr().err == "kvjax: interrupted\nkvjax: error: no such file\n"
    with pytest.raises(RuntimeError):  # an error of the program keeps its traceback
        ends(RuntimeError("a bug"))
    full = type("JaxRuntimeError", (RuntimeError,), {})
    assert ends(full("RESOURCE_EXHAUSTED: out of memory")) == 2
    assert "use fewer or shorter prompts" in capsys.readouterr().err
    assert ends(MemoryError("Full needs 9 GiB")) == 2 and capsys.readouterr().err == "kvjax: error: Full needs 9 GiB\n"


def test_settings_of_an_evaluation_are_written_as_users_write_them():
    given = {"methods": ["full", {"quest": {"budget": "1/8"}}], "template_variables": {"enable_thinking": False}}
    made = EvaluationSettings.from_mapping(given, "here").as_dict()
    assert made["methods"] == given["methods"] and made["template_variables"] == given["template_variables"]


def test_commands_that_run_models_have_a_switch_to_plain_jax_for_their_own_time(capsys):
    from pallas_kernels.dispatch import get_default_implementation

    @dataclasses.dataclass(frozen=True)
    class Nothing:
        """No flags of its own."""

    seen = []

    def job(nothing):
        thread = threading.Thread(target=lambda: seen.append(get_default_implementation()))
        thread.start()
        thread.join()

    for argv in (["--implementation", "xla"], []):
        assert run(job, Nothing, prog="p", about="", argv=argv, models=True) == 0
    assert seen == ["xla", None] and get_default_implementation() is None
    with pytest.raises(SystemExit):
        run(job, Nothing, prog="p", about="", argv=["--implementation", "cudnn"], models=True)
    assert "invalid choice: 'cudnn'" in capsys.readouterr().err
    ran = ["demo", "eval", "sweep", "fidelity", "generate", "speed", "offload", "insight", "ablations", "train"]
    for command in ran:
        with pytest.raises(SystemExit):
            importlib.import_module(COMMANDS[command].module).main(["--help"])
        assert "--implementation {xla}" in capsys.readouterr().out, command


def test_an_interrupt_of_a_starting_module_is_an_interrupt(capsys):
    """Compiled modules that are interrupted while they start raise ImportError; other ImportErrors are none."""

    def starting():
        raise ImportError("initialization failed") from KeyboardInterrupt()

    assert flags.guarded(starting) == 130 and capsys.readouterr().err == "kvjax: interrupted\n"

    def broken():
        raise ImportError("no symbol")

    with pytest.raises(ImportError, match="no symbol"):
        flags.guarded(broken)


def test_an_interrupt_while_a_command_is_imported_ends_the_process(tmp_path):
    """The module interrupts itself, and would go on."""
    (tmp_path / "command.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(60)")
    # A process that a shell started in the background ignores interrupts, and so would this one.
    heard = "import signal; signal.signal(signal.SIGINT, signal.default_int_handler)"
    code = "from experiments.cli.main import COMMANDS, Command, main; COMMANDS['x'] = Command('command', ''); main(['x'])"
    done = subprocess.run(
        [sys.executable, "-c", f"{heard}; {code}"],
        env={"PYTHONPATH": f"{ROOT}:{tmp_path}"},
        capture_output=True,
        text=True,
        timeout=50,
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "kvjax: interrupted\n")


def test_a_key_that_stands_twice_is_refused(tmp_path):
    """PyYAML would take the last."""
    file = tmp_path / "settings.yaml"
    for text, told in (
        ("samples: 2\ntasks: [vt]\nsamples: 3\n", "expected keys once, got 'samples' in lines 1 and 3"),
        ("methods:\n- quest:\n    budget: 3\n    budget: 4\n", "expected keys once, got 'budget' in lines 3 and 4"),
        ("a: [1", "line 1"),
        ("[" * 500, "recursion"),
        ("when: 2024-13-45", "month"),
    ):
        file.write_text(text)
        with pytest.raises(ValueError, match=f"(?s)settings.yaml is not YAML: .*{told}"):
            read_yaml(file)
    file.write_text("base: &base {samples: 2}\nmore:\n  <<: *base\n  samples: 3\n")
    assert read_yaml(file)["more"] == {"samples": 3}
