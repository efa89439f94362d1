"""Prefill, traced: the passes in which the model runs on the prompts of a batch, and the caches that they make.

A pass has some rows, and some tokens of each row. It takes at most ``chunk_size`` tokens (but see the last sentence), so the
memory of activations does not grow with the batch. A row's passes end with its last token: padding is not computed beyond a
row's last pass. All sizes are static and only the numbers of passes are traced, so one program serves all lengths. A row's
storage depends on no other row, so the order of the passes changes no result. `reading_order` chooses the order:

* If all rows fit one pass, they are prefilled together.
* Else groups of rows are prefilled one after the other. Each group is finished (compressed, indexed) before the next group
  begins, so the storage of a whole prompt exists for one group only. If a prompt has several chunks, this needs every layer
  to evict.
* Where a layer keeps its prompt, storage for one more group would be too much. There each pass takes its row out of the
  storage of all rows, one layer after the other, and puts it back. Such a copy moves ``4 * H * S * D`` values: keys and
  values, both ways. In the shape of an 8B model with 32K slots it takes 0.16 ms on an H100 for each layer and pass, and the
  computation for 1024 tokens takes 1.5 ms or more.
* All rows are prefilled together where a layer is offloaded, or where a pass has room for a method's own blocks of several
  rows and a layer keeps its prompt. A pass then has ``chunk_size`` tokens, or one block, of each row, up to the end of the
  longest row.

A method's own block is never split, even if it has more than ``chunk_size`` tokens.

A pass may also have one layer alone. A prompt of several chunks is read **layer by layer** where that takes less memory: the
first layer reads all chunks, and its hidden states, ``S * E`` values of each row, stay on the device; then the layer is
finished, its storage is free, and the next layer reads the hidden states and writes its own in their place. So the keys and
values of a whole prompt exist for one layer of one group only, and where a layer keeps its prompt, rows need not be taken out
of the storage of all. The model has to run one layer alone (`kvjax.protocol.typing.LayeredModel`). A method that reads the
prompt twice (`Method.reread`) needs all layers at the prompt's end; nothing else in a prefill looks across layers. Results
are equal up to rounding: the last update of a layer is added to the hidden states before the next layer begins.

Where layers go to host memory, hidden states wait there, and so do the first finished layers with all that they keep on the
device (`Order.waiting`), until the program has ended: else a layer's keys and values would come on top of it.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from kvjax.cache import Cache, LayerSpec
from kvjax.decoding.layers import fingerprint, init_shared, layer_methods, layer_specs, observe
from kvjax.decoding.passes import Pass, checked, last_logits, put_rows, reread, row_of
from kvjax.decoding.reading_order import By, Order, chosen_order, reading_spec
from kvjax.decoding.shared_storage import Common, barrier, common_storage, finish, stored_alone
from kvjax.protocol.method import LayerMethod, Method
from kvjax.protocol.typing import Model, attention_soft_cap, is_recurrent, layered, not_none, position_option
from pallas_kernels import axes
from pallas_kernels.host import on_host, to_device, to_host
from pallas_kernels.numerics import bounded_loop, made_after
from pallas_kernels.soft_cap import soft_cap


def run_prefill(params: Any, tokens: Array, length: Array, method: Method, **sizes: Any) -> Cache:
    """Run `run_prefill_each` for one method, and bring back what waits."""
    (cache,) = run_prefill_each(params, tokens, length, (method,), **sizes)
    return brought_back(cache)


def brought_back(cache: Cache) -> Cache:
    """Bring layers that wait in host memory (`Order.waiting`) to the device, but for what they keep there."""
    methods = layer_methods(cache.method, cache.model)
    specs, shapes = layer_specs(methods, cache.model, 1, 1, 1, kv_dtype=cache.kv_dtype), {}
    layers = list(cache.layers)
    for layer, (method, spec) in enumerate(zip(methods, specs, strict=True)):
        if not all(map(on_host, jax.tree.leaves(layers[layer]))):
            break
        kind = jax.tree.structure(method), spec
        if kind not in shapes:
            shapes[kind] = jax.eval_shape(lambda method, spec=spec: method.finish(method.init(spec), spec), method)
        layers[layer] = jax.tree.map(lambda x, own: x if on_host(own) else to_device(x), layers[layer], shapes[kind])
    return dataclasses.replace(cache, layers=tuple(layers))


def run_prefill_each(
    params: Any,
    tokens: Array,
    length: Array,
    methods: Sequence[Method],
    *,
    model: Model,
    max_new_tokens: int,
    chunk_size: int,
    parts: int = 1,
    kv_dtype: str | None = None,
    order: By | None = None,
    inputs: tuple[Array, ...] = (),
) -> tuple[Cache, ...]:
    """Prefill right-padded tokens int32 [B, T] of length int32 [B]; see `brought_back`.

    ``parts`` devices divide the slots of each row. The model runs once, however many methods there are, and once more for
    each method with `Method.reread`. Several methods all have `Method.dense_prompt`: their attention outputs are the same, so
    one output is used and XLA leaves out all other outputs. ``inputs`` are those of `kvjax.api.prefill.prefill_each`.
    """
    batch, padded = tokens.shape
    each = tuple(layer_methods(method, model) for method in methods)
    sizes = {"max_new_tokens": max_new_tokens, "parts": parts, "kv_dtype": kv_dtype}
    chosen = chosen_order(methods, each, model, batch, padded, **sizes, chunk_size=chunk_size, order=order)
    known = inputs if chosen.apart and inputs and inputs[0].shape[1] == chosen.slots else ()
    run = Run(params, tuple(methods), each, model, padded, tuple(sizes.values()), chosen, known)
    tokens = jnp.pad(tokens, ((0, 0), (0, run.order.slots - padded)))
    every = run.sized(batch)
    with soft_cap(attention_soft_cap(model)):
        states, logits = (run.whole if run.order.groups == 1 else run.in_groups)(tokens, length, every)
    weights = fingerprint(params)
    return tuple(
        observe(
            Cache(
                layers=tuple(layer[at] for layer in states),
                shared=every.shared[at],
                method=method,
                length=length,
                logits=logits,
                model=model,
                weights=weights,
                kv_dtype=kv_dtype,
            ),
            decoding=False,
        )
        for at, method in enumerate(methods)
    )


@dataclasses.dataclass(frozen=True)
class Sized:
    """Per-batch-size data of a prefill: layer specs and shared state."""

    rows: int
    specs: tuple[tuple[LayerSpec, ...], ...]  # [method][layer]
    shared: tuple  # the state that all layers share, of each method
    common: Common  # the storage that methods have in common, until they are finished


@dataclasses.dataclass(frozen=True)
class Run:
    """One prefill of a batch. States are tuples ``[layer][method]``, whose leaves have axis B first."""

    params: Any
    methods: tuple[Method, ...]
    each: tuple[tuple[LayerMethod, ...], ...]  # [method][layer]
    model: Model
    padded: int
    sizes: tuple  # `max_new_tokens`, `parts`, `kv_dtype`
    order: Order
    inputs: tuple[Array, ...] = ()  # hidden states [B, S, E] before each layer and behind the last, where they are known

    @property
    def within(self) -> list[bool]:
        """For each method, whether a layer is finished as soon as it has attended.

        It is if the prompt has one chunk and is not reread: then only one layer's full keys exist at a time.
        """
        early = self.order.chunks == 1 and not self.inputs
        return [early and not method.reread_tokens(self.padded) for method in self.methods]

    def sized(self, rows: int) -> Sized:
        specs = tuple(layer_specs(layers, self.model, rows, self.order.slots, *self.sizes) for layers in self.each)
        shared = tuple(init_shared(method, self.model, own) for method, own in zip(self.methods, specs, strict=True))
        common = common_storage(self.each, specs, [stored_alone(method, self.padded) for method in self.methods])
        return Sized(rows=rows, specs=specs, shared=shared, common=common)

    def begun(self, sized: Sized) -> tuple:
        """Make empty states, stripped."""
        return tuple(self._begun_layer(layer, sized) for layer in range(self.model.num_layers))

    def _begun_layer(self, layer: int, sized: Sized) -> tuple:
        # Where only one layer is read at a time, the device holds its keys and values until its end, offloaded or not.
        specs = tuple(reading_spec(own[layer], self.order) for own in sized.specs)
        empty = tuple(layers[layer].init(spec) for layers, spec in zip(self.each, specs, strict=True))
        return sized.common.strip_layer(layer, empty)

    def whole(self, tokens: Array, length: Array, sized: Sized, rows: Array | None = None) -> tuple[tuple, Array]:
        """Prefill rows together; return their finished states and their logits float32 [B, V]."""
        if self.order.by == "layers":
            waiting = self.order.waiting
            return self.in_layers(
                tokens, length, sized, lambda layer, made: jax.tree.map(to_host, made) if layer < waiting else made
            )
        if not self.inputs:
            states, logits = self.read(tokens, length, self.begun(sized), sized)
            return self.finished(tokens, length, states, sized, logits), logits
        hidden = [x if rows is None else x[rows] for x in self.inputs]
        states = tuple(
            self.read_layer(at, x, tokens, length, sized, embeds=False, onward=False)[1] for at, x in enumerate(hidden[:-1])
        )
        logits = last_logits(self.params, hidden[-1], length, model=self.model)
        return self.finished(tokens, length, sized.common.restore(states), sized, logits), logits

    def in_groups(self, tokens: Array, length: Array, every: Sized) -> tuple[tuple, Array]:
        """Prefill all rows group by group, rows of similar length in one group; return finished states and logits."""
        order = self.order
        by_length = jnp.argsort(length, descending=True).astype(jnp.int32)
        logits = jnp.zeros((len(length), self.model.vocab_size), jnp.float32)
        group = self.sized(order.rows)
        if order.apart:
            blank, kept = self.blank(every)
            states = kept.strip(jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), blank))
        else:
            states = self.begun(every)

        def body(index: Array, carry: tuple) -> tuple:
            states, logits = carry
            # The last group begins earlier if the batch has no whole groups: its first rows are prefilled twice.
            rows = lax.dynamic_slice_in_dim(by_length, index * order.rows, order.rows)
            own = tokens[rows], length[rows]
            if order.by == "layers":

                def put(layer: int, made: tuple) -> tuple:
                    return put_rows(states[layer], kept.strip_layer(layer, made), rows)

                made, new = self.in_layers(*own, group, put)
                return made, put_rows(logits, new, rows)
            if order.apart:
                made, new = self.whole(*own, group, rows)
                return put_rows(carry, (kept.strip(made), new), rows)
            states, new = self.read(*own, states, dataclasses.replace(group, shared=row_of(every.shared, rows[0])), rows)
            return states, put_rows(logits, new, rows)

        states, logits = lax.fori_loop(0, order.groups, body, (states, logits))
        return kept.restore(states) if order.apart else self.finished(tokens, length, states, every, logits), logits

    def in_layers(
        self, tokens: Array, length: Array, sized: Sized, put: Callable[[int, tuple], tuple]
    ) -> tuple[tuple, Array]:
        """Prefill rows layer by layer: each layer reads all chunks, and is finished before the next layer begins.

        Only one layer's full keys exist at a time. Between layers there are the hidden states of the whole prompt.

        Args:
            tokens: int32 [R, S].
            length: int32 [R].
            sized: of these rows.
            put: stores a layer's finished states [method], and returns what stands for them.

        Returns:
            What ``put`` returned for each layer, and logits float32 [R, V].
        """
        model, stored = not_none("model", layered(self.model)), []
        hidden = jnp.zeros((*tokens.shape, model.hidden_size), model.dtype)
        if self.order.offloaded:
            hidden = to_host(hidden)
        for layer in range(model.num_layers):
            hidden, states = self.read_layer(layer, hidden, tokens, length, sized, layer == 0)
            if layer == model.num_layers - 1:
                last = jnp.maximum(length - 1, 0)
                hidden = jnp.concatenate([_piece(hidden, last[row], 1, row) for row in range(len(tokens))])
            states = sized.common.restore_layer(layer, states)
            made = zip(self.each, states, sized.specs, strict=True)
            kept = put(layer, tuple(finish(layers[layer], state, own[layer]) for layers, state, own in made))
            # The storage of this layer is free before that of the next is made.
            hidden, kept = barrier((hidden, kept))
            stored.append(kept)
        logits = model.head(self.params, hidden[:, 0])
        logits, states = checked(self.model, len(tokens), len(stored), (logits, tuple(stored)))
        return states, jnp.where((length > 0)[:, None], logits, 0)

    def read_layer(
        self, layer: int, hidden: Array, tokens: Array, length: Array, sized: Sized, embeds: bool, onward: bool = True
    ) -> tuple[Any, tuple]:
        """Run one layer on all chunks of hidden states [R, S, E]; return those behind it, and its states, stripped.

        With ``embeds`` it reads the tokens. Without ``onward`` nothing is behind it, and XLA leaves out attention and MLP.
        """
        model, order, common = not_none("model", layered(self.model)), self.order, sized.common

        def body(index: Array | int, carry: tuple, operands: tuple) -> tuple:  # over nothing traced, see `run_if`
            (hidden, states), (params, each, shared, length, tokens, before) = carry, operands
            piece, part = (_piece(x, index * order.chunk, order.chunk) for x in (tokens, hidden if onward else before))
            now = Pass.at(jnp.int32(index * order.chunk), piece, length, each, shared)  # no integer under `disable_jit`
            if embeds:
                part = model.embed(params, piece, **position_option(model, now.position))
            elif onward:  # what is written must not be computed from what it takes the place of
                hidden, part = barrier((hidden, part))

            def attend(layer: int, states: tuple, *given: Any, sinks: Array | None = None) -> tuple[Array, tuple]:
                whole = common.restore_layer(layer, states)
                out, whole = now.attend(model, layer, whole, given, sinks, common)
                return out, common.strip_layer(layer, whole)

            part, states = model.run_layer(params, layer, part, attend, states)
            part = to_host(part) if order.offloaded else part
            return lax.dynamic_update_slice_in_dim(hidden, part, index * order.chunk, 1) if onward else None, states

        begun, before = made_after(hidden, self._begun_layer(layer, sized)), None if onward else hidden
        operands = self.params, self.each, sized.shared, length, tokens, before
        return self._each_chunk(body, (hidden if onward else None, begun), operands, length)

    def _each_chunk(self, body: Callable, carry: tuple, operands: tuple, length: Array) -> tuple:
        """Run ``carry = body(chunk, carry, operands)`` for each chunk of the longest of some rows of ``length`` int32 [R]."""
        most = self.order.chunks
        if self.order.groups == 1:
            return lax.fori_loop(0, most, functools.partial(body, operands=operands), carry)
        # Devices that have other rows run the same number of passes.
        count = -(-axes.most(jnp.max(length), axes.DATA) // self.order.chunk)
        return bounded_loop(body, most, count, carry, operands)

    def blank(self, sized: Sized) -> tuple[tuple, Common]:
        """Return the shapes of finished states, and the storage that they have in common."""
        found: list[Common] = []

        def blank() -> tuple:
            begun = sized.common.restore(self.begun(sized))
            finished = self._compressed(begun, sized, [False] * len(self.methods), in_turn=False)
            found.append(sized.common.after(begun, finished))
            return finished

        return jax.eval_shape(blank), found[0]

    def read(
        self, tokens: Array, length: Array, states: tuple, sized: Sized, rows: Array | None = None
    ) -> tuple[tuple, Array]:
        """Run all passes over tokens int32 [R, T] of length int32 [R] of some rows; return their states and logits.

        ``states`` has these rows alone; or it has all rows, and ``rows`` int32 [1] is the index of the one row. States are
        stripped, before and after; but after a prompt of one chunk they are whole.
        """
        order, model, within, common, specs = self.order, self.model, self.within, sized.common, sized.specs

        def read(start: Array | int, carry: tuple, operands: tuple) -> tuple[tuple, Array]:  # as `body` above
            (states, logits), (params, each, all_shared, length, rows, piece) = carry, operands
            now = Pass.at(start, piece, length, each, all_shared)
            last = length - 1 - start

            def attend(layer: int, states: tuple, *given: Any, sinks: Array | None = None) -> tuple[Array, tuple]:
                if rows is not None and not is_recurrent(model, layer):
                    # Else XLA takes a row out of all layers before it puts any back.
                    given, states = barrier((given, states))
                mine = common.restore_layer(layer, states if rows is None else row_of(states, rows[0]))
                out, new = now.attend(model, layer, mine, given, sinks, common)
                if order.chunks > 1:
                    new = common.strip_layer(layer, new)
                    return out, new if rows is None else put_rows(states, new, rows)
                if not any(within) or is_recurrent(model, layer):
                    return out, new
                finished = tuple(
                    finish(layers[layer], state, spec[layer]) if early else state
                    for layers, state, spec, early in zip(each, new, specs, within, strict=True)
                )
                # A layer is finished before the next begins. Else XLA finishes all layers at once, where they share a
                # mask: in one kernel, which takes minutes to compile, after the keys of all layers have been made.
                return barrier((out, finished))

            options = position_option(model, now.position)
            made = model.apply(params, piece, attend, states, last=jnp.clip(last, 0, order.chunk - 1), **options)
            new, states = checked(model, len(piece), model.num_layers, made)
            return states, jnp.where(((last >= 0) & (last < order.chunk))[:, None], new, logits)

        carry = states, jnp.zeros((len(length), model.vocab_size), jnp.float32)
        operands = self.params, self.each, sized.shared, length, rows, tokens
        if order.chunks == 1:
            return read(0, carry, operands)

        def body(index: Array, carry: tuple, operands: tuple) -> tuple:
            *others, tokens = operands
            piece = lax.dynamic_slice_in_dim(tokens, index * order.chunk, order.chunk, 1)
            return read(jnp.int32(index * order.chunk), carry, (*others, piece))

        return self._each_chunk(body, carry, operands, length)

    def finished(self, tokens: Array, length: Array, states: tuple, sized: Sized, logits: Array) -> tuple:
        """Complete the states after the last token: reread the prompt where a method does, then finish unfinished states."""
        if self.order.chunks > 1:
            states = sized.common.restore(states)
        every, known = list(zip(*states, strict=True)), dict[Hashable, Any]()  # every[method][layer]
        for at, method in enumerate(self.methods):
            if method.reread_tokens(self.padded):
                given = method, self.each[at], every[at], sized.shared[at], self.model, logits, known
                every[at] = reread(self.params, tokens, length, *given)
        states = tuple(zip(*every, strict=True))
        return states if all(self.within) else self._compressed(states, sized, self.within)

    def _compressed(self, states: tuple, sized: Sized, done: list[bool], in_turn: bool = True) -> tuple:
        """Finish the states, except for the methods that are ``done``; one layer after the other if ``in_turn``."""
        finished: list[tuple] = []
        for layer, state in enumerate(states):
            if finished and in_turn:  # all offloaded layers together may not fit the device
                state, finished[-1] = barrier((state, finished[-1]))
            finished.append(
                tuple(
                    one if early else finish(layers[layer], one, own[layer])
                    for layers, one, own, early in zip(self.each, state, sized.specs, done, strict=True)
                )
            )
        return tuple(finished)


def _piece(x: Array, start: Array | int, size: int, row: int | None = None) -> Array:
    """Slice ``size`` tokens from ``start`` on out of x [B, S, ...] in either memory, of one row or of all."""
    rows = (0, len(x)) if row is None else (row, 1)
    begin = (rows[0], start, *(0 for _ in x.shape[2:]))
    return to_device(lax.dynamic_slice(x, begin, (rows[1], size, *x.shape[2:]), allow_negative_indices=False))
