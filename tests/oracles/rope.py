"""RoPE under the rules of ``config.json`` in float64 loops, written from what transformers 5.23 computes."""

import math

import numpy as np


def frequencies(rule: dict, dim: int, theta: float, length: int) -> np.ndarray:
    """Radians per position of each pair, float64 [D/2], in a text of ``length`` tokens; every number of the rule is given."""
    kind, found = rule["rope_type"], []
    old = rule.get("original_max_position_embeddings")
    for pair in range(dim // 2):
        base = theta
        if kind == "dynamic":
            longest = max(length, old)
            base = theta * (rule["factor"] * longest / old - (rule["factor"] - 1)) ** (dim / (dim - 2))
        plain = base ** (-2 * pair / dim)
        if kind == "linear":
            plain = plain / rule["factor"]
        elif kind == "longrope":
            plain = plain / rule["long_factor" if length > old else "short_factor"][pair]
        elif kind == "yarn":
            # The pair whose frequency makes `turns` turns in the old context, as a real number.
            low, high = (
                dim * math.log(old / (turns * 2 * math.pi)) / (2 * math.log(theta))
                for turns in (rule["beta_fast"], rule["beta_slow"])
            )
            if rule["truncate"]:
                low, high = math.floor(low), math.ceil(high)
            low, high = max(low, 0), min(high, dim - 1)
            ramp = min(max((pair - low) / (high - low if high != low else 0.001), 0), 1)
            plain = plain * (1 - ramp) + plain / rule["factor"] * ramp
        found.append(plain)
    return np.array(found)


def attention_factor(rule: dict) -> float:
    """The factor of cosine and sine."""
    if rule.get("attention_factor") is not None:
        return rule["attention_factor"]
    if rule["rope_type"] == "yarn":

        def scale(mscale: float) -> float:
            return 1.0 if rule["factor"] <= 1 else 0.1 * mscale * math.log(rule["factor"]) + 1.0

        both = rule.get("mscale") and rule.get("mscale_all_dim")
        return scale(rule["mscale"]) / scale(rule["mscale_all_dim"]) if both else scale(1.0)
    if rule["rope_type"] == "longrope" and rule["factor"] > 1:
        return math.sqrt(1 + math.log(rule["factor"]) / math.log(rule["original_max_position_embeddings"]))
    return 1.0
