"""The ablations by name, as tables of settings. Traced knobs vary under a fixed capacity, so tables share programs."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from experiments.answering import Calibration, chess_thresholds
from experiments.lab.ablations.arms import WRITTEN, WRITTEN_TASK, Arm, Lab, Methods, Table, table
from experiments.lab.readings import read_as
from experiments.lab.readings.pariskv import PlainKeys
from experiments.lab.readings.sentencekv import Chunks, CodeMode, CurrentQuery
from experiments.lab.readings.tokenselect import HardVotes, RawVotes
from kvjax import registry
from kvjax.methods import TokenSelect
from kvjax.methods.chess.method import PRINTED
from kvjax.methods.sentencekv import RELEASED
from kvjax.protocol.method import Method

_CHUNK = 128  # prompt tokens that share a selection of TokenSelect, so few that they do not decide a score
NO_REUSE = 2.0  # a cosine that no query of TokenSelect reaches: the selection cache is off
NEVER = 10**6  # pages of CHESS; an interval that no text reaches
# Shares of grids, chunks and pages whose products are the budgets of CHESS' table.
CHESS_BUDGETS = {
    73: (0.9, 0.9, 0.9), 57: (0.9, 0.8, 0.79), 50: (0.9, 0.8, 0.7), 40: (0.8, 0.7, 0.7),
    28: (0.8, 0.7, 0.5), 21: (0.7, 0.6, 0.5), 9: (0.6, 0.5, 0.3), 1: (0.5, 0.2, 0.1),
}  # fmt: skip
# Where CHESS' paper is silent: the default and one point changed at a time, then the printed form and one more point.
READINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "keys after rotation": {"page_vec_rope": "post"},
    "scores not centred": {"centred": False},
    "sinks and window ranked": {"candidates": "all"},
    "the window as anchor": {"anchor_pages": None},
    "no grids and chunks": {"hierarchy": False},
    "as printed": PRINTED,
    "as printed, keys before rotation": {**PRINTED, "page_vec_rope": "pre"},
    "as printed, centred scores": {**PRINTED, "centred": True},
    "as printed, sinks and window not ranked": {**PRINTED, "candidates": "history"},
    "as printed, anchor of 2 pages": {**PRINTED, "anchor_pages": 2},
    "as printed, no grids and chunks": {**PRINTED, "hierarchy": False},
}
_VOTE_TASKS = ("kv_retrieval", "niah_multikey_2", "niah_multikey_3", "niah_multivalue")
_CHANNEL_TASKS = ("niah_multikey_2", "niah_multivalue")


def _method(lab: Lab, share: int, **knobs: Any) -> Method:
    """Make TokenSelect with a part of its paper's k, which prefills in chunks so small that they do not decide the score."""
    paper = lab.method("tokenselect")
    small = {"chunk": min(_CHUNK, paper.num_local), "capacity": paper.budget}
    return lab.method("tokenselect", **{**small, "budget": max(paper.budget // share, 1), **knobs})


def votes(lab: Lab) -> list[Table]:
    """Compare the functions by which TokenSelect's heads vote."""
    arms = {}
    for vote, cls in (("soft", TokenSelect), ("hard", HardVotes), ("raw", RawVotes)):
        for share in (1, 8):
            method = read_as(cls, _method(lab, share, theta=NO_REUSE))
            arms[f"{vote}, k {method.budget}"] = ({"vote": vote, "share": share}, method)
    text = (
        "soft: sum over heads of softmax probabilities; hard: every head votes for its own k best; raw: sum of logits. "
        f"Selected anew in every step (theta {NO_REUSE:g}), prompt in chunks of at most {_CHUNK}."
    )
    return [table(lab, "TokenSelect: how heads vote", text, lab.pick(*_VOTE_TASKS), arms)]


def theta(lab: Lab) -> list[Table]:
    """Compare thresholds of TokenSelect's selection cache."""
    arms = {}
    for share in (1, 8):
        for value in (0.5, 0.7, 0.8, 0.9, 0.95, NO_REUSE):
            method = _method(lab, share, theta=value)
            arms[f"theta {value:g}, k {method.budget}"] = ({"theta": value, "share": share}, method)
    text = (
        "A decode step reuses the last selection if the cosine of its query with the one that selected is at least theta; "
        f"{NO_REUSE:g} never reuses. hit rate: steps that reused. The prompt is read in chunks of at most {_CHUNK}."
    )
    tasks = lab.pick("kv_retrieval", "niah_multikey_3", "niah_single_2")
    return [table(lab, "TokenSelect: the selection cache", text, tasks, arms)]


def chunk(lab: Lab) -> list[Table]:
    """Compare numbers of prompt tokens that share one of TokenSelect's selections."""
    most = lab.method("tokenselect").num_local
    sizes = sorted({most, *(max(most // part, 2) for part in (2, 4, 16))}, reverse=True)
    names = dict(zip(sizes, ("paper", "half", "quarter", "sixteenth"), strict=False))
    arms = {f"chunk {size}": ({"chunk": names[size]}, _method(lab, 1, chunk=size, theta=0.9)) for size in sizes}
    text = (
        "Prompt tokens whose mean query selects for all of them. The paper's chunk is 512, as many as the local window; "
        "the default here is 256."
    )
    return [table(lab, "TokenSelect: prompt tokens that share a selection", text, lab.pick(*_VOTE_TASKS), arms)]


def _self_extend(trained: int, times: int) -> dict[str, int]:
    """Choose the smallest power of two as group size that keeps ``times`` the trained length within trained positions."""
    window, group = trained // 2, 1
    while window + (times * trained - window) // group > trained:
        group *= 2
    return {"group_size": group, "window": window // group * group}


def extrapolate(lab: Lab) -> list[Table]:
    """Compare methods that re-number positions, and Full, beyond the trained length."""
    tasks = lab.pick("niah_single_1", "number_string")
    window, arms = lab.trained_length, []

    def add(name: str, method: Method, times: int) -> None:
        samples = lab.settings.samples if times == 1 else max(2, lab.settings.samples // times)
        setting = {"method": name, "times": times}
        arms.append(Arm(f"{name}, {times * window}", setting, method, tasks, times * window, samples, lab.base))

    add("full", registry.make("full"), 1)
    for times in (2, 4, 8):
        length = times * window
        paper = lab.method("tokenselect", length)
        paper = dataclasses.replace(paper, chunk=paper.num_local)  # as in the paper, and as in the record
        add("full", registry.make("full"), times)
        # As many tokens as TokenSelect attends to, but only sinks and window.
        attended = paper.num_sink + paper.num_local + paper.budget
        add("streamingllm", registry.make("streamingllm", budget=min(attended, window)), times)
        add("tokenselect", paper, times)
        for name in ("ntk", "pi"):
            add(name, registry.make(name, factor=float(times)), times)
        add("selfextend", registry.make("selfextend", **_self_extend(window, times)), times)
        add("infllm", lab.method("infllm", length), times)
        same = {knob: vars(paper)[knob] for knob in ("budget", "num_sink", "num_local", "chunk")}  # the paper's 2K+512
        add("infllm with as many tokens", lab.method("infllm", length, **same), times)
        add("tokenselect in small chunks", lab.method("tokenselect", length, chunk=min(_CHUNK, paper.num_local)), times)
    text = (
        f"Trained on contexts of up to {window} tokens. Full rotates to the true positions; its position limit is raised. "
        f"StreamingLLM and TokenSelect re-number the tokens that they attend to. Small chunks: {_CHUNK} prompt tokens. "
        "NTK, PI and SelfExtend attend to all tokens at changed positions, which just fit the trained length; InfLLM attends "
        "to an eighth, or to as many tokens as TokenSelect, and gives what is far away one distance."
    )
    return [Table("TokenSelect: beyond the trained length", text, tuple(arms), solved=50.0)]


def sentences(lab: Lab) -> list[Table]:
    """Compare variants of each part of SentenceKV, at budgets of a 32nd and an eighth of the context."""
    most = max(lab.length // 8, 80)
    tasks = lab.pick("niah_single_2", "niah_multikey_2", "niah_multivalue", "vt")
    chunk = _sentence_size(lab, tasks)
    snapkv = {"capacity": 2 * most, "kernel": lab.method("sentencekv").kernel}
    arms: Methods = {}
    for budget in (max(lab.length // 32, 80), most):

        def make(budget: int = budget, **knobs: Any) -> Method:
            return lab.method("sentencekv", **{"budget": budget, "capacity": most, **knobs})

        def add(variant: str, method: Method, budget: int = budget) -> None:
            arms[f"{variant}, tau {budget}"] = ({"variant": variant, "tau": budget}, method)

        add("sentences, mean query, r 2", make())
        add(f"chunks of {chunk}", read_as(Chunks, make(), chunk=chunk))
        add("current query", read_as(CurrentQuery, make()))
        add("code mode", read_as(CodeMode, make()))
        add("a pool for each KV head", make(prefilter="kv_head"))
        add("no pooling", make(kernel=1))
        add("released pool and pooling", make(**RELEASED))
        for factor in (1.0, 3.0, 5.0):  # beside the paper's 2
            add(f"r {factor:g}", make(keep_factor=factor))
        add("SnapKV", registry.make("snapkv", budget=budget, **snapkv))
        add("SnapKV at 2 tau", registry.make("snapkv", budget=2 * budget, **snapkv))
    arms = {name: ({**s, "variant": _key(s["variant"])}, method) for name, (s, method) in arms.items()}
    text = (
        "Each row differs from the first of its tau in what it names. chunks: equal parts as long as a sentence is on "
        "average; current query: of the newest token instead of the open sentence's mean; code mode: the released code's "
        "treatment of the open sentence; pooling: the maximum over neighbouring tokens' votes for the pool; r: prompt tokens "
        "kept, over tau. SnapKV averages over as many tokens, and at 2 tau keeps as many as r 2, for each KV head. It "
        "attends to all that it keeps."
    )
    return [table(lab, "SentenceKV: unit, query, pool, mode", text, tasks, arms)]


def _key(variant: str) -> str:
    """Return the name of a variant in claims, which does not depend on the length of sentences."""
    return "chunks" if variant.startswith("chunks") else variant


def _sentence_size(lab: Lab, tasks: tuple[str, ...]) -> int:
    """Compute the mean number of tokens per sentence, over the prompts that have sentences."""
    boundary = registry.make("sentencekv", lab.model.tokenizer, lab.model.config.vocab_size).boundary
    tokens = ends = 0
    for task in tasks:
        for prompt in lab.prompts(task, min(lab.settings.samples, 2)):
            count = int(boundary[list(prompt)].sum())
            if count * 400 >= len(prompt):  # prompts of JSON have no sentences
                tokens, ends = tokens + len(prompt), ends + count
    return round(tokens / ends) if ends else 32


def chess(lab: Lab) -> list[Table]:
    """Compare CHESS's budgets, the triggers that rebuild its page list, and readings of the paper."""
    tasks = lab.pick("niah_single_2", "niah_multikey_2", "niah_multivalue")
    calibration = Calibration(
        (WRITTEN_TASK,), lab.length, lab.settings.calibration_prompts, lab.settings.new_tokens, lab.settings.seed
    )
    thresholds = chess_thresholds(lab.base, calibration, lab.results, lab.reading(lab.base))

    def make(budget: int, **knobs: Any) -> Method:
        return lab.method("chess", ratios=CHESS_BUDGETS[budget], capacity=CHESS_BUDGETS[73], **thresholds, **knobs)

    budgets: Methods = {
        f"{budget} % = {' x '.join(map(str, ratios))}": ({"budget": budget}, make(budget, trigger="fixed"))
        for budget, ratios in CHESS_BUDGETS.items()
    }
    first = "Product of the shares of grids, chunks and pages; sink and window pages come on top. Rebuilt every 6 pages."
    triggers: Methods = {}
    for budget in (1, 40):
        for trigger, name, knobs in (
            ("and", "and", {}),
            ("or", "or", {}),
            ("fixed", "every 6 pages", {}),
            ("fixed", "never", {"interval": NEVER}),
        ):
            setting = {"trigger": name, "budget": budget}
            triggers[f"{name}, {budget} %"] = (setting, make(budget, trigger=trigger, **knobs))
    second = (
        f"Along {lab.settings.new_tokens} tokens that Full wrote from {WRITTEN_TASK} prompts (past the answer it goes on). "
        f"Thresholds: 99th percentiles over pages of other prompts, entropy {thresholds['tau_entropy']:.3f} nats, variance "
        f"{thresholds['tau_varentropy']:.3f}."
    )
    readings: Methods = {}
    for budget in (9, 40):
        for name, knobs in READINGS.items():
            setting = {"reading": name, "budget": budget}
            readings[f"{name}, {budget} %"] = (setting, make(budget, **{"trigger": "fixed", **knobs}))
    third = (
        "What the paper does not say, read otherwise: one point of the default at a time, then the printed form and one "
        "more point. Rebuilt every 6 pages. Where sinks and window are not ranked, they come on top."
    )
    return [
        table(lab, "CHESS: budget", first, tasks, budgets),
        table(lab, "CHESS: when the page list is rebuilt", second, (), triggers, (WRITTEN,)),
        table(lab, "CHESS: readings", third, tasks, readings),
    ]


def channels(lab: Lab) -> list[Table]:
    """Compare MosaicKV's shares of channels and of blocks."""
    arms: Methods = {}
    for share in (1.0, 0.5, 0.25):
        for fraction in (1.0, 0.5, 0.25, 0.1):
            method = lab.method("mosaickv", channels=share, fraction=fraction, capacity=1.0)
            arms[f"channels {share:g}, blocks {fraction:g}"] = ({"channels": share, "blocks": fraction}, method)
    head = lab.model.config.head_dim
    text = (
        f"Shares of the {head} channels of a vector and of the 8-token blocks; static strategy, largest channels of each "
        "vector after rotation. The paper keeps 0.25 of the channels, of heads of 128, and attends to 0.1 of the tokens."
    )
    return [table(lab, "MosaicKV: channels and blocks", text, lab.pick(*_CHANNEL_TASKS), arms)]


def strategy(lab: Lab) -> list[Table]:
    """Compare choices of the channels that MosaicKV keeps, and sizes of its blocks."""
    kinds = {
        "largest of each vector, rotated": ("per vector", {}),
        "dynamic strategy": ("dynamic", {"strategy": "dynamic"}),
        "largest of each vector, rotated, blocks of 4": ("blocks of 4", {"block_size": 4}),
    }
    arms: Methods = {}
    for name, (kind, knobs) in kinds.items():
        for fraction, blocks in ((1.0, "all blocks"), (0.1, "a tenth of the blocks")):
            method = lab.method("mosaickv", fraction=fraction, capacity=1.0, **knobs)
            arms[f"{name}, {blocks}"] = ({"kind": kind, "blocks": fraction}, method)
    text = (
        "A quarter of the channels kept (but for the dynamic strategy, which chooses). rotated: into the eigenvectors of the "
        "segment's second moments."
    )
    return [table(lab, "MosaicKV: which channels are kept", text, lab.pick(*_CHANNEL_TASKS), arms)]


def hashing(lab: Lab) -> list[Table]:
    """Compare ParisKV with and without the rotation of keys before hashing, at several k."""
    paper = lab.method("pariskv").budget
    arms: Methods = {}
    for rotate, name in ((False, "plain keys"), (True, "rotated keys")):
        for part in (1, 3, 10):
            budget = max(paper // part, 1)
            method = lab.method("pariskv", budget=budget, capacity=paper)
            method = method if rotate else read_as(PlainKeys, method)
            arms[f"{name}, k {budget}"] = ({"rotate": rotate, "part": part}, method)
    text = (
        "Keys hashed as they are, or after a randomized Hadamard rotation. Normalising keys has no row: codes and weights "
        "of a slice do not depend on the key's length, which re-ranking multiplies back."
    )
    tasks = lab.pick("kv_retrieval", "niah_multikey_3", "niah_multivalue")
    return [table(lab, "ParisKV: rotation before hashing", text, tasks, arms)]


ABLATIONS: dict[str, Callable[[Lab], list[Table]]] = {
    plan.__name__: plan for plan in (votes, theta, chunk, extrapolate, sentences, chess, channels, strategy, hashing)
}
