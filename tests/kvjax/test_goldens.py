"""The oracles beside the released code of their papers, and `Periodic` beside kvpress: see `tests/goldens`.

The methods meet their oracles elsewhere, so these tests need no JAX, but the last.
"""

import json

import numpy as np
import pytest

import kvjax
import models
from kvjax.methods import Knorm
from kvjax.testing.layer import stored
from kvjax.wrappers import Periodic
from tests import goldens
from tests.models.test_parity import write_checkpoint
from tests.oracles import magicpig, pqcache, rkv, selfextend, think

pytestmark = pytest.mark.usefixtures("quick_compile")


def golden(name):
    return json.loads((goldens.FOLDER / "kvjax" / f"{name}.json").read_text())


def tokens(rng, sizes):
    """q [H, G, T, D], k and v [H, T, D], as the scripts make them."""
    heads, group, total, dim = sizes
    q, k, v = (rng.normal(size=(n, total, dim)).astype(np.float32) for n in (heads * group, heads, heads))
    return q.reshape(heads, group, total, dim), k, v


def test_magicpig_samples_as_the_released_code(monkeypatch):
    made = golden("magicpig")
    rng, knobs, prompt = np.random.default_rng(made["seed"]), made["knobs"], made["prompt"]
    q, k, v = tokens(rng, made["sizes"])
    heads, group, total, dim = made["sizes"]
    planes = rng.normal(size=(knobs["num_tables"], knobs["num_bits"], dim))
    monkeypatch.setattr(magicpig, "random_planes", lambda *_: planes)
    got = magicpig.run(q, k, v, prompt, np.zeros(dim // 2), **knobs, capacity=total, dense_every=0)
    np.testing.assert_allclose(got.outputs, made["outputs"], atol=1e-5)
    zone = range(knobs["num_sink"], prompt - knobs["num_local"])
    for at, share in enumerate(made["sampled"]):
        found = 0
        for h in range(heads):
            mean = k[h, zone].mean(axis=0)
            own = {i: [magicpig.bucket(k[h, i] - mean, table) for table in planes] for i in zone}
            asked = [[magicpig.bucket(q[h, g, prompt + at], table) for table in planes] for g in range(group)]
            found += sum(map(len, magicpig.sample(asked, own, total)[0]))
        assert found / (heads * group * len(zone)) == pytest.approx(share, abs=1e-6)


def test_pqcache_finds_the_tokens_that_the_released_code_finds():
    """Over more steps than it takes for generated tokens to be searched."""
    made = golden("pqcache")
    sizes, prompt, knobs = made["sizes"], made["prompt"], made["knobs"]
    q, k, v = tokens(np.random.default_rng(made["seed"]), sizes)
    got = pqcache.run(q, k, v, prompt, np.zeros(sizes[3] // 2), **knobs)
    recent = int((prompt - knobs["num_sink"]) * knobs["fraction"] * knobs["recent_share"])
    assert max(map(max, made["chosen"][-1])) >= prompt
    for step, (chosen, attended) in enumerate(zip(made["chosen"], got.attended, strict=True)):
        at = prompt + step
        always = {*range(knobs["num_sink"]), *range(at - recent, at + 1)}
        assert [sorted(head - always) for head in attended] == chosen, f"step {step}"
    np.testing.assert_allclose(got.outputs, made["outputs"], atol=1e-5)


def test_selfextend_has_the_outputs_of_the_released_code():
    made = golden("selfextend")
    sizes, prompt = made["sizes"], made["prompt"]
    q, k, v = tokens(np.random.default_rng(made["seed"]), sizes)
    inv_freq = made["base"] ** (-np.arange(0, sizes[3], 2) / sizes[3])
    got = selfextend.run(q, k, v, prompt, inv_freq, **made["knobs"])
    last = len(made["outputs"]) - len(got.outputs)
    outputs = [*np.moveaxis(got.prompt, 2, 0)[-last:], *got.outputs]
    assert last > 0
    np.testing.assert_allclose(outputs, made["outputs"], atol=1e-5)


def test_think_drops_the_channels_that_the_released_code_drops():
    made = golden("think")
    sizes, knobs = made["sizes"], made["knobs"]
    q, k, v = tokens(np.random.default_rng(made["seed"]), sizes)
    got = think.run(q, k, v, made["prompt"], np.zeros(sizes[3] // 2), **knobs)
    assert [len(head) for head in made["channels"]] == [sizes[3] * knobs["channels"]] * sizes[0]
    np.testing.assert_allclose(got.outputs, made["outputs"], atol=1e-5)


def test_rkv_keeps_what_the_released_code_keeps():
    made = golden("rkv")
    heads, group, total, dim = made["sizes"]
    rng = np.random.default_rng(made["seed"])
    q = rng.normal(size=(heads, group, total, dim)).astype(np.float32)
    k = (rng.normal(size=(heads, total, dim)) + rng.normal(size=(heads, 1, dim))).astype(np.float32)
    kept = rkv.keep(q, k, [list(range(total))] * heads, **made["knobs"])
    assert [sorted(head) for head in kept] == made["kept"]


@pytest.mark.thorough
def test_periodic_keeps_what_kvpress_keeps_while_decoding(tmp_path):
    """Its prompt stays whole until the first interval ends, as under a budget of `evict` that is larger."""
    made = golden("decoding")
    with np.load(goldens.FOLDER / "models" / "llama.npz") as weights:
        write_checkpoint(tmp_path, dict(weights))
    params, config = models.from_pretrained(tmp_path)
    evict = Knorm(budget=made["prompt"])
    method = Periodic(evict=evict, budget=made["budget"], interval=made["interval"])
    given = {"config": config, "method": method, "max_new_tokens": len(made["logits"]), "pad_multiple": 1}
    cache = kvjax.prefill(params, np.array(made["tokens"][: made["prompt"]])[None], **given)
    for token, want in zip(made["tokens"][made["prompt"] :], made["logits"], strict=True):
        cache = kvjax.decode_step(params, cache, np.array([token]))
        np.testing.assert_allclose(cache.logits[0], want, atol=2e-4, rtol=0)
    for layer, heads in enumerate(made["kept"]):
        for head, want in enumerate(heads):
            position = np.asarray(stored(cache.layers[layer]).position[0, head])
            assert sorted(position[position >= 0].tolist()) == want, f"layer {layer}, head {head}"
