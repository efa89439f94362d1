"""What the ablations vary. Numbers that may be traced vary under one capacity, so a table needs few compilations."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import models
from experiments.answering.cell import LoadedModel
from experiments.answering.presets import Calibration, chess_thresholds, paper_method
from experiments.answering.prompts import Cell, Prompts, make_prompts
from experiments.records.resumable import Results
from experiments.tasks import GROUPS, get_task
from kvjax import registry
from kvjax.method import Method

HARD = ("kv_retrieval", "niah_multikey_2", "niah_multikey_3", "niah_multivalue", "vt")
EASY = ("niah_single_2",)
AGREEMENT = "agreement"  # stands for `experiments.ablations.agreement` where a task is named
AGREEMENT_TASK = "niah_multikey_1"  # whose prompts Full writes on from: it goes on asking and answering
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


@dataclasses.dataclass(frozen=True)
class Lab:
    """What all ablations share.

    Attributes:
        model: the model.
        results: record of the ablation, which keeps thresholds.
        length: tokens of prompt and answer.
        samples: samples a cell.
        seed: of the samples.
        tasks: instead of each ablation's own, or None.
        trained_length: longest context the model was trained on.
        calibration_prompts: CHESS is calibrated on.
        new_tokens: tokens of the texts for agreement and calibration.
    """

    model: LoadedModel
    results: Results
    length: int
    samples: int
    seed: int
    tasks: tuple[str, ...] | None
    trained_length: int
    calibration_prompts: int
    new_tokens: int

    def pick(self, *tasks: str) -> tuple[str, ...]:
        """The tasks of a table."""
        return self.tasks or tasks

    def method(self, name: str, length: int | None = None, **knobs: Any) -> Method:
        """A method at its paper's budget, scaled to the length, but for `knobs`."""
        return paper_method(
            name, length or self.length, tokenizer=self.model.tokenizer, config=self.model.config, given=knobs
        ).method

    def prompts(self, task: str, samples: int) -> Prompts:
        """Prompts of a task at the lab's length, made here."""
        return make_prompts(self.model.tokenizer_file, Cell(task, self.length, samples, self.seed))


@dataclasses.dataclass(frozen=True)
class Arm:
    """One row of a table: a method on tasks."""

    name: str
    method: Method
    tasks: tuple[str, ...]
    length: int
    samples: int
    config: models.ModelConfig


@dataclasses.dataclass(frozen=True)
class Table:
    """Rows to compare, and what distinguishes them."""

    title: str
    text: str
    arms: tuple[Arm, ...]


def _table(lab: Lab, title: str, text: str, tasks: tuple[str, ...], methods: dict[str, Method]) -> Table:
    """A table whose rows differ in their method only."""
    return Table(
        title,
        text,
        tuple(Arm(n, m, tasks, lab.length, lab.samples, lab.model.config) for n, m in methods.items()),
    )


def _small_chunks(lab: Lab, **knobs: Any) -> Method:
    """TokenSelect with the prompt read in small chunks: with 512 it is the prompt that decides (see `causes`)."""
    return lab.method("tokenselect", chunk=min(64, lab.method("tokenselect").num_local), **knobs)


def votes(lab: Lab) -> list[Table]:
    """TokenSelect's selection function."""
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
    return [_table(lab, "TokenSelect: how heads vote", text, lab.pick("kv_retrieval", "niah_multikey_2"), arms)]


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
    return [_table(lab, "TokenSelect: the selection cache", text, tasks, arms)]


def extrapolate(lab: Lab) -> list[Table]:
    """TokenSelect and Full beyond the trained length."""
    tasks = lab.pick("niah_single_1", "passkey", "kv_retrieval")
    arms = []
    for times in (2, 4, 8):
        length = times * lab.trained_length
        # Twice the length, because answers may take more tokens than the tasks reserve.
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
    """SentenceKV's unit, query, pool and mode."""
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
    return [_table(lab, "SentenceKV: unit, query, pool, mode", text, tasks, arms)]


def _sentence_size(lab: Lab, tasks: tuple[str, ...]) -> int:
    """Mean tokens per sentence over prompts that have sentences."""
    table = registry.make("sentencekv", lab.model.tokenizer, lab.model.config.vocab_size).boundary
    tokens = ends = 0
    for task in tasks:
        for prompt in lab.prompts(task, min(lab.samples, 4)).tokens:
            found = int(table[list(prompt)].sum())
            if found * 400 >= len(prompt):  # JSON has none
                tokens, ends = tokens + len(prompt), ends + found
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
        _table(lab, "CHESS: budget", first, tasks, budgets),
        _table(lab, "CHESS: when the page list is rebuilt", second, (AGREEMENT,), triggers),
    ]


def channels(lab: Lab) -> list[Table]:
    """MosaicKV's pruning."""
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
    return [_table(lab, "MosaicKV: which channels are kept", text, lab.pick(*HARD, *EASY), arms)]


def hashing(lab: Lab) -> list[Table]:
    """ParisKV's rotation."""
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
    return [_table(lab, "ParisKV: rotation before hashing", text, lab.pick(*HARD, *EASY), arms)]


def causes(lab: Lab) -> list[Table]:
    """What costs points where a method at its paper's budget loses some: one part of it undone per row."""
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
        _table(lab, "TokenSelect: prompt tokens that share a selection", "The paper's chunk is 512.", every, prompt),
        _table(lab, "SentenceKV: prefilter and ranking", "tau 1024, r 2 but where said.", every, read),
        _table(
            lab, "MosaicKV: blocks and channels", "A quarter of the channels, a tenth of 8-token blocks.", every, blocks
        ),
    ]


ABLATIONS: dict[str, Callable[[Lab], list[Table]]] = {
    plan.__name__: plan for plan in (votes, theta, extrapolate, sentences, chess, channels, hashing, causes)
}


def check_tasks(tasks: tuple[str, ...] | None) -> None:
    """Refuses unknown tasks.

    Raises:
        ValueError: with the nearest known name.
    """
    for task in tasks or ():
        get_task(task)
