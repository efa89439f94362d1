"""A tiny model on disk for the jobs' commands."""

import pytest

from tests.tiny_models import SHIPPED, write_model


@pytest.fixture(scope="module")
def directory(request, tmp_path_factory):
    """A tiny random model with the tokenizer that ships: `SHIPPED`, or the ``CONFIG`` of a module that has one."""
    return write_model(tmp_path_factory.mktemp("model"), vars(request.module).get("CONFIG", SHIPPED))
