"""Qwen 3 of the JAX models "Bonsai" (jax-ml/bonsai) under kvjax: its own module and parameters."""

from typing import Any

import jax

from .nnx import NNXModel


def _project(module: Any, x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    return module.q_norm(module.q_proj(x)), module.k_norm(module.k_proj(x)), module.v_proj(x)


def _output(module: Any, attended: jax.Array) -> jax.Array:
    return module.o_proj(attended)


def _run(module: Any, tokens: jax.Array, position: jax.Array) -> jax.Array:
    return module(tokens, cache=(None,) * module.config.num_layers, segment_ids=None)  # read by attention alone


def qwen3(module: Any, **fields: Any) -> tuple[NNXModel, Any]:
    """Split a ``bonsai.models.qwen3.modeling.Qwen3`` into a `kvjax.protocol.typing.Model` and its parameters.

    Args:
        module: the model, as ``Qwen3.from_pretrained`` returns it.
        **fields: fields of `NNXModel` that differ; ``eos_token_ids`` are those of Qwen 3's chat models.
    """
    config, attention = module.config, type(module.layers[0].attn)
    known = {
        "vocab_size": config.vocab_size, "max_position_embeddings": 40_960, "eos_token_ids": (151_645, 151_643),
        "rope_theta": 1e6,  # the module rotates by this base, whatever its config says
        "head": "final_norm", "run": _run, "project": _project, "output": _output,
    }  # fmt: skip
    return NNXModel.of(module, attention=attention, **{**known, **fields})
