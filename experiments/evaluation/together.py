"""What methods that prefill the contexts of a cell together (`kvjax.prefill_each`) need: the model runs once for all."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import jax

from experiments.answering import LoadedModel, Setting, Shape
from experiments.benchmarks import Cell
from experiments.evaluation.answers import with_room
from kvjax.accounting.memory import free_bytes, needed_each
from kvjax.accounting.phases import Phases, add_parts
from kvjax.decoding.layers import layer_methods
from kvjax.decoding.prefill import reading_order
from kvjax.protocol.method import LayerMethod, Method

_UNKNOWN = 4 << 30  # bytes for the caches of a group where the device does not report its memory
CHUNK = 8192  # chunk_size of `kvjax.prefill_each`, where it is not given


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


@dataclasses.dataclass(frozen=True)
class Group:
    """Jobs of one cell and question that are prefilled together.

    Attributes:
        jobs: the jobs.
        tokens: rows x length of a batch, at most.
    """

    jobs: Sequence[Job]
    tokens: int

    @property
    def methods(self) -> tuple[Method, ...]:
        """The methods of the jobs."""
        return tuple(job.setting.method for job in self.jobs)


class Sizes:
    """The rows x length of batches under methods for which the device's memory turned out too small."""

    def __init__(self) -> None:
        self._tokens: dict[Hashable, int] = {}

    def of(self, method: Method, tokens: int) -> int:
        """Return the rows x length of a batch under a method, at most ``tokens``."""
        return min(tokens, self._tokens.get(jax.tree.structure(method), tokens))

    def limit(self, method: Method, tokens: int) -> None:
        """Set the most rows x length for a method, whatever its traced knobs, from now on."""
        self._tokens[jax.tree.structure(method)] = tokens

    def alike(self, group: Group) -> list[Group]:
        """Divide a group by the rows x length of its methods' batches."""
        made: dict[int, list[Job]] = {}
        for job in group.jobs:
            made.setdefault(self.of(job.setting.method, group.tokens), []).append(job)
        return [Group(jobs, tokens) for tokens, jobs in made.items()]


class Caches:
    """The bytes of caches that exist together, computed once for each method and length, from the bytes of one row.

    Args:
        model: the model.
    """

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self._known: dict[Hashable, tuple[Phases, Sequence[LayerMethod]]] = {}

    def needed(self, methods: Sequence[Method], shape: Shape, copy: bool = True) -> int:
        """Compute the bytes that a batch's caches need on each device if the methods prefill the batch together.

        Methods that store equal keys and values share one storage. With ``copy``, the method that answers has a copy of its
        own cache besides, if there are several methods or several questions about a context.
        """
        rows = shape.rows // self._model.groups
        each, layers = zip(*(self._of_a_row(method, shape) for method in methods), strict=True)
        order = reading_order(layers, rows, shape.length, CHUNK)
        reading, after = (add_parts(parts).alone for parts in zip(*((one.reading, one.after) for one in each), strict=True))
        copies = copy and (len(each) > 1 or shape.questions > 1 and not shape.keep)
        copied = max(one.after.alone for one in each) if copies else 0
        apart = order.apart and order.groups > 1  # groups of rows: some rows' whole prompts, and the finished rows
        during = order.rows * reading + rows * after if apart else rows * reading
        return max(during, rows * (after + copied))

    def _of_a_row(self, method: Method, shape: Shape) -> tuple[Phases, Sequence[LayerMethod]]:
        """Compute what a row of a batch needs; return the methods of the layers, too."""
        model = self._model
        at = jax.tree.structure(method), shape.length, shape.room, shape.keep
        if at not in self._known:
            config = with_room(model.config, shape, (method,))
            sizes = {"batch": model.groups, "prompt_slots": shape.length, "max_new_tokens": shape.room, "chunk_size": CHUNK}
            (needed,) = needed_each([method], config, model.mesh, model.kv_dtype, sizes, share=True)
            self._known[at] = needed, layer_methods(method, config)
        return self._known[at]


def room_for_caches(model: LoadedModel) -> int:
    """Return the bytes that the caches of a group may need on each device: half of the free memory."""
    free = free_bytes(model.mesh)
    return _UNKNOWN if free is None else free // 2
