"""Commands with ``--mesh``: what needs no devices here. `test_devices.py` has the rest."""

import pytest

from experiments.answering import batch_rows, make_mesh, mesh_axes, mesh_text
from experiments.answering.__main__ import GenerateSettings
from experiments.demo.__main__ import DemoSettings
from experiments.evaluation.settings import EvaluationSettings
from experiments.speed.settings import SpeedSettings


def test_a_mesh_is_read_from_text():
    assert mesh_axes("model=4, data=2") == mesh_axes("data=2,model=4") == {"data": 2, "model": 4}
    assert mesh_text(mesh_axes("model=8")) == "data=1,model=8"
    assert mesh_text(mesh_axes("slots=4")) == "data=1,model=1,slots=4"
    assert mesh_axes(None) == {} and mesh_text({}) is None and make_mesh(None) is None
    assert dict(make_mesh("model=1").shape) == {"data": 1, "model": 1}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "a mesh is written data=2,model=4, got ''"),
        ("4", "a mesh is written data=2,model=4, got '4'"),
        ("data=2,", "a mesh is written data=2,model=4, got 'data=2,'"),
        ("heads=2", "the axes of a mesh are data, model and slots, got 'heads' in 'heads=2'"),
        ("model=2,model=4", "a mesh has each axis once, got 'model' twice in 'model=2,model=4'"),
        ("model=0", "the size of an axis must be a whole number of at least 1, got '0' for 'model'"),
        ("model=x", "the size of an axis must be a whole number of at least 1, got 'x' for 'model'"),
    ],
)
def test_texts_that_are_no_mesh_are_refused_with_the_settings(text, expected):
    for kind in (GenerateSettings, EvaluationSettings, DemoSettings, SpeedSettings):
        more = {"prompt_file": "-"} if kind is GenerateSettings else {}
        with pytest.raises(ValueError) as error:
            kind.from_mapping({"mesh": text, **more}, "a test")
        assert str(error.value) == expected


def test_meshes_that_cannot_be_are_refused():
    with pytest.raises(ValueError, match=r"a mesh of data=64,model=64 needs 4096 devices, got \d+ \("):
        make_mesh("data=64,model=64")
    with pytest.raises(ValueError, match="--batches must be multiples of the 2 devices of the axis 'data', got 3"):
        SpeedSettings(mesh="data=2", batches=(2, 3))
    with pytest.raises(ValueError, match="--largest-batch has no meaning with --mesh"):
        SpeedSettings(mesh="model=2", largest_batch=True)
    with pytest.raises(ValueError, match="--beside-one has no meaning without --mesh"):
        SpeedSettings(beside_one=True)


@pytest.mark.parametrize("groups", [1, 2, 3, 8])
def test_rows_of_a_batch_are_divided_equally(groups):
    for samples in range(1, 40):
        rows = batch_rows(100, 1000, samples, groups)
        assert rows % groups == 0 and (rows <= 10 or rows == groups)
        batches = -(-samples // rows)
        assert batches * rows - samples < groups * batches  # no group has a copy more than it must
