"""The families of models on the Hugging Face hub that compute what ours compute: their settings and names.

A family is a row of :data:`FAMILIES`. The conventions are the same (halves of a head's channels are turned as pairs,
matrices are stored (out, in)), so weights are renamed and not changed, but for one factor of two: where a family weighs
the expert for all tokens with a sigmoid, its gate is written as zero, which halves the output of any input exactly, and
the expert's last matrix is doubled, which is exact as well. Imports no torch.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.shapes import expert_layers, parameter_names


@dataclasses.dataclass(frozen=True, kw_only=True)
class Family:
    """How a family of models is written down on the hub."""

    model_type: str
    """Its name in ``config.json``."""
    architecture: str
    """Class of transformers that computes it."""
    has_experts: bool
    switches: Mapping[str, Any]
    """Settings of :class:`ModelConfig` that are the same in all models of the family."""
    settings: Mapping[str, str]
    """Our setting to the key of ``config.json``."""
    dense_layers: str = ""
    """Key that lists the layers without experts; none: there are no such layers."""
    shared_width: str = ""
    """Key of the inner width of the expert for all tokens; none: the family has no such expert."""
    shared_gate: str = ""
    """Their name of what weighs the expert for all tokens, a row (1, D) under a sigmoid."""
    defaults: Mapping[str, Any]
    """What an absent key of ``config.json`` means to transformers."""
    fixed: Mapping[str, tuple[Any, ...]]
    """Keys of ``config.json`` that must have one of these values, or be absent; the first is written."""
    parameters: Mapping[str, str]
    """Our parameter name to theirs: ``{layer}`` is the number of the block; with ``{expert}`` one of theirs is a slice
    of ours, which has the experts in its first dimension."""


_SETTINGS = {
    "num_layers": "num_hidden_layers",
    "dim": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "ffn_dim": "intermediate_size",
    "vocab_size": "vocab_size",
    "norm_eps": "rms_norm_eps",
    "init_std": "initializer_range",
    "tie_embeddings": "tie_word_embeddings",
}
ALIASES = {"num_experts": "num_local_experts"}
"""Keys of ``config.json`` that have another name in files of transformers 5."""
_EXPERT_SETTINGS = {"experts_per_token": "num_experts_per_tok", "router_aux_loss": "router_aux_loss_coef"}
_DEFAULTS = {
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": False,
    "head_dim": 0,
    "rope_theta": 10000.0,
    "router_aux_loss_coef": 0.001,
    "norm_topk_prob": False,
}
_ATTENTION = {
    "embed.weight": "model.embed_tokens.weight",
    "blocks.{layer}.attention_norm.weight": "model.layers.{layer}.input_layernorm.weight",
    "blocks.{layer}.attention.q.weight": "model.layers.{layer}.self_attn.q_proj.weight",
    "blocks.{layer}.attention.k.weight": "model.layers.{layer}.self_attn.k_proj.weight",
    "blocks.{layer}.attention.v.weight": "model.layers.{layer}.self_attn.v_proj.weight",
    "blocks.{layer}.attention.o.weight": "model.layers.{layer}.self_attn.o_proj.weight",
    "blocks.{layer}.ffn_norm.weight": "model.layers.{layer}.post_attention_layernorm.weight",
    "head.norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_QK_NORM = {
    "blocks.{layer}.attention.q_norm.weight": "model.layers.{layer}.self_attn.q_norm.weight",
    "blocks.{layer}.attention.k_norm.weight": "model.layers.{layer}.self_attn.k_norm.weight",
}
_FFN = {
    "blocks.{layer}.ffn.gate.weight": "model.layers.{layer}.mlp.gate_proj.weight",
    "blocks.{layer}.ffn.up.weight": "model.layers.{layer}.mlp.up_proj.weight",
    "blocks.{layer}.ffn.down.weight": "model.layers.{layer}.mlp.down_proj.weight",
}
_QWEN_EXPERTS = {
    "blocks.{layer}.ffn.router.weight": "model.layers.{layer}.mlp.gate.weight",
    "blocks.{layer}.ffn.expert_gate.weight": "model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight",
    "blocks.{layer}.ffn.expert_up.weight": "model.layers.{layer}.mlp.experts.{expert}.up_proj.weight",
    "blocks.{layer}.ffn.expert_down.weight": "model.layers.{layer}.mlp.experts.{expert}.down_proj.weight",
}
_SHARED_EXPERT = {
    "blocks.{layer}.ffn.shared.gate.weight": "model.layers.{layer}.mlp.shared_expert.gate_proj.weight",
    "blocks.{layer}.ffn.shared.up.weight": "model.layers.{layer}.mlp.shared_expert.up_proj.weight",
    "blocks.{layer}.ffn.shared.down.weight": "model.layers.{layer}.mlp.shared_expert.down_proj.weight",
}
_MIXTRAL_EXPERTS = {
    "blocks.{layer}.ffn.router.weight": "model.layers.{layer}.block_sparse_moe.gate.weight",
    "blocks.{layer}.ffn.expert_gate.weight": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w1.weight",
    "blocks.{layer}.ffn.expert_up.weight": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w3.weight",
    "blocks.{layer}.ffn.expert_down.weight": "model.layers.{layer}.block_sparse_moe.experts.{expert}.w2.weight",
}

FAMILIES = (
    Family(
        model_type="llama",
        architecture="LlamaForCausalLM",
        has_experts=False,
        switches={"qk_norm": False, "sliding_window": 0},
        settings=_SETTINGS,
        defaults=_DEFAULTS,
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "mlp_bias": (False,)},
        parameters=_ATTENTION | _FFN,
    ),
    Family(
        model_type="mistral",
        architecture="MistralForCausalLM",
        has_experts=False,
        switches={"qk_norm": False},
        settings={**_SETTINGS, "sliding_window": "sliding_window"},
        defaults={**_DEFAULTS, "sliding_window": 4096},
        fixed={"hidden_act": ("silu",)},
        parameters=_ATTENTION | _FFN,
    ),
    Family(
        model_type="qwen3",
        architecture="Qwen3ForCausalLM",
        has_experts=False,
        switches={"qk_norm": True, "sliding_window": 0},
        settings=_SETTINGS,
        defaults={**_DEFAULTS, "head_dim": 128},
        fixed={"hidden_act": ("silu",), "attention_bias": (False,), "use_sliding_window": (False,)},
        parameters=_ATTENTION | _QK_NORM | _FFN,
    ),
    Family(
        model_type="mixtral",
        architecture="MixtralForCausalLM",
        has_experts=True,
        switches={
            "qk_norm": False,
            "sliding_window": 0,
            "router_renormalize": True,
            "num_shared_experts": 0,
            "num_dense_layers": 0,
        },
        # There is no other feed-forward than the experts: the last row is what is written.
        settings={
            **_SETTINGS,
            **_EXPERT_SETTINGS,
            "num_experts": "num_local_experts",
            "expert_ffn_dim": "intermediate_size",
        },
        defaults={**_DEFAULTS, "rms_norm_eps": 1e-5, "rope_theta": 1e6},
        fixed={"hidden_act": ("silu",), "sliding_window": (None,)},
        parameters=_ATTENTION | _MIXTRAL_EXPERTS,
    ),
    Family(
        model_type="qwen3_moe",
        architecture="Qwen3MoeForCausalLM",
        has_experts=True,
        switches={"qk_norm": True, "sliding_window": 0, "num_shared_experts": 0},
        settings={
            **_SETTINGS,
            **_EXPERT_SETTINGS,
            "num_experts": "num_experts",
            "expert_ffn_dim": "moe_intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        dense_layers="mlp_only_layers",
        defaults=_DEFAULTS,
        fixed={
            "hidden_act": ("silu",),
            "attention_bias": (False,),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
        },
        parameters=_ATTENTION | _QK_NORM | _FFN | _QWEN_EXPERTS,
    ),
    Family(
        model_type="qwen2_moe",
        architecture="Qwen2MoeForCausalLM",
        has_experts=True,
        switches={"qk_norm": False, "sliding_window": 0},
        settings={
            **_SETTINGS,
            **_EXPERT_SETTINGS,
            "num_experts": "num_experts",
            "expert_ffn_dim": "moe_intermediate_size",
            "router_renormalize": "norm_topk_prob",
        },
        dense_layers="mlp_only_layers",
        shared_width="shared_expert_intermediate_size",
        shared_gate="model.layers.{layer}.mlp.shared_expert_gate.weight",
        defaults=_DEFAULTS,
        fixed={
            "hidden_act": ("silu",),
            "qkv_bias": (False,),
            "use_sliding_window": (False,),
            "decoder_sparse_step": (1,),
        },
        parameters=_ATTENTION | _FFN | _QWEN_EXPERTS | _SHARED_EXPERT,
    ),
)
"""The families that can be read and written."""


def family_of(cfg: ModelConfig) -> Family:
    """Return the family that a model belongs to.

    Raises:
        ConfigError: None computes what the model computes.

    Example:
        >>> family_of(ModelConfig(qk_norm=True)).architecture
        'Qwen3ForCausalLM'
    """
    different = {}
    for family in FAMILIES:
        if bool(cfg.num_experts) != family.has_experts:
            continue
        wanted = {name: str(value) for name, value in family.switches.items() if getattr(cfg, name) != value}
        if family.shared_width and not cfg.num_shared_experts:
            wanted["num_shared_experts"] = "1 or more"
        if not wanted:
            return family
        different[family.architecture] = ", ".join(f"model.{name} {value}" for name, value in wanted.items())
    needs = "; ".join(f"{name} needs {text}" for name, text in different.items())
    raise ConfigError(f"no family of the hub computes this model: {needs}. Train with these settings to export.")


def hub_names(family: Family, cfg: ModelConfig) -> dict[str, str | list[str]]:
    """Return the family's name of each of our parameters, or its names, one for each expert."""
    names: dict[str, str | list[str]] = {}
    for ours in parameter_names(cfg):
        layer = ours.split(".")[1]
        theirs = family.parameters[ours.replace(f"blocks.{layer}.", "blocks.{layer}.")]
        packed = [theirs.format(layer=layer, expert=expert) for expert in range(cfg.num_experts)]
        names[ours] = packed if "{expert}" in theirs else theirs.format(layer=layer)
    return names


def shared_gates(family: Family, cfg: ModelConfig) -> dict[str, str]:
    """Return the family's name of the gate of each expert for all tokens, by our name of its last matrix."""
    if not family.shared_gate:
        return {}
    return {f"blocks.{i}.ffn.shared.down.weight": family.shared_gate.format(layer=i) for i in expert_layers(cfg)}
