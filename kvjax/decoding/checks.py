"""Checks of users' arguments. They need known values, so they skip traced values.

Inside a trace some values can be known, such as a cache that a jitted function closes over. JAX would trace operations on
them, too; `kvjax.protocol.describe.at_once` runs them at once.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from kvjax.cache.whole_model import Cache, check_alive
from kvjax.decoding.layers import fingerprint, guessing_layers, layer_methods
from kvjax.mesh.sharding import check_plan, readable
from kvjax.protocol.describe import at_once, describe, is_known
from kvjax.protocol.fields import shown
from kvjax.protocol.method import Method, with_inner
from kvjax.protocol.typing import Model, has_sinks, layer_ropes, takes_position, values_are_keys
from kvjax.registry import classes, extrapolating
from kvjax.rope import border


def check_vocabulary(tokens: Array, model: Model) -> None:
    """Refuse token ids outside the model's vocabulary; usually they come from another model's tokenizer."""
    if is_known(tokens) and tokens.size:
        with at_once():
            low, high = int(tokens.min()), int(tokens.max())
        if low < 0 or high >= model.vocab_size:
            raise ValueError(
                f"token ids must lie in [0, vocab_size={model.vocab_size}), got {low if low < 0 else high}; "
                "is this the tokenizer of another model?"
            )


def has_no_limit(method: Method, model: Model) -> bool:
    """Tell whether a text may be longer than the model's positions; never where the model adds its own to the tokens."""
    return method.extrapolates and not takes_position(model)


def check_fits(length: Array, max_new_tokens: int, model: Model, method: Method) -> None:
    """Refuse empty prompts, and more tokens than the model has positions; a method that renumbers positions has no limit.

    A method that drafts tokens needs room for them and for the token before them.
    """
    if method.drafts >= max_new_tokens:
        raise ValueError(
            f"{describe(method, brief=True)}: depth={method.drafts} drafts up to {method.drafts} tokens behind the next one, "
            f"expected max_new_tokens of at least {method.drafts + 1}, got {max_new_tokens}"
        )
    if not is_known(length):
        return
    with at_once():
        least, longest, row = int(length.min()), int(length.max()), int(jnp.argmin(length))
    if least < 1:
        raise ValueError(f"every prompt needs at least 1 token, got none in row {row}")
    needed = longest + max_new_tokens
    if needed > model.max_position_embeddings and not has_no_limit(method, model):
        more = f", add YaRN to the model's config, or use a method that re-numbers positions ({', '.join(extrapolating())})"
        raise ValueError(
            f"prompt of {longest} + max_new_tokens={max_new_tokens} = {needed} tokens exceeds the model's "
            f"max_position_embeddings={model.max_position_embeddings}; shorten it, or take a smaller "
            f"max_new_tokens{'' if takes_position(model) else more}"
        )
    again, most = method.reread_tokens(longest), model.max_position_embeddings
    if again and longest + again > most and not has_no_limit(method, model):
        raise ValueError(
            f"{type(method).__name__} runs the model on {again} more tokens behind a prompt: {longest} + {again} = "
            f"{longest + again} exceeds the model's max_position_embeddings={most}; shorten the prompt, or take fewer (knob "
            "chunk or ahead)"
        )


def check_sizes(method: Method, model: Model) -> None:
    """Refuse a model that the method cannot run.

    The method's knobs, such as scores of heads, may have been made for another model (`Method.check_sizes`). Not every
    model can guess queries (`LayerMethod.needs_guess`), and not every method adds sink logits (`Method.lacks`).
    """
    for part in with_inner(method):
        part.check_sizes(model)
    if has_sinks(model):
        parts = (part for layer in layer_methods(method, model) for part in with_inner(layer))
        without = next((part for part in parts if "sinks" in part.lacks), None)
        if without is not None:
            raise ValueError(
                f"{type(without).__name__} has an attention of its own without sink logits, which {type(model).__name__} has "
                "in every layer: take a method with them, such as Full, SnapKV, Quest, ParisKV or TokenSelect"
            )
    if values_are_keys(model) and "latent" in method.lacks:
        refusing = ", ".join(sorted(cls.__name__ for cls in classes().values() if "latent" in cls.lacks))
        raise ValueError(
            f"{describe(method, brief=True)} reads the values of each head, which latent attention does not store: take a "
            f"method other than {refusing}"
        )
    stepping = cast("Any", method).draft if method.drafts else method  # the method that decodes token by token
    if guessing_layers(layer_methods(stepping, model)) and not getattr(model, "can_guess", False):
        raise ValueError(
            f"{describe(method, brief=True)} guesses a layer's query from the attention input of the layer before, which "
            f"{type(model).__name__} does not give: expected a model with can_guess = True, see kvjax.protocol.typing.Model"
        )


