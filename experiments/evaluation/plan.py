"""Plans an evaluation: the batches of every cell, and the methods that prefill its contexts together.

Methods that attend to a prompt densely read it together (`kvjax.prefill_each`): the model runs once for all of them. As many
do as fit into half of the free memory; others begin with the hidden states of that reading, if these fit besides. A pass has
two tokens for each MiB of that half, rounded down to a power of two, and 8,192 at least, so several rows: methods end their
prompts together, in as many launches as one would take.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp

from experiments.answering import LoadedModel, Setting, Shape
from experiments.benchmarks import Cell, Encoded, placeholder
from experiments.evaluation.answers import SHARED_TOKENS, Batch, make_batches, with_room
from experiments.evaluation.settings import EvaluationSettings
from experiments.tasks import get_task
from kvjax.accounting.memory import free_bytes, needed_each, needed_together
from kvjax.decoding.layers import shares_prefill
from kvjax.decoding.one_layer import has_few_kinds
from kvjax.protocol.method import Method

_UNKNOWN = 4 << 30  # bytes for the caches of a group where the device does not report its memory
_ENOUGH = 65536  # rows x length of a batch that is not halved before it has run out of memory
_LEAST = 8192  # tokens of a pass


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell under a method that the folder does not have yet.

    Attributes:
        label: the method's name in tables.
        setting: the method.
        question: where the question stands.
        cell: the cell.
        identity: the fields that tell the row from all others.
        part: where not all caches of a group fit at once: which come one after the other.
    """

    label: str
    setting: Setting
    question: str
    cell: Cell
    identity: Mapping[str, Any]
    part: int = 0


