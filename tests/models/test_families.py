"""The families of `models.files.tables.families` against transformers: every layer, one pass, decoding in a ragged batch.

A golden has ``config``, the text of config.json; ``shapes``, a JSON object of its tensors' names and shapes, which `weights`
draws; ``tokens`` int [3, 24], and ``prompts``, how many of each row are its prompt; of row 0 in one pass ``hidden`` float32
[L, 4, d] after each layer, at the last four tokens, and ``logits`` [24, V]; and ``decoded`` [3, 9, V], of each row alone
after its prompt and after each of the next tokens, which come one at a time.
"""

import dataclasses
import functools
import json
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
import models
from models import sharding
from models.files.tables.checkpoint import checkpoint_table
from models.files.tables.families import channel_order
from tests import goldens
from tests.models.test_parity import ours
from tests.models.test_weights import CONFIGS
from tests.tiny_models import run

pytestmark = pytest.mark.usefixtures("quick_compile")
FOLDER = goldens.FOLDER / "models" / "families"
TOLERANCE = 1e-5  # of the largest number; float32 in another order of sums


NAMES = sorted(path.stem for path in FOLDER.glob("*.npz"))
# Two RoPEs and windows, norms before and after. Sinks, layers without RoPE, latent and linear attention, and routed experts
# decode in `tests/kvjax/test_kinds_of_models.py`.
DECODED = ("gemma3_text",)
EXPERTS = ("gpt_oss", "granitemoe", "qwen3_next", "glm4_moe", "minimax_m2", "olmoe", "qwen2_moe")
# The parts of all families, each at least once; each of the others has no part that these do not have.
READ = (
    "gemma2", "olmo3", "smollm3", "phi4_longrope", "glm4", "exaone4", "cohere2", "arcee", "granitemoe", "qwen3_next",
    "deepseek_v3", "glm4_moe", "gpt_oss",
)  # fmt: skip


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def weights(shapes):
    """The tensors of a golden's checkpoint, float32, by their names: normal numbers around 0, and around 1 for norms."""
    made = {}
    for name, shape in sorted(shapes.items()):
        rng = np.random.RandomState((20261127 + zlib.crc32(name.encode())) % 2**32)
        made[name] = np.asarray(rng.normal(0, 0.2 if "norm" in name else 0.35, shape) + ("norm" in name), np.float32)
    return made


def write_checkpoint(directory, golden):
    directory.mkdir(exist_ok=True)
    directory.joinpath("config.json").write_text(str(golden["config"]))
    save_file(weights(json.loads(str(golden["shapes"]))), directory / "model.safetensors")


@pytest.fixture(scope="module")
def loaded(tmp_path_factory):
    """Return a function from a golden's name to the parameters, the config and the directory."""

    @functools.cache
    def load(name):
        directory = tmp_path_factory.mktemp(name)
        write_checkpoint(directory, golden(name))
        return *models.from_pretrained(directory), directory

    return load


def assert_close(got, expected):
    np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max())


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x not in READ)) for x in NAMES])
def test_layers_and_logits_equal_transformers(name, loaded):
    params, config, _ = loaded(name)
    hidden, logits = jax.jit(lambda params, tokens: ours(params, config, tokens))(params, golden(name)["tokens"][:1])
    for got, expected in zip(hidden, golden(name)["hidden"], strict=True):
        assert_close(got[0, -4:], expected)
    assert_close(logits[0], golden(name)["logits"])


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x not in DECODED)) for x in NAMES])
def test_decoding_a_ragged_batch_equals_transformers(name, loaded):
    """Rows with prompts of 15, 9 and 3 tokens, and a window of 6: within, at the end of, and beyond the window."""
    params, config, _ = loaded(name)
    tokens, prompts, expected = (golden(name)[key] for key in ("tokens", "prompts", "decoded"))
    steps = expected.shape[1]
    rows = [row[:count].astype(np.int32) for row, count in zip(tokens, prompts, strict=True)]
    cache = kvjax.prefill(params, rows, config=config, method="full", max_new_tokens=steps)
    assert_close(cache.logits, expected[:, 0])
    for step in range(1, steps):
        given = np.array([row[count + step - 1] for row, count in zip(tokens, prompts, strict=True)], np.int32)
        cache = kvjax.decode_step(params, cache, given)
        assert_close(cache.logits, expected[:, step])


# Experts and latent attention have no codes.
CODED = [x for x in NAMES if x not in EXPERTS and "n_routed_experts" not in str(golden(x)["config"])]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.thorough] * (x != "phi3")) for x in CODED])
def test_a_family_loads_in_8_bits(name, loaded):
    """Codes have the order of channels, and the parts of fused tensors, that floating-point numbers have."""
    params, config = models.from_pretrained(loaded(name)[2], weight_dtype="int8")
    with jax.numpy_rank_promotion("allow"):
        logits = run(config, params, jnp.asarray(golden(name)["tokens"][:1], jnp.int32))
    expected = golden(name)["logits"]
    assert 1e-3 < np.abs(logits[0] - expected).mean() / np.abs(expected).mean() < 0.1


def edges(name, **changes):
    """The config.json of a golden with changes; a value of ... takes a key away."""
    hf = {**json.loads(str(golden(name)["config"])), **changes}
    return {key: value for key, value in hf.items() if value is not ...}


