"""Exact decoding, measured: `python -m experiments.lab.exact --model qwen2.5-coder-1.5b --lengths 16384 --budgets 1/8`.

``--parts accepted`` counts the drafted tokens that Full keeps on real prompts: prose, code, tasks of long answers, each at
several temperatures. The prompts are read once for many drafts, and for all temperatures. ``speed`` times Verified beside
Full in the same run, and ``rejected`` a draft that is always wrong. ``equal`` compares tokens with Full's in float32.

A row is written as soon as it is measured, and is not measured again. `kvjax speed --methods verified_quest --acceptance ...`
times the shape of a large model.
"""

from __future__ import annotations

import dataclasses
import pathlib
import sys
import time

import jax
from jsonargparse.typing import PositiveInt

from experiments.answering import ModelSettings, load_model
from experiments.cli import Against, Job, option, record_path
from experiments.evaluation import Choice, at_budgets, check_choices, choices_of
from experiments.lab.exact.measure import TEXTS, measure_accepted, measure_equal, measure_times
from experiments.lab.exact.report import exact_tables
from experiments.records import Results, commit, operations, versions
from experiments.speed.rows import finish, note_run, now
from experiments.speed.settings import Output
from experiments.tasks import TASKS

PARTS = {"accepted": measure_accepted, "speed": measure_times, "rejected": measure_times, "equal": measure_equal}
DRAFTS = (
    "snapkv", "quest", "pariskv", "streamingllm", "keydiff", "h2o", "tova", "chess", "sentencekv", "mosaickv", "shadowkv",
    "socket", "pqcache", "retroinfer", "freekv", "pyramidkv", "adakv", "tokenselect", "fromjudge",
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExactSettings(ModelSettings):
    """What `experiments.lab.exact` measures.

    Attributes:
        parts: comma-separated: accepted, the drafted tokens that are kept on real text; speed, tokens per second beside Full;
            rejected, the cost of a draft that is always wrong; equal, whether the tokens are Full's in float32
        methods: comma-separated drafts (default: snapkv, quest, pariskv and sixteen more)
        budgets: comma-separated shares of the length or tokens, for drafts whose budget is not set
        lengths: comma-separated, tokens of prompt and answer together
        texts: comma-separated, prose, code, or tasks
        haystack: of prose: prose, prose:whole (for lengths above 16K), or file:PATH
        samples: texts of each kind in a batch of accepted
        tokens: tokens generated behind each prompt
        depths: comma-separated, tokens that are drafted before a pass
        temperatures: comma-separated; every text is continued at each
        batches: comma-separated, rows of speed and rejected
        repeats: measurements of each time
        group: drafts that read the prompts together
        chunk_size: prompt tokens of a pass
        prompts: prompts of equal
        batch: rows of equal that are decoded together
        seed: seed of texts and draws

    Raises:
        ValueError: unknown names, or numbers out of range.
    """

    parts: tuple[str, ...] = option(("accepted",), choices=tuple(PARTS))
    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in DRAFTS), read=choices_of)
    budgets: tuple[str, ...] = ("1/8",)
    lengths: tuple[PositiveInt, ...] = (2048,)
    texts: tuple[str, ...] = ("prose", "code_completion", "merge")
    haystack: str = "prose"
    samples: PositiveInt = 2
    tokens: PositiveInt = 96
    depths: tuple[PositiveInt, ...] = (8,)
    temperatures: tuple[float, ...] = (0.0, 0.7)
    batches: tuple[PositiveInt, ...] = (1,)
    repeats: PositiveInt = 3
    group: PositiveInt = 8
    chunk_size: PositiveInt = 8192
    prompts: PositiveInt = 200
    batch: PositiveInt = 50
    seed: int = 0

    def __post_init__(self) -> None:
        check_choices(self.methods, self.budgets, min(self.lengths))
        if not self.drafts:
            raise ValueError("methods must name a draft, got full alone")
        if unknown := [name for name in self.texts if name not in (*TEXTS, *TASKS)]:
            raise ValueError(f"texts must be prose, code or a task, got {unknown[0]!r}")
        if min(self.depths) < 2 and "rejected" in self.parts:
            raise ValueError(f"rejected needs depths of at least 2, got {min(self.depths)}")
        if self.tokens <= max(self.depths):
            raise ValueError(f"tokens must be above the depth {max(self.depths)}, got {self.tokens}")

    @property
    def drafts(self) -> list[Choice]:
        """The drafts at each of their budgets."""
        return [choice for choice in at_budgets(self.methods, self.budgets) if choice.name != "full"]


@dataclasses.dataclass(frozen=True)
class ExactCommand(Output):
    """Where `experiments.lab.exact` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/exact.json"), read=record_path)


def _exact(settings: ExactSettings, command: ExactCommand, against: Against) -> None:
    begun = time.monotonic()
    model = load_model(settings.model, settings.dtype, offline=settings.offline, weight_dtype=settings.weight_dtype)
    about = {"device": jax.devices()[0].device_kind, "model": model.name, "dtype": model.dtypes, "weights": model.weights}
    results = Results(command.out, "exact", about)
    note_run(results, now(), {"commit": commit(), "versions": versions(), **about, **operations()})

    def say(text: str) -> None:
        print(f"[{time.monotonic() - begun:6.1f} s] {text}", file=sys.stderr, flush=True)

    for part in settings.parts:
        PARTS[part](settings, model, results, say, part)
    if not results.metrics:
        raise ValueError("no draft could be measured: the lines above say why")
    tables = exact_tables(results.metrics)
    print(tables)
    finish(results, tables, against, 0)


main = Job(_exact, ExactSettings, ExactCommand, Against, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
