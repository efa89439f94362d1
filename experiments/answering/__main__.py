"""Continue a text under a method; show the text as it is generated, and at the end its costs."""

from __future__ import annotations

import dataclasses
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax
from jsonargparse.typing import NonNegativeInt, PositiveInt

import kvjax
from experiments.answering.logprobs import check_logprobs, logprob_lines
from experiments.answering.method_settings import MethodSettings
from experiments.answering.model import LoadedModel, check_system
from experiments.answering.texts import read_prompt
from experiments.cli import Job, option
from experiments.records import CompileClock, Timer, write_bytes
from experiments.tasks import encode_prompt
from kvjax.accounting.memory import link_bandwidth, memory_needed
from kvjax.api.text import GrowingText, stop_strings
from kvjax.decoding.sampling import Sampler

_STREAM_BLOCK = 8  # most tokens of a piece of streamed text


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings(MethodSettings):
    """What to continue, and how.

    Attributes:
        prompt: the text to continue
        prompt_file: a file of the text to continue, UTF-8 (or UTF-16 with a byte-order mark); - reads standard input
        template: auto puts the checkpoint's chat template around the text, if it has one; none continues the text as it is
        system: text of the template's system turn (default: the template's own)
        template_variables: a variable of the template, such as enable_thinking=false; repeatable
        max_new_tokens: most tokens of the continuation
        temperature: temperature of sampling (default: no sampling, the most likely token)
        top_k: sample among this many most likely tokens
        top_p: sample among the most likely tokens that together have this probability
        min_p: sample among the tokens with at least this share of the largest probability
        repetition_penalty: divide the logits of tokens of the prompt and of the continuation by this number
        frequency_penalty: subtract this number from a token's logit for each time that it was generated
        presence_penalty: subtract this number from the logits of tokens that were generated
        no_repeat_ngram: let no sequence of so many tokens come twice
        stop: a string, before which the continuation ends; repeatable
        seed: seed of sampling
        logprobs: a file for the log-probabilities of the continuation's tokens: a JSON line for each token
        top_logprobs: so many of the likeliest tokens in each line of --logprobs
    """

    prompt: str | None = None
    prompt_file: str | None = None
    template: str = option("none", choices=("auto", "none"))
    system: str | None = None
    template_variables: Mapping[str, Any] = option(factory=dict, flag="template-set")
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
    logprobs: pathlib.Path | None = option(None, metavar="OUT")
    top_logprobs: NonNegativeInt = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.prompt_file is None):
            got = "neither" if self.prompt is None else "both"
            raise ValueError(f"the text to continue is given by --prompt TEXT or --prompt-file FILE, got {got}")
        if self.template == "none" and (self.system is not None or self.template_variables):
            raise ValueError("--system and --template-set belong to a chat template: add --template auto")
        check_logprobs(self.logprobs, self.top_logprobs)
        self.sampler()
        stop_strings(self.stop, "")

    def sampler(self) -> Sampler:
        """Make the sampler of the settings with its names."""
        names = {field.name for field in dataclasses.fields(Sampler)} & set(vars(self))
        return Sampler(**{name: vars(self)[name] for name in names})


def _generate(settings: GenerateSettings) -> None:
    """Print the continuation to standard output, and its costs to standard error."""
    prompt = read_prompt(settings.prompt, settings.prompt_file)
    model = settings.load()
    config, tokenizer = model.config, model.tokenizer
    ids = _encode(model, prompt, settings)
    method = settings.make(len(ids), tokenizer, config)
    spread = "" if model.mesh is None else f"{settings.mesh} of "
    _say(f"{len(ids)} prompt tokens, {config.dtype} on {spread}{jax.default_backend()}, compiling ...")
    if model.groups > 1:
        _say(f"there is one prompt: each of {model.groups} groups of devices generates the same")
    if method.offload:
        sizes = {"batch": model.groups, "prompt_slots": len(ids), "max_new_tokens": settings.max_new_tokens}
        needed = memory_needed(method, config, mesh=model.mesh, kv_dtype=settings.kv_dtype, **sizes)
        _say(f"offloaded: {needed}; the bus moves {link_bandwidth() / 1e9:.1f} GB/s")
    with CompileClock() as clock:
        with Timer(clock) as reading:
            options = {"max_new_tokens": settings.max_new_tokens, "kv_dtype": settings.kv_dtype}
            cache = kvjax.prefill(model.params, [ids] * model.groups, config=config, method=method, **options)
            jax.block_until_ready(cache)
        text, new, lines = GrowingText(tokenizer, settings.stop), 0, []
        sampler = settings.sampler().read([ids] * model.groups)
        with Timer(clock) as writing:
            for out in _blocks(model.params, cache, sampler, settings):
                piece = out.rows()[0]
                new += len(piece)
                lines += logprob_lines(tokenizer, out.scored_rows()[0]) if out.logprobs is not None else ()
                _show(text.add([token for token in piece if token not in config.eos_token_ids]))
                if text.ended:
                    break
    _show(text.add([], last=True) + "\n")
    if settings.logprobs is not None:
        write_bytes(settings.logprobs, "".join(lines).encode())
    _say(out.stats.summary())
    _say(
        f"prefill {reading.run:.2f} s ({len(ids) / max(reading.run, 1e-9):.0f} tokens/s), {new} tokens "
        f"in {writing.run:.2f} s ({new / max(writing.run, 1e-9):.1f} tokens/s), compile apart: "
        f"{reading.compile + writing.compile:.1f} s"
    )


def _encode(model: LoadedModel, prompt: str, settings: GenerateSettings) -> list[int]:
    """Encode the prompt, in the chat template if it is wanted and there is one."""
    template = model.template if settings.template == "auto" else None
    check_system(template, settings.system)
    if template is None:
        if settings.template == "auto":
            _say(f"{model.name} has no chat template: the text is continued as it is")
        return encode_prompt(model.tokenizer, prompt)
    before, after = template.around(settings.system, **settings.template_variables)
    return model.tokenizer.encode(before + prompt + after, add_special_tokens=False).ids


def _blocks(params: Any, cache: kvjax.Cache, sampler: Sampler, settings: GenerateSettings) -> Iterator[kvjax.Generation]:
    """Generate piece by piece; equal pieces share a compiled program, so their size divides the whole."""
    total = settings.max_new_tokens
    block = max(size for size in range(1, min(_STREAM_BLOCK, total) + 1) if total % size == 0)
    keys = [None] * (total // block)
    if settings.temperature is not None:
        keys = jax.random.split(jax.random.key(settings.seed), len(keys))
    for key in keys:
        options = {"logprobs": settings.logprobs is not None, "top_logprobs": settings.top_logprobs}
        out = kvjax.generate(params, cache, max_new_tokens=block, sampler=sampler, key=key, **options)
        cache, sampler = out.cache, out.sampler
        yield out
        # A full piece may end with an end-of-text token too.
        ids = out.rows()[0]
        if len(ids) < block or ids[-1] in cache.model.eos_token_ids:
            return


def _show(text: str) -> None:
    print(text, end="", flush=True)


def _say(text: str) -> None:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)


main = Job(_generate, GenerateSettings, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
