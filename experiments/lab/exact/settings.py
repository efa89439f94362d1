"""What `experiments.lab.exact` measures."""

from __future__ import annotations

import dataclasses

from jsonargparse.typing import PositiveInt

from experiments.answering import Choice, ModelSettings, at_budgets, budgets_of, choices_of
from experiments.cli import option
from experiments.tasks import TASKS

PARTS = ("accepted", "speed", "rejected", "equal")
TEXTS = ("prose", "code")  # running text; every other kind of text is a task
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

    parts: tuple[str, ...] = option(("accepted",), choices=PARTS)
    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in DRAFTS), read=choices_of)
    budgets: tuple[str, ...] = option(("1/8",), read=budgets_of)
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
