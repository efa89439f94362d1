"""Methods at the budgets of their papers, and baselines at an eighth of the context."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvjax import head_scores, patterns, registry
from kvjax.protocol.method import Method

PAPERS = ("chess", "sentencekv", "tokenselect", "mosaickv", "pariskv")
_ORDER = ("quest", "snapkv", "streamingllm", "h2o", "keydiff")  # order of the tables; other baselines follow
_DIVIDED = ("ntk", "pi")  # methods whose positions or frequencies are divided by a factor
POSITIONS = (*_DIVIDED, "selfextend")  # Full for texts beyond the length that the model was trained for
_ALL_READ = ("full", *POSITIONS, "prefill")  # methods whose steps read all tokens on purpose
MEASURED = ("duoattention", "headkv")  # methods that need a file of scores of a model's heads: `--set headkv.scores=PATH`
_OTHERS = tuple(name for name in registry.builtin() if name not in ("full", *PAPERS, *_ORDER, *POSITIONS, *MEASURED))
BASELINES = (*_ORDER, *_OTHERS)
SHARES: Mapping[str, tuple[type, ...]] = {"budget": (str, float), "capacity": (str,)}  # types of a share of the length
BASELINE_SHARE = 8  # tokens of the context / tokens of a baseline's budget
METHODS = ("full", *PAPERS, *BASELINES)
# Where a question stands: in the compressed prompt, after it, after earlier questions and answers, or as the method needs.
QUESTIONS = ("prefill", "extend", "turns", "auto")


@dataclasses.dataclass(frozen=True)
class Setting:
    """A method with the knobs of a run.

    Attributes:
        name: the method's name.
        method: the method.
        note: the difference from the paper's own setting, "" if there is none.
    """

    name: str
    method: Method
    note: str


def paper_method(
    name: str, length: int, *, tokenizer: Any, config: Any, given: Mapping[str, Any] | None = None
) -> Setting:
    """Make a method at its paper's budget, which is scaled down if it would fill more than half of the context.

    A method outside of kvjax that has a budget gets the budget of the baselines, and so do methods inside of a wrapper.
    `kvjax.Stages` evicts to twice this budget, and then retrieves from twice as many tokens as it attends to.

    Args:
        name: the method's name, its path, or a text with brackets; see `kvjax.registry.parse_method`.
        length: tokens of context, question and answer.
        tokenizer: the model's tokenizer, for methods that need one.
        config: the model, with the length that it was made for; None if it is not known.
        given: knobs that replace the paper's knobs. Budgets may be shares of the length such as "1/8", and methods inside of
            a wrapper may be names or ``{name: knobs}``.

    Raises:
        ValueError: the method or a knob is unknown, or the method refuses a value.
        FileNotFoundError: a knob names a file that does not exist.
    """
    shown = registry.canonical_name(name)
    name, own = registry.parse_method(shown, read_knobs)
    cls, asked = registry.find(name), {**own, **(given or {})}
    registry.check_inner(cls, asked)
    inner = registry.inner_fields(cls)

    def made(field: str, value: Any) -> Any:
        """Make the method inside of a wrapper."""
        if not isinstance(value, (str, Mapping)):
            return value
        inner_name, knobs = registry.one_inner(value)
        inner_name, more = registry.parse_method(inner_name, read_knobs)
        knobs = {**more, **knobs}
        if field == "evict" and "retrieve" in inner and _takes_budget(inner_name) and "budget" not in knobs:
            knobs["budget"] = 2 * length // BASELINE_SHARE
        return paper_method(inner_name, length, tokenizer=tokenizer, config=config, given=knobs).method

    knobs, note = _SCALED[name](length) if name in _SCALED else ({}, "")
    if name in _DIVIDED and config is not None:
        knobs, note = _factor(length, config.max_position_embeddings)
    if name not in ("full", *_SCALED) and "budget" in cls.__dataclass_fields__ and not inner:
        knobs, note = {"budget": length // BASELINE_SHARE}, f"1/{BASELINE_SHARE} of the context"
    if knobs.keys() & asked.keys():  # the note describes knobs that are replaced
        note = ""
    for knob, value in asked.items():
        if isinstance(value, list):  # a YAML file has lists where knobs are tuples
            asked[knob] = tuple(value)
        elif isinstance(value, SHARES.get(knob, ())):
            asked[knob] = budget_tokens(value, length)
        elif knob in inner and inner[knob] and isinstance(value, Mapping):
            asked[knob] = {layer: made(knob, one) for layer, one in value.items()}
        elif knob in inner:
            asked[knob] = made(knob, value)
    try:
        size = None if config is None else config.vocab_size
        method = registry.make(name, tokenizer, size, **{**knobs, **read_files(asked, config)})
    except ValueError as error:
        if given or not note:
            raise
        raise ValueError(f"{error} ({note}, at {length} tokens): set the budget, or use a longer length") from error
    return Setting(shown, method, note)


def preset_knobs(name: str) -> set[str]:
    """List the knobs that `paper_method` sets where they are not given."""
    if name in _SCALED:
        return {*_SCALED[name](1 << 17)[0]}
    if name in _DIVIDED:
        return {"factor"}
    cls = registry.find(name)
    return {"budget"} & {*cls.__dataclass_fields__} if not registry.inner_fields(cls) else set()


def _takes_budget(name: str) -> bool:
    return "budget" in registry.find(name).__dataclass_fields__ and name not in _SCALED


def read_files(given: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Replace the names of files in knobs by their contents, scores of heads or patterns of prompts, for a model."""
    read = {"scores": head_scores, "pattern": patterns}
    return {knob: read[knob](x, config) if knob in read and isinstance(x, str) else x for knob, x in given.items()}


