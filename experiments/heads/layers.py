"""How much does attention turn the hidden states of each layer? `python -m experiments.heads.layers`, for `LayerBudgets`.

The model prefills prompts of a task. For each layer the cosine of the residual stream before and after attention is taken at
every token; its mean over all tokens is SqueezeAttention's measure of the layer. `kvjax.wrappers.layer_shares` turns the
means into shares of the budget, which are printed in the form that `kvjax.wrappers.LayerBudgets` takes. In Python::

    similarity = attention_similarity(params, prompts, config)
    method = kvjax.wrappers.LayerBudgets(method=SnapKV(budget=1024), shares=kvjax.wrappers.layer_shares(similarity))
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import kvjax
from experiments.cli import Job
from experiments.heads.prompts import PromptSettings, encode_prompts
from experiments.records import markdown_rows
from kvjax.decoding.prefill import run_prefill
from kvjax.methods import Full
from kvjax.wrappers import layer_shares
from models import ModelConfig
from models.layers.transformer import Block


@dataclasses.dataclass(frozen=True)
class LayerSettings(PromptSettings):
    """The settings of `experiments.heads.layers`.

    Attributes:
        share: share of the budget that the layers get which attention changes least
    """

    share: float = 0.35


def attention_similarity(params: Any, prompts: Sequence[Sequence[int]], config: ModelConfig) -> tuple[float, ...]:
    """Compute the mean cosine of the hidden states before and after each layer's attention, over all tokens of the prompts.

    All prompts are prefilled at once, on one device.
    """
    tokens, lengths = kvjax.pad_tokens(prompts)
    return tuple(np.asarray(_similarity(params, tokens, lengths, config=config), np.float64).tolist())


@functools.partial(jax.jit, static_argnames="config")
def _similarity(params: Any, tokens: Array, lengths: Array, *, config: ModelConfig) -> Array:
    cosines: list[Array] = []
    real = jnp.arange(tokens.shape[1])[None] < lengths[:, None]

    def watch(call: Callable[..., Any], args: tuple, kwargs: dict, context: nn.module.InterceptorContext) -> Any:
        out = call(*args, **kwargs)
        if isinstance(context.module, Block) and context.method_name == "__call__":
            before = args[0] if args[1] is None else args[0] + args[1]  # the layer before has not added its update yet
            one, other = (x.astype(jnp.float32) for x in (before, out[0]))
            norms = jnp.linalg.norm(one, axis=2) * jnp.linalg.norm(other, axis=2)
            cosine = jnp.sum(one * other, axis=2) / jnp.maximum(norms, 1e-8)
            cosines.append(jnp.sum(jnp.where(real, cosine, 0)) / jnp.sum(real, dtype=jnp.float32))
        return out

    with nn.intercept_methods(watch):
        run_prefill(params, tokens, lengths, Full(), model=config, max_new_tokens=1, chunk_size=tokens.size)
    return jnp.stack(cosines)


def _layers(settings: LayerSettings) -> None:
    model = settings.load()
    similarity = attention_similarity(model.params, encode_prompts(model, settings).wholes, model.config)
    shares = layer_shares(similarity, settings.share)
    each = enumerate(zip(similarity, shares, strict=True))
    rows = [(str(layer), f"{cosine:.4f}", f"{share:.4f}") for layer, (cosine, share) in each]
    print("\n".join(markdown_rows([("layer", "cosine", "share"), *rows])))
    print(f"\nshares=({', '.join(f'{share:.6f}' for share in shares)})")


main = Job(_layers, LayerSettings, compiles=True)


if __name__ == "__main__":
    raise SystemExit(main())
