"""`python -m kvjax`: listing, generating with a tiny model, one clear line and exit code 2 for bad input."""

import importlib.metadata
import io
import json
import pathlib
import re
import shutil
import time
import tomllib

import jax
import jax.numpy as jnp
import pytest

import kvjax
import models
from experiments import tasks
from experiments.cli.main import COMMANDS, main
from experiments.records import CompileClock, Timer
from kvjax import registry, version
from kvjax.wrappers.named import EXAMPLES, PATTERNS
from tests.tiny_models import BUILTIN
from tests.tiny_models import SHIPPED as CONFIG

ROOT = pathlib.Path(__file__).parents[2]
pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.fixture(scope="module")
def prompt(tmp_path_factory):
    path = tmp_path_factory.mktemp("prompt") / "prompt.txt"
    path.write_text("The special magic number for quiet-river is: 4821. " * 5, encoding="utf-8")
    return path


@pytest.fixture
def fails(capsys):
    """Runs a command that must fail: exit code 2, nothing on standard output, one line, no traceback."""

    def run(*argv: str) -> str:
        try:
            code = main([str(argument) for argument in argv])
        except SystemExit as exit:  # how argparse ends
            code = exit.code
        out, err = capsys.readouterr()
        assert code == 2 and out == ""
        assert err.count("\n") == 1 and "Traceback" not in err and "error: " in err
        return err

    return run


