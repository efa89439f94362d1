"""Decoding from host memory: `python -m experiments.speed.offload --methods pariskv --lengths 393216 --out RECORD.json`.

Random weights and filled caches as in `experiments.speed`; every method decodes with its rows in pinned host memory and,
where that fits, with all of them on the device. Bytes over the bus are those of the rows that a step attends to and has no
copy of on the device, counted from a real selection of the last layer; the link's bandwidth is that of a copy of 256 MiB in
the same run. More pinned memory than 64 GB has to be asked for: ``XLA_PJRT_GPU_HOST_MEMORY_LIMIT_GB=100``. ``--share fit``
keeps as many layers on the device as a prompt of that length leaves room for (`kvjax.offload_share`).

``--prompts`` times the reading of prompts instead, whose keys and values leave the device as they are made, and reports the
most device memory it took: with ``XLA_PYTHON_CLIENT_MEM_FRACTION=.38`` a prompt whose cache would not fit is still read.
"""

from __future__ import annotations

import argparse
import dataclasses
import io
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.answering.presets import Setting
from experiments.cli.types import names, numbers, positive, record_path, refusals
from experiments.demo import report as demo_report
from experiments.records import record
from experiments.records.resumable import Results
from experiments.records.tables import rows
from experiments.speed import report as speed_report
from experiments.speed.bench import MODELS, Bench, Plan, bytes_limit
from experiments.speed.variants import VARIANTS, read_knobs
from kvjax.cache import Cache
from kvjax.memory import link_bandwidth, memory_needed, offload_share, placed_bytes
from kvjax.method import Inputs
from kvjax.offload import OffloadedLayerCache
from kvjax.rope import inverse_frequencies
from kvjax.step import layer_methods
from pallas_kernels.host import has_copy

_LEGEND = (
    "TPOT: milliseconds per output token, median (least - most). Resident: the same with everything on the device. "
    "Bus: megabytes a step reads from host memory, over all rows and layers; GB/s: those over the time by which the step is "
    "longer than the resident one, where there is one. Layers: those with rows in host memory. Hot: share of the rows "
    "attended there that have a copy on the device. Device, host: gigabytes of the cache."
)
_PROMPTS = (
    "Seconds to read a prompt, median (least - most), into host memory; largest device memory of the process, of which "
    "weights, and what it was given; gigabytes of keys and values in host memory."
)
_PROMPT_HEAD = (
    "method",
    "length",
    "rows",
    "chunk",
    "seconds",
    "tokens/s",
    "peak device GB",
    "weights GB",
    "given GB",
    "host GB",
    "notes",
)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What one decode step reads of keys and values.

    Attributes:
        bus_bytes: over the bus, all layers and rows.
        hot: share of the attended rows that are read on the device, of layers with rows in host memory.
        layers: how many these are.
    """

    bus_bytes: float
    hot: float
    layers: int


def traffic(cache: Cache, seed: int = 0) -> Traffic:
    """Counts the rows of one step, of the newest layer's selection for a random query.

    Args:
        cache: after decoding.
        seed: of the query.
    """
    methods = layer_methods(cache.method, cache.model)
    hosted = [i for i, state in enumerate(cache.layers) if _caches(state)]
    if not hosted:
        return Traffic(bus_bytes=0.0, hot=1.0, layers=0)
    state = cache.layers[hosted[-1]]
    model, layer = cache.model, _caches(state)[0]
    groups = (model.num_kv_heads, model.num_q_heads // model.num_kv_heads)
    q, k, v = jax.random.split(jax.random.key(seed), 3)
    shapes = [(cache.batch, *groups, 1, model.head_dim), *[(cache.batch, groups[0], 1, model.head_dim)] * 2]
    query, key, value = (
        jax.random.normal(x, shape, layer.value.dtype) for x, shape in zip((q, k, v), shapes, strict=True)
    )
    inputs = Inputs(
        query=query,
        key=key,
        value=value,
        position=cache.length[:, None],
        tokens=jnp.ones((cache.batch, 1), jnp.int32),  # none that ends a sentence
        inv_freq=jnp.asarray(inverse_frequencies(model.head_dim, model.rope_theta, model.rope_scaling)),
        shared=cache.shared,
    )
    chosen = np.asarray(jax.jit(methods[hosted[-1]].chosen)(state, inputs))
    slot = jnp.arange(layer.num_slots, dtype=jnp.int32)[None]
    copied = np.asarray(has_copy(slot, layer.cursor[:, None] + 1, layer.sinks, layer.value.shape[2]))
    position = np.asarray(layer.position)
    attended = cold = 0
    for b, h in np.ndindex(chosen.shape[:2]):
        listed = chosen[b, h][chosen[b, h] >= 0]
        there = position[b, h][copied[b] & (position[b, h] >= 0)]
        attended += len(listed)
        cold += len(listed) - np.isin(listed, [*there, int(cache.length[b])]).sum()
    row = layer.host.shape[3] * layer.host.dtype.itemsize
    return Traffic(bus_bytes=float(cold * row * len(hosted)), hot=1 - cold / attended, layers=len(hosted))


def _caches(state: Any) -> list[OffloadedLayerCache]:
    leaves = jax.tree.leaves(state, is_leaf=lambda x: isinstance(x, OffloadedLayerCache))
    return [x for x in leaves if isinstance(x, OffloadedLayerCache)]


def can_offload(bench: Bench, name: str, length: int) -> bool:
    """Whether the variant's method has the field."""
    return "offload" in {field.name for field in dataclasses.fields(bench.setting(name, length).method)}


