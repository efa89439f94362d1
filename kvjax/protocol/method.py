"""The method protocol: the functions of a KV-cache method for the whole model and for one layer.

A method is a frozen pytree of hyper-parameters with pure functions. A field made with `static` decides a shape, a branch or a
kernel; every other field is a traced leaf, which `jax.vmap` can sweep. The protocol has these classes:

* `Method` is for the whole model: it says which `LayerMethod` runs in which layer, and keeps state that all layers share.
* `LayerMethod` is for one layer: its storage and its attention. Subclass it for a method with storage or logits of its own.
* `kvjax.protocol.slots.SlotMethod` attends exactly to some slots of a `LayerCache`. It asks for four hooks: ``compress``,
  ``select``, ``update`` and ``count``. With `kvjax.protocol.families` most methods need only one or two functions.
* `kvjax.protocol.slots.BoundedSlots` is for methods that bound their storage from the first token of the prompt on.
"""

from __future__ import annotations

import abc
import dataclasses
import inspect
import math
from collections.abc import Callable, Hashable, Iterator, Mapping
from typing import Any, ClassVar, Self, cast, final

import jax
from jax import Array

from kvjax.attention.moments import Moments
from kvjax.cache import Cache, LayerStorage
from kvjax.cache import LayerSpec as LayerSpec
from kvjax.protocol.fields import check_fields, check_names, has_shares, shown
from kvjax.protocol.typing import Model, pytree, traced
from kvjax.rope import rotate


@pytree
class Inputs:
    """The arguments of one call of a layer's attention. A field that a method does not read costs nothing under jit."""

    query: Array  # [B, H, G, T, D], after `kvjax.rope.prepare` and before RoPE
    key: Array  # [B, H, T, D], after `kvjax.rope.prepare` and before RoPE
    value: Array  # [B, H, T, D]
    position: Array  # int32 [B, T]; EMPTY marks padding, which comes after the real tokens
    tokens: Array  # int32 [B, T], token ids
    inv_freq: Array  # float32 [D/2], RoPE angle per position, in radians
    shared: Any  # the method's shared state
    start: Array | int | None = None  # first position of a prompt chunk, the int 0 for a whole prompt; None after the prompt
    # [B, H, G, T, D], before RoPE: the guessed query, which is this layer's query projection applied to the previous layer's
    # attention input. Given in decode steps of a method with `LayerMethod.needs_guess`, in layers above 0; else None.
    guess: Array | None = None
    # With nudges (`Reading.apply`), else None: the layer's attention input [B, T, d], and the projection of attention's
    # output to the residual stream, [H, G, D, d].
    written: tuple[Array, Array] | None = None
    signal: Any = None  # `LayerMethod.signal` of the layer that `Method.source` names, in this decode step
    sinks: Array | None = None  # float32 [H, G], the layer's sink logits (`kvjax.attention.sinks`); None for a model without

    def rotated(self) -> tuple[Array, Array]:
        """Rotate the query and the key at their positions."""
        query = rotate(self.query, self.position[:, None, None], self.inv_freq)
        return query, rotate(self.key, self.position[:, None], self.inv_freq)

    def append_to[Storage: LayerStorage](self, cache: Storage) -> tuple[Array, Storage]:
        """Store the tokens, which come after the prompt, with rotated keys: return the rotated query, and the cache."""
        if self.query.shape[3] == 1:  # a kernel rotates and stores
            return cache.append_rotated(self.query, self.key, self.value, self.position, self.inv_freq)
        query, key = self.rotated()
        return query, cache.append(key, self.value, self.position)


@pytree
class Prompt:
    """A record of the prompt, for a method that compresses at its end. Unused parts have size zero."""

    query: Array = traced("[B, H, G, W, D], the last W rotated queries of each row, oldest first")
    query_position: Array = traced("int32 [B, W], EMPTY for queries before the prompt's first token")
    mass: Array = traced("float32 [B, H, S], attention probability that each slot received, summed over queries and group")
    tokens: Array = traced("int32 [B, S], token id of each slot")
    moments: Moments | None = traced("of the queries before RoPE; None unless the method `reads` them", default=None)
    kept: Array | None = traced("bool [B, H, S], slots that `Method.reread` keeps; None if there was no reread", default=None)
    asked: Any = traced("what `Method.reread` leaves for `compress` besides; None if nothing", default=None)
    length: Array | None = traced("int32 [B], tokens of each row; None before the prompt's end", default=None)


