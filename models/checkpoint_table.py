"""Which tensors of a Hugging Face checkpoint make each parameter or a part of it, and how to join and split them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from .config import ModelConfig
from .experts import tensor_names

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Index = tuple[slice, ...]  # a slice for each dimension
Parts = Callable[[Index], np.ndarray]  # reads a part of a parameter


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter and the file tensors from which it is joined.

    Each file tensor is reshaped to its ``fold``. All are then concatenated along ``axis``, and a matrix is transposed from
    the file's [out, in] to our [in, out].
    """

    path: str  # 'layers_0/attention/qkv/kernel'
    names: tuple[str, ...]  # file tensors, in joining order
    folds: tuple[tuple[int, ...], ...]  # the shape of each while they are joined
    axis: int = 0
    transpose: bool = False
    stack: int = 0  # E: joined matrices are cut into E of equal size, [E, in, out]; 0 = one matrix
    pair: bool = False  # out is gate and up, each on its own: [in, 2, F]

    def file_shape(self, index: int) -> tuple[int, ...]:
        """Compute the shape of tensor ``index`` in the file: [out, in] for a matrix, [N] for a vector."""
        fold = self.folds[index]
        # Embeddings are the only matrices that are not transposed; their fold is their shape.
        if self.transpose:
            return (math.prod(fold[:-1]), fold[-1])
        return fold if self.path.endswith("embedding") else (math.prod(fold),)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        if not self.transpose:
            return self.folds[0] if self.path.endswith("embedding") else (sum(map(math.prod, self.folds)),)
        rows = sum(math.prod(fold[:-1]) for fold in self.folds) // max(1, self.stack)
        columns = (2, rows // 2) if self.pair else (rows,)
        return (*(self.stack,) * bool(self.stack), self.folds[0][-1], *columns)

    @property
    def has_codes(self) -> bool:
        """Whether the parameter can be in 8 or 4 bits: kernels and tables."""
        return self.transpose or self.path.endswith("embedding")

    def join(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Join the file tensors into the parameter: a view or one copy, in the file's dtype."""
        folded = [tensor.reshape(fold) for tensor, fold in zip(tensors, self.folds, strict=True)]
        whole = folded[0] if len(folded) == 1 else np.concatenate(folded, axis=self.axis)
        if not self.transpose:
            return whole if self.path.endswith("embedding") else whole.reshape(-1)
        stack = (self.stack,) if self.stack else ()
        turned = whole.reshape(*stack, -1, whole.shape[-1]).swapaxes(-1, -2)
        return turned.reshape(*turned.shape[:-1], 2, -1) if self.pair else turned

    def rows(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Join what belongs to the rows of the file's matrices, arrays [out, X]: [N, X], [2, F, X] or, of a table, [V, X]."""
        folded = [tensor.reshape(*fold[:-1], tensor.shape[-1]) for tensor, fold in zip(tensors, self.folds, strict=True)]
        whole = np.concatenate(folded, axis=self.axis)
        return whole.reshape(*(2,) * self.pair, -1, whole.shape[-1])

    def part(self, index: Index) -> tuple[Leaf, list[Index]]:
        """Select what to read of the file's tensors for a part of the parameter, and the leaf that joins the slices.

        Args:
            index: as `jax.make_array_from_callback` gives it: all of the parameter, or an equal part of one dimension. The
                dimension is [in] of a matrix, [out] of a matrix (whole KV heads, or a part of F), or the rows of a table.

        Returns:
            The leaf of the part, and for each file tensor the slices to read.
        """
        shapes = [self.file_shape(i) for i in range(len(self.names))]
        divided = [dim - len(index) for dim, at in enumerate(index) if at != slice(None)]
        if not divided:
            return self, [(slice(None),) * len(shape) for shape in shapes]
        start, stop = index[divided[0]].start or 0, index[divided[0]].stop
        if self.transpose and not self.pair and divided == [-2]:
            folds = tuple((*fold[:-1], stop - start) for fold in self.folds)
            return dataclasses.replace(self, folds=folds), [(slice(None), slice(start, stop))] * len(shapes)
        unit = sum(fold[1] * fold[2] for fold in self.folds) if self.axis else 1  # columns of a KV head
        start, stop = start // unit, stop // unit
        where = []
        for shape, fold in zip(shapes, self.folds, strict=True):
            rows = shape[0] // fold[0]  # rows of the file for one row of the fold
            where.append((slice(start * rows, stop * rows), *[slice(None)] * (len(shape) - 1)))
        return dataclasses.replace(self, folds=tuple((stop - start, *fold[1:]) for fold in self.folds)), where

    def split(self, param: np.ndarray) -> list[np.ndarray]:
        """Split the parameter into contiguous file tensors: the inverse of `join`."""
        sizes = [fold[self.axis] for fold in self.folds]
        joined = (*self.folds[0][: self.axis], sum(sizes), *self.folds[0][self.axis + 1 :])
        flat = param.reshape(*param.shape[:-2], -1) if self.pair else param
        turned = flat.swapaxes(-1, -2) if self.transpose else flat
        whole = turned.reshape(joined)
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis=self.axis)
        return [np.ascontiguousarray(part.reshape(self.file_shape(i))) for i, part in enumerate(parts)]


def checkpoint_table(config: ModelConfig) -> list[Leaf]:
    """List every parameter of ``config``'s model with its file tensors, in the order of a forward pass."""
    hidden, dim = config.hidden_size, config.head_dim
    heads, group = config.num_kv_heads, config.group_size
    leaves = [Leaf("embed/embedding", (EMBEDDING,), ((config.vocab_size, hidden),))]
    for layer in range(config.num_layers):
        ours, theirs = f"layers_{layer}", f"model.layers.{layer}"
        attention = f"{theirs}.self_attn"
        # Query head kv * G + g belongs to KV head kv, so [H, G, D] is a plain reshape of the file's rows.
        counts = {"q_proj": group, "k_proj": 1, "v_proj": 1}
        leaves += [
            Leaf(f"{ours}/attention_norm/scale", (f"{theirs}.input_layernorm.weight",), ((hidden,),)),
            Leaf(
                f"{ours}/attention/qkv/kernel", tuple(f"{attention}.{name}.weight" for name in counts),
                tuple((heads, count, dim, hidden) for count in counts.values()), axis=1, transpose=True,
            ),
            Leaf(f"{ours}/attention/out/kernel", (f"{attention}.o_proj.weight",),
                 ((hidden, heads * group * dim),), transpose=True),
            Leaf(f"{ours}/mlp_norm/scale", (f"{theirs}.post_attention_layernorm.weight",), ((hidden,),)),
            *_mlp(config, layer),
        ]  # fmt: skip
        if config.qkv_bias:
            leaves.append(Leaf(
                f"{ours}/attention/qkv/bias", tuple(f"{attention}.{name}.bias" for name in counts),
                tuple((heads, count, dim) for count in counts.values()), axis=1,
            ))  # fmt: skip
        if config.qk_norm:
            for name in ("q_norm", "k_norm"):
                leaves.append(Leaf(f"{ours}/attention/{name}/scale", (f"{attention}.{name}.weight",), ((dim,),)))
    leaves.append(Leaf("final_norm/scale", ("model.norm.weight",), ((hidden,),)))
    if not config.tie_word_embeddings:
        leaves.append(Leaf("lm_head/embedding", (LM_HEAD,), ((config.vocab_size, hidden),)))
    return leaves


def _mlp(config: ModelConfig, layer: int) -> list[Leaf]:
    """List the parameters of a layer's MLP, which may be experts."""
    ours, theirs = f"layers_{layer}/mlp", f"model.layers.{layer}"
    hidden, experts = config.hidden_size, config.experts
    if experts is None or layer not in experts.layers:
        count, inner = 0, config.intermediate_size
        both = [f"{theirs}.mlp.{name}_proj.weight" for name in ("gate", "up")]
        down = [f"{theirs}.mlp.down_proj.weight"]
        leaves = []
    else:
        count, inner = experts.num_experts, experts.intermediate_size
        router, both, down = tensor_names(theirs, count, qwen=config.qk_norm)
        leaves = [Leaf(f"{ours}/router/kernel", (router,), ((count, hidden),), transpose=True)]
    return [
        *leaves,
        Leaf(f"{ours}/gate_up/kernel", tuple(both), ((inner, hidden),) * len(both), transpose=True, stack=count, pair=True),
        Leaf(f"{ours}/down/kernel", tuple(down), ((hidden, inner),) * len(down), transpose=True, stack=count),
    ]


def tensor_problems(expected: Mapping[str, tuple[int, ...]], found: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the problems of a file's tensors, one line each: missing, unused, or of another shape than expected."""
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in found]
    for name, shape in found.items():
        if name not in expected:
            problems.append(f"unused {name} {list(shape)}")
        elif shape != expected[name]:
            problems.append(f"misshaped {name}: got {list(shape)}, expected {list(expected[name])}")
    return problems
