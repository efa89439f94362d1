"""config.json: every spelling is read as transformers reads it and written back; published ones have their parameters.

`tests/goldens/models/published.json` has what a config.json of the hub says, and the number of parameters of its weights. For
GLM-4.5, MiniMax-M2, OLMoE, Qwen1.5, Qwen3.5 and ERNIE it is the number of transformers' classes, with the biases of routers.
"""

import dataclasses
import json
import math

import jax.numpy as jnp
import pytest
from flax.traverse_util import flatten_dict

import kvjax
import models
from experiments.cli.main import main
from models import DynamicScaling, LayerRope, LinearScaling, LongRopeScaling, ModelConfig, YarnScaling, shapes
from models.files.hf.config import MODEL_TYPES
from models.files.tables import family_table
from models.files.tables.checkpoint import checkpoint_table
from models.files.tables.families import FAMILIES, MISSING
from models.sizes.experts import Experts
from tests import goldens, tiny_models
from tests.models.test_families import NAMES, edges, golden
from tests.tiny_models import HF, SCALING, TINY

PUBLISHED = json.loads((goldens.FOLDER / "models" / "published.json").read_text())
PRESETS = {  # numbers of parameters as the model cards and checkpoints have them
    "llama3_8b": 8_030_261_248, "llama31_8b": 8_030_261_248, "llama31_70b": 70_553_706_496, "llama32_1b": 1_235_814_400,
    "qwen3_8b": 8_190_735_360, "qwen3_4b": 4_022_468_096, "qwen3_0_6b": 596_049_920,
    "qwen25_7b": 7_615_616_512, "mistral_7b": 7_248_023_552, "yi_6b": 6_061_035_520,
    "deepseek_v2_lite": 15_706_484_224,
}  # fmt: skip
OLD = "original_max_position_embeddings"
LLAMA3 = {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, OLD: 16}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 3.0], "long_factor": [2, 3, 4, 5]}
YARN = YarnScaling(factor=4.0, original_max_position_embeddings=32)
LATER = YarnScaling(factor=4.0, original_max_position_embeddings=128)
LONG = LongRopeScaling(
    short_factor=(1.0, 1.5, 2.0, 3.0), long_factor=(2, 3, 4, 5), original_max_position_embeddings=32, factor=4.0
)
SWITCHED = {"num_hidden_layers": 4, "use_sliding_window": True, "sliding_window": 64}
MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 24}
GEMMA = "gemma3_text"
NEAR, FAR = "sliding_attention", "full_attention"


def experts(*layers, **fields):
    sizes = {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 24, "norm_topk_prob": False}
    return {"experts": Experts(**{**sizes, "layers": layers, **fields})}


def written(config):
    return json.loads(json.dumps(config.to_hf()))


def assert_is_written(config):
    """A config is the config of what is written, also for a reader of only one of the two keys of RoPE."""
    hf = written(config)
    assert ModelConfig.from_hf(hf) == config and hash(config)
    if {"rope_scaling", "rope_parameters"} <= hf.keys():
        for key in ("rope_scaling", "rope_parameters"):
            assert ModelConfig.from_hf({name: x for name, x in hf.items() if name != key}) == config, key


