"""What no model can be, and what this decoder does not compute, is refused: a ValueError that names the field or the key."""

import dataclasses
import json
import re

import pytest

from models import Experts, LayerRope, LinearLayers, LinearScaling, LongRopeScaling, ModelConfig, RopeScaling
from models.sizes.experts import Clamp, Router
from models.sizes.latent import Latent
from tests.models.test_config_files import LLAMA3
from tests.models.test_families import edges, golden
from tests.models.test_latent import CONFIG as WITH_LATENT
from tests.models.test_latent import LATENT
from tests.tiny_models import HF, TINY

EXPERTS = {"num_experts": 8, "num_experts_per_tok": 3, "intermediate_size": 4, "norm_topk_prob": True, "layers": (0,)}
LINEAR = {"num_key_heads": 2, "num_value_heads": 4, "key_dim": 8, "value_dim": 6, "conv_width": 4, "layers": (0,)}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24, "num_experts": 4, "model_type": "qwen3_moe"}
NAN = float("nan")
NEAR, FAR = "sliding_attention", "full_attention"
ROPES = (LayerRope(theta=1e4),)


def rope(**fields):
    return ModelConfig.from_hf({**HF, "rope_scaling": {"rope_type": "yarn", "factor": 2.0, **fields}})


MAKERS = {  # with all fields but those that are wrong
    "config": lambda **x: ModelConfig(**{**TINY, **x}),
    "written": lambda **x: ModelConfig(**{**TINY, **x}).to_hf(),
    "with latent": lambda **x: dataclasses.replace(WITH_LATENT, **x),
    "experts": lambda **x: Experts(**{**EXPERTS, **x}),
    "router": Router,
    "latent": lambda **x: Latent(**{**vars(LATENT), **x}),
    "linear": lambda **x: LinearLayers(**{**LINEAR, **x}),
    "llama3": lambda **x: RopeScaling(**{**LLAMA3, **x}),
    "layer rope": lambda **x: LayerRope(**{"theta": 1e4, **x}),
    "rope": rope,
    "llama": lambda **x: ModelConfig.from_hf({**HF, **x}),
    "moe": lambda **x: ModelConfig.from_hf({**HF, **MOE, **x}),
    "qwen2": lambda **x: ModelConfig.from_hf(
        {**HF, "model_type": "qwen2", "num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64, **x}
    ),
}
VALUES = {  # maker -> field -> values that are refused
    "config": {
        "vocab_size": [0], "num_layers": [2.0], "max_position_embeddings": [None], "num_q_heads": [3], "head_dim": [15],
        "rms_norm_eps": [0.0], "rope_theta": [NAN], "rope_scaling": [{"factor": 8.0}], "dtype": ["float16"],
        "eos_token_ids": [[2], (2, 64)], "windows": [(8,), [8, 8], (None, 0)], "activation": ["relu"], "norm": ["batch"],
        "norm_place": ["around"], "query_scale": [0.0], "logit_softcap": ["30"], "residual_multiplier": [None],
        "embedding_multiplier": [NAN], "wide_qk_norm": [1], "family": ["bert", "llama"], "output_gate": [1],
        "ropes": [[*ROPES * 2], ROPES, (None, None), (LayerRope(theta=1e4, rotated=18),) * 2], "experts": [4],
        "linear": [(0,), LinearLayers(**{**LINEAR, "layers": (0, 1)}), LinearLayers(**{**LINEAR, "layers": (2,)})],
    },
    "with latent": {
        "latent": [3], "num_kv_heads": [2], "head_dim": [18], "qk_norm": [True], "attention_sinks": [True],
        "query_scale": [None], "ropes": [ROPES], "windows": [(4,)],
    },
    "experts": {
        "router": ["noaux"], "layers": [(1, 0)], "num_experts_per_tok": [9], "num_experts": ["4"],
        "norm_topk_prob": ["yes"],
    },
    "router": {"score": ["tanh"], "groups": [0], "groups_per_tok": [2], "multiplier": [-1.0]},
    "latent": {"rank": [0], "rotated": [5], "query_rank": [2.0], "interleaved": [1]},
    "linear": {
        "num_key_heads": [0], "key_dim": [8.0], "conv_width": [1], "num_value_heads": [3], "layers": [(1, 0), ()],
    },
    "llama3": {"factor": [0.5], "low_freq_factor": [4.0], "original_max_position_embeddings": [0]},
    "layer rope": {"theta": [0], "rotated": [3, -2], "scaling": ["linear"]},
    "rope": {
        "rope_type": ["axial"], "factor": [0.5, "2", NAN], "alpha": [1000.0], "truncate": [1],
        "original_max_position_embeddings": [6.5],
    },
    "llama": {
        "model_type": [None, "gpt2", "llama4_text"], "hidden_act": ["gelu"], "attention_bias": [True, "no"],
        "mlp_bias": [True], "quantization_config": [{"bits": 4}],
        "rope_parameters": [{FAR: {"rope_type": "default"}}, "x"],
        "partial_rotary_factor": [0.5], "dtype": ["float8_e4m3fn"], "rope_scaling": ["yarn"],
        "num_attention_heads": [0, "4", None], "num_key_value_heads": [0], "hidden_size": [True],
        "tie_word_embeddings": ["false"], "rope_theta": [NAN], "eos_token_id": [[1.5], [[1]]], "num_local_experts": [8],
    },
    "moe": {
        "num_experts": [None, 1, "4"], "moe_intermediate_size": [None], "num_local_experts": [8], "mlp_only_layers": [[2]],
        "decoder_sparse_step": [0], "norm_topk_prob": ["yes"], "n_shared_experts": [1],
    },
    "qwen2": {"sliding_window": [0, "64"], "layer_types": [3, [FAR], ["chunked_attention"] * 4]},
}  # fmt: skip
TOGETHER = [  # maker, fields that are wrong together, and what the message names
    ("config", {"qk_norm": True, "wide_qk_norm": True}, "wide_qk_norm"),
    ("config", {"activation": "gelu", "experts": Experts(**EXPERTS)}, "activation"),
    ("config", {"linear": LinearLayers(**LINEAR), "windows": (4, None)}, "window"),
    ("config", {"output_gate": True, "qkv_bias": True}, "output_gate"),
    ("experts", {"router": Router(), "clamp": Clamp()}, "clamp"),
    ("experts", {"router": Router(groups=3)}, "groups=3"),
    ("experts", {"router": Router(groups=4)}, "4 groups"),
    ("layer rope", {"rotated": 0, "scaling": LinearScaling(factor=2.0)}, "scaling"),
    ("rope", {"beta_fast": 1, "beta_slow": 2}, "beta_slow"),
    ("rope", {"rope_type": "default"}, "factor"),
    ("rope", {"rope_type": "linear", "factor": None}, "lacks factor"),
    ("rope", {"rope_type": "longrope"}, "short_factor"),
    ("rope", {"rope_type": "dynamic", "original_max_position_embeddings": 64}, "original_max_position_embeddings"),
    ("rope", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}, "long_factor"),
    ("rope", {"rope_type": "longrope", "short_factor": [1.0], "long_factor": [1.0, 2.0]}, "one length"),
    ("rope", {"rope_type": "longrope", "short_factor": 1.0, "long_factor": [1.0]}, "short_factor"),
    ("written", {"qk_norm": True, "qkv_bias": True}, "qkv_bias"),
    ("written", {"norm_place": "after"}, "norm_place"),
    ("written", {"experts": Experts(**{**EXPERTS, "layers": (1,)})}, "experts"),
]
LONG = LongRopeScaling(short_factor=(1.0,) * 6, long_factor=(2.0,) * 6, factor=2.0, original_max_position_embeddings=16)


