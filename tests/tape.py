"""A model that plays recorded arrays: any method runs on exact q, k, v and logits through the library's own driver.

Token id t means "position t of this row", so a row is read with the tokens 0, 1, ... n-1 and continued with n, n+1, ...
"""

import dataclasses
import functools
from collections.abc import Callable, Collection, Sequence
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np

import kvjax
from kvjax.cache import Cache, PlainCache
from kvjax.decoding.decode import run_step
from kvjax.decoding.layers import fingerprint
from kvjax.rope import inverse_frequencies


@dataclasses.dataclass(frozen=True)
class Still:
    """A RoPE scaling under which nothing rotates: every frequency divided by infinity."""

    rope_type: ClassVar[str] = "llama3"

    factor: float = float("inf")
    low_freq_factor: float = 1.0
    high_freq_factor: float = 2.0
    original_max_position_embeddings: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tape:
    """A `kvjax.protocol.typing.Model` without weights; its parameters are the recording.

    ``params``: q [L, B, H, G, T, D], k and v [L, B, H, T, D], all before RoPE, and logits [B, T, V] that follow each token;
    for methods that ask for it also guess, like q. With nudges: hidden and gain [L, B, T, d], base [B, T, d] and kernel
    [L, H, G, D, d]; the stream is then base and the sum of gain times nudge.
    """

    num_layers: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    rope_theta: float = 100.0  # small, so that rotation matters at the lengths of tests
    rope_scaling: Any = None
    eos_token_ids: tuple[int, ...] = ()
    dtype: str = "float32"

    can_guess: ClassVar[bool] = True
    can_probe: ClassVar[bool] = True

    @property
    def inv_freq(self) -> np.ndarray:
        """RoPE angle per position, float32 [D/2]."""
        return inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling)

    def apply(self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, **options: Any):
        """Play ``tokens`` int32 [B, T]; see `kvjax.protocol.typing.Model.apply`. What attention returns is thrown away."""
        return self.play(params, tokens, attend, states, **options)[1:]

    def play(
        self,
        params: Any,
        tokens: jax.Array,
        attend: Callable,
        states: tuple,
        *,
        last: jax.Array | None = None,
        guess: Collection[int] = (),
        nudges: Sequence[jax.Array] | None = None,
    ) -> tuple:
        """As `apply`, with the attention outputs [L, B, H, G, T, D] in front."""
        index = tokens[:, None, :, None]
        outputs, new = [], []
        stream = None if nudges is None else jnp.take_along_axis(params["base"], tokens[..., None], axis=1)
        for layer, state in enumerate(states):
            queries = (params[name][layer] for name in (("q", "guess") if layer in guess else ("q",)))
            q, *guessed = (jnp.take_along_axis(x, index[:, None], axis=-2) for x in queries)
            k, v = (jnp.take_along_axis(params[name][layer], index, axis=-2) for name in ("k", "v"))
            written = {}
            if nudges is not None:
                hidden, gain = (
                    jnp.take_along_axis(params[name][layer], tokens[..., None], axis=1) for name in ("hidden", "gain")
                )
                written = {"written": (hidden, params["kernel"][layer])}
                stream = stream + gain * nudges[layer]
            out, state = attend(layer, state, q, k, v, *guessed, **written)
            outputs.append(out)
            new.append(state)
        if nudges is not None:
            return jnp.stack(outputs), stream, tuple(new)
        at = tokens if last is None else jnp.take_along_axis(tokens, last[:, None], axis=1)
        logits = jnp.take_along_axis(params["logits"], at[..., None], axis=1)
        return jnp.stack(outputs), logits if last is None else logits[:, 0], tuple(new)

    def weight_bytes(self, params: Any, rows: int) -> int:
        """None: see `kvjax.protocol.typing.Model.weight_bytes`."""
        return 0


class Listener(Tape):
    """A tape that keeps the attention outputs of the traces it goes through; equal to nothing but itself."""

    __eq__ = object.__eq__
    __hash__ = object.__hash__

    def __init__(self, tape: Tape) -> None:
        super().__init__(**{field.name: vars(tape)[field.name] for field in dataclasses.fields(tape)})
        object.__setattr__(self, "heard", [])

    def apply(self, params: Any, tokens: jax.Array, attend: Callable, states: tuple, **options: Any):
        """As `Tape.apply`."""
        outputs, *result = self.play(params, tokens, attend, states, **options)
        self.heard.append(outputs)
        return tuple(result)


