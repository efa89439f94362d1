"""Runs the cells of an ablation that its record lacks: scores on tasks, and distances from Full along texts."""

from __future__ import annotations

import dataclasses
import functools
import json
import pathlib
import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from tqdm import tqdm

from experiments.answering import LoadedModel, Shape, account, ask, batch_rows
from experiments.benchmarks import Cell, encode_cell, score
from experiments.lab.ablations.arms import DISTANCES, PROSE, WRITTEN_TASK, Arm, Lab, Table
from experiments.lab.ablations.plans import ABLATIONS
from experiments.lab.ablations.settings import AblationSettings
from experiments.lab.fidelity import FidelitySettings, Texts, distance, lead, make_texts, passages, summary
from experiments.records import Results, knobs_of, percent_interval
from kvjax.protocol.method import Method
from kvjax.registry import make
from models.hub.progress import progress_bar

DECODE_TOKENS = 128  # all tasks with shorter answers share a compiled program


@dataclasses.dataclass(frozen=True)
class _Job:
    """A cell to run.

    Attributes:
        table: the title of the cell's table.
        solved: Full's score in percent below which the cell is left out.
        arm: the cell's row.
        task: the cell's column.
        identity: the fields that tell the cell from all others of its record.
    """

    table: str
    solved: float
    arm: Arm
    task: str
    identity: dict[str, Any]

    @property
    def measurement(self) -> str:
        """A key that is equal for cells that need the same run, such as Full in several tables."""
        return json.dumps({name: x for name, x in self.identity.items() if name not in ("table", "arm", "setting")})


def run_ablation(settings: AblationSettings, name: str, model: LoadedModel, base: LoadedModel, out: pathlib.Path) -> None:
    """Run the cells of an ablation that its record lacks.

    Args:
        settings: what to run.
        name: name of the ablation.
        model: the model that does the tasks.
        base: the model whose distance from Full is measured.
        out: the directory of the records.

    Raises:
        ValueError: a length beyond the model's window, or a record of other settings.
    """
    begun = time.monotonic()
    length = settings.length_of(model)
    for one in (model, base):
        one.check_positions("length", length)  # only the ablation extrapolate exceeds the window
    common = {
        "model": model.name, "weights": model.weights, "base": base.name, "base_weights": base.weights,
        "dtype": model.config.dtype, "seed": settings.seed, "length": length,
        "template": settings.template, "question": "in the prompt",
    }  # fmt: skip
    results = Results(out / f"{name}.json", f"ablation {name}", common)
    lab = Lab(settings, model, base, results)
    tables = ABLATIONS[name](lab)
    outline = [{"title": table.title, "text": table.text, "arms": [arm.name for arm in table.arms]} for table in tables]
    results.note("tables", outline)
    bench, known = _Bench(lab), {}
    for job in progress_bar(iterable=_jobs(lab, tables), unit="cell"):
        if results.find(job.identity) is not None or _unsolved(results, job):
            continue
        if job.measurement not in known:
            known[job.measurement] = bench.measure(job)
        metric = {**known[job.measurement], **job.identity}
        results.add(metric, {field: metric[field] for field in ("table", "arm", "name", "length", "model")})
        value = f"{metric['value']:6.1f} %" if metric["unit"] == "percent" else f"{metric['value']:8.4f}"
        tqdm.write(
            f"{time.monotonic() - begun:7.1f} s  {job.arm.name:40s} {job.task:16s} {value}  {metric['seconds']:6.1f} s"
        )


def _jobs(lab: Lab, tables: Sequence[Table]) -> list[_Job]:
    """List all cells of an ablation."""
    jobs, settings = [], lab.settings
    for table, arm, task in ((x, y, z) for x in tables for y in x.arms for z in y.tasks):
        far = task in DISTANCES
        identity = {
            "table": table.title,
            "arm": arm.name,
            "setting": dict(arm.setting),
            "method": type(arm.method).__name__.lower(),
            "knobs": knobs_of(arm.method),
            "name": task,
            "model": (lab.base if far else arm.model).name,
            "length": arm.length,
            "samples": settings.texts if far else arm.samples,
            "seed": settings.seed,
        }
        if far:
            identity["new_tokens"] = settings.text_tokens if task == PROSE else settings.new_tokens
        solved = table.solved if settings.solved is None else settings.solved
        jobs.append(_Job(table.title, solved, arm, task, identity))
    return jobs


def _unsolved(results: Results, job: _Job) -> bool:
    """Tell whether Full scores too low on the task for other rows to say anything; Full's shortest length counts."""
    if job.task in DISTANCES or type(job.arm.method).__name__ == "Full":
        return False
    rows = [m for m in results.metrics if (m["table"], m["name"], m["method"]) == (job.table, job.task, "full")]
    return min(rows, key=lambda m: m["length"])["value"] < job.solved


