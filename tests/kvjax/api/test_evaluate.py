"""`kvjax.evaluate`: rows of equal names, which a table of any kind takes; methods as objects, names and texts."""

import csv
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.evaluation.python import entry_of
from experiments.evaluation.settings import choices_of
from kvjax.methods import Full, ParisKV, PQCache, Quest, SentenceKV, SnapKV, StreamingLLM, TokenSelect
from kvjax.protocol.describe import describe
from kvjax.protocol.fields import at_length
from kvjax.wrappers import LayerBudgets, Pattern, PerLayer, Prefill, Twilight
from tests.outside_method import Newest
from tests.tiny_models import SHIPPED, write_model

pytestmark = pytest.mark.usefixtures("quick_compile")
SPARSE = "quest(budget=32, num_dense_layers=0)"


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return kvjax.models.load(write_model(tmp_path_factory.mktemp("model"), SHIPPED))


def test_an_evaluation_is_a_table(model, tmp_path):
    asked = {"tasks": "passkey", "lengths": np.array([256]), "samples": np.int64(2), "budgets": "1/8", "max_new_tokens": 4}
    made = kvjax.evaluate(model, [SnapKV(budget=kvjax.share(1 / 2)), SPARSE], out=tmp_path / "out", **asked)
    assert [row["method"] for row in made] == ["full", "snapkv(budget=0.5)", SPARSE]
    assert [row["budget"] for row in made[1:]] == [128, 32] and {row["length"] for row in made} == {256}
    assert len({tuple(row) for row in made}) == 1 and json.loads(json.dumps(made)) == made
    writer = csv.DictWriter(io.StringIO(), made[0])
    writer.writerows(made)
    assert made[0]["against_full"] is None and isinstance(made[1]["against_full"], float)
    assert made[2]["bytes_read"] < made[0]["bytes_read"] == made[2]["bytes_read_full"]
    lines = str(made).splitlines()
    assert lines[0].startswith("| task | length | method | budget | score |") and len(lines) == 5 and " MB |" in lines[2]
    again = kvjax.evaluate(model, SPARSE, out=tmp_path / "out", **asked)  # nothing runs
    assert again == [made[0], made[2]]


def test_what_cannot_be_evaluated_is_named(model):
    with pytest.raises(ValueError, match=r"expected tasks and lengths, got \(\) and \(4096,\)"):
        kvjax.evaluate("builtin", ["quest"], tasks=[])
    with pytest.raises(ValueError, match="kvjax.evaluate: unknown setting 'lenghts'.*'lengths'"):
        kvjax.evaluate(model, "quest", lenghts=512)
    with pytest.raises(ValueError, match="unknown method 'qest'"):
        kvjax.evaluate(model, "qest")
    with pytest.raises(ValueError, match="SentenceKV: boundary must be a knob that a settings file can hold"):
        kvjax.evaluate(model, SentenceKV(boundary=jnp.zeros(9, bool)))
    for methods in (Quest, None):
        with pytest.raises(TypeError, match="methods must be a method, a name, {name: knobs} or a list of these, got"):
            kvjax.evaluate(model, methods)
    with pytest.raises(TypeError, match=r"model must be what kvjax.models.load returns, a name or a path, got dict"):
        kvjax.evaluate(model.params, "quest")
    with pytest.raises(ValueError, match="got 'int8' and a loaded model: give it to kvjax.models.load"):
        kvjax.evaluate(model, "quest", weight_dtype="int8")


@pytest.mark.parametrize(
    ("method", "entry"),
    [
        (Quest(), {"quest": {"budget": 1024}}),
        (TokenSelect(), None),
        (ParisKV(budget=50), None),
        (PQCache(), None),
        (Quest(budget=64, page_size=8), {"quest": {"budget": 64, "page_size": 8}}),
        (Quest(budget=64, capacity=128), {"quest": {"budget": 64, "capacity": 128}}),
        (SnapKV(budget=kvjax.share(1 / 8)), {"snapkv": {"budget": "0.125"}}),
        (StreamingLLM(budget=np.int32(64), capacity=64), {"streamingllm": {"budget": 64}}),
        (Twilight(method=Quest(budget=32), mass=0.5), {"twilight": {"method": {"quest": {"budget": 32}}, "mass": 0.5}}),
        (
            Prefill(method=Full(), pattern=Pattern("xattention", share=0.8)),
            {"prefill": {"method": {"full": {}}, "pattern": {"kind": "xattention", "share": 0.8}}},
        ),
        (
            PerLayer(layers={0: Full()}, default=Quest(budget=32)),
            {"perlayer": {"layers": {0: {"full": {}}}, "default": {"quest": {"budget": 32}}}},
        ),
        (LayerBudgets(method=Quest(budget=32), shares=(1.5, 0.5)), None),
        (Newest(budget=3), {"newest": {"budget": 3}}),
    ],
)
def test_a_method_is_an_entry_of_a_settings_file(method, entry):
    made = entry_of(method)
    assert entry is None or made == entry
    (choice,) = choices_of([made])
    assert describe(choice.at(4096, None, None, {}).method) == describe(at_length(method, 4096))