def check_room(cache: Cache, tokens: int | Array) -> None:
    """Refuse to append more tokens than the cache has free slots, or the model has positions left."""
    if not is_known(cache.length, cache.layers, tokens):
        return
    with at_once():
        methods = layer_methods(cache.method, cache.model)  # whose budgets can be traced, unlike sizes of arrays
        free = [m.room(state) for m, state in zip(methods, cache.layers, strict=True)]
        length, free = readable(cache.plan, (cache.length, free))
    length, free, wanted = jax.device_get((length, free, tokens))
    wanted = np.broadcast_to(wanted, (cache.batch,))
    after = length + wanted
    if after.max() > cache.model.max_position_embeddings and not has_no_limit(cache.method, cache.model):
        raise ValueError(
            f"{length.max()} tokens and {int(wanted.max())} more exceed the model's "
            f"max_position_embeddings={cache.model.max_position_embeddings}"
        )
    check_border(cache.model, cache.method, length, wanted)
    for layer, room in enumerate(free):
        if room is not None and (short := wanted - room).max() > 0:
            row = int(short.argmax())
            raise ValueError(
                f"the cache has room for {int(room[row])} more tokens in row {row} (layer {layer}), got {int(wanted[row])}; "
                "prefill with a larger max_new_tokens"
            )


def check_border(model: Model, method: Method, length: Array | np.ndarray, wanted: Array | np.ndarray | int) -> None:
    """Refuse rows of ``length`` int32 [B] tokens that grow by ``wanted`` int32 [B] or [] across a `kvjax.rope.border`.

    Their stored keys would keep the factors of a short text beside keys with those of a long one.
    """
    if not is_known(length, wanted):
        return
    length, wanted = np.broadcast_arrays(*jax.device_get((length, wanted)))
    for most in {border(rope.scaling) for rope in layer_ropes(model)} - {None}:
        crosses = (length <= most) & (length + wanted > most)
        if crosses.any() and not method.extrapolates:
            row = int(crosses.argmax())
            raise ValueError(
                f"row {row} has {length[row]} tokens, and {wanted[row]} more cross original_max_position_embeddings={most}, "
                f"where longrope changes the rotation of all keys; expected at most {most - length[row]} more. Prefill a "
                "longer text whole, or take the long factors from the start: short_factor=long_factor in config.rope_scaling"
            )


