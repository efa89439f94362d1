"""A back end of one's own is one entry in a table of bodies."""

import functools
import types

import pytest

from tests.pallas_kernels.cases import every_body, every_body_and_dtype, everywhere, on_gpu
from tests.pallas_kernels.conftest import pytest_generate_tests

RUN = {"xla": None, "interpreted": None, "mine": everywhere(functools.partial(max))}
OTHER = {"xla": None, "interpreted": None}


def takes_mine():
    return RUN


def takes_other():
    return OTHER


@pytest.mark.parametrize("mark", [every_body, on_gpu, every_body_and_dtype])
@pytest.mark.parametrize(("test", "tried"), [(takes_mine, True), (takes_other, False)])
def test_a_body_that_is_everywhere_is_tried_by_every_test_of_its_table(mark, test, tried):
    module, definition = types.SimpleNamespace(RUN=RUN, OTHER=OTHER), types.SimpleNamespace(own_markers=[mark.mark])
    pytest_generate_tests(types.SimpleNamespace(module=module, function=test, definition=definition))
    mine = ["mine", ("mine", "float32")]
    assert any(x in mine for x in definition.own_markers[0].args[1]) == tried
    assert not any(x in mine for x in mark.mark.args[1])
