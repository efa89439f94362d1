"""The methods as they are timed: the papers' budgets, variants that isolate a cost, and attention that does nothing."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from experiments.answering import Setting, paper_method
from kvjax import registry
from kvjax.decoding.layers import check_quantisable, layer_methods
from kvjax.protocol.method import Cost, Inputs, LayerMethod, LayerSpec
from kvjax.protocol.typing import pytree
from kvjax.wrappers import Pattern, Periodic, Prefill
from models import ModelConfig

_SENTENCE = 20  # tokens; every 20th token id ends a sentence


@dataclasses.dataclass(frozen=True)
class Variant:
    """A method with certain knobs, which is timed under a name of its own.

    Attributes:
        method: the method's name in the registry.
        knobs: further knobs, beside the knobs of `experiments.answering.paper_method`.
        budget: tokens per KV head, for a method whose paper states no single budget; 0 if the paper's budget applies.
        note: the cost that the variant isolates.
        interval: tokens between two evictions by `kvjax.wrappers.Periodic`; 0 if the method runs as it is.
        prompt: knobs of `kvjax.wrappers.Prefill`, which wraps the method's prefill; none without a wrapper.
    """

    method: str
    knobs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    budget: int = 0
    note: str = ""
    interval: int = 0
    prompt: Mapping[str, Any] = dataclasses.field(default_factory=dict)


# MInference's pattern of most heads. Random weights would scatter its diagonals over the whole prompt, as no model does. So
# all diagonals are next to the query: as many diagonals cost the same wherever they lie together.
_SPARSE = {"pattern": Pattern(columns=1000, diagonals=6096), "num_recent": 6096}
# To random weights all blocks are about alike, so a share of the attention takes the same share of the blocks. A tenth costs
# as much as on a text where a tenth of the blocks holds the chosen share of the attention.
_TENTH = {"block": 128, "window": 128}

VARIANTS = {
    "full": Variant("full"),
    "snapkv": Variant("snapkv", budget=1024),
    "quest": Variant("quest", budget=2048),
    "sentencekv": Variant("sentencekv", note=f"every {_SENTENCE}th token id ends a sentence"),
    "chess": Variant("chess", {"ratios": "aggressive", "trigger": "fixed", "interval": 6}, note="reconstructs every 6 pages"),
    "tokenselect": Variant("tokenselect", {"theta": 0.9}),
    "tokenselect_miss": Variant("tokenselect", {"theta": 2.0}, note="selects in every step"),
    "tokenselect_hit": Variant("tokenselect", {"theta": -1.0}, note="selects in the first step only"),
    "mosaickv": Variant("mosaickv", {"channels": 0.25, "fraction": 0.10}),
    "mosaickv_6": Variant("mosaickv", {"channels": 0.25, "fraction": 0.0625}, note="the paper's kernel setting"),
    "pariskv": Variant("pariskv"),
    "streamingllm": Variant("streamingllm", budget=1024),
    "h2o": Variant("h2o", budget=1024),
    "keydiff": Variant("keydiff", budget=1024),
    "tova": Variant("tova", budget=1024),
    "tovaonce": Variant("tovaonce", budget=1024),
    "pyramidkv": Variant("pyramidkv", budget=1024),
    "adakv": Variant("adakv", budget=1024),
    "duoattention": Variant("duoattention", note="half of the heads, those of lower scores, keep both ends of the prompt"),
    "kvzip": Variant("kvzip", budget=1024),
    "kvgrad": Variant("kvgrad", budget=1024),
    "attentionmatching": Variant("attentionmatching", budget=1024),
    "oracle": Variant("oracle", budget=1024, note="scores every key in float32: for its answers, not for speed"),
    "oracleeviction": Variant("oracleeviction", budget=1024),
    "headkv": Variant("headkv", budget=1024, note="every fourth head has five times the score of the others"),
    "knorm": Variant("knorm", budget=1024),
    "expectedattention": Variant("expectedattention", budget=1024),
    "observedattention": Variant("observedattention", budget=1024),
    "ntk": Variant("ntk", {"factor": 4.0}),
    "pi": Variant("pi", {"factor": 4.0}),
    "selfextend": Variant("selfextend", note="every key is rotated as it is read"),
    "rkv": Variant("rkv", budget=1024),
    "triattention": Variant("triattention", budget=1024),
    "snapkv_again": Variant("snapkv", budget=1024, note="evicts again after every 128 tokens", interval=128),
    "minference": Variant("full", note="prompt: 1000 columns by votes, the 6096 newest diagonals", prompt=_SPARSE),
    "minference_128": Variant("full", note="in blocks of 128 tokens", prompt={**_SPARSE, "block": 128}),
    "xattention": Variant(
        "full",
        note="prompt: blocks of 128 tokens with a tenth of the attention",
        prompt={**_TENTH, "pattern": Pattern("xattention", share=0.1)},
    ),
    "flexprefill": Variant(
        "full",
        note="prompt: blocks of 128 tokens with a tenth of the attention, by means",
        prompt={**_TENTH, "pattern": Pattern("flexprefill", share=0.1, tau=1.0)},
    ),
    "retrievalattention": Variant("retrievalattention", budget=2000, note="every key is compared"),
    "pqcache": Variant("pqcache", {"fraction": 0.1}),
    "socket": Variant("socket", budget=1024),
    "freekv": Variant("freekv", budget=1024, note="chooses pages by the previous query; nothing is fetched ahead"),
    "infinigen": Variant("infinigen", budget=1024, note="guesses queries from the layer before; nothing is fetched ahead"),
    "infllm": Variant("infllm"),
    "retroinfer": Variant("retroinfer", {"fraction": 0.018, "buffer": 1024}),
    "magicpig": Variant("magicpig", note="reads all keys, without a capacity"),
    "magicpig_8k": Variant("magicpig", {"capacity": 8192}, note="reads up to 8192 sampled tokens"),
    "shadowkv": Variant("shadowkv", budget=2048),
    "think": Variant("think"),
}


def budget_at(name: str, length: int) -> int:
    """Return a variant's tokens per KV head: its budget, at most a quarter of the context; 0 without a budget."""
    return min(VARIANTS[name].budget, length // 4)


def kv_dtype_of(name: str) -> str | None:
    """Return the ``kv_dtype`` in the name METHOD@KV_DTYPE of rows; None for a row in the dtype of the model."""
    return name.partition("@")[2] or None


def setting(name: str, length: int, config: ModelConfig, knobs: Mapping[str, Any] | None = None) -> Setting:
    """Make the variant at a context of ``length`` tokens. A budget above a quarter of the context becomes that quarter.

    Args:
        name: see `VARIANTS`; with or without a ``kv_dtype``, see `kv_dtype_of`.
        length: tokens of the prompt.
        config: the model.
        knobs: knobs that override the variant's.

    Raises:
        ValueError: an unknown name or knob, a value that the method refuses, or a ``kv_dtype`` on which it cannot run.
    """
    if (base := name.partition("@")[0]) not in VARIANTS:
        raise ValueError(f"unknown method {name!r}, expected one of {', '.join(VARIANTS)}")
    variant, knobs = VARIANTS[base], knobs or {}
    defaults = dict(variant.knobs)
    if variant.budget:
        defaults["budget"] = budget_at(base, length)
    if variant.method == "sentencekv":
        defaults["boundary"] = jnp.asarray(np.arange(config.vocab_size) % _SENTENCE == 0)
    if "scores" in registry.find(variant.method).__dataclass_fields__:
        defaults["scores"] = uneven_scores(config)
    paper = paper_method(variant.method, length, tokenizer=None, config=config, given={**defaults, **knobs})
    # `paper_method` notes a baseline's budget, which was replaced here; a variant's note tells knobs that may be replaced.
    notes = ["" if knobs.keys() & variant.knobs.keys() else variant.note, "" if variant.budget else paper.note]
    notes += [f"{knob}={value}" for knob, value in knobs.items() if (knob, value) != ("offload", False)]
    method: Any = Periodic(evict=paper.method, interval=variant.interval) if variant.interval else paper.method
    if variant.prompt:
        method = Prefill(method=method, **variant.prompt)
    check_quantisable(layer_methods(method, config), kv_dtype_of(name))
    return Setting(name, method, "; ".join(filter(None, notes)))


def uneven_scores(config: ModelConfig) -> tuple[tuple[float, ...], ...]:
    """Make scores in place of scores measured on a model: every fourth KV head has 5, all other heads have 1."""
    layers, heads = range(config.num_layers), range(config.num_kv_heads)
    return tuple(tuple(5.0 if (layer + head) % 4 == 0 else 1.0 for head in heads) for layer in layers)


def read_knobs(pairs: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Parse knobs by variant from texts ``variant.knob=value``.

    Raises:
        ValueError: a text without a dot before its equals sign, an unknown variant, or a value that the knob refuses.
    """
    knobs: dict[str, dict[str, Any]] = {}
    for pair in pairs:
        name, dot, rest = pair.partition(".")
        if not dot or "=" in name or name not in VARIANTS:
            raise ValueError(f"--set takes METHOD.KNOB=VALUE with a method of {', '.join(VARIANTS)}, got {pair!r}")
        knobs.setdefault(name, {}).update(registry.parse_knobs(VARIANTS[name].method, [rest]))
    return knobs


@pytree
class Nothing(LayerMethod):
    """Attention that stores nothing and answers with its query: a step takes the time of everything but the method."""

    def init(self, spec: LayerSpec) -> Array:
        return jnp.zeros((spec.batch,), jnp.int32)

    def attend(self, state: Array, inputs: Inputs) -> tuple[Array, Array]:
        # The output waits for all three; otherwise a compiler would leave out the projections that make them.
        out, _, _ = lax.optimization_barrier((inputs.query, inputs.key, inputs.value))
        return out, state

    def chosen(self, state: Array, inputs: Inputs) -> Array:
        return jnp.zeros((*inputs.key.shape[:2], 0), jnp.int32)

    def cost(self, state: Array, shared: None) -> Cost:
        none = jnp.zeros(state.shape, jnp.float32)
        return Cost(attended=none, kv_bytes=none, metadata_bytes=none, counters={})

    def room(self, state: Array) -> None:
        return None
