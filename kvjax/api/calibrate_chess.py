"""Thresholds from data for `kvjax.methods.Chess`: the entropy above which a model counts as unsure."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.api.generate import check_key, eos_array, sampler_of
from kvjax.api.prefill import Integers, Tokens, prefill_each
from kvjax.api.shard_map import on_devices
from kvjax.cache import Cache
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.decode import run_step
from kvjax.decoding.sampling import Sampler
from kvjax.methods.chess.method import Chess
from kvjax.protocol.typing import Model


@in_32_bits
def calibrate_chess(
    params: Any,
    tokens: Tokens,
    *,
    config: Model,
    method: Chess,
    lengths: Integers | None = None,
    max_new_tokens: int = 512,
    quantile: float = 0.99,
    temperature: float | None = None,
    key: Array | None = None,
    eos_token_ids: Integers | int | None = None,
) -> Chess:
    """Set the thresholds of ``method``'s trigger by text that the model generates from calibration prompts.

    The text is generated with full attention. For each of its pages, the entropies of the next-token distributions (at
    temperature 1, in nats) have a mean and a variance. The thresholds are quantiles of these means and variances; the paper
    (arXiv:2602.20732) takes the 99th percentile. They are fields of the method, so saved caches and result records hold them.

    Args:
        params: model parameters.
        tokens: calibration prompts, as in `kvjax.prefill`.
        config: the model's description.
        method: has the page size and all other fields. A trigger other than ``"and"`` and ``"or"`` becomes ``"and"``.
        lengths: int [B], as in `kvjax.prefill`.
        max_new_tokens: tokens generated per prompt.
        quantile: between 0 and 1.
        temperature: for sampling; None is greedy. Use the same temperature as later in `kvjax.generate`.
        key: PRNG key, required with a temperature.
        eos_token_ids: as in `kvjax.generate`.

    Raises:
        ValueError: a quantile outside [0, 1], a temperature without a key, or no page of generated tokens was completed.
    """
    if not 0 <= quantile <= 1:
        raise ValueError(f"quantile must lie between 0 and 1, got {quantile}")
    check_key(key, by_row=False)
    sampler = sampler_of(key, temperature=temperature)
    options: dict[str, Any] = {"lengths": lengths, "max_new_tokens": max_new_tokens}
    (cache,) = prefill_each(params, tokens, config=config, methods=["full"], share_storage=True, **options)
    start = np.asarray(cache.length)
    entropy, live = _entropies(params, cache, sampler, key, eos_array(eos_token_ids, config), steps=max_new_tokens)
    means, variances = [], []
    for row, steps, alive in zip(start, np.asarray(entropy), np.asarray(live), strict=True):
        steps = steps[alive]
        page = (row + np.arange(len(steps))) // method.page_size
        complete = (row + len(steps)) // method.page_size
        for index in range(page[0] if len(page) else 0, complete):
            means.append(steps[page == index].mean())
            variances.append(steps[page == index].var())
    if not means:
        raise ValueError(
            f"no page of page_size={method.page_size} tokens was completed by max_new_tokens={max_new_tokens}; "
            "generate more, or pass eos_token_ids=() to go on after the end of an answer"
        )
    return dataclasses.replace(
        method,
        trigger=method.trigger if method.trigger in ("and", "or") else "and",
        tau_entropy=float(np.quantile(means, quantile)),
        tau_varentropy=float(np.quantile(variances, quantile)),
    )


@functools.partial(jax.jit, static_argnames="steps")
def _entropies(
    params: Any, cache: Cache, sampler: Sampler, key: Array | None, eos: Array, *, steps: int
) -> tuple[Array, Array]:
    """Compute the entropy after each generated token, float32 [B, N], and whether its row still generated, bool [B, N]."""

    def run(params: Any, cache: Cache, sampler: Sampler, key: Array | None, eos: Array) -> tuple[Array, Array]:
        def step(carry: tuple, _: None) -> tuple:
            cache, key, done = carry
            draw, key = (None, None) if key is None else jax.random.split(key)
            token = jnp.where(done, 0, sampler.draw(cache.logits, draw)[0])
            cache = run_step(params, cache, token[:, None], ~done[:, None])
            log = jax.nn.log_softmax(cache.logits.astype(jnp.float32))
            entropy = -jnp.sum(jnp.exp(log) * log, axis=-1)
            return (cache, key, done | (token[:, None] == eos[None]).any(axis=1)), (entropy, ~done)

        _, (entropy, live) = jax.lax.scan(step, (cache, key, jnp.zeros((cache.batch,), bool)), None, length=steps)
        return entropy.T, live.T

    same = {"sampler": sampler, "key": key, "eos": eos}
    return on_devices(run, params, cache, same=same, split=lambda cache, row: (row, row))
