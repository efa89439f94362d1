"""Measures the `distance` of every method from Full along every text, into a result folder."""

import dataclasses
import functools
import pathlib
import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from tqdm import tqdm

import models
from experiments import answering, records
from experiments.evaluation import CompileAhead
from experiments.lab.fidelity import texts as streams
from experiments.lab.fidelity.distance import distance, lead, lower, share_rooms
from experiments.lab.fidelity.settings import FidelitySettings
from experiments.lab.fidelity.summary import summary
from experiments.lab.fidelity.texts import Texts
from experiments.speed.rows import note_run, now
from experiments.tasks import library_origin, reads_library
from kvjax.accounting.stats import Stats
from kvjax.decoding.layers import check_quantisable, layer_methods
from kvjax.protocol.method import Method
from models.hub.progress import progress_bar

_CALIBRATION = ("niah_single_2", 16, 512)  # CHESS' thresholds: task, prompts, tokens generated after each
FILE = "metrics.json"
_ABOUT = {"model": "name", "weights": "weights", "dtype": "dtypes"}  # what a record says of a reference
_RUNNING = frozenset(("prose", "code"))  # streams of running text, without a question


@dataclasses.dataclass(frozen=True)
class Job:
    """A method on a stream at a length that the folder does not have.

    Attributes:
        label: the method's name in tables.
        setting: the method as the user asked for it.
        method: the method with room for the largest budget of its name, so that budgets share a program.
        length: tokens of context and text.
        stream: see `STREAMS`.
        identity: the fields that tell the row from all others.
    """

    label: str
    setting: answering.Setting
    method: Method
    length: int
    stream: str
    identity: dict[str, Any]

    @property
    def program(self) -> tuple[Any, int]:
        """A key that is equal for jobs that share a program; texts of equal length have equal shapes but for their steps."""
        return jax.tree.structure(self.method), self.length


