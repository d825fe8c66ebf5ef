"""``config.json`` of the Hugging Face hub: written for a model of ours, and read, with all that it may not say.

Imports no torch.
"""

import dataclasses
import json
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slipstream.config import ModelConfig
from slipstream.errors import CheckpointError, ConfigError, nearest
from slipstream.models.families import ALIASES, FAMILIES, Family, family_of
from slipstream.models.shapes import check_complete, expert_width, head_dim, shared_width

_ROPE_TABLES = ("rope_parameters", "rope_scaling")
_ROPE_KEYS = (*_ROPE_TABLES, "rope_theta", "partial_rotary_factor")
_KIND_NAMES = {int: "a whole number", float: "a number", bool: "true or false"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class HubConfig:
    """What a ``config.json`` says."""

    cfg: ModelConfig
    family: Family
    context_length: int
    """Most tokens that the model has learnt to see at once."""


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
    shared = {family.shared_width: shared_width(cfg)} if family.shared_width else {}
    return {
        "architectures": [family.architecture],
        "model_type": family.model_type,
        **{key: getattr(written, name) for name, key in family.settings.items()},
        **dense,
        **shared,
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


def read_hub_config(path: Path) -> HubConfig:
    """Read a ``config.json``.

    Raises:
        CheckpointError: It is missing, damaged, or lacks a size.
        ConfigError: The architecture, or something in it, is not supported.
    """
    config = read_json(path)
    family = _family_named(config, path)
    for key, allowed in family.fixed.items():
        if config.get(key, allowed[0]) not in allowed:
            raise ConfigError(
                f"{path}: {key} is {config[key]!r}, which is not supported for {family.model_type}. Allowed: "
                f"{' or '.join(map(repr, allowed))}."
            )
    _check_layer_types(config, path)
    kinds = typing.get_type_hints(ModelConfig)
    values = {name: _value(config, key, family, path, kind=kinds[name]) for name, key in family.settings.items()}
    if family.dense_layers:
        values["num_dense_layers"] = _num_dense_layers(config.get(family.dense_layers) or [], path, family)
    if family.shared_width:
        values["num_shared_experts"] = _num_shared(config, values["expert_ffn_dim"], path, family)
    cfg = ModelConfig(**values, **family.switches, rope_theta=_rope_theta(config, family, path))
    try:
        check_complete(cfg)
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from error
    # Sizes that follow from others are left to follow.
    if head_dim(cfg) * cfg.num_heads == cfg.dim:
        cfg = dataclasses.replace(cfg, head_dim=0)
    if cfg.expert_ffn_dim == cfg.ffn_dim:
        cfg = dataclasses.replace(cfg, expert_ffn_dim=0)
    length = _checked(config.get("max_position_embeddings", 2048), "max_position_embeddings", path, kind=int)
    if length < 1:
        raise ConfigError(f"{path}: max_position_embeddings is {length}; it must be 1 or more.")
    return HubConfig(cfg=cfg, family=family, context_length=length)


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        CheckpointError: There is none.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"cannot read {path}: {error.strerror}. Give the folder of a model.") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not JSON: {error}. Restore the file.") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{path} must hold a JSON object. Restore the file.")
    return content


def _value(config: Mapping[str, Any], key: str, family: Family, path: Path, *, kind: type) -> Any:
    value = config.get(key, config.get(ALIASES.get(key, key)))
    if value is None and key == "num_key_value_heads":
        value = config.get("num_attention_heads")
    if key == "sliding_window" and key in config and value is None:
        value = 0  # said to be none, which is not the same as not said
    value = family.defaults.get(key) if value is None else value
    if value is None:
        raise CheckpointError(f"{path} has no '{key}'. Give a whole config.json, as save_pretrained writes it.")
    return _checked(value, key, path, kind=kind)


def _checked(value: Any, key: str, path: Path, *, kind: type) -> Any:
    """Return a value as a type; JSON's true is no number here, and a whole number is one with a fraction as well."""
    if kind is float and type(value) is int:
        return float(value)
    if type(value) is not kind:
        raise CheckpointError(f"{path}: '{key}' must be {_KIND_NAMES[kind]}, given {value!r}. Restore the file.")
    return value


