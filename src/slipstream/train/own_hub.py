"""Models of Hugging Face transformers, trained as they are: its own modules on the pipeline. Extra ``hf``."""

import functools
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.errors import ConfigError
from slipstream.models.hub_config import read_hub_config
from slipstream.models.huggingface import CONFIG_FILE
from slipstream.models.llama import cross_entropy_sum
from slipstream.models.own import OwnModel


def own_causal_lm(folder: str | Path) -> OwnModel:
    """Return a model folder's ``AutoModelForCausalLM`` as a model of one's own.

    Batches hold token ids, (rows, positions), and as targets the ids one position on, -100 where none counts.

    Args:
        folder: Of the hub, dense and without a sliding window. It must be there in every process.

    Raises:
        CheckpointError: The folder's config.json cannot be read.
        ConfigError: The family is not supported here.
    """
    path = Path(folder).absolute()
    found = read_hub_config(path / CONFIG_FILE)
    if found.family.has_experts:
        raise ConfigError(
            f"{path}: {found.family.architecture} has experts, whose balance loss its own blocks do not hand on. Train "
            "it with `slipstream train --init-from-hf`, which has one."
        )
    if found.cfg.sliding_window:
        raise ConfigError(
            f"{path} has a sliding window of {found.cfg.sliding_window}, for which its own blocks need a mask. Train "
            "it with `slipstream train --init-from-hf`, which makes one."
        )
    return OwnModel(
        build=functools.partial(_load, str(path)),
        embed="model.embed_tokens",
        blocks="model.layers",
        head=("model.norm", "lm_head"),
        call_block=_call_layer,
        loss=cross_entropy_sum,
    )


def _load(folder: str) -> nn.Module:
    try:
        from transformers import AutoModelForCausalLM  # an extra, and slow to import
    except ImportError as error:
        raise ConfigError("transformers is not installed. Install the extra: pip install 'slipstream[hf]'.") from error
    # Without a mask of its own this attention is causal, which the plain one would not be.
    model: nn.Module = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    return model


def _call_layer(stage: nn.Module, layer: nn.Module, x_BTD: Tensor) -> Tensor:
    positions = torch.arange(x_BTD.shape[1], device=x_BTD.device).unsqueeze(0)
    rotary: Any = stage.get_submodule("model.rotary_emb")(x_BTD, positions)
    output: Any = layer(x_BTD, attention_mask=None, position_ids=positions, position_embeddings=rotary)
    out_BTD: Tensor = output[0] if isinstance(output, tuple) else output
    return out_BTD
