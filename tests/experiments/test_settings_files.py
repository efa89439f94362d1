"""The settings of docs/settings load, name the command that reads them, and every method in them can be made."""

import itertools
import pathlib
import re

import numpy as np
import pytest

import kvjax
import models
from experiments.answering import PAPERS, at_budgets, choices_of, written
from experiments.cli import names, read_record, read_yaml
from experiments.cli.main import main
from experiments.evaluation.reversed import Reversed
from experiments.evaluation.settings import EvaluationSettings
from experiments.records import knobs_of
from experiments.tasks import expand
from kvjax.accounting.memory import memory_needed
from kvjax.methods import Full, Quest, SnapKV
from kvjax.testing.layer import stored
from kvjax.testing.model import TinyModel
from kvjax.wrappers import LayerBudgets, Pattern, PerLayer, Prefill, Stages, Twilight
from tests import harness
from tests.kvjax.cases import ONE
from tests.tiny_models import SHIPPED, write_model

ROOT = pathlib.Path(models.__file__).parents[1]
# Files of the lab's commands are loaded by tests/lab.
FILES = [x for x in sorted((ROOT / "docs" / "settings").glob("*.yaml")) if "-m experiments.lab" not in x.read_text()]
THRESHOLDS = {"tau_entropy": 1.0, "tau_varentropy": 1.0}  # CHESS' are measured on the model