def read_knobs(method: str, pairs: Sequence[str]) -> dict[str, Any]:
    """Parse texts ``knob=value`` into values of the knobs' types; a budget may be a share such as 1/8.

    Raises:
        ValueError: see `kvjax.registry.parse_knobs`.
    """
    made: dict[str, Any] = {}
    registry.check_once([pair.partition("=")[0].strip() for pair in pairs], ", ".join(pairs))
    for pair in pairs:
        knob, _, value = pair.partition("=")
        share = knob.strip() == "budget" and ("/" in value or "." in value)
        made |= {"budget": value.strip()} if share else registry.parse_knobs(method, [pair])
    return made


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


def _share(total: int, length: int) -> tuple[float, str]:
    """Compute a factor for budgets, and a note. A `total` above half of the length becomes a quarter of it, else it stays."""
    if 2 * total <= length:
        return 1.0, ""
    share = length / 4 / total
    return share, f"the paper's {total} tokens scaled by {share:.3f} to fit {length}"


def _factor(length: int, window: int) -> tuple[dict[str, Any], str]:
    """Divide by the length over the model's window, as the papers do, and by 1 within the window, which changes nothing."""
    factor = max(1.0, length / window)
    told = "{} tokens over the model's {}" if factor > 1 else "as Full: {} tokens fit the model's {}"
    return {"factor": factor}, told.format(length, window)


