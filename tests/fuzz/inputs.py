"""Bad inputs: a case is one value or one file that must be refused by an error of this project, in words."""

from __future__ import annotations

import pathlib
from collections.abc import Iterator

import numpy as np

from tests.fuzz import arguments, files
from tests.fuzz.report import Outcome
from tests.fuzz.values import shown
from tests.fuzz.verdicts import REFUSALS, judge

_SHARES = (0.35, 0.4, 0.25)  # of fields of methods, of arguments of functions, of files


class Inputs:
    """All bad inputs, which share a tiny model, its caches and its files.

    Args:
        seed: of all cases.
        folder: for files; the caller removes it.
    """

    def __init__(self, seed: int, folder: pathlib.Path) -> None:
        self.seed, self.folder = seed, folder
        self.world = arguments.World()
        self.fields = arguments.fields_of_methods()
        self.functions = arguments.functions(self.world)
        self.files = files.Files(self.world, folder)

    def check(self, number: int) -> Iterator[Outcome]:
        """Give the outcome of one case."""
        rng = np.random.default_rng([self.seed, 4, number])
        kind = int(rng.choice(3, p=_SHARES))
        if kind == 2:
            damaged = self.files.damage(rng)
            words = (str(self.folder),)  # the file that is damaged
            yield judge(damaged.about, damaged.read, REFUSALS, words)
            return
        known = (self.fields, self.functions)[kind]
        argument = known[int(rng.integers(len(known)))]
        value = argument.bad_value(rng)
        about = f"{argument.where} given {shown(value)}"
        words = (argument.name, shown(value).partition(" ")[2])
        yield judge(about, lambda: argument.call(value), (ValueError, TypeError), words)