def _num_dense_layers(layers: Any, path: Path, family: Family) -> int:
    if not isinstance(layers, list) or sorted(map(repr, layers)) != sorted(map(repr, range(len(layers)))):
        raise ConfigError(
            f"{path}: {family.dense_layers} is {layers}. Supported are layers without experts only at the beginning."
        )
    return len(layers)


def _num_shared(config: Mapping[str, Any], width: int, path: Path, family: Family) -> int:
    given = _value(config, family.shared_width, family, path, kind=int)
    if width < 1 or given < 1 or given % width:
        raise ConfigError(
            f"{path}: {family.shared_width} is {given}. Supported is an expert for all tokens that is one or several "
            f"times as wide as the others, which have {width}."
        )
    return int(given // width)


def _check_layer_types(config: Mapping[str, Any], path: Path) -> None:
    kinds = config.get("layer_types")
    if kinds is None:
        return
    others = [kind for kind in kinds if kind != "full_attention"] if isinstance(kinds, list) else [kinds]
    if others:
        raise ConfigError(f"{path}: layer_types has {others[0]!r}. Supported is 'full_attention' in all layers.")


def _family_named(config: Mapping[str, Any], path: Path) -> Family:
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list):
        raise CheckpointError(f"{path}: 'architectures' must be a list, given {architectures!r}. Restore the file.")
    named = [*map(str, architectures), str(config.get("model_type", ""))]
    for family in FAMILIES:
        if family.architecture in named or (family.model_type in named and not architectures):
            return family
    given = next(filter(None, named), "none")
    raise ConfigError(
        f"{path}: the architecture '{given}' is not supported."
        f"{nearest(given, [family.architecture for family in FAMILIES])} Supported are {_supported()}."
    )


def _rope_theta(config: Mapping[str, Any], family: Family, path: Path) -> float:
    """Return the base of the rotary frequencies; anything else that is said of them is refused by name."""
    tables: dict[str, Any] = {key: config[key] for key in _ROPE_TABLES if config.get(key)}
    for key, given in tables.items():
        if not isinstance(given, dict):
            raise CheckpointError(f"{path}: '{key}' must be a table, given {given!r}. Restore the file.")
    if len(tables) == 2 and tables["rope_parameters"] != tables["rope_scaling"]:
        raise ConfigError(
            f"{path} has rope_parameters and another rope_scaling. Leave one of them, or give both alike."
        )
    where = next(iter(tables), "")
    table: Mapping[str, Any] = tables.get(where, {})
    kind = table.get("rope_type", table.get("type", "default"))
    if kind != "default":
        raise ConfigError(
            f"{path}: rotary positions of the type '{kind}' are not supported. Allowed: 'default', that is, no scaling."
        )
    others = {f"{where}.{key}": value for key, value in table.items() if key not in ("rope_type", "type", *_ROPE_KEYS)}
    others |= {key: value for key, value in config.items() if _is_of_rope(key) and key not in _ROPE_KEYS}
    for key, value in others.items():
        if value not in (None, False):
            raise ConfigError(f"{path}: {key} is {value!r}, a setting of rotary positions that is not supported.")
    for key in ("partial_rotary_factor", "rope_theta"):
        found = [place[key] for place in (table, config) if place.get(key) is not None]
        if len(found) == 2 and found[0] != found[1]:
            raise ConfigError(f"{path} has two values for {key}: {found[0]!r} and {found[1]!r}. Leave one of them.")
        if key == "partial_rotary_factor" and found and found[0] != 1:
            raise ConfigError(f"{path}: {key} is {found[0]!r}. Supported is 1.0: all channels of a head are turned.")
    theta = table.get("rope_theta", config.get("rope_theta"))
    return float(_checked(family.defaults["rope_theta"] if theta is None else theta, "rope_theta", path, kind=float))


def _is_of_rope(key: str) -> bool:
    return key.startswith("rope_") or "rotary" in key


def _supported() -> str:
    return ", ".join(f"{family.architecture} ({family.model_type})" for family in FAMILIES)
