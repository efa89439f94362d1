"""The layers of a model under a method: which method each layer runs, its storage sizes, and which methods are refused."""

import dataclasses
import hashlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from kvjax.cache import Cache, LayerSpec
from kvjax.cache.quantised import KV_DTYPES
from kvjax.decoding.recurrent import Recurrent
from kvjax.decoding.sliding_window import SlidingWindow
from kvjax.mesh.sharding import Plan
from kvjax.protocol.method import LayerMethod, Method, with_inner
from kvjax.protocol.typing import (
    Model,
    Recurrence,
    layer_recurrence,
    layer_ropes,
    layer_windows,
    method_layers,
    not_none,
    values_are_keys,
)
from kvjax.registry import classes
from kvjax.rope import depends_on_length
from pallas_kernels import axes
from pallas_kernels.machine import current_machine


def fingerprint(params: Any) -> str:
    """Hash the names and shapes of parameters to twelve hexadecimal digits."""
    leaves = jax.tree_util.tree_leaves_with_path(params)
    text = ";".join(f"{jax.tree_util.keystr(path)}{list(leaf.shape)}" for path, leaf in leaves)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def layer_methods(method: Method, model: Model) -> tuple[LayerMethod, ...]:
    """Return the method of every layer.

    A layer with a sliding window runs `SlidingWindow`, and a recurrent layer `Recurrent`, whatever the method.
    """
    runs, method = method_layers(model), on_model(method, model)

    def of_layer(layer: int, window: int | None, recurrence: Recurrence | None) -> LayerMethod:
        if layer in runs:
            return method.for_layer(layer, model.num_layers)
        return Recurrent(keeps_of_row=not_none("recurrence", recurrence)) if window is None else SlidingWindow(window=window)

    both = zip(layer_windows(model), layer_recurrence(model), strict=True)
    return tuple(of_layer(layer, *kinds) for layer, kinds in enumerate(both))


def on_model(method: Method, model: Model) -> Method:
    """Return the method as it runs in a model; see `Method.on_layers`."""
    return method.on_layers(method_layers(model), model.num_layers)


def shares_prefill(method: Method, model: Model) -> bool:
    """Tell whether a method can share its prefill with other methods: it attends to a prompt as Full does.

    A method that renumbers tokens rotates them by the frequencies of a short text. Full does not, where the model has others
    for a long text.
    """
    changing = any(depends_on_length(rope.scaling) for rope in layer_ropes(model))
    return method.dense_prompt and not (changing and any(layer.extrapolates for layer in layer_methods(method, model)))


def guessing_layers(methods: Sequence[LayerMethod]) -> tuple[int, ...]:
    """List the layers whose methods need a guess of their query. Layer 0 has no previous layer, so it gets none."""
    return tuple(layer for layer, method in enumerate(methods) if layer > 0 and method.needs_guess)


def layer_specs(
    methods: Sequence[LayerMethod],
    model: Model,
    batch: int,
    prompt_slots: int,
    max_new_tokens: int,
    parts: int = 1,
    kv_dtype: str | None = None,
) -> tuple[LayerSpec, ...]:
    """Build the specs of every layer's storage, whose slots are divided over ``parts`` devices.

    ``methods`` come from `layer_methods`.
    """
    check_quantisable(methods, kv_dtype)
    once = values_are_keys(model)
    if once and kv_dtype is not None and len(set(KV_DTYPES[kv_dtype][0])) > 1:
        raise ValueError(
            f"kv_dtype={kv_dtype!r} rounds values otherwise than keys, but in latent attention the values are the keys: take "
            "another kv_dtype"
        )
    if parts > 1:
        for method in methods:
            check_divisible(method)
    return tuple(
        LayerSpec(
            batch=batch,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            dtype=model.dtype,
            group_size=model.num_q_heads // model.num_kv_heads,
            prompt_slots=prompt_slots,
            max_new_tokens=max_new_tokens,
            offloaded=is_offloaded(method, layer, model.num_layers),
            parts=parts,
            kv_dtype=kv_dtype,
            value_is_key=once,
        )
        for layer, method in enumerate(methods)
    )


