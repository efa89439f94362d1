"""Compares a method with Full at every step of a text that both decode: divergence, agreement, log-likelihood.

Axes: B texts, T steps, V vocabulary.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.answering import Choice, LoadedModel, follow
from experiments.lab.fidelity.texts import Texts
from kvjax.accounting.stats import Stats
from kvjax.api.measure import measure
from kvjax.decoding.checks import check_border
from kvjax.decoding.prefill import run_prefill
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, pytree

_CHUNK = 8192  # prompt tokens per pass, as in `kvjax.prefill`


@pytree
class Distance:
    """The distance of a method's next-token distribution from Full's, for every step of every text."""

    kl: Array  # float32 [T, B], KL(Full || method) in nats
    agrees: Array  # bool [T, B], whether both have the same most likely token
    loss: Array  # float32 [T, B], the method's negative log-likelihood of the text's next token, in nats
    full_loss: Array  # float32 [T, B], Full's negative log-likelihood of the same token, in nats


@functools.partial(jax.jit, static_argnames=("model", "kv_dtype"))
def follow_text(
    params: Any,
    method: Method,
    prompts: Array,
    lengths: Array,
    forced: Array,
    counts: Array,
    *,
    model: Model,
    kv_dtype: str | None = None,
) -> tuple[Array, Stats]:
    """Prefill contexts under a method, and decode given texts; see `experiments.answering.follow`.

    Prefill and decode steps are one program, which depends only on shapes and on the static fields of the method.

    Args:
        params: model parameters.
        method: the method; its knobs are traced, so that budgets under one `capacity` share the program.
        prompts: int32 [B, S], padded on the right.
        lengths: int32 [B], real tokens of each prompt.
        forced: int32 [B, T], the text, padded on the right.
        counts: int32 [B], real tokens of each text.
        model: the model's description.
        kv_dtype: as in `kvjax.prefill`.

    Returns:
        The logits after each token, float32 [T, B, V], and the accounting at the end of the text.
    """
    sizes = {"max_new_tokens": forced.shape[1], "chunk_size": _CHUNK, "kv_dtype": kv_dtype}
    cache = run_prefill(params, prompts, lengths, method, model=model, **sizes)
    logits, cache = follow(params, cache, forced, counts, lambda _, logits: logits)
    return logits, measure(cache)


@jax.jit
def distance(full: Array, logits: Array, targets: Array) -> Distance:
    """Compare a method's distributions with Full's over the whole vocabulary.

    Args:
        full: float32 [T, B, V], Full's logits.
        logits: float32 [T, B, V], the method's logits.
        targets: int32 [B, T], the text's token after each step.
    """

    def step(inputs: tuple[Array, Array, Array]) -> Distance:
        first, second, target = inputs
        p, q = jax.nn.log_softmax(first), jax.nn.log_softmax(second)
        # sum p log(p/q) with -p + q under the sum, which adds nothing, because both sum to 1. The rounding of the two
        # normalizers then cancels in the first order; otherwise it would exceed small divergences.
        terms = jnp.exp(p) * (p - q) - jnp.exp(p) + jnp.exp(q)
        return Distance(
            kl=jnp.maximum(jnp.sum(terms, axis=-1), 0.0),
            agrees=jnp.argmax(first, axis=-1) == jnp.argmax(second, axis=-1),
            loss=-jnp.take_along_axis(q, target[:, None], axis=-1)[:, 0],
            full_loss=-jnp.take_along_axis(p, target[:, None], axis=-1)[:, 0],
        )

    # Step by step: the temporary arrays of all steps at once would be several times as large as the logits.
    return lax.map(step, (full, logits, targets.T))


def lead(model: LoadedModel, method: Method, texts: Texts, kv_dtype: str | None = None) -> tuple[Array, Stats]:
    """Run `follow_text` for a model, a method and a batch of texts; refuse texts that cross a border of RoPE's rule."""
    check_border(model.config, method, np.asarray(texts.lengths), np.asarray(texts.counts))
    return follow_text(*_arrays(model, method, texts), model=model.config, kv_dtype=kv_dtype)


def lower(model: LoadedModel, method: Method, texts: Texts, kv_dtype: str | None = None) -> jax.stages.Lowered:
    """Lower the program that `lead` runs, so that it can be compiled before it is needed."""
    return follow_text.lower(*_arrays(model, method, texts), model=model.config, kv_dtype=kv_dtype)


def _arrays(model: LoadedModel, method: Method, texts: Texts) -> tuple[Any, ...]:
    arrays = (jnp.asarray(x) for x in (texts.prompts, texts.lengths, texts.forced, texts.counts))
    return (model.params, method, *arrays)


def shared_room(methods: Sequence[Method], length: int) -> Any:
    """Choose the `capacity` that methods of a kind can share: their largest capacity.

    A program depends on shapes and on the static fields of a method, so methods of one name that have room for the largest
    of their budgets share one program. A capacity of `length` or more says that a method attends to everything, so it is
    not shared with smaller budgets.

    Args:
        methods: methods of the same class, whose static fields are equal except `capacity`.
        length: tokens of context and text.

    Returns:
        A number of tokens, a share, or three shares, in the form of the methods' field; None if there is nothing to share.
    """
    capacities = [vars(method).get("capacity") for method in methods]
    shares = [room for room in capacities if isinstance(room, tuple)]
    if shares:
        return tuple(max(parts) for parts in zip(*shares, strict=True))
    return max((room for room in capacities if room is not None and room < length), default=None)


def share_rooms(choices: Sequence[Choice], methods: Sequence[Method], length: int) -> list[Method]:
    """Give the methods of each name their `shared_room`, unless the choice sets a capacity."""
    by_name: dict[str, list[Method]] = {}
    for choice, method in zip(choices, methods, strict=True):
        by_name.setdefault(choice.name, []).append(method)
    roomy = []
    for choice, method in zip(choices, methods, strict=True):
        room, capacity = shared_room(by_name[choice.name], length), vars(method).get("capacity")
        if room is not None and "capacity" not in choice.knobs and (isinstance(capacity, tuple) or capacity <= room):
            method = dataclasses.replace(method, capacity=room)
        roomy.append(method)
    return roomy
