"""Prefill: `prefill` for one method, and `prefill_each` for several methods at once."""

from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax import Array

from kvjax.accounting.memory import check_memory
from kvjax.api.programs import prefill_once_program, prefill_program, run_of_layers
from kvjax.cache import Cache
from kvjax.cache.quantised import check_kv_dtype
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.checks import check_arrays, check_fits, check_model, check_sizes, check_vocabulary, has_no_limit
from kvjax.decoding.layers import shares_prefill
from kvjax.decoding.one_layer import read_by_layer
from kvjax.decoding.prefill import brought_back
from kvjax.decoding.reading_order import By, check_order
from kvjax.decoding.tokens import Integers, Tokens, pad_tokens
from kvjax.mesh.sharding import device_of, place_rows, plan_of
from kvjax.protocol.describe import describe, is_known, on_device, tracing
from kvjax.protocol.fields import positive_int
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model
from kvjax.registry import resolve_each

_ROOM = 256  # tokens that may follow a prompt, if nothing is said


def prefill(
    params: Any,
    tokens: Tokens,
    *,
    config: Model,
    method: Method | str = "full",
    max_new_tokens: int | None = None,
    lengths: Integers | None = None,
    chunk_size: int = 8192,
    pad_multiple: int = 128,
    kv_dtype: str | None = None,
    order: By | None = None,
) -> Cache:
    """Prefill prompts and return the cache to generate from.

    Attention over the prompt is exact, unless the method's page says otherwise. The method then compresses or indexes the
    stored tokens: storage physically shrinks to the tokens it keeps and room for ``max_new_tokens``. Methods with
    ``offload=True`` do not run under ``jax.vmap`` (ValueError).

    Args:
        params: model parameters. If they are spread over the devices of a mesh, so is the cache.
        tokens: list of token lists, or int [B, T] padded on the right with ``lengths``.
        config: the model's description, for example a ``models.ModelConfig``.
        method: a method object or its name; see ``kvjax ls``. A budget may be a `kvjax.share` of the prompt.
        max_new_tokens: tokens that may follow the prompt, by `extend`, `decode_step` and `generate` together. None means 256,
            or as many as the model has positions for behind the longest prompt.
        lengths: int [B], real tokens in each row of a padded array.
        chunk_size: the most prompt tokens of a pass, of all rows together; of each row if a layer is offloaded. It bounds the
            memory of activations, whatever the batch, and does not change results. The passes of a row end with its last
            token: if lengths differ much, 1024 to 2048 compute less padding. Methods with blocks of their own (KeyDiff,
            StreamingLLM, TokenSelect, `Prefill`) take in a pass one block of as many rows as fit, at least one row. See
            `kvjax.decoding.prefill`.
        pad_multiple: prompts are padded to a multiple of this many tokens, so that similar lengths share one trace.
        kv_dtype: of the stored keys and values: "int8", "float8_e4m3fn", "int4", or "k8v4" (keys in 8 bits, values in 4),
            with scales for each token and KV head; None keeps the model's dtype. See `kvjax.cache.quantised`.
        order: "chunks": a pass goes through all layers, which are finished at the prompt's end. "layers": a layer reads all
            chunks and is finished before the next begins, so only one layer's whole keys and values exist at a time, and the
            hidden states of the prompt. None takes what needs less memory; results are equal up to rounding.

    Raises:
        ValueError: an empty prompt, an unknown token id, or more tokens than the model has positions. Or heads or rows that
            cannot be divided over the devices of ``params``, or a ``kv_dtype`` on which the method cannot run, or the order
            "layers" with a model that cannot run one layer alone or a method that reads the prompt twice (KVzip).
        MemoryError: a method with ``offload=True``, or a cache on a mesh, needs more memory than a device or its host has.
    """
    (cache,) = prefill_each(
        params,
        tokens,
        methods=[method],
        config=config,
        max_new_tokens=max_new_tokens,
        lengths=lengths,
        chunk_size=chunk_size,
        pad_multiple=pad_multiple,
        kv_dtype=kv_dtype,
        order=order,
    )
    return cache


