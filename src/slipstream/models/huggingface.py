"""Models as folders in the layout of the Hugging Face hub, read and written without transformers.

What is supported, and under which names, is in :mod:`slipstream.models.families`.
"""

import dataclasses
import json
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from slipstream.config import ModelConfig
from slipstream.errors import CheckpointError, ConfigError, nearest
from slipstream.models.families import ALIASES, FAMILIES, Family, family_of, hub_names
from slipstream.models.shapes import (
    check_complete,
    expert_width,
    head_dim,
    parameter_shapes,
    tied_names,
)

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Names the file of each weight where they are spread over several."""


def hub_config(cfg: ModelConfig, *, context_length: int, eos_id: int, dtype: str) -> dict[str, Any]:
    """Return the content of ``config.json`` for a model.

    Args:
        cfg: The model.
        context_length: Tokens of the sequences it was trained on.
        eos_id: Id that ends a document, and precedes one.
        dtype: Type of the weights, such as ``float32``.

    Raises:
        ConfigError: No family computes the model.

    Example:
        >>> config = hub_config(ModelConfig(vocab_size=257), context_length=128, eos_id=256, dtype="float32")
        >>> config["architectures"], config["hidden_size"], config["head_dim"]
        (['LlamaForCausalLM'], 128, 32)
    """
    check_complete(cfg)
    family = family_of(cfg)
    written = dataclasses.replace(cfg, head_dim=head_dim(cfg), expert_ffn_dim=expert_width(cfg))
    dense = {family.dense_layers: list(range(cfg.num_dense_layers))} if family.dense_layers else {}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(written, name) for name, key in family.settings.items()},
        **dense,
        **{key: allowed[0] for key, allowed in family.fixed.items()},
        "max_position_embeddings": context_length,
        # Both places: transformers 5 reads the table, earlier ones the key.
        "rope_theta": cfg.rope_theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": cfg.rope_theta},
        "bos_token_id": eos_id,
        "eos_token_id": eos_id,
        "dtype": dtype,
        "torch_dtype": dtype,
    }


def write_hub_model(
    folder: Path, cfg: ModelConfig, weights: Mapping[str, Tensor], *, context_length: int, eos_id: int
) -> None:
    """Write ``config.json``, ``generation_config.json`` and ``model.safetensors`` into a folder that exists.

    Args:
        folder: Where to.
        cfg: The model.
        weights: By our names, all of one type; a tied pair once.
        context_length: Tokens of the sequences it was trained on.
        eos_id: Id that ends a document, and precedes one.
    """
    dtype = str(next(iter(weights.values())).dtype).removeprefix("torch.")
    config = hub_config(cfg, context_length=context_length, eos_id=eos_id, dtype=dtype)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, {"bos_token_id": eos_id, "eos_token_id": eos_id, "do_sample": False})
    tied = tied_names(cfg)
    tensors: dict[str, Tensor] = {}
    for ours, theirs in hub_names(family_of(cfg), cfg).items():
        if ours not in tied:
            parts = [weights[ours]] if isinstance(theirs, str) else list(weights[ours])
            names = [theirs] if isinstance(theirs, str) else theirs
            # Copies: a slice shares the memory of all experts, which the format does not store.
            tensors |= {name: part.detach().clone().contiguous() for name, part in zip(names, parts, strict=True)}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model folder of the hub; reads weights one at a time.

    Args:
        folder: The folder.
        cfg: The model it holds.
        family: What it is an instance of.
        config: Parsed ``config.json``.
    """

    folder: Path
    cfg: ModelConfig
    family: Family
    config: Mapping[str, Any]

    @property
    def context_length(self) -> int:
        """Most tokens that the model has learnt to see at once."""
        return int(self.config.get("max_position_embeddings", 2048))

    @cached_property
    def _place(self) -> dict[str, Path]:
        index = self.folder / INDEX_FILE
        if index.is_file():
            return {name: self.folder / file for name, file in _read_json(index)["weight_map"].items()}
        path = self.folder / WEIGHTS_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}. Weights are read from safetensors alone; "
                "save the model again with transformers' save_pretrained."
            )
        with _opened(path) as file:
            return dict.fromkeys(file.keys(), path)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by our names, a tied pair once, in the type they are stored in.

        Raises:
            CheckpointError: One is missing, has another shape than ``config.json`` says, or there is one that the
                model has no place for.
        """
        names, tied = hub_names(self.family, self.cfg), tied_names(self.cfg)
        self._check_names(
            {name for theirs in names.values() for name in ([theirs] if isinstance(theirs, str) else theirs)}
        )
        weights: dict[str, Tensor] = {}
        for ours, shape in parameter_shapes(self.cfg).items():
            theirs = names[ours]
            if ours in tied:
                continue
            if isinstance(theirs, str):
                weights[ours] = self._read(theirs, shape)
            else:
                weights[ours] = torch.stack([self._read(name, shape[1:]) for name in theirs])
        return weights

    def _check_names(self, known: set[str]) -> None:
        # Rotary frequencies, which old files hold, follow from the config.
        unknown = sorted(name for name in self._place.keys() - known if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise CheckpointError(
                f"{self.folder} holds {len(unknown)} weights that a {self.family.model_type} model without biases and "
                f"adapters has no place for, such as {unknown[0]}. Nothing may be left out; use a model without them."
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._place:
            raise CheckpointError(f"{self.folder} has no weight '{name}', which its config.json asks for.")
        with _opened(self._place[name]) as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: the weight '{name}' has the shape {tuple(tensor.shape)}, config.json asks for "
                f"{shape}. The files belong to different models."
            )
        return tensor


def is_hub_model(folder: Path) -> bool:
    """Return whether a folder looks like one of the hub's."""
    return (folder / CONFIG_FILE).is_file()


