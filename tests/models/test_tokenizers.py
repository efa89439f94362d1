"""Tokenizers of checkpoints: files that go with saved weights. `tests.fuzz.tokenizers` has tokens beyond the embedding."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tokenizers import Tokenizer
from tokenizers import models as tokenizer_models

import models
from tests.models.test_models import FAMILIES

CONFIG = FAMILIES["llama"]


@pytest.fixture
def params():
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), models.param_shapes(CONFIG))


def write_tokenizer(directory, config="{}"):
    """A tokenizer of as many words as the embedding has rows."""
    vocabulary = {f"t{i}": i for i in range(CONFIG.vocab_size)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(config)


def test_a_damaged_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match="tokenizer.json"):
        models.load_tokenizer(tmp_path)


def test_a_saved_model_has_its_tokenizer_and_anybody_may_read_it(tmp_path, params):
    source, out = tmp_path / "source", tmp_path / "out"
    source.mkdir()
    write_tokenizer(source, config='{"eos_token": "t1"}')
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}")
    models.save_pretrained(out, params, CONFIG, tokenizer=source)
    names = ["chat_template.jinja", "config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    assert sorted(path.name for path in out.iterdir()) == names
    assert all(path.stat().st_mode & 0o777 == 0o644 for path in out.iterdir())
    for name in names[:1] + names[3:]:
        assert (out / name).read_bytes() == (source / name).read_bytes()
    assert models.ChatTemplate.from_directory(out).template == "{{ messages[0].content }}"


def test_a_tokenizer_object_is_saved_as_transformers_reads_it(tmp_path, params):
    write_tokenizer(tmp_path)
    tokenizer = models.load_tokenizer(tmp_path)
    models.save_pretrained(tmp_path / "out", params, CONFIG, tokenizer=tokenizer)
    assert models.load_tokenizer(tmp_path / "out", CONFIG).to_str() == tokenizer.to_str()
    assert models.special_tokens(tmp_path / "out").get("eos_token") == (
        tokenizer.id_to_token(CONFIG.eos_token_ids[0]) if CONFIG.eos_token_ids else None
    )
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="no tokenizer.json in "):
        models.save_pretrained(tmp_path / "none", params, CONFIG, tokenizer=tmp_path / "empty")
    assert not (tmp_path / "none").exists()
