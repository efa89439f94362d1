"""Which tensors of a Hugging Face checkpoint make each parameter or a part of it, and how to join and split them."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from ...layers.experts import Experts, tensor_names
from ...layers.latent import Latent
from ...sizes.config import ModelConfig
from .families import FAMILIES, Family, channel_order
from .linear import leaves as linear_leaves
from .stacked_experts import stacked
from .stacked_leaf import StackedLeaf

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"

Index = tuple[slice, ...]  # a slice for each dimension
Parts = Callable[[Index], np.ndarray]  # reads a part of a parameter


@dataclasses.dataclass(frozen=True)
class Leaf:
    """A parameter and the file tensors from which it is joined.

    Each file tensor is reshaped to its ``fold``. All are then concatenated along ``axis``, and a matrix is transposed from
    the file's [out, in] to our [in, out]. A name that stands there several times is one file tensor, with the rows of all
    of these parts one after the other.
    """

    path: str  # 'layers_0/attention/qkv/kernel'
    names: tuple[str, ...]  # file tensors, in joining order
    folds: tuple[tuple[int, ...], ...]  # the shape of each while they are joined
    axis: int = 0
    transpose: bool = False
    stack: int = 0  # E: joined matrices are cut into E of equal size, [E, in, out]; 0 = one matrix
    pair: bool = False  # out is gate and up, each on its own: [in, 2, F]
    # For each tensor, which of its channels is channel i here, along axis 2 of its fold or the only axis; () = the same.
    orders: tuple[tuple[int, ...], ...] = ()
    offset: float = 0.0  # the file has the parameter less this number
    gated: bool = False  # every second row of axis 1 of the first fold is a gate, whose channels keep their order

    def file_shape(self, index: int) -> tuple[int, ...]:
        """Compute the shape of tensor ``index`` in the file: [out, in] for a matrix, [N] for a vector."""
        name = self.names[index]
        rows = sum(self._rows(part) for part, other in enumerate(self.names) if other == name)
        return (rows, *self._part_shape(index)[1:])

    def _part_shape(self, index: int) -> tuple[int, ...]:
        fold = self.folds[index]
        # Embeddings are the only matrices that are not transposed; their fold is their shape.
        if self.transpose:
            return (math.prod(fold[:-1]), fold[-1])
        if self.is_taps:
            return (math.prod(fold[:-1]), 1, fold[-1])
        return fold if self.path.endswith("embedding") else (math.prod(fold),)

    @property
    def is_taps(self) -> bool:
        """Whether the parameter is the weights of a convolution [C, W], which the file has as [C, 1, W]."""
        return self.path.endswith("taps")

    def _rows(self, index: int) -> int:
        return self._part_shape(index)[0]

    def _first(self, index: int) -> int:
        """Return the first row of part ``index`` in its file tensor."""
        return sum(self._rows(part) for part in range(index) if self.names[part] == self.names[index])

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the parameter."""
        if self.is_taps:
            return (sum(math.prod(fold[:-1]) for fold in self.folds), self.folds[0][-1])
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
        """Join the file tensors into the parameter: a view or one copy, in the file's dtype.

        Args:
            tensors: a file tensor for each name; or, of a name that stands there several times, the rows of each part.
        """
        parts = [self._own(tensor, index) for index, tensor in enumerate(tensors)]
        folded = [self._ordered(part.reshape(fold), i) for i, (part, fold) in enumerate(zip(parts, self.folds, strict=True))]
        if self.offset:
            folded = [(part.astype(np.float32) + self.offset).astype(part.dtype) for part in folded]
        whole = folded[0] if len(folded) == 1 else np.concatenate(folded, axis=self.axis)
        if self.is_taps:
            return whole.reshape(-1, whole.shape[-1])
        if not self.transpose:
            return whole if self.path.endswith("embedding") else whole.reshape(-1)
        stack = (self.stack,) if self.stack else ()
        turned = whole.reshape(*stack, -1, whole.shape[-1]).swapaxes(-1, -2)
        return turned.reshape(*turned.shape[:-1], 2, -1) if self.pair else turned

    def _own(self, tensor: np.ndarray, index: int) -> np.ndarray:
        """Take the rows of part ``index`` of a whole file tensor."""
        rows, first = self._rows(index), self._first(index)
        return tensor if len(tensor) == rows else tensor[first : first + rows]

    def _ordered(self, part: np.ndarray, index: int, back: bool = False) -> np.ndarray:
        """Put the channels of a part into our order, or back into the file's."""
        order = self.orders[index] if self.orders else ()
        if not order:
            return part
        moved = part.take(np.argsort(order) if back else np.array(order), axis=min(2, part.ndim - 1))
        if self.gated and index == 0:
            moved[:, 1::2] = part[:, 1::2]
        return moved

    def rows(self, tensors: list[np.ndarray]) -> np.ndarray:
        """Join what belongs to the rows of the file's matrices, arrays [out, X]: [N, X], [2, F, X] or, of a table, [V, X]."""
        parts = [self._own(tensor, index) for index, tensor in enumerate(tensors)]
        folded = [
            self._ordered(part.reshape(*fold[:-1], part.shape[-1]), i)
            for i, (part, fold) in enumerate(zip(parts, self.folds, strict=True))
        ]
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
        shapes = [self._part_shape(i) for i in range(len(self.names))]
        first = [self._first(i) for i in range(len(self.names))]
        divided = [dim - len(index) for dim, at in enumerate(index) if at != slice(None)]
        if not divided:
            whole = [(slice(None),) * len(shape) for shape in shapes]
            if len(set(self.names)) < len(self.names):
                whole = [(slice(at, at + shape[0]), *rest[1:]) for at, shape, rest in zip(first, shapes, whole, strict=True)]
            return self, whole
        start, stop = index[divided[0]].start or 0, index[divided[0]].stop
        if self.transpose and not self.pair and divided == [-2]:
            folds = tuple((*fold[:-1], stop - start) for fold in self.folds)
            columns = [(slice(at, at + shape[0]), slice(start, stop)) for at, shape in zip(first, shapes, strict=True)]
            return dataclasses.replace(self, folds=folds), columns
        unit = sum(fold[1] * fold[2] for fold in self.folds) if self.axis else 1  # columns of a KV head
        start, stop = start // unit, stop // unit
        where = []
        for at, shape, fold in zip(first, shapes, self.folds, strict=True):
            rows = shape[0] // fold[0]  # rows of the file for one row of the fold
            where.append((slice(at + start * rows, at + stop * rows), *[slice(None)] * (len(shape) - 1)))
        return dataclasses.replace(self, folds=tuple((stop - start, *fold[1:]) for fold in self.folds)), where

    def split(self, param: np.ndarray) -> dict[str, np.ndarray]:
        """Split the parameter into contiguous file tensors, by name: the inverse of `join`."""
        sizes = [fold[self.axis] for fold in self.folds]
        joined = (*self.folds[0][: self.axis], sum(sizes), *self.folds[0][self.axis + 1 :])
        flat = param.reshape(*param.shape[:-2], -1) if self.pair else param
        turned = flat.swapaxes(-1, -2) if self.transpose else flat
        whole = turned.reshape(joined)
        parts = np.split(whole, np.cumsum(sizes)[:-1], axis=self.axis)
        if self.offset:
            parts = [(part.astype(np.float32) - self.offset).astype(part.dtype) for part in parts]
        parts = [self._ordered(part, i, back=True).reshape(self._part_shape(i)) for i, part in enumerate(parts)]
        made: dict[str, list[np.ndarray]] = {}
        for name, part in zip(self.names, parts, strict=True):
            made.setdefault(name, []).append(part)
        return {name: np.ascontiguousarray(np.concatenate(own) if own[1:] else own[0]) for name, own in made.items()}


