"""Groups methods that prefill the contexts of a cell together, so that the model runs once (`kvjax.prefill_each`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import jax

import kvjax
from experiments.answering import LoadedModel, Setting, Shape
from experiments.benchmarks import Cell
from kvjax.accounting.memory import free_bytes
from kvjax.method import Method
from kvjax.typing import not_none

_UNKNOWN = 4 << 30  # bytes for the caches of a group where the device does not report its memory


@dataclasses.dataclass(frozen=True)
class Job:
    """A cell under a method that the folder does not have yet.

    Attributes:
        label: the method's name in tables.
        setting: the method.
        question: where the question stands.
        cell: the cell.
        identity: the fields that tell the row from all others.
    """

    label: str
    setting: Setting
    question: str
    cell: Cell
    identity: Mapping[str, Any]


class Sizes:
    """The rows x length of a batch under each method; halved where the device's memory turns out too small."""

    def __init__(self, batch_tokens: int) -> None:
        self._most = batch_tokens
        self._tokens: dict[Hashable, int] = {}

    def of(self, method: Method) -> int:
        """Return the rows x length of a batch under a method."""
        return self._tokens.get(jax.tree.structure(method), self._most)

    def halve(self, method: Method) -> None:
        """Set half the rows x length for a method, whatever its traced knobs, from now on."""
        self._tokens[jax.tree.structure(method)] = self.of(method) // 2

    def alike(self, jobs: Sequence[Job]) -> list[Sequence[Job]]:
        """Group the jobs by the rows x length of their batches."""
        made: dict[int, list[Job]] = {}
        for job in jobs:
            made.setdefault(self.of(job.setting.method), []).append(job)
        return list(made.values())


def join(
    jobs: Sequence[Job],
    most: int,
    limit: int,
    needed: Callable[[Sequence[Job]], int | None],
    evicts: Callable[[Job], bool],
) -> list[list[Job]]:
    """Group jobs of one cell and question; groups are in the order of their first jobs.

    Methods that evict form groups of their own: where all methods evict, a prefill stores whole prompts of a few rows only.

    Args:
        jobs: the jobs.
        most: the most jobs of a group.
        limit: the most bytes that the caches of a group of several jobs may need.
        needed: returns the bytes that the caches of some jobs need together; None for a job that prefills alone.
        evicts: tells whether the method of a job evicts in every layer.
    """
    groups: list[list[Job]] = []
    filling: dict[Hashable, list[Job]] = {}
    place = {id(job): number for number, job in enumerate(jobs)}

    def fits(together: Sequence[Job]) -> bool:
        return len(together) <= most and not_none("needed", needed(together)) <= limit

    for job in jobs:
        at = (*job.cell.identity.values(), job.question)
        joins = most > 1 and needed([job]) is not None
        group = filling.get((evicts(job), at)) if joins else None
        if group and fits([*group, job]):
            group.append(job)
            continue
        groups.append([job])
        if joins:
            filling[evicts(job), at] = groups[-1]
    for (evicting, at), group in filling.items():
        kept = filling.get((False, at), [])
        if evicting and kept and fits([*kept, *group]):  # few methods: they can all be prefilled together
            kept += group
            kept.sort(key=lambda job: place[id(job)])
            groups = [other for other in groups if other is not group]  # jobs do not compare
    return groups


def room_for_caches(model: LoadedModel) -> int:
    """Return the bytes that the caches of a group may need on each device: half of the free memory."""
    free = free_bytes(model.mesh)
    return _UNKNOWN if free is None else free // 2


def cache_bytes(methods: Sequence[Method], config: Any, shape: Shape, model: LoadedModel) -> int:
    """Compute the bytes that a batch's caches need on each device if the methods prefill the batch together.

    Methods that keep every token share one storage. The method that answers has a copy of its own cache.
    """
    sizes: dict[str, Any] = {"batch": shape.rows, "prompt_slots": shape.length, "max_new_tokens": shape.room}
    sizes |= {"mesh": model.mesh, "kv_dtype": model.kv_dtype}
    together = kvjax.memory_needed(methods, config, **sizes, share_storage=True).device
    copy = max(kvjax.memory_needed(method, config, **sizes).device for method in methods) if len(methods) > 1 else 0
    return together + copy
