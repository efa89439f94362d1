"""JAX's own switches: every method gives the same tokens under each of eleven, from `jax_enable_x64` to leak checking.

And every method runs where JAX has no back end for kernels. test_contract.py looks for NaN in the states of every method.
"""

import dataclasses
import pathlib
import subprocess
import sys
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import kvjax
from kvjax.api.measure import measure
from kvjax.decoding import Sampler
from kvjax.testing.model import TinyModel
from tests.harness import ALL, MOST_UNLIKE, any_example, example, padded, prompts, read, repeated, tiny_params, whole
from tests.kvjax.cases import base, go_on, model

ROOT = pathlib.Path(__file__).parents[2]

pytestmark = pytest.mark.usefixtures("quick_compile")


def everything(name):
    """All calls on abstract values, in one trace: the shapes of what they return."""

    def run(tokens, lengths, temperature):
        where = {"config": model(name), "max_new_tokens": 24, "pad_multiple": 1}
        cache = kvjax.prefill(tiny_params(), tokens, lengths=lengths, method=any_example(name), **where)
        cache = kvjax.decode_step(tiny_params(), kvjax.extend(tiny_params(), cache, tokens[:, :3]), tokens[:, 0])
        options = {"temperature": temperature, "top_k": 3, "top_p": 0.9, "key": jax.random.key(0)}
        return cache, kvjax.generate(tiny_params(), cache, max_new_tokens=4, **options)

    # Both have 64 bits under `jax_enable_x64`.
    whole, real = (jax.dtypes.canonicalize_dtype(dtype) for dtype in (np.int64, np.float64))
    shapes = ((3, 40), whole), ((3,), whole), ((), real)
    return jax.eval_shape(run, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))


@pytest.mark.parametrize("name", whole(ALL))
def test_every_method_has_32_bits_under_x64(name):
    tiny_params()
    with jax.enable_x64(True):
        made = everything(name)
    for path, leaf in jax.tree_util.tree_leaves_with_path(made):
        key = jnp.issubdtype(leaf.dtype, jax.dtypes.extended)
        assert key or leaf.dtype.itemsize <= 4, f"{jax.tree_util.keystr(path)} is {leaf.dtype}"


@pytest.mark.xdist_group("quest")
def test_tokens_are_the_same_under_x64():
    """Python numbers, arrays of 64 bits, `stream`; called eagerly and from a jitted function."""
    where = {"config": model("quest")}

    def run(method):
        return go_on(read(method, **where)).tokens

    want = np.asarray(base("quest")[1].tokens)
    budget, sizes = any_example("quest").budget, {"batch": 1, "prompt_slots": 64, "max_new_tokens": 8}
    with jax.enable_x64(True):
        method = example("quest", budget=jnp.asarray(budget), capacity=budget)
        assert method.budget.dtype == jnp.int64
        np.testing.assert_array_equal(run(method), want)
        np.testing.assert_array_equal(jax.jit(run)(method), want)
        rows = np.array(list(kvjax.stream(tiny_params(), read(method, **where), max_new_tokens=1, eos_token_ids=())))
        np.testing.assert_array_equal(rows[0, :, 0], want[:, 0])
        assert kvjax.memory_needed("snapkv", **where, **sizes).device > 0
        with pytest.raises(ValueError, match="token ids must be int32, got 8589934592"):
            kvjax.prefill(tiny_params(), jnp.asarray([[2**33]]), **where)


def mesh(kind):
    """A mesh of one device for all that is made; of explicit axes, arrays know in their types where they lie."""
    return jax.set_mesh(jax.make_mesh((1,), ("x",), axis_types=(kind,)))


