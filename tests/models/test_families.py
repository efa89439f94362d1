"""The families of `models.families` against transformers: every layer, one pass, decoding in a ragged batch."""

from __future__ import annotations

import functools
import importlib.util
import json

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import kvjax
import models
from tests import goldens
from tests.models.test_parity import ours

FOLDER = goldens.FOLDER / "models" / "families"
TOLERANCE = 1e-5  # of the largest number; float32 in another order of sums


@functools.cache
def generator():
    """The script that makes the goldens, as a module; it imports torch only where it makes one."""
    spec = importlib.util.spec_from_file_location("make_family_goldens", FOLDER / "make_goldens.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


NAMES = sorted(generator().MODELS)


@functools.cache
def golden(name):
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def write_checkpoint(directory, golden):
    directory.mkdir(exist_ok=True)
    directory.joinpath("config.json").write_text(str(golden["config"]))
    save_file(generator().weights(json.loads(str(golden["shapes"]))), directory / "model.safetensors")


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


@pytest.mark.parametrize("name", NAMES)
def test_layers_and_logits_equal_transformers(name, loaded):
    params, config, _ = loaded(name)
    hidden, logits = ours(params, config, golden(name)["tokens"][:1])
    for got, expected in zip(hidden, golden(name)["hidden"], strict=True):
        assert_close(got[0, -4:], expected)
    assert_close(logits[0], golden(name)["logits"])


@pytest.mark.usefixtures("quick_compile")
@pytest.mark.parametrize("name", NAMES)
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
