"""The likelihood of texts under a method, scored token by token through the method's decode path.

Usually, context and text are prefilled in a single dense pass, in which no method selects anything, so that every method gets
Full's score. Here, the context is prefilled without its last token. The last token and then the tokens of the text are fed
one after the other, and every probability is taken after a decode step. (If the context is a single token, the first
probability comes from prefill, where there is nothing to select.)
"""

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.answering import follow, score
from kvjax.api.measure import measure
from kvjax.decoding.checks import check_room
from kvjax.protocol.method import Method

Ids = Sequence[int]
Likelihood = tuple[float, bool]  # log-probability of a text in nats, and whether greedy decoding would write it


def likelihoods(
    params: Any,
    config: Any,
    contexts: Sequence[Ids],
    texts: Sequence[Sequence[Ids]],
    method: Method | str,
    *,
    length: int,
    room: int,
) -> tuple[list[list[Likelihood]], list[kvjax.Stats]]:
    """Score several texts after each context, which is prefilled once.

    Args:
        params: model parameters.
        config: the model.
        contexts: the token ids of each context, at least one token; they are prefilled together as a batch.
        texts: for each context, the token ids of its texts: at least one text for each context and one token for each text.
        method: a kvjax method or its name.
        length: every context is padded to this number of tokens.
        room: every text is padded to this number of tokens.

    Returns:
        Likelihoods in the order of the texts, and accounting: entry j after the j-th text of every context (or after the
        last text, in contexts with fewer texts).

    Raises:
        ValueError: an empty context or text, one longer than its padding, or a text that crosses a border of RoPE's rule.
        FloatingPointError: a probability was not finite.
    """
    if len(texts) != len(contexts) or not all(texts):
        raise ValueError(f"every one of {len(contexts)} contexts must have at least one text")
    for name, rows, most in (("context", contexts, length), ("text", [text for row in texts for text in row], room)):
        sizes = [len(ids) for ids in rows]
        if not 1 <= min(sizes) <= max(sizes) <= most:
            raise ValueError(f"every {name} must have 1 to {most} tokens, got {min(sizes)} to {max(sizes)}")
    held = [context[-1:] if len(context) > 1 else [] for context in contexts]
    read = [context[: len(context) - len(last)] for context, last in zip(contexts, held, strict=True)]
    cache = kvjax.prefill(params, read, config=config, method=method, max_new_tokens=room, pad_multiple=length)
    rounds = max(len(row) for row in texts)
    scored, stats = [], []
    for turn in range(rounds):
        now = cache if turn == rounds - 1 else kvjax.fork(cache)  # `_score` consumes its cache
        fed = np.zeros((len(contexts), room), np.int32)
        targets = np.full((len(contexts), room + 1), -1, np.int32)
        counts = np.zeros(len(contexts), np.int32)
        for row, last in enumerate(held):
            text = texts[row][min(turn, len(texts[row]) - 1)]
            tokens = [*last, *text[:-1]]
            fed[row, : len(tokens)] = tokens
            targets[row, len(last) : len(last) + len(text)] = text
            counts[row] = len(tokens)
        check_room(now, counts)  # inside `_score` nothing is known
        logprob, greedy, now = _score(params, now, fed, counts, targets)
        scored.append(jax.device_get((logprob, greedy)))
        stats.append(jax.device_get(measure(now)))
        del now  # before the next copy is made: memory need not hold both
    if not np.isfinite([logprob for logprob, _ in scored]).all():
        raise FloatingPointError("expected finite log-probabilities, got one that is not; check the parameters and the dtype")
    results = [
        [(float(logprob[row]), bool(greedy[row])) for logprob, greedy in scored[: len(texts[row])]]
        for row in range(len(contexts))
    ]
    return results, stats


@functools.partial(jax.jit, donate_argnames="cache")
def _score(params: Any, cache: kvjax.Cache, fed: Array, counts: Array, targets: Array) -> tuple[Array, Array, kvjax.Cache]:
    """Feed tokens through the decode path and sum the log-probabilities of the targets.

    Args:
        params: model parameters.
        cache: the cache after the contexts; it is consumed.
        fed: int32 [B, N], tokens to feed.
        counts: int32 [B], tokens to feed in each row.
        targets: int32 [B, N + 1]. Target i is scored before token i of ``fed`` is fed; -1 asks for no score.

    Returns:
        Sum of log-probabilities float32 [B]; greedy bool [B], whether all targets are the most likely tokens; the cache.
    """
    columns, asked = jnp.maximum(targets, 0).T, (targets >= 0).T
    first = score(cache.logits, columns[0])
    after, cache = follow(params, cache, fed, counts, lambda at, logits: score(logits, columns[at + 1]))
    logprob, greedy = (jnp.concatenate([one[None], more]) for one, more in zip(first, after, strict=True))
    return jnp.where(asked, logprob, 0.0).sum(axis=0), (greedy | ~asked).all(axis=0), cache