def fitting(bench: Bench, name: str, length: int, batch: int) -> float:
    """Least share of the layers to offload; 1 where no share fits, or the device does not say how much memory it has."""
    limit = bytes_limit()
    if limit is None:
        return 1.0
    sizes = {"batch": batch, "prompt_slots": length, "max_new_tokens": bench.room, "chunk_size": bench.plan.chunk_size}
    method, free = bench.setting(name, length).method, limit - bench.weights
    try:
        return offload_share(method, bench.config, device_bytes=free, **sizes)
    except MemoryError:  # which the row will say
        return 1.0


def _offload(share: float) -> bool | float:
    """The knob that says it, a bool where it can."""
    return bool(share) if share in (0, 1) else share


def measure(bench: Bench, name: str, length: int, batch: int, share: float) -> dict[str, Any] | None:
    """One row, from the record or measured, ``share`` of the layers offloaded; None if the rest cannot be on the device."""
    limit = bytes_limit()
    knobs = {"offload": _offload(share)} if can_offload(bench, name, length) else {}

    def run(chosen: Setting) -> dict[str, Any]:
        figures, cache = bench.decode_figures(chosen.method, length, batch)
        device, host = placed_bytes((cache.layers, cache.shared))
        seen = traffic(cache)
        return {**figures, "device_bytes": device, "host_bytes": host, **dataclasses.asdict(seen)}

    sizes = {"batch": batch, "prompt_slots": length, "max_new_tokens": bench.room, "chunk_size": length}
    needed = memory_needed(bench.setting(name, length, **knobs).method, bench.config, **sizes)
    if limit is not None and needed.device + bench.weights > limit:
        return None
    return bench.row("offload" if share else "resident", name, length, batch, run, knobs, share=float(share))