def is_offloaded(method: LayerMethod, layer: int, num_layers: int) -> bool:
    """Tell whether the rows of ``layer``, which runs ``method``, are in host memory. The share counts from the last layer."""
    return layer >= num_layers - round(float(method.offload) * num_layers)


def check_quantisable(methods: Sequence[LayerMethod], kv_dtype: str | None) -> None:
    """Refuse a cache in ``kv_dtype`` where a layer's method cannot run on it.

    Raises:
        ValueError: the message names the method.
    """
    if kv_dtype is None:
        return
    for method in methods:
        name = type(method).__name__
        if "codes" in method.lacks:
            *_, inner = (part for part in with_inner(method) if "codes" in part.lacks)  # not its wrapper
            refusing = [cls for cls in classes().values() if "codes" in cls.lacks]
            raise ValueError(
                f"{type(inner).__name__} has a storage of its own and cannot run with kv_dtype={kv_dtype!r}; take "
                f"kv_dtype=None, or a method other than {', '.join(sorted(cls.__name__ for cls in refusing))}: all others "
                "take it"
            )
        if method.offload and current_machine().platform == "tpu":
            raise ValueError(
                f"{name}: offload must be False with kv_dtype={kv_dtype!r} on a TPU, whose compiler aborts there, got "
                f"{method.offload!r}"
            )


def check_divisible(method: LayerMethod) -> None:
    """Refuse a layer's method whose rows cannot be divided over devices.

    Raises:
        ValueError: the message lists methods that can run.
    """
    name = type(method).__name__
    if method.slot_block is None:
        raise ValueError(
            f"{name} cannot run over the mesh's axis {axes.SLOTS!r}, which divides the slots of each row over devices; Full, "
            "Quest, ParisKV, TokenSelect and Chess can, and SnapKV and others that keep a bounded part of the prompt (see "
            f"docs/many_devices.md), and every method can over the axes {axes.DATA!r} and {axes.MODEL!r}"
        )
    if method.offload:
        raise ValueError(
            f"{name}: offload must be False where the mesh's axis {axes.SLOTS!r} divides the slots of each row over devices, "
            f"got {method.offload!r}"
        )


def init_shared(method: Method, model: Model, specs: Sequence[LayerSpec]) -> Any:
    """Run `Method.init_shared` for the layers that run the method; None if there are none. ``specs`` has every layer."""
    seen = tuple(specs[layer] for layer in method_layers(model))
    return method.init_shared(seen) if seen else None


def observe(cache: Cache, decoding: bool) -> Cache:
    """Run `Method.observe` on the layers that run the method: they have attention, and no window."""
    chosen = method_layers(cache.model)
    if not chosen:
        return cache
    seen = cache.method.observe(dataclasses.replace(cache, layers=tuple(cache.layers[layer] for layer in chosen)), decoding)
    layers = list(cache.layers)
    for layer, state in zip(chosen, seen.layers, strict=True):
        layers[layer] = state
    return dataclasses.replace(seen, layers=tuple(layers))


def blank_cache(
    method: Method, model: Model, weights: str = "", plan: Plan | None = None, kv_dtype: str | None = None
) -> Cache:
    """Make a cache of one row, one prompt token and room for one token. Its structure is the same for all sizes."""
    methods = layer_methods(method, model)
    specs = layer_specs(methods, model, 1, 1, 1, 1 if plan is None else plan.parts, kv_dtype)
    cache = Cache(
        layers=tuple(m.finish(m.init(spec), spec) for m, spec in zip(methods, specs, strict=True)),
        shared=init_shared(method, model, specs), method=method, length=jnp.zeros((1,), jnp.int32),
        logits=jnp.zeros((1, model.vocab_size), jnp.float32), model=model, weights=weights, plan=plan, kv_dtype=kv_dtype,
    )  # fmt: skip
    return observe(cache, decoding=False)
