"""The papers' printed scores beside ours, and the recipe for larger models, on a tiny random model."""

from __future__ import annotations

import json
import pathlib

import numpy as np
import pytest

import models
from experiments.cli import read_yaml
from experiments.cli.main import main
from experiments.evaluation.comparison import Compared
from experiments.evaluation.printed import beside, printed, printed_tables
from experiments.evaluation.settings import EvaluationSettings
from tests.tiny_models import write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
SETTINGS = pathlib.Path(models.__file__).parents[1] / "docs" / "settings"
BUILTIN = models.builtin_directory()
SMALL = {
    "vocab_size": models.load_tokenizer(BUILTIN).get_vocab_size(), "hidden_size": 32, "intermediate_size": 48,
    "num_layers": 1, "num_q_heads": 2, "num_kv_heads": 1, "head_dim": 16, "max_position_embeddings": 1024,
    "eos_token_ids": (0,),
}  # fmt: skip
RECIPE = SETTINGS / "ruler.yaml"
CONFIG = models.ModelConfig(**SMALL)
MODEL = EvaluationSettings.from_mapping(read_yaml(RECIPE), RECIPE.name).model.rpartition("/")[2]

SLIPS = {  # averages that are not the means of their columns; the paper has one or the other wrong
    ("ParisKV", "RULER", "Llama-3.1-8B", "magicpig"): 70.41,
    ("ParisKV", "RULER", "Llama-3.1-8B", "twilight"): 81.97,
    ("TokenSelect", "InfiniteBench", "Llama-3-8B-Instruct", "tokenselect"): 44.84,
}


def test_printed_means_are_the_means_of_the_printed_scores():
    """A slip of the pen in a column would show. (The tables were also compared with the papers' text, row by row.)"""
    compared = 0
    for table in printed_tables():
        for label, row in table.rows.items():
            if row.scores and row.mean is not None:
                mean, at = np.mean(list(row.scores.values())), (table.paper, table.suite, table.model, label)
                slip = abs(mean - row.mean) > 0.0151  # papers round, or cut off
                assert slip == (at in SLIPS) and (not slip or round(mean, 2) == SLIPS[at]), (at, mean)
                compared += 1
    assert compared == 57
    assert all(0 <= n.value <= 100 and (n.full is None or 0 <= n.full <= 100) for n in printed())


def test_tables_are_told_apart():
    keys = [(table.paper, table.suite, table.model, table.source) for table in printed_tables()]
    assert len(set(keys)) == len(keys)


def item(method, task, length, value, knobs=None, **more):
    row = {"method": method, "name": task, "length": length, "value": value, "unit": "percent", "question": "prefill",
           "knobs": knobs or {}, **more}  # fmt: skip
    return Compared(row, 100.0, value - 100.0, (0.0, 0.0), 0.0, 20)


def test_cells_are_comparable_only_if_model_length_and_knobs_are_the_same():
    knobs = {"channels": 0.25, "fraction": 0.1, "block_size": 8}
    mine = [
        item("mosaickv", "vt", 65536, 90.0, knobs),
        item("mosaickv", "niah_single_1", 16384, 80.0, knobs),
        item("mosaickv", "fwe", 65536, 70.0, {**knobs, "block_size": 4}),
        item("mosaickv", "niah_multikey_1", 65536, 70.0, knobs, question="extend"),
        item("quest(budget=0.1)", "vt", 65536, 60.0, {"page_size": 16, "budget": 6554}),
    ]
    text = beside(mine, "meta-llama/llama-3.1-8b-instruct")
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    rows = {(line.split(" | ")[0], line.split(" | ")[1]): line for line in lines}
    vt = rows["| MosaicKV", "vt"]
    assert "| 65,536 | 90.0 | -10.0 | 96.40 | -2.8 | 65,536 | yes | MosaicKV, table 1" in vt
    assert "| no: length |" in rows["| MosaicKV", "niah_single_1"]
    assert "no: block_size 4, printed 8" in rows["| MosaicKV", "fwe"]
    assert "no: the question stands behind" in rows["| MosaicKV", "niah_multikey_1"]
    assert any("Quest(" in line and "| open: layers that Quest leaves dense |" in line for line in lines)
    assert beside(mine, "other").startswith("The papers print no score for other. They print scores for LLaMA-3.1")
    assert "None of these cells" in beside(mine[:0], "Llama-3.1-8B-Instruct")


def test_the_recipe_names_methods_that_exist_at_every_length():
    """It also holds the papers' settings: a knob that the papers print is the recipe's, at the printed length."""
    settings = EvaluationSettings.from_mapping(read_yaml(RECIPE), RECIPE.name)
    tokenizer = models.load_tokenizer(BUILTIN)
    paper = {(n.row.label, n.length): n.row.knobs for n in printed() if n.row.knobs}
    for choice in settings.choices:
        for length in settings.lengths:
            extra = {"tau_entropy": 1.0, "tau_varentropy": 1.0} if choice.name == "chess" else {}
            method = choice.at(length, tokenizer, CONFIG, extra).method
            for knob, value in paper.get((choice.name, length), {}).items():
                if knob != "budget" or value >= 1:
                    assert vars(method)[knob] == value, (choice.label, knob)


def run_recipe(out, tmp_path, *more):
    """Run it on a tiny random model under the name of the recipe's."""
    directory = write_model(tmp_path / MODEL, CONFIG)
    arguments = [
        "eval", "--config", RECIPE, "--model", directory, "--dtype", "float32", "--lengths", 512,
        "--samples", 1, "--workers", 0, "--max-new-tokens", 4, "--no-plot", "--quiet", "--out", out, *more,
    ]  # fmt: skip
    assert main(list(map(str, arguments))) == 0
    return json.loads((out / "metrics.json").read_text())["metrics"]


def test_a_recipe_runs_to_a_table_beside_the_papers(tmp_path, capsys):
    out = tmp_path / "out"
    rows = run_recipe(out, tmp_path, "--tasks", "niah_single_1", "--methods", "snapkv")
    assert [row["method"] for row in rows] == ["full", "snapkv"]
    capsys.readouterr()
    assert main(["compare", str(out), "--papers"]) == 0
    said = capsys.readouterr().out
    assert "## Beside the papers" in said and "## Every cell" in said
    (line,) = [line for line in said.splitlines() if line.startswith("| SnapKV | niah_single_1 | 512")]
    assert "| 100.00 | +0.0 | 65,536 | no: length | SentenceKV, table 2" in line


@pytest.mark.thorough
def test_the_recipe_runs_with_all_its_methods(tmp_path):
    rows = run_recipe(tmp_path / "out", tmp_path, "--tasks", "niah_single_1,vt")
    settings = EvaluationSettings.from_mapping(read_yaml(RECIPE), RECIPE.name)
    assert {row["method"] for row in rows} == {choice.label for choice in settings.choices}
    assert len(rows) == 2 * len(settings.choices)
