"""Axis letters, the pytree decorator and the seam to a model.

Axis letters used in every docstring of this library::

    letter meaning                        letter meaning
    ------ ------------------------------ ------ ------------------------------
    B      batch rows                     S      cache slots
    L      layers                         P      pages
    H      KV heads                       C      slots per page
    G      query heads per KV head        K      selected slots
    T      query tokens                   D      head_dim
    V      vocabulary                     W      observation window

Query ``[B, H, G, T, D]``, key and value ``[B, H, T, D]``, cache ``[B, H, S, D]``. A *slot* is an index into the
cache. A *position* is the index of a token in its row, which RoPE reads. Compaction changes slots, never positions.
"""

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol, cast, dataclass_transform, runtime_checkable

import jax
from jax.tree_util import GetAttrKey

from kvjax.protocol.describe import with_fields
from kvjax.protocol.fields import Limits

Recurrence = tuple[tuple[tuple[int, ...], str], ...]  # shape without axis B, and dtype, of each array of a recurrent layer
EMPTY = -1  # position of a slot that holds nothing: not yet written, evicted, or padding


def static(doc: str = "", *, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a dataclass field that decides a shape, a Python branch or a kernel: part of the jit key, never traced.

    Args:
        doc: the meaning of the field, which tables of knobs and the docstring of the class show.
        default: its value if none is given; without it the field must be given.
        **limits: fields of `kvjax.protocol.fields.Limits`, for example ``least=1``.
    """
    return dataclasses.field(default=default, metadata={"static": True, "doc": doc, "limits": Limits(**limits)})


def traced(doc: str = "", *, default: Any = dataclasses.MISSING, **limits: Any) -> Any:
    """Declare a dataclass field that is a leaf of the pytree; the arguments are those of `static`."""
    return dataclasses.field(default=default, metadata={"doc": doc, "limits": Limits(**limits)})


@dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(static, traced))
def pytree[T](cls: type[T]) -> type[T]:
    """Make a class a frozen, keyword-only dataclass and a pytree. Fields made with `static` are part of its structure.

    The docstring gets a line for each field that is declared with its meaning.

    A class with ``__post_init__`` checks its fields when it is made. When JAX rebuilds it, its leaves may be anything, so
    nothing is checked, and JAX waits for no value.
    """
    kind = dataclasses.dataclass(frozen=True, kw_only=True)(cls)
    kind.__doc__ = with_fields(kind)
    if getattr(kind, "__post_init__", None) is None:
        return jax.tree_util.register_dataclass(kind)
    fields = dataclasses.fields(cast("Any", kind))
    leaves = tuple(field.name for field in fields if not field.metadata.get("static"))
    fixed = tuple(field.name for field in fields if field.metadata.get("static"))

    def flatten(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        return tuple(vars(tree)[name] for name in leaves), tuple(vars(tree)[name] for name in fixed)

    def flatten_with_keys(tree: T) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
        values, structure = flatten(tree)
        return tuple((GetAttrKey(name), value) for name, value in zip(leaves, values, strict=True)), structure

    def rebuild(structure: tuple[Any, ...], values: Iterable[Any]) -> T:
        tree = object.__new__(kind)
        vars(tree).update(zip((*leaves, *fixed), (*values, *structure), strict=True))
        return tree

    jax.tree_util.register_pytree_with_keys(kind, flatten_with_keys, rebuild, flatten)
    return kind


def not_none[T](name: str, value: T | None) -> T:
    """Return ``value``, which must have been set by now; a type checker then knows that it is not None.

    Raises:
        ValueError: it is None; the message calls it ``name``.
    """
    if value is None:
        raise ValueError(f"{name} must be set before it is used, got None")
    return value


@runtime_checkable
class Model(Protocol):
    """The interface of a model to kvjax: a hashable description that can run itself.

    The description is static: it is part of the jit key and of a cache's tree structure. ``models.ModelConfig`` is such a
    description. All members are read-only, so a frozen dataclass can have them as fields.

    A model whose layers have sliding windows has one more member, ``windows: tuple[int | None, ...]``: the window of each
    layer in tokens, and None for a layer that attends in full. See `layer_windows` and `kvjax.decoding.sliding_window`.

    A model with recurrent layers, which keep a state of a fixed size instead of keys, has a member ``recurrent``: for each
    layer the shapes of its state, or None. Such a layer calls ``attend`` in another way, see `kvjax.decoding.recurrent`.

    A model whose layers differ in RoPE, or rotate a part of each head, has a member ``ropes``; see `layer_ropes`.

    A model that squashes the logits of its attention has a member ``attention_softcap``, see `attention_soft_cap`. A model
    with sink logits has a member ``attention_sinks`` that is True, and gives ``attend`` in each layer a keyword argument
    ``sinks``, float32 [H, G]: the logit that enters the softmax of each query head (`kvjax.attention.sinks`).

    A model with latent attention has a member ``value_is_key`` that is True: the values that it gives to ``attend`` are the
    keys, and it reads of what ``attend`` returns only channels that do not rotate. Keys are then stored once.

    A model that adds positions of its own to its tokens, such as learned ones, has a member ``takes_position`` that is True,
    and its `apply` takes another argument, ``position``, see `position_option`.

    A model that can guess queries has a member ``can_guess`` that is True, and its `apply` takes another argument, ``guess``.
    Only methods with `kvjax.protocol.method.LayerMethod.needs_guess` use it.

    A model that can be probed has a member ``can_probe`` that is True, and its `apply` takes another argument, ``nudges``,
    which methods pass to `kvjax.protocol.method.Reading`.

    A model that can run one layer at a time has the members of `LayeredModel`; long prompts may then be read layer by layer.

    A model that can run over several devices has a method ``local(devices)``, which returns the description of one device's
    part, with its share of the heads; see ``docs/many_devices.md``.
    """

    @property
    def num_layers(self) -> int: ...

    @property
    def num_q_heads(self) -> int: ...

    @property
    def num_kv_heads(self) -> int: ...

    @property
    def head_dim(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def max_position_embeddings(self) -> int: ...

    @property
    def rope_theta(self) -> float: ...

    @property
    def rope_scaling(self) -> Any: ...

    @property
    def eos_token_ids(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> str: ...

    def apply(
        self, params: Any, tokens: jax.Array, attend: Callable, states: tuple[Any, ...], *, last: jax.Array | None = None
    ) -> tuple[jax.Array, tuple[Any, ...]]:
        """Run all layers on ``tokens`` int32 [B, T].

        Each layer calls ``attend(layer, state, q, k, v) -> (out, state)`` with un-rotated q [B, H, G, T, D] and k, v
        [B, H, T, D]. ``last`` int32 [B] says which token's hidden state goes to the LM head, per row.

        A model with ``can_guess`` takes ``guess``, a collection of layers above 0, () if it is not given. In these layers
        ``attend`` gets one more array after v, [B, H, G, T, D] and not rotated: this layer's query projection, with bias and
        norm, applied to the previous layer's attention input.

        A model with ``can_probe`` takes ``nudges``, None or an array [B, T, d] of each layer, which it adds to what the
        layer's attention adds to the residual stream. Then ``attend`` gets a keyword argument ``written``: the layer's
        attention input [B, T, d] and the projection of attention's output [H, G, D, d]. The result has the stream
        [B, T, d] after the last layer, before its norm, in place of the logits.

        Returns:
            logits float32 [B, V] (or [B, T, V] with ``last=None``) and the new states.
        """
        ...

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Count the bytes of ``params`` that a decode step of ``rows`` rows reads."""
        ...


class LayeredModel(Model, Protocol):
    """A model that can also run one layer on hidden states [B, T, E]; they are in ``dtype``, all updates added."""

    @property
    def hidden_size(self) -> int: ...

    def embed(self, params: Any, tokens: jax.Array) -> jax.Array:
        """Return the hidden states [B, T, E] before the first layer; it takes ``position`` too where `apply` does."""
        ...

    def run_layer(self, params: Any, layer: int, hidden: jax.Array, attend: Callable, state: Any) -> tuple[jax.Array, Any]:
        """Return the hidden states behind ``layer``, and its new state; ``attend`` is called as in `apply`."""
        ...

    def alone(self, params: Any, layer: int) -> tuple[Any, Any] | None:
        """Return ``layer`` as a model of one layer, the same for equal layers, and its parameters, or None without any.

        So equal layers share a program. A model need not have this function; None means that it cannot do it.
        """
        ...

    def head(self, params: Any, hidden: jax.Array) -> jax.Array:
        """Return the logits float32 [B, V] of hidden states [B, E] behind the last layer."""
        ...


def layered(model: Model) -> LayeredModel | None:
    """Return the model if it can run one layer at a time, which it need not; else None."""
    names = "hidden_size", "embed", "run_layer", "head"
    return cast("LayeredModel", model) if all(hasattr(model, name) for name in names) else None


def layer_windows(model: Model) -> tuple[int | None, ...]:
    """Return the window in tokens of each layer, None for a layer that attends in full.

    Raises:
        ValueError: the model names windows of another number of layers, or a window that is no positive whole number.
    """
    windows = getattr(model, "windows", ())  # a model need not know of windows
    if not windows:
        return (None,) * model.num_layers
    wrong = [x for x in windows if x is not None and (not isinstance(x, int) or isinstance(x, bool) or x < 1)]
    if len(windows) != model.num_layers or wrong:
        raise ValueError(
            f"the model's windows must be a whole number of tokens or None for each of {model.num_layers} layers, "
            f"got {windows!r:.80}"
        )
    return tuple(windows)


def layer_recurrence(model: Model) -> tuple[Recurrence | None, ...]:
    """Return the shapes of what each recurrent layer keeps of a row, None for a layer with attention.

    Raises:
        ValueError: the model names shapes for another number of layers.
    """
    shapes = getattr(model, "recurrent", ()) or (None,) * model.num_layers  # a model need not know of recurrent layers
    if len(shapes) != model.num_layers:
        raise ValueError(
            f"the model's recurrent must be shapes or None for each of {model.num_layers} layers, got {shapes!r:.80}"
        )
    return tuple(shapes)


def is_recurrent(model: Model, layer: int) -> bool:
    """Tell whether a layer has no keys: the model keeps a state of its own there."""
    return layer_recurrence(model)[layer] is not None


def method_layers(model: Model) -> tuple[int, ...]:
    """List the layers in which the method runs: they have attention, and no window."""
    both = zip(layer_windows(model), layer_recurrence(model), strict=True)
    return tuple(layer for layer, (window, state) in enumerate(both) if window is None and state is None)


def attention_soft_cap(model: Model) -> float | None:
    """Return the soft cap on the logits of the model's attention; None for a model without, which need not know of caps."""
    return getattr(model, "attention_softcap", None)


def has_sinks(model: Model) -> bool:
    """Tell whether the model has sink logits; a model need not know of sinks."""
    return bool(getattr(model, "attention_sinks", False))


def takes_position(model: Model) -> bool:
    """Tell whether the model adds positions of its own, for which it has no more than ``max_position_embeddings``."""
    return bool(getattr(model, "takes_position", False))


def position_option(model: Model, position: jax.Array) -> dict[str, jax.Array]:
    """Return the keyword argument ``position`` of `Model.apply`, int32 [B, T], if the model takes it; 0 on padding."""
    return {"position": jax.numpy.maximum(position, 0)} if takes_position(model) else {}


def values_are_keys(model: Model) -> bool:
    """Tell whether the values are the keys, as in latent attention; a model need not know of it. See `Model`."""
    return bool(getattr(model, "value_is_key", False))


class Rope(NamedTuple):
    """The rotation of one layer's queries and keys; `kvjax.rope` has the functions."""

    theta: float  # base of the frequencies
    scaling: Any = None  # the rule that stretches them, or None
    rotated: int | None = None  # channels that rotate: the pairs (i, i + D/2) with i below rotated / 2. None: all; 0: no RoPE


def layer_ropes(model: Model) -> tuple[Rope, ...]:
    """Return the rotation of each layer.

    A model need not know of rotations per layer: without a member ``ropes``, or with an empty one, all channels of all layers
    rotate by the model's ``rope_theta`` and ``rope_scaling``. Else it has an object for each layer, with `Rope`'s attributes.

    Raises:
        ValueError: the model names rotations of another number of layers, or a number of channels that is odd or outside of
            [0, D].
    """
    ropes = getattr(model, "ropes", ()) or (Rope(model.rope_theta, model.rope_scaling),) * model.num_layers
    of_layers = tuple(Rope(each.theta, each.scaling, each.rotated) for each in ropes)
    wrong = [x.rotated for x in of_layers if x.rotated is not None and x.rotated not in range(0, model.head_dim + 1, 2)]
    if len(of_layers) != model.num_layers or wrong:
        raise ValueError(
            f"the model's ropes must be an object for each of {model.num_layers} layers, which rotates None (all) or an even "
            f"number of at most {model.head_dim} channels, got {ropes!r:.80}"
        )
    return of_layers