def open_hub_model(folder: Path) -> HubModel:
    """Read what a model folder of the hub holds; no weights yet.

    Raises:
        CheckpointError: ``config.json`` is missing, damaged, or lacks a size.
        ConfigError: The architecture, or something in the config, is not supported.
    """
    path = folder / CONFIG_FILE
    config = _read_json(path)
    family = _family_named(config, path)
    for key, allowed in family.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"{path}: {key} is {config[key]!r}, which is not supported for {family.model_type}. Allowed: "
                f"{' or '.join(map(repr, allowed))}."
            )
    values = {name: _value(config, key, family, path) for name, key in family.settings.items()}
    if family.dense_layers:
        values["num_dense_layers"] = _num_dense_layers(config.get(family.dense_layers) or [], path, family)
    cfg = ModelConfig(**values, **family.switches, rope_theta=_rope_theta(config, family, path))
    # Sizes that follow from others are left to follow.
    if head_dim(cfg) * cfg.num_heads == cfg.dim:
        cfg = dataclasses.replace(cfg, head_dim=0)
    if cfg.expert_ffn_dim == cfg.ffn_dim:
        cfg = dataclasses.replace(cfg, expert_ffn_dim=0)
    check_complete(cfg)
    return HubModel(folder, cfg, family, config)


def _value(config: Mapping[str, Any], key: str, family: Family, path: Path) -> Any:
    value = config.get(key, config.get(ALIASES.get(key, key)))
    if value is None and key == "num_key_value_heads":
        value = config.get("num_attention_heads")
    value = family.defaults.get(key) if value is None else value
    if value is None:
        raise CheckpointError(f"{path} has no '{key}'. Give a whole config.json, as save_pretrained writes it.")
    return value


def _num_dense_layers(layers: list[int], path: Path, family: Family) -> int:
    if sorted(layers) != list(range(len(layers))):
        raise ConfigError(
            f"{path}: {family.dense_layers} is {layers}. Supported are layers without experts only at the beginning."
        )
    return len(layers)


def _family_named(config: Mapping[str, Any], path: Path) -> Family:
    named = [*config.get("architectures", []), config.get("model_type", "")]
    for family in FAMILIES:
        if family.architecture in named or (family.model_type in named and "architectures" not in config):
            return family
    given = named[0] or "none"
    raise ConfigError(
        f"{path}: the architecture '{given}' is not supported."
        f"{nearest(given, [family.architecture for family in FAMILIES])} Supported are {_supported()}."
    )


def _rope_theta(config: Mapping[str, Any], family: Family, path: Path) -> float:
    table = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"{path}: rotary positions of the type '{kind}' are not supported. Allowed: 'default', that is, no scaling."
        )
    return float(table.get("rope_theta", config.get("rope_theta", family.defaults["rope_theta"])))


def _supported() -> str:
    return ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Restore the file.") from error


def _read_json(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Give the folder of a model.") from error
    except ValueError as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Restore the file.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object. Restore the file.")
    return content


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
