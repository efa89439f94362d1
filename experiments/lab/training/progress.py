"""The progress bar and the log of a training run."""

import json
import math
import pathlib
import time
from collections.abc import Callable
from typing import Any

import numpy as np
from tqdm import tqdm

from experiments.lab.training.course import Course
from experiments.lab.training.mixture import ROW_TASKS
from models.hub.progress import progress_bar

LOG_EVERY = 50  # steps


class Progress:
    """The progress bar and the log file.

    Args:
        course: how the run goes.
        rate: the learning rate of a step.
        first_step: the step at which the run starts.
        log: train_log.jsonl. Lines of later steps, which an interrupted run has left, are dropped.
    """

    def __init__(self, course: Course, rate: Callable[[int], Any], first_step: int, log: pathlib.Path) -> None:
        self._course, self._rate, self._log = course, rate, log
        lines = log.read_text().splitlines() if log.exists() else []
        log.write_text("".join(line + "\n" for line in lines if json.loads(line)["step"] <= first_step))
        self._last = time.monotonic()
        self._window: list[dict[str, Any]] = []
        self._bar = progress_bar(total=course.steps, initial=first_step, unit="step", mininterval=2.0)

    def update(self, step: int, length: int, metrics: dict[str, np.ndarray]) -> None:
        """Show and log a finished step.

        Args:
            step: the step's number.
            length: tokens of the batch's rows.
            metrics: see `experiments.lab.training.loss.make_step`.

        Raises:
            FloatingPointError: the loss is not finite.
        """
        now = time.monotonic()
        seconds, self._last = now - self._last, now
        if not math.isfinite(metrics["loss"]):
            raise FloatingPointError(f"loss is {metrics['loss']} at step {step}, expected a finite number")
        self._window.append({**metrics, "seconds": seconds})
        summary = self._summary(step)
        self._bar.set_postfix_str(
            f"T={length} loss {summary['loss']:.3f} answer {summary['answer_loss']:.3f} lm {summary['lm_loss']:.2f} "
            f"exact {summary['exact']:.2f} {summary['tokens_per_second'] / 1e6:.2f}M tok/s",
            refresh=False,
        )
        self._bar.update()
        if (step + 1) % LOG_EVERY == 0 or step + 1 == self._course.steps:
            with self._log.open("a") as file:
                file.write(json.dumps(summary) + "\n")
            tqdm.write(
                f"{step + 1:6d} answer {summary['answer_loss']:.3f} lm {summary['lm_loss']:.2f} | "
                + " ".join(f"{name} {100 * value:.0f}" for name, value in summary["accuracy"].items())
            )
            self._window = []

    def _summary(self, step: int) -> dict[str, Any]:
        def mean(name: str) -> float:
            return float(np.mean([entry[name] for entry in self._window]))

        right, asked = (np.sum([entry[name] for entry in self._window], axis=0) for name in ("right", "asked"))
        seconds = sum(entry["seconds"] for entry in self._window)
        return {
            "step": step + 1,
            "tokens": (step + 1) * self._course.tokens_per_step,
            "loss": mean("loss"),
            "answer_loss": mean("answer"),
            "lm_loss": mean("lm"),
            "gradient_norm": mean("gradient_norm"),
            "learning_rate": float(self._rate(step)),
            "tokens_per_second": len(self._window) * self._course.tokens_per_step / max(seconds, 1e-9),
            "exact": float(right.sum() / max(1, asked.sum())),
            "accuracy": {name: round(float(r / a), 4) for name, r, a in zip(ROW_TASKS, right, asked, strict=True) if a},
            "questions": {name: int(a) for name, a in zip(ROW_TASKS, asked, strict=True) if a},
        }

    def close(self) -> None:
        """End the bar."""
        self._bar.close()
