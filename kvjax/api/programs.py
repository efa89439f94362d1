"""The compiled programs behind `kvjax.generate`'s functions, and a way to compile them before they are called.

Compilation takes seconds to minutes, and most of it does not hold Python's lock. So other threads can compile the programs of
the next method while this one runs (`lower_programs`). JAX keeps the programs: a later call of the same shapes finds its
program.
"""

import functools
from collections.abc import Hashable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding
from jax.stages import Lowered

from kvjax.api import shard_map
from kvjax.cache import Cache
from kvjax.decoding import one_layer
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.reading_order import By
from kvjax.decoding.sampling import Sampler
from kvjax.mesh.sharding import plan_of
from kvjax.protocol.describe import is_known, on_device, tracing
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model

_STEPS = "steps", "stop_early", "top"
_loop = functools.partial(jax.jit, static_argnames=_STEPS, donate_argnames="cache")
_SIZES = ("model", "max_new_tokens", "chunk_size", "plan", "kv_dtype", "order")
prefill_program = jax.jit(shard_map.prefill_each, static_argnames=_SIZES)
prefill_once_program = jax.jit(shard_map.prefill_once, static_argnames=_SIZES)
step_program = jax.jit(shard_map.step, donate_argnames="cache")
extend_program = jax.jit(shard_map.extend, donate_argnames="cache")
decode_program = _loop(shard_map.decode)
generate_program = _loop(shard_map.decode_and_measure)
score_program = jax.jit(shard_map.score, static_argnames="stop_early")
cost_program = jax.jit(shard_map.cost)
repeat_program = jax.jit(shard_map.repeat, static_argnames="copies")
_OF_LAYERS = {  # the programs of `one_layer.read_by_layer`, by what they compute
    one_layer.each_layer: jax.jit(one_layer.each_layer, static_argnames="model"),
    one_layer.begin: jax.jit(one_layer.begin, static_argnames=("model", "slots")),
    one_layer.read: jax.jit(one_layer.read, static_argnames=("layer", "onward")),
    one_layer.last_logits: jax.jit(one_layer.last_logits, static_argnames="model"),
    one_layer.observed: jax.jit(one_layer.observed),
}
_KEEP = {  # the same programs, which do not consume their cache
    step_program: jax.jit(shard_map.step),
    extend_program: jax.jit(shard_map.extend),
    generate_program: jax.jit(shard_map.decode_and_measure, static_argnames=_STEPS),
}


def consuming(program: Any, *args: Any) -> Any:
    """Return the program itself, which consumes its cache, or the program that does not if one of its arguments is traced.

    A mapped or differentiated function may close over its cache, and is then called again.
    """
    return _KEEP[program] if tracing() or not is_known(args) else program


def run_of_layers(function: Any, *args: Any, **static: Any) -> Any:
    """Run a program of `one_layer.read_by_layer`."""
    return _OF_LAYERS[function](*args, **static)


def lower_programs(
    params: Any,
    *,
    config: Model,
    methods: Sequence[Method],
    rows: int,
    length: int,
    room: int,
    max_new_tokens: int,
    num_eos: int,
    with_limits: bool = False,
    question_length: int = 0,
    chunk_size: int = 8192,
    pad_multiple: int = 128,
    kv_dtype: str | None = None,
    share_storage: bool = False,
    order: By | None = None,
    inputs: list[Any] | None = None,
) -> Iterator[Lowered]:
    """Trace and lower, one by one, the programs of `kvjax.prefill_each`, `kvjax.extend` and greedy `kvjax.generate`.

    Call ``compile()`` on each program, in any thread. The calls with the same arguments then find the programs.

    Args:
        params: model parameters.
        config: the model's description.
        methods: one method, or several that share one prefill; none is offloaded. Values of traced fields do not matter.
        rows: B.
        length: T, the length of the padded prompts.
        room: ``max_new_tokens`` of the `kvjax.prefill` call.
        max_new_tokens: ``max_new_tokens`` of the `kvjax.generate` call.
        num_eos: the number of EOS ids.
        with_limits: whether `kvjax.generate` gets ``limits``.
        question_length: tokens of a padded question for `kvjax.extend`; 0 leaves its program out.
        chunk_size: as in `kvjax.prefill`.
        pad_multiple: as in `kvjax.prefill`.
        kv_dtype: as in `kvjax.prefill`.
        share_storage: as in `kvjax.prefill_each`.
        order: as in `kvjax.prefill`.
        inputs: as in `kvjax.prefill_each`, of shapes.
    """
    padded = -(-length // pad_multiple) * pad_multiple
    plan = plan_of(params)

    def by_row(x: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
        return x if plan is None else x.update(sharding=NamedSharding(plan.mesh, plan.row))

    count = by_row(_integers(rows))
    once = share_storage and plan is None
    given = params, by_row(_integers(rows, padded)), by_row(_integers(rows)), on_device(tuple(methods))
    static: dict[str, Any] = {"model": config, "max_new_tokens": room, "chunk_size": chunk_size}
    static |= {"kv_dtype": kv_dtype, "order": order}
    found: dict[Hashable, tuple[Any, Lowered]] = {}

    def lower(function: Any, *args: Any, **static: Any) -> Any:
        leaves, structure = jax.tree.flatten(args)
        kind = function, structure, tuple((x.shape, x.dtype) for x in leaves), tuple(static.values())
        if kind not in found:
            found[kind] = _lower(_OF_LAYERS[function], *args, **static)
        return found[kind][0]

    caches = one_layer.read_by_layer(lower, *given, **static, inputs=inputs) if once else None
    yield from (lowered for _, lowered in found.values())
    if caches is None:
        known = {"inputs": tuple(inputs or ())[1:]} if once else {}
        caches, lowered = _lower(prefill_once_program if once else prefill_program, *given, **static, **known, plan=plan)
        caches = caches.caches if once else caches
        yield lowered
    for cache in caches:
        cache = _placed(cache)
        if question_length:
            cache, lowered = _lower(extend_program, params, cache, by_row(_integers(rows, question_length)), count)
            cache = _placed(cache)
            yield lowered
        done, limits = by_row(jax.ShapeDtypeStruct((rows,), jnp.bool_)), count if with_limits else None
        drawn = Sampler(), None, _integers(num_eos), done, limits, None
        sizes = {"steps": max_new_tokens, "stop_early": num_eos > 0 or with_limits, "top": None}
        yield _lower(generate_program, params, cache, *drawn, **sizes)[1]


@in_32_bits
def _lower(program: Any, *args: Any, **static: Any) -> tuple[Any, Lowered]:
    """Return the shapes of the results of a program, and the lowered program."""
    traced = program.trace(*args, **static)
    return traced.out_info, traced.lower()


def _placed(cache: Cache) -> Cache:
    """Add the shardings to the shapes of a cache, if it has a plan."""
    if cache.plan is None:
        return cache
    return jax.tree.map(lambda x, where: x.update(sharding=where), cache, shard_map.shardings(cache))


def _integers(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.int32)
