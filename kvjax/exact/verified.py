"""Exact decoding: `Verified` generates Full's own tokens, faster, because a draft method guesses several tokens ahead."""

import dataclasses
from typing import Any

import jax.numpy as jnp
from jax import Array

from kvjax.cache import Cache, LayerSpec
from kvjax.exact.verified_layer import Passes, VerifiedLayer, draft_of, with_draft
from kvjax.protocol.method import LayerMethod, Method, Reading, check_method
from kvjax.protocol.typing import Model, layer_ropes, pytree, static, traced
from kvjax.rope import depends_on_length
from kvjax.wrappers.compose import answers, passes

# A draft that is not known yet counts as if 1.5 of 2 drafted tokens were right. With the default `worth` its first round has
# two tokens, two failed rounds end the drafting, and one whole round brings it to four tokens.
_FIRST_RATE, _FIRST_TOKENS = 0.75, 2
_MEMORY = 0.875  # what is left of the moving mean of agreement after one more drafted token, when many were seen


@answers("draft")
@pytree
class Verified(Method):
    """Decode exactly: the tokens are Full's, and ``draft`` only makes them come faster.

    Example: ``Verified(draft=SnapKV(budget=1024), depth=4)``.

    The draft decodes up to ``depth`` tokens. Then Full reads all of them in one pass, which costs little more than a step,
    because a step's time goes to reading weights and the cache. The longest run of tokens with which Full agrees is kept,
    and so is the token that Full puts in place of the first wrong one: at least 1 and at most ``depth + 1`` tokens a pass.
    Rows keep different numbers of tokens. No token of the draft that Full does not choose itself is ever returned.

    A drafted token is right if Full would have drawn it in this place: greedily its most likely token, and with a
    temperature the token that it draws with the same random numbers. So sampled tokens are Full's for the same key, too,
    whatever the draft, its depth, and the blocks of `kvjax.stream` are.

    Where the draft keeps every token (`Quest`, `ParisKV`, `Chess`), it shares Full's storage: a pass writes the exact keys
    and values of drafted tokens over the draft's own, rejected tokens are taken back, and the draft's metadata is made from
    kept tokens only. Any other draft (`SnapKV`, `H2O`, `StreamingLLM`) has its own storage beside Full's, and gets the
    exact keys and values of the prompt and of kept tokens.

    How many tokens are drafted follows from how many are kept, in all rows of a batch together: a token is drafted if it
    is kept with a probability of at least ``worth``, by a moving mean. If not even the first one is, Full decodes alone for
    the rest of the call, and the next call tries the draft once more. ``worth=None`` always drafts ``depth`` tokens.

    With ``offload`` Full's keys and values are in host memory, and a pass brings each layer to the device for a moment. A
    draft that shares them chooses rows there, as with its own ``offload``; any other draft stays on the device.

    `TokenSelect` and `InfLLM` select while they read a prompt. Under this wrapper Full reads it, and they store its tokens
    in chunks of their own size, in storage of their own, because they keep keys without their positions.

    Refused when the wrapper is made (ValueError): another `Verified`, a draft with ``offload``, and a draft that reads every
    token at positions or through a pattern of its own (`SelfExtend`, `NTK`, `PI`, `Prefill`). Refused later: a model whose
    RoPE frequencies change with the length, and ``max_new_tokens`` of at most ``depth``.

    The accounting describes a generated token: the bytes of a pass and of its drafts, divided by the tokens per pass so far.
    Its counters are ``passes``, ``tokens_per_pass``, and for each place ``accepted_1`` to ``accepted_N`` the share of the
    tokens drafted there that were kept.

    **Source**: Leviathan et al., "Fast Inference from Transformers via Speculative Decoding" (arXiv:2211.17192); a sparse
    cache as the draft: Sun et al., "TriForce" (arXiv:2404.11912), and Chen et al., "MagicDec" (arXiv:2408.11049).
    Daliri et al., "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv:2408.07978) for equal
    random numbers.

    **Departures**: drafted tokens are compared with Full's own draws; the papers accept a token with the ratio of two
    probabilities, and draw the next one from what is left, which keeps a few more tokens and makes them depend on the draft.
    """

    draft: Method = traced("decodes the tokens that Full then reads")
    depth: int = static("the most tokens that are drafted before each pass", default=4, least=1)
    worth: float | Array | None = traced("least chance to be kept; None = draft `depth`", default=0.5, least=0, most=1)
    offload: bool | float = static("Full's rows in host memory, or a share of layers", default=False, least=0, most=1)

    keeps = "every token, and what `draft` keeps"
    extrapolates = False
    evicts = False
    dense_prompt = True
    spans_layers = True

    reread_tokens = passes("draft", Method.reread_tokens)

    def check(self) -> None:
        draft, name = check_method("Verified: draft", self.draft), type(self.draft).__name__
        if draft.drafts:
            raise ValueError(f"Verified: draft must be a method that decodes token by token, got another {name}")
        if draft.offload:
            raise ValueError(
                f"Verified: the draft {name} must have offload=False, got {draft.offload!r}; Verified(offload=...) keeps "
                "Full's keys and values in host memory"
            )
        if self.offload and draft.composable and not draft.evicts and draft.offloaded(True) is None:
            raise ValueError(
                f"Verified: offload must be False with {name}, which reads every token where it decodes, got "
                f"{self.offload!r}; take a draft that evicts, or one that has the knob offload itself"
            )
        _check_prompt(draft, name)

    def check_sizes(self, model: Model) -> None:
        changing = [rope.scaling for rope in layer_ropes(model) if depends_on_length(rope.scaling)]
        if changing:
            raise ValueError(
                "Verified: expected a model whose RoPE frequencies do not change with the length, because one pass has "
                f"tokens of several lengths, got rope_type {changing[0].rope_type!r}"
            )

    @property
    def drafts(self) -> int:
        return self.depth

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        inner, name = self.draft.for_layer(layer, num_layers), type(self.draft).__name__
        verified = VerifiedLayer(draft=inner, in_host=float(self.offload))
        _check_prompt(verified.draft, name)
        most = verified.max_tokens(in_prompt=False)
        if most is not None and most <= self.depth:
            raise ValueError(f"Verified: depth must be below {most}, the tokens that {name} stores at once, got {self.depth}")
        return verified

    def reread(self, states: tuple[Any, ...], reading: Reading) -> tuple[Any, ...]:
        return self.draft.reread(states, reading)

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Passes:
        return no_passes(self.draft.init_shared(specs), specs[0].batch, self.depth)

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        seen = self.draft.observe(self.view(cache), decoding)
        layers = tuple(with_draft(state, new) for state, new in zip(cache.layers, seen.layers, strict=True))
        return dataclasses.replace(cache, layers=layers, shared=dataclasses.replace(cache.shared, draft=seen.shared))

    def view(self, cache: Cache) -> Cache:
        """Return the draft's cache, which is a part of ``cache``."""
        layers = tuple(draft_of(state) for state in cache.layers)
        return dataclasses.replace(cache, method=self.draft, layers=layers, shared=cache.shared.draft)


