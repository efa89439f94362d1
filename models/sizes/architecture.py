"""The configuration of a decoder, frozen and hashable. The model and the code that attends for the model read it.

The families that this library runs have the same architecture, made of the same parts. Every difference between them is a
field below, whose default is what Llama has. `models.files.hf.config` translates from and to Hugging Face's ``config.json``.
"""

import dataclasses
import math
from typing import Any, Self

import jax
import ml_dtypes
import numpy as np

from .checks import check_counts, check_flags, check_kind, check_number
from .experts import Experts
from .latent import Latent, check_latent
from .linear import LinearLayers, check_linear
from .parts import LayerRope, check_parts, check_rope
from .rope_scaling import RopeRule

HOST_DTYPES = {"float32": np.dtype(np.float32), "bfloat16": np.dtype(ml_dtypes.bfloat16)}
DTYPES = tuple(HOST_DTYPES)
_OWNER = "ModelConfig"
_COUNTS = (
    "vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_q_heads", "num_kv_heads", "head_dim",
    "max_position_embeddings",
)  # fmt: skip
_FLAGS = (
    "tie_word_embeddings", "qkv_bias", "out_bias", "attention_sinks", "mlp_gate", "qk_norm", "wide_qk_norm", "output_gate",
)  # fmt: skip


def check_dtype(dtype: str | None) -> None:
    """Refuse a dtype in which nothing is computed; None stands for the dtype of the file."""
    if dtype is not None and dtype not in DTYPES:
        raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Architecture:
    """Sizes and switches of one decoder, as layers and files read them; `models.ModelConfig` is this with its decoder.

    Raises:
        ValueError: a size is not positive, ``num_q_heads`` is no multiple of ``num_kv_heads``, ``head_dim`` is odd, the
            dtype is unknown, or ``windows`` has another number of layers.
    """

    vocab_size: int  # V, rows of the embedding; can be more than the tokenizer's entries
    hidden_size: int  # width of the residual stream
    intermediate_size: int  # width F of the gated MLP
    num_layers: int  # L
    num_q_heads: int  # H * G
    num_kv_heads: int  # H
    head_dim: int  # D, not always hidden_size / num_q_heads
    max_position_embeddings: int  # the longest context in tokens; the code that allocates a cache checks it
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0  # base of the rotary frequencies, for the code that attends
    rope_scaling: RopeRule | None = None  # how the frequencies are stretched, for the code that attends
    tie_word_embeddings: bool = False  # the LM head is the embedding
    qkv_bias: bool = False  # Qwen2: bias on q, k and v, none on the output
    qk_norm: bool = False  # Qwen3: RMSNorm over head_dim of every query and key head
    wide_qk_norm: bool = False  # OLMo 2: RMSNorm over all query heads together, and over all key heads
    output_gate: bool = False  # Qwen3-Next: a gate of each query head, a sigmoid, on the output of attention
    linear: LinearLayers | None = None  # layers of linear attention, which keep a state instead of keys
    experts: Experts | None = None  # Qwen3-MoE, Mixtral: layers whose MLP is a mixture of experts
    eos_token_ids: tuple[int, ...] = ()  # any of these ends a text
    windows: tuple[int | None, ...] = ()  # sliding window of each layer in tokens, None = none; () = none in any layer
    dtype: str = "float32"  # dtype of computation; parameters can be stored in another
    ropes: tuple[LayerRope, ...] = ()  # rotation of each layer; () = rope_theta and rope_scaling in every layer
    norm: str = "rms"  # "rms", or "layer" for LayerNorm without a bias (Cohere); rms_norm_eps is added to either's variance
    norm_place: str = "before"  # what a layer normalises, see `models.sizes.parts.NORM_PLACES`
    mlp_gate: bool = True  # False: the MLP is a product, the activation and a product (Arcee)
    activation: str = "silu"  # on the gate of the MLP, see `models.sizes.parts.ACTIVATIONS`
    query_scale: float | None = None  # on the product of query and key; None = 1 / sqrt(head_dim)
    embedding_multiplier: float = 1.0  # on the embedded tokens
    residual_multiplier: float = 1.0  # on what attention and MLP add to the residual stream
    logits_multiplier: float = 1.0  # on the logits
    attention_softcap: float | None = None  # c: logits of attention become c * tanh(logits / c), after their scale
    attention_sinks: bool = False  # gpt-oss: a learned logit of each query head in the softmax of every layer
    out_bias: bool = False  # gpt-oss: a bias on the output of attention
    logit_softcap: float | None = None  # c: logits become c * tanh(logits / c), after the multiplier
    latent: Latent | None = None  # latent attention (MLA): one KV head of head_dim = latent.width
    family: str = ""  # model_type of its files; "" = inferred: Llama, Mistral, Qwen or Mixtral

    def __post_init__(self):
        fields = vars(self)
        check_counts(_OWNER, **{name: fields[name] for name in _COUNTS})
        if self.num_q_heads % self.num_kv_heads:
            raise ValueError(
                f"ModelConfig: num_q_heads must be a multiple of num_kv_heads, got {self.num_q_heads} and {self.num_kv_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"ModelConfig: head_dim must be even (RoPE rotates pairs), got {self.head_dim}")
        for name in ("rms_norm_eps", "rope_theta"):
            check_number(_OWNER, name, fields[name])
        check_flags(_OWNER, **{name: fields[name] for name in _FLAGS})
        for name, kind in (("rope_scaling", RopeRule), ("experts", Experts), ("linear", LinearLayers), ("latent", Latent)):
            check_kind(_OWNER, name, fields[name], kind)
        if not self.ropes:
            check_rope(_OWNER, self.rope_scaling, self.head_dim)
        if self.experts is not None and self.experts.layers[-1] >= self.num_layers:
            raise ValueError(
                f"ModelConfig: experts.layers must be below num_layers={self.num_layers}, got {self.experts.layers[-1]}"
            )
        self._check_windows()
        check_parts(self)
        check_linear(self)
        check_latent(self)
        if not isinstance(self.dtype, str) or self.dtype not in DTYPES:
            raise ValueError(f"ModelConfig: dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if type(self.eos_token_ids) is not tuple:  # a list would make the config unhashable
            raise ValueError(f"ModelConfig: eos_token_ids must be a tuple, got {self.eos_token_ids!r}")
        outside = [i for i in self.eos_token_ids if not isinstance(i, int) or not 0 <= i < self.vocab_size]
        if outside:
            raise ValueError(f"ModelConfig: eos_token_ids must lie in [0, {self.vocab_size}), got {outside}")

    def _check_windows(self) -> None:
        if type(self.windows) is not tuple or len(self.windows) not in (0, self.num_layers):
            raise ValueError(
                f"ModelConfig: windows must be () or a tuple with an entry for each of {self.num_layers} layers, "
                f"got {self.windows!r}"
            )
        for window in self.windows:
            if window is not None:
                check_counts(_OWNER, windows=window)

    @property
    def value_is_key(self) -> bool:
        """Whether the values that attention gets are the keys; see `models.layers.latent`."""
        return self.latent is not None

    @property
    def group_size(self) -> int:
        """G, query heads that share one KV head."""
        return self.num_q_heads // self.num_kv_heads

    def local(self, devices: int) -> Self:
        """Divide the heads and every MLP's F by a number of devices; return the configuration of one device's share.

        Raises:
            ValueError: the parts would not be equal; the message lists the numbers of devices that give equal parts, and
                names the axes of a mesh that take further devices.
        """
        shared = {"num_kv_heads": self.num_kv_heads, "intermediate_size": self.intermediate_size}
        if self.experts is not None:
            shared["experts.intermediate_size"] = self.experts.intermediate_size
            shared |= {"experts.shared_size": self.experts.shared_size} if self.experts.shared_size else {}
        if self.linear is not None:
            shared["linear.num_key_heads"] = self.linear.num_key_heads
        shared["vocab_size"] = self.vocab_size
        common = math.gcd(*shared.values())
        if devices < 1 or common % devices:
            would = [str(n) for n in range(1, common + 1) if common % n == 0]
            sizes = ", ".join(f"{name}={value}" for name, value in shared.items())
            most = math.gcd(common, devices)
            rest = devices // most
            hint = f"; for {devices} devices take model={most} and data={rest}, which divides the rows, or slots={rest}, "
            hint += "which divides the slots of each row"
            raise ValueError(
                f"a model of {sizes} can be split over {' or '.join(would)} devices (the mesh's axis 'model'), got {devices}"
                + hint * (devices > 1)
            )
        experts = self.experts
        if experts is not None:
            sizes = {name: vars(experts)[name] // devices for name in ("intermediate_size", "shared_size")}
            experts = dataclasses.replace(experts, **sizes)
        return dataclasses.replace(
            self,
            num_q_heads=self.num_q_heads // devices,
            num_kv_heads=self.num_kv_heads // devices,
            intermediate_size=self.intermediate_size // devices,
            experts=experts,
            linear=None if self.linear is None else self.linear.local(devices),
        )

    @property
    def recurrent(self) -> tuple[Any, ...]:
        """The shapes of what each layer of linear attention keeps of a row, None for other layers."""
        linear = self.linear
        if linear is None:
            return ()
        memory = linear.memory(self.dtype)
        return tuple(memory if layer in linear.layers else None for layer in range(self.num_layers))

    def weight_bytes(self, params: Any, rows: int) -> int:
        """Count the bytes of ``params`` that a decode step of ``rows`` rows reads.

        A step reads everything but the unused rows of the embedding and the experts that no row uses
        (`models.sizes.experts.Experts.unread_bytes`).
        """
        total = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params))
        if self.experts is not None:
            total -= self.experts.unread_bytes(params, rows)
        if self.tie_word_embeddings:
            return total
        table = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params["embed"]["embedding"]))
        return total - table + rows * table // self.vocab_size
