"""The settings of `experiments.lab.peers.quality`, and the press of kvpress that each method is."""

from __future__ import annotations

import dataclasses
import pathlib

from jsonargparse.typing import PositiveInt

from experiments.cli import Settings, option, record_path

# The press of each method, and the methods of kvjax that stand beside it. (kvpress's TOVA evicts once, as `tovaonce` does.)
PRESSES = {
    "snapkv": ("SnapKVPress", ("snapkv",)),
    "keydiff": ("KeyDiffPress", ("keydiff",)),
    "tova": ("TOVAPress", ("tovaonce", "tova")),
    "pyramidkv": ("PyramidKVPress", ("pyramidkv",)),
    "expectedattention": ("ExpectedAttentionPress", ("expectedattention",)),
    "kvzip": ("KVzipPress", ("kvzip",)),
}
METHODS = ("full", *PRESSES)


def beside(method: str) -> tuple[str, ...]:
    """Return the names of kvjax's methods that stand beside a peer."""
    return ("full",) if method == "full" else PRESSES[method][1]


@dataclasses.dataclass(frozen=True)
class PeersSettings(Settings):
    """What `experiments.lab.peers.quality` scores.

    Attributes:
        methods: comma-separated: full (transformers alone), and presses of kvpress (snapkv, keydiff, tova, pyramidkv,
            expectedattention, kvzip)
        tasks: comma-separated tasks of the folder (default: all generated tasks that Full answered)
        samples: the first samples of each task that are asked
        budget: a share of the length, or tokens: the tokens that a press keeps of every prompt, per KV head; kvjax's rows
            of this budget stand beside
        attention: transformers' name of the attention, such as sdpa or flash_attention_2; KVzip has no eager one
    """

    methods: tuple[str, ...] = option(METHODS, choices=METHODS)
    tasks: tuple[str, ...] = ()
    samples: PositiveInt = 20
    budget: str = "1/8"
    attention: str = "sdpa"


@dataclasses.dataclass(frozen=True)
class PeersCommand:
    """What to read and where to write.

    Attributes:
        folder: the result folder of kvjax eval, whose prompts are asked again; its methods stand beside
        weights: the model in Hugging Face's layout (default: the folder's model; a GGUF file is converted once, into a
            folder beside the record)
        out: JSON record; finished rows are not run again
    """

    folder: pathlib.Path = option(positional=True)
    weights: pathlib.Path | None = None
    out: pathlib.Path = option(pathlib.Path("runs/peers-quality.json"), read=record_path)
