"""Ablation of SentenceKV: unit, query, pool of kept tokens, pooling of their votes, and mode."""

from __future__ import annotations

from typing import Any

from experiments.lab.ablations.arms import Lab, Methods, Table, table
from experiments.lab.readings import read_as
from experiments.lab.readings.sentencekv import Chunks, CodeMode, CurrentQuery
from kvjax import registry
from kvjax.methods.sentencekv import RELEASED
from kvjax.protocol.method import Method

_FACTORS = (1.0, 3.0, 5.0)  # in addition to the paper's 2


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
        for factor in _FACTORS:
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
        for prompt in lab.prompts(task, min(lab.samples, 2)):
            count = int(boundary[list(prompt)].sum())
            if count * 400 >= len(prompt):  # prompts of JSON have no sentences
                tokens, ends = tokens + len(prompt), ends + count
    return round(tokens / ends) if ends else 32
