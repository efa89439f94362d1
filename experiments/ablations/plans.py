"""The tables of the ablations. Traced numbers vary under a fixed capacity, so that a table needs few compilations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

from experiments.ablations.arms import AGREEMENT, AGREEMENT_TASK, Arm, Lab, Table, table
from experiments.answering import Calibration, chess_thresholds
from experiments.tasks import GROUPS
from kvjax import registry
from kvjax.method import Method

HARD = ("kv_retrieval", "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "vt")
EASY = ("niah_single_2",)
NEVER = 10**6  # pages; an interval that no text reaches
# Shares of grids, chunks and pages whose products are the budgets of the paper's table.
CHESS_BUDGETS = {
    73: (0.9, 0.9, 0.9),
    57: (0.9, 0.8, 0.79),
    50: (0.9, 0.8, 0.7),
    40: (0.8, 0.7, 0.7),
    28: (0.8, 0.7, 0.5),
    21: (0.7, 0.6, 0.5),
    9: (0.6, 0.5, 0.3),
    1: (0.5, 0.2, 0.1),
}


def _small_chunks(lab: Lab, **knobs: Any) -> Method:
    """TokenSelect that reads the prompt in small chunks; with chunks of 512, the prompt decides the score (see `causes`)."""
    return lab.method("tokenselect", chunk=min(64, lab.method("tokenselect").num_local), **knobs)


def votes(lab: Lab) -> list[Table]:
    """The function by which TokenSelect's heads vote."""
    most = lab.method("tokenselect").budget
    arms = {"full": registry.make("full")}
    for vote in ("soft", "hard", "raw"):
        for part in (4, 2, 1):
            budget = max(most // part, 1)
            arms[f"{vote}, k {budget}"] = _small_chunks(lab, vote=vote, budget=budget, capacity=most, theta=2.0)
    text = (
        "soft: sum over heads of softmax probabilities; hard: every head votes for its own k best; raw: sum of logits. "
        "Selected anew in every step (theta 2), prompt in chunks of at most 64."
    )
    return [table(lab, "TokenSelect: how heads vote", text, lab.pick("kv_retrieval", "niah_multikey_2"), arms)]


def theta(lab: Lab) -> list[Table]:
    """TokenSelect's selection cache."""
    most = lab.method("tokenselect").budget
    arms = {"full": registry.make("full")}
    for budget in (most, max(most // 8, 1)):
        for value in (0.5, 0.6, 0.7, 0.8, 0.85, 0.9, 0.95, 2.0):
            name = f"theta {value:g}, k {budget}"
            arms[name] = _small_chunks(lab, budget=budget, capacity=most, theta=value)
    text = (
        "A decode step reuses the last selection if the cosine of its query with the one that selected is at least theta; "
        "2 never reuses. hit rate: steps that reused. The prompt is read in chunks of at most 64."
    )
    tasks = lab.pick("kv_retrieval", "niah_multikey_3", "niah_multivalue", *EASY)
    return [table(lab, "TokenSelect: the selection cache", text, tasks, arms)]


def extrapolate(lab: Lab) -> list[Table]:
    """TokenSelect and Full beyond the trained length."""
    tasks = lab.pick("niah_single_1", "passkey", "kv_retrieval")
    arms = []
    for times in (2, 4, 8):
        length = times * lab.trained_length
        # Twice the length, because answers can take more tokens than the tasks reserve.
        config = dataclasses.replace(
            lab.model.config, max_position_embeddings=max(2 * length, lab.model.config.max_position_embeddings)
        )
        samples = min(lab.samples, max(2, lab.samples // times))
        arms.append(Arm(f"full, {length}", registry.make("full"), tasks, length, samples, config))
        method = lab.method("tokenselect", length)
        arms.append(Arm(f"tokenselect, {length}", method, tasks, length, samples, lab.model.config))
        method = lab.method("tokenselect", length, chunk=min(128, method.num_local))
        arms.append(Arm(f"tokenselect, chunk 128, {length}", method, tasks, length, samples, lab.model.config))
    text = (
        f"Trained on contexts of up to {lab.trained_length} tokens. Full rotates to the true positions, TokenSelect "
        "re-numbers the tokens it attends to, prompt included; the model's position limit is raised for Full."
    )
    return [Table("TokenSelect: beyond the trained length", text, tuple(arms))]


def sentences(lab: Lab) -> list[Table]:
    """SentenceKV's unit, query, pool of kept tokens, and mode."""
    most = lab.method("sentencekv", budget=max(lab.length // 8, 80)).budget
    pool = 5 * most
    tasks = lab.pick(*HARD, *EASY)
    chunk = _sentence_size(lab, tasks)
    arms: dict[str, Method] = {"full": registry.make("full")}
    for budget in (max(lab.length // 32, 80), most):

        def make(budget: int = budget, **knobs: Any) -> Method:
            return lab.method("sentencekv", **{"budget": budget, "capacity": most, "pool": pool, **knobs})

        arms[f"sentences, mean query, r 2, tau {budget}"] = make()
        arms[f"chunks of {chunk}, tau {budget}"] = make(segment="chunk", chunk=chunk)
        arms[f"current query, tau {budget}"] = make(query="current")
        arms[f"code mode, tau {budget}"] = make(mode="code")
        for factor in (1.0, 3.0, 4.0, 5.0):
            arms[f"r {factor:g}, tau {budget}"] = make(keep_factor=factor)
    text = (
        "Each row differs from the first of its tau in what it names. chunks: equal parts as long as a sentence is on "
        "average; current query: of the newest token instead of the open sentence's mean; code mode: the released code's "
        "treatment of the open sentence; r: prompt tokens kept, over tau."
    )
    return [table(lab, "SentenceKV: unit, query, pool, mode", text, tasks, arms)]


def _sentence_size(lab: Lab, tasks: tuple[str, ...]) -> int:
    """Mean number of tokens per sentence, over the prompts that have sentences."""
    boundary = registry.make("sentencekv", lab.model.tokenizer, lab.model.config.vocab_size).boundary
    tokens = ends = 0
    for task in tasks:
        for prompt in lab.prompts(task, min(lab.samples, 4)):
            count = int(boundary[list(prompt)].sum())
            if count * 400 >= len(prompt):  # prompts of JSON have no sentences
                tokens, ends = tokens + len(prompt), ends + count
    return round(tokens / ends) if ends else 32


def chess(lab: Lab) -> list[Table]:
    """CHESS's budget and trigger."""
    tasks = lab.pick(*HARD, *EASY)
    calibration = Calibration(tasks, lab.length, lab.calibration_prompts, lab.new_tokens, lab.seed)
    thresholds = chess_thresholds(lab.model, calibration, lab.results)
    most = CHESS_BUDGETS[73]

    def make(budget: int, **knobs: Any) -> Method:
        return lab.method("chess", ratios=CHESS_BUDGETS[budget], capacity=most, **thresholds, **knobs)

    budgets = {"full": registry.make("full")}
    for budget, ratios in CHESS_BUDGETS.items():
        budgets[f"{budget} % = {' x '.join(map(str, ratios))}"] = make(budget, trigger="fixed")
    first = (
        "Product of the shares of grids, chunks and pages; sink and window pages come on top. Rebuilt every 6 pages."
    )
    triggers: dict[str, Method] = {}
    for budget in (1, 40):
        triggers[f"and, {budget} %"] = make(budget, trigger="and")
        triggers[f"or, {budget} %"] = make(budget, trigger="or")
        triggers[f"every 6 pages, {budget} %"] = make(budget, trigger="fixed")
        triggers[f"never, {budget} %"] = make(budget, trigger="fixed", interval=NEVER)
    second = (
        f"Along {lab.new_tokens} tokens that Full wrote from {AGREEMENT_TASK} prompts (past the answer it goes on asking "
        "and answering): next-token choices that agree with Full's. Thresholds: 99th percentiles over pages of other "
        f"prompts, entropy {thresholds['tau_entropy']:.3f} nats, variance {thresholds['tau_varentropy']:.3f}."
    )
    return [
        table(lab, "CHESS: budget", first, tasks, budgets),
        table(lab, "CHESS: when the page list is rebuilt", second, (AGREEMENT,), triggers),
    ]


def channels(lab: Lab) -> list[Table]:
    """The channels that MosaicKV keeps."""
    kinds: dict[str, dict[str, Any]] = {
        "same channels for all, model's basis": {"rotate": False, "per_vector": False},
        "same channels for all, rotated": {"per_vector": False},
        "largest of each vector, rotated": {},
        "dynamic strategy": {"strategy": "dynamic"},
    }
    arms = {"full": registry.make("full")}
    for kind, knobs in kinds.items():
        for share, blocks in ((1.0, "all blocks"), (0.1, "a tenth of the blocks")):
            arms[f"{kind}, {blocks}"] = lab.method("mosaickv", fraction=share, capacity=1.0, **knobs)
    text = (
        "A quarter of the channels kept (but for the dynamic strategy, which chooses). rotated: into the eigenvectors of the "
        "segment's second moments."
    )
    return [table(lab, "MosaicKV: which channels are kept", text, lab.pick(*HARD, *EASY), arms)]


def hashing(lab: Lab) -> list[Table]:
    """ParisKV's rotation of the keys before they are hashed."""
    most = lab.method("pariskv").budget
    arms = {"full": registry.make("full")}
    for rotate, name in ((False, "plain keys"), (True, "rotated keys")):
        for part in (1, 0.3, 0.1):
            budget = max(math.floor(most * part), 1)
            arms[f"{name}, k {budget}"] = lab.method("pariskv", rotate=rotate, budget=budget, capacity=most)
    text = (
        "Keys hashed as they are, or after a randomized Hadamard rotation. Normalising keys has no row: codes and weights "
        "of a slice do not depend on the key's length, which re-ranking multiplies back."
    )
    return [table(lab, "ParisKV: rotation before hashing", text, lab.pick(*HARD, *EASY), arms)]


def causes(lab: Lab) -> list[Table]:
    """Why methods at their papers' budgets lose points: in each row, a single part of a method is undone."""
    length = lab.length
    most = lab.method("tokenselect").num_local
    prompt = {
        f"chunk {chunk}": lab.method("tokenselect", chunk=chunk)
        for chunk in sorted({most, most // 4, most // 16})[::-1]
    }
    read = {
        "SentenceKV": lab.method("sentencekv"),
        "no prefilter (r covers the prompt)": lab.method("sentencekv", keep_factor=max(1.0, length / 1024)),
        "prefilter pooled over 31 tokens": lab.method("sentencekv", kernel=31),
        "prefilter alone (SnapKV, 2048)": registry.make("snapkv", budget=2048, kernel=7, pooling="max"),
    }
    blocks = {
        "MosaicKV": lab.method("mosaickv"),
        "all blocks": lab.method("mosaickv", fraction=1.0),
        "all channels": lab.method("mosaickv", channels=1.0),
        "blocks of 4": lab.method("mosaickv", block_size=4),
        "blocks of 4, all channels": lab.method("mosaickv", block_size=4, channels=1.0),
        "group by softmax": lab.method("mosaickv", reduce="softmax"),
        "first block kept": lab.method("mosaickv", keep_first_block=True),
    }
    every = lab.pick(*GROUPS["trained"])
    return [
        table(lab, "TokenSelect: prompt tokens that share a selection", "The paper's chunk is 512.", every, prompt),
        table(lab, "SentenceKV: prefilter and ranking", "tau 1024, r 2 but where said.", every, read),
        table(
            lab, "MosaicKV: blocks and channels", "A quarter of the channels, a tenth of 8-token blocks.", every, blocks
        ),
    ]


ABLATIONS: dict[str, Callable[[Lab], list[Table]]] = {
    plan.__name__: plan for plan in (votes, theta, extrapolate, sentences, chess, channels, hashing, causes)
}
