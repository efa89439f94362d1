"""The cost of an evaluation: what is compiled, how often, where, and what is kept on disk."""

import collections
import contextlib
import sys
import threading
import types

import jax
import numpy as np
import platformdirs
import pytest

import models
from experiments.answering import Calibration, Shape, ask, load_model, programs
from experiments.cli import CompiledPrograms
from experiments.cli.main import main
from experiments.evaluation import ahead, runner
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import CompileClock
from experiments.speed import uneven_scores
from kvjax import registry

pytestmark = [pytest.mark.usefixtures("quick_compile"), pytest.mark.xdist_group("evaluation")]

CONFIG = models.ModelConfig(
    vocab_size=5120, hidden_size=32, intermediate_size=64, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
    max_position_embeddings=512, tie_word_embeddings=True, eos_token_ids=(0,), rope_theta=1e4,
)  # fmt: skip
LARGE = ("read", "extend", "decode_and_measure")


@contextlib.contextmanager
def compilations():
    """The large programs that XLA is given inside the block, by name and thread, with their number."""
    found = collections.Counter()

    def listen(event, seconds, fun_name="", **more):
        if event == "/jax/core/compile/backend_compile_duration":
            found.update((name, threading.get_ident()) for name in (*LARGE, "prefill_once") if name in fun_name)

    jax.clear_caches()
    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        yield found
    finally:
        jax.monitoring.unregister_event_duration_listener(listen)


class Eager(ahead.CompileAhead):
    """Compiles ahead on a CPU too."""

    def __init__(self):
        super().__init__(threads=2)
        self.spare = True


@pytest.mark.parametrize(
    "question, large", [("prefill", LARGE[::2]), pytest.param("extend", LARGE, marks=pytest.mark.thorough)]
)
def test_a_method_at_a_length_compiles_once_for_all_tasks_and_before_it_is_asked(
    question, large, directory, tmp_path, monkeypatch
):
    """The tasks' answers have at most 8, 14, 40 and 128 tokens, and the prompts fill the model's last position."""
    monkeypatch.setattr(runner, "CompileAhead", Eager)
    given = {
        "model": str(directory), "tasks": ["passkey", "number_string", "vt", "niah_multivalue"], "lengths": [512],
        "samples": 3, "methods": ["full"], "question": question, "workers": 0, "batch_tokens": 1024,
    }  # fmt: skip
    settings = EvaluationSettings.from_mapping(given, "a test")
    made = runner.Runner(settings, load_model(directory, "float32"), tmp_path, progress=False)
    with compilations() as found:
        made.run()
    assert len(made.folder.rows) == 4
    assert sum(found.values()) == len(large)
    assert {name for name, _ in found} == set(large)
    assert threading.get_ident() not in {thread for _, thread in found}
    answered = {row["name"]: row["mean_answer_tokens"] for row in made.folder.rows}
    assert answered["passkey"] <= 8 and answered["vt"] <= 40


def test_programs_are_queued_before_chess_is_calibrated(directory, tmp_path, monkeypatch):
    """Before any prompt is made, too; the groups are those that the prompts give."""
    given = {"model": str(directory), "tasks": ["vt", "passkey"], "lengths": [512], "samples": 2, "workers": 0}
    given |= {"methods": ["chess", "keydiff"], "question": "prefill"}
    settings = EvaluationSettings.from_mapping(given, "a test")
    short = Calibration(("passkey",), 512, 2, 8, 0)  # else its 512 new tokens are the window
    monkeypatch.setattr(runner.Runner, "_calibration", short)
    made = runner.Runner(settings, load_model(directory, "float32"), tmp_path, progress=False)
    monkeypatch.setattr(runner, "chess_thresholds", lambda *given: {"tau_entropy": 1.5, "tau_varentropy": 2.5})
    with Eager() as queue:
        made._compile_first(queue)
        keys = list(queue._traced)
        assert not made.store._made
        for group in made._plan.groups(made._jobs(settings.choices)):
            made._add(queue, group)
        assert list(queue._traced) == keys
    full, chess, alone = (made.setting(choice, made.cells[0]).method for choice in settings.choices)
    assert chess.tau_entropy == 1.5 and [key[0] for key in keys] == list(map(jax.tree.structure, [(alone,), (full, chess)]))


KNOBS = {
    "chess": {"trigger": "fixed"},
    **dict.fromkeys(("duoattention", "headkv"), {"scores": uneven_scores(CONFIG)}),
    "sentencekv": {"boundary": np.arange(CONFIG.vocab_size) % 20 == 0},
}


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.thorough] * (n != "quest")) for n in sorted(registry.classes())]
)
def test_ask_finds_what_was_compiled_ahead(name):
    method = registry.make(name, **KNOBS.get(name, {}))
    params = models.random_params(CONFIG, jax.random.key(0))
    shape = Shape(128, 2, 4, questions=1, question_length=32, chunk=64)
    with compilations() as found:
        for lowered in programs(params, CONFIG, [method], shape):
            lowered.compile()
        before = sum(found.values())
        given = {"questions": [[[5, 6, 7]]] * 2, "limits": [[3], [2]]}
        ask(params, CONFIG, [list(range(1, 100))] * 2, method, shape, **given)
    assert sum(found.values()) == before >= len(LARGE)


