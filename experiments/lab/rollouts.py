"""How far rollouts under a method are from Full's policy: `python -m experiments.lab.rollouts`.

Reinforcement learning samples answers with a fast policy and trains a dense one. Each method continues the same contexts by
sampling at temperature 1; Full then scores every sampled token after the same tokens (`kvjax.score`). Of the log-ratios
``d = log p_Full - log p_method`` of the sampled tokens a row has the mean of -d, which estimates KL(method || Full); their
tail; and what becomes of importance weights exp(d), token by token and of whole answers. Full's own row is the floor: what
the same arithmetic in two programs leaves.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import sys
from collections.abc import Mapping
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
from experiments.records import Results, knobs_of, method_title
from experiments.records.report import row_table
from experiments.speed.settings import Output
from kvjax.protocol.method import Method
from kvjax.protocol.typing import Model

TEN = ("streamingllm", "h2o", "tova", "keydiff", "rkv", "triattention", "snapkv", "quest", "pariskv", "tokenselect")
_COLUMNS: Mapping[str, Any] = {
    "method": lambda row: method_title(row["method"]),
    "mean, nats": ("value", 1, ".2e"),
    "99 % of tokens within": ("tail_99", 1, ".2e"),
    "largest": ("largest", 1, ".2e"),
    "weight outside [1/2, 2]": ("outside", 100, ".2f"),
    "effective share, tokens": ("token_ess", 1, ".3f"),
    "effective share, answers": ("answer_ess", 1, ".3f"),
    "read, MB": ("bytes_read_per_step", 1e-6, ".2f"),
}


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

    return {
        "value": float(-each.mean()),
        "tail_99": float(np.quantile(np.abs(each), 0.99)),
        "largest": float(np.abs(each).max()),
        "outside": float((np.abs(each) > np.log(2)).mean()),
        "mean_weight": float(np.exp(each).mean()),
        "token_ess": effective(each),
        "answer_ess": effective(answers),
        "tokens": int(counts.sum()),
    }


def _measure(settings: RolloutSettings, output: RolloutOutput) -> None:
    model = settings.load()
    options = {name: vars(settings)[name] for name in ("samples", "tokens", "seed")}
    texts = passages(model, FidelitySettings(**options, lengths=(settings.length,)), settings.length, settings.haystack)
    prompts, lengths, key = texts.prompts, texts.lengths, jax.random.key(settings.seed)
    sizes = {"model": model.config, "tokens": settings.tokens}
    about = options | {"model": model.name, "dtype": model.dtypes, "haystack": settings.haystack, "length": settings.length}
    results = Results(output.out, "rollouts", about)
    named = [
        (x, x.at(settings.length, model.tokenizer, model.config).method)
        for x in at_budgets(settings.methods, settings.budgets)
    ]
    arrays = {x.label: (model.params, method, prompts, lengths, key) for x, method in named}
    with CompileAhead() as ahead, tqdm(named, unit="method") as bar:
        for label, given in arrays.items() if ahead.spare else ():
            ahead.add(label, lambda given=given: [rollout.lower(*given, **sizes)])
        for choice, method in bar:
            bar.set_description(choice.label)
            if ahead.spare:
                ahead.wait(choice.label)
            made, counts, sampled, stats = jax.device_get(rollout(*arrays[choice.label], **sizes))
            scored = jax.device_get(dense(model.params, prompts, lengths, made, counts, model=model.config))
            read = float(stats.bytes_read.mean())
            row = {"name": "mismatch", "unit": "nats", **mismatch(sampled, scored, counts), "bytes_read_per_step": read}
            row |= {"method": choice.name, "label": choice.label, "knobs": knobs_of(method)}
            results.add(row, {"label": choice.label})
    print("\n".join(row_table(results.metrics, _COLUMNS)))
    print(f"written: {output.out}", file=sys.stderr)


main = Job(_measure, RolloutSettings, RolloutOutput, compiles=True)


if __name__ == "__main__":
    sys.exit(main())
