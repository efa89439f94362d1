"""Which tensors of a Hugging Face checkpoint make each parameter, by family."""

from collections.abc import Mapping

from ...sizes.architecture import Architecture
from ...sizes.experts import Experts
from ...sizes.latent import Latent
from ...sizes.linear import LinearLayers
from .families import FAMILIES, INFERRED, ExpertFiles, Family, channel_order
from .leaf import AnyLeaf, Leaf, StackedLeaf

EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"


def checkpoint_table(config: Architecture) -> list[AnyLeaf]:
    """List every parameter of ``config``'s model with its file tensors, layer by layer."""
    hidden, family = config.hidden_size, FAMILIES.get(config.family, INFERRED["llama"])
    leaves: list[AnyLeaf] = [Leaf("embed/embedding", (EMBEDDING,), ((config.vocab_size, hidden),))]
    for layer in range(config.num_layers):
        ours, theirs = f"layers_{layer}", f"model.layers.{layer}"
        norms = [
            Leaf(f"{ours}/{norm}/scale", (f"{theirs}.{name}.weight",), ((hidden,),), offset=family.norm_offset)
            for norm, name in family.norms.items()
        ]
        if config.linear is not None and layer in config.linear.layers:
            leaves += _linear_attention(config.linear, hidden, layer, family.linear == "fused")
        else:
            leaves += _attention(config, family, layer)
        leaves += [*_mlp(config, family, layer), *norms]
    leaves.append(Leaf("final_norm/scale", ("model.norm.weight",), ((hidden,),), offset=family.norm_offset))
    if not config.tie_word_embeddings:
        leaves.append(Leaf("lm_head/embedding", (LM_HEAD,), ((config.vocab_size, hidden),)))
    return leaves


def _attention(config: Architecture, family: Family, layer: int) -> list[Leaf]:
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
        prefix, fold, axis = ("", (dim,), 0) if config.qk_norm else ("all_", (heads, count, dim), 1)
        if config.qk_norm or config.wide_qk_norm:
            leaves.append(Leaf(
                f"{ours}/{prefix}{name}/scale", (f"{theirs}.{name}.weight",), (fold,), axis, orders=orders[:1],
                offset=family.norm_offset,
            ))  # fmt: skip
    return leaves


def _mlp(config: Architecture, family: Family, layer: int) -> list[AnyLeaf]:
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
        stack = _stacked(config, family.expert_files, layer)
        return [Leaf(f"{ours}/router/kernel", (router,), (shape,), transpose=True), *stack]
    else:
        count, inner = experts.num_experts, experts.intermediate_size
        qwen = (config.qk_norm or family.experts or experts.router is not None) and not family.mixtral_experts
        router, both, down = _expert_tensors(theirs, count, qwen)
        bias = router.removesuffix("gate.weight" if family.mixtral_experts else "weight") + "e_score_correction_bias"
        leaves = [Leaf(f"{ours}/router/kernel", (router,), ((count, hidden),), transpose=True)]
        leaves += _beside_experts(experts, hidden, ours, f"{theirs}.mlp", bias)
    return [
        *leaves,
        Leaf(f"{ours}/gate_up/kernel", tuple(both), ((inner, hidden),) * len(both), transpose=True, stack=count, pair=True),
        Leaf(f"{ours}/down/kernel", tuple(down), ((hidden, inner),) * len(down), transpose=True, stack=count),
    ]


def _expert_tensors(layer: str, count: int, qwen: bool) -> tuple[str, list[str], list[str]]:
    """Name the file's tensors of one layer's experts.

    Returns:
        The router's tensor; gate and up of each expert in turn; down of each expert.
    """
    block = f"{layer}.mlp" if qwen else f"{layer}.block_sparse_moe"
    gate, up, down = ("gate_proj", "up_proj", "down_proj") if qwen else ("w1", "w3", "w2")
    each = [f"{block}.experts.{expert}" for expert in range(count)]
    return (
        f"{block}.gate.weight",
        [f"{one}.{name}.weight" for one in each for name in (gate, up)],
        [f"{one}.{down}.weight" for one in each],
    )


