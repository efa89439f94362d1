"""`python -m kvjax generate`: continue a text under a method, streaming, with its accounting."""

from __future__ import annotations

import argparse
import pathlib
import sys
import types
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import jax

import kvjax
from kvjax import registry
from kvjax.memory import link_bandwidth, memory_needed
from kvjax.timing import CompileClock, Timer

_STREAM_BLOCK = 8  # tokens per piece of streamed text
_WORDS = {type(None): {"none": None}, bool: {"true": True, "false": False}}  # values that are words


def run(arguments: argparse.Namespace) -> None:
    """Print the continuation to standard output, and what it cost to standard error."""
    if arguments.max_new_tokens < 1:
        raise ValueError(f"--max-new-tokens must be at least 1, got {arguments.max_new_tokens}")
    knobs = parse_knobs(arguments.method, arguments.set)
    registry.make(arguments.method, **knobs)  # refuses bad knobs before anything is loaded
    prompt = _read_prompt(arguments.prompt_file)
    params, config, tokenizer = load(arguments)
    method = registry.make(arguments.method, tokenizer, config.vocab_size, **knobs)
    ids = tokenizer.encode(prompt).ids
    _say(f"{len(ids)} prompt tokens, {config.dtype} on {jax.default_backend()}, compiling ...")
    if method.offload:
        needed = memory_needed(
            method, config, batch=1, prompt_slots=len(ids), max_new_tokens=arguments.max_new_tokens
        )
        _say(f"offloaded: {needed}; the bus moves {link_bandwidth() / 1e9:.1f} GB/s")
    with CompileClock() as clock:
        with Timer(clock) as reading:
            cache = jax.block_until_ready(
                kvjax.prefill(params, [ids], config=config, method=method, max_new_tokens=arguments.max_new_tokens)
            )
        new: list[int] = []
        shown = ""
        with Timer(clock) as writing:
            for out in _blocks(params, cache, arguments):
                new += out.tokens[0, : int(out.num_tokens[0])].tolist()
                if arguments.stream:
                    shown += _show(_text(tokenizer, new, config)[len(shown) :].rstrip("\ufffd"))
    _show(_text(tokenizer, new, config)[len(shown) :] + "\n")
    _say(out.stats.summary())
    _say(
        f"prefill {reading.run:.2f} s ({len(ids) / max(reading.run, 1e-9):.0f} tokens/s), {len(new)} tokens "
        f"in {writing.run:.2f} s ({len(new) / max(writing.run, 1e-9):.1f} tokens/s), compile apart: "
        f"{reading.compile + writing.compile:.1f} s"
    )


def load(arguments: argparse.Namespace) -> tuple[Any, Any, Any]:
    """Parameters, config and tokenizer of ``--model``, in ``--dtype``."""
    import models

    directory = models.builtin_directory() if arguments.model == "builtin" else pathlib.Path(arguments.model)
    dtype = arguments.dtype or ("float32" if jax.default_backend() == "cpu" else "bfloat16")
    params, config = models.from_pretrained(directory, dtype=dtype)
    return params, config, models.load_tokenizer(directory, config)


def _read_prompt(path: str) -> str:
    try:
        text = sys.stdin.read() if path == "-" else pathlib.Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is not UTF-8 text: {error}") from error
    if not text.strip():
        raise ValueError(f"the prompt is empty: {'standard input' if path == '-' else path}")
    return text


def _blocks(params: Any, cache: kvjax.Cache, arguments: argparse.Namespace) -> Iterator[kvjax.Generation]:
    """Generate piece by piece; equal blocks share one compile, so their size divides the whole."""
    total = arguments.max_new_tokens
    block = max(size for size in range(1, min(_STREAM_BLOCK, total) + 1) if total % size == 0)
    keys = [None] * (total // block)
    if arguments.temperature is not None:
        keys = jax.random.split(jax.random.key(arguments.seed), len(keys))
    for key in keys:
        out = kvjax.generate(
            params,
            cache,
            max_new_tokens=block,
            temperature=arguments.temperature,
            top_k=arguments.top_k,
            top_p=arguments.top_p,
            key=key,
        )
        cache = out.cache
        yield out
        # A full block may end in an end-of-text token too.
        count = int(out.num_tokens[0])
        if count < block or int(out.tokens[0, count - 1]) in cache.model.eos_token_ids:
            return


def _text(tokenizer: Any, ids: list[int], config: Any) -> str:
    return tokenizer.decode([token for token in ids if token not in config.eos_token_ids])


def _show(text: str) -> str:
    print(text, end="", flush=True)
    return text


def _say(text: str) -> None:
    print(f"kvjax: {text}", file=sys.stderr, flush=True)
