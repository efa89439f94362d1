"""Packs methods that prefill together into groups, and chooses the rows of a group's batches, by an estimate of their cost.

The unit of cost is a pass of the model over 8,192 tokens of a prompt. A group costs the passes over all contexts, and one
pass for each batch of answers of each method: generating a batch's answers takes about as long. So fewer rows are
worth it only where they let methods share a prefill that would otherwise be repeated.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Sequence
from typing import Protocol

from experiments.evaluation.together import Group, Job

_ENOUGH = 65536  # rows x length of a batch that is never divided only to let more methods share its prefill


@dataclasses.dataclass(frozen=True)
class Work:
    """What a cell costs.

    Attributes:
        passes: passes of the model over all contexts.
        batches: batches of answers of each method.
    """

    passes: float
    batches: int


class Costs(Protocol):
    """What a group of jobs of one cell needs, if its batches have at most some ``tokens``, rows x length."""

    def kind(self, job: Job) -> Hashable:
        """Return a key that is equal for jobs with equal costs: cells of one kind are packed in the same way."""
        ...

    def alone(self, job: Job) -> bool:
        """Tell whether a job must be prefilled alone."""
        ...

    def evicts(self, job: Job) -> bool:
        """Tell whether the method of a job evicts in every layer."""
        ...

    def needed(self, jobs: Sequence[Job], tokens: int) -> int:
        """Return the bytes of caches that jobs need together."""
        ...

    def grows(self, job: Job, tokens: int) -> bool:
        """Tell whether a job holds so little that its batches may have ``tokens``, more than the settings' number."""
        ...

    def work(self, job: Job, tokens: int) -> Work:
        """Return what a job's cell costs."""
        ...


def join(jobs: Sequence[Job], most: int, limit: int, batch_tokens: int, costs: Costs) -> list[Group]:
    """Group jobs of one cell and question; groups are in the order of their first jobs.

    Where all methods of a group evict, a prefill stores whole prompts of a few rows only. Elsewhere it stores all rows. So
    methods that evict have groups of their own, unless it costs less to add them to groups of methods that keep every token.

    Args:
        jobs: the jobs.
        most: the most jobs of a group.
        limit: the most bytes that the caches of a group of several jobs may need.
        batch_tokens: rows x length of a batch, at most; more only if `Costs.grows` allows it.
        costs: what jobs need.
    """
    cells: dict[Hashable, list[Job]] = {}
    for job in jobs:
        cells.setdefault((*job.cell.identity.values(), job.question), []).append(job)
    place = {id(job): number for number, job in enumerate(jobs)}
    packer = _Packer(most, limit, batch_tokens, costs)
    known: dict[Hashable, list[tuple[list[int], int]]] = {}  # of a kind of cell, the indices of the jobs of each group
    made: list[Group] = []
    for own in cells.values():
        kind = tuple(map(costs.kind, own))
        if kind not in known:
            at = {id(job): index for index, job in enumerate(own)}
            packed = packer.pack_cell(own)
            known[kind] = [(sorted(at[id(job)] for job in group.jobs), group.tokens) for group in packed]
        made += (Group([own[index] for index in members], tokens) for members, tokens in known[kind])
    return sorted(made, key=lambda group: place[id(group.jobs[0])])


@dataclasses.dataclass(frozen=True)
class _Packer:
    """The arguments of `join`, except for the jobs."""

    most: int
    limit: int
    batch_tokens: int
    costs: Costs

    def pack_cell(self, jobs: Sequence[Job]) -> list[Group]:
        """Group all jobs of a cell."""
        alone = [job for job in jobs if self.most == 1 or self.costs.alone(job)]
        made = [self._sized([job], self.batch_tokens) for job in alone]
        plans = self._plans([job for job in jobs if not any(job is one for one in alone)])  # jobs do not compare
        return made + min(plans, key=self._cost)

    def _plans(self, jobs: Sequence[Job]) -> list[list[Group]]:
        """Make groupings of jobs that can be prefilled together: with fewer and fewer rows, evicting methods apart or not."""
        keep, evict = ([job for job in jobs if self.costs.evicts(job) == evicts] for evicts in (False, True))
        sizes = [self.batch_tokens]
        while sizes[-1] // 2 >= _ENOUGH:
            sizes.append(sizes[-1] // 2)
        made = []
        for tokens in sizes:
            kept = self._packed(keep, tokens)
            made.append((tokens, [*kept, *self._packed(evict, tokens)]))
            mixed, left = self._filled(kept, evict, tokens)
            made.append((tokens, [*mixed, *self._packed(left, tokens)]))
        return [[self._sized(group, tokens) for group in groups] for tokens, groups in made]

    def _packed(self, jobs: Sequence[Job], tokens: int) -> list[list[Job]]:
        """Group jobs, the largest caches first; open another group for each job that fits no open group."""
        groups: list[list[Job]] = []
        for job in sorted(jobs, key=lambda job: -self.costs.needed([job], tokens)):
            groups, left = self._filled(groups, [job], tokens)
            groups += [[job] for job in left]
        return groups

    def _filled(
        self, groups: Sequence[Sequence[Job]], jobs: Sequence[Job], tokens: int
    ) -> tuple[list[list[Job]], list[Job]]:
        """Add each job to the group with room whose bytes increase least; return the groups, and the jobs that do not fit."""
        filled, left = [list(group) for group in groups], []
        for job in jobs:
            best = None
            for group in filled:
                if len(group) < self.most and (needed := self.costs.needed([*group, job], tokens)) <= self.limit:
                    more = needed - self.costs.needed(group, tokens)
                    best = (more, group) if best is None or more < best[0] else best
            if best is None:
                left.append(job)
            else:
                best[1].append(job)
        return filled, left

    def _sized(self, jobs: list[Job], tokens: int) -> Group:
        """Choose the rows of a group's batches: half as often as they do not fit, or double while batches become fewer."""
        while tokens // 2 >= _ENOUGH and self.costs.needed(jobs, tokens) > self.limit:  # a job that is prefilled alone
            tokens //= 2
        while (
            self.costs.work(jobs[0], 2 * tokens).batches < self.costs.work(jobs[0], tokens).batches
            and self.costs.needed(jobs, 2 * tokens) <= self.limit
            and (2 * tokens <= self.batch_tokens or all(self.costs.grows(job, 2 * tokens) for job in jobs))
        ):
            tokens *= 2
        return Group(jobs, tokens)

    def _cost(self, groups: Sequence[Group]) -> float:
        """Estimate the passes of all groups."""
        each = [(len(group.jobs), self.costs.work(group.jobs[0], group.tokens)) for group in groups]
        return sum(work.passes + jobs * work.batches for jobs, work in each)