def _beside_experts(experts: Experts, hidden: int, ours: str, theirs: str, router_bias: str) -> list[Leaf]:
    """List the bias of a router, and the parameters of the expert that every token uses."""
    inner, router = experts.shared_size, experts.router
    block = f"{theirs}.shared_expert" if router is None else f"{theirs}.shared_experts"
    both = tuple(f"{block}.{name}_proj.weight" for name in ("gate", "up"))
    bias = Leaf(f"{ours}/router/bias", (router_bias,), ((experts.num_experts,),))
    shared = [
        Leaf(f"{ours}/shared/gate_up/kernel", both, ((inner, hidden),) * 2, transpose=True, pair=True),
        Leaf(f"{ours}/shared/down/kernel", (f"{block}.down_proj.weight",), ((hidden, inner),), transpose=True),
    ]
    gate = Leaf(f"{ours}/shared_gate/kernel", (f"{block}_gate.weight",), ((1, hidden),), transpose=True)
    shared += [gate] * (router is None)
    return [bias] * (router is not None and router.score == "sigmoid") + shared * bool(inner)


def _latent_attention(config: Architecture, latent: Latent, ours: str, theirs: str) -> list[Leaf]:
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


def _stacked(config: Architecture, files: ExpertFiles, layer: int) -> list[StackedLeaf]:
    """List the parameters of a layer's experts, without the router's kernel."""
    ours, theirs, experts = f"layers_{layer}/mlp", f"model.layers.{layer}", config.experts
    if experts is None:
        raise ValueError(f"model_type {config.family!r} has experts in every layer, got experts=None")
    count, hidden, inner = experts.num_experts, config.hidden_size, experts.intermediate_size

    def leaf(path: str, name: str, shape: tuple[int, ...], gates: str = "", turned: bool = False) -> StackedLeaf:
        return StackedLeaf(path=f"{ours}/{path}", names=(f"{theirs}.{name}",), shape=shape, gates=gates, turned=turned)

    leaves = [
        leaf("gate_up/kernel", files.gate_up, (count, hidden, 2, inner), files.gates, files.turned),
        leaf("down/kernel", files.down, (count, inner, hidden), "", files.turned),
    ]
    if files.clamped:
        router = files.router.removesuffix("weight") + "bias"
        leaves += [
            leaf("router_bias/bias", router, (count,)),
            leaf("gate_up_bias/bias", files.gate_up + "_bias", (count, 2, inner), files.gates),
            leaf("down_bias/bias", files.down + "_bias", (count, hidden)),
        ]
    return leaves


def _linear_attention(linear: LinearLayers, hidden: int, layer: int, fused: bool) -> list[Leaf]:
    """List the parameters of a layer with their tensors."""
    ours, theirs = f"layers_{layer}/linear", f"model.layers.{layer}.linear_attn"
    heads, group, key, value = linear.num_key_heads, linear.group, linear.key_dim, linear.value_dim
    qkv, width = (key, key, group * value), linear.conv_width

    def projection(name: str, files: list[str], rows: tuple[int, ...]) -> Leaf:
        if fused:
            files, rows = [f"in_proj_{name}"], (sum(rows),)
        names = tuple(f"{theirs}.{file}.weight" for file in files)
        folds = tuple((heads, count, 1, hidden) for count in rows)
        return Leaf(f"{ours}/{name}/kernel", names, folds, axis=1, transpose=True)

    return [
        projection("qkvz", ["in_proj_qkv"] * 3 + ["in_proj_z"], (*qkv, group * value)),
        projection("ba", ["in_proj_b", "in_proj_a"], (group, group)),
        Leaf(f"{ours}/conv/taps", (f"{theirs}.conv1d.weight",) * 3, tuple((heads, count, 1, width) for count in qkv), axis=1),
        Leaf(f"{ours}/decay/log_rate", (f"{theirs}.A_log",), ((heads * group,),)),
        Leaf(f"{ours}/decay/bias", (f"{theirs}.dt_bias",), ((heads * group,),)),
        Leaf(f"{ours}/norm/scale", (f"{theirs}.norm.weight",), ((value,),)),
        Leaf(f"{ours}/out/kernel", (f"{theirs}.out_proj.weight",), ((hidden, heads * group * value),), transpose=True),
    ]


def tensor_problems(expected: Mapping[str, tuple[int, ...]], actual: Mapping[str, tuple[int, ...]]) -> list[str]:
    """List the problems of a file's tensors, one line each: missing, unused, or of another shape than expected."""
    problems = [f"missing {name} {list(shape)}" for name, shape in expected.items() if name not in actual]
    for name, shape in actual.items():
        if name not in expected:
            problems.append(f"unused {name} {list(shape)}")
        elif shape != expected[name]:
            problems.append(f"misshaped {name}: got {list(shape)}, expected {list(expected[name])}")
    return problems
