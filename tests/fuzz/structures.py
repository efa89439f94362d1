"""Random methods, wrappers and models: what is compiled (a structure), and numbers that share its programs (draws)."""

import dataclasses
import typing
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np

from kvjax import registry
from kvjax.attention.patterns import KINDS
from kvjax.protocol.fields import Limits
from kvjax.protocol.method import Method
from kvjax.testing.model import TinyModel
from kvjax.wrappers import DenseBelow, LayerBudgets, Pattern, Periodic, PerLayer, Prefill, Reuse, Stages, Twilight
from models import ModelConfig, RopeScaling
from tests.tiny_models import vivid_params

VOCABULARY = 61
EVERYTHING = 96  # tokens; more than any run here has
_TRIES = 500
_WIDEST = 48  # the most KV heads times head_dim of `random_model`
_WRAPPERS = ("stages", "perlayer", "densebelow", "periodic", "twilight", "reuse", "layerbudgets", "prefill")
# Values of static fields by name. Fields that are not here take their choices, True or False, or keep their default.
_SIZES: dict[str, tuple[Any, ...]] = {
    "ahead": (1, 3), "anchor_pages": (None, 1, 3),
    "answer": ((), (7,)), "ask": ((), (5, 9, 5)), "ask_later": ((), (8, 1)),
    "block": (1, 3, 4, 16), "block_size": (4, 8), "buffer": (4, 8, 16), "capacity": (5, 8, 12, 24, EVERYTHING),
    "channels": (0.125, 0.25, 0.5), "chunk": (1, 4, 5, 8), "chunk_size": (1, 2, 4), "chunks_per_grid": (1, 2, 3),
    "cluster_size": (1, 3, 4), "dense_below": (0, 9, 17, 64), "interval": (None, 1, 3, 6),
    "kernel": (1, 3, 5), "length": (1, 12, 20, EVERYTHING), "local_chunks": (0, 1, 2),
    "num_bits": (1, 3, 9), "num_centroids": (2, 3, 8),
    "num_dense_layers": (0, 0, 1),
    "num_local": (4, 8), "num_recent": (1, 3, 5), "num_sink": (0, 1, 2, 4),
    "num_sink_pages": (0, 1, 2), "num_subvectors": (1, 2), "num_tables": (2, 5), "obs_window": (1, 4, 5),
    "outlier_chunks": (1, 2, 3), "page_size": (1, 2, 4, 8),
    "pages_per_chunk": (1, 2, 3), "rank": (4, 12, _WIDEST), "ratio": (0.2, 0.5, 1.0),
    "window": (1, 2, 4),
    "offload": (False, False, False, True, 0.5),
}  # fmt: skip
_CHESS_CAPACITY = ((1.0, 1.0, 1.0), (0.6, 0.5, 0.4))


def names() -> list[str]:
    """All methods and wrappers."""
    return [*sorted(registry.classes()), *_WRAPPERS]


def random_method(name: str, rng: np.random.Generator) -> Method:
    """A method or a wrapper with small random knobs.

    Args:
        name: one of `names`.
        rng: source of randomness.

    Raises:
        ValueError: no knobs were found that the method takes.
    """
    for _ in range(_TRIES):
        try:
            return _wrapper(name, rng) if name in _WRAPPERS else _redrawn(_plain(registry.find(name), rng), rng)
        except ValueError as error:
            refusal = error
    raise ValueError(f"no knobs of {name} were found in {_TRIES} tries; the last: {refusal}") from refusal


def redraw(method: Method, rng: np.random.Generator) -> Method:
    """The method with other traced numbers; compiled programs serve both."""
    for _ in range(_TRIES):
        try:
            other = _redrawn(method, rng)
        except ValueError:
            continue
        if jax.tree.structure(other) == jax.tree.structure(method):
            return other
    return method


def fitted(method: Any, model: Any, rng: np.random.Generator) -> Any:
    """The method with random knobs where it needs some for each layer or head of a model, its inner methods too."""
    if isinstance(method, dict):
        return {key: fitted(inner, model, rng) for key, inner in method.items()}
    values = vars(method)
    fitting = {name: fitted(value, model, rng) for name, value in values.items() if isinstance(value, (Method, dict))}
    if "scores" in values:
        heads = rng.exponential(size=(model.num_layers, model.num_kv_heads))
        fitting["scores"] = tuple(tuple(row) for row in heads.tolist())
    if "shares" in values:
        fitting["shares"] = tuple(rng.uniform(0.5, 1.5, model.num_layers).tolist())
    return dataclasses.replace(method, **fitting)


