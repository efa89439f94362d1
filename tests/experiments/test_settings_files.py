"""The settings of docs/settings load, name the command that reads them, and every method in them can be made."""

from __future__ import annotations

import itertools
import pathlib
import re

import numpy as np
import pytest

import kvjax
import models
from experiments.cli import read_yaml
from experiments.evaluation.reversed import Reversed
from experiments.evaluation.settings import EvaluationSettings, check_choices, choices_of, written
from experiments.fidelity.settings import FidelitySettings
from experiments.records import knobs_of
from experiments.tasks import expand
from kvjax.testing.layer import stored
from tests import harness

ROOT = pathlib.Path(models.__file__).parents[1]
FILES = sorted((ROOT / "docs" / "settings").glob("*.yaml"))
SETTINGS = {"eval": EvaluationSettings, "fidelity": FidelitySettings}
THRESHOLDS = {"tau_entropy": 1.0, "tau_varentropy": 1.0}  # CHESS' are measured on the model


def load(file):
    """The settings in a file, for the command that its first lines name."""
    commands = re.findall(rf"python -m kvjax (\w+) --config docs/settings/{file.name}\b", file.read_text())
    assert len(set(commands)) == 1, f"{file.name} should name its command in a comment"
    return SETTINGS[commands[0]].from_mapping(read_yaml(file), file.name)


@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
def test_settings_load_and_their_methods_can_be_made(file):
    settings = load(file)
    tokenizer = models.load_tokenizer(models.builtin_directory())
    config = models.shapes.llama31_8b()
    labels = [choice.label for choice in settings.choices]
    assert labels[0] == "full" and len(set(labels)) == len(labels)
    for choice in settings.choices:
        made = []
        for length in sorted({min(settings.lengths), max(settings.lengths)}):
            setting = choice.at(length, tokenizer, config, THRESHOLDS if choice.name == "chess" else {})
            made.append(setting.method)
            if isinstance(choice.knobs.get("budget"), str):  # a share of the length
                top, bottom = choice.knobs["budget"].split("/")
                assert setting.method.budget == length * int(top) // int(bottom)
        assert {type(method).__name__.lower() for method in made} == {choice.name}


def test_the_tables_of_the_real_model_are_of_the_same_examples():
    """Rows of the main table are paired, and the base and the tuned model are asked the same."""
    made = {file.stem: load(file) for file in FILES}
    for name in ("main", "main-extend", "main-16k"):
        assert len(expand(made[name].generated)) == 12 and made[name].model == "smollm2-retrieval"
    assert len({(made[x].samples, made[x].seed, made[x].tasks) for x in ("main", "main-extend", "main-16k")}) == 1
    assert len({(made[x].samples, made[x].seed) for x in ("base", "base-tuned")}) == 1
    assert set(made["base-tuned"].tasks) < set(made["base"].tasks)
    assert made["base"].lengths == made["base-tuned"].lengths
    own = {choice.label for choice in made["base"].choices}
    assert {choice.label for choice in made["main-16k"].choices} < own < {choice.label for choice in made["main"].choices}

    qwen = [made[name] for name in ("qwen-16k", "qwen-32k", "qwen-extend")]
    assert len({(x.model, x.dtype, x.seed, x.tasks) for x in qwen}) == 1 and len(qwen[0].tasks) == 15
    assert [(x.lengths, x.samples, x.question) for x in qwen] == [
        ((16384,), 100, "prefill"), ((32768,), 50, "prefill"), ((16384,), 100, "extend")
    ]  # fmt: skip
    assert all(own | {"full"} <= {choice.label for choice in x.choices} for x in qwen)


def test_reversed_drops_what_snapkv_keeps():
    """Together the two methods keep every token of every head, and both keep the window alone."""
    window, budget, length = 4, 12, 40
    row = [np.arange(length, dtype=np.int32) % 50]
    kept = []
    for method in (
        kvjax.methods.SnapKV(budget=budget, obs_window=window),
        Reversed(budget=length - budget + window, obs_window=window),
    ):
        cache = harness.read(method, rows=row)
        kept.append([[set(head[head >= 0].tolist()) for head in np.asarray(stored(x).position[0])] for x in cache.layers])
    for ours, theirs in zip(*(itertools.chain(*layers) for layers in kept), strict=True):
        assert ours | theirs == set(range(length)) and ours & theirs == set(range(length - window, length))


TWILIGHT = {"kvjax.wrappers.twilight:Twilight": {"mass": 0.5, "method": {"quest": {"budget": "1/16"}}}}


def test_a_wrapper_is_named_with_the_method_inside():
    """It is outside of the methods that have a name, and its budget may be a share, too."""
    (choice,) = choices_of([TWILIGHT])
    assert choice.label == "twilight(mass=0.5, method=quest(budget=1/16))" and written([choice]) == [TWILIGHT]
    check_choices([choice], (), 1024)
    method = choice.at(1024, None, None, {}).method
    assert method == kvjax.Twilight(method=kvjax.make("quest", budget=64), mass=0.5)
    row = knobs_of(method)
    assert row["class"] == "kvjax.wrappers.twilight:Twilight" and "budget=64" in row["method"]


def test_a_pattern_of_prompts_is_named_with_its_numbers():
    given = {"kvjax:Prefill": {"method": "full", "block": 128, "pattern": {"kind": "xattention", "share": 0.8}}}
    (choice,) = choices_of([given])
    assert choice.label == "prefill(method=full, block=128, pattern=(kind=xattention, share=0.8))"
    assert choices_of(written([choice])) == (choice,)
    check_choices([choice], (), 1024)
    method = choice.at(1024, None, None, {}).method
    assert method == kvjax.Prefill(method=kvjax.make("full"), block=128, pattern=kvjax.Pattern("xattention", share=0.8))
    assert "xattention" in knobs_of(method)["pattern"]
    for pattern, message in (({"kind": "diagonal"}, "kind"), ({"colums": 3}, "colums"), ({"share": 0.5}, "reads columns")):
        with pytest.raises(ValueError, match=message):
            check_choices(choices_of([{"kvjax:Prefill": {"method": "full", "pattern": pattern}}]), (), 1024)


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
        check_choices(choices_of([{"kvjax.wrappers.twilight:Twilight": {"method": inner}}]), (), 1024)
