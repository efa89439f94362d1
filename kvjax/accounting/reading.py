"""The bytes that a method needs while prompts are read, and afterwards, in the order of passes that a prefill takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh

from kvjax.accounting.activations import finishing, observing, passing, rereading
from kvjax.accounting.phases import Part, Phases, add_parts
from kvjax.decoding.layer_bytes import LayerBytes, Stored, each_device, layer_bytes, placed_bytes
from kvjax.decoding.layers import init_shared, layer_specs
from kvjax.decoding.reading_order import Order, reading_spec
from kvjax.protocol.method import LayerMethod, LayerSpec, Method
from kvjax.protocol.typing import Model, layer_recurrence, layer_ropes, layered, not_none


@dataclasses.dataclass(frozen=True)
class Reading:
    """A prefill on a device.

    Attributes:
        model: the description of the device's part of the model.
        order: of the passes.
        batch: rows.
        sizes: ``max_new_tokens``, the devices that divide the slots of a row, and ``kv_dtype``.
        mesh: the devices, or None.
        params: shapes of the device's parameters, or None.
    """

    model: Model
    order: Order
    batch: int
    sizes: tuple
    mesh: Mesh | AbstractMesh | None
    params: Any

    def phases(self, method: Method, methods: Sequence[LayerMethod], shares: bool) -> Phases:
        """Compute what a method needs.

        Args:
            method: the method.
            methods: of its layers.
            shares: whether its storage may be that of other methods too.
        """
        order, rows = self.order, self.order.rows if self.order.apart else self.batch
        specs = layer_specs(methods, self.model, rows, order.slots, *self.sizes)
        kinds: list[Hashable] = [
            (jax.tree.structure(one), *of_layer)
            for one, *of_layer in zip(methods, specs, layer_ropes(self.model), layer_recurrence(self.model), strict=True)
        ]
        first = {kind: at for at, kind in reversed(list(enumerate(kinds)))}  # layers of one kind need the same
        known = {
            at: layer_bytes(methods[at], reading=reading_spec(specs[at], order), spec=specs[at], mesh=self.mesh)
            for at in first.values()
        }
        places = [first[kind] for kind in kinds]
        layers = [known[at] for at in places]
        after = [_part(one.kept, at, shares, self.batch, rows) for at, one in enumerate(layers)]
        in_turn = order.by == "layers" or (order.chunks == 1 and not method.reread_tokens(order.slots))
        reading = add_parts([*after[order.waiting :], *self._read(layers, in_turn, shares)])
        hosts = [one.reading.host for one in layers]
        # Rows in host memory stay where they are when a layer is finished.
        host = max(hosts) if in_turn else sum(hosts)
        if order.by == "layers" and order.offloaded:  # what is finished, what waits, and hidden states
            host += add_parts(after).host + add_parts(after[: order.waiting]).alone + self._hidden()
        reading, hidden = dataclasses.replace(reading, host=host), 0 if order.offloaded else self._hidden()
        taken = self._pass(method, methods, list(known))
        if not order.apart:  # a pass takes its row out of one layer, and puts it back
            taken += max(one.reading.device for one in layers) // self.batch
        ended, observed, shared = self._end(method, methods, specs, places)
        kept = add_parts([*after, Part(shared * self.batch // rows, 0)])
        # The state that layers share is made when all rows are finished.
        beside = observed * self.batch // rows - max(reading.alone - kept.alone, 0)
        return Phases(reading=reading, after=kept, staged=max(hidden + max(ended, taken), beside))

    def _end(
        self, method: Method, methods: Sequence[LayerMethod], specs: Sequence[LayerSpec], places: Sequence[int]
    ) -> tuple[int, int, int]:
        """Estimate what the end of the prompt takes besides states.

        Returns:
            Bytes while the prompt is read again and layers are finished; while `Method.observe` runs; and of the state that
            layers share, after it.
        """
        fixed = {"model": self.model, "mesh": self.mesh}

        def init(at: int) -> Any:
            spec = reading_spec(specs[at], self.order)
            return jax.eval_shape(each_device(None if spec.parts == 1 else self.mesh, lambda: methods[at].init(spec)))

        begun = {at: init(at) for at in set(places)}
        states, again = tuple(begun[at] for at in places), 0
        shared = jax.eval_shape(each_device(self.mesh, lambda: init_shared(method, self.model, specs)))
        if self.params is not None and (padded := self.order.slots) and method.reread_tokens(padded):
            again, states = rereading(method, self.params, states, shared, specs=specs, padded=padded, **fixed)
        more = placed_bytes(states)[0] - sum(placed_bytes(begun[at])[0] for at in places)
        ends = {
            at: finishing(
                methods[at], states[at], reading=reading_spec(specs[at], self.order), spec=specs[at],
                mesh=None if specs[at].parts == 1 else self.mesh,
            )
            for at in begun
        }  # fmt: skip
        ended = more + max(again, *(size for size, _ in ends.values()))
        if shared is None:
            return ended, 0, 0
        finished = tuple(ends[at][1] for at in places)
        return ended, *observing(method, finished, shared, rows=specs[0].batch, **fixed)

    def _read(self, layers: Sequence[LayerBytes], in_turn: bool, shares: bool) -> list[Part]:
        """List what exists beside all finished rows, at the peak; ``in_turn`` if only one layer's whole prompt exists."""
        grouped = self.order.apart and self.order.groups > 1  # a group's states are put into the states of all rows
        # What a finished state still has of the state before is among the finished rows, if these are the rows that are read.
        # Storage that methods share has the same name before and after.
        same = [0 if grouped else one.same - (one.kept.common if shares else 0) for one in layers]
        new = [one.made * grouped - less for one, less in zip(layers, same, strict=True)]
        read = [_part(one.reading, ("group", at) if grouped else at, shares) for at, one in enumerate(layers)]
        if not in_turn:
            return [*read, Part(sum(new), 0)]
        at = max(range(len(layers)), key=lambda at: layers[at].reading.device - same[at])
        return [read[at], Part(sum(new) if grouped and self.order.by == "chunks" else new[at], 0)]

    def _pass(self, method: Method, methods: Sequence[LayerMethod], chosen: Sequence[int]) -> int:
        """Estimate what a pass takes in any of the ``chosen`` layers."""
        order, model = self.order, self.model
        specs = [reading_spec(spec, order) for spec in layer_specs(methods, model, order.rows, order.slots, *self.sizes)]
        shared = jax.eval_shape(each_device(self.mesh, lambda: init_shared(method, model, specs)))
        start = 0 if order.chunks == 1 else None
        fixed = {"chunk": order.chunk, "start": start, "mesh": self.mesh}

        def one(at: int) -> int:
            state = jax.eval_shape(each_device(self.mesh, lambda: methods[at].init(specs[at])))
            return passing(methods[at], state, shared, self.params, spec=specs[at], at=(at, model), **fixed)

        return max(map(one, chosen))

    def _hidden(self) -> int:
        """Compute the bytes of the hidden states that wait for the next layer."""
        if self.order.by == "chunks":
            return 0
        width = not_none("model", layered(self.model)).hidden_size
        return self.order.rows * self.order.slots * width * jnp.dtype(self.model.dtype).itemsize


def _part(state: Stored, where: Hashable, shares: bool, batch: int = 1, rows: int = 1) -> Part:
    """Make the part of a state of ``rows`` rows for ``batch`` rows: every array has axis B first."""
    device, host, common = (size * batch // rows for size in (state.device, state.host, state.common))
    shared: dict[Hashable, int] = {(where, state.key): common} if shares and state.key is not None else {}
    return Part(device - sum(shared.values()), host, shared)
