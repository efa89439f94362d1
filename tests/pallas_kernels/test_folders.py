"""Every operation's folder is complete: function, reference, timed shapes, whether it is differentiable, tests."""

import ast
import dataclasses
import functools
import importlib
import importlib.util
import inspect
import pathlib
import re
import textwrap

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import XLA, Operation
from pallas_kernels.formats.shapes import Shape
from tests.pallas_kernels.operations import PLACES, arguments, every_operation, public, small, table, timed

ROOT = pathlib.Path(__file__).parents[2]
# `experiments.speed.kernels` repeats a call on the same arrays. These operations write in place: each call would copy
# the cache first.
IN_PLACE = {
    "evict_alike", "evict_token", "pack_token", "sentence_add", "store_buckets", "store_codes", "store_ids", "store_partial",
    "store_token", "widen_page",
}  # fmt: skip
# Nobody has chosen shapes for these operations yet. A new operation has timed shapes.
NOT_YET_TIMED = {
    "add_norm", "bucket_matches", "causal_attention", "chunk_query", "cluster_estimate", "cluster_rank", "cluster_tokens",
    "newest_repeat", "rotated_rows", "step_query", "token_list",
}  # fmt: skip
LINE = re.compile(r"(?:^|\n\n)(Differentiable: through (?:``\w+``(?: and )?)+|Not differentiable: .+)(?:, .+)?\.\n\n")


def statement(name):
    """Return the one line that says whether an operation is differentiable."""
    lines = LINE.findall(inspect.getdoc(public(name)))
    assert len(lines) == 1, f"{name}: got {lines}, expected one line 'Differentiable: ...' or 'Not differentiable: ...'"
    return lines[0]


LONG = ("bucket_score", "collision", "pack_token", "packed_attention")  # whose gradients compile for seconds


def marks_of(name):
    """Training and the methods' own gradients go through these rooms."""
    room = PLACES[name].split(".")[1]
    return pytest.mark.slow if name in LONG else [] if room in ("attend", "layer") else pytest.mark.thorough


def differentiable():
    return [name for name in sorted(PLACES) if statement(name).startswith("Differentiable")]


@every_operation
def test_an_operation_has_a_function_a_table_and_a_reference(name):
    operation = table(name)
    assert isinstance(operation, Operation) and operation.name == name and callable(public(name))
    assert [*operation.implementations][-1] == XLA and not operation.implementations[XLA].platforms
    assert importlib.util.find_spec(f"{PLACES[name]}.reference") is not None
    assert set(re.findall(r"``(\w+)``", statement(name).partition("through")[2])) <= {*operation.implementations}
    said = inspect.getdoc(public(name)).partition("    implementation: ")[2].partition("    platform: ")[0]
    assert "pallas_mosaic_gpu" not in operation.implementations or '"pallas_mosaic_gpu"' in said, "what does it take?"


@every_operation
def test_an_operation_has_timed_shapes(name):
    assert (timed(name) is None) == (name in IN_PLACE | NOT_YET_TIMED)
    for shapes in (timed(name).listed(), timed(name).listed(tiny=True)) if timed(name) else ():
        assert all(isinstance(shape, Shape) and shape.bytes_read > 0 for shape in shapes)
        assert len({shape.name for shape in shapes}) == len(shapes)


@pytest.mark.parametrize("name", sorted({*PLACES} - IN_PLACE - NOT_YET_TIMED))
def test_an_operation_takes_the_arguments_of_its_timed_shapes(name):
    """In full size, and without computing anything."""
    for shape in timed(name).listed():
        arrays = jax.eval_shape(shape.draw, jax.random.key(0))
        result = jax.eval_shape(functools.partial(public(name), **shape.options, implementation=XLA), **arrays)
        jax.eval_shape(lambda x, shape=shape: shape.timed.defined(x, shape.sizes), result)
        if shape.timed.chained is not None:
            assert jnp.issubdtype(arrays[shape.timed.chained].dtype, jnp.floating)