SWITCHES = {  # what a user's program may have set, and the methods that run it by default
    "transfer_guard": (lambda: jax.transfer_guard("disallow"), (*MOST_UNLIKE, "stages")),
    "x64": (lambda: jax.enable_x64(True), ()),  # quest: below
    "debug_nans": (lambda: jax.debug_nans(True), ("quest", "freekv")),  # of an empty page, and of a scan
    "set_mesh": (lambda: mesh(jax.sharding.AxisType.Auto), ()),
    "explicit_mesh": (lambda: mesh(jax.sharding.AxisType.Explicit), ("sentencekv",)),
    "leaks": (lambda: jax.check_tracer_leaks(True), ("tova",)),
    "rank_promotion": (lambda: jax.numpy_rank_promotion("raise"), ()),
    "dtype_promotion": (lambda: jax.numpy_dtype_promotion("strict"), ()),
    "precision": (lambda: jax.default_matmul_precision("highest"), ()),
    "key_reuse": (lambda: jax.debug_key_reuse(True), ()),
    "checks": (lambda: jax.enable_checks(True), ()),
}


@pytest.mark.parametrize(
    ("switch", "name"),
    [pytest.param(switch, *x.values, marks=x.marks) for switch, (_, but) in SWITCHES.items() for x in repeated(ALL, but=but)],
)
def test_every_method_gives_its_tokens_under_a_switch(switch, name):
    """Small arrays and knobs go over explicitly; no step has 64 bits, NaN or a tracer that outlives its trace."""
    want, config = base(name)[1].tokens, model(name)
    if switch in ("debug_nans", "leaks", "checks"):  # which look at traces and at new programs: another model is traced anew
        config = dataclasses.replace(config, max_position_embeddings=config.max_position_embeddings + len(switch))
    with SWITCHES[switch][0]():
        got = go_on(read(any_example(name), config=config))
    np.testing.assert_array_equal(got.tokens, want)


@pytest.mark.parametrize("order", ["layers", "chunks"])
def test_a_prompt_of_several_chunks_leaves_no_tracer(order):
    """A loop's function is kept for its derivative, with all that it closes over. No other test has this room for tokens."""

    def run(params, tokens, budget):
        sizes = {"config": model("tova"), "max_new_tokens": 21, "pad_multiple": 1, "chunk_size": 16}
        return kvjax.prefill(params, tokens, method=example("tova", budget=budget, capacity=12), order=order, **sizes)

    shape = jax.ShapeDtypeStruct
    with jax.check_tracer_leaks(True):
        jax.eval_shape(run, jax.eval_shape(tiny_params), shape((3, 40), jnp.int32), shape((), jnp.int32))


@pytest.mark.parametrize("rows", [1, 2])  # the loops of a group, and of groups
def test_a_prompt_of_several_chunks_is_read_without_compiling(rows):
    """`jax.disable_jit` counts the rounds of a loop in Python's integers, and an integer elsewhere means the first chunk."""
    sizes = {"config": model("full"), "max_new_tokens": 4, "pad_multiple": 8, "chunk_size": 8}

    def logits():
        return kvjax.prefill(tiny_params(), [[*range(1, 20)], [5]][:rows], method=example("full"), **sizes).logits

    want = logits()
    with jax.disable_jit():
        np.testing.assert_allclose(logits(), want, atol=1e-5)


@pytest.mark.xdist_group("quest")
def test_every_call_runs_where_implicit_transfers_are_disallowed():
    method, params = any_example("quest"), tiny_params()
    key = jax.random.key(0)
    with jax.transfer_guard("disallow"):
        cache = read(method, config=model("quest"))
        cache = kvjax.extend(params, kvjax.fork(cache), [[5, 6], [7], []])
        cache = kvjax.decode_step(params, cache, np.array([1, 2, 3]), active=[True, True, False])
        options = {"method": method, "temperature": 0.5, "top_k": 3, "top_p": 0.9, "key": key, "eos_token_ids": 7}
        cache = kvjax.generate(params, cache, max_new_tokens=2, limits=[1, 2, 0], **options).cache
        repr(cache), measure(cache, params)
        sampler = Sampler(temperature=0.5, repetition_penalty=1.1, logit_bias={1: 0.5}).read([[1], [2, 3], []])
        options = {"sampler": sampler, "key": jax.random.split(key, 3), "eos_token_ids": 7}
        assert len(list(kvjax.stream(params, cache, max_new_tokens=2, block=1, **options))) <= 2
        kvjax.sweep(params, [[5, 6, 7]], config=model("quest"), methods=[method], max_new_tokens=2)