@dataclasses.dataclass(frozen=True)
class Reading:
    """The argument of `Method.reread`: a prompt, and the model, which can prefill further tokens after it."""

    tokens: Array  # int32 [B, S], token ids, padded on the right
    length: Array  # int32 [B], tokens of each row
    logits: Array  # float32 [B, V], of the token after the prompt
    eos_token_ids: tuple[int, ...]  # of the model
    # ``apply(states, tokens, count, attend) -> (states, logits)``: the model runs on ``tokens`` int32 [B, T] at the positions
    # after the prompt; the first ``count`` int32 [B] tokens are real. A layer calls ``attend(state, inputs) -> (out, state)``
    # with its entry of ``states``, whatever it is. Nothing is stored but what ``attend`` returns. The logits float32 [B, V]
    # are of the token after the last real one. A fifth argument ``nudges``, [B, T, d] of each of these layers, is added to
    # what attention adds to the residual stream. Then `Inputs` have ``written``, and in place of the logits comes the stream
    # [B, T, d] before the last norm. Only a model with ``can_probe`` takes nudges.
    apply: Callable[..., tuple[tuple[Any, ...], Array]]
    known: dict[Hashable, Any] = dataclasses.field(default_factory=dict)  # what methods of this prefill have found by `once`

    def once[Found](self, kind: Hashable, states: tuple[Any, ...], find: Callable[[], Found]) -> Found:
        """Return what ``find`` finds by reading again: once for all methods of a prefill with equal ``kind`` and storage."""
        at = kind, tuple(id(leaf) for state in states for leaf in jax.tree.leaves(state.cache))
        if at not in self.known:
            self.known[at] = find()
        return self.known[at]


@pytree
class Step:
    """The tokens that a decode step (T = 1) or an `extend` has just stored."""

    query: Array = traced("[B, H, G, T, D], rotated")
    position: Array = traced("int32 [B, T], EMPTY for padding and for inactive rows, which must not change anything")
    tokens: Array = traced("int32 [B, T], token ids")
    shared: Any = traced("the method's shared state")
    guess: Array | None = traced("[B, H, G, T, D], rotated; None where `Inputs.guess` is None", default=None)
    signal: Any = traced("as `Inputs.signal`", default=None)
    select_aux: Any = traced("in `update` of one token: what `select` put into `Selection.select_aux`", default=None)


@pytree
class Cost:
    """The cost of decoding one more token in one layer, per row. A slot that this token will evict does not count."""

    attended: Array  # float32 [B], tokens in the softmax, mean over KV heads
    kv_bytes: Array  # float32 [B], bytes of keys and values read, all KV heads
    metadata_bytes: Array  # float32 [B], bytes of the method's own metadata read, all KV heads
    bus_bytes: Array | float = 0.0  # float32 [B], at least so many of `kv_bytes` cross the bus
    counters: Mapping[str, Array]  # the method's statistics of the run so far, float32 [B] each


