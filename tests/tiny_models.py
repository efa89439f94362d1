"""Tiny configurations of each family, and the plainest way to run one: dense causal attention, no cache."""

import functools
import math
import pathlib
import shutil

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import flatten_dict, unflatten_dict

import models
from kvjax import rope
from kvjax.protocol.typing import layer_recurrence, layer_ropes
from models import ModelConfig, RopeScaling, param_shapes
from models.files import adapter
from pallas_kernels.attend.causal_attention import causal_attention
from pallas_kernels.soft_cap import capped, soft_cap

TINY = {
    "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_layers": 2, "num_q_heads": 4,
    "num_kv_heads": 2, "head_dim": 16, "max_position_embeddings": 128,
}  # fmt: skip
HF = {  # a config.json
    "model_type": "llama", "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48,
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}  # fmt: skip
SCALING = RopeScaling(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_position_embeddings=16)
FAMILIES = {
    "llama": ModelConfig(**TINY),
    "llama3_rope": ModelConfig(**TINY, rope_scaling=SCALING, rope_theta=500.0, tie_word_embeddings=True),
    "qwen2": ModelConfig(**TINY, qkv_bias=True),
    "qwen3": ModelConfig(**TINY, qk_norm=True, eos_token_ids=(3, 5)),
    "qwen3_tied": ModelConfig(**TINY, qk_norm=True, tie_word_embeddings=True),
    "untiled_heads": ModelConfig(**{**TINY, "num_q_heads": 6, "num_kv_heads": 3}, eos_token_ids=(2,)),
}
BUILTIN = models.builtin_directory()
SHIPPED = ModelConfig(  # with the vocabulary of the tokenizer that ships
    vocab_size=5120, hidden_size=32, intermediate_size=48, num_layers=1, num_q_heads=2, num_kv_heads=1, head_dim=16,
    max_position_embeddings=2048, qk_norm=True, tie_word_embeddings=True, eos_token_ids=(0,),
)  # fmt: skip


def dense_attend(config: ModelConfig, shape=(1, 1)):
    """The model's ``attend`` for whole right-padded sequences; the layer's state passes through.

    A model with recurrent layers needs the ``shape`` of its tokens.
    """
    ropes = layer_ropes(config)
    windows = config.windows or (None,) * config.num_layers
    kept = layer_recurrence(config)

    def attend(layer, state, q, *rest, sinks=None):
        if kept[layer] is not None:  # `q` is the function of a recurrent layer
            empty = tuple(jnp.zeros((shape[0], *one), dtype) for one, dtype in kept[layer])
            return q(empty, jnp.ones(shape, bool))[0], state
        k, v = rest
        position = jnp.arange(q.shape[-2], dtype=jnp.int32)
        length = jnp.full((1,), q.shape[-2], jnp.int32)
        inv_freq = rope.frequencies(ropes[layer], config.head_dim)
        q, k = rope.prepare(q, k, position[None], length, ropes[layer])
        q, k = rope.rotate(q, position, inv_freq), rope.rotate(k, position, inv_freq)
        with soft_cap(config.attention_softcap):
            if sinks is None:
                return causal_attention(q, k, v, window=windows[layer]), state
            # A token without a value whose logit is the sink: the definition, in one softmax.
            logits = capped(jnp.einsum("bhgtd,bhsd->bhgts", q, k, precision="highest") / math.sqrt(config.head_dim))
            seen = (position[None] <= position[:, None]) & (position[None] > position[:, None] - (windows[layer] or 1 << 20))
            sink = jnp.broadcast_to(sinks[None, :, :, None, None], (*logits.shape[:4], 1))
            logits = jnp.concatenate([jnp.where(seen[None, None, None], logits, -jnp.inf), sink], axis=-1)
            weight = jax.nn.softmax(logits, axis=-1)[..., :-1]
            return jnp.einsum("bhgts,bhsd->bhgtd", weight, v, precision="highest"), state

    return attend


@functools.partial(jax.jit, static_argnums=0)
def run(config: ModelConfig, params, tokens: jax.Array, last: jax.Array | None = None) -> jax.Array:
    """Logits under dense causal attention."""
    logits, _ = config.apply(params, tokens, dense_attend(config, tokens.shape), (None,) * config.num_layers, last=last)
    return logits


def vivid_params(config: ModelConfig, seed: int = 0):
    """Random parameters whose norms and biases are not at their neutral start and matrices not small."""
    rng = np.random.default_rng(seed)  # NumPy, since nothing here is worth compiling

    def draw(path, leaf):
        mean = 1.0 if path[-1].key == "scale" else 0.0
        return jnp.asarray(rng.normal(mean, 0.2, leaf.shape).astype(leaf.dtype))

    return jax.tree.map_with_path(draw, param_shapes(config))


def write_model(directory: pathlib.Path, config: ModelConfig) -> pathlib.Path:
    """A tiny random model on disk, with the tokenizer that ships."""
    models.save_pretrained(directory, vivid_params(config), config)
    shutil.copy(BUILTIN / "tokenizer.json", directory)
    return directory


def factors_of(params, rank=3):
    """The factors of an adapter that changes every kernel."""
    rng, layer = np.random.default_rng(0), flatten_dict(params["layers_0"], sep="/")
    factors, layers = {}, sum(name.startswith("layers_") for name in params)
    for path in adapter.KERNELS:
        rows, columns, name = len(layer[path]), layer[path].size // len(layer[path]), path.removesuffix("/kernel")
        factors[f"{name}/a"] = 0.3 * rng.normal(size=(layers, rows, rank)).astype(np.float32)
        factors[f"{name}/b"] = rng.normal(size=(layers, rank, columns)).astype(np.float32)
    return unflatten_dict(factors, sep="/")
