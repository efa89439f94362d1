"""The settings of `experiments.lab.insight`."""

from __future__ import annotations

import dataclasses

from experiments.answering import METHODS, ModelSettings
from experiments.cli import option
from experiments.tasks import get_task
from kvjax import registry


@dataclasses.dataclass(frozen=True)
class InsightSettings(ModelSettings):
    """The settings of `experiments.lab.insight`.

    Attributes:
        methods: comma-separated names, package.module:Class, wrappers such as twilight(quest), or 'all'
        knobs: a knob of a method; repeatable
        task: task of the prompts
        haystack: 'noise', 'prose', 'code' or file:PATH (default: the task's own)
        length: tokens of prompt and answer
        new_tokens: decode steps
        samples: prompts
        seed: seed of the samples
        top: values of k, comma-separated
        text: feed Full's text, or the text that the method itself generates
        calibration_prompts: prompts that CHESS is calibrated on
        calibration_new_tokens: tokens generated after each of these prompts

    Raises:
        ValueError: an unknown task, method or text, or a number below 1.
    """

    methods: tuple[str, ...] = ("all",)
    knobs: tuple[str, ...] = option((), flag="set", repeat=True, metavar="METHOD.KNOB=VALUE")
    task: str = "niah_single_2"
    haystack: str | None = None
    length: int = 2048
    new_tokens: int = 64
    samples: int = 2
    seed: int = 0
    top: tuple[int, ...] = (16, 64, 256)
    text: str = option("full", choices=("full", "own"))
    calibration_prompts: int = 4
    calibration_new_tokens: int = 128

    def __post_init__(self) -> None:
        get_task(self.task)
        numbers = ("length", "new_tokens", "samples", "calibration_prompts", "calibration_new_tokens")
        for name, value in [*((name, vars(self)[name]) for name in numbers), *(("top", k) for k in self.top)]:
            if value < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if self.text not in ("full", "own"):
            raise ValueError(f"text must be one of {('full', 'own')}, got {self.text!r}")
        for name in self.names:
            registry.find(name)  # refuses unknown names

    @property
    def names(self) -> tuple[str, ...]:
        """The methods' names."""
        given = METHODS if self.methods == ("all",) else self.methods
        return tuple(dict.fromkeys(map(registry.canonical_name, given)))

    @property
    def common(self) -> dict[str, object]:
        """The values that all methods of a record have in common; JSON values."""
        fields = ("task", "length", "new_tokens", "samples", "top", "text", "seed", "haystack")
        return {name: list(value) if isinstance(value := vars(self)[name], tuple) else value for name in fields}
