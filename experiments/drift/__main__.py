"""Does search by clusters survive a long generation? `python -m experiments.drift --out docs/records/drift`.

Full samples a long text after a prompt of prose. Then, at checkpoints of that text, the keys with the largest q.k in
ParisKV's retrieval zone are looked for by cluster votes and the 4-bit estimate, per layer and KV head, with

* ``rotated``: ParisKV, sign clusters of rotated keys, which nothing is learned for;
* ``plain``: sign clusters of the keys as they are;
* ``learned``: 256 k-means clusters per slice of 8 channels, learned on the prompt's keys only;
* ``relearned``: the same, learned on all keys at every checkpoint: what ``learned`` loses to it, it loses to drift.

Candidates of the learned clusters are ranked by the estimate from rotated keys. "fixed" shares are those that ParisKV uses
for long zones; "schedule" is its schedule by the zone's length, which changes within the text.
"""

from __future__ import annotations

import argparse
import dataclasses
import pathlib
import random
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from tqdm import tqdm

import kvjax
from experiments.answering.cell import LoadedModel, load_model
from experiments.demo import report as demo_report
from experiments.drift import search as drift_search
from experiments.records import record
from experiments.tasks.haystack import load_haystack
from kvjax.methods.pariskv.method import SCHEDULE, hashing

ARMS = ("rotated", "plain", "learned", "relearned")


@dataclasses.dataclass(frozen=True)
class Settings:
    """What to run; see `python -m experiments.drift --help`.

    Raises:
        ValueError: a number out of range, or a first checkpoint whose zone is smaller than k.
    """

    prompt_tokens: int = 2048
    new_tokens: int = 8000
    every: int = 500
    k: int = 100
    num_sink: int = 64
    num_local: int = 256
    rho: float = 0.20
    beta: float = 0.10
    temperature: float = 1.0
    seed: int = 0
    haystack: str = "prose"

    def __post_init__(self) -> None:
        for name in ("prompt_tokens", "new_tokens", "every", "k", "num_sink", "num_local"):
            if (value := vars(self)[name]) < 1:
                raise ValueError(f"{name} must be at least 1, got {value}")
        if not 0 < self.beta <= self.rho <= 1:
            raise ValueError(f"shares must be 0 < beta <= rho <= 1, got beta={self.beta} and rho={self.rho}")
        zone = self.prompt_tokens + min(self.every, self.new_tokens) - self.num_sink - self.num_local
        if zone < self.k:
            raise ValueError(f"the zone at the first checkpoint must hold at least k={self.k} tokens, got {zone}")

    @property
    def checkpoints(self) -> list[int]:
        """Generated tokens at which to look."""
        return list(range(self.every, self.new_tokens + 1, self.every)) or [self.new_tokens]


def make_text(model: LoadedModel, settings: Settings) -> np.ndarray:
    """Prompt and sampled continuation: int32 [prompt_tokens + new_tokens]."""

    def count(text: str) -> int:
        return len(model.tokenizer.encode(text, add_special_tokens=False).ids)

    haystack = load_haystack(settings.haystack, count, "eval")
    # Twice as much as needed: tokens of joined sentences are not exactly the sum of theirs.
    sentences = haystack.span(random.Random(settings.seed), 2 * settings.prompt_tokens)
    ids = model.tokenizer.encode(haystack.separator.join(sentences)).ids[: settings.prompt_tokens]
    cache = kvjax.prefill(model.params, [ids], config=model.config, max_new_tokens=settings.new_tokens)
    out = kvjax.generate(
        model.params,
        cache,
        max_new_tokens=settings.new_tokens,
        eos_token_ids=(),
        temperature=settings.temperature,
        key=jax.random.key(settings.seed),
    )
    return np.concatenate([np.asarray(ids, np.int32), np.asarray(out.tokens[0])])


def scheduled(zone: int) -> tuple[float, float]:
    """ParisKV's rho and beta for a zone of so many tokens."""
    return next((rho, beta) for end, rho, beta in SCHEDULE if end is None or zone < end)


