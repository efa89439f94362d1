"""One layer of `kvjax.Verified`: Full's storage and the draft's, and what a pass over drafted tokens does to them."""

import dataclasses
from typing import Any, cast

import jax.numpy as jnp
from jax import Array, lax

from kvjax.attention.over_cache import attend_all, attend_slots, attend_stored, mass_of
from kvjax.attention.sinks import with_sinks
from kvjax.cache import LayerCache, LayerSpec, LayerStorage
from kvjax.cache.divided import FEW
from kvjax.exact.rewind import rewound
from kvjax.protocol.families import AppendOnly
from kvjax.protocol.method import Cost, Inputs, LayerMethod, Prompt, Step, free_slots
from kvjax.protocol.slots import SlotMethod, SlotState
from kvjax.protocol.typing import pytree, static
from kvjax.rope import rotate
from kvjax.wrappers.compose import answers, passes
from pallas_kernels.numerics import run_if


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


@answers("draft")
@pytree
class VerifiedLayer(LayerMethod):
    """One layer of `Verified`: the draft's storage and Full's, which are one where the draft keeps every token.

    `attend` stores and attends as Full does, and tells the draft of the tokens. A pass over drafted tokens does the same in
    two parts: `judge`, and `commit` when it is known which tokens are kept.
    """

    draft: LayerMethod
    in_host: float = static("as `offload` of `Verified`", default=0.0)

    keeps = "every token, and what `draft` keeps"
    extrapolates = False
    evicts = False
    dense_prompt = True
    needs_guess = False  # the draft asks for itself, in its own steps

    rework = passes("draft", LayerMethod.rework)

    def init(self, spec: LayerSpec) -> Any:
        if self.shares:
            return self.draft.init(spec)
        if self.draft.slotted:  # until the prompt's end, the draft's storage is Full's
            slots = spec.prompt_slots + spec.max_new_tokens
            return self.draft.init(dataclasses.replace(spec, prompt_slots=slots, max_new_tokens=0))
        return Pair(full=Exact().init(spec), draft=self.draft.init(dataclasses.replace(spec, offloaded=False)))

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        if self.shares:
            return self.draft.finish(state, spec)
        resident = dataclasses.replace(spec, offloaded=False)
        if self.draft.slotted:
            whole = dataclasses.replace(state, cache=state.cache.resident())
            return Pair(full=Exact().finish(state, spec), draft=self.draft.finish(whole, resident))
        return Pair(full=Exact().finish(state.full, spec), draft=self.draft.finish(state.draft, resident))

    @property
    def offload(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]
        """See `kvjax.protocol.method.Method.offload`. A draft that shares Full's storage must be able to read it there."""
        return 0.0 if self.shares and self.draft.offloaded(True) is None else self.in_host

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
            return out, Pair(full=full, draft=self.draft.attend(state.draft, _for_draft(inputs))[1])
        return self.draft.attend(state, _for_draft(inputs))

    def judge(self, state: Any, inputs: Inputs) -> tuple[Array, Any, Array | None]:
        """Store tokens after the prompt and attend to all stored tokens, as Full does, without telling the draft.

        Returns:
            The output [B, H, G, T, D]; the state, whose metadata does not know of the tokens; and the attention mass,
            float32 [B, H, S], None unless the draft observes it in this storage. Where a kernel makes the mass beside the
            attention, it comes from a row's first token, which is always kept; elsewhere it comes from all tokens.
        """
        full = full_of(state)
        query, cache = inputs.append_to(full.cache)
        draft, several = cast("SlotMethod", self.draft), inputs.position.shape[1] > 1
        observes = self.shares and 0 < draft.observes <= inputs.position.shape[1]
        if observes and several and draft.asks_ends:
            out, lse = with_sinks(*attend_all(query, cache, inputs.position), inputs.sinks)
            mass = mass_of(*_ends(query, inputs.position, lse, cache))
        # Sinks change the softmax after its sum over slots, so a mass that is summed with it would leave them out.
        elif observes and several and cache.parts == 1 and inputs.position.shape[1] <= FEW and inputs.sinks is None:
            out, _, mass = attend_slots(query, cache.resident(), mass=True, position=inputs.position)
        else:
            out, mass = attend_stored(query, cache, inputs.position, observes, sinks=inputs.sinks)
        if mass is not None:  # read before rejected tokens lose their positions, or XLA copies the positions of all slots
            out, mass = lax.optimization_barrier((out, mass))
        full = dataclasses.replace(full, cache=cache)
        judged = dataclasses.replace(state, full=full) if isinstance(state, Pair) else full
        return out.reshape(inputs.query.shape), judged, mass

    def commit(self, state: Any, inputs: Inputs, mass: Array | None, rejected: Array | None = None) -> Any:
        """Take back the rejected tokens of a `judge`, and tell the draft of the kept tokens.

        Args:
            inputs: the tokens, with exact keys and values; the position of a rejected token is EMPTY.
            rejected: int32 [B], rejected tokens, which are the last ones; None means none.
        """
        inputs, tokens = _for_draft(inputs), inputs.position.shape[1]
        full = full_of(state)
        cache = full.cache if rejected is None else rewound(full.cache, rejected, tokens)
        if isinstance(state, Pair):
            return Pair(full=dataclasses.replace(full, cache=cache), draft=self._told(state.draft, inputs))
        query = rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)
        step = Step(query=query, position=inputs.position, tokens=inputs.tokens, shared=inputs.shared)
        draft = cast("SlotMethod", self.draft)
        if cache.rows is not None and rejected is not None:  # a copy of the whole layer would cross the bus once more
            return SlotState(cache=cache, aux=self._updated(cache, full.aux, step))
        seen = cache if tokens == 1 else cache.resident()
        return SlotState(cache=cache, aux=draft.update(seen, full.aux, step, mass)[1])

    def _updated(self, cache: LayerStorage, aux: Any, step: Step) -> Any:
        """Tell the draft of a step's tokens one by one, as in decode steps, which read no rows of host memory."""
        draft, changed = cast("SlotMethod", self.draft), cast("Any", cache)
        first = cache.cursor - jnp.sum(step.position >= 0, axis=1, dtype=jnp.int32)
        for at in range(step.position.shape[1]):
            one = Step(
                query=step.query[..., at : at + 1, :],
                position=step.position[:, at : at + 1],
                tokens=step.tokens[:, at : at + 1],
                shared=step.shared,
            )
            held = dataclasses.replace(changed, cursor=jnp.minimum(first + at + 1, cache.cursor))
            aux = draft.update(held, aux, one, None)[1]
        return aux

    def recover(self, before: Any, after: Any, count: Array, most: int) -> Any:
        """Return the state ``before`` the draft decoded tokens, with the arrays of the state ``after`` if they can serve.

        Args:
            count: int32 [B], tokens that it has stored since.
        """
        draft = cast("SlotMethod", self.draft)
        if draft.moves_slots:
            return before
        state = dataclasses.replace(draft_of(before), cache=rewound(after.cache, count, most))
        # A pass over rows in host memory tells the draft of its tokens one by one, and makes no metadata anew.
        if self.shares and after.cache.rows is None:
            state = dataclasses.replace(state, aux=draft.drafted(state.aux, after.aux))
        return with_draft(before, state)

    def _told(self, state: Any, inputs: Inputs) -> Any:
        """Store tokens in the draft's own storage, as many at once as it takes; nothing reads its output."""
        tokens, most = inputs.position.shape[1], self.draft.max_tokens(in_prompt=False)
        if most is None or most >= tokens:
            return self.draft.attend(state, inputs)[1]
        count = -(-tokens // most)
        more = count * most - tokens

        def pad(x: Array, axis: int, fill: int) -> Array:
            return jnp.pad(x, [(0, more * (at == axis)) for at in range(x.ndim)], constant_values=fill)

        padded = _each(inputs, pad)

        def body(index: Array, state: Any) -> Any:
            piece = _each(padded, lambda x, axis, _: lax.dynamic_slice_in_dim(x, index * most, most, axis))
            _, state = self.draft.attend(state, piece)
            due = self.draft.due(state)
            if due is None:
                return state
            return run_if(lambda now, one: one.settle(now, one.rework(one.excerpt(now))), due.any(), state, self.draft)

        return lax.fori_loop(0, count, body, state)

    def chosen(self, state: Any, inputs: Inputs) -> Array:
        return inputs.append_to(full_of(state).cache)[1].position

    def cost(self, state: Any, shared: Passes) -> Cost:
        """Compute the cost of one more token: of a pass and its drafts, divided by the tokens that passes gave so far."""
        full, draft = Exact().cost(full_of(state), None), self.draft.cost(draft_of(state), shared.draft)
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
            bus_bytes=each(jnp.asarray(full.bus_bytes), jnp.asarray(draft.bus_bytes)),
            counters={
                **draft.counters,
                "passes": shared.passes.astype(jnp.float32),
                "tokens_per_pass": tokens,
                **{f"accepted_{place + 1}": share[:, place] for place in range(share.shape[1])},
            },
        )

    def room(self, state: Any) -> Array | None:
        cache, draft = full_of(state).cache, self.draft.room(draft_of(state))
        room = free_slots(cache, None)
        return room if draft is None or room is None else jnp.minimum(room, draft)

    def max_tokens(self, in_prompt: bool) -> int | None:
        return self.draft.max_tokens(in_prompt) if in_prompt or self.shares else None

    def due(self, state: Any) -> Array | None:
        return self.draft.due(draft_of(state))

    def excerpt(self, state: Any) -> Any:
        return self.draft.excerpt(draft_of(state))

    def settle(self, state: Any, made: Any) -> Any:
        return with_draft(state, self.draft.settle(draft_of(state), made))


