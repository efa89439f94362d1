"""The costs on a method's page: memory from shapes, and times from the records in ``docs``."""

from __future__ import annotations

import functools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

import kvjax
import models
from experiments.records import markdown_rows
from experiments.speed import speedup, uneven_scores
from kvjax import registry
from kvjax.decoding.layers import init_shared, layer_methods, layer_specs, observe
from kvjax.protocol.method import Method, num_bytes

Row = Mapping[str, Any]

LENGTHS = (32_768, 131_072)  # tokens of the prompts whose memory is shown
NEW_TOKENS = 256
_STANDS_FOR = {"chess": {"trigger": "fixed"}}  # knobs in place of defaults that need data first; storage is the same


def memory(name: str) -> str:
    """Show the memory of a Llama-3.1-8B shape in bfloat16 under a method's defaults, from shapes alone.

    Args:
        name: lower-case name of a method.

    Returns:
        Markdown: a table, and the bytes of a further token per KV head.
    """
    config = models.shapes.llama31_8b(dtype="bfloat16")
    method, full = _default(name), registry.make("full")
    head = ("prompt tokens", "at most, GiB", "while decoding, GiB", "of Full's")
    body, held = [], []
    for length in LENGTHS:
        sizes = {"batch": 1, "prompt_slots": length, "max_new_tokens": NEW_TOKENS}
        held.append(held_bytes(method, config, length))
        most = max(kvjax.memory_needed(method, config, **sizes).device, held[-1])
        share = 100 * held[-1] / held_bytes(full, config, length)
        body.append((f"{length:,}", _gib(most), _gib(held[-1]), f"{share:.1f} %"))
    heads = config.num_layers * config.num_kv_heads
    slope = (held[1] - held[0]) / (LENGTHS[1] - LENGTHS[0]) / heads
    exact = 2 * config.head_dim * 2
    per_token = "A further prompt token costs nothing once the budget is full."
    if slope:
        per_token = (
            f"A further prompt token costs {slope:.0f} bytes per layer and KV head; an exact key and value are {exact}, its "
            "position 4."
        )
    told = (
        f"Llama-3.1-8B's shape ({config.num_layers} layers, {config.num_kv_heads} KV heads of {config.head_dim}), bfloat16, "
        f"one row, {NEW_TOKENS} new tokens, the method's default knobs, everything on the device, from shapes; at most: the "
        "larger of the memory while the prompt is read in chunks of 8,192 (`kvjax.memory_needed`) and the memory afterwards."
    )
    return "\n".join([*markdown_rows([head, *body]), "", f"{told} {per_token}"])


def held_bytes(method: Method, config: Any, length: int) -> int:
    """Count the bytes of all layers and their shared state while a row decodes after a prompt of ``length`` tokens."""
    methods = layer_methods(method, config)
    specs = layer_specs(methods, config, 1, length, NEW_TOKENS)
    known: dict[Any, Any] = {}
    layers = []
    for layer, spec in zip(methods, specs, strict=True):
        kind = jax.tree.structure(layer)
        if kind not in known:  # layers of one kind differ in their number only
            known[kind] = jax.eval_shape(lambda layer=layer, spec=spec: layer.finish(layer.init(spec), spec))
        layers.append(known[kind])

    def read(layers: tuple) -> Any:
        cache = kvjax.Cache(
            layers=layers,
            shared=init_shared(method, config, specs),
            method=method,
            length=jnp.zeros((1,), jnp.int32),
            logits=jnp.zeros((1, config.vocab_size), jnp.float32),
            model=config,
            weights="",
        )
        return observe(cache, decoding=False).shared

    return num_bytes((layers, jax.eval_shape(read, tuple(layers))))


def speed(name: str, docs: pathlib.Path) -> str:
    """Show the times of a method for decoding, prefill and host memory, as markdown; "" if no record has them.

    Args:
        name: lower-case name of a method.
        docs: folder of the documentation, whose ``records/speed.json`` and ``records/offload.json`` have the times.
    """
    parts = []
    record = load(docs / "records" / "speed.json")
    mine = [x for x in record.get("metrics", ()) if is_of(x["method"], name) and x["error"] is None]
    decode = sorted((x for x in mine if x["name"] == "decode"), key=lambda x: (x["length"], x["batch"], x["method"]))
    if decode:
        head = (
            "setting",
            "tokens",
            "rows",
            "ms per token",
            "times floor",
            "cache read per step, GB",
            "faster than Full",
        )
        body = [
            (
                x["note"] or "",
                f"{x['length']:,}",
                x["batch"],
                f"{_ms(x['value'])} ({_ms(x['least'])} - {_ms(x['most'])})",
                f"{x['ratio']:.2f}",
                f"{x['cache_bytes_read'] / 1e9:.2f}",
                "" if name == "full" else speedup(x, record["metrics"]),
            )
            for x in decode
        ]
        parts.append("\n".join(markdown_rows([head, *body])))
    for x in mine:
        if x["name"] == "prefill":
            parts.append(f"Reading a prompt of {x['length']:,} tokens takes {x['value']:.1f} s.")
    if parts:
        parts.append(
            f"{_models(mine)}, random weights, bfloat16, {record['device']['kind']}, JAX {record['versions']['jax']}; median "
            "(least - most). Floor: the bytes a step must read over the read bandwidth of the same run; a factor in brackets "
            "compares with Full of another run. All rows: [speed](../tables/speed.md)."
        )
    hosted = load(docs / "records" / "offload.json")
    away = [
        x for x in hosted.get("metrics", ()) if x["name"] == "offload" and is_of(x["method"], name) and not x["error"]
    ]
    if away:
        head = (
            "tokens",
            "rows",
            "layers in host memory",
            "ms per token",
            "tokens/s",
            "over the bus per step, MB",
            "on the device, GB",
            "in host memory, GB",
        )
        body = [
            (
                f"{x['length']:,}",
                x["batch"],
                x["layers"],
                _ms(x["value"]),
                f"{x['tokens_per_second']:.0f}",
                f"{x['bus_bytes'] / 1e6:.1f}",
                f"{x['device_bytes'] / 1e9:.2f}",
                f"{x['host_bytes'] / 1e9:.2f}",
            )
            for x in sorted(away, key=lambda x: (x["length"], x["batch"], -x["share"]))
        ]
        parts += [
            "With host memory (`offload=True`, or a share of the layers):",
            "\n".join(markdown_rows([head, *body])),
            "All rows: [offload](../tables/offload.md).",
        ]
    return "\n\n".join(parts)


@functools.cache
def load(path: pathlib.Path) -> dict[str, Any]:
    """Load the record in a file, or {} if there is no file."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}


@functools.cache
def _default(name: str) -> Method:
    config = models.shapes.llama31_8b()
    tokenizer = models.load_tokenizer(models.builtin_directory()) if registry.classes()[name].needs_tokenizer else None
    knobs = _STANDS_FOR.get(name, {})
    if "scores" in registry.classes()[name].__dataclass_fields__:
        knobs = {**knobs, "scores": uneven_scores(config)}
    return registry.make(name, tokenizer, config.vocab_size, **knobs)


def is_of(label: str, name: str) -> bool:
    """Say whether a record's label names the method, or a variant of it such as ``tokenselect_hit``."""
    return label.lower() == name or label.lower().startswith(f"{name}_")


def _models(record: Sequence[Row]) -> str:
    return ", ".join(sorted({x["model"] for x in record}))


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.2f}"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f}"
