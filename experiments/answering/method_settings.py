"""Which method a command runs, with which knobs."""

import dataclasses
from typing import Any

from experiments.answering.choice import Choice
from experiments.answering.model import MeshSettings
from experiments.answering.presets import read_knobs
from experiments.cli import option
from kvjax.cache.quantised import KV_DTYPES
from kvjax.protocol.method import Method


@dataclasses.dataclass(frozen=True, kw_only=True)
class MethodSettings(MeshSettings):
    """A model and the method under which it runs.

    Attributes:
        method: see kvjax ls; or package.module:Class; or a wrapper such as twilight(quest)
        set: a knob of the method; a budget may be a share of the text such as 1/8; repeatable
        kv_dtype: store keys and values as codes: int8, float8_e4m3fn, k8v4 or int4 (default: in the dtype of computation)

    Raises:
        ValueError: an unknown method or knob, or a value that the method refuses.
    """

    method: str = "full"
    set: tuple[str, ...] = option((), repeat=True, metavar="KNOB=VALUE")
    kv_dtype: str | None = option(None, choices=tuple(KV_DTYPES))

    def __post_init__(self) -> None:
        super().__post_init__()
        self.make(1 << 20)  # refuses bad knobs before anything is loaded

    def make(self, length: int, tokenizer: Any = None, config: Any = None) -> Method:
        """Make the method for a text of some tokens; without a model, files of knobs are not read."""
        choice = Choice.parse(self.method)
        choice = Choice.parse({choice.name: {**choice.knobs, **read_knobs(choice.name, self.set)}})
        return choice.at(length, tokenizer, config, own=True).method