class _Bench:
    """The prompts and texts that the cells of an ablation share; each is made when it is first needed."""

    def __init__(self, lab: Lab) -> None:
        self._lab = lab
        self._encode = functools.cache(encode_cell)
        self._texts = functools.cache(self._new_texts)
        self._full = functools.lru_cache(1)(self._new_full)  # logits of one stream at a time

    def measure(self, job: _Job) -> dict[str, Any]:
        if job.task not in DISTANCES:
            arm, settings = job.arm, self._lab.settings
            encoded = self._encode(self._lab.reading(arm.model), Cell(job.task, arm.length, arm.samples, settings.seed))
            rows = batch_rows(arm.length, settings.batch_tokens, arm.samples)
            return measure_scores(arm.model, encoded, arm.method, rows)
        metric = measure_distance(self._lab.base, self._texts(job.task), job.arm.method, self._full(job.task))
        return {"name": job.task, "length": job.arm.length, **metric}

    def _new_full(self, name: str) -> Array:
        """Compute Full's logits along the texts, float32 [T, B, V]."""
        return lead(self._lab.base, make("full"), self._texts(name))[0]

    def _new_texts(self, name: str) -> Texts:
        """Cut passages of prose, or let Full write past the end of its answers to a task; the record keeps what it wrote."""
        lab, settings = self._lab, self._lab.settings
        count, steps = settings.texts, settings.new_tokens
        if name == PROSE:
            about = FidelitySettings(lengths=(lab.length,), samples=count, tokens=settings.text_tokens, seed=settings.seed)
            return passages(lab.base, about, lab.length, PROSE)
        shorter = max(lab.length - steps, steps)
        cell = Cell(WRITTEN_TASK, shorter, count, settings.seed)
        prompts = self._encode(lab.reading(lab.base), cell).wholes
        about = f"{lab.base.name}, {cell.title}, {count} samples, {steps} written"
        if lab.results.notes.get("texts", {}).get("about") != about:
            written = write_text(lab.base, prompts, shorter, steps)
            lab.results.note("texts", {"about": about, "ids": [" ".join(map(str, ids)) for ids in written]})
        written = [[int(token) for token in ids.split()] for ids in lab.results.notes["texts"]["ids"]]
        return make_texts(prompts, written, shorter, steps)


def write_text(model: LoadedModel, prompts: Sequence[Sequence[int]], length: int, new_tokens: int) -> list[list[int]]:
    """Generate Full's text after each prompt, past the end of the answer: ``new_tokens`` ids for each prompt."""
    shape = Shape(length, len(prompts), new_tokens)
    asked = ask(model.params, model.config, prompts, "full", shape, eos_token_ids=())
    return [answers[0] for answers in asked.ids]


def measure_scores(model: LoadedModel, encoded: Any, method: Method, rows: int) -> dict[str, Any]:
    """Score one generated cell under a method; the question is part of the prompt.

    All prompts are padded to the cell's length, and all tasks decode up to the same number of tokens, because compiling costs
    more than running.

    Args:
        model: the model.
        encoded: the cell's examples as token ids, see `experiments.benchmarks.encode_cell`.
        method: the method.
        rows: prompts that are generated together.

    Returns:
        A metric for `experiments.records.make_record`.
    """
    cell, examples, config = encoded.cell, encoded.examples, model.config
    limits = [example.max_new_tokens for example in examples]
    shape = Shape(cell.length, rows, max(DECODE_TOKENS, *limits))
    # Answers end at the task's limit, but a batch has room for more tokens, whose positions may lie behind the window.
    if (longest := cell.length + shape.new_tokens) > config.max_position_embeddings and not method.extrapolates:
        config = dataclasses.replace(config, max_position_embeddings=longest)
    asked = ask(model.params, config, encoded.wholes, method, shape, limits=[[limit] for limit in limits])
    answers = [[token for token in ids[0] if token not in config.eos_token_ids] for ids in asked.ids]
    texts = [model.tokenizer.decode(tokens) for tokens in answers]
    scores = [score(example, text) for text, example in zip(texts, examples, strict=True)]
    wrong = [(example, text) for text, example, value in zip(texts, examples, scores, strict=True) if value < 1.0]
    return {
        "name": cell.task,
        "length": cell.length,
        "value": round(100 * float(np.mean(scores)), 2),
        "unit": "percent",
        "interval_95": percent_interval(scores),
        "scores": [round(float(value), 4) for value in scores],
        "samples": len(scores),
        "mean_prompt_tokens": round(float(np.mean([len(tokens) for tokens in encoded.wholes])), 1),
        "rows": rows,
        "seconds": round(asked.run_seconds, 2),
        **account(asked.stats, rows),
        "failures": [{"answers": example.answers, "output": text} for example, text in wrong[:1]],
    }


def measure_distance(model: LoadedModel, texts: Texts, method: Method, full: Array) -> dict[str, Any]:
    """Measure KL(Full || method) per token, in nats, along given texts, which are decoded in one batch.

    Args:
        model: the model.
        texts: contexts and the tokens that follow them.
        method: the method.
        full: Full's logits along the texts, float32 [T, B, V].

    Returns:
        A metric for `experiments.records.make_record`. "scores" are the means of each text.
    """
    begun = time.monotonic()
    logits, stats = lead(model, method, texts)
    apart = summary([(len(texts), jax.device_get(distance(full, logits, jnp.asarray(texts.targets))))], texts.counts)
    return {
        **{name: apart[name] for name in ("value", "interval_95", "perplexity", "full_perplexity")},
        "unit": "nats",
        "scores": apart["by_text"]["kl"],
        "same_top_percent": apart["agreement"],
        "samples": len(texts),
        "new_tokens": texts.steps,
        "rows": len(texts),
        "seconds": round(time.monotonic() - begun, 2),
        **account([(len(texts), jax.device_get(stats))], len(texts)),
    }