@pytest.mark.parametrize(
    ("name", "change", "expected"),  # a golden, or else the model type of a small file; ... takes a key away
    [
        ("llama", {}, {"head_dim": 8, "rope_theta": 10000.0, "tie_word_embeddings": False, "dtype": "float32"}),
        ("llama", {"head_dim": None, "num_key_value_heads": ...}, {"head_dim": 8, "num_kv_heads": 4}),
        ("qwen2", {}, {"qkv_bias": True}),
        ("qwen3", {}, {"qk_norm": True, "head_dim": 128}),
        # Every spelling of dtypes, ends of texts and rules of RoPE.
        ("llama", {"torch_dtype": "bfloat16", "eos_token_id": None}, {"dtype": "bfloat16", "eos_token_ids": ()}),
        ("llama", {"dtype": "bfloat16", "eos_token_id": 3}, {"dtype": "bfloat16", "eos_token_ids": (3,)}),
        ("llama", {"torch_dtype": "float16", "eos_token_id": [3, 5]}, {"dtype": "float32", "eos_token_ids": (3, 5)}),
        *(("llama", change, {"rope_theta": 500.0, "rope_scaling": SCALING}) for change in (
            {"rope_theta": 500.0, "rope_scaling": {"rope_type": "llama3", **LLAMA3}},
            {"rope_theta": 500.0, "rope_scaling": {"type": "llama3", **LLAMA3}},
            {"rope_parameters": {"rope_type": "llama3", "rope_theta": 500.0, **LLAMA3}},
            {"rope_theta": 500.0, "rope_parameters": {"rope_type": "llama3", **LLAMA3}},
        )),
        *(("llama", change, {"rope_scaling": rule, "max_position_embeddings": context}) for change, rule, context in (
            ({"rope_scaling": {"type": "linear", "factor": 4.0}}, LinearScaling(factor=4.0), 128),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.5}},
             DynamicScaling(factor=2.5, original_max_position_embeddings=128), 320),
            ({"rope_scaling": {"type": "yarn", "rope_type": "yarn", "factor": 4.0, OLD: 32}}, YARN, 128),
            # Qwen's model cards add the rule and leave the number of positions.
            ({"rope_scaling": {"type": "yarn", "factor": 4.0, OLD: 128}}, LATER, 512),
            ({"rope_scaling": {"type": "yarn", "factor": 4.0, "finetuned": True, "attention_factor": None}}, LATER, 512),
            ({"rope_scaling": {"rope_type": "longrope", **FACTORS, OLD: 32}}, LONG, 128),
            # Phi writes the old context beside the rule, and transformers prefers it there.
            ({OLD: 32, "rope_scaling": {"rope_type": "longrope", **FACTORS, OLD: 64}}, LONG, 128),
            # The rule of a model card in a file that transformers 5 saved.
            ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
              "rope_scaling": {"type": "yarn", "factor": 4.0}}, LATER, 512),
        )),
        ("llama", {"rope_parameters": {"rope_theta": 1e6}, "rope_scaling": {"type": "yarn", "factor": 4.0}},
         {"rope_theta": 1e6}),  # an added rule keeps the base
        *((kind, {"num_hidden_layers": 4, **change}, {"windows": windows}) for kind, change, windows in (
            ("mistral", {"sliding_window": 64}, (64,) * 4),
            ("mistral", {"max_position_embeddings": 8192}, (4096,) * 4),  # the default of transformers' class
            ("mistral", {"sliding_window": None}, ()),
            ("mistral", {"sliding_window": 128}, ()),  # never narrower than the context
            ("llama", {"sliding_window": 64}, ()),  # not a key of Llama's class
            ("qwen2", {**SWITCHED, "max_window_layers": 3}, (None, None, None, 64)),
            ("qwen2", {**SWITCHED, "max_window_layers": 0}, (64,) * 4),
            ("qwen2", {**SWITCHED, "max_window_layers": 4}, ()),
            ("qwen2", SWITCHED, ()),  # transformers' default is 28 layers
            ("qwen2", {**SWITCHED, "use_sliding_window": False, "max_window_layers": 0}, ()),
            ("qwen2", {**SWITCHED, "sliding_window": None, "max_window_layers": 0}, ()),
            # The list goes before the number.
            ("qwen3", {**SWITCHED, "max_window_layers": 0, "layer_types": [NEAR, FAR] * 2}, (64, None) * 2),
            ("qwen3", {**SWITCHED, "layer_types": [FAR] * 4}, ()),
        )),
        *(("qwen3_moe", {**MOE, **change}, expected) for change, expected in (
            ({"num_experts": 4}, {**experts(0, 1), "qk_norm": True}),
            ({"num_local_experts": 4}, experts(0, 1)),
            ({"num_experts": 4, "num_local_experts": 4, "mlp_only_layers": [0]}, experts(1)),
            ({"num_experts": 4, "decoder_sparse_step": 2}, experts(1)),
            ({"num_experts": 0}, {"experts": None}),
            ({"num_experts": 4, "mlp_only_layers": [0, 1]}, {"experts": None}),
            ({"num_experts": 4, "mlp_only_layers": None, "decoder_sparse_step": 3, "num_hidden_layers": 7}, experts(2, 5)),
        )),
        *(("mixtral", {"num_experts_per_tok": 2, key: 4},
           {**experts(0, 1, intermediate_size=48, norm_topk_prob=True), "rope_theta": 1e6, "rms_norm_eps": 1e-5})
          for key in ("num_experts", "num_local_experts")),  # with the defaults of Mixtral's class
        # Files of transformers 4: a pattern, a second base, and a rule that only full layers have.
        (
            "gemma3_text",
            {
                "layer_types": ..., "sliding_window_pattern": 3, "rope_parameters": ..., "rope_theta": 1e6,
                "rope_local_base_freq": 5e3, "rope_scaling": {"rope_type": "linear", "factor": 8.0},
            },
            {
                "windows": (6, 6, None), "rope_theta": 1e6, "rope_scaling": LinearScaling(factor=8.0),
                "ropes": (LayerRope(theta=5e3),) * 2 + (LayerRope(theta=1e6, scaling=LinearScaling(factor=8.0)),),
            },
        ),
        (GEMMA, {"query_pre_attn_scalar": ..., "head_dim": ...}, {"head_dim": 256, "query_scale": None}),
        (GEMMA, {"query_pre_attn_scalar": 64}, {"query_scale": 0.125, "embedding_multiplier": 4.0}),
        ("gemma2", {"layer_types": ..., "final_logit_softcapping": ...}, {"windows": (6, None, 6), "logit_softcap": 30.0}),
        ("gemma2", {"attn_logit_softcapping": ...}, {"attention_softcap": 50.0}),
        ("gemma2", {"attn_logit_softcapping": None}, {"attention_softcap": None}),
        ("olmo3", {"layer_types": ..., "sliding_window": ...}, {"windows": (4096,) * 3}),
        ("olmo3", {"rope_parameters": ..., "rope_theta": ...}, {"ropes": (), "rope_theta": 5e5}),
        (
            "smollm3",
            {"no_rope_layers": ..., "no_rope_layer_interval": ..., "num_hidden_layers": 4, "rope_parameters": ...},
            {"ropes": (LayerRope(theta=2e6),) * 3 + (LayerRope(theta=2e6, rotated=0),)},
        ),
        ("smollm3", {"use_sliding_window": True, "sliding_window": 5, "layer_types": ...}, {"windows": (None, 5, None)}),
        ("phi3", {"sliding_window": 64}, {"windows": ()}),  # never narrower than the context
        ("phi3", {"rope_parameters": {"rope_theta": 1e4}, "partial_rotary_factor": 0.25},
         {"ropes": (LayerRope(theta=1e4, rotated=2),) * 3}),
        ("glm4", {"rope_parameters": ..., "rope_theta": 1e4}, {"ropes": (LayerRope(theta=1e4, rotated=4),) * 3}),
        ("glm4", {"attention_bias": ...}, {"qkv_bias": True}),
        ("granite", {"attention_multiplier": 8**-0.5, "logits_scaling": ...},
         {"query_scale": None, "logits_multiplier": 1.0}),
        ("cohere2", {"layer_types": ..., "sliding_window_pattern": 2}, {"windows": (6, None, 6)}),
        ("exaone4", {"sliding_window": None, "layer_types": ...}, {"windows": (), "ropes": ()}),
        ("gpt_oss", {"layer_types": ..., "sliding_window": ...}, {"windows": (128, None, 128), "out_bias": True}),
        ("gpt_oss", {"quantization_config": {"quant_method": "mxfp4"}}, {"attention_sinks": True}),
        ("gpt_oss", {"attention_bias": False, "rope_parameters": ...}, {"qkv_bias": False, "out_bias": False}),
        ("seed_oss", {"attention_bias": False}, {"qkv_bias": False, "out_bias": True}),
        ("glm4_moe", {"rope_parameters": ..., "use_qk_norm": ...}, {"ropes": (LayerRope(theta=1e4, rotated=4),) * 3,
                                                                    "qk_norm": False}),
        ("minimax_m2", {"rope_parameters": ..., "rotary_dim": 2}, {"ropes": (LayerRope(theta=5e6, rotated=2),) * 3}),
        ("minimax_m2", {"use_qk_norm": True, "attn_type_list": [1] * 3, "scoring_func": "sigmoid"}, {"wide_qk_norm": True}),
        ("qwen2_moe", {"qkv_bias": False}, {"qkv_bias": False}),
    ],
)  # fmt: skip
def test_a_file_is_read_as_transformers_reads_it(name, change, expected):
    """Absent keys have the defaults of transformers' classes, and older keys are known."""
    hf = edges(name, **change) if name in NAMES else {**HF, "model_type": name, **change}
    config = ModelConfig.from_hf({key: x for key, x in hf.items() if x is not ...})
    assert {field: vars(config)[field] for field in expected} == expected
    assert_is_written(config)