def load(file):
    """The settings in a file, for the command that its first lines name."""
    line = rf"python -m kvjax (\w+) --config docs/settings/{file.name}\b"
    assert {*re.findall(line, file.read_text())} == {"eval"}, f"{file.name} should name its command in a comment"
    return EvaluationSettings.from_mapping(read_yaml(file), file.name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_load_and_their_methods_can_be_made(file):
    settings = load(file)
    tokenizer = models.load_tokenizer(models.builtin_directory())
    shape = models.shapes.qwen25_1_5b if settings.model == "qwen2.5-coder-1.5b" else models.shapes.llama31_8b
    config = shape()
    labels = [choice.label for choice in settings.choices]
    assert labels[0] == "full" and len(set(labels)) == len(labels)
    for choice in settings.choices:
        made = []
        for length in sorted({min(settings.lengths), max(settings.lengths)}):
            setting = choice.at(length, tokenizer, config, THRESHOLDS if choice.name == "chess" else {})
            made.append(setting.method)
            if isinstance(choice.knobs.get("budget"), str):  # a share of the length
                top, bottom = choice.knobs["budget"].split("/")
                assert setting.method.budget == round(length * int(top) / int(bottom))
        assert {type(method).__name__.lower() for method in made} == {choice.name}


@pytest.mark.parametrize(
    "words", ["--tasks niah_single_1 --methods snapkv", pytest.param("--tasks niah_single_1,vt", marks=pytest.mark.thorough)]
)
def test_the_recipe_for_larger_models_runs_to_a_table(words, tmp_path, capsys, quick_compile):
    """On a tiny random model under the name of the recipe's."""
    file = ROOT / "docs" / "settings" / "ruler.yaml"
    settings = EvaluationSettings.from_mapping(read_yaml(file), file.name)
    model = write_model(tmp_path / settings.model.rpartition("/")[2], SHIPPED)
    flags = "--dtype float32 --lengths 512 --samples 1 --workers 0 --max-new-tokens 4 --no-plot --quiet --out"
    out = tmp_path / "out"
    assert main(["eval", "--config", str(file), "--model", str(model), *words.split(), *flags.split(), str(out)]) == 0
    asked = settings.choices if "--methods" not in words else choices_of(["full", "snapkv"])
    assert {row["method"] for row in read_record(out)["metrics"]} == {choice.label for choice in asked}
    capsys.readouterr()
    assert main(["compare", str(out)]) == 0
    assert "## Every cell" in capsys.readouterr().out


def test_the_tables_of_the_real_model_are_of_the_same_examples():
    """The lengths of the main table ask the same tasks, and the records hold what the settings ask."""
    made = {file.stem: load(file) for file in FILES}
    assert len(expand(made["main"].generated)) == 12 and made["main"].model == "smollm2-retrieval"
    qwen = [made[name] for name in ("qwen-16k", "qwen-32k")]
    assert len({(x.model, x.dtype, x.seed) for x in qwen}) == 1 and {*qwen[1].tasks} < {*qwen[0].tasks}
    assert len(qwen[0].tasks) == 12
    for name in ("qwen-16k", "qwen-32k"):  # the command asks what the tables have
        rows = read_record(ROOT / "docs" / "records" / "results" / name)["metrics"]
        assert {row["task"] for row in rows} == {*made[name].tasks}
    assert [(x.lengths, x.samples, x.question) for x in qwen] == [((16384,), 100, "prefill"), ((32768,), 50, "prefill")]
    assert all({*PAPERS, "full", "snapkv", "quest"} <= {choice.label for choice in x.choices} for x in qwen)


def test_evicting_methods_of_long_answers_need_no_more_memory_for_ten_thousand_tokens():
    """From shapes alone; methods that keep every token need more."""
    config, needed = TinyModel(num_layers=1), {}
    by_name = {choice.name: choice for choice in load(ROOT / "docs" / "settings" / "long-answers.yaml").choices[::-1]}
    del by_name["chess"]  # its state is shared by layers and heads of the whole model
    for choice in by_name.values():
        method = choice.at(2048, None, config, {}).method
        needed[choice.name] = [
            memory_needed(method, config, batch=1, prompt_slots=512, max_new_tokens=tokens).device for tokens in (512, 10_000)
        ]
    flat = {name for name, (short, long) in needed.items() if short == long}
    assert flat == {"h2o", "tova", "rkv", "triattention", "streamingllm", "keydiff", "periodic"}
    assert set(needed) - flat == {"full", "quest", "tokenselect", "pariskv", "verified"}


@pytest.mark.thorough
def test_reversed_drops_what_snapkv_keeps(quick_compile):
    """Together the two methods keep every token of every head, and both keep the window alone."""
    window, budget, length = 4, 12, 40
    row = [np.arange(length, dtype=np.int32) % 50]
    kept = []
    for method in (
        kvjax.methods.SnapKV(budget=budget, obs_window=window),
        Reversed(budget=length - budget + window, obs_window=window),
    ):
        cache = harness.read(method, rows=row, config=ONE)
        kept.append([[set(head[head >= 0].tolist()) for head in np.asarray(stored(x).position[0])] for x in cache.layers])
    for ours, theirs in zip(*(itertools.chain(*layers) for layers in kept), strict=True):
        assert ours | theirs == set(range(length)) and ours & theirs == set(range(length - window, length))


TWILIGHT = {"kvjax.wrappers.twilight:Twilight": {"mass": 0.5, "method": {"quest": {"budget": "1/16"}}}}


def test_a_wrapper_is_named_with_the_method_inside():
    """It is outside of the methods that have a name, and its budget may be a share, too."""
    (choice,) = choices_of([TWILIGHT])
    assert choice.label == "twilight(mass=0.5, method=quest(budget=1/16))" and written([choice]) == [TWILIGHT]
    method = choice.at(1024, None, None, {}).method
    assert method == Twilight(method=kvjax.make("quest", budget=64), mass=0.5)
    row = knobs_of(method)
    assert row["class"] == "kvjax.wrappers.twilight:Twilight" and "budget=64" in row["method"]


@pytest.mark.parametrize(
    ("text", "entry", "method"),
    [
        ("quest(budget=1/4)", {"quest": {"budget": "1/4"}}, Quest(budget=256)),
        ("QUEST(page_size = 8,  budget=64)", {"quest": {"page_size": 8, "budget": 64}}, Quest(budget=64, page_size=8)),
        (
            "twilight(quest(budget=1/16, page_size=8), mass=0.5)",
            {"twilight": {"method": {"quest": {"budget": "1/16", "page_size": 8}}, "mass": 0.5}},
            Twilight(method=Quest(budget=64, page_size=8), mass=0.5),
        ),
        (
            "stages(snapkv, quest)",
            {"stages": {"evict": "snapkv", "retrieve": "quest"}},
            Stages(evict=SnapKV(budget=256), retrieve=Quest(budget=128)),
        ),
        (
            "xattention(full, block=64)",
            {"prefill": {"block": 64, "pattern": {"kind": "xattention"}, "method": "full"}},
            Prefill(method=Full(), block=64, pattern=Pattern("xattention")),
        ),
        (
            "layerbudgets(snapkv, shares=(1.5, 0.5))",
            {"layerbudgets": {"method": "snapkv", "shares": [1.5, 0.5]}},
            LayerBudgets(method=SnapKV(budget=128), shares=(1.5, 0.5)),
        ),
        (
            "perlayer(snapkv, 0=full, -1=quest(budget=64))",
            {"perlayer": {"default": "snapkv", "layers": {0: "full", -1: {"quest": {"budget": 64}}}}},
            PerLayer(layers={0: Full(), -1: Quest(budget=64)}, default=SnapKV(budget=128)),
        ),
    ],
)
def test_a_wrapper_is_a_text_or_an_entry_of_yaml(text, entry, method):
    """Both make the same method; what is written is read again; and the label is a text that makes it, too."""
    for choice in (*choices_of(names(f"knorm,{text}")[1:]), *choices_of([entry])):
        assert choices_of(written([choice])) == (choice,)
        assert choice.at(1024, None, None, {}).method == method
    assert len(choices_of(names(f"{text},full,{text}"))) == 3


def test_budgets_are_those_of_the_method_inside():
    made = at_budgets(choices_of(["twilight(quest)", "twilight(quest(budget=48))", "stages(snapkv, quest)"]), ("1/8", "64"))
    assert [choice.label for choice in made] == [
        "full",
        "twilight(method=quest(budget=1/8))",
        "twilight(method=quest(budget=64))",
        "twilight(method=quest(budget=48))",
        "stages(evict=snapkv, retrieve=quest)",
    ]


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("twilight", "Twilight must be given method, for example twilight"),
        ("twilight(", "expected a method as NAME"),
        ("twilight(quest, quest)", "Twilight takes no other method inside, got 'quest'"),
        ("twilight(qest)", "unknown method 'qest'"),
        ("twilight(quest, mas=1)", "no knob 'mas' .did you mean 'mass'"),
        ("twilight(quest, mass=all)", "mass must be a finite number"),
        ("twilight(snapkv)", "Twilight: method must select slots"),
        ("perlayer(snapkv, first=full)", "no knob 'first'"),
    ],
)
def test_a_bad_text_of_a_method_is_refused(text, told):
    with pytest.raises(ValueError, match=told):
        (choice,) = choices_of([text])
        choice.at(1024, None, None, {})
    with pytest.raises(ValueError, match=told):
        kvjax.make(text)


