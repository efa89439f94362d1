"""The functions that users call after `kvjax.prefill`: `extend`, `decode_step`, `generate`, `stream`.

All of them are jitted with static shapes, so each shape is compiled once. They consume (donate) their cache: go on with the
cache that they return, or `kvjax.fork` yours first. Inside ``jax.jit``, ``jax.vmap`` and ``jax.grad`` they consume nothing,
and skip the checks of traced values.
"""

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.accounting.stats import Stats, with_bytes
from kvjax.api.prefill import Integers, Tokens, pad_tokens
from kvjax.api.programs import consuming, decode_program, extend_program, generate_program, step_program
from kvjax.api.text import GrowingText, ScoredToken, rows_of, scored_rows, stop_strings, texts_of
from kvjax.cache.whole_model import Cache, check_alive
from kvjax.decoding import checks
from kvjax.decoding.bits import in_32_bits
from kvjax.decoding.history import Memory
from kvjax.decoding.log_probs import LogProbs
from kvjax.decoding.sampling import NUMBERS, Sampler, has_row_keys
from kvjax.mesh.sharding import place_rows, readable
from kvjax.protocol.describe import count_rows, describe_numbers, is_known, on_device, tracing
from kvjax.protocol.fields import Limits, check_value, number, positive_int, shown
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model, pytree, traced
from kvjax.registry import resolve


@pytree
class Generation:
    """The result of `generate`."""

    tokens: Array = traced("int32 [B, N]; after a row's end the model's first EOS id, or 0 if the model has none")
    num_tokens: Array = traced("int32 [B], generated tokens per row, a closing EOS included")
    eos_token_ids: Array = traced("int32 [E], the tokens that could end a row")
    cache: Cache = traced("for another `generate`, or for `extend` with the next turn")
    sampler: Sampler = traced("for another `generate`: it counts the tokens of this one")
    stats: Stats = traced("cost of the method at the last step")
    logprobs: LogProbs | None = traced("log-probabilities of the tokens; None unless they are asked for", default=None)

    def __repr__(self) -> str:
        return f"Generation({describe_numbers(self.num_tokens)} tokens in {count_rows(self.num_tokens)}, {self.cache!r})"

    def rows(self) -> list[list[int]]:
        """List the token ids of each row without padding, a closing EOS included."""
        return rows_of(self.tokens, self.num_tokens)

    def scored_rows(self) -> list[list[ScoredToken]]:
        """List the tokens of each row without padding, each with its log-probabilities.

        Raises:
            ValueError: `generate` was not asked for log-probabilities.
        """
        return scored_rows(self.tokens, self.num_tokens, self.logprobs)

    def texts(self, tokenizer: Any, stop: str | Sequence[str] = ()) -> list[str]:
        """Decode each row, without padding and without EOS tokens.

        Args:
            tokenizer: has ``decode(ids)``, for example from ``models.load_tokenizer``.
            stop: a text ends before the first of these strings that it has. `generate` itself knows no text and goes on;
                `stream` and `answer` stop.
        """
        return texts_of(tokenizer, self.rows(), self.eos_token_ids, stop)


@in_32_bits
def decode_step(
    params: Any, cache: Cache, tokens: Integers, *, active: Array | np.ndarray | Sequence[bool] | None = None
) -> Cache:
    """Feed one token per row. The returned cache has the next token's logits.

    Args:
        params: model parameters.
        cache: is consumed.
        tokens: int [B].
        active: bool [B]; rows where it is False do not change. None means that all rows are active.

    Raises:
        ValueError: wrong shapes or dtypes, no room, a cache of another model, or a cache that was consumed.
    """
    checks.check_params(params, cache)
    fed = checks.int32_rows("tokens", tokens, cache.batch)
    moves = checks.bool_rows("active", np.ones(cache.batch, bool) if active is None else active, cache.batch)
    checks.check_vocabulary(fed, cache.model)
    checks.check_room(cache, moves.astype(jnp.int32))
    args = place_rows(cache.plan, fed[:, None], moves[:, None])
    return consuming(step_program, params, cache, args)(params, cache, *args)


@in_32_bits
def extend(params: Any, cache: Cache, tokens: Tokens, *, lengths: Integers | None = None) -> Cache:
    """Append tokens to every row: the next turn, or the next question about the same context.

    The tokens attend densely to all tokens that the method has kept, and causally to each other; a single token does so too.
    Methods that evict while they generate take the tokens in blocks, H2O and TOVA one by one. Rows may have different
    lengths, zero included.

    Args:
        params: model parameters.
        cache: is consumed; `kvjax.fork` it first to ask several questions about one context.
        tokens: list of token lists, or int [B, T] padded on the right with ``lengths``.
        lengths: int [B].

    Raises:
        ValueError: tokens of another number of rows, no room, a cache of another model, or a cache that was consumed.
    """
    padded, length = tokens_after(params, cache, tokens, lengths)
    if not padded.shape[1]:
        return cache
    args = place_rows(cache.plan, padded, length)
    return consuming(extend_program, params, cache, args)(params, cache, *args)