@pytest.mark.parametrize(
    "name", ["gemma3_text", "phi3", "glm4", "olmo3", "qwen3_5_text", "deepseek_v2", "glm4_moe_lite", *EXPERTS]
)
def test_a_file_is_written_as_it_was_read(name, loaded, tmp_path):
    """Offsets of norms, the order of channels, fused tensors, and norms over all heads."""
    params, config, directory = loaded(name)
    models.save_pretrained(tmp_path, params, config)
    before, after = (load_file(path / "model.safetensors") for path in (directory, tmp_path))
    assert before.keys() == after.keys()
    for key, value in before.items():
        np.testing.assert_allclose(after[key], value, rtol=0, atol=2e-7, err_msg=key)  # 1 is added and taken away again


@pytest.mark.parametrize(
    ("name", "unread", "unused"),
    [
        ("qwen3_5_text", "mtp.fc.weight", "fc.weight"),
        ("glm4_moe", "model.layers.3.fc.weight", "fc.weight"),
        ("kimi_k2", "model.layers.3.mlp.down_proj.weight", "model.layers.4.input_layernorm.weight"),
    ],
)
def test_tensors_of_a_head_for_several_tokens_are_not_read(name, unread, unused, tmp_path):
    """Of published files, whose layer more predicts the token after the next."""
    write_checkpoint(tmp_path, golden(name))
    tensors = load_file(tmp_path / "model.safetensors")
    save_file({**tensors, unread: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    assert "layers_3" not in models.from_pretrained(tmp_path)[0]
    save_file({**tensors, unused: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match=f"unused {unused}"):
        models.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"), [("", "language_model."), ("model.", "model.language_model.")], ids=["transformers 4", "transformers 5"]
)
def test_the_text_model_beside_an_encoder_of_images_loads(old, new, loaded, tmp_path):
    """Gemma 3 from 4B on: what ``text_config`` leaves out is as in transformers, and the encoder's tensors are not read."""
    params, config, directory = loaded("gemma3_text")
    outside = {"model_type": "gemma3", "eos_token_id": [1, 6], "vision_config": {"hidden_size": 8}}
    inside = edges("gemma3_text", eos_token_id=...)
    tmp_path.joinpath("config.json").write_text(json.dumps({**outside, "text_config": inside}))
    tensors = {new + key.removeprefix(old): value for key, value in load_file(directory / "model.safetensors").items()}
    image = ("model." if old else "") + "vision_tower.patch.weight"
    save_file({**tensors, image: np.zeros((2, 2), np.float32)}, tmp_path / "model.safetensors")
    again, read = models.from_pretrained(tmp_path)
    assert read == dataclasses.replace(config, eos_token_ids=(1, 6))
    assert jax.tree.all(jax.tree.map(lambda x, y: bool((x == y).all()), again, params))
    brief = {"hidden_size": 2560, "intermediate_size": 10240, "num_hidden_layers": 34, "sliding_window": 1024}
    brief |= {"rope_scaling": {"factor": 8.0, "rope_type": "linear"}, "model_type": "gemma3_text"}  # of google/gemma-3-4b-it
    large = models.ModelConfig.from_hf({**outside, "text_config": brief, "torch_dtype": "bfloat16"})
    assert (large.num_q_heads, large.num_kv_heads, large.head_dim, large.vocab_size) == (8, 4, 256, 262208)
    assert large.dtype == "bfloat16" and large.ropes[5].scaling.factor == 8.0 and large.ropes[0].scaling is None


@pytest.mark.parametrize("name", [*CONFIGS, "phi3", "glm4", "olmo3", "qwen3_5_text", *EXPERTS])
def test_a_part_is_joined_from_parts_of_the_file(name):
    """Along the dimension that a mesh splits: slices of the file's tensors make the slice of the parameter, no more."""
    rng, pieces = np.random.default_rng(0), 3 if name == "untiled_heads" else 2
    for leaf in checkpoint_table(CONFIGS.get(name) or models.ModelConfig.from_hf(edges(name))):
        drawn = {part: rng.normal(size=leaf.file_shape(i)) for i, part in enumerate(leaf.names)}
        whole = leaf.join([drawn[part] for part in leaf.names])
        assert whole.shape == leaf.shape
        dims = [dim for dim, axis in enumerate(sharding.param_spec(leaf.path, whole.ndim)) if axis]
        for number in range(pieces if dims and whole.shape[dims[0]] % pieces == 0 else 0):
            index, size = [slice(None)] * whole.ndim, whole.shape[dims[0]] // pieces
            index[dims[0]] = slice(number * size, (number + 1) * size)
            part, where = leaf.part(tuple(index))
            read = [drawn[file][at] for file, at in zip(leaf.names, where, strict=True)]
            np.testing.assert_array_equal(part.join(read), whole[tuple(index)], err_msg=leaf.path)
            halves = vars(leaf).get("gates") == "halves"  # gate and up are read whole, and cut
            assert sum(x.size for x in read) == whole[tuple(index)].size * (2 if halves else 1)


@pytest.mark.parametrize(
    ("head_dim", "rotated", "interleaved", "expected"),
    [
        (8, 8, False, ()),
        (8, 0, True, ()),
        (8, 8, True, (0, 2, 4, 6, 1, 3, 5, 7)),
        (8, 4, False, (0, 1, 4, 5, 2, 3, 6, 7)),
        (8, 4, True, (0, 2, 4, 5, 1, 3, 6, 7)),
        (6, 2, False, (0, 2, 3, 1, 4, 5)),
    ],
)
def test_rotated_pairs_come_first(head_dim, rotated, interleaved, expected):
    assert channel_order(head_dim, rotated, interleaved) == expected
