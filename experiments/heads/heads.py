"""Which heads find what an answer needs? `python -m experiments.heads.heads --out runs/heads.json`, for `HeadKV`.

The model answers needle prompts under Full. While it decodes an answer, each query head is measured as in FYYFU/HeadKV's
retrieval_head_detection_r2.py. With p the attention of a step to the prompt, and S the tokens of the sentence that holds the
answer, a sample's score of a head is::

    sum over steps of ( sum of p[i] over i in S that are among the |S| largest of p ) / ( |S| * answer tokens )

The first step feeds the prompt's last token, and there are as many steps as tokens in a space and the answer. A sample counts
if its answer scores at least one half. The file has ``{"LAYER-HEAD": [a score of each such sample]}``, which
`kvjax.head_scores` reads. The paper's needles need a step of reasoning; here any task of `kvjax ls tasks` will do whose
answers stand in the text.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from tokenizers import Tokenizer

import kvjax
from experiments.answering import LoadedModel
from experiments.benchmarks import Example, score
from experiments.cli import Job, option, output_file
from experiments.heads.monitor import MonitorLayer
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import write_bytes
from kvjax.methods import Full
from kvjax.protocol.method import Inputs, LayerSpec
from kvjax.protocol.typing import method_layers, pytree
from kvjax.rope import rotate
from kvjax.wrappers.compose import answers
from models.hub.progress import progress_bar
from pallas_kernels.soft_cap import capped

_ENDS = ("\n", ". ", "! ", "? ")  # ends of sentences


@dataclasses.dataclass(frozen=True)
class HeadSettings(PromptSettings):
    """The settings of `experiments.heads.heads`.

    Attributes:
        out: the file of scores
    """

    out: pathlib.Path = option(pathlib.Path("runs/heads.json"), read=output_file)


@pytree
class Found:
    """The state of a layer whose heads are measured."""

    inner: Any  # the state of `Finding.inner`
    score: Array  # float32 [B, H, G], attention to the sentence, summed over steps


@answers("inner")
@pytree
class Finding(MonitorLayer):
    """Full attention that sums the attention of each query head to the tokens from ``first`` to ``last``."""

    first: Array  # int32 scalar, position of the sentence's first token
    last: Array  # int32 scalar, position of the sentence's last token

    def init(self, spec: LayerSpec) -> Found:
        score = jnp.zeros((spec.batch, spec.num_kv_heads, spec.group_size), jnp.float32)
        return Found(inner=self.inner.init(spec), score=score)

    def attend(self, state: Found, inputs: Inputs) -> tuple[Array, Found]:
        out, inner = self.inner.attend(state.inner, inputs)
        score = state.score
        if inputs.start is None:  # a decode step
            query = rotate(inputs.query, inputs.position[:, None, None], inputs.inv_freq)[..., 0, :]
            shares = on_sentence(query, inner.cache.key, inner.cache.position, self.first, self.last)
            score = score + jnp.where((inputs.position >= 0)[..., None], shares, 0)
        return out, Found(inner=inner, score=score)


def on_sentence(query: Array, key: Array, position: Array, first: Array, last: Array) -> Array:
    """Sum the attention to a sentence's n tokens that are among the n tokens with most attention: float32 [B, H, G].

    ``query`` [B, H, G, D] and ``key`` [B, H, S, D] are rotated; ``position``, int32 [B, H, S], is EMPTY without a token;
    ``first`` and ``last``, int32 scalars, are the positions of the sentence's ends.
    """
    exact = lax.Precision.HIGHEST
    logits = jnp.einsum("bhgd,bhsd->bhgs", query.astype(jnp.float32), key.astype(jnp.float32), precision=exact)
    valid, inside = (position >= 0)[:, :, None], ((position >= first) & (position <= last))[:, :, None]
    logits = jnp.where(valid, capped(logits / math.sqrt(query.shape[-1])), -jnp.inf)
    least = jnp.take(jnp.sort(logits, axis=3, descending=True), last - first, axis=3)
    best = inside & (logits >= least[..., None])
    return jnp.where(best, jax.nn.softmax(logits, axis=3), 0).sum(axis=3)


def sentence_of(example: Example) -> tuple[int, int]:
    """Find the sentence with the first answer in the context, in characters; an answer that is not there is refused."""
    text, answer = example.context, example.answers[0]
    at = text.find(answer)
    if at < 0:
        raise ValueError(f"the answers of a task must stand in its text, got {answer!r:.40} of {example.task}")
    before = [end_at + len(end) for end in _ENDS if (end_at := text.rfind(end, 0, at)) >= 0]
    behind = [end_at + 1 for end in _ENDS if (end_at := text.find(end, at + len(answer))) >= 0]
    return max(before, default=0), min(behind, default=len(text))


def measured(model: LoadedModel, settings: HeadSettings) -> dict[str, list[float]]:
    """Measure the scores of each query head on each sample that counts, by ``LAYER-HEAD``.

    Raises:
        ValueError: a layer has a sliding window or no attention, or the model answers no sample.
    """
    if len(method_layers(model.config)) < model.config.num_layers:
        raise ValueError("expected a model whose layers all attend in full, got one with sliding windows or linear layers")
    prompts, tokenizer = encode_prompts(model, settings), Tokenizer.from_buffer(model.tokenizer_file.read_bytes())
    scores: dict[str, list[float]] = {}
    for example, tokens in progress_bar(iterable=list(zip(prompts.examples, prompts.wholes, strict=True)), unit="prompt"):
        begin, end = sentence_of(example)
        offsets = tokenizer.encode(example.prompt, add_special_tokens=True).offsets
        inside = [at for at, (low, high) in enumerate(offsets) if low < end and high > begin]
        steps = len(tokenizer.encode(f" {example.answers[0]}", add_special_tokens=False).ids)
        answer, shares = answered(model, tokens, inside[0], inside[-1], steps, settings.length)
        if score(example, model.tokenizer.decode(answer)) < 0.5:
            continue
        for layer, head in np.ndindex(*shares.shape):
            scores.setdefault(f"{layer}-{head}", []).append(float(shares[layer, head]) / (len(inside) * steps))
    if not scores:
        raise ValueError(f"heads are measured on right answers, got none from {model.name} in {settings.samples} samples")
    return scores


def answered(
    model: LoadedModel, tokens: Sequence[int], first: int, last: int, steps: int, length: int
) -> tuple[list[int], np.ndarray]:
    """Generate an answer of ``steps`` tokens, and sum each query head's attention to a sentence, float32 [L, H * G].

    ``first`` and ``last`` are positions of the sentence's ends; prompts are padded to ``length`` tokens.
    """
    method, room = Finding(inner=Full(), first=jnp.int32(first), last=jnp.int32(last)), 64
    cache = kvjax.prefill(
        model.params, [tokens[:-1]], config=model.config, method=method, max_new_tokens=room, pad_multiple=length
    )
    token, answer = int(tokens[-1]), []
    for _ in range(min(steps, room)):
        cache = kvjax.decode_step(model.params, cache, np.asarray([token], np.int32))
        token = int(jnp.argmax(cache.logits[0]))
        answer.append(token)
    return answer, np.stack([np.asarray(layer.score[0]).reshape(-1) for layer in cache.layers])


def _heads(settings: HeadSettings) -> None:
    model = settings.load()
    scores = measured(model, settings)
    write_bytes(settings.out, (json.dumps(scores) + "\n").encode())
    print(f"{settings.out}: {len(scores)} heads, {len(scores['0-0'])} of {settings.samples} samples")


main = Job(_heads, HeadSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
