"""How the next token is chosen: logits are processed, then filtered, then drawn from. All values are traced."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.decoding.checks import as_jax
from kvjax.decoding.history import History, Memory
from kvjax.decoding.tokens import Integers, Tokens, pad_tokens
from kvjax.protocol.fields import check_fields, is_traced, known, number, shown
from kvjax.protocol.typing import not_none, pytree, static, traced
from pallas_kernels import axes

NUMBERS = "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "frequency_penalty", "presence_penalty"
_COUNTS_PROMPT = "repetition_penalty", "no_repeat_ngram"


@pytree
class Sampler:
    """How to draw a token. A value is traced; a field that is None is not part of the compiled program.

    The order is that of transformers: ``logit_bias``, ``repetition_penalty``, ``frequency_penalty``, ``presence_penalty``,
    ``no_repeat_ngram``, ``processor``; then ``temperature``, ``top_k``, ``top_p``, ``min_p``. Greedy decoding, without a
    temperature, takes the largest logit after the processor.

    ``repetition_penalty`` and ``no_repeat_ngram`` look at the prompt too, as in transformers, and a cache does not hold its
    tokens: `read` tells the sampler of them. ``frequency_penalty`` and ``presence_penalty`` count drawn tokens only, as in
    OpenAI's interface and vLLM.

    A processor is a pure function, traced into the decoding loop::

        def processor(logits, state, history):  # float32 [B, V], see `state`, a `kvjax.decoding.history.History`
            return logits, state

    It is called before each draw; ``history`` has the rows' tokens so far. ``state`` is its own, and every leaf has axis B
    first. What it returns for a row that has ended is dropped, and so is what it returns behind a drafted token that
    `kvjax.Verified` takes back. An object with ``__call__`` that is a pytree may hold arrays. On a mesh B are the rows of
    a device.

    Example: ``sampler = Sampler(repetition_penalty=1.1).read(prompts)``, ``out = kvjax.generate(..., sampler=sampler)``, and
    to go on after it ``kvjax.generate(params, out.cache, sampler=out.sampler)``.
    """

    temperature: float | Array | None = traced("None = greedy; 0 is greedy too, at run time", default=None, least=0)
    top_k: int | Array | None = traced("keep the k most probable tokens", default=None, least=1)
    top_p: float | Array | None = traced("keep the likeliest tokens that reach p together", default=None, above=0, most=1)
    min_p: float | Array | None = traced(
        "keep tokens with this share of the largest probability", default=None, least=0, most=1
    )
    repetition_penalty: float | Array | None = traced(
        "divides positive logits of tokens that were read or drawn, and multiplies negative ones", default=None, above=0
    )
    frequency_penalty: float | Array | None = traced("times a token's draws so far, is subtracted", default=None)
    presence_penalty: float | Array | None = traced("is subtracted from tokens that were drawn", default=None)
    no_repeat_ngram: int | None = static("no sequence of so many tokens comes twice", default=None, least=1)
    logit_bias: dict[int, float] | Array | None = traced("is added: {token: number}, or float [V]; -inf bans", default=None)
    processor: Any = traced("a function of one's own", default=None)
    state: Any = traced("what the processor starts with", default=None)
    history: History | None = traced("the tokens of each row, which `read` and `kvjax.generate` write", default=None)

    def __post_init__(self) -> None:
        check_fields(self, prefix="")
        filters = {"top_k": self.top_k, "top_p": self.top_p, "min_p": self.min_p}
        if self.temperature is None and (given := {name: value for name, value in filters.items() if value is not None}):
            names = " and ".join(f"{name}={shown(value)}" for name, value in given.items())
            raise ValueError(f"{names}: got no temperature, expected one; without it decoding is greedy")
        if self.logit_bias is not None:
            object.__setattr__(self, "logit_bias", _checked_bias(self.logit_bias))
        if self.processor is not None and not callable(self.processor):
            raise ValueError(f"processor must be a function of logits, state and history, got {shown(self.processor)}")
        if self.processor is None and jax.tree.leaves(self.state):
            raise ValueError(f"state belongs to a processor, got {shown(self.state)} and no processor")
        if self.processor is not None and jax.tree_util.all_leaves([self.processor]):  # a function is no pytree
            object.__setattr__(self, "processor", jax.tree_util.Partial(self.processor))

    @property
    def remembers(self) -> bool:
        """Whether a draw depends on the tokens before it, or on a processor's state."""
        names = "repetition_penalty", "frequency_penalty", "presence_penalty", "no_repeat_ngram", "processor"
        return any(vars(self)[name] is not None for name in names)

    @property
    def unread(self) -> tuple[str, ...]:
        """What counts the prompt, and was told of none."""
        return tuple(name for name in _COUNTS_PROMPT if vars(self)[name] is not None and self.history is None)

    def read(self, tokens: Tokens, lengths: Integers | None = None) -> Sampler:
        """Return the sampler that also counts these tokens: a prompt before `kvjax.generate`, a turn before the next one.

        Args:
            tokens: list of token lists, one for each row of the cache, or int [B, T] padded on the right with ``lengths``.
                Empty lists are no tokens: ``read([[]])`` counts only what is drawn.
            lengths: int [B].

        Raises:
            ValueError: no such tokens, or tokens of another number of rows than were read before.
        """
        padded, length = pad_tokens(tokens, lengths)
        history = History.empty(len(padded)) if self.history is None else self.history
        if len(history.length) != len(padded):
            raise ValueError(f"tokens must have {len(history.length)} rows like those before, got {len(padded)}")
        return dataclasses.replace(self, history=history.read(padded, length))

    def remembered(self, batch: int, steps: int) -> tuple[Sampler, Memory | None]:
        """Part the sampler into what all rows share, and what it remembers of ``batch`` rows, with room for ``steps`` tokens.

        Raises:
            ValueError: it was told of no prompt, or of another number of rows; or its state has.
        """
        if self.unread:
            raise ValueError(
                f"{' and '.join(self.unread)}: the prompt's tokens count too, and a cache does not hold them: pass "
                "sampler=Sampler(...).read(tokens) with the tokens of prefill, or .read([[]] * rows) to leave them out"
            )
        if not self.remembers:
            return self if self.history is None else dataclasses.replace(self, history=None), None
        history = History.empty(batch) if self.history is None else self.history
        rows = {len(history.length), *((*jnp.shape(x), None)[0] for x in jax.tree.leaves(self.state))}
        if rows != {batch}:
            raise ValueError(
                f"sampler must have read {batch} rows, and its state must have as many, got {sorted(map(str, rows))}"
            )
        memory = Memory(history=history.with_room(steps), state=self.state)
        return dataclasses.replace(self, history=None, state=None), memory

    def recall(self, memory: Memory, vocab_size: int) -> Memory:
        """Count the tokens that the sampler needs counted, at the start of a loop."""
        penalties = self.frequency_penalty, self.presence_penalty
        counts = any(penalty is not None for penalty in penalties)
        return memory.counted(vocab_size, self.repetition_penalty is not None, counts)

    def after(self, memory: Memory | None) -> Sampler:
        """Return the sampler that goes on with ``memory``."""
        return self if memory is None else dataclasses.replace(self, history=memory.history, state=memory.state)

    def process(self, logits: Array, memory: Memory | None) -> tuple[Array, Any]:
        """Apply all that comes before the temperature.

        Args:
            logits: float32 [B, V]; without ``memory`` [N, V].
            memory: None if the sampler does not remember.

        Returns:
            The processed logits, and the processor's new state.
        """
        if isinstance(self.logit_bias, dict):
            values = [jnp.asarray(value, jnp.float32) for value in self.logit_bias.values()]
            logits = logits.at[:, np.array(list(self.logit_bias), np.int32)].add(jnp.stack(values)) if values else logits
        elif self.logit_bias is not None:
            logits = logits + self.logit_bias[None]
        if memory is None:
            return logits, None
        if self.repetition_penalty is not None:
            penalty = jnp.asarray(self.repetition_penalty, jnp.float32)
            logits = jnp.where(
                not_none("occurs", memory.occurs), jnp.where(logits < 0, logits * penalty, logits / penalty), logits
            )
        if self.frequency_penalty is not None:
            logits = logits - self.frequency_penalty * not_none("counts", memory.counts).astype(jnp.float32)
        if self.presence_penalty is not None:
            logits = logits - self.presence_penalty * (not_none("counts", memory.counts) > 0).astype(jnp.float32)
        if self.no_repeat_ngram is not None:
            logits = jnp.where(memory.history.closes_ngram(self.no_repeat_ngram, logits.shape[-1]), -jnp.inf, logits)
        if self.processor is None:
            return logits, memory.state
        return _processed(self.processor, logits, memory)

    def draw(self, logits: Array, key: Array | None) -> tuple[Array, Array]:
        """Draw next tokens int32 [B] from processed logits float32 [B, V]; also return the `filtered` logits drawn from.

        Greedy drawing does not use ``key``. A row draws with its own key if each has one. Else its key is made of its index
        in the batch, so it draws the same token on whatever device it is.
        """
        if self.temperature is None:
            return self.draw_each(logits, None)
        if has_row_keys(key):
            return self.draw_each(logits, key)
        return self.draw_each(logits, jax.vmap(jax.random.fold_in, (None, 0))(not_none("key", key), rows_of(len(logits))))

    def draw_each(self, logits: Array, keys: Array | None) -> tuple[Array, Array]:
        """Run `draw` for logits float32 [N, V], with a key for each of them: tokens int32 [N], and filtered logits."""
        greedy = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        filtered = self.filtered(logits)
        if self.temperature is None:
            return greedy, filtered
        drawn = jax.vmap(jax.random.categorical)(not_none("keys", keys), filtered).astype(jnp.int32)
        return jnp.where(jnp.asarray(self.temperature) > 0, drawn, greedy), filtered

    def filtered(self, logits: Array) -> Array:
        """Return the logits float32 [N, V] of the distribution that tokens are drawn from; greedily they are ``logits``."""
        if self.temperature is None:
            return logits
        scaled = logits / jnp.maximum(jnp.asarray(self.temperature, jnp.float32), 1e-6)
        if self.top_k is not None or self.top_p is not None:
            ordered = jnp.sort(scaled, axis=-1, descending=True)
            rank = jnp.arange(logits.shape[-1])[None]
            keep = jnp.ones(ordered.shape, bool)
            if self.top_k is not None:
                keep = keep & (rank < self.top_k)
            if self.top_p is not None:
                weight = jax.nn.softmax(jnp.where(keep, ordered, -jnp.inf), axis=-1)
                keep = keep & (jnp.cumsum(weight, axis=-1) - weight < self.top_p)  # mass before the token is below p
            floor = jnp.min(jnp.where(keep, ordered, jnp.inf), axis=-1, keepdims=True)
            scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
        if self.min_p is not None:
            floor = jnp.max(scaled, axis=-1, keepdims=True) + jnp.log(jnp.asarray(self.min_p, jnp.float32))
            scaled = jnp.where(scaled >= floor, scaled, -jnp.inf)
        return scaled