def _tokenselect(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(128 + 2048 + 512, length)
    local = max(int(512 * share), 1)
    budget, sinks = max(int(2048 * share), 1), int(128 * share)
    # The paper's chunk is as long as the local window. Half of it finds more, see docs/notebook/readings-others.md.
    chunk = min(max(local // 2, 2), local)
    # The paper sets theta 0.9 for InfiniteBench and LongBench. It sets none for RULER, where 0.9 is our choice.
    return {"budget": budget, "num_sink": sinks, "num_local": local, "chunk": chunk, "theta": 0.9}, note


def _pariskv(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(2000, length)  # rows below 2000 tokens are dense
    paper = {"budget": 100, "num_sink": 64, "num_local": 256, "buffer": 512, "dense_below": 2000}
    return {knob: max(int(value * share), 1) for knob, value in paper.items()}, note


def _sentencekv(length: int) -> tuple[dict[str, Any], str]:
    share, note = _share(2 * 1024, length)  # SentenceKV keeps twice its budget
    # 32 sink and 32 recent tokens are always kept: a smaller budget would leave nothing to choose.
    return {"budget": max(int(1024 * share), 80), "keep_factor": 2.0}, note


def _mosaickv(length: int) -> tuple[dict[str, Any], str]:
    return {"channels": 0.25, "fraction": 0.10, "strategy": "static"}, ""


def _chess(length: int) -> tuple[dict[str, Any], str]:
    window = 8
    while window > 1 and 2 * (1 + window) * 32 > length:
        window //= 2
    note = f"window of {window} pages, 8 would be more than half of {length} tokens" if window < 8 else ""
    return {"ratios": "aggressive", "trigger": "and", "window": window}, note


def _searched(num_sink: int, num_local: int, whose: str = "") -> Callable[[int], tuple[dict[str, Any], str]]:
    """Divide a budget of an eighth of the context: at most half for sinks and recent tokens, the rest for found tokens."""

    def made(length: int) -> tuple[dict[str, Any], str]:
        total = length // BASELINE_SHARE
        share = min(1.0, total / 2 / (num_sink + num_local))
        ends = {"num_sink": int(num_sink * share), "num_local": max(int(num_local * share), 1)}
        note = f"1/{BASELINE_SHARE} of the context{whose}, sinks and recent tokens too"
        return {**ends, "budget": total - sum(ends.values())}, note

    return made


def _pqcache(length: int) -> tuple[dict[str, Any], str]:
    return {"fraction": 1 / BASELINE_SHARE}, f"1/{BASELINE_SHARE} of the prompt"


def _freekv(length: int) -> tuple[dict[str, Any], str]:
    total, page = length // BASELINE_SHARE, 32
    while page > 4 and 3 * page > total:  # a page at each end, and one found page
        page //= 2
    share = min(1.0, total / 2 / (512 + 512))
    sinks, local = int(512 * share) // page * page, max(int(512 * share) // page, 1) * page
    note = f"1/{BASELINE_SHARE} of the context, sinks and recent tokens too"
    note += f"; pages of {page} tokens" if page < 32 else ""
    return {"num_sink": sinks, "num_local": local, "budget": total - sinks - local, "page_size": page}, note


def _shadowkv(length: int) -> tuple[dict[str, Any], str]:
    total, chunk = length // BASELINE_SHARE, 8
    share = min(1.0, total / 2 / ((48 + 4) * chunk))
    outliers, local = max(int(48 * share), 1), max(int(4 * share), 1)
    note = f"1/{BASELINE_SHARE} of the context, outliers and the end of the prompt too"
    kept = (outliers + local) * chunk
    return {"outlier_chunks": outliers, "local_chunks": local, "budget": total - kept}, note


def _infllm(length: int) -> tuple[dict[str, Any], str]:
    total, block = length // BASELINE_SHARE, 128
    if total >= 128 + 4096 + 2048:
        return {}, ""
    while block > 8 and 4 * block > total:
        block //= 2
    share = min(1.0, total / 2 / (128 + 4096))
    sinks, local = int(128 * share), int(4096 * share)
    knobs = {"num_sink": sinks, "num_local": local, "chunk": min(512, local), "block_size": block}
    note = f"1/{BASELINE_SHARE} of the context, sinks and recent tokens too"
    note += f"; blocks of {block} tokens" if block < 128 else ""
    return {**knobs, "budget": total - sinks - local}, note


def _retroinfer(length: int) -> tuple[dict[str, Any], str]:
    buffer = max(min(1024, length // BASELINE_SHARE), 16)
    return {"fraction": 1 / BASELINE_SHARE, "buffer": buffer}, f"1/{BASELINE_SHARE} of the clusters exactly"


_SCALED: dict[str, Callable[[int], tuple[dict[str, Any], str]]] = {
    "tokenselect": _tokenselect,
    "pariskv": _pariskv,
    "sentencekv": _sentencekv,
    "mosaickv": _mosaickv,
    "chess": _chess,
    "pqcache": _pqcache,
    "retrievalattention": _searched(128, 512, " for each query head"),
    "socket": _searched(128, 128),
    "freekv": _freekv,
    "shadowkv": _shadowkv,
    "infllm": _infllm,
    "retroinfer": _retroinfer,
}


def knobs_by_method(
    pairs: Sequence[str], parse: Callable[[str, Sequence[str]], dict[str, Any]] = registry.parse_knobs
) -> dict[str, dict[str, Any]]:
    """Parse knobs by method from texts `method.knob=value`.

    Args:
        pairs: the texts.
        parse: parses the texts `knob=value` of a method.

    Raises:
        ValueError: a text has no dot before its equals sign, a method is unknown, or `parse` refuses a text.
    """
    grouped: dict[str, list[str]] = {}
    for pair in pairs:
        named, equals, value = pair.partition("=")
        name, dot, knob = named.rpartition(".")  # a path has dots of its own
        if not dot or not equals:
            raise ValueError(f"--set takes METHOD.KNOB=VALUE, got {pair!r}")
        grouped.setdefault(registry.canonical_name(name), []).append(f"{knob}={value}")
    for name in grouped:
        registry.find(name)  # refuses unknown names
    return {name: parse(name, texts) for name, texts in grouped.items()}
