"""`experiments.lab.exact`: caches made from one reading of the prompts, forced draws, tables, the command in tiny sizes."""

from __future__ import annotations

import json
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from experiments.lab.exact.__main__ import main
from experiments.lab.exact.accepted import bytes_per_token, tokens_per_pass
from experiments.lab.exact.caches import same_share
from experiments.lab.exact.report import exact_tables
from experiments.lab.exact.settings import ExactSettings
from experiments.lab.exact.shape import _kinds, _parts
from experiments.speed import settings as speed_settings
from experiments.speed.kernel_times import kernels_of
from experiments.speed.samplers import ByRow, Forced
from experiments.speed.verified_cache import verified_cache
from kvjax.decoding.sampling import Sampler
from kvjax.methods import Full
from models import ModelConfig
from tests.harness import TINY, example, padded, prompts, tiny_params

pytestmark = pytest.mark.usefixtures("quick_compile")

SMALL = ModelConfig(
    vocab_size=61, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=4, num_kv_heads=2, head_dim=8,
    qk_norm=True, max_position_embeddings=8192,
)  # fmt: skip


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


def test_kernels_are_summed_by_part_of_a_round_and_by_kind():
    """By the scopes of the compiled program's instructions, whose names kernels have, or by what the trace tells."""
    text = """
      %loop_fusion.7 = f32[2] fusion(%x), kind=kLoop, metadata={op_name="jit(run)/while/body/draft/mul" source_line=3}
      ROOT %gemm.1 = (f32[2], s8[4]) custom-call(%x), metadata={op_name="jit(run)/while/body/judge/dot"}
      %loop_fusion.8 = f32[2] fusion(%x), kind=kLoop, metadata={op_name="jit(run)/drafty/mul"}
    """
    events = [
        {"ph": "M", "pid": 1, "name": "process_name", "args": {"name": "/device:GPU:0"}},
        {"ph": "M", "pid": 1, "tid": 7, "name": "thread_name", "args": {"name": "Stream #7"}},
        *(
            {"ph": "X", "pid": 1, "tid": 7, "name": name, "ts": at, "dur": 2, "args": told}
            for at, (name, told) in enumerate([
                ("loop_fusion_7", {}), ("loop_fusion_8", {}), ("sm90_gemm", {"hlo_op": "gemm.1"}),
                ("store_token", {"tf_op": "jit(run)/commit/store"}),
            ])
        ),
    ]  # fmt: skip
    kernels = kernels_of(events)["/device:GPU:0"]
    took = pytest.approx(2e-6)
    assert _parts(kernels, text) == {part: (1, took) for part in ("draft", "other", "judge", "commit")}
    assert _kinds(kernels) == {
        "loop_fusion": (2, pytest.approx(4e-6)),
        "sm90_gemm": (1, took),
        "store_token": (1, took),
    }
    profile = {
        "busy": 2e-3, "count": 5.0, "parts": {"draft": [3.0, 1e-3]}, "kernels": [["gemm", 2.0, 1e-3]], "others": [3.0, 1e-3]
    }  # fmt: skip
    row = {
        "name": "shape",
        "method": "quest",
        "batch": 24,
        "length": 512,
        "depth": 4,
        "value": 1.0,
        "full": 1.0,
        "ratio": 1.0,
    }
    row |= {"later_ratio": 1.0, "counters": {}, "same": None, "step_seconds": 3e-3, "full_step_seconds": 1e-3}
    told = exact_tables([{**row, "profile": profile, "full_profile": None}])
    assert (
        "quest, depth 4, 24 rows of 512: 3.00 ms a round or step; kernels ran 2.00 ms, so the device waited 1.00 ms"
        in told
    )
    assert "| gemm | 2.0 | 1000.0 |" in told and "| others | 3.0 | 1000.0 |" in told