@dataclasses.dataclass(frozen=True)
class Group:
    """Jobs of one cell and question that are prefilled together, in batches of at most ``tokens``, rows x length.

    All of them have ``answered`` so many of the cell's examples before.
    """

    jobs: Sequence[Job]
    tokens: int
    answered: int = 0

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of the jobs."""
        return tuple(job.setting.method for job in self.jobs)

    @property
    def parts(self) -> tuple[int, ...]:
        """How many of the methods have caches at one time."""
        return tuple(len(list(same)) for _, same in itertools.groupby(self.jobs, lambda job: job.part))


class Plan:
    """The plan of an evaluation.

    Args:
        settings: what is run.
        model: the model.
        encoded: gives a cell's examples as token ids.
        cells: the cells.
        limit: the most tokens of prompt and answer.
    """

    def __init__(
        self,
        settings: EvaluationSettings,
        model: LoadedModel,
        encoded: Callable[[Cell], Encoded],
        cells: Sequence[Cell],
        limit: int,
    ) -> None:
        self._settings, self._model, self._encoded, self._cells, self._limit = settings, model, encoded, cells, limit
        self._batches: dict[Hashable, list[Batch]] = {}
        self._smaller: dict[Hashable, int] = {}
        self._needed: dict[Hashable, int] = {}

    def before_prompts(self, jobs: Sequence[Job]) -> Self:
        """Return what plans new generated cells before their prompts are made: the same groups.

        It waits for prompts where the question is no part of them, or the room for an answer is the examples' own.
        """
        if any(job.question != "prefill" or get_task(job.cell.task).max_new_tokens > SHARED_TOKENS for job in jobs):
            return self
        _ = self._bytes  # found once for both
        plan = copy.copy(self)  # what one finds out about memory, the other knows
        plan._encoded, plan._batches = placeholder, {}
        return plan

    def groups(self, jobs: Sequence[Job]) -> list[Group]:
        """Group jobs: each joins the first group of its cell in which it fits, and opens another one if there is none.

        Methods whose layers differ (`has_few_kinds`), or that read a prompt again, are apart: they need one program of all
        layers, which compiles for as long as there are layers and methods.
        """
        groups: list[list[Job]] = []
        shared: dict[Hashable, list[list[Job]]] = {}  # the groups that other jobs of a cell may join
        for job in jobs:
            near = shared.setdefault((*job.cell.identity.values(), job.question, self._kinds(job)), [])
            alone = self._settings.together == 1 or self.alone(job)
            group = None if alone else next((group for group in near if self._fits([*group, job])), None)
            if group is not None:
                group.append(job)
                continue
            groups.append([job])
            near += [groups[-1]] * (not alone)
        joined: list[Group] = []
        for group in (Group(jobs, self._tokens(jobs)) for jobs in groups):
            for at, first in enumerate(joined):
                if self._follows(first, group):
                    part = 1 + max(job.part for job in first.jobs)
                    both = [*first.jobs, *(dataclasses.replace(job, part=part) for job in group.jobs)]
                    # Last what has one program of all layers: it is traced longest.
                    joined[at] = dataclasses.replace(first, jobs=sorted(both, key=lambda job: not self._kinds(job)))
                    break
            else:
                joined.append(group)
        return joined

    def batches(self, group: Group) -> list[Batch]:
        """Sort the examples of a group's cell that are not answered into batches."""
        return self._sorted(group.jobs[0], group.tokens, group.answered)

    def limit(self, method: Method, tokens: int) -> None:
        """Set the most rows x length for a method, whatever its traced knobs, because larger batches did not fit."""
        self._smaller[jax.tree.structure(method)] = tokens

    def alike(self, group: Group, answered: Callable[[Job], int]) -> list[Group]:
        """Divide a group by the rows x length that its methods may have, and by how many examples they have answered."""
        divided: dict[tuple[int, int], list[Job]] = {}
        for job in group.jobs:
            tokens = min(group.tokens, self._smaller.get(jax.tree.structure(job.setting.method), group.tokens))
            divided.setdefault((tokens, answered(job)), []).append(job)
        return [Group(jobs, *alike) for alike, jobs in divided.items()]

    def alone(self, job: Job) -> bool:
        """Tell whether a job's method shares no reading with others."""
        return bool(job.setting.method.offload) or not shares_prefill(job.setting.method, self._model.config)

    def bytes_needed(self, methods: Sequence[Method], shape: Shape, copy: bool = True) -> int:
        """Compute the bytes that a batch's caches need on each device if the methods prefill the batch together.

        Methods that store equal keys and values share one storage. With ``copy``, the method that answers has a copy of its
        own cache besides, if there are several methods or several questions about a context.
        """
        at = jax.tree.structure(tuple(methods)), shape, copy
        if at in self._needed:
            return self._needed[at]
        model, config = self._model, with_room(self._model.config, shape, methods)
        sizes = {"batch": shape.rows, "prompt_slots": shape.length, "max_new_tokens": shape.room, "chunk_size": shape.chunk}
        each = needed_each(methods, config, model.mesh, model.kv_dtype, sizes, share=True, params=model.params)
        needed = needed_together(each)
        copies = copy and (len(each) > 1 or shape.questions > 1 and not shape.keep)
        copied = max(one.after.alone for one in each) if copies else 0
        self._needed[at] = max(needed.peak, needed.after + copied)
        return self._needed[at]

    def _follows(self, first: Group, group: Group) -> bool:
        """Tell whether a group of the same cell begins with the hidden states of the first, if these fit besides."""
        job, other = first.jobs[0], group.jobs[0]
        if (job.cell, job.question, first.tokens) != (other.cell, other.question, group.tokens):
            return False
        if self._settings.together == 1 or self._model.mesh is not None or self.alone(job) or self.alone(other):
            return False
        config = self._model.config
        tokens = max(batch.shape.rows * batch.shape.length for batch in self.batches(first))
        hidden = tokens * config.hidden_size * jnp.dtype(config.dtype).itemsize * (config.num_layers + 1)
        return self._kinds(job) and hidden <= self._bytes // 2

    def _kinds(self, job: Job) -> bool:
        method = job.setting.method
        return has_few_kinds(method, self._model.config) and not method.reread_tokens(self._limit)

    def _fits(self, jobs: Sequence[Job]) -> bool:
        return len(jobs) <= self._settings.together and self.needed(jobs, self._settings.batch_tokens) <= self._bytes

    def needed(self, jobs: Sequence[Job], tokens: int) -> int:
        """Return the bytes of caches that jobs of a cell need together, if batches have ``tokens``, rows x length."""
        methods = [job.setting.method for job in jobs]
        return max(self.bytes_needed(methods, batch.shape) for batch in self._sorted(jobs[0], tokens))

    def _tokens(self, jobs: Sequence[Job]) -> int:
        """Halve the rows of a group's batches while they do not fit."""
        tokens = self._settings.batch_tokens
        while tokens // 2 >= _ENOUGH and self.needed(jobs, tokens) > self._bytes:
            tokens //= 2
        return tokens

    @functools.cached_property
    def _bytes(self) -> int:
        """The bytes that the caches of a group may need: found once, so that equal jobs always have equal groups."""
        free = free_bytes(self._model.mesh)
        return _UNKNOWN if free is None else free // 2

    def _sorted(self, job: Job, tokens: int, answered: int = 0) -> list[Batch]:
        cell, method = job.cell, job.setting.method
        beyond = method.extrapolates and not method.dense_prompt  # with a dense prompt it is read beside other methods
        at = cell, beyond, job.question, tokens, answered
        if at not in self._batches:
            batches = make_batches(
                self._encoded(cell).after(answered),
                job.question,
                tokens,
                None if beyond else self._limit,
                self._settings.max_new_tokens,
                samples=0 if cell.length is None or answered else self._most_contexts(job.question),
                room=self._room,
                groups=self._model.groups,
            )
            chunk = 1 << max(_LEAST, self._bytes >> 19).bit_length() - 1
            self._batches[at] = [dataclasses.replace(x, shape=dataclasses.replace(x.shape, chunk=chunk)) for x in batches]
        return self._batches[at]

    @functools.cached_property
    def _room(self) -> int:
        """The longest answer, in tokens, of the generated tasks that share a program."""
        limits = [get_task(cell.task).max_new_tokens for cell in self._cells if cell.length is not None]
        return self._settings.max_new_tokens or max((limit for limit in limits if limit <= SHARED_TOKENS), default=0)

    def _most_contexts(self, question: str) -> int:
        """Return the most contexts of a generated cell of this run; a question in the prompt makes a context of its own."""
        generated = [cell for cell in self._cells if cell.length is not None]
        return max(cell.samples * (cell.questions if question == "prefill" else 1) for cell in generated)