AnyLeaf = Leaf | StackedLeaf
_LLAMA = Family(name="", class_name="")  # the names of all families that are not in `FAMILIES`


def checkpoint_table(config: ModelConfig) -> list[AnyLeaf]:
    """List every parameter of ``config``'s model with its file tensors, layer by layer."""
    hidden, family = config.hidden_size, FAMILIES.get(config.family, _LLAMA)
    leaves: list[AnyLeaf] = [Leaf("embed/embedding", (EMBEDDING,), ((config.vocab_size, hidden),))]
    for layer in range(config.num_layers):
        ours, theirs = f"layers_{layer}", f"model.layers.{layer}"
        norms = [
            Leaf(f"{ours}/{norm}/scale", (f"{theirs}.{name}.weight",), ((hidden,),), offset=family.norm_offset)
            for norm, name in family.norms.items()
        ]
        if config.linear is not None and layer in config.linear.layers:
            leaves += linear_leaves(config.linear, hidden, layer, family.linear == "fused")
        else:
            leaves += _attention(config, family, layer)
        leaves += [*_mlp(config, family, layer), *norms]
    leaves.append(Leaf("final_norm/scale", ("model.norm.weight",), ((hidden,),), offset=family.norm_offset))
    if not config.tie_word_embeddings:
        leaves.append(Leaf("lm_head/embedding", (LM_HEAD,), ((config.vocab_size, hidden),)))
    return leaves