def test_ls_names_and_explains_every_method_and_wrapper(capsys):
    assert main(["ls", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed.keys() == {*registry.classes(), *registry.WRAPPERS, *PATTERNS}
    for entry in listed.values():
        assert entry["idea"] and isinstance(entry["keeps"], str)
        assert entry["paper"].startswith("arXiv:") or entry["wrapper"] or entry["name"] == "oracle"
        assert entry["wrapper"] == (entry["name"] not in registry.classes())
        assert all(knob["doc"] for knob in entry["knobs"]), entry["name"]
    (budget,) = [knob for knob in listed["quest"]["knobs"] if knob["name"] == "budget"]
    assert budget == {"name": "budget", "default": 1024, "traced": True, "doc": budget["doc"]}
    assert main(["ls"]) == 0
    text = capsys.readouterr().out
    parts = text.split("\n\n")
    for part, name in zip(parts, listed, strict=False):
        cls = registry.find(name)
        assert part.startswith(f"{name}  (--method ") and f".{cls.__name__})" in part and cls.keeps in part
        assert all(f"  {knob.name}=" in part and knob.doc in part for knob in registry.knobs(cls))
        assert main(["ls", name]) == 0 and capsys.readouterr().out == f"{part}\n\n{parts[-1]}"
    for name, example in EXAMPLES.items():
        assert f'{name}  (--method "{example}", or ' in text and registry.WRAPPERS[name] is type(kvjax.make(example))
    assert '--method "xattention(quest)"' in text and "object at" not in text and "arXiv:2502.20766" in text


def test_ls_lists_tasks_and_shows_examples(capsys):
    assert main(["ls", "tasks"]) == 0
    text = capsys.readouterr().out
    for name, task in tasks.TASKS.items():
        assert task.about and f"{name}  " in text and task.about in text
    assert all(f"\n{group}  " in text for group in tasks.GROUPS)
    assert main(["ls", "tasks", "vt"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("vt: ") and "--- question\nQuestion: Find all variables" in text and "--- expected" in text
    assert main(["ls", "tasks", "understanding"]) == 0
    text = capsys.readouterr().out
    assert text.startswith("assoc_form ") and "\nlogs  " in text and "vt" not in text and "\ngenerated" not in text
    assert main(["ls", "tasks", "kv_retrieval", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["task"] == "kv_retrieval"
    assert main(["ls", "tasks", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["groups"].keys() == tasks.GROUPS.keys()


def test_suites_shows_what_a_file_holds(tmp_path, capsys):
    line = {"context": "The sky is blue.", "question": "What is blue?", "answer_prefix": " The", "answer": "sky",
            "task": "niah_single_1", "max_new_tokens": 4}  # fmt: skip
    (tmp_path / "mine.jsonl").write_text(json.dumps(line) + "\n" + json.dumps(line))
    assert main(["ls", f"kvpress:{tmp_path / 'mine.jsonl'}"]) == 0
    text = capsys.readouterr().out
    assert "niah_single_1         2" in text and "expected: sky" in text


def test_the_version_equals_pyproject(capsys, monkeypatch):
    """It is known in a checkout that is not installed, too."""
    declared = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"kvjax {declared['version']}\n" == f"kvjax {kvjax.__version__}\n"
    assert declared["scripts"] == {"kvjax": "experiments.cli.main:main"}

    def not_installed(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "version", not_installed)
    assert version._version() == declared["version"]


def test_help_names_every_command(capsys):
    assert main(["--help"]) == 0
    text = capsys.readouterr().out
    assert len(COMMANDS) <= 15 and all(f"\n  {name} " in text and about in text for name, (_, about) in COMMANDS.items())


def test_a_text_is_put_into_the_template(directory, tmp_path, capsys):
    """The template's begin and end are part of the prompt; without a template a line says so."""
    folder = shutil.copytree(directory, tmp_path / "chat")
    (folder / "chat_template.jinja").write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}{% endfor %} [answer]")
    told = {}
    for model, words in ((folder, []), (folder, ["--system", "Be brief."]), (directory, [])):
        words = ["--prompt", "The sky is", "--max-new-tokens", "4", "--template", "auto", *words]
        assert main(["generate", "--model", str(model), *words]) == 0
        told[model, len(words)] = capsys.readouterr().err
    chat, system, none = (int(re.search(r"(\d+) prompt tokens", err)[1]) for err in told.values())
    assert none < chat < system and "has no chat template: the text is continued" in told[directory, 6]


def test_generate_reads_standard_input_under_a_wrapper(directory, prompt, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xef\xbb\xbf" + prompt.read_bytes())))
    words = ["--method", "stages(snapkv(budget=64), quest(budget=32, num_dense_layers=0))", "--max-new-tokens", "4"]
    words += ["--logprobs", "lines"]
    assert main(["generate", "--model", str(directory), "--prompt-file", "-", *words]) == 0
    out, err = capsys.readouterr()
    lines = [json.loads(line) for line in pathlib.Path("lines").read_text().splitlines()]
    assert "".join(line["text"] for line in lines).strip() == out.strip() and all(line["logprob"] < 0 for line in lines)
    assert out.strip() and "20 of 80 tokens attended" in err  # a page, and the newest page with 4 tokens
    assert "resident" in err and "compile apart" in err
    tokens = int(re.search(r"(\d+) prompt tokens", err)[1])
    seconds, rate = map(float, re.search(r"prefill ([\d.]+) s \((\d+) tokens/s\)", err).groups())
    assert tokens / (seconds + 0.006) - 1 <= rate <= tokens / max(seconds - 0.006, 1e-9) + 1


def test_answers_are_a_line_each(directory, prompt, tmp_path, capsys):
    questions = ["--question", "What?", "--question", "Which one?"]
    words = [str(prompt), "--model", str(directory), *questions, "--max-new-tokens", "4"]
    words += ["--logprobs", str(tmp_path / "new" / "lines"), "--top-logprobs", "2", "--temperature", "1", "--top-k", "1"]
    assert main(["answer", *words, "--method", "quest", "--set", "budget=1/4", "--set", "num_dense_layers=0"]) == 0
    out, err = capsys.readouterr()
    assert out.count("\n") == 2 and "tokens attended" in err
    lines = [json.loads(line) for line in (tmp_path / "new" / "lines").read_text().splitlines()]
    assert [line["answer"] for line in lines] == [0] * 4 + [1] * 4
    for line in lines:
        assert line["logprob"] == line["top"][0]["logprob"] < line["sampled_logprob"] == 0 and len(line["top"]) == 2


def test_set_reads_values_as_the_knob_types_them():
    knobs = registry.parse_knobs("SnapKV", ["budget=64", "kernel=7", "obs_window = 8", "capacity=none"])
    assert knobs == {"budget": 64, "kernel": 7, "obs_window": 8, "capacity": None}
    assert registry.parse_knobs("chess", ["ratios=0.5, 0.2,1"]) == {"ratios": (0.5, 0.2, 1.0)}
    knobs = registry.parse_knobs("chess", ["ratios=moderate", "centred=false", "tau_entropy=2"])
    assert knobs == {"ratios": "moderate", "centred": False, "tau_entropy": 2.0}


def test_tokenizer_tells_methods_what_ends_a_sentence():
    tokenizer = models.load_tokenizer(BUILTIN)
    table = registry.make("sentencekv", tokenizer).boundary
    assert table.shape == (tokenizer.get_vocab_size(),) and table[tokenizer.encode(".").ids[0]] and not table.all()
    assert registry.make("sentencekv", tokenizer, 100).boundary.shape == (100,)
    own = table[:7]
    assert registry.make("sentencekv", tokenizer, boundary=own).boundary is own
    assert registry.make("quest", tokenizer, 100) == registry.make("quest")


GENERATE = "generate --model {directory} --prompt-file {prompt}"
ASKED = "generate --model {directory} --prompt a"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("generate Hello", "'Hello' has no flag before it, expected one such as --prompt"),
        (f"{GENERATE} --logprobs {{directory}}", "--logprobs: expected a file in a folder, got"),
        (f"{GENERATE} --top-logprobs 3", "--top-logprobs 3 needs a file: add --logprobs OUT"),
        (f"{GENERATE} --method snapkv --set budget", "--set takes KNOB=VALUE, got 'budget'"),
        (f"{GENERATE} --method snapkv --set budgte=64", "no knob 'budgte' (did you mean 'budget'?)"),
        (f"{GENERATE} --method snapkv --set budget=8", "budget must be a whole number of at least 32"),
        ("eval --workers -1", "workers: expected a whole number of at least 0"),
        (f"{GENERATE} --method snapvk --set budget=64", "unknown method 'snapvk' (did you mean 'snapkv'?)"),
        (f"{GENERATE} --method json:loads", "'json:loads' names no method: a method must be a subclass"),
        (f"{GENERATE} --max-new-tokens 0", "max-new-tokens"),
        (f"{GENERATE} --top-k 3", "got no temperature"),
        ("generate --model {directory}", "by --prompt TEXT or --prompt-file FILE, got neither"),
        (f"{ASKED} --prompt-file -", "got both"),
        (f"{ASKED} --system b", "add --template auto"),
        (f"{ASKED} --template auto --system b", "system belongs to a chat template, which"),
        ("generate --model {directory} --prompt \0", "expected a text, got ' '"),
        ("generate --model {directory} --prompt-file {folder}/empty.txt", "expected a text"),
        ("generate --model {directory} --prompt-file {folder}/binary.bin", "not UTF-8"),
        ("generate --model {directory} --prompt-file {folder}/nowhere.txt", "nowhere.txt"),
        ("generate --model {folder}/nowhere --prompt a", "nowhere"),
        ("generate", "--prompt-file"),
        ("answer {prompt} --model {directory} --question What? --method quest --set bugdet=3", "'bugdet'"),
        ("answer {prompt}", "--question"),
        ("generat", "unknown command 'generat' (did you mean 'generate'?)"),
        ("", "a command is missing"),
        ("ls qest", "unknown method 'qest' (did you mean 'quest'?)"),
        ("ls snapkv(budget=", "got 'snapkv(budget='"),
        ("ls snapkv(budgt=3)", "no knob 'budgt'"),
        ("ls tasks niah_singel_1", "unknown task 'niah_singel_1', did you mean 'niah_single_1'?"),
        ("ls tasks qa_1", "squad file"),
        ("ls kvpress:nowhere", "nowhere"),
        ("demo --out {prompt}/below", "--out: expected a file in a folder, got"),  # not after the run, which would be lost
        ("speed --out {prompt}/below.json", "is in the way"),
        ("eval --out=", "argument --out: expected a folder, got ''"),
    ],
)
def test_bad_input_of_a_command_is_named(words, expected, directory, prompt, tmp_path, fails):
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "binary.bin").write_bytes(b"\xff\xfe\x00")
    words = words.format(directory=directory, prompt=prompt, folder=tmp_path).split()
    assert expected in fails(*(word.replace("\0", " ") for word in words))


def test_parameters_that_are_not_finite_are_an_error(directory, prompt, tmp_path, capsys):
    params = models.random_params(CONFIG, jax.random.key(0))
    params = jax.tree.map(lambda x: jnp.full_like(x, jnp.nan), params)
    models.save_pretrained(tmp_path, params, CONFIG)
    shutil.copy(directory / "tokenizer.json", tmp_path)
    code = main(["generate", "--model", str(tmp_path), "--prompt-file", str(prompt), "--max-new-tokens", "4"])
    assert code == 2 and "not finite" in capsys.readouterr().err


def test_prompts_that_the_model_refuses_end_with_its_message(directory, prompt, capsys):
    assert main([*GENERATE.format(directory=directory, prompt=prompt).split(), "--max-new-tokens", "4000"]) == 2
    assert "max_position_embeddings=2048" in capsys.readouterr().err


def test_compile_clock_counts_nested_tracing_once():
    @jax.jit
    def inner(x):
        time.sleep(0.2)  # runs while tracing
        return x * 2

    outer = jax.jit(lambda x: inner(x) + 1)
    x = jnp.arange(7, dtype=jnp.float32)
    with CompileClock() as clock:
        with Timer(clock) as first:
            jax.block_until_ready(outer(x))
        with Timer(clock) as second:
            jax.block_until_ready(outer(x))
            time.sleep(0.05)
    assert 0.2 <= first.compile < 0.2 + first.run + 1 and first.run >= 0
    assert second.compile == 0 and second.run >= 0.05
    before = clock.seconds
    jax.block_until_ready(jax.jit(lambda x: x - 1)(x))
    assert clock.seconds == before  # closed clocks listen no more


def test_ls_says_what_fits_a_device(capsys, tmp_path, fails):
    """Of a size, a config.json and a checkpoint; the numbers are those of `kvjax.accounting`."""
    (tmp_path / "config.json").write_text(json.dumps({**CONFIG.to_hf(), "torch_dtype": "bfloat16"}))
    given = ["--fits", "6GB", "--length", "1024"]
    for model in ("meta-llama/Llama-3.2-1B-Instruct", str(tmp_path), "builtin"):
        assert main(["ls", "full", *given, "--model", model, "--json"]) == 0
        (full,) = json.loads(capsys.readouterr().out)
        assert full["longest_prompt"] is None or full["longest_prompt"] > 0
    assert main(["ls", "full", "snapkv(budget=1/4)", *given, "--model", str(tmp_path / "config.json"), "--json"]) == 0
    full, snapkv = json.loads(capsys.readouterr().out)
    assert full["peak_bytes"] >= full["after_bytes"] > 2 * snapkv["after_bytes"]
    assert snapkv["most_rows"] is None or snapkv["most_rows"] > full["most_rows"]
    assert main(["ls", "full", "headkv", "keydiff", *given, "--model", "llama-3.2-1b"]) == 0
    told = capsys.readouterr().out
    assert re.search(r"full +[\d,]+ +\d+ ", told) and re.search(r"keydiff +any ", told) and "headkv: HeadKV: scores" in told
    (kept := tmp_path / "kept.json").write_text(json.dumps({"head_factor": [1.5] * 16}))
    methods = [f"kvzip(budget=1/8, head_factor={factor})" for factor in (kept, 1.5)]
    assert main(["ls", *methods, *given, "--model", "llama-3.2-1b", "--json"]) == 0
    by_layer, alike = json.loads(capsys.readouterr().out)
    assert by_layer["after_bytes"] == alike["after_bytes"] and by_layer["method"] == methods[0]
    longest = 32768
    for expected in (0, 1):  # of the longest prompt one row fits, whatever the step of the search
        assert main(["ls", "quest", "--fits", "24GB", "--model", "qwen3-8b", "--json", "--length", str(longest)]) == 0
        (quest,) = json.loads(capsys.readouterr().out)
        assert quest["most_rows"] == expected and 16384 < (longest := quest["longest_prompt"]) < 32768
    assert main(["ls", "full", "streamingllm", "--fits", "30GB", "--model", "qwen3-8b", "--length", "41000"]) == 0
    told = " ".join(capsys.readouterr().out.split())
    assert "41,000 tokens and 256 are 296 beyond these positions" in told and "YaRN, but under streamingllm." in told
    for words, expected in (
        (("--fits", "24"), "--fits needs --model"),
        (("--fits", "24 cows", "--model", "qwen3-8b"), "expected bytes such as 24GB"),
        (("--fits", "10GB", "--model", "qwen3-8b"), "15.26 GiB of weights"),
        (("--fits", "10GB", "--model", "qwen3-8"), "did you mean 'qwen3-8b'?"),
        (("--fits", "24GB", "--model", "qwen3-8b", "quets"), "did you mean 'quest'?"),
        (("--fits", "24GB", "--model", "qwen3-8b", "quest(budget=1.0)"), "or a share between 0 and 1, got 1.0"),
        (("--fits", "24GB", "--model", "qwen3-8b", "--length", "0"), "expected a whole number of at least 1, got 0"),
        (("models", "qwen"), "kvjax ls models takes no further name, got 'qwen'"),
        (("--length", "100"), "--length belongs to kvjax ls --fits"),
    ):
        assert expected in fails("ls", *words), words