def test_a_pattern_of_prompts_is_named_with_its_numbers():
    given = {"kvjax.wrappers:Prefill": {"method": "full", "block": 128, "pattern": {"kind": "xattention", "share": 0.8}}}
    (choice,) = choices_of([given])
    assert choice.label == "prefill(method=full, block=128, pattern=(kind=xattention, share=0.8))"
    assert choices_of(written([choice])) == (choice,)
    method = choice.at(1024, None, None, {}).method
    assert method == Prefill(method=kvjax.make("full"), block=128, pattern=Pattern("xattention", share=0.8))
    assert "xattention" in knobs_of(method)["pattern"]
    for pattern, message in (({"kind": "diagonal"}, "kind"), ({"colums": 3}, "colums"), ({"share": 0.5}, "reads columns")):
        with pytest.raises(ValueError, match=message):
            choices_of([{"kvjax.wrappers:Prefill": {"method": "full", "pattern": pattern}}])


@pytest.mark.parametrize(
    ("inner", "message"),
    [
        ({"qest": {}}, "unknown method 'qest'"),
        ({"quest": {"bugdet": 1}}, "bugdet"),
        ({"quest": {"budget": "1/0"}}, "a budget is a share such as 1/8"),
        ({"quest": {}, "pariskv": {}}, "a wrapper has one method"),
        ({}, "a wrapper has one method"),
        ("papers", "a wrapper has one method"),
    ],
)
def test_a_bad_method_inside_of_a_wrapper_is_refused(inner, message):
    with pytest.raises(ValueError, match=message):
        choices_of([{"kvjax.wrappers.twilight:Twilight": {"method": inner}}])
