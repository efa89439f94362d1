"""What `kvjax.prefill` and `kvjax.generate` run on two H100s, and on the eight chips of a TPU v5e-8, compiles without them.

As test_methods.py. `kvjax.api.programs.lower_programs` lowers the programs for stand-ins on a mesh. By default this is a
small model under two methods; with ``--thorough`` it is Llama-3.1-8B at 128K tokens under every method, with two of its 32
layers.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from experiments.speed import uneven_scores
from kvjax import memory_needed, registry
from kvjax.api.programs import lower_programs
from kvjax.mesh.sharding import plan_of
from models import param_shapes, shapes, sharding
from tests.compile_only import compiling
from tests.compile_only.compiling import crossing, device_bytes
from tests.compile_only.test_methods import CONFIG, KNOBS, NAMES
from tests.harness import small

pytestmark = pytest.mark.xdist_group("compile_only")  # one worker has the compilers and their memory

MACHINES = {"h100": 2, "tpu_v5e": 8}
MOST = {"h100": 72, "tpu_v5e": 14}  # GiB that a program may need on a device, of 80 and 16
LLAMA = dataclasses.replace(shapes.llama31_8b(), dtype="bfloat16")
PROMPT, ROOM = 128 * 1024, 64
# Arrays that cross devices in a decode step: two sums per layer, the embedding, the logits; and for what the heads decide
# together at most so many, because XLA may join those of all layers.
COPIED = {"shadowkv": 160 * 2}  # bytes of a token in a layer that every device has, because the heads share them
PADDED = {"infinigen": 7 * 2}  # bytes of a token in a KV head that a TPU's tiles add: 25 channels take the room of 32
ON_TPU = ("full", "quest", "chess")  # methods whose attention has a kernel for TPUs, and whose scores are few
PER_LAYER = {"infinigen": 1, "infllm": 1, "rkv": 1, "triattention": 1, "tova": 1, "tokenselect": 2}
PER_STEP = {"chess": 1}


@functools.cache
def compiled(machine, name, config, prompt):
    """The program that reads a prompt, the one that generates, and the bytes of what it is given."""
    found = compiling.target(machine, MACHINES[machine])
    if isinstance(found, str):
        pytest.skip(found)

    def place(path, x):
        where = sharding.param_sharding("/".join(key.key for key in path), x.ndim, found.mesh)
        return x.update(sharding=where)

    params = jax.tree_util.tree_map_with_path(place, param_shapes(config))
    method = method_of(name, config)
    sizes = {"rows": 1, "length": prompt, "room": ROOM, "max_new_tokens": ROOM, "num_eos": 0}
    with found.assumed():
        read, generate = lower_programs(params, config=config, methods=[method], **sizes)
    _, cache, *_ = generate.args_info[0]
    programs = (x.compile(compiler_options=found.options) for x in (read, generate))
    return *programs, _bytes((params, cache))


def method_of(name, config):
    sized = {
        "sentencekv": {"boundary": jnp.asarray(np.arange(config.vocab_size) % 20 == 0)},
        **dict.fromkeys(("duoattention", "headkv"), {"scores": uneven_scores(config)}),
    }
    return small(registry.classes()[name], **(KNOBS | sized).get(name, {}))


def _bytes(tree):
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))


def more_layers(machine, name, config):
    """Bytes on a device of the layers that a model has beyond ``config``'s layers: weights, and the cache at its largest."""
    mesh = AbstractMesh((1, MACHINES[machine]), ("data", "model"))
    sizes = {"batch": 1, "prompt_slots": PROMPT, "max_new_tokens": ROOM, "mesh": mesh}
    whole, part = (memory_needed(method_of(name, model), model, **sizes).device for model in (LLAMA, config))
    weights = _bytes(param_shapes(LLAMA)) - _bytes(param_shapes(config))
    return weights / MACHINES[machine] + whole - part


def check(machine, name, config, prompt):
    """Only small arrays cross devices, as many as must; each device has its part of everything, and donates it.

    XLA may join some of a method's own sums here. `tests/mesh/eight_devices.py` has the exact lists.
    """
    _, generate, given = compiled(machine, name, config, prompt)
    sizes = crossing(generate, "while/body")
    least = 2 * config.num_layers + 2
    assert least <= len(sizes) <= least + PER_LAYER.get(name, 0) * config.num_layers + PER_STEP.get(name, 0)
    assert max(sizes) <= max(config.vocab_size, config.hidden_size, prompt + ROOM)
    memory = generate.memory_analysis()
    copied = COPIED.get(name, 0) * prompt * config.num_layers * (MACHINES[machine] - 1)
    padded = PADDED.get(name, 0) * prompt * config.num_kv_heads * config.num_layers if machine == "tpu_v5e" else 0
    assert memory.argument_size_in_bytes * MACHINES[machine] <= 1.01 * (given + copied + padded)
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1 << 20, "an array of the cache is not donated"
    if machine == "tpu_v5e" and name in ON_TPU:
        assert "tpu_custom_call" in generate.as_text(), "no kernel of ours"
    if machine == "h100" or name in ON_TPU:  # plain JAX stores the scores of all tokens
        stored = 2 * prompt * config.num_kv_heads * config.head_dim * 2 / MACHINES[machine]  # keys and values of a layer
        assert memory.temp_size_in_bytes < stored / 2, "a part of the cache is copied"


@pytest.mark.parametrize("spec", [PartitionSpec("tp"), PartitionSpec()])
@pytest.mark.parametrize("machine", MACHINES)
def test_parameters_on_accelerators_without_a_plan_are_refused(machine, spec):
    """XLA's partitioner cannot divide kernels: of a GPU's it would gather the whole cache in every step."""
    found = compiling.target(machine, MACHINES[machine])
    if isinstance(found, str):
        pytest.skip(found)
    mesh = Mesh(found.mesh.devices.reshape(-1), ("tp",))
    params = {"kernel": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=NamedSharding(mesh, spec))}
    told = "must be on a mesh with the axes 'data'.*see models.sharding.shard_params.*'tp'"
    with pytest.raises(ValueError, match=told):
        plan_of(params)


@pytest.mark.parametrize("name", ["full", "tokenselect"])
@pytest.mark.parametrize("machine", MACHINES)
def test_small_programs_send_only_small_arrays(machine, name):
    check(machine, name, CONFIG, 32 * 1024)


@pytest.mark.thorough
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("machine", MACHINES)
def test_two_layers_of_an_8b_model_at_128k(machine, name):
    """With the bytes of the other 30 layers, both programs fit a device."""
    config = dataclasses.replace(LLAMA, num_layers=2)
    check(machine, name, config, PROMPT)
    needed = max(map(device_bytes, compiled(machine, name, config, PROMPT)[:2])) + more_layers(machine, name, config)
    assert needed < MOST[machine] << 30