def no_passes(draft: Any, batch: int, depth: int) -> Passes:
    """Return the counts before the first pass, for ``batch`` rows and the draft's own shared state ``draft``."""

    def zeros(*shape: int) -> Array:  # an array for each field: a call that consumes the cache takes each once
        return jnp.zeros((batch, *shape), jnp.int32)

    return Passes(
        draft=draft,
        passes=zeros(),
        drafted=zeros(depth),
        accepted=zeros(depth),
        rate=jnp.full((batch,), _FIRST_RATE, jnp.float32),
    )


def noted(passes: Passes, drafted: Array, accepted: Array, active: Array) -> Passes:
    """Count a pass.

    Args:
        drafted: int32 [B], tokens that were drafted for each row.
        accepted: int32 [B], how many of these were kept.
        active: bool [B], rows that took part.
    """
    place = jnp.arange(passes.drafted.shape[1], dtype=jnp.int32)[None]
    # Behind the first wrong token nothing was compared in its true place.
    compared = jnp.minimum(accepted + 1, drafted)
    # Of the first tokens it is the plain mean. A pass that failed behind its first token counts as one token more.
    seen = (_FIRST_TOKENS + passes.drafted[:, 0] + passes.accepted.sum(axis=1)).astype(jnp.float32)
    left = jnp.minimum(jnp.power(_MEMORY, compared.astype(jnp.float32)), seen / (seen + compared.astype(jnp.float32)))
    share = accepted.astype(jnp.float32) / jnp.maximum(compared, 1).astype(jnp.float32)
    return dataclasses.replace(
        passes,
        passes=passes.passes + active.astype(jnp.int32),
        drafted=passes.drafted + (place < drafted[:, None]).astype(jnp.int32),
        accepted=passes.accepted + (place < accepted[:, None]).astype(jnp.int32),
        rate=passes.rate * left + share * (1 - left),
    )


def _check_prompt(draft: Method, name: str) -> None:
    """Refuse a draft whose state at the prompt's end cannot be made from the keys and values that Full reads.

    A method that keeps a bounded part from the first token on, or keys without positions, takes them as they come, in its own
    storage. What it would have attended to is not used.
    """
    if (draft.extrapolates or not draft.dense_prompt) and (draft.slotted or (draft.moves_slots and not draft.evicts)):
        raise ValueError(
            "Verified: draft must prefill densely, as Full does, or store each token as it comes, but "
            f"{name} has a prefill or positions of its own"
        )