def _checked_bias(bias: Any) -> Any:
    """Refuse what is neither {token: number} nor a vector; whether the tokens exist is known when there is a model."""
    if isinstance(bias, dict):

        def fits(value: Any) -> bool:
            return is_traced(value) or (type(number(value)) in (int, float) and number(value) < np.inf)

        wrong = [token for token in bias if type(number(token)) is not int or token < 0]
        wrong += [value for value in bias.values() if not fits(value)]
        if not wrong:
            return {int(token): value for token, value in bias.items()}
        raise ValueError(f"logit_bias must have whole numbers of at least 0 and a number for each, got {shown(wrong[0])}")
    if not isinstance(bias, (np.ndarray, jax.Array)) or bias.ndim != 1 or not jnp.issubdtype(bias.dtype, jnp.floating):
        raise ValueError(f"logit_bias must be {{token: number}} or float [V], got {shown(bias)}")
    if (values := known(bias)) is not None and not ((values < np.inf).all() and np.isfinite(values).any()):
        raise ValueError(f"logit_bias must have numbers or -inf, and a number for some token, got {shown(bias)}")
    return as_jax(bias, jnp.float32)


def has_row_keys(key: Array | None, axes_before: int = 0) -> bool:
    """Tell whether ``key``, of the new kind or the old, is a key for each row; other axes may come ``axes_before`` it."""
    if key is None:
        return False
    return key.ndim - axes_before == (1 if jnp.issubdtype(key.dtype, jax.dtypes.prng_key) else 2)


