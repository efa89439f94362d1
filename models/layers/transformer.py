"""One decoder for every supported family, as a Flax Linen module without state.

Attention is not here. Each layer gives un-rotated queries, keys and values to a function ``attend`` of the caller, which
returns the attention output. So rotary positions, caches and masks belong to the caller.

Parameter tree (axes: d hidden, F intermediate, H KV heads, G query heads per KV head, D head_dim, V tokens)::

    embed/embedding [V, d]      final_norm/scale [d]      lm_head/embedding [V, d] (absent when tied)
    layers_{i}/attention_norm/scale [d]                   layers_{i}/mlp_norm/scale [d]    (norm_place: before or both)
    layers_{i}/attention_out_norm/scale [d]               layers_{i}/mlp_out_norm/scale [d]     (norm_place: after or both)
    layers_{i}/attention/qkv/kernel [d, H*(G+2)*D]        layers_{i}/attention/qkv/bias [H*(G+2)*D] (qkv_bias)
    layers_{i}/attention/q_norm/scale, k_norm/scale [D] (qk_norm), or all_q_norm/scale [H*G*D], all_k_norm/scale [H*D]
    layers_{i}/attention/out/kernel [H*G*D, d]            layers_{i}/attention/out_bias/bias [d] (out_bias)
    layers_{i}/attention/sinks/bias [H*G] (attention_sinks)
    layers_{i}/mlp/gate_up/kernel [d, 2, F]               layers_{i}/mlp/down/kernel [F, d]
    layers_{i}/linear/... instead of layers_{i}/attention/... in layers without keys, see `models.layers.linear.layer`
    without a gate: layers_{i}/mlp/inner/kernel [d, F] in place of gate_up
    with experts: layers_{i}/mlp/... as `models.layers.experts.MixtureMLP` says

QKV and gate/up are fused, because the time of a batch-1 decode step depends on the number and size of its matrix-vector
products. The columns of ``qkv`` are in the order of KV heads: the G queries (each with its gate behind it, if outputs have
gates), the key and the value of each head. So one reshape gives grouped queries, and a split of the columns over devices is
a split of KV heads. The kernel of ``gate_up`` has an axis for gate and up, so that a split of F divides both alike. Its
product is an einsum: on a GPU or CPU it compiles to the product with the matrix [d, 2F]. On a TPU a reshape to [d, 2F] would
copy the weights in every step; the einsum does not.

Inside `jax.shard_map` with an axis ``model`` the module is one device's part (`ModelConfig.local`): the results of ``out``
and ``down`` are summed over the devices, and each device has its rows of the tables [V, d].

A kernel or a table may be a `CodedMatrix` (`models.files.coded`): then `models.layers.modules.product` reads its codes.

Layers are a Python loop, because a scan over stacked weights would copy every weight once per token.
"""

import math
from collections.abc import Callable, Collection, Sequence
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import axes
from pallas_kernels.formats.coded_matrix import CodedMatrix, decoded, taken
from pallas_kernels.layer.add_norm import rms_norm
from pallas_kernels.layer.coded_product import MOST_VECTORS, coded_product

from ..sizes.architecture import Architecture
from .experts import MixtureMLP
from .latent import LatentAttention
from .linear.layer import GatedDelta
from .modules import MLP, Dense, Kernel, Norm, Scale, stored

Attend = Callable[..., tuple[jax.Array, Any]]  # see `Transformer.__call__`


def wide_qk_norm(qkv: jax.Array, of_query: jax.Array, of_key: jax.Array, eps: float) -> jax.Array:
    """Normalise the queries of all heads together by their root mean square, and the keys of all heads too.

    Args:
        qkv: [B, T, H, G + 2, D], the queries, the key and the value of each KV head; on a mesh, the heads of this device.
        of_query: [H * G * D], factors, in the order of the heads.
        of_key: [H * D], factors.
        eps: added to the mean square.

    Returns:
        The same array with normalised queries and keys. The arithmetic is in float32.
    """
    heads, group, dim = qkv.shape[2], qkv.shape[3] - 2, qkv.shape[4]
    wide = qkv.astype(jnp.float32)
    square = axes.total(jnp.sum(wide * wide, axis=(2, 4)))  # [B, T, G + 2]
    width = heads * axes.size(axes.MODEL) * dim
    query = lax.rsqrt(jnp.sum(square[..., :group], axis=-1, keepdims=True) / (width * group) + eps)
    key = lax.rsqrt(square[..., group : group + 1] / width + eps)
    rate = jnp.concatenate([jnp.repeat(query, group, axis=-1), key], axis=-1)[:, :, None, :, None]
    scale = jnp.concatenate([of_query.reshape(heads, group, dim), of_key.reshape(heads, 1, dim)], axis=1)
    normed = wide[..., :-1, :] * rate * scale.astype(jnp.float32)[None, None]
    return jnp.concatenate([normed.astype(qkv.dtype), qkv[..., -1:, :]], axis=3)