def record(q: Any, k: Any, v: Any, logits: Any, guess: Any = None, **fields: Any) -> tuple[Tape, dict[str, jax.Array]]:
    """The model and parameters that play q [L, B, H, G, T, D], k and v [L, B, H, T, D] and logits [B, T, V]; and a guess."""
    layers, batch, heads, groups, total, dim = q.shape
    assert k.shape == v.shape == (layers, batch, heads, total, dim)
    assert logits.shape[:2] == (batch, total) and logits.shape[2] >= total, "token ids are positions"
    tape = Tape(
        num_layers=layers,
        num_q_heads=heads * groups,
        num_kv_heads=heads,
        head_dim=dim,
        vocab_size=logits.shape[2],
        max_position_embeddings=4 * total,
        **fields,
    )
    arrays = {"q": q, "k": k, "v": v, "logits": logits, **({} if guess is None else {"guess": guess})}
    return tape, {name: jnp.asarray(x, jnp.float32) for name, x in arrays.items()}


def read(tape: Tape, params: Any, lengths: Any, method: Any, max_new_tokens: int, **options: Any) -> Cache:
    """`kvjax.prefill` of the first ``lengths[b]`` tokens of each row."""
    lengths = np.asarray(lengths, np.int32)
    tokens = np.broadcast_to(np.arange(lengths.max(), dtype=np.int32), (len(lengths), lengths.max()))
    tokens = np.where(tokens < lengths[:, None], tokens, 0)
    options = {"pad_multiple": 1, "config": tape, "method": method, "max_new_tokens": max_new_tokens, **options}
    if "chunk_size" not in options:
        return kvjax.prefill(params, tokens, lengths=lengths, **options)
    # In chunks kvjax reads some of the rows at a time, and a tape cannot tell which they are: it plays each row alone.
    caches = []
    for row in range(len(lengths)):
        own = {name: x[row : row + 1] if name == "logits" else x[:, row : row + 1] for name, x in params.items()}
        caches.append(kvjax.prefill(own, tokens[row : row + 1], lengths=lengths[row : row + 1], **options))
    parts = [(cache.layers, cache.shared, cache.length, cache.logits) for cache in caches]
    layers, shared, length, logits = jax.tree.map(lambda *rows: jnp.concatenate(rows), *parts)
    whole = {"layers": layers, "shared": shared, "length": length, "logits": logits, "weights": fingerprint(params)}
    return dataclasses.replace(caches[0], **whole)


def nothing(cache: Cache) -> None:
    """What `decode` watches if nothing else is asked for."""
    return None


@functools.partial(jax.jit, static_argnames="watch")
def decode(params: Any, cache: Cache, active: Any, poison: Any = False, *, watch: Callable = nothing) -> tuple:
    """Decode steps through `run_step`: ``active`` bool [N, B], each row feeding its own next token.

    ``poison`` puts NaN wherever a layer's cache holds nothing, before every step.

    Returns:
        the cache, outputs [N, L, B, H, G, D], and what ``watch`` says of the cache before each step, stacked.
    """

    def soil(x: Any) -> Any:
        if not isinstance(x, PlainCache):
            return x
        bad = (jnp.asarray(poison) & (x.position < 0))[..., None]
        return dataclasses.replace(x, key=jnp.where(bad, jnp.nan, x.key), value=jnp.where(bad, jnp.nan, x.value))

    def step(cache: Cache, active: Any) -> tuple:
        seen = watch(cache)
        listener = Listener(cache.model)
        layers = jax.tree.map(soil, cache.layers, is_leaf=lambda x: isinstance(x, PlainCache))
        tokens = jnp.minimum(cache.length, params["k"].shape[-2] - 1)[:, None]
        after = run_step(params, dataclasses.replace(cache, model=listener, layers=layers), tokens, active[:, None])
        (outputs,) = listener.heard
        return dataclasses.replace(after, model=cache.model), (outputs[..., 0, :], seen)

    cache, (outputs, seen) = jax.lax.scan(step, cache, jnp.asarray(active))
    return cache, outputs, seen
