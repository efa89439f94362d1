"""Wrappers: methods made of other methods.

A wrapper has its inner methods in fields and calls them. It does not ask for their class, only for their declarations. It
answers every declaration as its inner methods do (`answers`), except declarations that its own class states. It `passes` on
the hooks that it does not change.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, cast

import jax.numpy as jnp
from jax import Array

from kvjax.attention.over_cache import Selection
from kvjax.cache import LayerCache, LayerStorage
from kvjax.protocol.fields import shown
from kvjax.protocol.method import LayerMethod, Method, Prompt, Step, check_method, declarations
from kvjax.protocol.slots import Reads, SlotMethod, count_all
from kvjax.protocol.typing import pytree, static, traced


class Answer(property):
    """A declaration that a wrapper answers as one of the methods in some of its fields does."""


def answers[T: type[Method]](*fields: str, names: Sequence[str] = (), every: bool = False) -> Callable[[T], T]:
    """Make a class decorator: the class answers declarations (`kvjax.protocol.method.declarations`) as its inner methods do.

    What the class states itself stays: a class attribute, a property, or a dataclass field. So a new declaration needs
    nothing in the wrappers, except in one that answers it in another way.

    Args:
        *fields: the fields with the inner methods; a field may have a dict of methods. With several methods the answer is the
            first true one, or the last method's answer if none is true: a wrapper needs what any of its methods needs.
        names: the declarations; none means all that the class does not state itself.
        every: True: with several methods the answer is the first false one, or the last method's answer if all are true.
    """

    def decorate(kind: T) -> T:
        stated = {*vars(kind), *(field.name for field in dataclasses.fields(kind))}
        for name in names or [name for name in declarations(kind) if name not in stated]:
            setattr(kind, name, _answer(kind, name, fields, every))
        return kind

    return decorate


def passes[T](field: str, hook: T) -> T:
    """Make a hook of a wrapper that calls the inner method's hook.

    A wrapper writes ``compress = passes("method", SlotMethod.compress)``.

    Args:
        field: the wrapper's field with the inner method, which gets the arguments as they are.
        hook: the function of the protocol; the made one has its name and its docstring.
    """
    name = cast("Any", hook).__name__

    @functools.wraps(cast("Any", hook))
    def ask(self: Method, *args: Any, **named: Any) -> Any:
        return getattr(vars(self)[field], name)(*args, **named)

    vars(ask).pop("__isabstractmethod__", None)  # of the wrapped hook
    return cast("T", ask)


def _answer(kind: type[Method], name: str, fields: Sequence[str], every: bool) -> property:
    def ask(self: Method) -> Any:
        answer = None
        for method in _methods(self, fields):
            answer = getattr(method, name)
            if bool(answer) != every:
                break
        return answer

    first = next(base for base in reversed(kind.__mro__) if name in vars(base))
    told = f"See `{first.__module__}.{first.__name__}.{name}`; the answer of {' or '.join(fields)}."
    return property(ask, doc=told) if every else Answer(ask, doc=told)


def _methods(wrapper: Method, fields: Sequence[str]) -> Iterator[Method]:
    for field in fields:
        value = vars(wrapper)[field]
        yield from value.values() if isinstance(value, dict) else (value,)


@answers("layers", "default")
@answers("layers", "default", names=("extrapolates", "dense_prompt", "moves_slots"), every=True)
@pytree
class PerLayer(Method):
    """Other methods for some layers, and a default for the rest. A layer of the model with a sliding window keeps its window.

    Example: ``PerLayer(layers={0: Full(), 1: Full()}, default=SnapKV(budget=512))``.
    """

    layers: dict[int, Method] = traced("by layer index; negative counts from the last layer")
    default: Method = traced("for layers that are not in `layers`")

    keeps = "what the methods of the layers keep"

    def check(self) -> None:
        if not isinstance(self.layers, dict):
            raise ValueError(f"PerLayer: layers must map layer indices (int) to methods, got {shown(self.layers)}")
        wrong = [index for index in self.layers if type(index) is not int]
        if wrong:
            raise ValueError(f"PerLayer: layers must map layer indices (int) to methods, got key {wrong[0]!r}")
        for method in (self.default, *self.layers.values()):
            if check_method("PerLayer: each entry and default", method).spans_layers:
                raise ValueError(
                    f"PerLayer: {type(method).__name__} chooses for all layers at once and cannot run in some only"
                )

    @property
    def lacks(self) -> tuple[str, ...]:
        return tuple({name: None for method in _methods(self, ("layers", "default")) for name in method.lacks})

    def offloaded(self, share: float) -> Method | None:
        made = {index: method.offloaded(share) for index, method in self.layers.items()}
        default = self.default.offloaded(share)
        if default is None and not any(made.values()):
            return None
        layers = {index: made[index] or method for index, method in self.layers.items()}
        return PerLayer(layers=layers, default=default or self.default)

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        outside = [index for index in self.layers if not -num_layers <= index < num_layers]
        if outside:
            raise ValueError(f"PerLayer: layer {outside[0]} does not exist, the model has {num_layers} layers")
        by_index = {index % num_layers: method for index, method in self.layers.items()}
        if len(by_index) < len(self.layers):
            raise ValueError(
                f"PerLayer: layers must name each layer once, got {sorted(self.layers)} for a model of {num_layers} layers"
            )
        return by_index.get(layer, self.default).for_layer(layer, num_layers)


@answers("evict", "retrieve")
@answers("retrieve", names=("selects", "keys_stay", "needs_guess", "offload"))
@pytree
class Stages(SlotMethod):
    """Evict first, then retrieve from the slots that are left: ``Stages(evict=SnapKV(...), retrieve=Quest(...))``.

    The metadata of the second method is made from the compressed cache, so it has no evicted slot. The second method may
    also keep every slot in fewer bytes: ``Stages(evict=SnapKV(...), retrieve=ThinK())``.

    A method that stores keys in channels of its own can only come last (ValueError).
    """

    evict: SlotMethod = traced("compresses the prompt")
    retrieve: SlotMethod = traced("selects in each step among the slots that are left")

    keeps = "what `evict` keeps"

    near = passes("retrieve", SlotMethod.near)
    reread_tokens = passes("evict", SlotMethod.reread_tokens)
    reread = passes("evict", SlotMethod.reread)

    def check(self) -> None:
        evict, retrieve = (slot_method(f"Stages: {role}", vars(self)[role]) for role in ("evict", "retrieve"))
        if evict.offload:
            raise ValueError(
                f"Stages: offload belongs to retrieve, whose cache it is; got evict with offload={evict.offload!r}"
            )
        if evict.moves_slots:
            raise ValueError(
                f"Stages: {type(evict).__name__} moves slots while decoding, which would leave the index "
                f"of {type(retrieve).__name__} stale; evict must be a method that only compresses"
            )
        if retrieve.evicts:
            raise ValueError(f"Stages: retrieve must keep every slot it is given, but {type(retrieve).__name__} evicts")
        if retrieve.spans_layers:
            raise ValueError(f"Stages: retrieve must choose in each layer alone, {type(retrieve).__name__} chooses for all")
        if evict.packs:
            name = type(evict).__name__
            other = "evict must keep whole keys" if evict.evicts else f"it must come last: retrieve={name}()"
            raise ValueError(f"Stages: {name} stores keys in channels of its own, which no method can read; {other}")
        first = {evict.reads.moments_from, retrieve.reads.moments_from} - {None}
        if len(first) > 1:
            raise ValueError(f"Stages: evict and retrieve must have one moments_from, got {sorted(map(str, first))}")

    @property
    def obs_window(self) -> int:
        return max(self.evict.obs_window, self.retrieve.obs_window)

    @property
    def reads(self) -> Reads:
        return self.evict.reads | self.retrieve.reads

    @property
    def slot_block(self) -> int | None:
        return self.evict.slot_block if self.evict.evicts else None  # each device retrieves from all that was kept

    def offloaded(self, share: float) -> Method | None:
        retrieve = self.retrieve.offloaded(share)
        return None if retrieve is None else dataclasses.replace(self, retrieve=retrieve)

    @property
    def lacks(self) -> tuple[str, ...]:
        return (*self.evict.lacks, *self.retrieve.lacks)

    def compress(self, cache: LayerCache, prompt: Prompt, room: int) -> tuple[LayerStorage, tuple[Any, ...]]:
        cache, first = self.evict.compress(cache, prompt, room)
        cache, second = self.retrieve.compress(cache, prompt, room)
        return cache, (first, second)

    def select(self, cache: LayerStorage, aux: tuple[Any, ...], step: Step) -> Selection | None:
        return self.retrieve.select(cache, aux[1], step)

    def update(
        self, cache: LayerStorage, aux: tuple[Any, ...], step: Step, mass: Array | None
    ) -> tuple[LayerStorage, tuple[Any, ...]]:
        cache, first = self.evict.update(cache, aux[0], step, mass)
        cache, second = self.retrieve.update(cache, aux[1], step, mass)
        return cache, (first, second)

    def count(self, cache: LayerStorage, aux: tuple[Any, ...], shared: Any) -> tuple[Array, Array]:
        return self.retrieve.count(cache, aux[1], shared)

    def counters(self, aux: tuple[Any, ...], shared: Any) -> dict[str, Array]:
        return {**self.evict.counters(aux[0], shared), **self.retrieve.counters(aux[1], shared)}

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return Stages(
            evict=inner_of_layer(self.evict, layer, num_layers), retrieve=inner_of_layer(self.retrieve, layer, num_layers)
        )


@pytree
class Around(SlotMethod):
    """A wrapper around one slot method. Its final classes answer as ``method`` does: ``@answers("method")``."""

    method: SlotMethod = traced("the method inside")

    near = passes("method", SlotMethod.near)

    def offloaded(self, share: float) -> Method | None:
        method = self.method.offloaded(share)
        return None if method is None else dataclasses.replace(self, method=method)


@answers("method")
@pytree
class DenseBelow(Around):
    """Attend to all tokens in rows of at most ``length`` tokens. In longer rows attend as ``method`` selects.

    Each row decides in each step, so a row that grows beyond ``length`` starts to select there.
    """

    length: int = static("tokens; the selection has room for this number", least=1)

    keeps = "what `method` keeps"

    compress = passes("method", SlotMethod.compress)
    update = passes("method", SlotMethod.update)
    counters = passes("method", SlotMethod.counters)

    def check(self) -> None:
        if slot_method("DenseBelow: method", self.method).evicts:
            raise ValueError(
                f"DenseBelow: {type(self.method).__name__} discards slots, which cannot be undone below a "
                f"length; raise its budget to {self.length} instead"
            )
        if self.method.packs:
            raise ValueError(
                f"DenseBelow: {type(self.method).__name__} stores keys in channels of its own, which cannot be undone below "
                "a length"
            )

    def select(self, cache: LayerStorage, aux: Any, step: Step) -> Selection | None:
        chosen = self.method.select(cache, aux, step)
        if chosen is None or self.length >= cache.row_slots:
            return None
        slots, mask = chosen.tokens(cache)
        held = min(self.length, cache.num_slots)  # a device may have fewer slots
        size = max(held, slots.shape[2])
        grow, more = ((0, 0), (0, 0), (0, size - slots.shape[2])), ((0, 0), (0, 0), (0, size - held))
        everything = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32) % held, (*slots.shape[:2], size))
        short, bias = self._short(cache)[..., None], chosen.bias
        return Selection(
            slots=jnp.where(short, everything, jnp.pad(slots, grow)),
            mask=jnp.where(short, jnp.pad(cache.valid[:, :, :held], more), jnp.pad(mask, grow)),
            bias=None if bias is None else jnp.where(short[:, :, None], 0, jnp.pad(bias, ((0, 0), *grow))),
            select_aux=chosen.select_aux,
        )

    def count(self, cache: LayerStorage, aux: Any, shared: Any) -> tuple[Array, Array]:
        stored, _ = count_all(cache)
        chosen, metadata = self.method.count(cache, aux, shared)
        return jnp.where(self._short(cache), stored, chosen), metadata

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        return DenseBelow(length=self.length, method=inner_of_layer(self.method, layer, num_layers))

    def _short(self, cache: LayerStorage) -> Array:
        """Mark the rows that still attend to all tokens, bool [B, 1]."""
        return (cache.cursor <= self.length)[:, None]


def slot_method(role: str, value: Any, weighs: bool = False) -> SlotMethod:
    """Return ``value`` if it is a method that chooses slots, and does no more.

    Args:
        weighs: True: it may also estimate tokens or correct logits, because the wrapper leaves each step to it.

    Raises:
        ValueError: ``value`` is another method, or none.
    """
    method = check_method(role, value)
    if method.slotted and method.spans_layers and not method.composable and not weighs:
        raise ValueError(
            f"{role} must choose in each layer alone, got {type(value).__name__}, which must be the outer wrapper"
        )
    if not (method.slotted if weighs else method.composable):
        plain = "" if weighs else " and attends to these alone, with plain logits"
        raise ValueError(f"{role} must be a method that chooses cache slots (a SlotMethod){plain}, got {value!r}")
    if value.sparse_prompt is not None:
        raise ValueError(f"{role} must not prefill sparsely, got {type(value).__name__}, which must be the outer wrapper")
    return value


def inner_of_layer(method: SlotMethod, layer: int, num_layers: int) -> SlotMethod:
    """Return the inner method of one layer. The layers of a method that chooses slots choose slots too."""
    return cast("SlotMethod", method.for_layer(layer, num_layers))