def test_the_operations_without_timed_shapes_exist():
    assert IN_PLACE | NOT_YET_TIMED <= {*PLACES} and not IN_PLACE & NOT_YET_TIMED


def test_no_kernel_imports_timed_shapes():
    for path in (ROOT / "pallas_kernels").rglob("*.py"):
        if path.name not in ("timed.py", "shapes.py"):
            match = re.search(r"import.*\b(timed|shapes)\b|\.(timed|shapes) import", path.read_text())
            assert not match, f"{path}: {match[0]}"


def gradient(name, shape, arrays):
    """The gradient of the sum of all finite floats with respect to all floats; all arrays are traced."""
    moved = {at: x for at, x in arrays.items() if jnp.issubdtype(jax.tree.leaves(x)[0].dtype, jnp.floating)}
    rest = {at: x for at, x in arrays.items() if at not in moved}

    def total(moved, rest):
        result = public(name)(**moved, **rest, **shape.options, implementation=XLA)
        result = vars(result) if dataclasses.is_dataclass(result) else result
        floats = [x for x in jax.tree.leaves(result) if jnp.issubdtype(x.dtype, jnp.floating)]
        return sum(jnp.sum(jnp.where(jnp.isfinite(x), x, 0).astype(jnp.float32)) for x in floats)

    return jax.grad(total, allow_int=True), moved, rest


@pytest.mark.parametrize("name", differentiable())
def test_an_operation_that_says_so_is_differentiable(name):
    with dispatch.default_implementation(XLA):  # a reference calls other operations, which on a GPU would take kernels
        jax.eval_shape(*gradient(name, small(name), arguments(small(name))))


@pytest.mark.parametrize("name", [pytest.param(x, marks=marks_of(x)) for x in differentiable()])
def test_a_gradient_is_finite_and_not_zero_everywhere(name):
    run, *arrays = gradient(name, small(name), small(name).draw(jax.random.key(0)))
    with dispatch.default_implementation(XLA):
        slopes = jax.jit(run)(*arrays)
    floats = [np.asarray(x, np.float32) for x in jax.tree.leaves(slopes) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert all(np.isfinite(x).all() for x in floats) and any(x.any() for x in floats)


# An implementation may leave out an argument that cannot change its result, or whose other values its check refuses.
UNREAD = {
    ("bucket_matches", "pallas_triton"): {"num_bits"},  # a bound of the ids, which are compared as they are
    ("bucket_matches", "xla"): {"num_bits"},
    ("kth_select", "jax_triton"): {"lse"},  # refused by its check
    ("match_select", "pallas_triton"): {"num_bits"},
    ("match_select", "xla"): {"num_bits"},
    ("column_mass", "pallas_triton"): {"limit", "block"},  # they save plain JAX work
    ("dense_attention", "cudnn"): {"limit", "block"},
    ("coded_product", "jax_triton"): {"_"},  # refused by its check
    ("prefix_attention", "cudnn"): {"threshold"},  # refused by its check
    ("gather_attention", "jax_triton"): {"_"},  # refused by its check
    ("gather_attention", "pallas_mosaic_gpu"): {"_"},  # refused by its check
    ("gather_attention", "pallas_tpu"): {"_"},  # refused by its check, or by the public function for such pages
    ("vector_score", "pallas_tpu"): {"position", "first"},  # refused by its check
}


@every_operation
def test_no_implementation_ignores_an_argument(name):
    """An implementation of ``dense_decode`` once ignored ``position``: some caches gave wrong results."""
    assert {back_end for operation, back_end in UNREAD if operation == name} <= table(name).implementations.keys()
    for implementation, entry in table(name).implementations.items():
        function = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(entry.run)))).body[0]
        given = {node.arg for node in ast.walk(function.args) if isinstance(node, ast.arg)}
        read = {x.id for x in ast.walk(function) if isinstance(x, ast.Name) and isinstance(x.ctx, ast.Load)}
        assert given - read == UNREAD.get((name, implementation), set()), f"{name}, {implementation}"
