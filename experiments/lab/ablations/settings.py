"""The settings of `experiments.lab.ablations`."""

from __future__ import annotations

import dataclasses

from jsonargparse.typing import PositiveInt

from experiments.answering import LoadedModel, ModelSettings
from experiments.cli import names, option
from experiments.cli.settings import nearest
from experiments.tasks import get_task

LONGEST = 8192  # tokens of prompt and answer, for models whose window is longer
DRIFT = "drift"  # cluster_drift.py, whose record has no tables
# In the order of the page: paper by paper.
NAMES = ("votes", "theta", "chunk", "extrapolate", "sentences", "chess", "channels", "strategy", "hashing", DRIFT)


@dataclasses.dataclass(frozen=True, kw_only=True)
class AblationSettings(ModelSettings):
    """The settings of `experiments.lab.ablations`.

    Attributes:
        names: comma-separated, or 'all': votes, theta, chunk, extrapolate, sentences, chess, channels, strategy, hashing and
            drift
        base: the model whose distance from Full and whose drift are measured, and which runs beyond its window (default: the
            model)
        samples: samples of each cell
        length: tokens of prompt and answer (default: the model's window, at most 8192)
        tasks: comma-separated, instead of each ablation's own tasks
        solved: Full's score in percent below which a task is left out of a table (default: 85; 50 beyond the window)
        template: auto uses the checkpoint's chat template, if it has one; none does not
        seed: seed of the samples
        trained_length: tokens; extrapolation goes to 2, 4 and 8 times this length (default: the base's window)
        texts: texts along which the distance is measured
        text_tokens: tokens of a text along which the distance is measured
        calibration_prompts: prompts that CHESS is calibrated on
        new_tokens: tokens that Full writes, for calibration and for CHESS's triggers
        batch_tokens: rows x length generated together

    Raises:
        ValueError: an unknown ablation or task, or a score beyond 0 to 100.
    """

    names: tuple[str, ...] = option(positional=True, read=names)
    base: str | None = None
    samples: PositiveInt = 16
    length: PositiveInt | None = None
    tasks: tuple[str, ...] = ()
    solved: float | None = None
    template: str = option("auto", choices=("auto", "none"))
    seed: int = 0
    trained_length: PositiveInt | None = None
    texts: PositiveInt = 16
    text_tokens: PositiveInt = 128
    calibration_prompts: PositiveInt = 16
    new_tokens: PositiveInt = 512
    batch_tokens: PositiveInt = 131072

    def __post_init__(self) -> None:
        for name in self.ablations:
            if name not in NAMES:
                raise ValueError(f"unknown ablation {name!r}{nearest(name, NAMES)}; ablations: {', '.join(NAMES)}")
        for task in self.tasks:
            get_task(task)  # refuses unknown names
        if self.solved is not None and not 0 <= self.solved <= 100:
            raise ValueError(f"solved must lie in [0, 100] percent, got {self.solved}")

    @property
    def ablations(self) -> tuple[str, ...]:
        """The names of the ablations to run."""
        return NAMES if self.names == ("all",) else self.names

    def length_of(self, model: LoadedModel) -> int:
        """Return the tokens of prompt and answer for a model."""
        return self.length or min(model.config.max_position_embeddings, LONGEST)
