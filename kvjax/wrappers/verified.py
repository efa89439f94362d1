"""Exact decoding: `Verified` generates Full's own tokens, faster, because a draft method guesses several tokens ahead."""

from __future__ import annotations

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import append_tokens, attend_stored
from kvjax.cache import Cache, LayerCache, LayerSpec
from kvjax.cache.rewind import rewound
from kvjax.families import AppendOnly
from kvjax.method import Cost, Inputs, LayerMethod, Method, Prompt, Reading, Step, check_method, free_slots
from kvjax.rope import depends_on_length, rotate
from kvjax.slots import SlotMethod, SlotState, cost_of_all
from kvjax.typing import Model, pytree, static, traced
from kvjax.wrappers.compose import answers, passes
from pallas_kernels.numerics import run_if

_MEMORY = 0.875  # what is left of the moving mean of agreement after one more drafted token


@pytree
class Exact(AppendOnly):
    """Full in one layer of `Verified`: every token is stored, and attention is dense."""

    slot_block = 1

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerCache, None]:
        return cache, None


@pytree
class Pair:
    """The state of a layer whose draft has storage of its own."""

    full: SlotState  # every token
    draft: Any  # the state of the draft


@pytree
class Passes:
    """What the layers of `Verified` share: the draft's own shared state, and what became of the drafted tokens so far."""

    draft: Any
    passes: Array  # int32 [B], passes of the model that gave tokens, each at least one
    drafted: Array  # int32 [B, N], passes that had a drafted token at each of the N = ``depth`` places behind the first
    accepted: Array  # int32 [B, N], passes that kept it
    rate: Array  # float32 [B], moving mean of the share of drafted tokens that Full agrees with
    rest: Array  # int32 [B], tokens that Full still decodes alone before the draft is tried again


