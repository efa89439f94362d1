"""The recipe for larger models, on a tiny random model."""

from __future__ import annotations

import json
import pathlib

import pytest

import models
from experiments.cli import read_yaml
from experiments.cli.main import main
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


def test_the_recipe_names_methods_that_exist_at_every_length():
    settings = EvaluationSettings.from_mapping(read_yaml(RECIPE), RECIPE.name)
    tokenizer = models.load_tokenizer(BUILTIN)
    for choice in settings.choices:
        for length in settings.lengths:
            extra = {"tau_entropy": 1.0, "tau_varentropy": 1.0} if choice.name == "chess" else {}
            assert choice.at(length, tokenizer, CONFIG, extra).method


def run_recipe(out, tmp_path, *more):
    """Run it on a tiny random model under the name of the recipe's."""
    directory = write_model(tmp_path / MODEL, CONFIG)
    arguments = [
        "eval", "--config", RECIPE, "--model", directory, "--dtype", "float32", "--lengths", 512,
        "--samples", 1, "--workers", 0, "--max-new-tokens", 4, "--no-plot", "--quiet", "--out", out, *more,
    ]  # fmt: skip
    assert main(list(map(str, arguments))) == 0
    return json.loads((out / "metrics.json").read_text())["metrics"]


def test_a_recipe_runs_to_a_table(tmp_path, capsys):
    out = tmp_path / "out"
    rows = run_recipe(out, tmp_path, "--tasks", "niah_single_1", "--methods", "snapkv")
    assert [row["method"] for row in rows] == ["full", "snapkv"]
    capsys.readouterr()
    assert main(["compare", str(out)]) == 0
    assert "## Every cell" in capsys.readouterr().out


@pytest.mark.thorough
def test_the_recipe_runs_with_all_its_methods(tmp_path):
    rows = run_recipe(tmp_path / "out", tmp_path, "--tasks", "niah_single_1,vt")
    settings = EvaluationSettings.from_mapping(read_yaml(RECIPE), RECIPE.name)
    assert {row["method"] for row in rows} == {choice.label for choice in settings.choices}
    assert len(rows) == 2 * len(settings.choices)
