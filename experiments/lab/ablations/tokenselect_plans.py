"""Ablations of TokenSelect: votes of heads, the selection cache, the prompt's chunks, and lengths beyond the window."""

from __future__ import annotations

import dataclasses
from typing import Any

from experiments.lab.ablations.arms import Arm, Lab, Table, table
from experiments.lab.readings import read_as
from experiments.lab.readings.tokenselect import HardVotes, RawVotes
from kvjax import registry
from kvjax.methods import TokenSelect
from kvjax.protocol.method import Method

NEVER = 2.0  # a cosine that no query reaches: the selection cache is off
_TASKS = ("kv_retrieval", "niah_multikey_2", "niah_multikey_3", "niah_multivalue")
_CHUNK = 128


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
            method = read_as(cls, _method(lab, share, theta=NEVER))
            arms[f"{vote}, k {method.budget}"] = ({"vote": vote, "share": share}, method)
    text = (
        "soft: sum over heads of softmax probabilities; hard: every head votes for its own k best; raw: sum of logits. "
        f"Selected anew in every step (theta {NEVER:g}), prompt in chunks of at most {_CHUNK}."
    )
    return [table(lab, "TokenSelect: how heads vote", text, lab.pick(*_TASKS), arms)]


def theta(lab: Lab) -> list[Table]:
    """Compare thresholds of TokenSelect's selection cache."""
    arms = {}
    for share in (1, 8):
        for value in (0.5, 0.7, 0.8, 0.9, 0.95, NEVER):
            method = _method(lab, share, theta=value)
            arms[f"theta {value:g}, k {method.budget}"] = ({"theta": value, "share": share}, method)
    text = (
        "A decode step reuses the last selection if the cosine of its query with the one that selected is at least theta; "
        f"{NEVER:g} never reuses. hit rate: steps that reused. The prompt is read in chunks of at most {_CHUNK}."
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
    return [table(lab, "TokenSelect: prompt tokens that share a selection", text, lab.pick(*_TASKS), arms)]


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
        samples = lab.samples if times == 1 else max(2, lab.samples // times)
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
