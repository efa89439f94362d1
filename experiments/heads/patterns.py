"""Which sparse pattern suits which query head? `python -m experiments.heads.patterns`, for `Prefill`.

The model prefills prompts of a task densely. A candidate pattern lets each query see some keys. The attention that the
candidate keeps in a query head is the probability of these keys, as a mean over all queries. The candidate that keeps most,
as a mean over the prompts, becomes the head's pattern. `kvjax.wrappers.patterns` and microsoft/MInference read the file.

The candidates come from search_pattern in microsoft/MInference fb56c91 and cost about the same work; their sizes are
multiplied by ``scale``. "block_sparse" has here as many blocks as the A-shape needs for its tokens. Prompts should have
several times the tokens of a candidate.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.cli import Job, option, output_file
from experiments.heads.monitor import MonitorLayer
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows, write_bytes
from kvjax.attention.patterns import FILE, IN_FILES, Table
from kvjax.methods import Full
from kvjax.protocol.method import Inputs, LayerSpec
from kvjax.protocol.typing import method_layers, pytree, static
from kvjax.wrappers import Pattern, Prefill
from kvjax.wrappers.compose import answers
from models.hub.progress import progress_bar
from pallas_kernels.attend.prefix_attention import prefix_attention

_COLUMNS_AND_DIAGONALS = ((30, 800), (100, 750), (500, 700), (3500, 100))


@dataclasses.dataclass(frozen=True)
class PatternSettings(PromptSettings):
    """The settings of `experiments.heads.patterns`.

    Attributes:
        scale: factor of the sizes of all candidates
        out: the file of patterns; `kvjax.wrappers.patterns` also finds a patterns.json in a model's folder
    """

    scale: float = 1.0
    out: pathlib.Path = option(pathlib.Path("runs") / FILE, read=output_file)

    def __post_init__(self) -> None:
        PromptSettings.__post_init__(self)
        if not (math.isfinite(self.scale) and self.scale > 0):
            raise ValueError(f"scale must be a finite number above 0, got {self.scale}")


def candidates(scale: float = 1.0, block: int = 64) -> tuple[Pattern, ...]:
    """List the patterns that a head can get; ``block`` is the number of tokens of a block."""

    def sized(number: int) -> int:
        return max(1, round(number * scale))

    columns, diagonals = sized(100), sized(800)
    each = [Pattern("a_shape", columns, diagonals)]
    each += [Pattern("vertical_slash", sized(v), sized(s)) for v, s in _COLUMNS_AND_DIAGONALS]
    return (*each, Pattern("block_sparse", blocks=-(-(columns + diagonals) // block)))


@pytree
class Kept:
    """The state of a layer that is measured."""

    inner: Any  # the state of `Measuring.inner`
    share: Array  # float32 [B, H, G, C], attention that each of C candidates keeps


@answers("inner")
@pytree
class Measuring(MonitorLayer):
    """Full attention that measures how much attention each candidate keeps. A prompt is prefilled in one chunk."""

    patterns: Any = static("the candidates")
    knobs: Any = static("pairs of a knob of `kvjax.wrappers.Prefill` and its value", default=())

    def init(self, spec: LayerSpec) -> Kept:
        shape = (spec.batch, spec.num_kv_heads, spec.group_size, len(self.patterns))
        return Kept(inner=self.inner.init(spec), share=jnp.zeros(shape, jnp.float32))

    def attend(self, state: Kept, inputs: Inputs) -> tuple[Array, Kept]:
        out, inner = self.inner.attend(state.inner, inputs)
        share = state.share
        if isinstance(inputs.start, int):
            query, key = inputs.rotated()
            share = self.kept(query, key, inputs.value, jnp.sum(inputs.position >= 0, axis=1, dtype=jnp.int32))
        return out, Kept(inner=inner, share=share)

    def kept(self, query: Array, key: Array, value: Array, length: Array) -> Array:
        """Measure the mean attention that each candidate keeps: float32 [B, H, G, C].

        The probability of a candidate's keys is the candidate's softmax denominator over the denominator of all keys.
        ``query`` [B, H, G, T, D] and ``key`` [B, H, T, D] are rotated and of a whole prompt; ``length``, int32 [B], are its
        real tokens.
        """
        scale = 1 / math.sqrt(query.shape[-1])
        _, whole = prefix_attention(query, key, value, start=0, length=length, scale=scale)
        each = []
        for pattern in self.patterns:
            prompt = Prefill(method=Full(), pattern=pattern, **dict(self.knobs)).sparse_prompt
            _, kept = prompt.attend(query, key, value, 0, length)
            real = jnp.isfinite(whole)
            share = jnp.where(real, jnp.exp(jnp.where(real, kept, 0) - jnp.where(real, whole, 0)), 0)
            each.append(share.sum(axis=3) / length.astype(jnp.float32)[:, None, None])
        return jnp.stack(each, axis=3)


def shares(params: Any, prompts: Sequence[Sequence[int]], config: Any, method: Measuring, length: int) -> np.ndarray:
    """Measure the attention that each candidate keeps in each query head, float64 [L, H * G, C]: the mean over the prompts.

    Each prompt runs alone, padded to ``length`` tokens. Models with sliding windows or layers without attention are refused.
    """
    if len(method_layers(config)) < config.num_layers:
        raise ValueError("expected a model whose layers all attend in full, got one with sliding windows or linear layers")
    each = []
    for tokens in progress_bar(iterable=prompts, unit="prompt"):
        sizes: Any = {"max_new_tokens": 1, "pad_multiple": length, "chunk_size": 2 * length}
        cache = kvjax.prefill(params, [tokens], config=config, method=method, **sizes)
        each.append([np.asarray(x.share[0]).reshape(-1, len(method.patterns)) for x in cache.layers])
    return np.mean(np.asarray(each, np.float64), axis=0)


def best(kept: np.ndarray, patterns: Sequence[Pattern]) -> tuple[Table, list[list[float]]]:
    """Choose for each head the first pattern that keeps most attention; return the patterns, and the attention they keep."""
    chosen = kept.argmax(axis=2)
    table = tuple(tuple(patterns[at] for at in row) for row in chosen.tolist())
    return table, kept.max(axis=2).tolist()


def to_file(table: Table, scores: list[list[float]]) -> str:
    """Write patterns of the kinds that such files can have, and their scores, as `kvjax.wrappers.patterns` loads them."""
    names = {kind: name for name, kind in IN_FILES.items()}

    def entry(pattern: Pattern, score: float) -> list[Any]:
        numbers = (pattern.blocks, 1) if pattern.kind == "block_sparse" else (pattern.columns, pattern.diagonals)
        return [names[pattern.kind], *numbers, score]

    layers = [
        {str(head): entry(*pair) for head, pair in enumerate(zip(row, own, strict=True))}
        for row, own in zip(table, scores, strict=True)
    ]
    return json.dumps(layers)


def _patterns(settings: PatternSettings) -> None:
    file, model = settings.out, settings.load()
    known = candidates(settings.scale)
    prompts = encode_prompts(model, settings).wholes
    kept = shares(model.params, prompts, model.config, Measuring(inner=Full(), patterns=known), settings.length)
    table, scores = best(kept, known)
    write_bytes(file, (to_file(table, scores) + "\n").encode())
    heads = [pattern for row in table for pattern in row]
    rows = []
    for at, pattern in enumerate(known):
        sizes = f"{pattern.blocks}" if pattern.kind == "block_sparse" else f"{pattern.columns} + {pattern.diagonals}"
        rows.append((pattern.kind, sizes, f"{kept[..., at].mean():.4f}", str(heads.count(pattern))))
    print("\n".join(markdown_rows([("pattern", "size", "attention kept", "heads"), *rows])))
    print(f"\n{file}: {len(heads)} heads, {len(prompts)} samples")


main = Job(_patterns, PatternSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