def markdown(metrics: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> str:
    """The table of a record."""
    head = (
        "method",
        "length",
        "rows",
        "layers",
        "TPOT ms",
        "resident ms",
        "tokens/s",
        "bus MB",
        "GB/s",
        "hot",
        "device GB",
        "host GB",
        "notes",
    )
    lines = ["# Decoding from host memory", ""]
    for model in dict.fromkeys(row["model"] for row in metrics):
        mine = [row for row in metrics if row["model"] == model]
        mine.sort(key=lambda row: (row["length"], row["batch"], -row["share"]))
        steps = [row for row in mine if row["name"] != "prefill"]
        prompts = [row for row in mine if row["name"] == "prefill"]
        lines += [f"## {model}", ""]
        if steps:
            lines += [*rows([head, *filter(None, (_line(row, steps) for row in steps))]), ""]
        if prompts:
            lines += ["### Prompts", "", *rows([_PROMPT_HEAD, *map(_prompt_line, prompts)]), ""]
    kinds = {row["name"] == "prefill" for row in metrics}
    for legend in [_LEGEND] * (False in kinds) + [_PROMPTS] * (True in kinds):
        lines += [legend, ""]
    for run, about in notes.get("runs", {}).items():
        link = notes.get("links", {}).get(run)
        bus = f", host to device {link / 1e9:.1f} GB/s" if link else ""
        lines.append(f"Run {run}: {about['device']}, JAX {about['versions']['jax']}, commit {about['commit']}{bus}.")
    return "\n".join(lines) + "\n"


def _prompt_line(row: Mapping[str, Any]) -> list[Any]:
    """A row of the table of prompts."""
    place = [row[key] for key in ("method", "length", "batch", "chunk_size")]
    if row["error"] is not None:
        return [*place, *[""] * 6, row["error"].splitlines()[0][:80].replace("|", "/")]
    gigabytes = [row[key] for key in ("peak_bytes", "weight_bytes", "device_limit", "host_bytes")]
    return [
        *place,
        f"{row['value']:.2f} ({row['least']:.2f} - {row['most']:.2f})",
        f"{row['tokens_per_second']:.0f}",
        *("" if size is None else f"{size / 1e9:.1f}" for size in gigabytes),
        _note(row),
    ]


def _note(row: Mapping[str, Any]) -> str:
    """A row's note without what holds for the whole table."""
    return "; ".join(part for part in row["note"].split("; ") if part != "offload=True")


def _line(row: Mapping[str, Any], metrics: Sequence[Mapping[str, Any]]) -> list[Any] | None:
    """A row of the table of one model; None if it is shown beside its offloaded one."""
    place = {key: row[key] for key in ("method", "length", "batch")}
    if row["error"] is not None:
        return [*place.values(), *[""] * 9, f"{row['name']}: {row['error'].splitlines()[0][:80].replace('|', '/')}"]
    alike = [x for x in metrics if place.items() <= x.items() and x["error"] is None]
    other = next((x for x in alike if x["name"] == "resident"), None)
    hosted = row["name"] == "offload"
    if not hosted and len(alike) > 1:
        return None
    extra = row["value"] - other["value"] if hosted and other else 0
    return [
        *place.values(),
        row["layers"],
        f"{1e3 * row['value']:.3f} ({1e3 * row['least']:.3f} - {1e3 * row['most']:.3f})" if hosted else "",
        f"{1e3 * other['value']:.3f}" if other else "",
        f"{row['tokens_per_second']:.1f}",
        f"{row['bus_bytes'] / 1e6:.2f}" if hosted else "",
        f"{row['bus_bytes'] / extra / 1e9:.1f}" if extra > 0 and row["bus_bytes"] else "",
        f"{100 * row['hot']:.1f} %" if hosted else "",
        f"{row['device_bytes'] / 1e9:.2f}",
        f"{row['host_bytes'] / 1e9:.2f}",
        _note(row),
    ]


def draw(metrics: Sequence[Mapping[str, Any]]) -> bytes:
    """TPOT against length at the smallest batch, offloaded and resident, of rows that decode: a PNG file's bytes."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4.4), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panel = figure.subplots()
    good = [row for row in metrics if row["error"] is None and row["name"] != "prefill"]
    least = min((row["batch"] for row in good), default=1)
    models = {row["model"] for row in good}
    for index, (model, method) in enumerate(dict.fromkeys((row["model"], row["method"]) for row in good)):
        name = method if len(models) == 1 else f"{method}, {model}"
        same = {"model": model, "method": method, "batch": least}
        own = [row for row in good if same.items() <= row.items()]
        for style, label, has in (
            ("-", name, lambda share: share == 1),
            ("--", f"{name}, some layers", lambda share: 0 < share < 1),
            (":", f"{name}, resident", lambda share: share == 0),
        ):
            points = sorted((row["length"], 1e3 * row["value"]) for row in own if has(row["share"]))
            if points:
                color = demo_report.COLORS[index % len(demo_report.COLORS)]
                panel.plot(*zip(*points, strict=True), style, marker="o", markersize=3, color=color, label=label)
    lengths = sorted({row["length"] for row in good})
    panel.set(
        xlabel="tokens stored", ylabel="ms per token", xscale="log", title=f"Decoding from host memory, {least} row(s)"
    )
    panel.set_xticks(lengths, [f"{length // 1024:,}K" if length % 1024 == 0 else f"{length:,}" for length in lengths])
    panel.xaxis.minorticks_off()
    panel.spines[["top", "right"]].set_visible(False)
    if good:
        panel.legend(fontsize=7, frameon=False)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def _share(text: str) -> float | None:
    """A share of the layers; None for "fit"."""
    share = None if text == "fit" else float(text)
    if share is not None and not 0 < share <= 1:
        raise argparse.ArgumentTypeError(f"expected 'fit' or a number above 0 and at most 1, got {text!r}")
    return share


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description="Time decoding from host memory.")
    parser.add_argument("--model", default="llama-3.1-8b", choices=tuple(MODELS))
    parser.add_argument(
        "--methods", type=names, default="pariskv", help="comma-separated, or 'all'; those that cannot offload run resident"
    )
    parser.add_argument("--lengths", type=numbers, default="131072", help="comma-separated, tokens stored before decoding")
    parser.add_argument("--batches", type=numbers, default="1", help="comma-separated, rows decoded together")
    parser.add_argument("--tokens", type=positive, default=32, help="tokens decoded per repeat, in one program")
    parser.add_argument("--repeats", type=positive, default=5, help="measurements of each row")
    parser.add_argument(
        "--share",
        type=_share,
        default=1.0,
        help="share of the layers in host memory, above 0 and at most 1; 'fit' keeps on the device those that fit (1)",
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--no-resident", action="store_true", help="only from host memory")
    mode.add_argument("--prompts", action="store_true", help="time the reading of prompts into host memory instead")
    parser.add_argument("--chunk-size", type=positive, help="with --prompts: tokens of a prompt read at once (8192)")
    parser.add_argument(
        "--set", action="append", default=[], metavar="METHOD.KNOB=VALUE", help="a knob of a method; repeatable"
    )
    parser.add_argument("--no-plot", action="store_true", help="write no figure")
    parser.add_argument("--out", type=record_path, required=True, help="JSON record; the table goes beside it")
    arguments = parser.parse_args()
    if not arguments.no_plot:
        demo_report.check_installed()
    with refusals(parser):
        if arguments.chunk_size is not None and not arguments.prompts:
            raise ValueError("--chunk-size has no meaning without --prompts")
        plan = Plan(
            model=arguments.model,
            methods=tuple(VARIANTS) if arguments.methods == ("all",) else arguments.methods,
            lengths=arguments.lengths,
            batches=arguments.batches,
            tokens=arguments.tokens,
            repeats=arguments.repeats,
            split=False,
            **({} if arguments.chunk_size is None else {"chunk_size": arguments.chunk_size}),
        )
        knobs = read_knobs(arguments.set)
        if placed := [name for name in knobs if "offload" in knobs[name]]:
            raise ValueError(f"--set {placed[0]}.offload: rows are measured offloaded and resident, see --no-resident")
        settings = {"device": jax.devices()[0].device_kind, "weights": "random", "dtype": MODELS[plan.model]().dtype}
        results = Results(arguments.out, "offload", settings)
        bench = Bench(plan, results, knobs)
    link = link_bandwidth()
    results.change("links", lambda links: {**(links or {}), bench.run: link})
    print(f"host to device: {link / 1e9:.1f} GB/s")
    print(speed_report.head())
    for length in plan.lengths:
        for batch in plan.batches:
            for name in plan.methods:
                can = can_offload(bench, name, length)
                share = arguments.share if can else 0.0
                if can and share is None:
                    share = fitting(bench, name, length, batch)
                if arguments.prompts:
                    if can:
                        bench.prefill(name, length, batch, {"offload": _offload(share)}, share=float(share))
                    else:
                        print(f"{'prefill':9s} {name:17s} {length:8d} {batch:4d} has nothing to offload")
                    continue
                for part in dict.fromkeys([share, *[0.0] * (not can or not arguments.no_resident)]):
                    row = measure(bench, name, length, batch, part)
                    if row is None:
                        print(f"{'offload' if part else 'resident':9s} {name:17s} {length:8d} {batch:4d} does not fit")
                    elif part and row["error"] is None:
                        print(
                            f"{'':9s} {row['bus_bytes'] / 1e6:.2f} MB over the bus, {100 * row['hot']:.1f} % hot, "
                            f"{row['layers']} of {bench.config.num_layers} layers"
                        )
    record.write_bytes(arguments.out.with_suffix(".md"), markdown(results.metrics, results.notes).encode())
    if not arguments.no_plot and any(row["name"] != "prefill" for row in results.metrics):
        record.write_bytes(arguments.out.with_suffix(".png"), draw(results.metrics))
    print(f"record: {arguments.out}")
    if bench.failed:
        raise SystemExit(f"{bench.failed} rows failed; their errors are in the record")


if __name__ == "__main__":
    main()
