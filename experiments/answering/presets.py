"""Methods at the budgets of their papers, and baselines at an eighth of the context."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from kvjax import registry
from kvjax.methods.budgets import SHARE
from kvjax.protocol.method import Method

PAPERS = ("chess", "sentencekv", "tokenselect", "mosaickv", "pariskv")
_ORDER = ("quest", "snapkv", "streamingllm", "h2o", "keydiff")  # order of the tables; other baselines follow
_DIVIDED = ("ntk", "pi")  # methods whose positions or frequencies are divided by a factor
POSITIONS = (*_DIVIDED, "selfextend")  # Full for texts beyond the length that the model was trained for
_ALL_READ = ("full", *POSITIONS, "prefill")  # methods whose steps read all tokens on purpose
MEASURED = ("duoattention", "headkv")  # methods that need a file of scores of a model's heads: `--set headkv.scores=PATH`
_OTHERS = tuple(name for name in registry.builtin() if name not in ("full", *PAPERS, *_ORDER, *POSITIONS, *MEASURED))
BASELINES = (*_ORDER, *_OTHERS)
METHODS = ("full", *PAPERS, *BASELINES)
# Where a question stands: in the compressed prompt, after it, after earlier questions and answers, or as the method needs.
QUESTIONS = ("prefill", "extend", "turns", "auto")


def preset(name: str, length: int, config: Any = None) -> tuple[dict[str, Any], str]:
    """Return the knobs that a method gets at a length in tokens if they are not given, and how they differ from the paper's.

    A budget is the paper's, scaled down if it would fill more than half of the context. A baseline, and a method outside of
    kvjax that has a budget, get an eighth of the context. A factor of positions is the length over the window of the model
    ``config``, as in the papers, and 1 within the window, which changes nothing; 1 if the model is not known.
    """
    cls = registry.find(name)
    if name in _DIVIDED:
        window = length if config is None else config.max_position_embeddings
        factor = max(1.0, length / window)
        text = "{} tokens over the model's {}" if factor > 1 else "as Full: {} tokens fit the model's {}"
        return {"factor": factor}, text.format(length, window)
    if (scaled := cls.at_length(length)) is not None:
        return scaled
    if takes_share(name):
        return {"budget": length // SHARE}, f"1/{SHARE} of the context"
    return {}, ""


def takes_share(name: str) -> bool:
    """Tell whether a method has a budget and no other knobs for each length: a baseline, or a method outside of kvjax."""
    cls = registry.find(name)
    return "budget" in cls.__dataclass_fields__ and not registry.inner_fields(cls) and cls.at_length(1 << 17) is None


def read_knobs(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts ``knob=value`` into values of the knobs' types; a budget may be a share such as 1/8.

    Raises:
        ValueError: see `kvjax.registry.parse_knobs`.
    """
    knobs: dict[str, Any] = {}
    registry.check_once([pair.partition("=")[0].strip() for pair in pairs], ", ".join(pairs))
    for pair in pairs:
        knob, _, value = pair.partition("=")
        share = knob.strip() == "budget" and ("/" in value or "." in value)
        knobs |= {"budget": value.strip()} if share else registry.parse_knobs(method, [pair])
    return knobs


def without_effect(row: Mapping[str, Any]) -> bool:
    """Tell whether a record's row tested nothing: its method should read fewer tokens than Full, and read all of them."""
    return row["no_effect"] and row["method"].partition("(")[0] not in _ALL_READ


def resolve_question(method: Method, question: str) -> str:
    """Resolve where the question stands under a method: "prefill", "extend" or "turns".

    "auto" is "prefill" for methods that choose tokens or channels by the prompt's last queries, so that they see the
    question, and "extend" for all other methods.
    """
    if question == "auto":
        return "prefill" if method.composable and method.obs_window > 0 else "extend"
    return question


def budget_tokens(share: str | int | float, length: int) -> int:
    """Compute the tokens of a budget, given as a share of a length (``1/8``, ``0.125``) or as a number of tokens.

    Raises:
        ValueError: the budget is neither.
    """
    top, _, bottom = str(share).strip().partition("/")
    try:
        value = float(top) / float(bottom or 1)
    except (ValueError, ZeroDivisionError):
        value = -1.0
    if not (0 < value <= 1 or (value > 1 and value.is_integer() and not bottom)):
        raise ValueError(f"a budget is a share such as 1/8 or a number of tokens such as 256, got {share!r}")
    return round(value * length) if bottom or value < 1 else int(value)


def budget_of(row: Mapping[str, Any]) -> int:
    """Return the tokens per KV head that a row's setting asks for.

    Methods ask by ``budget`` in tokens (a mean, if layers differ), by a ``fraction`` of the tokens, or by ``ratios`` whose
    product is the fraction. The budget of a setting that asks for none, as Full, ThinK or a wrapper, is what was measured:
    the tokens attended.
    """
    knobs = row.get("knobs") or {}
    if isinstance(budget := knobs.get("budget"), (int, float)) or (budget and _numbers(budget)):
        return round(float(np.mean(budget)))
    share = knobs.get("fraction", knobs.get("ratios"))
    if isinstance(share, (int, float)) or (share and _numbers(share)):
        return round(math.prod(np.atleast_1d(share).tolist()) * row["length_tokens"])
    return round(row["attended_tokens"])


def _numbers(values: Any) -> bool:
    return isinstance(values, (list, tuple)) and all(isinstance(value, (int, float)) for value in values)