def covering(method: Method) -> Method | None:
    """The method with numbers under which it keeps and attends to everything; None if its structure has none."""
    fields = method.__dataclass_fields__
    if "ratios" in fields:
        full = (1.0, 1.0, 1.0)
        return dataclasses.replace(method, ratios=full) if vars(method)["capacity"] == full else None
    knobs = vars(method)
    # InfLLM changes positions, whatever the budget.
    approximate = knobs.get("beta") is not None or type(method).__name__ == "InfLLM"
    approximate = approximate or knobs.get("rank", _WIDEST) < _WIDEST
    if approximate or "budget" not in fields or vars(method)["capacity"] != EVERYTHING:
        return None
    try:
        return dataclasses.replace(method, budget=EVERYTHING, **({"mass": 1.0} if "mass" in fields else {}))
    except ValueError:  # the drawn factor of SentenceKV wants more room with this budget
        return None


def resident(method: Method) -> Method:
    """The method without `offload`, in inner methods too."""
    return method.offloaded(False) or method


def random_model(rng: np.random.Generator) -> Any:
    """A tiny model; of two kinds, because ModelConfig has more switches and TinyModel compiles sooner."""
    heads, group = int(rng.choice((1, 2, 3))), int(rng.choice((1, 2, 4)))
    sizes = {
        "num_layers": int(rng.choice((1, 2, 2, 3))), "num_q_heads": heads * group, "num_kv_heads": heads,
        "head_dim": int(rng.choice((8, 16))), "hidden_size": 32, "vocab_size": VOCABULARY, "max_position_embeddings": 160,
        "rope_theta": float(rng.choice((1e2, 1e4))),
    }  # fmt: skip
    if rng.random() < 0.7:
        return TinyModel(**sizes)
    scaling = {"factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 32}
    more: dict[str, Any] = {}
    if rng.random() < 0.5:
        more["windows"] = tuple(rng.choice(np.array([None, None, None, 4, 8, 30])) for _ in range(sizes["num_layers"]))
    return ModelConfig(
        **sizes,
        **more,
        intermediate_size=48,
        qk_norm=bool(rng.random() < 0.5),
        qkv_bias=bool(rng.random() < 0.5),
        tie_word_embeddings=bool(rng.random() < 0.5),
        rope_scaling=RopeScaling(**scaling) if rng.random() < 0.5 else None,
        eos_token_ids=(60,),
    )


def params_of(model: Any, seed: int) -> Any:
    """Random parameters, large enough that attention is not flat. Weights of norms differ, so that no norm is a constant."""
    return model.random_params(seed) if isinstance(model, TinyModel) else vivid_params(model, seed)


def _plain(cls: type[Method], rng: np.random.Generator) -> Method:
    knobs: dict[str, Any] = {}
    hints = typing.get_type_hints(cls)
    for field in dataclasses.fields(cls):
        values = _static_values(field, hints[field.name])
        if values:
            knobs[field.name] = values[int(rng.integers(len(values)))]
    if "ratios" in hints:
        knobs["capacity"] = _CHESS_CAPACITY[int(rng.integers(len(_CHESS_CAPACITY)))]
    elif "fraction" in hints:
        knobs["capacity"] = knobs["fraction"] = float(rng.choice((0.1, 0.3, 1.0)))
    if "group_size" in hints:  # a window has whole groups; `_redrawn` finds others that divide it
        knobs["group_size"] = 1
    if "budget" in hints:
        knobs["budget"] = knobs["capacity"]
    return cls(**knobs, **_numbers(cls, hints, knobs, rng))


def _static_values(field: Any, kind: Any) -> Sequence[Any]:
    limits = field.metadata.get("limits", Limits())
    if not field.metadata.get("static"):
        return ()
    if limits.choices:
        return limits.choices
    values = _SIZES.get(field.name, (True, False) if kind is bool else ())
    return [x for x in values if not (limits.odd and x % 2 == 0)]


def _numbers(cls: type[Method], hints: Any, knobs: Any, rng: np.random.Generator) -> dict[str, Any]:
    """Numbers of traced fields that `_redrawn` does not choose: those that may be None, and tables."""
    numbers: dict[str, Any] = {}
    if "boundary" in hints:
        numbers["boundary"] = rng.random(VOCABULARY) < 0.2
    if "num_recent" in hints and "num_recent" not in knobs and rng.random() < 0.5:
        numbers["num_recent"] = 1
    if "tau_entropy" in hints and knobs.get("trigger") != "fixed":
        numbers |= {"tau_entropy": 3.0, "tau_varentropy": 0.5}
    if "rho" in hints and rng.random() < 0.3:
        numbers |= {"rho": 0.5, "beta": 0.3}
    return numbers


def _redrawn(method: Any, rng: np.random.Generator) -> Any:
    """The method with random values in its traced fields, and in the traced fields of inner methods."""
    if isinstance(method, dict):
        return {key: _redrawn(inner, rng) for key, inner in method.items()}
    numbers: dict[str, Any] = {}
    for field in dataclasses.fields(method):
        value = vars(method)[field.name]
        if isinstance(value, (Method, dict)):
            numbers[field.name] = _redrawn(value, rng)
        elif not field.metadata.get("static") and value is not None:
            numbers[field.name] = _number(field.name, value, method, rng)
    return dataclasses.replace(method, **numbers)


def _number(name: str, value: Any, method: Any, rng: np.random.Generator) -> Any:
    capacity = vars(method).get("capacity")
    draws: dict[str, Callable[[], Any]] = {
        "budget": lambda: int(rng.choice((capacity, rng.integers(1, capacity + 1), rng.integers(1, min(capacity, 24) + 1)))),
        "ratios": lambda: tuple(float(x * rng.uniform(0.3, 1)) for x in capacity),
        "fraction": lambda: float(capacity * rng.uniform(0.3, 1)),
        "boundary": lambda: rng.random(VOCABULARY) < rng.choice((0.05, 0.2, 0.6)),
        **dict.fromkeys(("interval", "num_recent"), lambda: int(rng.integers(1, 6))),
        **dict.fromkeys(("theta", "rho", "beta"), lambda: float(rng.uniform(0.05, 0.95))),
        "alpha": lambda: float(rng.uniform(0, 3)),
        "keep_factor": lambda: float(rng.uniform(1, 3)),
    }
    if name in draws:
        return draws[name]()
    return float(value * rng.uniform(0.5, 1.5)) if isinstance(value, float) else value


def _wrapper(name: str, rng: np.random.Generator) -> Method:
    """A wrapper around methods of any name; a wrapper that does not take them raises ValueError."""

    def inner(*kinds: str) -> Any:
        return random_method(str(rng.choice(kinds or tuple(registry.classes()))), rng)

    if name == "stages":
        return Stages(evict=inner("snapkv"), retrieve=inner())
    if name == "densebelow":
        return DenseBelow(length=int(rng.choice(_SIZES["length"])), method=inner())
    if name == "periodic":
        ratio = float(rng.uniform(0.05, 1)) if rng.random() < 0.3 else None
        kinds = ("snapkv", "pyramidkv", "adakv", "knorm", "expectedattention") if ratio else ()
        return Periodic(evict=inner(*kinds), interval=int(rng.integers(1, 7)), ratio=ratio)
    if name == "layerbudgets":
        return LayerBudgets(method=inner(), shares=tuple(rng.uniform(0.5, 1.5, 2).tolist()))
    if name == "twilight":
        return Twilight(method=inner(), mass=float(rng.uniform(0.05, 1)))
    if name == "reuse":
        return Reuse(method=inner(), every=int(rng.integers(1, 4)), steps=int(rng.integers(1, 5)), join=bool(rng.integers(2)))
    if name == "prefill":
        return _prefill(inner(), rng)
    return PerLayer(layers={0: inner(), -1: inner()}, default=inner())


def _prefill(method: Any, rng: np.random.Generator) -> Method:
    """A method whose prompt is read sparsely, in small blocks."""
    columns, diagonals, blocks, window, recent = (int(rng.integers(1, 6)) for _ in range(5))
    block = int(rng.choice((1, 3, 4, 16)))
    kind, numbers = str(rng.choice(list(KINDS))), {
        "columns": int(rng.choice((columns, EVERYTHING))), "diagonals": diagonals, "blocks": blocks,
        "share": float(rng.uniform(0.05, 1)), "tau": float(rng.choice((0, 0.3, 1))), "min_budget": columns,
        "factor": float(rng.choice((5, 20, 1000))),
    }  # fmt: skip
    pattern = Pattern(kind, **{name: numbers[name] for name in KINDS[kind]})
    return Prefill(
        method=method, pattern=pattern, window=window, num_sink=columns - 1, num_recent=recent, block=block,
        stride=int(rng.choice([x for x in (1, 2, 3, 8) if block % x == 0])),
        chunk=block * int(rng.choice((1, 4, EVERYTHING))),
    )  # fmt: skip
