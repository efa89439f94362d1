"""The settings of `experiments.lab.peers`, and the press of kvpress that each method is."""

from __future__ import annotations

import dataclasses
import pathlib

from jsonargparse.typing import PositiveInt

from experiments.cli import Settings, option, record_path
from experiments.speed.settings import MODELS, Output

# Presses that keep the same number of tokens in every head and layer, so that their cache is a plain one. (AdaKVPress masks
# tokens and stores all of them; the layers of PyramidKVPress differ, for which `generate` has no length.)
PRESSES = {
    "snapkv": "SnapKVPress",
    "knorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "streamingllm": "StreamingLLMPress",
    "tovaonce": "TOVAPress",
    "expectedattention": "ExpectedAttentionPress",
}
METHODS = ("full", *PRESSES)
SHOWN = ("torch", "transformers", "kvpress", "flash-attn")
PACKAGES = (*SHOWN, "triton")  # whose versions a record holds
CACHES = ("static", "dynamic")
MODES = ("reduce-overhead", "max-autotune", "default")


@dataclasses.dataclass(frozen=True)
class PeersSettings(Settings):
    """What `experiments.lab.peers` times.

    Attributes:
        model: shape of the model, which gets random weights
        methods: comma-separated: full, and methods that kvpress has (snapkv, knorm, keydiff, streamingllm, tovaonce,
            expectedattention)
        lengths: comma-separated, tokens stored before decoding
        batches: comma-separated, rows decoded together
        caches: comma-separated: static (compiled), dynamic (not compiled, what generate does by default)
        mode: of torch.compile, for static caches; generate's own is reduce-overhead
        attention: transformers' name of the attention, such as sdpa, flash_attention_2 or eager
        tokens: tokens decoded per repeat
        repeats: measurements of each row

    Raises:
        ValueError: an unknown model.
    """

    model: str = "llama-3.1-8b"
    methods: tuple[str, ...] = option(("full", "snapkv"), choices=METHODS)
    lengths: tuple[PositiveInt, ...] = (131072,)
    batches: tuple[PositiveInt, ...] = (1,)
    caches: tuple[str, ...] = option(CACHES, choices=CACHES)
    mode: str = option("reduce-overhead", choices=MODES)
    attention: str = "sdpa"
    tokens: PositiveInt = 32
    repeats: PositiveInt = 5

    def __post_init__(self) -> None:
        if self.model not in MODELS:
            raise ValueError(f"unknown model {self.model!r}, expected one of {', '.join(MODELS)}")

    @property
    def room(self) -> int:
        """Further tokens that a cache must have room for: the tokens of all repeats, the first of which compiles."""
        return (self.tokens + 1) * (self.repeats + 1)


@dataclasses.dataclass(frozen=True)
class PeersCommand(Output):
    """Where `experiments.lab.peers` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/peers.json"), read=record_path)