@in_32_bits
def generate(
    params: Any,
    cache: Cache,
    *,
    method: Method | str | None = None,
    max_new_tokens: int = 64,
    eos_token_ids: Integers | int | None = None,
    temperature: float | Array | None = None,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    sampler: Sampler | None = None,
    key: Array | None = None,
    limits: Integers | None = None,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Generation:
    """Generate up to ``max_new_tokens`` tokens per row, greedily unless a temperature is given.

    Args:
        params: model parameters.
        cache: from `prefill`, `extend` or an earlier `generate`; is consumed. ``Generation.cache`` continues exactly:
            greedily, generating 5 tokens twice equals generating 10 tokens; with a temperature each call draws with its key.
            Penalties go on with ``Generation.sampler``.
        method: None means the method that made the cache. A method of the same structure replaces the traced
            hyper-parameters. A method of another structure is refused.
        max_new_tokens: N, the most tokens to generate.
        eos_token_ids: token ids that end a row; None means the model's ids, and ``()`` means that no row ends early.
        temperature: traced, one number for all rows; None is greedy, and so is 0, which needs no key.
        top_k, top_p: traced filters; None leaves the filter out.
        sampler: in place of these three, `kvjax.decoding.sampling.Sampler`: penalties, bias, min-p, a function of one's own.
        key: PRNG key, required with a temperature above 0: a row draws by its place in the batch. Or B keys: a row draws by
            its own one, as it would alone.
        limits: int [B], most tokens of each row, 0 to N; None means N for all rows. Limits are traced: calls with other
            limits and the same N share a compiled program.
        logprobs: whether to return log-probabilities, `Generation.logprobs`; without them nothing is computed.
        top_logprobs: K, so many of the likeliest tokens at each place, too; needs ``logprobs=True``.

    Raises:
        ValueError: not enough room in the cache, a cache of another method, no key, limits of another shape or above N.
        FloatingPointError: the logits were not finite.
    """
    max_new_tokens = positive_int("max_new_tokens", max_new_tokens)
    sampler = sampler_of(key, sampler, temperature=temperature, top_k=top_k, top_p=top_p)
    check_alive(cache)
    top = likeliest(logprobs, top_logprobs, cache.model)
    eos = eos_array(eos_token_ids, cache.model)
    shared, memory, key = _by_row(sampler, key, cache, max_new_tokens)
    most = None if limits is None else checks.int32_rows("limits", limits, cache.batch, max_new_tokens, "max_new_tokens")
    cache = _ready(params, cache, method, max_new_tokens if most is None else most)
    in_trace = tracing() or not is_known(params, cache, sampler, key, eos, most)
    done, most = place_rows(cache.plan, checks.as_jax(np.zeros(cache.batch, bool)), most)
    args = params, cache, shared, key, eos, done, most, memory
    stop_early = (eos.size > 0 or most is not None) and not in_trace
    end, cost = consuming(generate_program, *args)(*args, steps=max_new_tokens, stop_early=stop_early, top=top)
    ended = end.tokens, end.num_tokens, end.bad_step, end.log_probs, end.memory, cost
    tokens, count, bad, made, memory, cost = readable(cache.plan, ended)
    check_finite(bad)
    stats = with_bytes(cost, end.cache, params)
    return Generation(
        tokens=tokens,
        num_tokens=count,
        eos_token_ids=eos,
        cache=end.cache,
        sampler=sampler.after(memory),
        stats=stats,
        logprobs=made,
    )


@in_32_bits
def stream(
    params: Any,
    cache: Cache,
    *,
    method: Method | str | None = None,
    max_new_tokens: int = 64,
    eos_token_ids: Integers | int | None = None,
    temperature: float | Array | None = None,
    top_k: int | Array | None = None,
    top_p: float | Array | None = None,
    sampler: Sampler | None = None,
    key: Array | None = None,
    tokenizer: Any = None,
    stop: str | Sequence[str] = (),
    block: int = 4,
    logprobs: bool = False,
    top_logprobs: int = 0,
) -> Iterator[list]:
    """Generate, and yield a list with one entry per row after every ``block`` tokens.

    Args:
        tokenizer: has ``decode(ids)``. With a tokenizer the entries are new pieces of text, without EOS tokens; a piece
            waits until its last character is complete, and all pieces together are `Generation.texts`.
            Without a tokenizer they are lists of new token ids.
        stop: strings; a row ends before the first one that it has. Text that may be the beginning of one waits. The tokens of
            the block that has its end are generated, and not shown.
        block: tokens per compiled call. A larger block is faster, a smaller block is smoother.
        logprobs: whether entries have log-probabilities. Entries are then lists of `kvjax.api.text.ScoredToken`. With a
            tokenizer they are pairs: the new piece of text, and the list of the block's tokens, EOS tokens included; the text
            of the last ones may come with the next piece.

    See `generate` for the other arguments. All tokens together equal the tokens of `generate`.
    """
    block, max_new_tokens = positive_int("block", block), positive_int("max_new_tokens", max_new_tokens)
    sampler = sampler_of(key, sampler, temperature=temperature, top_k=top_k, top_p=top_p)
    stops = stop_strings(stop, tokenizer)
    check_alive(cache)
    top = likeliest(logprobs, top_logprobs, cache.model)
    eos = eos_array(eos_token_ids, cache.model)
    shared, memory, key = _by_row(sampler, key, cache, max_new_tokens)
    cache = _ready(params, cache, method, max_new_tokens)
    if tracing() or not is_known(params, cache, sampler, key, eos):
        raise ValueError("stream yields values as they are made, got traced values: call generate inside jit and vmap")

    def blocks(
        cache: Cache, key: Array | None, memory: Memory | None
    ) -> Iterator[list]:  # what is above runs before the first block is asked for
        check_alive(cache)  # another call may have consumed it since
        ends = set(jax.device_get(eos).tolist())
        (done,) = place_rows(cache.plan, checks.as_jax(np.zeros(cache.batch, bool)))
        texts = [GrowingText(tokenizer, stops) for _ in range(cache.batch)]
        for first in range(0, max_new_tokens, block):
            steps = min(block, max_new_tokens - first)
            end = in_32_bits(decode_program)(
                params, cache, shared, key, eos, done, None, memory, steps=steps, stop_early=bool(eos.size or stops), top=top
            )
            cache, key, done, memory = end.cache, end.key, end.done, end.memory
            results = readable(cache.plan, (end.tokens, end.num_tokens, end.bad_step, end.log_probs, done))
            drawn, counts, bad, made, ended = jax.device_get(results)
            check_finite(bad)
            new = rows_of(drawn, counts)
            scored = new if top is None else scored_rows(drawn, counts, made)
            last = first + steps >= max_new_tokens or bool(ended.all())
            if tokenizer is None:
                yield scored
            else:
                kept = [[token for token in row if token not in ends] for row in new]
                lasts = [last or row_ended for row_ended in ended.tolist()]
                pieces = [text.add(row, row_last) for text, row, row_last in zip(texts, kept, lasts, strict=True)]
                yield pieces if top is None else list(zip(pieces, scored, strict=True))
            if last or all(ended | (halted := np.array([text.ended for text in texts]))):
                return
            if halted.any():
                (done,) = place_rows(cache.plan, checks.as_jax(ended | halted))

    return blocks(cache, key, memory)


def tokens_after(params: Any, cache: Cache, tokens: Tokens, lengths: Integers | None) -> tuple[Array, Array]:
    """Pad tokens for every row of a cache, which has room for them: int32 [B, N], and their lengths int32 [B]."""
    checks.check_params(params, cache)
    padded, length = pad_tokens(tokens, lengths)
    if padded.shape[0] != cache.batch:
        raise ValueError(f"tokens must have {cache.batch} rows like the cache, got {padded.shape[0]}")
    checks.check_vocabulary(padded, cache.model)
    checks.check_room(cache, length)
    return padded, length


def likeliest(logprobs: bool, top_logprobs: int, model: Model) -> int | None:
    """Return how many of the likeliest tokens each place has; None if nobody asked for log-probabilities."""
    logprobs = check_value("logprobs", logprobs, (bool,), Limits(), static=True)
    top = check_value("top_logprobs", top_logprobs, (int,), Limits(least=0, most=model.vocab_size), static=True)
    if top and not logprobs:
        raise ValueError(f"top_logprobs={top} needs logprobs=True")
    return top if logprobs else None


def _ready(params: Any, cache: Cache, method: Method | str | None, tokens: int | Array) -> Cache:
    """Put the traced fields of ``method`` into the cache. Refuse another structure, or no room for ``tokens`` tokens."""
    checks.check_params(params, cache)
    if method is not None:
        method = resolve(method)
        checks.check_cache(cache, method)
        # The cache is donated. Arrays in the caller's method must not be donated with it.
        copied = jax.tree.map(jnp.copy, on_device(method))
        cache = dataclasses.replace(cache, method=copied)
    checks.check_room(cache, tokens)
    return cache


def sampler_of(key: Array | None, sampler: Sampler | None = None, **short: Any) -> Sampler:
    """Return the sampler of a call, or make it of its ``short`` forms; refuse a temperature without a key, and no key."""
    if given := [name for name, value in short.items() if value is not None and sampler is not None]:
        raise ValueError(f"sampler has a temperature and filters of its own: got sampler and {' and '.join(given)}")
    if sampler is not None and not isinstance(sampler, Sampler):
        raise ValueError(f"sampler must be a kvjax.decoding.sampling.Sampler, got {shown(sampler)}")
    for name in NUMBERS:
        value = short.get(name) if sampler is None else vars(sampler)[name]
        if checks.read_array(value).ndim:
            raise ValueError(f"{name} must be one number for all rows, got {shown(value)}: generate the other rows apart")
    sampler = Sampler(**short) if sampler is None else sampler
    if key is None and number(sampler.temperature) == 0:
        sampler = dataclasses.replace(sampler, temperature=None, top_k=None, top_p=None, min_p=None)
    if sampler.temperature is not None and key is None:
        raise ValueError(f"temperature={shown(sampler.temperature)} needs a PRNG key: pass key=jax.random.key(seed)")
    check_key(key)
    return on_device(sampler)


def _by_row(sampler: Sampler, key: Array | None, cache: Cache, steps: int) -> tuple[Sampler, Memory | None, Array | None]:
    """Part what a sampler remembers of each row from what all rows share, and place it, and a key for each row."""
    model, tokens = cache.model, None if sampler.history is None else sampler.history.tokens
    if isinstance(sampler.logit_bias, dict) and (
        wrong := [token for token in sampler.logit_bias if token >= model.vocab_size]
    ):
        raise ValueError(f"logit_bias must have tokens below vocab_size={model.vocab_size}, got {wrong[0]}")
    if isinstance(sampler.logit_bias, jax.Array) and sampler.logit_bias.shape != (model.vocab_size,):
        raise ValueError(f"logit_bias must be float [{model.vocab_size}], got {shown(sampler.logit_bias)}")
    if tokens is not None and tokens.size:
        checks.check_vocabulary(tokens, model)
    shared, memory = sampler.remembered(cache.batch, steps)
    leaves, structure = jax.tree.flatten(memory)
    memory = jax.tree.unflatten(structure, place_rows(cache.plan, *leaves))
    if key is not None and has_row_keys(key):
        if len(key) != cache.batch:
            raise ValueError(f"key must be one PRNG key, or one for each of {cache.batch} rows, got {len(key)}")
        (key,) = place_rows(cache.plan, key)
    return shared, memory, key


def check_key(key: Any, by_row: bool = True) -> None:
    """Refuse what is neither a PRNG key, nor ``by_row`` a key for each row, nor None, with a ValueError."""
    if key is None:
        return
    if isinstance(key, (jax.Array, np.ndarray)):
        typed = jnp.issubdtype(key.dtype, jax.dtypes.prng_key)
        rows = key.ndim if typed else key.ndim - 1  # of the old kind
        if rows in ((0, 1) if by_row else (0,)) and (typed or key.dtype == np.uint32):
            return
    raise ValueError(f"key must be a PRNG key such as jax.random.key(seed), got {shown(key)}")


def eos_array(ids: Integers | int | None, model: Model) -> Array:
    """Convert EOS ids to int32 [E]; None means the model's ids."""
    values = checks.read_array(model.eos_token_ids if ids is None else ids)
    if values.ndim > 1 or (values.size and not jnp.issubdtype(values.dtype, jnp.integer)):
        raise ValueError(f"eos_token_ids must be whole numbers, got {shown(ids)}")
    known = jax.device_get(values).reshape(-1).tolist() if is_known(values) else []
    wrong = [token for token in known if not 0 <= token < model.vocab_size]
    if wrong:
        raise ValueError(f"eos_token_ids must lie in [0, vocab_size={model.vocab_size}), got {wrong[0]}")
    return checks.as_jax(values, jnp.int32).reshape(-1)


def check_finite(bad_step: Array | np.ndarray) -> None:
    """Refuse logits that were not finite. ``bad_step`` int32 [B] is the first such step of each row, -1 if there is none."""
    if not is_known(bad_step):
        return
    bad_step = jax.device_get(bad_step)
    if bad_step.max() >= 0:
        row = int((bad_step >= 0).argmax())
        raise FloatingPointError(
            f"logits of row {row} are not finite at generated token {int(bad_step[row])}; check the "
            "parameters and the dtype (expected finite float32 logits, and a sampler that leaves a token to draw)"
        )