def without_gates(qkv: jax.Array, group: int) -> tuple[jax.Array, jax.Array | None]:
    """Take the gates of attention's output out of a fused projection.

    Args:
        qkv: [B, T, H, 2 * G + 2, D], where each query is followed by its gate; or [B, T, H, G + 2, D] without gates.
        group: G.

    Returns:
        [B, T, H, G + 2, D], and the gates [B, T, H, G, D] or None.
    """
    if qkv.shape[3] == group + 2:
        return qkv, None
    both, rest = qkv[:, :, :, : 2 * group], qkv[:, :, :, 2 * group :]
    both = both.reshape(*qkv.shape[:3], group, 2, qkv.shape[4])
    return jnp.concatenate([both[..., 0, :], rest], axis=3), both[..., 1, :]


class Attention(nn.Module):
    """The projections of one layer's attention. The caller computes the attention itself."""

    config: Architecture
    layer: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        attend: Attend,
        state: Any,
        before: jax.Array | None = None,
        scale: jax.Array | None = None,
        nudge: jax.Array | None = None,
    ) -> tuple[jax.Array, Any]:
        """Compute the update of the residual stream [B, T, d] and the layer's new state, from ``x`` [B, T, d].

        ``before`` [B, T, d] is the ``x`` of the previous layer, if ``attend`` is to get this layer's query for it. With the
        ``scale`` [d] of a norm ``x`` is the stream before the norm, and the stream is returned with the update added.
        A ``nudge`` [B, T, d] is added to the update, and ``attend`` gets what a probe needs: see `Transformer`.
        """
        config = self.config
        heads, group, dim = config.num_kv_heads, config.group_size, config.head_dim
        batch, length, _ = x.shape
        rows = x if before is None else jnp.concatenate([x, before], axis=1)  # one product, which reads the weights once
        wide = heads * (group * (2 if config.output_gate else 1) + 2) * dim
        normed = {} if scale is None else {"scale": scale, "eps": config.rms_norm_eps}
        qkv = Dense(config, wide, config.qkv_bias, name="qkv")(rows.astype(config.dtype), **normed)
        qkv, gate = without_gates(qkv.reshape(batch, rows.shape[1], heads, -1, dim), group)
        if config.qk_norm:
            # All heads are normalised in one pass, because norms of slices would be five launches. The pass comes before the
            # transposition, because for norms after it XLA on a GPU would choose tilings for ten seconds.
            row = jnp.arange(group + 2)[:, None]
            of_query, of_key = (Scale(config, dim, name=name)()[None] for name in ("q_norm", "k_norm"))
            scale = jnp.where(row < group, of_query, of_key)
            qkv = jnp.where(row > group, qkv, rms_norm(qkv, scale, config.rms_norm_eps))
        if config.wide_qk_norm:
            widths = {"all_q_norm": heads * group * dim, "all_k_norm": heads * dim}
            of_query, of_key = (Scale(config, width, name=name)() for name, width in widths.items())
            qkv = wide_qk_norm(qkv, of_query, of_key, config.rms_norm_eps)
        if config.query_scale is not None:  # attention divides by sqrt(D), under every method
            asks = jnp.arange(group + 2).reshape(1, 1, 1, -1, 1) < group
            qkv = qkv * jnp.where(asks, config.query_scale * math.sqrt(dim), 1.0).astype(qkv.dtype)
        guess = ()
        if before is not None:
            qkv, ahead = jnp.split(qkv, 2, axis=1)
            guess = (ahead[:, :, :, :group].transpose(0, 2, 3, 1, 4),)
        q, k, v = qkv[:, :, :, :group], qkv[:, :, :, group], qkv[:, :, :, group + 1]
        q, k, v = q.transpose(0, 2, 3, 1, 4), k.transpose(0, 2, 1, 3), v.transpose(0, 2, 1, 3)
        sinks = {}
        if config.attention_sinks:
            logits = Kernel(config, (heads * group,), "bias", name="sinks")()
            sinks = {"sinks": logits.astype(jnp.float32).reshape(heads, group)}
        if nudge is not None:
            kernel = self.get_variable("params", "out")["kernel"]
            kernel = decoded(kernel).T if isinstance(kernel, CodedMatrix) else kernel
            sinks["written"] = x, kernel.reshape(heads, group, dim, config.hidden_size)
        with jax.named_scope("attend"):
            out, state = attend(self.layer, state, q, k, v, *guess, **sinks)
        if out.shape != q.shape:
            raise ValueError(f"attend returned shape {out.shape} at layer {self.layer}, expected {q.shape}")
        out = out.transpose(0, 3, 1, 2, 4).reshape(batch, length, heads * group * dim)
        out = out.astype(config.dtype)
        if gate is not None:
            out = out * jax.nn.sigmoid(gate[:, :length].reshape(out.shape))
        added = {} if scale is None else {"residual": x}
        out = axes.total(Dense(config, config.hidden_size, name="out")(out, **added))
        if config.out_bias:
            out = out + Kernel(config, (config.hidden_size,), "bias", name="out_bias")().astype(out.dtype)[None, None]
        return out if nudge is None else out + nudge.astype(out.dtype), state


