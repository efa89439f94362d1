"""`experiments.lab.exact`: caches made from one reading of the prompts, forced draws, tables, the command in tiny sizes."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.lab.exact import figures
from experiments.lab.exact.__main__ import main
from experiments.lab.exact.measure import same_share
from experiments.lab.exact.report import bytes_per_token, tokens_per_pass
from experiments.lab.exact.samplers import ByRow
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.verified_cache import verified_cache
from experiments.speed.samplers import Forced
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full
from tests.harness import TINY, example, padded, prompts, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["snapkv", "quest"])
def test_one_reading_gives_the_caches_of_all_drafts(name):
    """The cache decodes as the cache that `kvjax.prefill` makes: the same tokens, passes and kept tokens."""
    tokens, lengths = padded(prompts())
    method = kvjax.Verified(draft=example(name), depth=2, worth=None)
    options = {"config": TINY, "lengths": lengths, "max_new_tokens": 16, "pad_multiple": 1}
    full, draft = kvjax.prefill_each(tiny_params(), tokens, methods=[Full(), method.draft], **options)
    want = kvjax.prefill(tiny_params(), tokens, method=method, **options)
    given = {"max_new_tokens": 12, "eos_token_ids": ()}
    got = kvjax.generate(tiny_params(), verified_cache(method, full, draft), **given)
    want = kvjax.generate(tiny_params(), want, **given)
    np.testing.assert_array_equal(got.tokens, want.tokens)
    for counter in ("passes", "accepted_1", "accepted_2"):
        np.testing.assert_array_equal(got.stats.counters[counter], want.stats.counters[counter])


def test_rows_draw_at_their_own_temperatures():
    """As `Sampler` draws at each temperature, in steps and for several places of a row."""
    logits, key = jax.random.normal(jax.random.key(0), (3, 50)) * 3, jax.random.key(1)
    heat = jnp.asarray([0.0, 0.7, 2.0])
    got = ByRow(temperature=heat).draw(logits, key)
    for row, temperature in enumerate(heat.tolist()):
        assert got[row] == Sampler(temperature=temperature).draw(logits, key)[row]
    keys = jax.random.split(key, 6)
    twice = jnp.repeat(logits, 2, axis=0)
    want = [Sampler(temperature=float(heat[at // 2])).draw_each(twice, keys)[at] for at in range(6)]
    np.testing.assert_array_equal(ByRow(temperature=heat).draw_each(twice, keys), want)


def test_forced_draws_keep_as_many_tokens_as_told():
    """A token follows from its key: steps draw one token, and passes draw it with the probability of each place."""
    rates, rows = (0.9, 0.5, 0.0), 2000
    sampler = Forced(rates=jnp.asarray(rates), rows=rows)
    logits, keys = jnp.zeros((rows * 3, 11)), jax.random.split(jax.random.key(0), rows * 3)
    step = sampler.draw(logits[:rows], jax.random.key(1))
    assert (step == step[0]).all()
    right = np.asarray(sampler.draw_each(logits, keys) == step[0]).reshape(rows, 3).mean(axis=0)
    np.testing.assert_allclose(right, rates, atol=5 * (0.25 / rows) ** 0.5)


def test_bytes_and_tokens_of_a_pass():
    row = {"full_bytes": 100.0, "draft_bytes": 10.0}
    assert tokens_per_pass([0.9, 0.5, 0.1], 2) == 2.4
    assert bytes_per_token(row, [0.9, 0.5, 0.1], 2) == 120 / 2.4


def test_tokens_are_compared_up_to_the_first_difference():
    own, full = [[1, 2, 3, 0], [1, 2, 3, 4], [5, 0, 0, 0]], [[1, 2, 9, 0], [1, 2, 3, 4], [5, 6, 0, 0]]
    got = same_share(own, [3, 4, 1], full, [3, 4, 2])
    np.testing.assert_allclose(got, [2 / 3, 1, 1 / 2])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--texts", "poems"], "texts must be prose, code or a task, got 'poems'"),
        (["--parts", "rejected", "--depths", "1"], "rejected needs depths of at least 2, got 1"),
        (["--tokens", "4", "--depths", "4"], "tokens must be above the depth 4, got 4"),
        (["--methods", "full"], "methods must name a draft, got full alone"),
    ],
)
def test_wrong_flags_are_refused_in_a_line(flags, expected, tmp_path, capsys):
    assert main([*flags, "--no-cache", "--out", str(tmp_path / "exact.json")]) == 2
    said = capsys.readouterr().err
    assert expected in said and said.count("\n") == 1


def test_codes_of_weights_are_measured_and_help_names_drafts(tmp_path, capsys, monkeypatch):
    def loaded(name, dtype, **options):
        raise ValueError(f"loads {name} with {options}")

    monkeypatch.setattr("experiments.answering.model.load_model", loaded)
    assert main(["--weight-dtype", "int4", "--no-cache", "--out", str(tmp_path / "exact.json")]) == 2
    assert "loads builtin with {'offline': False, 'weight_dtype': 'int4'}" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["--help"])
    said = capsys.readouterr().out
    assert said.startswith("usage: python -m experiments.lab.exact") and "Choice(" not in said


def test_budgets_are_drafts_of_their_own():
    made = ExactSettings(budgets=("1/4", "1/8")).drafts
    assert [choice.label for choice in made[:2]] == ["snapkv(budget=1/4)", "snapkv(budget=1/8)"]
    assert "full" not in {choice.name for choice in made}


@pytest.mark.parametrize(
    ("parts", "names"),
    [
        ("accepted", ("snapkv",)),
        pytest.param("accepted,speed,rejected,equal", ("quest", "streamingllm"), marks=pytest.mark.thorough),
    ],
)
def test_the_command_measures_its_parts(parts, names, tmp_path, capsys):
    """Parts in tiny sizes, all tokens Full's; a second run measures nothing."""
    out = tmp_path / "exact.json"
    flags = f"--parts {parts} --methods {','.join(names)} --budgets 1/4 --lengths 256 --texts prose --samples 1 --tokens 12 "
    flags += f"--depths 3 --batches 1 --repeats 1 --prompts 3 --batch 2 --no-cache --out {out}"
    assert main(flags.split()) == 0
    said, made = capsys.readouterr(), json.loads(out.read_text())
    rows = {(row["name"], row["method"]): row for row in made["metrics"]}
    labels = [f"{name}(budget=1/4)" for name in names]
    assert set(rows) == {(part, label) for part in parts.split(",") for label in labels}
    for label in labels:
        accepted = rows["accepted", label]
        assert accepted["same"] == 1 and 1 <= accepted["value"] <= 4 and len(accepted["cells"]) == 2
        assert 0 < accepted["draft_bytes"] < accepted["full_bytes"]
        if "speed" in parts:
            assert rows["speed", label]["same"] == 1 and rows["speed", label]["ratio"] > 0
            assert rows["rejected", label]["counters"]["tokens_per_pass"] == 1
            assert rows["equal", label]["value"] == 0
    table = out.with_suffix(".md").read_text()
    assert table in said.out and len(re.findall(r"^\| draft \|", table, re.MULTILINE)) == len(parts.split(","))
    assert figures(made)[1] == ["exact"]
    assert main(flags.split()) == 0
    assert json.loads(out.read_text())["metrics"] == made["metrics"]


def test_equal_needs_float32(tmp_path, capsys):
    flags = ["--parts", "equal", "--dtype", "bfloat16", "--no-cache", "--out", str(tmp_path / "exact.json")]
    assert main(flags) == 2
    assert "equal compares tokens in float32, got bfloat16: pass --dtype float32" in capsys.readouterr().err
