"""Tests of the lab are slow ones, which `.ci/run` runs; a tiny model on disk for the jobs' commands."""

import pathlib

import pytest

from tests.tiny_models import SHIPPED, write_model


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    """A tiny random model with the tokenizer that ships: `SHIPPED`, or the ``CONFIG`` of a module that has one."""
    return write_model(tmp_path_factory.mktemp("model"), vars(request.module).get("CONFIG", SHIPPED))


@pytest.hookimpl(tryfirst=True)  # before the tests' own conftest looks at the marks
def pytest_collection_modifyitems(items):
    """Mark every test of this folder as slow."""
    for item in items:
        if item.path.is_relative_to(pathlib.Path(__file__).parent):
            item.add_marker(pytest.mark.slow)
