"""Continue a text under a method; show the text as it is generated, and at the end its costs."""

import dataclasses
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import jax

import kvjax
from experiments.answering.logprobs import logprob_lines
from experiments.answering.model import LoadedModel, check_system
from experiments.answering.texts import read_prompt
from experiments.answering.writing_settings import WritingSettings
from experiments.cli import Job, option
from experiments.records import CompileClock, Timer, write_bytes
from experiments.tasks import encode_prompt
from kvjax.accounting.memory import link_bandwidth, memory_needed
from kvjax.api.text import GrowingText, until_stop
from kvjax.decoding.sampling import Sampler

_STREAM_BLOCK = 8  # most tokens of a piece of streamed text


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateSettings(WritingSettings):
    """What to continue, and how.

    Attributes:
        prompt: the text to continue
        prompt_file: a file of the text to continue, UTF-8 (or UTF-16 with a byte-order mark); - reads standard input
        template: auto puts the checkpoint's chat template around the text, if it has one; none continues the text as it is
        system: text of the template's system turn (default: the template's own)
        template_variables: a variable of the template, such as enable_thinking=false; repeatable
    """

    prompt: str | None = None
    prompt_file: str | None = None
    template: str = option("none", choices=("auto", "none"))
    system: str | None = None
    template_variables: Mapping[str, Any] = option(factory=dict, flag="template-set")

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.prompt is None) == (self.prompt_file is None):
            got = "neither" if self.prompt is None else "both"
            raise ValueError(f"the text to continue is given by --prompt TEXT or --prompt-file FILE, got {got}")
        if self.template == "none" and (self.system is not None or self.template_variables):
            raise ValueError("--system and --template-set belong to a chat template: add --template auto")


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
        text, written, scored = GrowingText(tokenizer, settings.stop), [], []
        sampler = settings.sampler().read([ids] * model.groups)
        with Timer(clock) as writing:
            for out in _blocks(model.params, cache, sampler, settings):
                piece = out.rows()[0]
                written += piece
                scored += out.scored_rows()[0] if out.logprobs is not None else ()
                _show(text.add([token for token in piece if token not in config.eos_token_ids]))
                if text.ended:
                    break
    _show(text.add([], last=True) + "\n")
    if settings.logprobs is not None:
        lines = logprob_lines(tokenizer, scored[: until_stop(tokenizer, written, settings.stop)])
        write_bytes(settings.logprobs, "".join(lines).encode())
    _say(out.stats.summary())
    _say(
        f"prefill {reading.run:.2f} s ({len(ids) / max(reading.run, 1e-9):.0f} tokens/s), {len(written)} tokens "
        f"in {writing.run:.2f} s ({len(written) / max(writing.run, 1e-9):.1f} tokens/s), compile apart: "
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
    key = settings.key()
    keys = [None] * (total // block) if key is None else jax.random.split(key, total // block)
    for key in keys:
        out = kvjax.generate(params, cache, max_new_tokens=block, sampler=sampler, key=key, **settings.scoring())
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