@pytest.mark.parametrize("kind", VALUES)
def test_a_value_that_cannot_be_is_refused_by_its_name(kind):
    for field, values in VALUES[kind].items():
        for value in values:
            with pytest.raises(ValueError, match=rf"\b{field}\b") as caught:
                MAKERS[kind](**{field: value})
            assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("kind", "fields", "name"), TOGETHER)
def test_values_that_cannot_be_together_are_refused(kind, fields, name):
    with pytest.raises(ValueError, match=re.escape(name)):
        MAKERS[kind](**fields)


def test_longrope_has_a_factor_for_each_rotated_pair():
    assert MAKERS["config"](ropes=(LayerRope(theta=1e4, scaling=LONG, rotated=12),) * 2).ropes
    with pytest.raises(ValueError, match=re.escape("must have rotated / 2 = 8 numbers, got 6")):
        MAKERS["config"](ropes=(LayerRope(theta=1e4, scaling=LONG),) * 2)


FILES = {  # golden -> key of its config.json -> values that are refused
    "gemma3_text": {
        "attn_logit_softcapping": [50.0], "use_bidirectional_attention": [True],
        "model_type": ["gemma3", "qwen3_5", "hunyuan_v1_dense"], "layer_types": [[NEAR, FAR]], "sliding_window": [None, 0],
        "rope_parameters": [{"rope_theta": 1e4}, {FAR: {"rope_theta": 1e4}, NEAR: "x"}], "query_pre_attn_scalar": [0],
        "hidden_activation": ["relu6"], "vocab_size": [...],
    },
    "gpt_oss": {"quantization_config": [{"quant_method": "awq"}], "swiglu_limit": [0.0], "num_local_experts": [None]},
    "glm4_moe": {"topk_method": ["greedy"]},
    "minimax_m2": {
        "use_qk_norm": [False], "attn_type_list": [[1, 0, 1]], "scoring_func": ["softmax"],
    },
    "ernie4_5": {"use_bias": [True]},
    "olmoe": {"clip_qkv": [8.0]},
    "qwen2_moe": {"use_sliding_window": [True]},
    "granite": {"logits_scaling": ["8"], "mlp_bias": [True], "quantization_config": [{"bits": 4}]},
    "olmo2": {"attention_bias": [True]},
    "cohere": {"use_qk_norm": [True]},
    "smollm3": {"no_rope_layers": [[1]]},
    "phi3": {"rope_parameters": [{"partial_rotary_factor": 0.4}, {"rope_type": "x"}]},
    "glm4": {"rope_parameters": [{FAR: {"rope_theta": 1e4}}]},
    "deepseek_v2": {"norm_topk_prob": [True], "scoring_func": ["sigmoid"]},
    "deepseek_v3": {"topk_method": ["greedy"], "moe_layer_freq": [2], "attention_bias": [True]},
    "kimi_k2": {"quantization_config": [{"a": 1}]},
    "glm4_moe_lite": {"mlp_layer_types": [["dense"]]},
}  # fmt: skip
SPOKEN = {  # keys whose refusal names another word
    "swiglu_limit": "limit", "model_type": "encoder of images|norms of queries and keys after RoPE",
    "hidden_activation": "activation", "rope_parameters": "rope_parameters|partial_rotary_factor|rope_type",
}  # fmt: skip


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_asks_for_a_missing_part_is_refused(name):
    for key, values in FILES[name].items():
        for value in values:
            with pytest.raises(ValueError, match=SPOKEN.get(key, key)):
                ModelConfig.from_hf(edges(name, **{key: value}))


def test_keys_of_a_file_that_do_not_fit_each_other_are_refused():
    long = {**edges("phi4_longrope")["rope_parameters"], "partial_rotary_factor": 1.0}
    for name, change, part in (
        ("minimax_m2", {"rope_parameters": ..., "rotary_dim": 3}, "channels, got 3"),
        ("gemma3_text", {"layer_types": ..., "sliding_window_pattern": "LG"}, "sliding_window_pattern"),
        ("phi4_longrope", {"partial_rotary_factor": 1.0, "rope_parameters": long}, "= 4 numbers, got 3"),
    ):
        with pytest.raises(ValueError, match=part):
            ModelConfig.from_hf(edges(name, **change))
    with pytest.raises(ValueError, match="'qwen3' lacks vocab_size, hidden_size, .*num_key_value_heads"):
        ModelConfig.from_hf({"model_type": "qwen3"})
    with pytest.raises(TypeError, match="config.json, got str"):
        ModelConfig.from_hf("config.json")
    config = ModelConfig.from_hf(json.loads(str(golden("olmo2")["config"])))
    with pytest.raises(ValueError, match="no config.json of model_type 'olmo2' has logit_softcap=3.0"):
        dataclasses.replace(config, logit_softcap=3.0).to_hf()