def _attention(config: ModelConfig, family: Family, layer: int) -> list[Leaf]:
    """List the parameters of a layer's attention."""
    ours, theirs = f"layers_{layer}/attention", f"model.layers.{layer}.self_attn"
    if config.latent is not None:
        return _latent_attention(config, config.latent, ours, theirs)
    hidden, dim, heads, group = config.hidden_size, config.head_dim, config.num_kv_heads, config.group_size
    # Query head kv * G + g belongs to KV head kv, so [H, G, D] is a plain reshape of the file's rows.
    gated = config.output_gate
    counts = {"q_proj": 2 * group if gated else group, "k_proj": 1, "v_proj": 1}
    rotated = next((rope.rotated for rope in config.ropes if rope.rotated != 0), None)
    order = channel_order(dim, dim if rotated is None else rotated, family.interleaved)
    orders = (order, order, ()) if order else ()
    files = ["qkv_proj"] * 3 if family.fused_qkv else list(counts)
    leaves = [
        Leaf(f"{ours}/qkv/kernel", tuple(f"{theirs}.{name}.weight" for name in files),
             tuple((heads, count, dim, hidden) for count in counts.values()), axis=1, transpose=True, orders=orders,
             gated=gated),
        Leaf(f"{ours}/out/kernel", (f"{theirs}.o_proj.weight",), ((hidden, heads * group * dim),), transpose=True),
    ]  # fmt: skip
    if config.qkv_bias:
        leaves.append(Leaf(
            f"{ours}/qkv/bias", tuple(f"{theirs}.{name}.bias" for name in files),
            tuple((heads, count, dim) for count in counts.values()), axis=1, orders=orders,
        ))  # fmt: skip
    for ours_of, name, width, there in (("out_bias", "o_proj.bias", hidden, config.out_bias),
                                        ("sinks", "sinks", heads * group, config.attention_sinks)):  # fmt: skip
        if there:
            leaves.append(Leaf(f"{ours}/{ours_of}/bias", (f"{theirs}.{name}",), ((width,),)))
    for name, count in (("q_norm", group), ("k_norm", 1)):
        own, fold, axis = ("", (dim,), 0) if config.qk_norm else ("all_", (heads, count, dim), 1)
        if config.qk_norm or config.wide_qk_norm:
            leaves.append(Leaf(
                f"{ours}/{own}{name}/scale", (f"{theirs}.{name}.weight",), (fold,), axis, orders=orders[:1],
                offset=family.norm_offset,
            ))  # fmt: skip
    return leaves