def measure(model: LoadedModel, tokens: np.ndarray, settings: Settings) -> list[dict[str, Any]]:
    """Recall at every checkpoint, of every arm, under both kinds of shares."""
    stored = [settings.prompt_tokens + made for made in settings.checkpoints]
    at = jnp.asarray([count - 1 for count in stored], jnp.int32)
    queries, keys = drift_search.capture(model.params, jnp.asarray(tokens), at, config=model.config)
    rotated, rotated_codes, rotated_queries = drift_search.sign_clusters(keys, queries, rotated=True)
    plain, plain_codes, plain_queries = drift_search.sign_clusters(keys, queries, rotated=False)
    learned = drift_search.learned_clusters(keys, queries, jnp.int32(settings.prompt_tokens))
    scale = jnp.float32(hashing.rotation_scale(model.config.head_dim))
    sizes = {"k": settings.k, "num_sink": settings.num_sink, "num_local": settings.num_local}
    metrics = []
    for index, (made, count) in enumerate(zip(tqdm(settings.checkpoints, unit="checkpoint"), stored, strict=True)):
        there, which = jnp.int32(count), jnp.int32(index)
        best = drift_search.exact_best(keys, queries[:, :, index], there, **sizes)
        fresh = drift_search.learned_clusters(keys, queries, there)
        analytic = (rotated_codes, rotated_queries[:, :, index], scale)
        arms = {
            "rotated": (rotated, *analytic),
            "plain": (plain, plain_codes, plain_queries[:, :, index], jnp.float32(1)),
            "learned": (learned, *analytic),
            "relearned": (fresh, *analytic),
        }
        zone = count - settings.num_sink - settings.num_local
        written = float(np.asarray(best)[:, :, settings.prompt_tokens :].sum() / np.asarray(best).sum())
        for kind, (rho, beta) in (("fixed", (settings.rho, settings.beta)), ("schedule", scheduled(zone))):
            for name in ARMS:
                found = drift_search.recall(
                    *arms[name], best, there, which, jnp.float32(rho), jnp.float32(beta), **sizes
                )
                for stage, values in zip(("coarse", "final"), jax.device_get(found), strict=True):
                    metrics.append(
                        {
                            "name": f"{stage}_recall",
                            "value": round(100 * float(values.mean()), 2),
                            "unit": "percent",
                            "clusters": name,
                            "shares": kind,
                            "rho": rho,
                            "beta": beta,
                            "generated": made,
                            "zone": zone,
                            "by_layer": [round(100 * float(value), 1) for value in values.mean(axis=1)],
                            "best_among_generated": round(100 * written, 1),
                        }
                    )
    return metrics


