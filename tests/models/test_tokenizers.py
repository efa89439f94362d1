"""Tokenizers of fine-tuned checkpoints: padding beyond the embedding, and files that go with saved weights."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from tokenizers import AddedToken, Tokenizer
from tokenizers import models as tokenizer_models

import models
from tests.models.test_models import FAMILIES

CONFIG = FAMILIES["llama"]


@pytest.fixture
def params():
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), models.param_shapes(CONFIG))


def write_tokenizer(directory, *added, config="{}"):
    """A tokenizer of as many words as the embedding has rows, and more added tokens."""
    vocabulary = {f"t{i}": i for i in range(CONFIG.vocab_size)}
    tokenizer = Tokenizer(tokenizer_models.WordLevel(vocabulary, unk_token="t0"))
    tokenizer.add_tokens(list(added))
    tokenizer.save(str(directory / "tokenizer.json"))
    (directory / "tokenizer_config.json").write_text(config)


@pytest.mark.parametrize("pad", ["<pad>", "[PAD]", "<|finetune_right_pad_id|>"])
def test_a_padding_token_beyond_the_embedding_is_taken(pad, tmp_path):
    write_tokenizer(tmp_path, AddedToken(pad, special=True))
    assert models.load_tokenizer(tmp_path, CONFIG).token_to_id(pad) == CONFIG.vocab_size
    write_tokenizer(tmp_path, "filler", config='{"pad_token": "filler"}')
    assert models.load_tokenizer(tmp_path, CONFIG).token_to_id("filler") == CONFIG.vocab_size


@pytest.mark.parametrize("text", ["<|im_start|>", "notepad"])
def test_tokens_of_texts_beyond_the_embedding_are_refused(text, tmp_path):
    write_tokenizer(tmp_path, AddedToken("<pad>", special=True), AddedToken(text, special=text[0] == "<"))
    told = f"got token ids up to {CONFIG.vocab_size + 1}, expected ids below vocab_size {CONFIG.vocab_size}"
    with pytest.raises(ValueError, match=told):
        models.load_tokenizer(tmp_path, CONFIG)
    assert models.load_tokenizer(tmp_path).token_to_id(text) == CONFIG.vocab_size + 1
    (tmp_path / "tokenizer.json").write_text('{"version": 1')
    with pytest.raises(ValueError, match="tokenizer.json is not a readable tokenizer"):
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