class Block(nn.Module):
    """One layer: attention and MLP, whose outputs are added to the residual stream (`ModelConfig.norm_place`)."""

    config: Architecture
    layer: int

    @nn.compact
    def __call__(
        self,
        x: jax.Array,
        update: jax.Array | None,
        attend: Attend,
        state: Any,
        before: jax.Array | None = None,
        nudge: jax.Array | None = None,
    ) -> tuple[jax.Array, jax.Array | None, Any, jax.Array]:
        """Run the layer on a residual stream to which the last update of the previous layer is not added yet.

        Args:
            x: [B, T, d], the stream.
            update: [B, T, d], the last update of the previous layer; None if there is none.
            attend: the caller's attention.
            state: the caller's state of this layer.
            before: [B, T, d], the attention input of the previous layer, if ``attend`` is to get a guessed query.
            nudge: [B, T, d], added to the update of attention.

        Returns:
            The stream after this layer's attention, this layer's own last update, the new state, and this layer's attention
            input. The last update is not added yet: one launch in the next layer computes the sum and its norm. It is None
            where products add their results to the stream.
        """
        config, layer, experts = self.config, self.layer, self.config.experts
        if before is None and nudge is None and self._in_passing(x):
            x = x if update is None else x + update
            scale, of_mlp = (Scale(config, config.hidden_size, name=name)() for name in ("attention_norm", "mlp_norm"))
            inputs = rms_norm(x, scale, config.rms_norm_eps)  # computed only if the next layer's query is guessed from it
            x, state = Attention(config, layer, name="attention")(x, attend, state, scale=scale)
            return MLP(config, name="mlp")(x, of_mlp), None, state, inputs
        x, inputs = self._enter("attention_norm", x, update)
        if config.linear is not None and layer in config.linear.layers:
            update, state = GatedDelta(config, layer, name="linear")(inputs, attend, state)
        else:
            attention = Attention if config.latent is None else LatentAttention
            nudges = {} if nudge is None else {"nudge": nudge}
            update, state = attention(config, layer, name="attention")(inputs, attend, state, before, **nudges)
        mixed = experts is not None and layer in experts.layers
        mlp = MLP(config, name="mlp") if experts is None or not mixed else MixtureMLP(config, experts, name="mlp")
        if config.norm_place == "parallel":
            return x, self._leave("", update + mlp(inputs)), state, inputs
        x, normed = self._enter("mlp_norm", x, self._leave("attention_out_norm", update))
        return x, self._leave("mlp_out_norm", mlp(normed)), state, inputs

    def _in_passing(self, x: jax.Array) -> bool:
        """Tell whether products compute norms, gates and sums of the layer in passing: with codes, for a few rows ``x``."""
        stored = self.variables.get("params", {})
        places = (("attention", "qkv"), ("attention", "out"), ("mlp", "gate_up"), ("mlp", "down"))
        kernels = [stored.get(part, {}).get(name, {}).get("kernel") for part, name in places]
        scales = [stored.get(name, {}).get("scale") for name in ("attention_norm", "mlp_norm")]
        return (
            all(isinstance(kernel, CodedMatrix) for kernel in kernels)
            and all(scale is not None and scale.dtype == x.dtype for scale in scales)
            and math.prod(x.shape[:-1]) <= MOST_VECTORS
            and x.dtype == jnp.dtype(self.config.dtype)
            and _is_plain(self.config)
            and not axes.is_split(axes.MODEL)
        )

    def _enter(self, name: str, x: jax.Array, update: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        """Add the last update to the stream; return the sum, and what attention or MLP reads."""
        if self.config.norm_place == "after":
            x = x if update is None else x + update
            return x, x
        norm = Norm(self.config, name=name)
        return (x, norm(x)) if update is None else norm(x, update)

    def _leave(self, name: str, update: jax.Array) -> jax.Array:
        """Return what attention or MLP adds to the stream."""
        if self.config.norm_place in ("after", "both"):
            update = Norm(self.config, name=name)(update)
        multiplier = self.config.residual_multiplier
        return update if multiplier == 1 else update * multiplier


def _is_plain(config: Architecture) -> bool:
    """Tell whether a layer is norm, attention, norm and MLP, gated by silu, with nothing between products and the stream."""
    norms = config.norm == "rms" and config.norm_place == "before" and config.residual_multiplier == 1
    others = config.experts, config.latent, config.linear
    return norms and config.mlp_gate and config.activation == "silu" and not config.out_bias and others == (None,) * 3


class Table(nn.Module):
    """A table [V, d] that embeds token ids, or scores hidden states against every token."""

    config: Architecture

    def setup(self):
        """Create the table."""
        shape = (self.config.vocab_size // axes.size(axes.MODEL), self.config.hidden_size)
        self.embedding = stored(self, "embed/embedding", self.config, shape)

    def embed(self, tokens: jax.Array) -> jax.Array:
        """Look up the vectors [B, T, d] of token ids int [B, T]. An id past the vocabulary gives NaN."""
        multiplier = self.config.embedding_multiplier
        x = self._looked_up(tokens)
        return x if multiplier == 1 else x * jnp.asarray(multiplier, x.dtype)

    def _looked_up(self, tokens: jax.Array) -> jax.Array:
        if not axes.is_split(axes.MODEL):
            return self._rows(tokens, "fill").astype(self.config.dtype)
        rows = self.config.vocab_size // axes.size(axes.MODEL)
        place = tokens - axes.index(axes.MODEL) * rows
        mine = (place >= 0) & (place < rows)
        x = self._rows(jnp.where(mine, place, 0)).astype(self.config.dtype)
        x = axes.total(jnp.where(mine[..., None], x, 0))
        return jnp.where((tokens < self.config.vocab_size)[..., None], x, jnp.nan)

    def _rows(self, tokens: jax.Array, mode: str | None = None) -> jax.Array:
        if isinstance(self.embedding, CodedMatrix):
            return taken(self.embedding, tokens)
        return jnp.take(self.embedding, tokens, axis=0, mode=mode)

    def logits(self, x: jax.Array) -> jax.Array:
        """Compute the logits float32 [..., V] of hidden states [..., d]."""
        if isinstance(self.embedding, CodedMatrix):
            scores = coded_product(x, self.embedding, dtype=jnp.float32)
        else:
            table = self.embedding.astype(self.config.dtype)
            scores = jnp.einsum("...d,vd->...v", x, table, preferred_element_type=jnp.float32)
        scores = axes.joined(scores, x.ndim - 1)
        cap, multiplier = self.config.logit_softcap, self.config.logits_multiplier
        logits = scores if multiplier == 1 else scores * multiplier
        return logits if cap is None else jnp.tanh(logits / cap) * cap


class Transformer(nn.Module):
    """The decoder: embedding, layers, final norm, LM head."""

    config: Architecture

    def setup(self):
        """Create the modules."""
        config = self.config
        self.embed = Table(config)
        self.layers = [Block(config, layer) for layer in range(config.num_layers)]
        self.final_norm = Norm(config)
        if not config.tie_word_embeddings:
            self.lm_head = Table(config)

    def __call__(
        self,
        tokens: jax.Array,
        attend: Attend,
        states: tuple,
        last: jax.Array | None = None,
        guess: Collection[int] = (),
        nudges: Sequence[jax.Array] | None = None,
    ) -> tuple[jax.Array, tuple]:
        """Compute the logits of the next token.

        Args:
            tokens: int32 [B, T] in [0, V). An id of V or more gives NaN logits.
            attend: ``attend(layer, state, q, k, v) -> (out, state)`` with q and out [B, H, G, T, D], k and v
                [B, H, T, D], after bias and q/k norm, before RoPE, in the dtype of computation. With ``attention_sinks`` it
                gets a keyword argument ``sinks``, float32 [H, G]. A layer of linear attention calls
                ``attend(layer, state, advance)``, see `models.layers.linear.layer.GatedDelta`.
            states: one pytree per layer; ``attend`` gets it and returns a new one.
            last: int32 [B] in [0, T), the only position of each row that goes through the final norm and the LM head;
                None means all positions.
            guess: layers above 0 in which ``attend`` gets one more array after v, shaped like q: the guessed query, which is
                this layer's query projection applied to the previous layer's attention input.
            nudges: [B, T, d] of each layer, added to what attention adds to the stream. Then ``attend`` gets a keyword
                argument ``written``: the layer's attention input [B, T, d], and the output projection [H, G, D, d].

        Returns:
            Logits, float32 [B, V] (or [B, T, V] with ``last=None``), and the new states. With ``nudges`` the stream
            [B, T, d] before the final norm in place of the logits.

        Raises:
            ValueError: ``tokens``, ``last`` or ``states`` do not have these shapes.
        """
        config = self.config
        if len(states) != config.num_layers:
            raise ValueError(f"expected one state for each of {config.num_layers} layers, got {len(states)}")
        if last is not None and last.shape != tokens.shape[:1]:
            raise ValueError(f"last must have shape {tokens.shape[:1]}, one index per row, got {last.shape}")
        x = self.begin(tokens)
        update, inputs, new_states = None, None, []
        for layer, state in enumerate(states):
            before = inputs if layer in guess else None
            nudge = None if nudges is None else nudges[layer]
            x, update, state, inputs = self.layers[layer](x, update, attend, state, before, nudge)
            new_states.append(state)
        if nudges is not None:
            return x if update is None else x + update, tuple(new_states)
        if last is not None:
            at = None if tokens.shape[1] == 1 else last[:, None, None]  # a decode step has one position, and looks nothing up
            x, update = jax.tree.map(lambda y: (y if at is None else jnp.take_along_axis(y, at, axis=1))[:, 0], (x, update))
        return self.end(x, update), tuple(new_states)

    def begin(self, tokens: jax.Array) -> jax.Array:
        """Embed ``tokens`` int32 [B, T]: the stream [B, T, d] before the first layer.

        Raises:
            ValueError: ``tokens`` are no integers of this shape.
        """
        if tokens.ndim != 2 or not jnp.issubdtype(tokens.dtype, jnp.integer):
            raise ValueError(f"tokens must be integers of shape [B, T], got {tokens.dtype} {tokens.shape}")
        return self.embed.embed(tokens)

    def run_layer(self, layer: int, x: jax.Array, attend: Attend, state: Any) -> tuple[jax.Array, Any]:
        """Run one layer on the stream [B, T, d]; return the stream with all of the layer's updates, and the new state."""
        x, update, state, _ = self.layers[layer](x, None, attend, state)
        return x if update is None else x + update, state

    def end(self, x: jax.Array, update: jax.Array | None = None) -> jax.Array:
        """Compute the logits float32 [..., V] of the stream [..., d] behind the last layer, and its last update if any."""
        x = self.final_norm(x) if update is None else self.final_norm(x, update)[1]
        return (self.embed if self.config.tie_word_embeddings else self.lm_head).logits(x)
