"""A back end of one's own is one entry in a table of bodies."""

from __future__ import annotations

import functools
import types

import pytest

from tests.pallas_kernels.cases import every_body, everywhere, on_gpu
from tests.pallas_kernels.conftest import pytest_generate_tests

RUN = {"xla": None, "interpreted": None, "mine": everywhere(functools.partial(max))}
OTHER = {"xla": None, "interpreted": None}


def takes_mine():
    return RUN


def takes_other():
    return OTHER


@pytest.mark.parametrize("mark", [every_body, on_gpu])
@pytest.mark.parametrize(("test", "tried"), [(takes_mine, True), (takes_other, False)])
def test_a_body_that_is_everywhere_is_tried_by_every_test_of_its_table(mark, test, tried):
    module, definition = types.SimpleNamespace(RUN=RUN, OTHER=OTHER), types.SimpleNamespace(own_markers=[mark.mark])
    pytest_generate_tests(types.SimpleNamespace(module=module, function=test, definition=definition))
    assert ("mine" in definition.own_markers[0].args[1]) == tried
    assert "mine" not in mark.mark.args[1]