@in_32_bits
def prefill_each(
    params: Any,
    tokens: Tokens,
    *,
    methods: Sequence[Method | str],
    config: Model,
    max_new_tokens: int | None = None,
    lengths: Integers | None = None,
    chunk_size: int = 8192,
    pad_multiple: int = 128,
    kv_dtype: str | None = None,
    share_storage: bool = False,
    order: By | None = None,
    inputs: list[Array] | None = None,
) -> list[Cache]:
    """Prefill prompts once for several methods, and return the cache of each method.

    The model runs once, so an evaluation of many methods costs little more than an evaluation of one method; it runs once
    more for each method that rereads its prompt (KVzip). All caches exist at the same time: if they do not fit, a
    ``MemoryError`` says before prefill what each cache needs. Generated tokens are the same as after `prefill`, up to
    rounding: a method that measures the prompt's attention (H2O) takes another kernel when it is prefilled alone.

    Args:
        methods: methods or their names. Several methods must each have a dense prompt (``method.dense_prompt``). Only methods
            that evict or select during prefill have none (KeyDiff, StreamingLLM, TokenSelect), and methods that renumber
            tokens (SelfExtend; NTK and PI with a factor other than 1).
        share_storage: whether caches share the arrays that are equal: methods that keep every token (Full, Quest, ParisKV)
            hold the same keys and values, which then exist once. The first call that consumes a cache
            (`generate`, `extend`) then consumes all caches that share its arrays: `kvjax.fork` each cache before, except
            the last. Each kind of layer is then a program of its own. On a mesh nothing is shared.
        inputs: with ``share_storage``, a list that calls on the same prompts share when not all caches fit at once. The first
            call fills it with the tokens and the hidden states before each layer and behind the last, [B, S, E] each; the
            others take these, and run of each layer only what caches need. It stays empty if the layers are one program.

    See `prefill` for the other arguments and the errors.
    """
    check_model(config)
    check_arrays(params)
    check_kv_dtype(kv_dtype)
    chunk_size = positive_int("chunk_size", chunk_size)
    pad_multiple, most = positive_int("pad_multiple", pad_multiple), max(128, config.max_position_embeddings)
    if pad_multiple > most:
        raise ValueError(f"pad_multiple must be at most {most}, the positions of the model, got {pad_multiple}")
    padded, length = pad_tokens(tokens, lengths, pad_multiple)
    chosen = resolve_each(methods, longest(length, padded), padded.shape[1])
    if alone := [describe(method) for method in chosen if len(chosen) > 1 and not shares_prefill(method, config)]:
        raise ValueError(
            f"methods that share one prefill must attend to the prompt densely, got {', '.join(alone)}: prefill each alone"
        )
    check_order(order, chosen, config, padded.shape[1])
    check_vocabulary(padded, config)
    if max_new_tokens is None:
        left = config.max_position_embeddings - longest(length, padded)
        max_new_tokens = left if 0 < left < _ROOM and not any(has_no_limit(method, config) for method in chosen) else _ROOM
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    plan = plan_of(params)
    for method in chosen:
        check_sizes(method, config)
        check_fits(length, max_new_tokens, config, method)
    padded, length = place_rows(plan, padded, length)
    large = len(chosen) > 1 or chosen[0].offload or plan is not None
    if large and is_known(padded) and not tracing():
        sizes = {"batch": len(padded), "prompt_slots": padded.shape[1], "max_new_tokens": max_new_tokens}
        mesh = None if plan is None else plan.mesh
        with jax.default_device(device_of(params)):
            check_memory(chosen, config, mesh, kv_dtype, sizes | {"chunk_size": chunk_size}, share_storage, params, order)
    if inputs and is_known(padded) and not np.array_equal(*jax.device_get((inputs[0], padded))):
        raise ValueError("inputs must have been filled by a call on the same prompts, got those of other tokens")
    static: dict[str, Any] = {"model": config, "max_new_tokens": max_new_tokens, "chunk_size": chunk_size}
    args = params, padded, length, on_device(tuple(chosen))
    static |= {"kv_dtype": kv_dtype, "order": order}
    once = share_storage and plan is None
    if once and not tracing() and (found := read_by_layer(run_of_layers, *args, **static, inputs=inputs)) is not None:
        return found
    static["plan"] = plan  # as in `lower_programs`: an argument that is left out makes another program
    known = tuple(inputs or ())[1:]
    caches = prefill_once_program(*args, **static, inputs=known).caches if once else prefill_program(*args, **static)
    # A program's results have memory of their own from its start. So what waits in host memory comes back behind its end.
    return [brought_back(cache) for cache in caches]


def longest(length: Array, padded: Array) -> int:
    """Return the tokens of the longest of some prompts [B, T]; T where the lengths are traced."""
    return int(jax.device_get(length).max()) if is_known(length) else padded.shape[1]  # NumPy: JAX would trace it inside jit