def draw(result: dict[str, Any]) -> bytes:
    """The record as a figure, a PNG file's bytes."""
    import io

    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    settings = result["settings"]
    figure = Figure(figsize=(11, 4.2), dpi=140, layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, stage, title in zip(
        panels, ("coarse", "final"), ("among the candidates", f"among the final {settings['k']}"), strict=True
    ):
        for index, name in enumerate(ARMS):
            for kind, line in (("fixed", "-"), ("schedule", ":")):
                mine = [
                    m
                    for m in result["metrics"]
                    if (m["name"], m["clusters"], m["shares"]) == (f"{stage}_recall", name, kind)
                ]
                panel.plot(
                    [m["generated"] for m in mine],
                    [m["value"] for m in mine],
                    line,
                    color=demo_report.COLORS[index],
                    label=f"{name}, {kind}",
                )
        panel.set_title(f"top {settings['k']} of q.k found {title}, %", fontsize=11)
        panel.set_xlabel(f"tokens generated after a prompt of {settings['prompt_tokens']}")
        panel.set_ylim(0, 103)
        panel.spines[["top", "right"]].set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    figure.suptitle(f"{settings['model']} model, mean over layers and KV heads, one text", fontsize=11)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    return buffer.getvalue()


def table(result: dict[str, Any]) -> str:
    """Coarse and final recall under fixed shares, as text."""
    found = {(m["name"], m["clusters"], m["generated"]): m for m in result["metrics"] if m["shares"] == "fixed"}
    lines = ["generated  zone  " + "  ".join(f"{name:>15s}" for name in ARMS)]
    for made in sorted({m["generated"] for m in found.values()}):
        values = [[found[f"{stage}_recall", name, made]["value"] for stage in ("coarse", "final")] for name in ARMS]
        zone = found["coarse_recall", ARMS[0], made]["zone"]
        lines.append(f"{made:9d}{zone:6d}  " + "  ".join(f"{coarse:7.1f} {final:7.1f}" for coarse, final in values))
    return "\n".join([*lines, "coarse and final recall in percent, fixed shares"])


def run(settings: Settings, model: LoadedModel, out: pathlib.Path, plot: bool = True) -> dict[str, Any]:
    """Runs everything and writes OUT.json and, if `plot`, OUT.png.

    Raises:
        ValueError: the text would be longer than the model's position limit.
        ModuleNotFoundError: a figure is wanted and matplotlib is not installed.
    """
    if plot:
        demo_report.check_installed()
    begun = time.monotonic()
    tokens = make_text(model, settings)
    tqdm.write(f"{time.monotonic() - begun:7.1f} s  {settings.new_tokens} tokens sampled")
    metrics = measure(model, tokens, settings)
    described = {**dataclasses.asdict(settings), "model": model.name, "dtype": model.config.dtype}
    result = {
        **record.make_record("drift", described, metrics),
        "wall_seconds": round(time.monotonic() - begun, 1),
        "text_ends": model.tokenizer.decode(tokens[-100:].tolist()),
    }
    image = draw(result) if plot else None  # before any file exists, so that errors leave none
    record.write_record(out.with_suffix(".json"), result)
    if image is not None:
        record.write_bytes(out.with_suffix(".png"), image)
    return result


def main() -> None:
    """Command line."""
    defaults = Settings()
    parser = argparse.ArgumentParser(description="Recall of cluster votes over a long generation.")
    parser.add_argument("--model", default="builtin", help="Hugging Face directory, or 'builtin'")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), help="compute dtype")
    parser.add_argument("--prompt-tokens", type=int, default=defaults.prompt_tokens, help="tokens of prose")
    parser.add_argument("--new-tokens", type=int, default=defaults.new_tokens, help="tokens sampled")
    parser.add_argument("--every", type=int, default=defaults.every, help="tokens between checkpoints")
    parser.add_argument("--k", type=int, default=defaults.k, help="keys to find")
    parser.add_argument("--num-sink", type=int, default=defaults.num_sink, help="tokens before the zone")
    parser.add_argument("--num-local", type=int, default=defaults.num_local, help="tokens behind the zone")
    parser.add_argument("--rho", type=float, default=defaults.rho, help="share of keys that get votes, per slice")
    parser.add_argument("--beta", type=float, default=defaults.beta, help="share of the zone that becomes candidates")
    parser.add_argument("--temperature", type=float, default=defaults.temperature)
    parser.add_argument("--seed", type=int, default=defaults.seed)
    parser.add_argument("--haystack", default=defaults.haystack, help="'prose' or file:PATH")
    parser.add_argument("--no-plot", action="store_true", help="write no PNG (needs no matplotlib)")
    parser.add_argument(
        "--out", type=pathlib.Path, default=pathlib.Path("docs/records/drift"), help="OUT.json and OUT.png are written"
    )
    arguments = vars(parser.parse_args())
    names = [field.name for field in dataclasses.fields(Settings)]
    settings = Settings(**{name: arguments[name] for name in names})
    model = load_model(arguments["model"], arguments["dtype"])
    result = run(settings, model, arguments["out"], plot=not arguments["no_plot"])
    print(table(result))


if __name__ == "__main__":
    main()