@pytest.mark.parametrize("name", NAMES)
def test_a_family_has_the_tensors_and_parameters_of_its_golden(name):
    config = ModelConfig.from_hf(edges(name))
    assert config.family == edges(name)["model_type"]
    assert_is_written(config)
    table = checkpoint_table(config)
    files = {part: list(leaf.file_shape(i)) for leaf in table for i, part in enumerate(leaf.names)}
    assert files == json.loads(str(golden(name)["shapes"]))
    params = flatten_dict(models.param_shapes(config), sep="/")
    assert {leaf.path: leaf.shape for leaf in table} == {path: leaf.shape for path, leaf in params.items()}


@pytest.mark.parametrize("name", [*tiny_models.FAMILIES, *PRESETS, *PUBLISHED])
def test_a_config_has_its_parameters_and_is_written(name):
    """The published number of parameters, of the files' tensors; each is a parameter of the model."""
    if name in PUBLISHED:
        config, count = ModelConfig.from_hf(PUBLISHED[name]["config"], "bfloat16"), PUBLISHED[name]["parameters"]
    elif name in PRESETS:
        config, count = vars(shapes)[name](), PRESETS[name]
        assert (config.dtype, vars(shapes)[name]("float32").dtype) == ("bfloat16", "float32")
    else:
        config, count = tiny_models.FAMILIES[name], None
    table = checkpoint_table(config)
    if count is not None:
        assert sum(math.prod(leaf.shape) for leaf in table) == count
    assert_is_written(config)
    kinds = {"qwen2": "qwen2", "qwen25_7b": "qwen2", "untiled_heads": "mistral"}
    if not config.family and name not in PUBLISHED:
        assert written(config)["model_type"] == kinds.get(name, "qwen3" if name.startswith("qwen3") else "llama")
    if name in ("llama32_1b", *tiny_models.FAMILIES):
        params = flatten_dict(models.param_shapes(config), sep="/")  # eval_shape: nothing is allocated
        assert {leaf.path: leaf.shape for leaf in table} == {path: leaf.shape for path, leaf in params.items()}
        assert {leaf.dtype for leaf in params.values()} == {jnp.dtype(config.dtype)}


