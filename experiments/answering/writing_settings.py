"""How a command writes an answer: how many tokens, how they are drawn, what ends them, and their log-probabilities."""

import dataclasses
import pathlib
from typing import Any

import jax
from jsonargparse.typing import NonNegativeInt, PositiveInt

from experiments.answering.method_settings import MethodSettings
from experiments.cli import option, output_file
from kvjax.api.text import stop_strings
from kvjax.decoding.sampling import Sampler


@dataclasses.dataclass(frozen=True, kw_only=True)
class WritingSettings(MethodSettings):
    """A model, a method, and how text is written.

    Attributes:
        max_new_tokens: most tokens of a continuation or an answer
        temperature: temperature of sampling (default: no sampling, the most likely token)
        top_k: sample among this many most likely tokens
        top_p: sample among the most likely tokens that together have this probability
        min_p: sample among the tokens with at least this share of the largest probability
        repetition_penalty: divide the logits of tokens that were read or written by this number
        frequency_penalty: subtract this number from a token's logit for each time that it was written
        presence_penalty: subtract this number from the logits of tokens that were written
        no_repeat_ngram: let no sequence of so many tokens come twice
        stop: a string, before which the text ends; repeatable
        seed: seed of sampling
        logprobs: a file for the log-probabilities of the tokens: a JSON line for each token
        top_logprobs: so many of the likeliest tokens in each line of --logprobs
    """

    max_new_tokens: PositiveInt = 128
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    no_repeat_ngram: int | None = None
    stop: tuple[str, ...] = option((), repeat=True)
    seed: int = 0
    logprobs: pathlib.Path | None = option(None, metavar="OUT", read=output_file)
    top_logprobs: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.top_logprobs and self.logprobs is None:
            raise ValueError(f"--top-logprobs {self.top_logprobs} needs a file: add --logprobs OUT")
        self.sampler()
        stop_strings(self.stop, "")

    def sampler(self) -> Sampler:
        """Make the sampler of the settings with its names."""
        names = {field.name for field in dataclasses.fields(Sampler)} & set(vars(self))
        return Sampler(**{name: vars(self)[name] for name in names})

    def key(self) -> jax.Array | None:
        """Make the key of sampling; None without sampling."""
        return None if self.temperature is None else jax.random.key(self.seed)

    def scoring(self) -> dict[str, Any]:
        """Return the arguments of `kvjax.generate` that ask for log-probabilities."""
        return {"logprobs": self.logprobs is not None, "top_logprobs": self.top_logprobs}