WITHOUT_BACK_ENDS = """
import importlib, pkgutil, sys
for name in ("triton", "tpu", "mosaic_gpu"):
    sys.modules[f"jax.experimental.pallas.{name}"] = None
    sys.modules[f"jax._src.pallas.{name.replace('tpu', 'mosaic')}"] = None
import jax, kvjax, models, pallas_kernels
from pallas_kernels.machine import assume_machine
from tests.kvjax.test_switches import everything

with assume_machine("gpu", (9, 0)):
    for name in sys.argv[1:]:
        everything(name)
with assume_machine("tpu"):
    everything("quest")
everything("quest")
for found in pkgutil.walk_packages(pallas_kernels.__path__, "pallas_kernels."):
    if "jax_triton_" not in found.name:  # which need the package jax-triton
        importlib.import_module(found.name)
"""


EACH = [x.values[0] for x in ALL]


@pytest.mark.slow
@pytest.mark.parametrize("names", [("tova", "quest", "mosaickv"), pytest.param(EACH, marks=pytest.mark.thorough)], ids=len)
def test_every_method_runs_as_plain_jax_without_back_ends_for_kernels(names):
    """In a new process without Triton's and Mosaic's modules, as if on a GPU, on a TPU, and on a CPU. One line says why."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_BACK_ENDS, *names], capture_output=True, text=True, timeout=400, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]
    lines = [line for line in done.stderr.splitlines() if "run as plain JAX" in line]
    assert len(lines) == 3 and len(set(lines)) == 3, lines
    for line, module in zip(lines, ("triton", "tpu", "triton"), strict=True):
        assert f"this JAX has no jax.experimental.pallas.{module} (ModuleNotFoundError" in line
    assert " and no jax.experimental.pallas.tpu" in lines[2] and " and no " not in lines[0] + lines[1]


def test_plain_jax_runs_for_parameters_on_the_cpu_beside_a_gpu(monkeypatch):
    """By where they are, and by ``jax.default_device``; this process says that its default is a GPU."""
    model, cpu = TinyModel(num_layers=1, head_dim=64, dtype="bfloat16"), jax.devices()[0]
    params = model.random_params()

    def tokens(params):
        cache = kvjax.prefill(params, [list(range(40))], config=model, method=any_example("quest"), max_new_tokens=4)
        return kvjax.generate(params, cache, max_new_tokens=4).tokens

    with kvjax.default_implementation("xla"):
        want = np.asarray(tokens(params))
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [types.SimpleNamespace(compute_capability="9.0")])
    with pytest.raises(Exception, match="cpu|CPU"):  # a kernel is chosen
        tokens(params)
    with jax.default_device(cpu):
        np.testing.assert_array_equal(tokens(params), want)
        assert kvjax.models.load("builtin").config.dtype == "float32"
    np.testing.assert_array_equal(tokens(jax.device_put(params, cpu)), want)


@pytest.mark.xdist_group("quest")
def test_rows_of_a_device_inside_a_shard_map_of_ones_own():
    where, (tokens, lengths) = jax.make_mesh((1,), ("x",), axis_types=(jax.sharding.AxisType.Auto,)), padded(prompts())

    def run(tokens, lengths):
        options = {"config": model("quest"), "method": any_example("quest"), "max_new_tokens": 24, "pad_multiple": 1}
        return go_on(kvjax.prefill(tiny_params(), tokens, lengths=lengths, **options)).tokens

    rows = jax.sharding.PartitionSpec("x")
    of_device = jax.shard_map(run, mesh=where, in_specs=rows, out_specs=rows, check_vma=False)
    np.testing.assert_array_equal(jax.jit(of_device)(tokens, lengths), base("quest")[1].tokens)
