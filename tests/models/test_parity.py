"""Our decoder against the ``transformers`` PyTorch classes: every layer and the logits, in float32."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

import kvjax
import models
from models.layers.transformer import Block, Transformer
from tests import goldens
from tests.tiny_models import dense_attend

GOLDENS = goldens.FOLDER / "models"
FAMILIES = sorted(path.stem for path in GOLDENS.glob("*.npz"))
REPEATED = (  # what others show together: qwen2_windows, qwen3_yarn, llama3_rope_tied, and phi4_longrope of test_families.py
    "qwen3_moe_tied", "qwen3_tied", "qwen3_qk_norm", "qwen2_bias", "yi", "mistral", "mistral_window", "llama_longrope",
)  # fmt: skip
SETTINGS = [pytest.param(name, marks=[pytest.mark.thorough] * (name in REPEATED)) for name in FAMILIES]
TOLERANCE = 1e-4  # absolute, on residual streams and logits of size 1 to 10


def read_golden(family: str) -> dict[str, np.ndarray]:
    with np.load(GOLDENS / f"{family}.npz") as golden:
        return dict(golden)


def write_checkpoint(directory: Path, golden: dict[str, np.ndarray]) -> None:
    """A Hugging Face directory with the golden's config and float32 weights."""
    weights = {name.removeprefix("weight:"): golden[name] for name in golden if name.startswith("weight:")}
    directory.joinpath("config.json").write_text(str(golden["config"]))
    save_file({name: value.astype(np.float32) for name, value in weights.items()}, directory / "model.safetensors")


def ours(params, config: models.ModelConfig, tokens: np.ndarray) -> tuple[jax.Array, jax.Array]:
    """Residual stream after each layer [L, B, T, d] and logits [B, T, V]."""
    (logits, _), captured = Transformer(config).apply(
        {"params": params}, jnp.asarray(tokens, jnp.int32), dense_attend(config, tokens.shape), (None,) * config.num_layers,
        capture_intermediates=lambda module, _: isinstance(module, Block), mutable=["intermediates"],
    )  # fmt: skip
    # A layer hands on the stream and what is still to be added to it.
    blocks = [captured["intermediates"][f"layers_{i}"]["__call__"][0] for i in range(config.num_layers)]
    layers = [stream + update for stream, update, *_ in blocks]
    return jnp.stack(layers), logits


def compare(directory: Path, golden: dict[str, np.ndarray]) -> None:
    """Load what is in ``directory`` and hold it against the golden."""
    params, config = models.from_pretrained(directory)
    assert config.dtype == "float32"
    hidden, logits = ours(params, config, golden["tokens"])
    for layer, (got, expected) in enumerate(zip(hidden, golden["hidden"], strict=True)):
        np.testing.assert_allclose(got, expected, rtol=0, atol=TOLERANCE, err_msg=f"after layer {layer}")
    np.testing.assert_allclose(logits, golden["logits"], rtol=0, atol=TOLERANCE, err_msg="logits")


def test_every_family_has_a_golden():
    assert len(FAMILIES) == 16


@pytest.mark.parametrize("family", SETTINGS)
def test_logits_equal_the_goldens_of_transformers(family, tmp_path):
    golden = read_golden(family)
    write_checkpoint(tmp_path, golden)
    compare(tmp_path, golden)


@pytest.mark.usefixtures("quick_compile")
def test_decoding_keeps_stored_keys_as_they_were_rotated(tmp_path):
    """The prompt is shorter than the old context, and decoding goes beyond it: transformers caches rotated keys."""
    golden = read_golden("llama_dynamic")
    write_checkpoint(tmp_path, golden)
    params, config = models.from_pretrained(tmp_path)
    assert config.max_position_embeddings >= 24
    tokens, steps = golden["tokens"].astype(np.int32), golden["decoded"].shape[1]
    cache = kvjax.prefill(params, tokens[:, :-steps], config=config, method="full", max_new_tokens=steps, pad_multiple=1)
    for step in range(steps):
        cache = kvjax.decode_step(params, cache, tokens[:, step - steps])
        np.testing.assert_allclose(cache.logits, golden["decoded"][:, step], rtol=0, atol=TOLERANCE, err_msg=str(step))
    # The other reading, all keys at the last length, is what reading the text in one piece does.
    assert np.abs(golden["decoded"][:, -1] - golden["logits"][:, -1]).max() > 100 * TOLERANCE


@pytest.mark.parametrize("family", ["mixtral", pytest.param("qwen3_moe", marks=pytest.mark.thorough)])
def test_a_few_tokens_read_the_experts_that_they_choose(family, tmp_path):
    """One token of each row takes another way through the experts than a prompt does, to the same numbers."""
    golden = read_golden(family)
    write_checkpoint(tmp_path, golden)
    params, config = models.from_pretrained(tmp_path)
    assert 2 * config.experts.num_experts_per_tok <= config.experts.num_experts
    hidden, logits = ours(params, config, golden["tokens"][:, :1])
    np.testing.assert_allclose(hidden, golden["hidden"][:, :, :1], rtol=0, atol=TOLERANCE)
    np.testing.assert_allclose(logits, golden["logits"][:, :1], rtol=0, atol=TOLERANCE)
