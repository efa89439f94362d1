"""Translation between the sliding windows of Hugging Face's ``config.json`` and `Architecture.windows`.

The families declare in three ways which layers have a window, and transformers' classes have defaults for absent keys:

* Mistral and Mixtral: every layer has the window ``sliding_window``; null means none.
* Qwen2 and Qwen3: with ``use_sliding_window`` the layers that ``layer_types`` calls "sliding_attention"; without this list
  the layers from number ``max_window_layers`` on.
* Qwen3-MoE: with ``use_sliding_window`` every layer.
"""

from __future__ import annotations

from typing import Any

_ALL = {"mistral": 4096, "mixtral": None}  # families with a window in every layer -> transformers' default
_SOME = ("qwen2", "qwen3")  # families that can have windows in some layers
_SWITCHED = (*_SOME, "qwen3_moe")  # families whose window is off unless `use_sliding_window` is set
_QWEN_WINDOW, _QWEN_FIRST = 4096, 28  # transformers' defaults of sliding_window and max_window_layers
_KINDS = ("full_attention", "sliding_attention")


def read(hf: dict[str, Any], context: int) -> tuple[int | None, ...]:
    """Read the window of each layer in tokens, None for a layer with full attention.

    The result is () if no layer has a window narrower than the context.

    Args:
        hf: a ``config.json`` as a dict, with ``model_type`` and ``num_hidden_layers``.
        context: tokens of the longest text that the model takes.

    Raises:
        ValueError: the window is no positive whole number, or ``layer_types`` does not name one known kind per layer.
    """
    kind, count = hf["model_type"], hf["num_hidden_layers"]
    if kind in _ALL:
        window = hf.get("sliding_window", _ALL[kind])
    elif kind in _SWITCHED and hf.get("use_sliding_window"):
        window = hf.get("sliding_window", _QWEN_WINDOW)
    else:
        window = None
    if window is None:
        return ()
    if type(window) is not int or window < 1:
        raise ValueError(f"sliding_window must be a whole number of at least 1 token or null, got {window!r}")
    slides = [True] * count
    if hf.get("layer_types") is not None:
        slides = [named == _KINDS[1] for named in _layer_types(hf["layer_types"], count)]
        if kind not in _SOME and not all(slides):
            raise ValueError(
                f"unsupported layer_types of model_type {kind!r}, expected 'sliding_attention' in every layer: transformers "
                "gives them all the window"
            )
    elif kind in _SOME:
        first = hf.get("max_window_layers", _QWEN_FIRST)
        slides = [layer >= first for layer in range(count)]
    if not any(slides) or window >= context:
        return ()
    return tuple(window if each else None for each in slides)


def write(windows: tuple[int | None, ...], model_type: str) -> tuple[str, dict[str, Any]]:
    """Translate the windows of a model to keys of ``config.json``.

    Args:
        windows: as in `Architecture.windows`.
        model_type: the type of the same model without windows.

    Returns:
        The model type, which windows can change from Llama's to Mistral's, and the keys.

    Raises:
        ValueError: no family of transformers has these windows.
    """
    sizes = sorted({window for window in windows if window is not None})
    if not sizes:
        return model_type, {"sliding_window": None} if model_type in _ALL else {}
    if len(sizes) > 1:
        raise ValueError(f"no Hugging Face family has sliding windows of several sizes, got {sizes} tokens")
    keys: dict[str, Any] = {"sliding_window": sizes[0]}
    if model_type in _SOME:
        # Readers of max_window_layers alone see the same model if the layers with a window are the last ones.
        full = sum(window is None for window in windows)
        layer_types = [_KINDS[window is not None] for window in windows]
        return model_type, {**keys, "use_sliding_window": True, "max_window_layers": full, "layer_types": layer_types}
    if None in windows:
        raise ValueError(
            f"no Hugging Face family like {model_type!r} has sliding windows in some layers only, got windows={windows}"
        )
    if model_type in _SWITCHED:
        return model_type, {**keys, "use_sliding_window": True}
    return "mistral" if model_type == "llama" else model_type, keys


def _layer_types(given: Any, count: int) -> list[str]:
    """Check ``layer_types`` of a file: one known kind for each layer."""
    if not isinstance(given, list) or len(given) != count:
        raise ValueError(f"layer_types must be a list with one entry for each of {count} layers, got {given!r:.80}")
    other = [named for named in given if named not in _KINDS]
    if other:
        raise ValueError(f"unsupported layer_types {other[0]!r}, expected {' or '.join(map(repr, _KINDS))}")
    return given