def test_tokens_are_compared_up_to_the_first_difference():
    own, full = [[1, 2, 3, 0], [1, 2, 3, 4], [5, 0, 0, 0]], [[1, 2, 9, 0], [1, 2, 3, 4], [5, 6, 0, 0]]
    got = same_share(own, [3, 4, 1], full, [3, 4, 2])
    np.testing.assert_allclose(got, [2 / 3, 1, 1 / 2])


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (["--texts", "poems"], "texts must be prose, code or a task, got 'poems'"),
        (["--parts", "rejected", "--depths", "1"], "need depths of at least 2, got 1"),
        (["--tokens", "4", "--depths", "4"], "tokens must be above the depth 4, got 4"),
        (["--sizes", "128"], "sizes must be LENGTHxROWS, such as 131072x1, got 128"),
        (["--shape", "large"], "shape must be one of"),
        (["--methods", "full"], "methods must name a draft, got full alone"),
        (["--parts", "shape", "--methods", "snapkv", "--shape", "small", "--sizes", "512x1"], ""),
    ],
)
def test_wrong_flags_are_refused_in_a_line(flags, expected, tmp_path, capsys, monkeypatch):
    monkeypatch.setitem(speed_settings.MODELS, "small", lambda: SMALL)
    code = main([*flags, "--no-cache", "--out", str(tmp_path / "exact.json")])
    said = capsys.readouterr()
    if expected:
        assert code == 2 and expected in said.err and said.err.count("\n") == 1
    else:  # a draft without measured shares is left out, and told
        assert code == 2 and "the record has no acceptance of snapkv(budget=1/8) at depth 8" in said.err
        assert "no draft could be measured: the lines above say why" in said.err


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
        pytest.param("accepted,shape", ("snapkv",), marks=pytest.mark.slow),
        pytest.param("accepted,speed,rejected,equal,shape", ("snapkv", "streamingllm"), marks=pytest.mark.thorough),
    ],
)
def test_the_command_measures_its_parts(parts, names, tmp_path, capsys, monkeypatch):
    """Parts in tiny sizes, all tokens Full's; a second run measures nothing."""
    monkeypatch.setitem(speed_settings.MODELS, "small", lambda: SMALL)
    out = tmp_path / "exact.json"
    given = ["--parts", parts, "--methods", ",".join(names), "--budgets", "1/4", "--lengths", 256, "--texts", "prose"]
    sizes = [
        "--samples",
        1,
        "--tokens",
        12,
        "--depths",
        3,
        "--batches",
        1,
        "--repeats",
        1,
        "--prompts",
        3,
        "--batch",
        2,
    ]
    flags = list(map(str, [*given, *sizes, "--shape", "small", "--sizes", "256x2", "--no-cache", "--out", out]))
    assert main(flags) == 0
    said, made = capsys.readouterr(), json.loads(out.read_text())
    rows = {(row["name"], row["method"]): row for row in made["metrics"]}
    labels = [f"{name}(budget=1/4)" for name in names]
    assert set(rows) == {(part, label) for part in parts.split(",") for label in labels}
    for label in labels:
        accepted = rows["accepted", label]
        assert accepted["same"] == 1 and 1 <= accepted["value"] <= 4 and len(accepted["cells"]) == 2
        assert 0 < accepted["draft_bytes"] < accepted["full_bytes"]
        assert rows["shape", label]["kept"] == accepted["kept"] and rows["shape", label]["ratio"] > 0
        if "speed" in parts:
            assert rows["speed", label]["same"] == 1 and rows["speed", label]["ratio"] > 0
            assert rows["rejected", label]["counters"]["tokens_per_pass"] == 1
            assert rows["equal", label]["value"] == 0
    table = out.with_suffix(".md").read_text()
    assert table in said.out and len(re.findall(r"^\| draft \|", table, re.MULTILINE)) == len(parts.split(","))
    assert main(flags) == 0
    assert json.loads(out.read_text())["metrics"] == made["metrics"]


@pytest.mark.slow
def test_equal_needs_float32(tmp_path, capsys):
    flags = ["--parts", "equal", "--dtype", "bfloat16", "--no-cache", "--out", str(tmp_path / "exact.json")]
    assert main(flags) == 2
    assert "equal compares tokens in float32, got bfloat16: pass --dtype float32" in capsys.readouterr().err