def int32_rows(name: str, value: Any, rows: int, most: int | None = None, bound: str = "") -> Array:
    """Convert integers, one per row, to int32 [B].

    Args:
        value: integers of shape [B]; a list, or an array.
        most: the integers lie between 0 and this number, if it is given.

    Raises:
        ValueError: another shape or dtype, or integers outside of their range.
    """
    array = read_array(value)
    if array.shape != (rows,) or not jnp.issubdtype(array.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers of shape [{rows}], one per row, got {shown(value)}")
    check_int32(name, array)
    if most is not None and is_known(array):
        with at_once():
            outside = int(array.min()) < 0 or int(array.max()) > most
        if outside:
            raise ValueError(f"{name} must lie between 0 and {bound}={most}, got {jax.device_get(array).tolist()}")
    return as_jax(array, jnp.int32)


def bool_rows(name: str, value: Any, rows: int) -> Array:
    """Convert truth values, one per row, to bool [B]; refuse another shape or dtype."""
    array = read_array(value)
    if array.shape != (rows,) or array.dtype != bool:
        raise ValueError(f"{name} must be bool of shape [{rows}], one per row, got {shown(value)}")
    return as_jax(array)


def as_jax(array: Array | np.ndarray, dtype: Any = None) -> Array:
    """Convert to a JAX array, whose values stay known inside a trace if the values of ``given`` are."""
    if not is_known(array):
        return jnp.asarray(array, dtype)
    # JAX places NumPy arrays on the mesh of `jax.set_mesh` only where no dtype is asked for.
    with at_once():
        return jnp.asarray(array, dtype) if isinstance(array, Array) else jnp.asarray(np.asarray(array, dtype))


def read_array(value: Any) -> Array | np.ndarray:
    """Convert ``value`` to an array of its own dtype, which is `object` if its entries have no common dtype."""
    if isinstance(value, (jax.Array, np.ndarray)):
        return value
    try:
        return np.asarray(value) if is_known(value) else jnp.asarray(value)
    except (ValueError, RecursionError, SystemError):  # lists of several lengths, or lists in lists, thousands deep
        return np.asarray(None)


def check_int32(name: str, array: Array | np.ndarray) -> None:
    """Refuse integers that int32 cannot hold, because they would become other integers."""
    if not is_known(array) or not array.size or np.can_cast(array.dtype, np.int32):
        return
    values = jax.device_get(array)
    worst = max(int(values.min()), int(values.max()), key=abs)
    if not -(2**31) <= worst < 2**31:
        raise ValueError(f"{name} must be int32, got {worst}")


def check_model(config: Any) -> None:
    """Refuse a ``config`` that does not describe a model, or that JAX cannot take as static."""
    needed = [name for name in vars(Model) if not name.startswith("_")]
    lacking = [name for name in needed if name not in dir(config)]
    if isinstance(config, (type, Array)) or len(lacking) == len(needed):
        hint = "; it is static: close over it, or name it in static_argnames" if isinstance(config, Array) else ""
        hint += "; take its config" * hasattr(config, "config")
        raise ValueError(f"config must describe a model, as models.ModelConfig does, got {shown(config)}{hint}")
    if lacking:
        raise ValueError(
            "config must describe a model (kvjax.protocol.typing.Model), but "
            f"{type(config).__name__} has no {', '.join(lacking)}"
        )
    try:
        hash(config)
    except TypeError as error:
        raise ValueError(f"config must be hashable, as a frozen dataclass is, got {shown(config)}: {error}") from error
    if config.num_q_heads % config.num_kv_heads:
        raise ValueError(
            f"config: num_q_heads must be a multiple of num_kv_heads={config.num_kv_heads}, got {config.num_q_heads}"
        )


def check_arrays(params: Any) -> None:
    """Refuse parameters that are no tree of arrays."""
    try:
        leaves = jax.tree.leaves(params)
    except (RecursionError, SystemError):  # lists in lists, thousands deep
        leaves = [params]
    for leaf in leaves:
        kinds = () if getattr(leaf, "shape", None) is None else (jnp.number, jnp.bool_)
        if not any(jnp.issubdtype(leaf.dtype, kind) for kind in kinds):
            hint = "; take its params" * hasattr(leaf, "params")
            raise ValueError(f"params must be a tree of arrays, got {shown(leaf)} in it{hint}")


def check_params(params: Any, cache: Cache) -> None:
    """Refuse a cache that was consumed, and parameters of another model than the model that made the cache."""
    check_alive(cache)
    check_arrays(params)
    if cache.weights and (got := fingerprint(params)) != cache.weights:
        raise ValueError(
            f"this cache was made with other parameters (names and shapes {cache.weights}, got {got}); "
            f"it belongs to {cache.model!r}"
        )
    check_plan(params, cache.plan)


def check_cache(cache: Cache, method: Method) -> None:
    """Refuse a method of another structure than the method that made the cache."""
    expected, got = (jax.tree.structure(m) for m in (cache.method, method))
    if expected != got:
        raise ValueError(
            f"this cache was made by {describe(cache.method)}, got the method {describe(method)}: "
            "prefill with the method you generate with (only traced hyper-parameters may differ)"
        )
