"""How far rollouts under a method are from Full's policy: `python -m experiments.lab.rollouts`.

Reinforcement learning samples answers with a fast policy and trains a dense one. Each method continues the same contexts by
sampling at temperature 1; Full then scores every sampled token after the same tokens (`kvjax.score`). Of the log-ratios
``d = log p_Full - log p_method`` of the sampled tokens a row has the mean of -d, which estimates KL(method || Full); their
tail; and what becomes of importance weights exp(d), token by token and of whole answers. Full's own row is the floor: what
the same arithmetic in two programs leaves.
"""

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax import Array
from jsonargparse.typing import PositiveInt
from tqdm import tqdm

import kvjax
from experiments.answering import Choice, ModelSettings, at_budgets, budgets_of, choices_of, written
from experiments.cli import Job, option, record_path
from experiments.evaluation import CompileAhead
from experiments.lab.fidelity.settings import FidelitySettings
from experiments.lab.fidelity.texts import passages
from experiments.records import Results, method_title
from experiments.records.report import row_table
from experiments.speed.settings import Output
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model

TEN = ("streamingllm", "h2o", "tova", "keydiff", "rkv", "triattention", "snapkv", "quest", "pariskv", "tokenselect")
_COLUMNS: Mapping[str, Any] = {
    "method": lambda row: method_title(row["method"]),
    "mean, nats": ("value", 1, ".2e"),
    "99 % of tokens within": ("tail", 1, ".2e"),
    "farthest token": ("farthest", 1, ".2e"),
    "tokens of weight outside [1/2, 2]": ("outside", 1, ".2f"),
    "effective share of tokens": ("effective_tokens", 1, ".3f"),
    "of answers": ("effective_answers", 1, ".3f"),
    "read": ("bytes_read_per_step", 1e-6, ".2f"),
}


def rollout_table(rows: Sequence[Mapping[str, Any]], notes: Mapping[str, Any]) -> str:
    """Format the rows of a record as a Markdown table; nats, percent, shares, and MB that a step reads."""
    return "\n".join(row_table(rows, _COLUMNS))


@dataclasses.dataclass(frozen=True, kw_only=True)
class RolloutSettings(ModelSettings):
    """What is sampled.

    Attributes:
        methods: comma-separated names, or {name: knobs} in a YAML file (default: ten)
        budgets: comma-separated shares of the length or tokens, for methods whose budget is not set
        length: tokens of context and answer together
        tokens: most tokens of an answer
        samples: answers of each method, which run as one batch
        haystack: prose, prose:whole, code or file:PATH, the text whose passages are the contexts
        seed: seed of the contexts and of the draws
    """

    methods: tuple[Choice, ...] = option(tuple(Choice(name, {}) for name in TEN), read=choices_of, write=written)
    budgets: tuple[str, ...] = option(("1/8",), read=budgets_of)
    length: PositiveInt = 1024
    tokens: PositiveInt = 64
    samples: PositiveInt = 4
    haystack: str = "prose"
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class RolloutOutput(Output):
    """Where `experiments.lab.rollouts` writes."""

    out: pathlib.Path = option(pathlib.Path("runs/rollouts.json"), read=record_path)


@functools.partial(jax.jit, static_argnames=("model", "tokens"))
def rollout(params: Any, method: Method, prompts: Array, lengths: Array, key: Array, *, model: Model, tokens: int) -> tuple:
    """Sample an answer to each prompt int32 [B, T]: tokens int32 [B, N], their number [B], log-probabilities, the cost."""
    cache = kvjax.prefill(params, prompts, config=model, lengths=lengths, method=method, max_new_tokens=tokens)
    out = kvjax.generate(params, cache, max_new_tokens=tokens, temperature=1.0, key=key, logprobs=True)
    return out.tokens, out.num_tokens, out.logprobs.sampled, out.stats


@functools.partial(jax.jit, static_argnames="model")
def dense(params: Any, prompts: Array, lengths: Array, tokens: Array, counts: Array, *, model: Model) -> Array:
    """Score answers under Full: float32 [B, N]."""
    cache = kvjax.prefill(params, prompts, config=model, lengths=lengths, method="full", max_new_tokens=tokens.shape[1])
    return kvjax.score(params, cache, tokens, lengths=counts)


def mismatch(sampled: np.ndarray, scored: np.ndarray, counts: np.ndarray) -> dict[str, float]:
    """Summarise log-probabilities float [B, N] of the first ``counts`` int [B] tokens of each row.

    An effective share is (sum w)^2 / (n sum w^2) of n weights w: 1 where all are equal, 1/n where one outweighs the rest.
    """
    real = np.arange(sampled.shape[1])[None] < counts[:, None]
    ratio = np.where(real, np.asarray(scored, np.float64) - sampled, 0)
    each, answers = ratio[real], ratio.sum(axis=1)

    def effective(logs: np.ndarray) -> float:
        weight = np.exp(logs - logs.max())
        return float(weight.sum() ** 2 / (len(weight) * (weight**2).sum()))

    found = {
        "value": 0.0 - each.mean(),
        "tail": np.quantile(np.abs(each), 0.99),
        "farthest": np.abs(each).max(),
        "outside": 100 * (np.abs(each) > np.log(2)).mean(),
        "mean_weight": np.exp(each).mean(),
        "effective_tokens": effective(each),
        "effective_answers": effective(answers),
    }
    return {name: float(f"{value:.4g}") for name, value in found.items()} | {"tokens": int(counts.sum())}


def _measure(settings: RolloutSettings, output: RolloutOutput) -> None:
    model = settings.load()
    options = {name: vars(settings)[name] for name in ("samples", "tokens", "seed")}
    texts = passages(model, FidelitySettings(**options, lengths=(settings.length,)), settings.length, settings.haystack)
    prompts, lengths, key = texts.prompts, texts.lengths, jax.random.key(settings.seed)
    sizes = {"model": model.config, "tokens": settings.tokens}
    about = options | {"model": model.name, "dtype": model.dtypes, "haystack": settings.haystack, "length": settings.length}
    results = Results(output.out, "rollouts", about)
    choices = [x for x in at_budgets(settings.methods, settings.budgets) if not results.find({"method": x.label})]
    arrays = {
        x.label: (model.params, x.at(settings.length, model.tokenizer, model.config).method, prompts, lengths, key)
        for x in choices
    }
    with CompileAhead() as ahead, tqdm(arrays.items(), unit="method") as bar:
        for label, given in arrays.items() if ahead.spare else ():
            ahead.add(label, lambda given=given: [rollout.lower(*given, **sizes)])
        for label, given in bar:
            bar.set_description(label)
            if ahead.spare:
                ahead.wait(label)
            made, counts, sampled, stats = jax.device_get(rollout(*given, **sizes))
            scored = jax.device_get(dense(model.params, prompts, lengths, made, counts, model=model.config))
            read = float(stats.bytes_read.mean())
            row = {"name": "mismatch", "unit": "nats", **mismatch(sampled, scored, counts), "bytes_read_per_step": read}
            results.add({"method": label, **row}, {"method": label})
    print(rollout_table(results.metrics, results.notes))
    print(f"written: {output.out}", file=sys.stderr)


main = Job(_measure, RolloutSettings, RolloutOutput, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