class Method(abc.ABC):
    """A method as the whole model sees it. Subclasses are abstract or final; no implemented function is overridden."""

    __dataclass_fields__: ClassVar[dict[str, dataclasses.Field[Any]]]  # every final subclass is a dataclass
    PAPER: ClassVar[str] = "no paper"  # "arXiv:" and a number; all methods in `kvjax.methods` but Oracle have it
    TITLE: ClassVar[str] = ""  # the name as the paper writes it, for tables and figures; "": the name of the class
    composable: ClassVar[bool] = False  # True: a `SlotMethod`, which wrappers can compose
    slotted: ClassVar[bool] = False  # True: a `SlotMethod`, which may also estimate tokens or correct logits: see `compose`

    extrapolates = False  # True: positions are re-numbered, so a prompt may be longer than the model's position limit
    keeps = "every token"  # the tokens that stay stored, in words for tables
    evicts = False  # True: tokens are removed for good, and storage physically shrinks
    dense_prompt = False  # True: attention over the prompt is exact and dense: see `kvjax.decoding.layers.shares_prefill`
    spans_layers = False  # True: it keeps state across layers, so it cannot run in some layers only
    moves_slots = True  # False: ``state.cache`` has each stored token in the slot that it came to
    # Models and caches with which it cannot run: "sinks", sink logits, which its attention leaves out (`Inputs.sinks`);
    # "codes", a `kvjax.cache.quantised.QuantisedCache`; "latent", values that are the keys, because it scores, sums or packs
    # values.
    lacks: tuple[str, ...] = ("sinks", "codes")
    drafts = 0  # tokens that another method guesses at most before each pass of the model; see `kvjax.Verified`
    offload: bool | float = False  # share of the layers, counted from the last, whose rows are in host memory; True = all

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        if "__post_init__" in vars(cls):
            raise TypeError(f"{cls.__name__}: write `check`, not __post_init__, which checks each field before `check`")

    def __new__(cls, *unnamed: Any, **knobs: Any) -> Self:
        if unnamed:
            raise TypeError(f"{cls.__name__} takes its knobs by name, got {unnamed[0]!r:.60} without a name")
        if "__dataclass_fields__" not in vars(cls):
            raise TypeError(f"{cls.__name__} must be decorated with kvjax.protocol.typing.pytree, got a class without it")
        check_names(cls, knobs)
        return super().__new__(cls)

    @final
    def __post_init__(self) -> None:
        check_fields(self)
        if not has_shares(self):  # `kvjax.protocol.fields.at_length` makes the method again when the prompt is known
            self.check()

    def check(self) -> None:
        """Refuse fields that do not fit each other, and fill fields in from others.

        Each field alone has been checked, and ``budget`` has its ``capacity``. `fields.number` of a traced value is None.
        JAX rebuilds a method without these checks.
        """
        return None

    def check_sizes(self, model: Model) -> None:
        """Refuse a model whose layers or heads do not fit the knobs. Most methods have no such knobs."""
        return None

    def offloaded(self, share: float) -> Method | None:
        """Set `offload` to ``share`` in a copy; None if there is no such field. A wrapper changes its inner method.

        A method with this field works on an offloaded cache: it reads keys with `keys_at`, because only the newest are on the
        device.
        """
        return dataclasses.replace(self, offload=share) if "offload" in vars(self) else None

    @abc.abstractmethod
    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        """Return the method that runs in ``layer``."""

    def on_layers(self, layers: tuple[int, ...], num_layers: int) -> Method:
        """Return the method for a model in which ``layers`` run it; others have windows or no attention. By default itself.

        The methods inside of it are asked, too.
        """
        inner = {name: value for name, value in vars(self).items() if isinstance(value, Method)}
        new = {name: method.on_layers(layers, num_layers) for name, method in inner.items()}
        changed = {name: method for name, method in new.items() if method is not inner[name]}
        return dataclasses.replace(cast("Any", self), **changed) if changed else self

    def source(self, layer: int, num_layers: int) -> int | None:
        """Return the earlier layer whose `LayerMethod.signal` ``layer`` gets in a decode step; None, the default: of none."""
        return None

    def reread_tokens(self, length: int) -> int:
        """Return the most tokens that `reread` runs at once after a prompt of ``length`` tokens; 0, the default: none."""
        return 0

    def reread(self, states: tuple[Any, ...], reading: Reading) -> tuple[Any, ...]:
        """Run the prompt a second time, while all of it is stored, and return the layers' states, which are then finished.

        It is called only if `reread_tokens` is not 0. It sees the states of the layers without a window.
        """
        return states

    @classmethod
    def tokenizer_knobs(cls, tokenizer: Any, vocab_size: int | None) -> dict[str, Any]:
        """Derive knobs from a tokenizer, for a method that needs the text of token ids.

        Args:
            tokenizer: has ``encode(text)``, ``decode([id])`` and ``get_vocab()``.
            vocab_size: entries of the model's vocabulary; None means the size of the tokenizer's vocabulary.
        """
        return {}

    @classmethod
    def at_length(cls, length: int) -> tuple[dict[str, Any], str] | None:
        """Return the knobs for ``length`` tokens of text, and what differs from the paper; None if a budget is all."""
        return None

    def init_shared(self, specs: tuple[LayerSpec, ...]) -> Any:
        """Make the state that all layers share from the sizes of every layer; leaves have axis B first. By default None."""
        return None

    def observe(self, cache: Cache, decoding: bool) -> Cache:
        """Update the shared state of the cache after a decode step, the prompt or an `extend`.

        The layers and the logits of ``cache`` are up to date already.
        """
        return cache


