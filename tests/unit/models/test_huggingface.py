"""Model folders of the hub: names, settings, shapes, refusals. What transformers computes is in tests/parity."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slipstream.config import ModelConfig, load_toml
from slipstream.errors import CheckpointError, ConfigError, SlipstreamError
from slipstream.models import huggingface
from slipstream.models.families import FAMILIES, family_of, hub_names
from slipstream.models.huggingface import open_hub_model, write_hub_model
from slipstream.models.llama import whole_model
from slipstream.models.shapes import expert_layers, parameter_names, tied_names

VARIANTS = {
    "llama": {},
    "llama, tied": {"tie_embeddings": True},
    "llama, wide heads": {"head_dim": 12},
    "qwen3": {"qk_norm": True},
    "qwen3, wide heads, tied": {"qk_norm": True, "head_dim": 12, "tie_embeddings": True},
    "mixtral": {"num_experts": 3},
    "mixtral, wide heads, tied": {"num_experts": 3, "head_dim": 12, "tie_embeddings": True},
    "qwen3-moe": {"num_experts": 4, "qk_norm": True, "expert_ffn_dim": 12, "num_dense_layers": 1},
    "qwen3-moe, not renormalized": {"num_experts": 3, "qk_norm": True, "router_renormalize": False},
    "qwen2-moe": {"num_experts": 3, "num_shared_experts": 1, "expert_ffn_dim": 12},
    "qwen2-moe, two shared, tied": {
        "num_experts": 4,
        "num_shared_experts": 2,
        "num_dense_layers": 1,
        "head_dim": 12,
        "tie_embeddings": True,
    },
}


def model(**changes):
    sizes = {"num_layers": 2, "dim": 16, "num_heads": 4, "num_kv_heads": 2, "ffn_dim": 24, "vocab_size": 19}
    cfg = ModelConfig(**{**sizes, "init_std": 0.25, "rope_theta": 500.0, "norm_eps": 1e-4, **changes})
    weights = {name: tensor.detach() for name, tensor in whole_model(cfg).named_parameters()}
    return cfg, {name: tensor for name, tensor in weights.items() if name not in tied_names(cfg)}


def written(folder, **changes):
    cfg, weights = model(**changes)
    write_hub_model(folder, cfg, weights, context_length=32, eos_id=18)
    return cfg, weights


def edit(folder, **changes):
    path = folder / "config.json"
    config = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not ...}))


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_what_is_written_is_read_back_to_the_bit(tmp_path, changes):
    cfg, weights = written(tmp_path, **changes)
    back = open_hub_model(tmp_path)
    assert back.cfg == cfg
    assert back.context_length == 32
    read = back.weights()
    assert read.keys() == weights.keys()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


@pytest.mark.parametrize("changes", VARIANTS.values(), ids=VARIANTS)
def test_a_family_names_every_parameter_once(changes):
    cfg, _ = model(**changes)
    names = hub_names(family_of(cfg), cfg)
    assert list(names) == parameter_names(cfg)
    theirs = [name for each in names.values() for name in ([each] if isinstance(each, str) else each)]
    assert len(set(theirs)) == len(theirs)
    packed = [ours for ours, each in names.items() if not isinstance(each, str)]
    assert len(packed) == 3 * len(expert_layers(cfg))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"num_experts": 3, "router_renormalize": False}, "MixtralForCausalLM needs model.router_renormalize True"),
        ({"num_experts": 3, "num_shared_experts": 1, "qk_norm": True}, "needs model.num_shared_experts 0"),
        ({"num_experts": 3, "num_dense_layers": 1}, "Qwen2MoeForCausalLM needs model.num_shared_experts 1 or more"),
    ],
)
def test_a_model_of_no_family_is_told_what_it_lacks(changes, words):
    with pytest.raises(ConfigError, match=words):
        family_of(model(**changes)[0])


def test_a_tied_head_is_not_stored(tmp_path):
    written(tmp_path, tie_embeddings=True)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    assert json.loads((tmp_path / "config.json").read_text())["tie_word_embeddings"] is True


def test_a_tied_head_that_is_stored_all_the_same_is_passed_over(tmp_path):
    written(tmp_path, tie_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "head.weight" not in open_hub_model(tmp_path).weights()


def test_a_head_of_its_own_beside_a_config_that_ties_it_is_refused(tmp_path):
    written(tmp_path, tie_embeddings=True)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1.0
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"but the files hold another one\. Set tie_word_embeddings to false"):
        open_hub_model(tmp_path).weights()


def test_weights_spread_over_files_are_found_by_the_index(tmp_path):
    _, weights = written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    halves = {"a.safetensors": sorted(tensors)[::2], "b.safetensors": sorted(tensors)[1::2]}
    for file, names in halves.items():
        save_file({name: tensors[name] for name in names}, tmp_path / file)
    place = {name: file for file, names in halves.items() for name in names}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    read = open_hub_model(tmp_path).weights()
    assert all(torch.equal(read[name], weights[name]) for name in weights)


def test_each_file_is_opened_once_however_many_weights_are_read(tmp_path, monkeypatch):
    written(tmp_path, num_experts=3)
    opened = []
    real = huggingface.safe_open
    monkeypatch.setattr(huggingface, "safe_open", lambda path, **how: opened.append(path) or real(path, **how))
    open_hub_model(tmp_path).weights()
    assert opened == [tmp_path / "model.safetensors"]
    tensors = load_file(tmp_path / "model.safetensors")
    place = dict.fromkeys(tensors, "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": place}))
    open_hub_model(tmp_path).weights()
    assert opened == [tmp_path / "model.safetensors"] * 2


def test_rotary_base_is_read_from_either_place(tmp_path):
    written(tmp_path)
    edit(tmp_path, rope_theta=...)
    assert open_hub_model(tmp_path).cfg.rope_theta == 500.0
    edit(tmp_path, rope_theta=700.0, rope_parameters=...)
    assert open_hub_model(tmp_path).cfg.rope_theta == 700.0


def test_absent_keys_mean_what_they_mean_to_transformers(tmp_path):
    written(tmp_path)
    edit(tmp_path, rms_norm_eps=..., tie_word_embeddings=..., num_key_value_heads=..., head_dim=...)
    cfg = open_hub_model(tmp_path).cfg
    assert (cfg.norm_eps, cfg.tie_embeddings, cfg.num_kv_heads, cfg.head_dim) == (1e-6, False, 4, 0)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2"}, "'GPT2LMHeadModel' is not supported"),
        ({"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2"}, "Did you mean 'Qwen3ForCausalLM'"),
        ({"attention_bias": True}, "attention_bias is True"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rope_parameters": {"rope_type": "llama3", "rope_theta": 1e4}}, "type 'llama3' are not supported"),
        ({"rope_parameters": ..., "rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear' are not"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 2.0}}, "rope_parameters and another rope_scaling"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5"),
        ({"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.25}}, "partial_rotary_factor is 0.25"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "rope_parameters.full_attention is"),
        ({"rope_parameters": {"rope_theta": 500.0, "factor": 4.0}}, "rope_parameters.factor is 4.0"),
        ({"rope_local_base_freq": 1e4}, "rope_local_base_freq is 10000.0"),
        ({"rotary_pct": 0.25}, "rotary_pct is 0.25"),
        ({"rope_theta": 1e6}, "two values for rope_theta: 500.0 and 1000000.0"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"num_attention_heads": 5}, "model.num_heads is 5"),
        ({"architectures": None, "model_type": None}, "the architecture 'None' is not supported"),
    ],
)
def test_what_is_not_supported_is_named(tmp_path, changes, words):
    written(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(ConfigError) as raised:
        open_hub_model(tmp_path)
    assert words in str(raised.value)
    if "architectures" in changes:
        assert all(family.architecture in str(raised.value) for family in FAMILIES)


def test_layers_without_experts_must_come_first(tmp_path):
    written(tmp_path, num_experts=3, qk_norm=True)
    edit(tmp_path, mlp_only_layers=[1])
    with pytest.raises(ConfigError, match=r"mlp_only_layers is \[1\]"):
        open_hub_model(tmp_path)


def test_a_size_that_is_missing_is_named(tmp_path):
    written(tmp_path)
    edit(tmp_path, hidden_size=...)
    with pytest.raises(CheckpointError, match="has no 'hidden_size'"):
        open_hub_model(tmp_path)


def test_wrong_weights_are_named(tmp_path):
    written(tmp_path)
    edit(tmp_path, intermediate_size=32)
    with pytest.raises(CheckpointError, match=r"gate_proj.weight' has the shape \(24, 16\), .* \(32, 16\)"):
        open_hub_model(tmp_path).weights()
    edit(tmp_path, intermediate_size=24)
    tensors = load_file(tmp_path / "model.safetensors")
    bias = "model.layers.0.self_attn.q_proj.bias"
    save_file({**tensors, bias: torch.zeros(16)}, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=bias.replace(".", r"\.")):
        open_hub_model(tmp_path).weights()
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"has no weight 'model\.norm\.weight'"):
        open_hub_model(tmp_path).weights()
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(CheckpointError, match=r"cannot read .*model\.safetensors"):
        open_hub_model(tmp_path).weights()
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(CheckpointError, match="safetensors alone"):
        open_hub_model(tmp_path).weights()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"hidden_size": "16"}, "'hidden_size' must be a whole number, given '16'"),
        ({"hidden_size": 16.0}, "'hidden_size' must be a whole number, given 16.0"),
        ({"num_hidden_layers": [2]}, "'num_hidden_layers' must be a whole number"),
        ({"tie_word_embeddings": "no"}, "'tie_word_embeddings' must be true or false"),
        ({"rms_norm_eps": True}, "'rms_norm_eps' must be a number, given True"),
        ({"rope_parameters": [1]}, "'rope_parameters' must be a table"),
        ({"rope_theta": "ten", "rope_parameters": ...}, "'rope_theta' must be a number"),
        ({"rope_parameters": {"rope_theta": [1]}, "rope_theta": ...}, "'rope_theta' must be a number"),
        ({"max_position_embeddings": None}, "'max_position_embeddings' must be a whole number, given None"),
        ({"max_position_embeddings": -1}, "max_position_embeddings is -1"),
        ({"architectures": "LlamaForCausalLM"}, "'architectures' must be a list"),
    ],
)
def test_a_value_of_another_kind_is_named(tmp_path, changes, words):
    written(tmp_path)
    edit(tmp_path, **changes)
    with pytest.raises(SlipstreamError) as raised:
        open_hub_model(tmp_path)
    assert words in str(raised.value)
    assert "config.json" in str(raised.value)


@pytest.mark.parametrize("layers", [["0"], [[0]], {"0": 1}, [0, 0]])
def test_layers_without_experts_of_another_kind_are_refused(tmp_path, layers):
    written(tmp_path, num_experts=3, qk_norm=True)
    edit(tmp_path, mlp_only_layers=layers)
    with pytest.raises(ConfigError, match="mlp_only_layers is"):
        open_hub_model(tmp_path)


def test_no_architectures_leave_the_model_type(tmp_path):
    cfg, _ = written(tmp_path)
    edit(tmp_path, architectures=None)
    assert open_hub_model(tmp_path).cfg == cfg


@pytest.mark.parametrize("content", [{}, {"weight_map": ["a"]}, {"weight_map": {"a": 1}}])
def test_an_index_of_another_form_is_refused(tmp_path, content):
    written(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match="must have a table 'weight_map'"):
        open_hub_model(tmp_path).weights()


def test_whole_numbers_are_no_weights(tmp_path):
    written(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(CheckpointError, match=r"'model\.norm\.weight' is of the type torch\.int8"):
        open_hub_model(tmp_path).weights()


def test_a_shared_expert_with_a_learnt_gate_is_refused(tmp_path):
    written(tmp_path, num_experts=3, num_shared_experts=1)
    tensors = load_file(tmp_path / "model.safetensors")
    gate = "model.layers.1.mlp.shared_expert_gate.weight"
    assert tensors[gate].shape == (1, 16)
    tensors[gate][0, 3] = 0.1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"layers\.1\.mlp\.shared_expert_gate\.weight' is not zero"):
        open_hub_model(tmp_path).weights()


def test_a_shared_expert_of_another_width_is_refused(tmp_path):
    written(tmp_path, num_experts=3, num_shared_experts=1)
    edit(tmp_path, shared_expert_intermediate_size=25)
    with pytest.raises(ConfigError, match="shared_expert_intermediate_size is 25"):
        open_hub_model(tmp_path)


@pytest.mark.parametrize("config", sorted((Path(__file__).parents[3] / "configs").glob("**/*moe*.toml")), ids=str)
def test_every_shipped_mixture_has_a_family(config):
    if "grid" in config.read_text():
        pytest.skip("a grid")
    assert family_of(load_toml(config).model)


def test_a_window_is_of_one_family_and_refused_by_the_others(tmp_path):
    for name in ("mistral", "qwen3", "mixtral"):
        (tmp_path / name).mkdir()
    written(tmp_path / "mistral", sliding_window=5)
    assert json.loads((tmp_path / "mistral" / "config.json").read_text())["sliding_window"] == 5
    assert open_hub_model(tmp_path / "mistral").cfg.sliding_window == 5
    edit(tmp_path / "mistral", sliding_window=None)
    assert open_hub_model(tmp_path / "mistral").cfg.sliding_window == 0
    edit(tmp_path / "mistral", sliding_window=...)
    assert open_hub_model(tmp_path / "mistral").cfg.sliding_window == 4096, "what transformers takes it for"
    with pytest.raises(ConfigError, match=r"Qwen3ForCausalLM needs model\.sliding_window 0"):
        written(tmp_path / "qwen3", sliding_window=5, qk_norm=True)
    with pytest.raises(ConfigError, match=r"MixtralForCausalLM needs model\.sliding_window 0"):
        written(tmp_path / "mixtral", sliding_window=5, num_experts=3)