def test_a_published_latent_is_read():
    """A token has one key of 576 numbers in each layer, and its position."""
    config = ModelConfig.from_hf(PUBLISHED["deepseek-v2-lite"]["config"], "bfloat16")
    assert config == dataclasses.replace(shapes.deepseek_v2_lite(), eos_token_ids=())
    needed = kvjax.memory_needed("full", config, batch=1, prompt_slots=1024, max_new_tokens=1024)
    assert needed.device == pytest.approx(config.num_layers * 2048 * (2 * 576 + 4), rel=1e-4)


@pytest.mark.parametrize("change", [{"rope_theta": 1e4}, {"rope_type": "linear"}, {"factor": 8.0}, {OLD: 64}])
def test_two_keys_for_the_rotation_must_agree(change):
    rule = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e6, OLD: 32}
    same = ModelConfig.from_hf({**HF, "rope_parameters": rule, "rope_scaling": rule})
    assert same.rope_scaling == YARN and same.rope_theta == 1e6
    with pytest.raises(ValueError, match=f"rope_parameters and rope_scaling differ.*{next(iter(change))}"):
        ModelConfig.from_hf({**HF, "rope_parameters": rule, "rope_scaling": rule | change})


def test_keys_that_contradict_each_other_are_refused():
    """Ends of a text in two places are joined."""
    for change, named in (
        ({"dtype": "float32", "torch_dtype": "bfloat16"}, "dtype='float32' and torch_dtype='bfloat16'"),
        ({"rope_scaling": {"type": "yarn", "rope_type": "linear", "factor": 2.0}}, "'yarn' and 'linear'"),
        ({"model_type": "qwen2", "use_sliding_window": False, "layer_types": [NEAR, FAR]}, "use_sliding_window=false"),
    ):
        with pytest.raises(ValueError, match=named):
            ModelConfig.from_hf({**HF, **change})
    inner = {**edges(GEMMA), "eos_token_id": 1, "tie_word_embeddings": True}
    whole = {"model_type": "gemma3", "text_config": inner, "eos_token_id": [3, 1]}
    assert ModelConfig.from_hf(whole).eos_token_ids == (3, 1)
    with pytest.raises(ValueError, match="text_config .* tie_word_embeddings=True and False"):
        ModelConfig.from_hf({**whole, "tie_word_embeddings": False})


TWO = (  # a file; two ways to say one thing, and what contradicts the first
    ("gemma2", {"hidden_activation": "silu"}, {"hidden_act": "silu"}, {"hidden_act": "gelu_pytorch_tanh"}),
    ("gemma2", {"sliding_window": 4}, {"sliding_window_size": 4}, {"sliding_window_size": 6}),
    ("gpt_oss", {"num_experts_per_tok": 2}, {"experts_per_token": 2}, {"experts_per_token": 1}),
    ("gpt_oss", {"num_local_experts": 4}, {"num_experts": 4}, {"num_experts": 8}),
    ("glm4_moe", {"n_routed_experts": 8}, {"num_local_experts": 8}, {"num_local_experts": 16}),
    ("minimax_m2", {"rotary_dim": 4}, {"partial_rotary_factor": 0.5}, {"partial_rotary_factor": 0.25}),
)