class Runner:
    """A run of `python -m experiments.lab.fidelity`.

    Args:
        settings: what to measure.
        model: the model.
        out: the result folder; its rows are not measured again.
        reference: the model whose Full the rows are compared with; None means ``model``.
        force: throw away what the folder holds.
        progress: whether to show a progress bar.

    Raises:
        ValueError: a length beyond a model's limit, a method that refuses its knobs or keeps rows in host memory, a
            reference with another vocabulary, or a folder that holds rows of other settings.
    """

    def __init__(
        self,
        settings: FidelitySettings,
        model: answering.LoadedModel,
        out: pathlib.Path,
        *,
        reference: answering.LoadedModel | None = None,
        force: bool = False,
        progress: bool = True,
    ) -> None:
        self.settings, self.model, self._reference, self._progress = settings, model, reference or model, progress
        for one in (model, self._reference):
            one.check_positions("lengths", max(settings.lengths))
        if reference is not None and _vocabulary(reference) != _vocabulary(model):
            raise ValueError(f"reference must have the vocabulary of {model.name}, got {reference.name} with another one")
        for choice in settings.choices:
            for length in settings.lengths:
                method = self._setting(choice, length, {}).method
                check_quantisable(layer_methods(method, model.config), settings.kv_dtype)
                if method.offload:
                    raise ValueError(f"fidelity keeps all caches on the device: offload must be False, got {choice.label}")
        asks = set(settings.streams) - _RUNNING
        template = models.ChatTemplate.from_directory(model.directory) if asks and settings.template == "auto" else None
        if asks:
            answering.check_system(template, settings.system)
        self._around = template.around(settings.system, **settings.template_variables) if template else None
        common = {
            **{name: vars(settings)[name] for name in ("task", "haystack", "samples", "tokens", "seed", "system")},
            "model": model.name,
            "dtype": dataclasses.replace(model, kv_dtype=settings.kv_dtype).dtypes,
            "weights": model.weights,  # behind the dtype: an error about a folder names the first that differs
            "template": settings.template,
            "template_variables": dict(settings.template_variables),
            "reference": reference and {name: getattr(reference, of) for name, of in _ABOUT.items()},
        }
        self.path = out / FILE
        self.results = records.Results(self.path, "fidelity", common, fresh=force)
        if any(map(self._reads_code, settings.streams)):
            records.check_library(self.results.metrics, f"{self.path}", library_origin())

    def run(self) -> None:
        """Measure the rows that the folder does not have, length by length and stream by stream."""
        cells = [(length, stream) for length in self.settings.lengths for stream in self.settings.streams]
        jobs = {cell: mine for cell in cells if (mine := self._jobs(*cell))}
        total = sum(map(len, jobs.values()))
        self._say(f"{total} rows to measure, {len(cells) * len(self.settings.choices) - total} in {self.path}")
        if not jobs:
            return
        texts: dict[tuple[int, str], Texts] = {}
        for length, stream in jobs:
            texts[length, stream] = self.texts(stream, length, texts)
        bar = progress_bar(total=total, unit="row", disable=not self._progress)
        about = {"commit": records.commit(), "versions": records.versions(), "device": jax.devices()[0].device_kind}
        with CompileAhead() as ahead, records.CompileClock() as clock, bar:
            note_run(self.results, now(), {**about, **records.operations()})
            for cell, mine in jobs.items():
                for job in mine if ahead.spare else ():
                    self._compile(job, texts[cell], ahead)
            for cell, mine in jobs.items():
                self._measure(mine, texts[cell], ahead, clock, bar)

    def texts(self, stream: str, length: int, known: Mapping[tuple[int, str], Texts]) -> Texts:
        """Make the texts of a stream at a length; greedy takes its questions from ``known`` if it has the answers stream."""
        if stream in _RUNNING:
            kind = self.settings.haystack if stream == "prose" else stream
            return streams.passages(self.model, self.settings, length, kind)
        asked = known.get((length, "answers")) or streams.answers(self.model, self.settings, length, self._around)
        return asked if stream == "answers" else streams.greedy(self._reference, asked, self._rows(length))

    def _compile(self, job: Job, texts: Texts, ahead: CompileAhead) -> Any:
        """Add the program of a job to the queue; return its key."""
        batch, key = texts.rows(0, self._rows(job.length))[1], (*job.program, texts.steps)
        ahead.add(key, lambda: [lower(self.model, job.method, batch, self.settings.kv_dtype)])
        return key

    def _measure(self, jobs: Sequence[Job], texts: Texts, ahead: CompileAhead, clock: records.CompileClock, bar: Any) -> None:
        """Measure the rows of a stream at a length."""
        rows, full = self._rows(jobs[0].length), self._setting(self.settings.choices[0], jobs[0].length, {}).method
        batches = [texts.rows(start, rows) for start in range(0, len(texts), rows)]
        # Full's logits of all batches, in host memory: the device may not hold them beside a method's.
        reference = [jax.device_get(lead(self._reference, full, batch)[0]) for _, batch in batches]
        for job in jobs:
            bar.set_description(f"{job.label} {job.stream} {job.length}")
            with records.Timer(clock) as waiting:
                if ahead.spare:
                    ahead.wait(self._compile(job, texts, ahead))
            parts, stats = [], []
            with records.Timer(clock) as reading:
                for (real, batch), expected in zip(batches, reference, strict=True):
                    logits, measured = lead(self.model, job.method, batch, self.settings.kv_dtype)
                    apart = distance(expected, logits, batch.targets)
                    del logits
                    parts.append((real, jax.device_get(apart)))
                    stats.append((real, jax.device_get(measured)))
            row = {
                **summary(parts, texts.counts),
                **_account(stats, rows),
                **job.identity,
                "budget": job.identity["knobs"].get("budget"),
                "note": job.setting.note,
                **({records.LIBRARY_FIELD: library_origin()} if self._reads_code(job.stream) else {}),
                "seconds": round(reading.run, 2),
                "compile_seconds": round(waiting.run + waiting.compile + reading.compile, 2),
            }
            self.results.add(row, job.identity)
            self._say(
                f"{job.label:28s} {job.stream:8s} {job.length:6d} KL {row['value']:.3g} nats, "
                f"same {row['agreement']:.1f} %  ({row['seconds']:.1f} s)"
            )
            bar.update()

    def _jobs(self, length: int, stream: str) -> list[Job]:
        jobs, choices = [], self.settings.choices
        settings = [self._setting(choice, length, self._thresholds(choice)) for choice in choices]
        roomy = share_rooms(choices, [setting.method for setting in settings], length)
        for choice, setting, method in zip(choices, settings, roomy, strict=True):
            identity = {
                "method": choice.label, "knobs": records.knobs_of(setting.method), "length": length, "stream": stream,
            }  # fmt: skip
            if self.results.find(identity) is None:
                jobs.append(Job(choice.label, setting, method, length, stream, identity))
        return jobs

    def _setting(self, choice: answering.Choice, length: int, extra: Mapping[str, Any]) -> answering.Setting:
        return choice.at(length, self.model.tokenizer, self.model.config, extra)

    def _thresholds(self, choice: answering.Choice) -> Mapping[str, Any]:
        """Calibrate CHESS' thresholds at the shortest length on prompts of a task; return {} for other methods."""
        if not answering.needs_thresholds(choice.name, choice.knobs):
            return {}
        task, prompts, tokens = _CALIBRATION
        length = min(*self.settings.lengths, self.model.config.max_position_embeddings - tokens)
        if "chess_calibration" not in self.results.notes:
            self._say(f"calibrating CHESS on {prompts} prompts of {length} tokens")
        return answering.chess_thresholds(
            self.model, answering.Calibration((task,), length, prompts, tokens, self.settings.seed), self.results
        )

    def _reads_code(self, stream: str) -> bool:
        """Tell whether the texts of a stream are made from Python's standard library."""
        return stream == "code" or stream not in _RUNNING and reads_library(self.settings.task, self.settings.task_haystack)

    def _rows(self, length: int) -> int:
        return answering.batch_rows(length, self.settings.batch_tokens, self.settings.samples)

    @functools.cached_property
    def _begun(self) -> float:
        return time.monotonic()

    def _say(self, line: str) -> None:
        if self._progress:  # standard output is for results
            tqdm.write(f"{time.monotonic() - self._begun:7.1f} s  {line}", file=sys.stderr)


def _vocabulary(model: answering.LoadedModel) -> tuple[int, dict[str, int]]:
    """Return the number of logits, and the number of every token."""
    return model.config.vocab_size, model.tokenizer.get_vocab()


def _account(stats: Sequence[tuple[int, Stats]], rows: int) -> dict[str, Any]:
    """Account for the batches, without the allocated bytes, because budgets share the room of the largest budget."""
    means = {name: value for name, value in answering.account(stats, rows).items() if name != "resident_bytes_per_row"}
    return {**means, "no_effect": answering.reads_all(means)}
