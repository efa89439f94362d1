"""What `kvjax ls --fits 24GB` shows: the longest prompt, the most rows and the memory of every method on one device."""

import json
import pathlib
import re
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import models
from experiments.answering.choice import method_with_files
from experiments.cli.settings import nearest
from kvjax.accounting import longest_prompt, most_rows
from kvjax.accounting.fits import SPARE
from kvjax.accounting.memory import memory_needed
from kvjax.accounting.phases import gib
from kvjax.mesh.sharding import bytes_on_device
from kvjax.registry import builtin, find
from models import ModelConfig, shapes

SIZES = {
    "llama-3-8b": shapes.llama3_8b, "llama-3.1-8b": shapes.llama31_8b, "llama-3.1-70b": shapes.llama31_70b,
    "llama-3.2-1b": shapes.llama32_1b, "qwen3-8b": shapes.qwen3_8b, "qwen3-4b": shapes.qwen3_4b,
    "qwen3-0.6b": shapes.qwen3_0_6b, "qwen2.5-7b": shapes.qwen25_7b, "qwen2.5-1.5b": shapes.qwen25_1_5b,
    "mistral-7b": shapes.mistral_7b, "yi-6b": shapes.yi_6b, "deepseek-v2-lite": shapes.deepseek_v2_lite,
}  # fmt: skip
_UNITS = {"gb": 10**9, "gib": 1 << 30, "mb": 10**6, "mib": 1 << 20}
_STEP = 256  # tokens, to which the longest prompt is found


def read_size(text: str) -> int:
    """Read a number of bytes such as 24GB, 22.5GiB or 800MB."""
    found = re.fullmatch(r"(\d+(?:\.\d*)?) *([a-z]+)", text.strip().lower())
    if found is None or found[2] not in _UNITS or not (size := int(float(found[1]) * _UNITS[found[2]])):
        raise ValueError(f"expected bytes such as 24GB or 22.5GiB, got {text!r}")
    return size


def describe(model: str) -> ModelConfig:
    """Read the description of a model, computed in bfloat16; nothing is downloaded.

    Args:
        model: one of `SIZES`, also with an owner or "-Instruct"; or a directory in Hugging Face layout or its config.json, a
            GGUF file, a named model, or a repository of the hub that is on this machine.
    """
    short = re.sub(r"-(instruct|chat|it)$", "", re.sub(r"^(meta-)?llama-(?=\d)", "llama-", model.rpartition("/")[2].lower()))
    path = pathlib.Path(model).expanduser()
    if short in SIZES and not path.exists():
        return SIZES[short]()
    try:
        return models.read_config(path.parent if path.name == "config.json" else model, "bfloat16", offline=True)
    except FileNotFoundError as error:
        hint = f"{nearest(short, SIZES)}; sizes of these are known without files: {', '.join(SIZES)}"
        raise FileNotFoundError(f"{error}{hint}") from error


def list_fits(
    size: str,
    model: str,
    methods: Sequence[str],
    *,
    length: int,
    tokens: int,
    kv_dtype: str | None,
    weight_dtype: str | None,
    as_json: bool,
) -> str:
    """List what fits, a line for each method.

    Args:
        size: of the device, as `read_size` takes it.
        model: as `describe` takes it.
        methods: texts as `kvjax.make` takes them; none means all methods.
        length: tokens of the prompts whose rows are counted.
        tokens: tokens that may follow a prompt.
        kv_dtype: dtype of stored keys and values.
        weight_dtype: dtype of the weights; None means bfloat16.
        as_json: whether to return JSON.
    """
    have, config = read_size(size), describe(model)
    params = models.param_shapes(config, weight_dtype)
    weights = bytes_on_device(params)
    if have < weights + SPARE:
        raise MemoryError(f"{model} has {gib(weights)} of weights, and {gib(SPARE)} are to spare, got {gib(have)}")
    for name in methods:
        find(name)  # refuses an unknown one
    names = methods or sorted(builtin(), key=lambda name: (name != "full", name))
    given = {"max_new_tokens": tokens, "kv_dtype": kv_dtype, "params": params}
    rows, refused = [], []
    for at, name in enumerate(names):
        _say(f"{at + 1} of {len(names)}: {name}")
        try:
            rows.append(_row(name, config, have, length, given))
        except ValueError as error:
            refused.append({"method": name, "refused": str(error)})
    _say("")
    if not rows:
        raise ValueError("; ".join(f"{row['method']}: {row['refused']}" for row in refused))
    if as_json:
        return json.dumps([*rows, *refused], indent=1)
    told = [f"{row['method']}: {row['refused']}" for row in refused]
    about = _legend(model, config, have, weights, length, tokens)
    over = length + tokens - config.max_position_embeddings
    if over > 0:
        but = ", ".join(row["method"] for row in rows if row["renumbers"])
        about.insert(
            2,
            f"{length:,} tokens and {tokens} are {over:,} beyond these positions, and prefill refuses them until the config "
            f"has YaRN{f', but under {but}' * bool(but)}.",
        )
    return "\n".join([*_lines(rows, length), *told, "", *(textwrap.fill(line, 120) for line in about)])


def _say(text: str) -> None:
    """Show which method it is at, where somebody watches."""
    if sys.stderr.isatty():
        print(f"\r{text:60.60s}\r", end="", file=sys.stderr, flush=True)


def _row(name: str, config: ModelConfig, have: int, length: int, given: dict[str, Any]) -> dict[str, Any]:
    method = method_with_files(name, config)
    needed = memory_needed(method, config, batch=1, prompt_slots=length, **given)
    longest = longest_prompt(method, config, batch=1, device_bytes=have, step=_STEP, **given)
    rows = most_rows(method, config, prompt_slots=length, device_bytes=have, **given)
    return {
        "method": name,
        "longest_prompt": longest if longest is None or rows == 0 else max(longest, length),  # to a step below
        "most_rows": rows,
        "peak_bytes": needed.peak,
        "after_bytes": needed.after,
        "renumbers": method.extrapolates,
    }


def _lines(rows: Sequence[dict[str, Any]], length: int) -> list[str]:
    width = max([len(row["method"]) for row in rows] + [6])
    lines = [f"{'method':{width}s}  {'longest prompt':>14s}  {f'rows of {length:,}':>15s}  {'peak':>10s}  {'after':>10s}"]
    for row in rows:
        longest, most = ("any" if row[name] is None else f"{row[name]:,}" for name in ("longest_prompt", "most_rows"))
        peak, after = gib(row["peak_bytes"]), gib(row["after_bytes"])
        lines.append(f"{row['method']:{width}s}  {longest:>14s}  {most:>15s}  {peak:>10s}  {after:>10s}")
    return lines


def _legend(model: str, config: ModelConfig, have: int, weights: int, length: int, tokens: int) -> list[str]:
    return [
        f"{model} on {gib(have)}: {gib(weights)} of weights, {gib(SPARE)} to spare, "
        f"{gib(have - weights - SPARE)} for the cache; {tokens} tokens may follow a prompt.",
        f"Longest prompt: of one row, to {_STEP} tokens below; the model has {config.max_position_embeddings:,} positions. "
        f"Peak and after: the cache of one row of {length:,} tokens, while it is read and afterwards.",
        "Budgets are each method's default; name a method to give one, as in kvjax ls 'snapkv(budget=1/8)' --fits 24GB.",
        "JAX takes 0.75 of a GPU's memory unless XLA_PYTHON_CLIENT_MEM_FRACTION says more.",
    ]