def split_keys(key: Array | None) -> tuple[Array | None, Array | None]:
    """Split off the key of the next draw: it, and the key that is left; [B] each if there is one for each row."""
    if key is None:
        return None, None
    if has_row_keys(key):
        both = jax.vmap(jax.random.split)(key)
        return both[:, 0], both[:, 1]
    draw, left = jax.random.split(key)
    return draw, left


def _processed(processor: Any, logits: Array, memory: Memory) -> tuple[Array, Any]:
    """Call a processor, and refuse a result of another form: the loop would fail in words that tell nobody of it."""
    result = processor(logits, memory.state, memory.history)
    if not isinstance(result, tuple) or len(result) != 2:
        raise ValueError(f"processor must return (logits, state), got {shown(result)}")
    new, state = result

    def form(tree: Any) -> Any:
        return jax.tree.map(lambda x: (jnp.shape(x), jnp.result_type(x)), tree)

    for name, got, expected in (("logits", new, logits), ("state", state, memory.state)):
        if form(got) != form(expected):
            raise ValueError(f"processor must return {name} of the form {form(expected)}, got {form(got)}")
    return new, state


def rows_of(count: int) -> Array:
    """Return the indices in the batch of the ``count`` rows of this device: int32 [B]."""
    return axes.index(axes.DATA) * count + jnp.arange(count, dtype=jnp.int32)
