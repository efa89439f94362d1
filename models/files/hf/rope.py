"""Translation between the rules of RoPE in ``config.json`` and `models.sizes.rope_scaling`."""

import dataclasses
from typing import Any

from ...sizes.checks import check_counts
from ...sizes.rope_scaling import DynamicScaling, LinearScaling, LongRopeScaling, RopeRule, RopeScaling, YarnScaling

_FREE = ("rope_theta", "rope_type", "partial_rotary_factor")  # every rule may have them
_KEYS = ("rope_parameters", "rope_scaling")
_NOTES = ("finetuned",)  # written by YaRN's authors about their weights; changes nothing
RULES = {rule.rope_type: rule for rule in (RopeScaling, LinearScaling, DynamicScaling, YarnScaling, LongRopeScaling)}
_REQUIRED = {"llama3": None, "linear": ("factor",), "dynamic": ("factor",), "yarn": ("factor",),
             "longrope": ("short_factor", "long_factor")}  # None: all fields  # fmt: skip


def declared(hf: dict[str, Any]) -> dict[str, Any]:
    """Join ``rope_parameters`` of transformers 5 and ``rope_scaling`` of 4, which model cards tell users to add.

    transformers 5.24 takes ``rope_scaling`` whole where both are there, and loses the base in ``rope_parameters``.

    Raises:
        ValueError: the two say different things.
    """
    newer, older = (_named(hf.get(key) or {}) for key in _KEYS)
    stretched = {**newer}
    if older and stretched.get("rope_type") == "default":
        del stretched["rope_type"]  # the rule is the one that was added
    differ = [key for key, value in older.items() if stretched.get(key, value) != value]
    if differ or (older and any(isinstance(value, dict) for value in newer.values()) and newer != older):
        raise ValueError(
            f"rope_parameters and rope_scaling differ ({', '.join(differ) or 'kinds of layers'}): got {newer!r:.200} and "
            f"{older!r:.200}; expected the rule and its rope_theta in rope_parameters, and no rope_scaling"
        )
    return {**stretched, **older}


def _named(rope: dict[str, Any]) -> dict[str, Any]:
    """Call the rule ``rope_type``, which old files call ``type``; refuse two rules."""
    kinds = {key: rope[key] for key in ("rope_type", "type") if rope.get(key) is not None}
    if len({*kinds.values()}) > 1:
        raise ValueError(
            f"type and rope_type of a rule of RoPE differ: got {rope['type']!r:.60} and {rope['rope_type']!r:.60}"
        )
    rest = {key: value for key, value in rope.items() if key not in ("type", "rope_type")}
    return {"rope_type": next(iter(kinds.values())), **rest} if kinds else rest


def read(hf: dict[str, Any], default_theta: float = 10000.0) -> tuple[float, RopeRule | None]:
    """Read the base of RoPE and its rule from ``rope_parameters`` and the sizes of a ``config.json``; see `declared`."""
    rope = hf["rope_parameters"]
    known = ("default", *RULES)
    if not isinstance(rope, dict) or any(isinstance(value, dict) for value in rope.values()):
        raise ValueError(f"unsupported rope scaling {rope!r}, expected one object with rope_type")
    kind = rope.get("rope_type", "default")
    if kind not in known:
        raise ValueError(f"unsupported rope scaling {rope!r}, expected rope_type one of {', '.join(known)}")
    partial = rope.get("partial_rotary_factor", hf.get("partial_rotary_factor", 1.0))
    if partial != 1.0:
        raise ValueError(f"unsupported partial_rotary_factor {partial!r}, expected 1.0")
    theta = rope.get("rope_theta", hf.get("rope_theta", default_theta))
    if kind == "default":
        _refuse_others(kind, rope, ())
        return theta, None
    rule = RULES[kind]
    names = [field.name for field in dataclasses.fields(rule)]
    _refuse_others(kind, rope, names)
    # A yarn that says "factor": null takes it from the two lengths, as in transformers; one that says nothing is refused.
    stated = {name for name, value in rope.items() if value is not None or kind == "yarn"}
    absent = [name for name in _REQUIRED[kind] or names if name not in stated]
    if absent:
        raise ValueError(f"rope scaling of type {kind!r} lacks {', '.join(absent)}, got {rope!r}")
    parameters = {name: rope[name] for name in names if rope.get(name) is not None}
    positions = hf["max_position_embeddings"]
    if kind == "dynamic":  # transformers begins to stretch here, whatever value the rule has
        if parameters.setdefault("original_max_position_embeddings", positions) != positions:
            raise ValueError(
                f"rope scaling of type 'dynamic' begins at max_position_embeddings={positions}, "
                f"got original_max_position_embeddings={parameters['original_max_position_embeddings']!r}"
            )
    elif kind != "linear":
        # A value outside of the rule takes precedence over the rule's own value.
        outer = hf.get("original_max_position_embeddings")
        if outer is not None:
            parameters["original_max_position_embeddings"] = outer
        parameters.setdefault("original_max_position_embeddings", positions)
    if kind in ("yarn", "longrope") and "factor" not in parameters:
        check_counts(rule.__name__, original_max_position_embeddings=parameters["original_max_position_embeddings"])
        parameters["factor"] = positions / parameters["original_max_position_embeddings"]
    for name in ("short_factor", "long_factor"):
        if isinstance(parameters.get(name), list):
            parameters[name] = tuple(parameters[name])
    for name in ("beta_fast", "beta_slow"):
        if not parameters.get(name, 1):  # zero means the default, as in transformers
            del parameters[name]
    return theta, rule(**parameters)


def _refuse_others(kind: str, rope: dict[str, Any], names: Any) -> None:
    """Refuse parameters that the rule does not have: whoever wrote them meant something by them."""
    others = [key for key, value in rope.items() if value is not None and key not in (*_FREE, *_NOTES, *names)]
    if others:
        expected = ", ".join(names) or "none"
        raise ValueError(f"rope scaling of type {kind!r} has unsupported {', '.join(others)}, expected {expected}")


def write(rule: RopeRule | None) -> dict[str, Any]:
    """Return the rule as an object of ``config.json``, without the base."""
    if rule is None:
        return {"rope_type": "default"}
    values = {field.name: vars(rule)[field.name] for field in dataclasses.fields(rule)}
    numbers = {name: list(x) if isinstance(x, tuple) else x for name, x in values.items() if x is not None}
    if rule.rope_type == "dynamic":
        del numbers["original_max_position_embeddings"]  # it is the config's max_position_embeddings
    return {"rope_type": rule.rope_type, **numbers}