class LayerMethod(Method):
    """The storage and the attention of one layer."""

    # Slots that must be on one device where a mesh divides the slots of each row (`kvjax.cache.divided`); None if they
    # cannot be divided, 0 if every device has all slots. If the method evicts, only the prompt is divided: see
    # `PartCache.compact`.
    slot_block: int | None = None
    needs_guess = False  # True: it reads `Inputs.guess`, which not every model can give
    # True: until `finish`, ``state.cache`` has the rotated keys and the values of all prompt tokens, and depends on no knob
    # but through its shapes. Several such methods then share one storage: `kvjax.decoding.shared_storage`.
    common_prompt: ClassVar[bool] = False

    @abc.abstractmethod
    def init(self, spec: LayerSpec) -> Any:
        """Make the empty state, before the first prompt chunk; every leaf has axis B first."""

    @abc.abstractmethod
    def attend(self, state: Any, inputs: Inputs) -> tuple[Array, Any]:
        """Store the tokens and attend with them. Return the output [B, H, G, T, D] and the new state."""

    def finish(self, state: Any, spec: LayerSpec) -> Any:
        """Make the state that decoding needs from the state after the last prompt chunk; by default they are the same."""
        return state

    @abc.abstractmethod
    def chosen(self, state: Any, inputs: Inputs) -> Array:
        """List the positions that the decode step ``inputs`` (T = 1) attends to: int32 [B, H, K], unused entries EMPTY."""

    @abc.abstractmethod
    def cost(self, state: Any, shared: Any) -> Cost:
        """Compute the cost of the next decode step."""

    def signal(self, state: Any) -> Any:
        """Return what later layers of a decode step get of this layer's state after it; None, the default, for nothing."""
        return None

    def with_signal(self, state: Any, signal: Any) -> Any:
        """Return the state of which `cost` is asked, given the ``signal`` of the layer's source; by default ``state``."""
        return state

    def room(self, state: Any) -> Array | None:
        """Return the number of tokens that still fit, int32 [B]; None if storage is bounded and never fills.

        By default these are the free slots of ``state.cache``.
        """
        return free_slots(state.cache, None)

    def max_tokens(self, in_prompt: bool) -> int | None:
        """Return the most tokens that one `attend` call can take; None, the default, means any number."""
        return None

    def due(self, state: Any) -> Array | None:
        """Mark the rows that `settle` must change before their next token, bool [B]; None, the default, if it never does.

        It is for work that a method does in few steps, and is called after all layers have attended: `kvjax.decoding.settle`.
        """
        return None

    def excerpt(self, state: Any) -> Any:
        """Return what `rework` needs of a state, a few small arrays; None, the default, if `settle` needs no `rework`."""
        return None

    def rework(self, excerpt: Any) -> Any:
        """Compute what `settle` stores from an `excerpt`. It reads static fields of the method only.

        It is for work that takes long to compile: layers whose methods and excerpts have equal structure share one program.
        """
        return None

    def settle(self, state: Any, made: Any) -> Any:
        """Change the rows that are `due` and return the state; ``made`` is the result of `rework`."""
        return state

    def for_layer(self, layer: int, num_layers: int) -> LayerMethod:
        """Return the method itself. A method whose layers differ returns other methods for some layers."""
        return self


def check_method(role: str, value: Any) -> Method:
    """Return ``value``, which must be a method.

    Raises:
        ValueError: it is a name, a class, or anything else; the message calls it ``role``.
    """
    if isinstance(value, Method):
        return value
    name = f"the name {value!r}: kvjax.make it" if isinstance(value, str) else shown(value)
    hint = f": call it, {value.__name__}(...)" if isinstance(value, type) else ""
    raise ValueError(f"{role} must be a kvjax method, got {name}{hint}")


def declarations(kind: type[Method]) -> tuple[str, ...]:
    """List what methods of a class declare of themselves: the public class attributes of all its bases, without functions.

    A wrapper answers each of them; see `kvjax.wrappers.compose.answers`. A ``ClassVar``, such as ``PAPER``, belongs to the
    class.
    """
    bases = [base for base in reversed(kind.__mro__[1:]) if issubclass(base, Method)]
    values = {name: value for base in bases for name, value in vars(base).items()}
    hints = {name: str(hint) for base in bases for name, hint in inspect.get_annotations(base).items()}
    public = [name for name, value in values.items() if name[0] != "_" and not inspect.isroutine(value)]
    return tuple(name for name in public if not hints.get(name, "").startswith("ClassVar"))


def with_inner(method: Method) -> Iterator[Method]:
    """Yield the method, and all methods that are inside of it."""
    yield method
    for field in dataclasses.fields(method):
        value = vars(method)[field.name]
        for inner in value.values() if isinstance(value, dict) else (value,):
            if isinstance(inner, Method):
                yield from with_inner(inner)


def free_slots(cache: LayerStorage, bounded: int | None) -> Array | None:
    """Compute `LayerMethod.room` of a cache: the number of free slots, or None if it has ``bounded`` slots or more.

    A cache can have fewer slots than its bound: a budget larger than the prompt and the tokens after it is not allocated.
    """
    return None if bounded is not None and cache.num_slots >= bounded else cache.num_slots - cache.cursor


def num_bytes(tree: Any) -> int:
    """Count the bytes of all arrays of ``tree``."""
    return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(tree))