def _mlp(config: ModelConfig, family: Family, layer: int) -> list[AnyLeaf]:
    """List the parameters of a layer's MLP, which may be experts."""
    ours, theirs = f"layers_{layer}/mlp", f"model.layers.{layer}"
    hidden, experts = config.hidden_size, config.experts
    if not config.mlp_gate:
        inner, block = config.intermediate_size, f"{theirs}.mlp"
        return [
            Leaf(f"{ours}/inner/kernel", (f"{block}.up_proj.weight",), ((inner, hidden),), transpose=True),
            Leaf(f"{ours}/down/kernel", (f"{block}.down_proj.weight",), ((hidden, inner),), transpose=True),
        ]
    if experts is None or layer not in experts.layers:
        count, inner = 0, config.intermediate_size
        files = ["gate_up_proj"] * 2 if family.fused_gate_up else ["gate_proj", "up_proj"]
        both = [f"{theirs}.mlp.{name}.weight" for name in files]
        down = [f"{theirs}.mlp.down_proj.weight"]
        leaves: list[AnyLeaf] = []
    elif family.expert_files:
        router, shape = f"{theirs}.{family.expert_files.router}", (experts.num_experts, hidden)
        stack = stacked(config, family.expert_files, layer)
        return [Leaf(f"{ours}/router/kernel", (router,), (shape,), transpose=True), *stack]
    else:
        count, inner = experts.num_experts, experts.intermediate_size
        qwen = (config.qk_norm or family.experts or experts.router is not None) and not family.mixtral_experts
        router, both, down = tensor_names(theirs, count, qwen)
        bias = router.removesuffix("gate.weight" if family.mixtral_experts else "weight") + "e_score_correction_bias"
        leaves = [Leaf(f"{ours}/router/kernel", (router,), ((count, hidden),), transpose=True)]
        leaves += _beside_experts(experts, hidden, ours, f"{theirs}.mlp", bias)
    return [
        *leaves,
        Leaf(f"{ours}/gate_up/kernel", tuple(both), ((inner, hidden),) * len(both), transpose=True, stack=count, pair=True),
        Leaf(f"{ours}/down/kernel", tuple(down), ((hidden, inner),) * len(down), transpose=True, stack=count),
    ]


def _beside_experts(experts: Experts, hidden: int, ours: str, theirs: str, router_bias: str) -> list[Leaf]:
    """List the bias of a router, and the parameters of the expert that every token uses."""
    inner, router = experts.shared_size, experts.router
    own = f"{theirs}.shared_expert" if router is None else f"{theirs}.shared_experts"
    both = tuple(f"{own}.{name}_proj.weight" for name in ("gate", "up"))
    bias = Leaf(f"{ours}/router/bias", (router_bias,), ((experts.num_experts,),))
    shared = [
        Leaf(f"{ours}/shared/gate_up/kernel", both, ((inner, hidden),) * 2, transpose=True, pair=True),
        Leaf(f"{ours}/shared/down/kernel", (f"{own}.down_proj.weight",), ((hidden, inner),), transpose=True),
    ]
    gate = Leaf(f"{ours}/shared_gate/kernel", (f"{own}_gate.weight",), ((1, hidden),), transpose=True)
    shared += [gate] * (router is None)
    return [bias] * (router is not None and router.score == "sigmoid") + shared * bool(inner)


def _latent_attention(config: ModelConfig, latent: Latent, ours: str, theirs: str) -> list[Leaf]:
    """List the parameters of a layer's latent attention."""
    hidden, heads, rank = config.hidden_size, config.num_q_heads, latent.query_rank
    wide = heads * latent.query_dim
    first, read = ("q_proj", wide) if rank is None else ("q_a_proj", rank)
    each = latent.key_dim + latent.value_dim
    leaves = [
        Leaf(f"{ours}/latents/kernel", (f"{theirs}.{first}.weight", f"{theirs}.kv_a_proj_with_mqa.weight"),
             ((read, hidden), (latent.width, hidden)), transpose=True),
        Leaf(f"{ours}/latent_norm/scale", (f"{theirs}.kv_a_layernorm.weight",), ((latent.rank,),)),
        Leaf(f"{ours}/up/kernel", (f"{theirs}.kv_b_proj.weight",), ((heads * each, latent.rank),), transpose=True),
        Leaf(f"{ours}/out/kernel", (f"{theirs}.o_proj.weight",), ((hidden, heads * latent.value_dim),), transpose=True),
    ]  # fmt: skip
    if rank is None:
        return leaves
    return [
        *leaves,
        Leaf(f"{ours}/query_norm/scale", (f"{theirs}.q_a_layernorm.weight",), ((rank,),)),
        Leaf(f"{ours}/query/kernel", (f"{theirs}.q_b_proj.weight",), ((wide, rank),), transpose=True),
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
