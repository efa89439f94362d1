"""What only InfLLM has: parts of a row, and what does not fit them. Its oracle runs in test_oracles.py."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kvjax.methods import InfLLM
from kvjax.protocol.method import LayerSpec
from tests import goldens
from tests.harness import small
from tests.oracles import infllm as oracle

pytestmark = pytest.mark.usefixtures("quick_compile")

SPEC = LayerSpec(batch=120, num_kv_heads=2, group_size=3, head_dim=4, dtype="bfloat16", prompt_slots=100, max_new_tokens=20)


def test_a_step_reads_its_tokens_and_a_representative_per_block():
    """Of every row length from 1 to 120: the last step's tokens, and a representative per block."""
    method = small(InfLLM, budget=17, num_sink=3, num_local=20, block_size=8, num_repr=2, chunk=16)  # two blocks
    made = method.init(SPEC)
    lengths = np.arange(1, 121)
    state = dataclasses.replace(made, cache=dataclasses.replace(made.cache, cursor=jnp.asarray(lengths, jnp.int32)))
    cost = jax.jit(method.cost, static_argnums=1)(state, None)
    blocks = [max(length - 1 - 3 - 20, 0) // 8 for length in lengths]
    attended = [length - 8 * max(count - 2, 0) for length, count in zip(lengths, blocks, strict=True)]
    np.testing.assert_array_equal(cost.attended, attended)
    row = 2 * 4 * 2  # the keys of both heads in bfloat16
    np.testing.assert_array_equal(cost.kv_bytes, row * 2 * np.array(attended))
    np.testing.assert_array_equal(cost.metadata_bytes, 2 * 3 * (4 * 2 * np.array(blocks) + 4 * (20 + 8)))
    assert made.representative.shape[3] == (120 - 3 - 20) // 8 >= max(blocks)


def test_the_oracle_is_the_released_code():
    """Stored by a maker that says what was changed (`tests/goldens`)."""
    golden = json.loads((goldens.FOLDER / "kvjax" / "infllm.json").read_text())
    heads, group, tokens, dim = golden["sizes"]
    rng = np.random.default_rng(golden["seed"])
    q, (k, v) = rng.normal(size=(heads, group, tokens, dim)) * 1.5, rng.normal(size=(2, heads, tokens, dim))
    inv_freq = golden["base"] ** (-np.arange(0, dim, 2) / dim)
    found = oracle.run(q, k, v, golden["prompt"], inv_freq, **golden["knobs"])
    out = np.concatenate([found.prompt, np.stack(found.outputs, axis=2)], axis=2)
    np.testing.assert_allclose(out, golden["out"], atol=2e-7, rtol=0)