@answers("draft")
@pytree
class VerifiedLayer(LayerMethod):
    """One layer of `Verified`: the draft's storage and Full's, which are one where the draft keeps every token.

    `attend` stores and attends as Full does, and tells the draft of the tokens. A pass over drafted tokens does the same in
    two parts: `judge`, and `commit` when it is known which tokens are kept.
    """

    draft: LayerMethod

    keeps = "every token, and what `draft` keeps"
    extrapolates = False
    evicts = False
    composable = False
    slotted = False
    dense_prompt = True
    needs_guess = False  # the draft asks for itself, in its own steps

    rework = passes("draft", LayerMethod.rework)

    def init(self, spec: LayerSpec) -> Any:
        if self.shares:
            return self.draft.init(spec)
        if self.draft.slotted:  # until the prompt's end, the draft's storage is Full's
            slots = spec.prompt_slots + spec.max_new_tokens
            return self.draft.init(dataclasses.replace(spec, prompt_slots=slots, max_new_tokens=0))
        return Pair(full=Exact().init(spec), draft=self.draft.init(spec))

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        if self.shares:
            return self.draft.finish(state, spec)
        if self.draft.slotted:
            return Pair(full=SlotState(cache=state.cache), draft=self.draft.finish(state, spec))
        return Pair(full=Exact().finish(state.full, spec), draft=self.draft.finish(state.draft, spec))

    @property
    def shares(self) -> bool:
        """Whether the draft keeps every token as it is, so that Full needs no storage of its own."""
        draft = cast("SlotMethod", self.draft)
        return draft.slotted and not (draft.evicts or draft.packs or draft.moves_slots)

    def attend(self, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        if inputs.start is None:
            out, state, mass = self.judge(state, inputs)
            return out, self.commit(state, inputs, mass)
        if isinstance(state, Pair):
            out, full = Exact().attend(state.full, inputs)
            return out, Pair(full=full, draft=self.draft.attend(state.draft, _of_draft(inputs))[1])
        return self.draft.attend(state, _of_draft(inputs))

    def judge(self, state: Any, inputs: Inputs) -> tuple[Array, Any, Array | None]:
        """Store tokens after the prompt and attend to all stored tokens, as Full does, without telling the draft.

        Returns:
            The output [B, H, G, T, D]; the state, whose metadata does not know of the tokens; and the attention mass of the
            tokens, float32 [B, H, S], None unless the draft observes it in this storage.
        """
        given = inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
        full = _full(state)
        query, cache = append_tokens(full.cache, *given)
        observes = self.shares and cast("SlotMethod", self.draft).observes_steps
        out, mass = attend_stored(query, cache, inputs.position, observes)
        full = dataclasses.replace(full, cache=cache)
        judged = dataclasses.replace(state, full=full) if isinstance(state, Pair) else full
        return out.reshape(inputs.query.shape), judged, mass

    def commit(self, state: Any, inputs: Inputs, mass: Array | None, rejected: Array | None = None) -> Any:
        """Take back the rejected tokens of a `judge`, and tell the draft of the kept tokens.

        Args:
            state: what `judge` returned.
            inputs: the tokens, with exact keys and values; the position of a rejected token is EMPTY.
            mass: what `judge` returned.
            rejected: int32 [B], rejected tokens, which are the last ones; None means none.
        """
        inputs, tokens = _of_draft(inputs), inputs.position.shape[1]
        full = _full(state)
        cache = full.cache if rejected is None else rewound(full.cache, rejected, tokens)
        if isinstance(state, Pair):
            return Pair(full=dataclasses.replace(full, cache=cache), draft=self._told(state.draft, inputs))
        query = rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        seen = cache if tokens == 1 else cache.resident()
        return SlotState(cache=cache, aux=cast("SlotMethod", self.draft).update(seen, full.aux, step, mass)[1])

    def recover(self, before: Any, after: Any, count: Array, most: int) -> Any:
        """Return the state ``before`` the draft decoded tokens, with the arrays of the state ``after`` if they can serve.

        Args:
            before: the layer's state.
            after: the draft's own state, after its steps.
            count: int32 [B], tokens that it has stored since.
            most: the largest ``count``.
        """
        draft = cast("SlotMethod", self.draft)
        if not draft.slotted or draft.moves_slots:
            return before
        old = _draft(before)
        recovered = SlotState(cache=rewound(after.cache, count, most), aux=old.aux)
        return dataclasses.replace(before, draft=recovered) if isinstance(before, Pair) else recovered

    def _told(self, state: Any, inputs: Inputs) -> Any:
        """Store tokens in the draft's own storage, as many at once as it takes; nothing reads its output."""
        tokens, most = inputs.position.shape[1], self.draft.max_tokens(in_prompt=False)
        if most is None or most >= tokens:
            return self.draft.attend(state, inputs)[1]
        count = -(-tokens // most)
        padded = _padded(inputs, count * most)

        def body(index: Array, state: Any) -> Any:
            _, state = self.draft.attend(state, _piece(padded, index * most, most))
            due = self.draft.due(state)
            if due is None:
                return state
            return run_if(lambda now, own: own.settle(now, own.rework(own.excerpt(now))), due.any(), state, self.draft)

        return lax.fori_loop(0, count, body, state)

    def chosen(self, state: Any, inputs: Inputs) -> Array:
        cache = _full(state).cache
        given = inputs.query, inputs.key, inputs.value, inputs.position, inputs.inv_freq
        return append_tokens(cache, *given)[1].position

    def cost(self, state: Any, shared: Passes) -> Cost:
        """Compute the cost of one more token: of a pass and its drafts, divided by the tokens that passes gave so far."""
        full, draft = cost_of_all(_full(state).cache), self.draft.cost(_draft(state), shared.draft)
        passes = jnp.maximum(shared.passes, 1).astype(jnp.float32)
        drafts = shared.drafted.sum(axis=1).astype(jnp.float32) / passes
        tokens = 1 + shared.accepted.sum(axis=1).astype(jnp.float32) / passes

        def each(pass_: Array, step: Array) -> Array:
            return (pass_ + drafts * step) / tokens

        share = shared.accepted.astype(jnp.float32) / jnp.maximum(shared.drafted, 1).astype(jnp.float32)
        return Cost(
            attended=each(full.attended, draft.attended),
            kv_bytes=each(full.kv_bytes, draft.kv_bytes),
            metadata_bytes=each(full.metadata_bytes, draft.metadata_bytes),
            counters={
                **draft.counters,
                "passes": shared.passes.astype(jnp.float32),
                "tokens_per_pass": tokens,
                **{f"accepted_{place + 1}": share[:, place] for place in range(share.shape[1])},
            },
        )

    def room(self, state: Any) -> Array | None:
        cache, draft = _full(state).cache, self.draft.room(_draft(state))
        room = free_slots(cache, None)
        return room if draft is None or room is None else jnp.minimum(room, draft)

    def max_tokens(self, in_prompt: bool) -> int | None:
        return self.draft.max_tokens(in_prompt) if in_prompt or self.shares else None

    def due(self, state: Any) -> Array | None:
        return self.draft.due(_draft(state))

    def excerpt(self, state: Any) -> Any:
        return self.draft.excerpt(_draft(state))

    def settle(self, state: Any, made: Any) -> Any:
        return with_draft(state, self.draft.settle(_draft(state), made))


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
    is kept with a probability of at least ``worth``, by a moving mean. If not even the first one is, Full decodes 64 tokens
    alone before the draft is tried again. ``worth=None`` always drafts ``depth`` tokens.

    Refused when the wrapper is made (ValueError): another `Verified`, a draft with ``offload``, and a draft that keeps every
    token but reads the prompt in its own way (`TokenSelect`, `InfLLM`, `SelfExtend`, `NTK`, `Prefill`). Refused later: a
    model whose RoPE frequencies change with the length, and ``max_new_tokens`` of at most ``depth``.

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

    draft: Method
    depth: int = static(default=4, least=1)  # the most tokens that are drafted before each pass
    # Least probability with which a drafted token is kept, for it to be drafted; None = always draft `depth` tokens.
    worth: float | Array | None = traced(default=0.5, least=0, most=1)

    keeps = "every token, and what `draft` keeps"
    extrapolates = False
    evicts = False
    composable = False
    slotted = False
    dense_prompt = True
    spans_layers = True

    reread_tokens = passes("draft", Method.reread_tokens)

    def check(self) -> None:
        draft, name = check_method("Verified: draft", self.draft), type(self.draft).__name__
        if draft.drafts:
            raise ValueError(f"Verified: draft must be a method that decodes token by token, got another {name}")
        if draft.offload:
            raise ValueError(
                f"Verified: {name} must have offload=False, got {draft.offload!r}: drafted tokens cannot be taken back from "
                "host memory"
            )
        _check_prompt(draft, name)

    def check_sizes(self, model: Model) -> None:
        if depends_on_length(model.rope_scaling):
            raise ValueError(
                "Verified: expected a model whose RoPE frequencies do not change with the length, because one pass has "
                f"tokens of several lengths, got rope_type {model.rope_scaling.rope_type!r}"
            )

    @property
    def drafts(self) -> int:
        return self.depth

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        made, name = VerifiedLayer(draft=self.draft.for_layer(layer, num_layers)), type(self.draft).__name__
        _check_prompt(made.draft, name)
        most = made.max_tokens(in_prompt=False)
        if most is not None and most <= self.depth:
            raise ValueError(f"Verified: depth must be below {most}, the tokens that {name} stores at once, got {self.depth}")
        return made

    def reread(self, states: tuple, reading: Reading) -> tuple:
        return self.draft.reread(states, reading)

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Passes:
        batch = specs[0].batch
        return Passes(
            draft=self.draft.init_shared(specs),
            passes=jnp.zeros((batch,), jnp.int32),
            drafted=jnp.zeros((batch, self.depth), jnp.int32),
            accepted=jnp.zeros((batch, self.depth), jnp.int32),
            rate=jnp.ones((batch,), jnp.float32),
            rest=jnp.zeros((batch,), jnp.int32),
        )

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        seen = self.draft.observe(self.view(cache), decoding)
        layers = tuple(with_draft(state, new) for state, new in zip(cache.layers, seen.layers, strict=True))
        return dataclasses.replace(cache, layers=layers, shared=dataclasses.replace(cache.shared, draft=seen.shared))

    def view(self, cache: Cache) -> Cache:
        """Return the draft's cache, which is a part of ``cache``."""
        layers = tuple(_draft(state) for state in cache.layers)
        return dataclasses.replace(cache, method=self.draft, layers=layers, shared=cache.shared.draft)


def _check_prompt(draft: Method, name: str) -> None:
    """Refuse a draft whose state at the prompt's end cannot be made from the keys and values that Full reads.

    A method that keeps a bounded part from the first token on takes them as they come, in its own storage.
    """
    if not draft.dense_prompt and (draft.slotted or not draft.evicts):
        raise ValueError(
            f"Verified: draft must prefill densely, as Full does, or keep a bounded part of the prompt, but {name} has a "
            "prefill or positions of its own"
        )


def noted(passes: Passes, drafted: Array, accepted: Array, active: Array) -> Passes:
    """Count a pass.

    Args:
        passes: the counts so far.
        drafted: int32 [B], tokens that were drafted for each row.
        accepted: int32 [B], how many of these were kept.
        active: bool [B], rows that took part.
    """
    place = jnp.arange(passes.drafted.shape[1], dtype=jnp.int32)[None]
    # Behind the first wrong token nothing was compared in its true place.
    compared = jnp.minimum(accepted + 1, drafted)
    left = jnp.power(_MEMORY, compared.astype(jnp.float32))
    share = accepted.astype(jnp.float32) / jnp.maximum(compared, 1).astype(jnp.float32)
    return dataclasses.replace(
        passes,
        passes=passes.passes + active.astype(jnp.int32),
        drafted=passes.drafted + (place < drafted[:, None]).astype(jnp.int32),
        accepted=passes.accepted + (place < accepted[:, None]).astype(jnp.int32),
        rate=passes.rate * left + share * (1 - left),
    )


def with_draft(state: Any, draft: Any) -> Any:
    """Put a later state of the draft into a layer's state; the layer's state is the draft's where they share storage."""
    return dataclasses.replace(state, draft=draft) if isinstance(state, Pair) else draft


def _draft(state: Any) -> Any:
    return state.draft if isinstance(state, Pair) else state


def _full(state: Any) -> SlotState:
    return state.full if isinstance(state, Pair) else state


def _of_draft(inputs: Inputs) -> Inputs:
    """Give the draft its own shared state."""
    return dataclasses.replace(inputs, shared=inputs.shared.draft)


def _padded(inputs: Inputs, tokens: int) -> Inputs:
    """Pad the tokens of ``inputs`` to ``tokens``."""
    more = tokens - inputs.position.shape[1]
    return _each(inputs, lambda x, axis, fill: jnp.pad(x, _widths(x, axis, more), constant_values=fill))


def _piece(inputs: Inputs, start: Array, size: int) -> Inputs:
    """Slice ``size`` tokens of ``inputs``."""
    return _each(inputs, lambda x, axis, fill: lax.dynamic_slice_in_dim(x, start, size, axis))


def _each(inputs: Inputs, change: Any) -> Inputs:
    """Apply ``change(array, axis of tokens, fill of padding)`` to every array that has tokens."""
    axes = {"query": (3, 0), "key": (2, 0), "value": (2, 0), "position": (1, -1), "tokens": (1, 0)}
    return dataclasses.replace(inputs, **{name: change(vars(inputs)[name], *how) for name, how in axes.items()})


def _widths(x: Array, axis: int, more: int) -> list[tuple[int, int]]:
    return [(0, more if at == axis else 0) for at in range(x.ndim)]