def _ends(query: Array, position: Array, lse: Array, cache: LayerStorage) -> tuple[Array, LayerStorage, Array, Array]:
    """Take a pass's first and last real token: the arguments of `mass_of`."""
    last = jnp.maximum(jnp.sum(position >= 0, axis=1, dtype=jnp.int32) - 1, 0)
    at = jnp.stack([jnp.zeros_like(last), last], axis=1)
    group = at[:, None, None]
    ends = jnp.take_along_axis(query, group[..., None], axis=3), jnp.take_along_axis(lse, group, axis=3)
    return ends[0], cache, jnp.take_along_axis(position, at, axis=1), ends[1]


def with_draft(state: Any, draft: Any) -> Any:
    """Put a later state of the draft into a layer's state; the layer's state is the draft's where they share storage."""
    return dataclasses.replace(state, draft=draft) if isinstance(state, Pair) else draft


def draft_of(state: Any) -> Any:
    """Return the draft's part of a layer's state."""
    return state.draft if isinstance(state, Pair) else state


def full_of(state: Any) -> SlotState:
    """Return Full's part of a layer's state."""
    return state.full if isinstance(state, Pair) else state


def _for_draft(inputs: Inputs) -> Inputs:
    """Give the draft its own shared state."""
    return dataclasses.replace(inputs, shared=inputs.shared.draft)


def _each(inputs: Inputs, change: Any) -> Inputs:
    """Apply ``change(array, axis of tokens, fill of padding)`` to every array that has tokens."""
    axes = {"query": (3, 0), "key": (2, 0), "value": (2, 0), "position": (1, -1), "tokens": (1, 0)}
    return dataclasses.replace(inputs, **{name: change(vars(inputs)[name], *how) for name, how in axes.items()})
