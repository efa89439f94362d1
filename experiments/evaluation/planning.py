"""Plans an evaluation: the batches of every cell, and the jobs that are prefilled together."""

from __future__ import annotations

import functools
from collections.abc import Hashable, Sequence

import jax

from experiments.answering import LoadedModel
from experiments.benchmarks import Cell, CellStore
from experiments.evaluation.answers import SHARED_TOKENS, Batch, make_batches
from experiments.evaluation.packing import Work, join
from experiments.evaluation.settings import EvaluationSettings
from experiments.evaluation.together import CHUNK, Caches, Group, Job, room_for_caches
from experiments.tasks import get_task
from kvjax.decoding.layers import layer_methods, shares_prefill
from kvjax.methods import Full
from kvjax.protocol.method import Method


class Plan:
    """The plan of an evaluation; it has the costs that `experiments.evaluation.packing.Costs` lists.

    Args:
        settings: what is run.
        model: the model.
        store: the cells' examples as token ids.
        cells: the cells.
        limit: the most tokens of prompt and answer.
    """

    def __init__(
        self, settings: EvaluationSettings, model: LoadedModel, store: CellStore, cells: Sequence[Cell], limit: int
    ) -> None:
        self._settings, self._model, self._store, self._cells, self._limit = settings, model, store, cells, limit
        self._caches = Caches(model)
        self._made: dict[Hashable, list[Batch]] = {}

    def groups(self, jobs: Sequence[Job]) -> list[Group]:
        """Group jobs; see `experiments.evaluation.packing.join`."""
        return join(jobs, self._settings.together, self._bytes, self._settings.batch_tokens, self)

    @functools.cached_property
    def _bytes(self) -> int:
        """The bytes that the caches of a group may need: found once, so that equal jobs always have equal groups."""
        return room_for_caches(self._model)

    def batches(self, cell: Cell, method: Method, question: str, tokens: int) -> list[Batch]:
        """Sort a cell's examples into batches of at most ``tokens``, rows x length."""
        beyond = method.extrapolates and not method.dense_prompt  # with a dense prompt it is read beside other methods
        at = cell, beyond, question, tokens
        if at not in self._made:
            self._made[at] = make_batches(
                self._store[cell],
                question,
                tokens,
                None if beyond else self._limit,
                self._settings.max_new_tokens,
                samples=self._most_contexts(question) if cell.length is not None else 0,
                room=self._room,
                groups=self._model.groups,
            )
        return self._made[at]

    def kind(self, job: Job) -> Hashable:
        """Return a key that is equal for jobs with equal costs."""
        batches = self._batches_of(job, self._settings.batch_tokens)
        shapes = tuple((batch.shape, len(batch.units)) for batch in batches)
        return jax.tree.structure(job.setting.method), self.alone(job), job.question, shapes

    def alone(self, job: Job) -> bool:
        """Tell whether a job must be prefilled alone."""
        return bool(job.setting.method.offload) or not shares_prefill(job.setting.method, self._model.config)

    def evicts(self, job: Job) -> bool:
        """Tell whether the method of a job evicts in every layer."""
        return all(layer.evicts for layer in layer_methods(job.setting.method, self._model.config))

    def needed(self, jobs: Sequence[Job], tokens: int) -> int:
        """Return the bytes of caches that jobs of a cell need together, if batches have ``tokens``, rows x length."""
        methods = [job.setting.method for job in jobs]
        return max(self._caches.needed(methods, batch.shape) for batch in self._batches_of(jobs[0], tokens))

    def grows(self, job: Job, tokens: int) -> bool:
        """Tell whether a job holds no more in batches of ``tokens`` than Full holds in batches of the settings' size."""
        full = self._batches_of(job, self._settings.batch_tokens)
        most = max(self._caches.needed([Full()], batch.shape) for batch in full)
        return not job.setting.method.offload and self.needed([job], tokens) <= most

    def work(self, job: Job, tokens: int) -> Work:
        """Return what a job's cell costs."""
        batches = self._batches_of(job, tokens)
        return Work(
            passes=sum(len(batch.units) * batch.shape.length for batch in batches) / CHUNK,
            batches=sum(-(-len(batch.units) // batch.shape.rows) for batch in batches),
        )

    def _batches_of(self, job: Job, tokens: int) -> list[Batch]:
        return self.batches(job.cell, job.setting.method, job.question, tokens)

    @functools.cached_property
    def _generated(self) -> frozenset[str]:
        """The tasks whose examples are generated."""
        return frozenset(cell.task for cell in self._cells if cell.length is not None)

    @functools.cached_property
    def own_room(self) -> frozenset[str]:
        """The tasks whose answers are so long that they do not share a program with other tasks."""
        return frozenset(task for task in self._generated if get_task(task).max_new_tokens > SHARED_TOKENS)

    @functools.cached_property
    def _room(self) -> int:
        """The longest answer, in tokens, of the generated tasks that share a program."""
        if self._settings.max_new_tokens is not None:
            return self._settings.max_new_tokens
        return max((get_task(task).max_new_tokens for task in self._generated - self.own_room), default=0)

    def _most_contexts(self, question: str) -> int:
        """Return the most contexts of a generated cell of this run; a question in the prompt makes a context of its own."""
        return max(
            cell.samples * (cell.questions if question == "prefill" else 1)
            for cell in self._cells
            if cell.length is not None
        )