def test_methods_behind_others_find_what_was_compiled_ahead(directory, tmp_path, monkeypatch):
    """KVzip begins with the hidden states that Full and Quest have read."""
    monkeypatch.setattr(runner, "CompileAhead", Eager)
    given = {"model": str(directory), "tasks": ["passkey"], "lengths": [512], "samples": 2, "methods": ["quest", "kvzip"]}
    settings = EvaluationSettings.from_mapping(given | {"question": "prefill", "workers": 0}, "a test")
    made = runner.Runner(settings, load_model(directory, "float32"), tmp_path, progress=False)
    with compilations() as found:
        made.run()
    assert [row["read_together"] for row in made.folder.rows] == [3, 3, 3]
    assert threading.get_ident() not in {thread for _, thread in found} and "prefill_once" in {name for name, _ in found}


def test_a_clock_counts_its_own_thread():
    def compile_something():
        jax.jit(lambda x: x * 3 + 1).lower(np.float32(2)).compile()

    with CompileClock() as clock:
        other = threading.Thread(target=compile_something)
        other.start()
        other.join()
        assert clock.seconds == 0
        compile_something()
        assert clock.seconds > 0


def test_what_cannot_be_compiled_ahead_is_left_to_the_caller():
    def breaks():
        raise ValueError("no such program")

    errors, before = [ValueError("once")], sys.getswitchinterval()

    def breaks_once():
        if errors:
            raise errors.pop()
        return [jax.jit(lambda x: x + 1).lower(1.0)]

    with Eager() as queue:
        queue.add("bad", breaks)
        assert isinstance(queue.wait("bad"), ValueError)  # the caller meets the error when it compiles the program itself
        queue.add("bad for XLA", lambda: [types.SimpleNamespace(compile=breaks)])
        assert isinstance(queue.wait("bad for XLA"), ValueError)
        queue.add("good", breaks_once)
        assert queue.wait("good") is None and not errors
        assert sys.getswitchinterval() < before
    assert sys.getswitchinterval() == before


# ---- the cache on disk --------------------------------------------------------------------------------------------

SWITCHES = (
    "jax_compilation_cache_dir",
    "jax_enable_compilation_cache",
    "jax_compilation_cache_max_size",
    "jax_persistent_cache_min_compile_time_secs",
)


@pytest.fixture
def nothing_given(tmp_path, monkeypatch):
    """JAX as a user has it, who has set nothing; and a cache directory of the user's."""
    before = {name: getattr(jax.config, name) for name in SWITCHES}
    jax.config.update("jax_compilation_cache_dir", None)
    monkeypatch.setattr(platformdirs, "user_cache_path", lambda name: tmp_path / name)
    yield tmp_path / "kvjax" / "xla"
    for name, value in before.items():
        jax.config.update(name, value)


def test_programs_are_kept_in_the_users_cache_and_that_is_said_once(nothing_given, capsys):
    CompiledPrograms().switch_on()
    assert jax.config.jax_compilation_cache_dir == str(nothing_given) and nothing_given.is_dir()
    assert 0 < jax.config.jax_compilation_cache_max_size < 1 << 40
    said = capsys.readouterr()
    assert str(nothing_given) in said.err and "--no-cache" in said.err and said.out == ""
    jax.config.update("jax_compilation_cache_dir", None)
    CompiledPrograms().switch_on()
    assert jax.config.jax_compilation_cache_dir == str(nothing_given) and capsys.readouterr().err == ""


def test_a_users_own_directory_stays_and_no_cache_keeps_nothing(nothing_given, capsys):
    jax.config.update("jax_compilation_cache_dir", "/somewhere/else")
    CompiledPrograms().switch_on()
    assert jax.config.jax_compilation_cache_dir == "/somewhere/else"
    jax.config.update("jax_compilation_cache_dir", None)
    CompiledPrograms(cache=False).switch_on()
    assert not jax.config.jax_enable_compilation_cache and not nothing_given.exists()
    assert capsys.readouterr().err == ""


def test_what_is_kept_on_disk_is_shown_and_cleared(nothing_given, capsys):
    kvjax_files = nothing_given.parent
    for file in ("xla/a-cache", "models/one/model.safetensors", "models/two/config.json", "models/.two.lock"):
        (kvjax_files / file).parent.mkdir(parents=True, exist_ok=True)
        (kvjax_files / file).write_bytes(b"x" * 1_500_000)
    (kvjax_files / "models" / "link").symlink_to(nothing_given.parent.parent)
    assert main(["ls", "cache"]) == 0
    said = capsys.readouterr().out
    assert ".two.lock" not in said and "1.5 MB  programs" in said and "1.5 MB  one" in said and "6.0 MB in all" in said
    assert main(["ls", "cache", "--clear", "three"]) == 2
    assert "expected some of programs, models, all, link, one, two, got 'three'" in capsys.readouterr().err
    assert main(["ls", "--clear", "all"]) == 2 and (kvjax_files / "xla").is_dir()
    assert main(["ls", "cache", "--clear", "one"]) == 0 and not (kvjax_files / "models" / "one").exists()
    assert main(["ls", "cache", "--clear", "programs"]) == 0 and not (kvjax_files / "xla").exists()
    assert "1.5 MB are free again" in capsys.readouterr().out and (kvjax_files / "models" / "two").is_dir()
    assert main(["ls", "cache", "--clear", "all"]) == 0 and not any((kvjax_files / "models").iterdir())
    assert nothing_given.parent.parent.is_dir(), "of a link only the link is deleted"
    assert main(["ls", "cache"]) == 0 and capsys.readouterr().out.endswith(f"nothing is kept in {kvjax_files}\n")


def test_without_a_place_for_it_a_command_runs_all_the_same(nothing_given, capsys):
    nothing_given.parent.write_text("a file, where a directory should be")
    CompiledPrograms().switch_on()
    assert jax.config.jax_compilation_cache_dir is None
    assert "compiled programs are not kept" in capsys.readouterr().err