@pytest.mark.parametrize(("name", "first", "second", "other"), TWO, ids=lambda x: "" if isinstance(x, str) else [*x][0])
def test_two_keys_of_one_thing_must_agree(name, first, second, other):
    hf = {key: value for key, value in edges(name).items() if key not in {*first, *second, "rope_parameters"}}
    assert ModelConfig.from_hf(hf | first | second) == ModelConfig.from_hf(hf | first)
    with pytest.raises(ValueError, match=next(iter(first))):
        ModelConfig.from_hf(hf | first | other)


def test_windows_in_some_layers_need_a_family_that_has_them():
    with pytest.raises(ValueError, match="layer_types.*full_attention"):
        ModelConfig.from_hf({**HF, "model_type": "mistral", **SWITCHED, "layer_types": ["full_attention"] * 4})
    config = ModelConfig(**TINY, windows=(8, 8))
    assert config.to_hf()["model_type"] == "mistral" and ModelConfig.from_hf(config.to_hf()) == config
    for windows, more in (((8, None), {}), ((9, 8), {"qk_norm": True})):
        with pytest.raises(ValueError, match="no config.json of model_type .* has windows="):
            ModelConfig(**TINY, **more, windows=windows).to_hf()


STRANGE = (
    *(None, True, False, 0, -1, 1.5, float("nan"), float("inf"), 10**30, 10**400, 1e-300, 1e300, "", "4"),
    *([], [1], [[1]], ["x"]),
    *({}, {"a": 1}, {"rope_type": 3}, {"rope_type": "llama3", "factor": []}, {"rope_theta": "x"}, {FAR: 3}),
    *({FAR: [], NEAR: {}}, {"partial_rotary_factor": 1e300}, {FAR: {"rope_theta": 1e4}, NEAR: {"partial_rotary_factor": []}}),
)
OLDER = {  # types that are no rows of the table, with the keys that they read
    **HF, "use_sliding_window": True, "sliding_window": None,
    **dict.fromkeys((
        "head_dim", "rms_norm_eps", "hidden_act", "rope_theta", "rope_parameters", "rope_scaling", "layer_types",
        "max_window_layers", "tie_word_embeddings", "attention_bias", "mlp_bias", "torch_dtype", "dtype", "eos_token_id",
        "quantization_config", "partial_rotary_factor",
    ), ...),
}  # fmt: skip


KINDS = {edges(name)["model_type"]: name for name in NAMES}  # one golden of each type


@pytest.mark.parametrize("name", [*KINDS.values(), "llama", "mistral", "qwen2", "qwen3"])
def test_any_json_value_is_read_or_refused_by_a_sentence(name):
    """No value of a key that a family reads ends in another error than ValueError; what is read can be written."""
    older = name not in NAMES
    hf = {key: x for key, x in OLDER.items() if x is not ...} | {"model_type": name} if older else edges(name)
    keys = OLDER if older else {*hf, *FAMILIES[hf["model_type"]].defaults, "layer_types", "no_rope_layers"}
    for key in keys:
        for value in STRANGE:
            try:
                config = ModelConfig.from_hf({**hf, key: value})
            except ValueError:
                continue
            assert hash(config) and ModelConfig.from_hf(json.loads(json.dumps(config.to_hf()))) == config, (key, value)


def test_every_type_has_a_row_a_golden_and_named_parts():
    assert not MISSING.keys() & {*FAMILIES, *MODEL_TYPES}
    assert KINDS.keys() == FAMILIES.keys(), "every family has a golden"
    rows = {row.model_type: row for row in family_table.rows()}
    assert tuple(rows) == MODEL_TYPES
    assert not rows["llama"].parts and all(rows[kind].parts for kind in FAMILIES)
    assert len({row.parts for row in rows.values()}) >= len(rows) - 3, "parts tell families apart"


def test_ls_families_lists_what_loads_and_what_does_not(capsys):
    assert main(["ls", "families"]) == 0
    text = capsys.readouterr().out
    for row in family_table.rows():
        assert f"{row.model_type}  [{row.models}]" in text
    for kind, part in MISSING.items():
        assert f"{kind} is refused: this decoder does not have {part}" in text
    assert main(["ls", "families", "--json"]) == 0
    assert [entry["model_type"] for entry in json.loads(capsys.readouterr().out)] == list(MODEL_TYPES)
