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
from slipstream.errors import CheckpointError, ConfigError
from slipstream.models.families import family_of, hub_names, shared_gates
from slipstream.models.hub_config import HubConfig, hub_config, read_hub_config, read_json
from slipstream.models.shapes import parameter_shapes, tied_names

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
WEIGHTS_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
"""Names the file of each weight where they are spread over several."""


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
    family = family_of(cfg)
    _write_json(folder / CONFIG_FILE, config)
    _write_json(folder / GENERATION_FILE, {"bos_token_id": eos_id, "eos_token_id": eos_id, "do_sample": False})
    tied = tied_names(cfg)
    tensors: dict[str, Tensor] = {}
    gates = shared_gates(family, cfg)
    for ours, theirs in hub_names(family, cfg).items():
        if ours not in tied:
            weight = weights[ours] * 2 if ours in gates else weights[ours]
            parts = [weight] if isinstance(theirs, str) else list(weight)
            names = [theirs] if isinstance(theirs, str) else theirs
            # Copies: a slice shares the memory of all experts, which the format does not store.
            tensors |= {name: part.detach().clone().contiguous() for name, part in zip(names, parts, strict=True)}
    tensors |= {gate: weights[down].new_zeros(1, cfg.dim) for down, gate in gates.items()}
    save_file(tensors, folder / WEIGHTS_FILE, metadata={"format": "pt"})


@dataclasses.dataclass(frozen=True)
class HubModel:
    """A model folder of the hub; reads weights one at a time, from files that stay open as long as it is there.

    Args:
        folder: The folder.
        config: What its ``config.json`` says.
    """

    folder: Path
    config: HubConfig

    @property
    def cfg(self) -> ModelConfig:
        """The model it holds."""
        return self.config.cfg

    @property
    def context_length(self) -> int:
        """Most tokens that the model has learnt to see at once."""
        return self.config.context_length

    @cached_property
    def _holders(self) -> dict[str, Any]:
        """Open each file once: every opening reads the names of all its tensors."""
        index = self.folder / INDEX_FILE
        if index.is_file():
            files = read_json(index).get("weight_map")
            if not isinstance(files, dict) or not all(isinstance(file, str) for file in files.values()):
                raise CheckpointError(
                    f"{index} must have a table 'weight_map' that names the file of each weight. Restore the file."
                )
            opened = {file: _opened(self.folder / file) for file in sorted(set(files.values()))}
            return {name: opened[file] for name, file in files.items()}
        path = self.folder / WEIGHTS_FILE
        if not path.is_file():
            raise CheckpointError(
                f"{self.folder} has neither {WEIGHTS_FILE} nor {INDEX_FILE}. Weights are read from safetensors alone; "
                "save the model again with transformers' save_pretrained."
            )
        holder = _opened(path)
        return dict.fromkeys(holder.keys(), holder)

    def weights(self) -> dict[str, Tensor]:
        """Return all weights by our names, a tied pair once, in the type they are stored in.

        Raises:
            CheckpointError: One is missing, has another shape than ``config.json`` says, or there is one that the
                model has no place for.
        """
        family = self.config.family
        names, tied, gates = hub_names(family, self.cfg), tied_names(self.cfg), shared_gates(family, self.cfg)
        self._check_names(
            {name for theirs in names.values() for name in ([theirs] if isinstance(theirs, str) else theirs)}
            | set(gates.values())
        )
        weights: dict[str, Tensor] = {}
        for ours, shape in parameter_shapes(self.cfg).items():
            theirs = names[ours]
            if ours in tied:
                self._check_tied(str(theirs), str(names[tied[ours]]), shape)
                continue
            if isinstance(theirs, str):
                weights[ours] = self._read(theirs, shape)
            else:
                weights[ours] = torch.stack([self._read(name, shape[1:]) for name in theirs])
        for down, gate in gates.items():
            if self._read(gate, (1, self.cfg.dim)).any():
                raise ConfigError(
                    f"{self.folder}: '{gate}' is not zero. Supported is an expert for all tokens with a weight that is "
                    "the same for all of them, as in what was exported from here; a learnt gate has no place."
                )
            weights[down] = weights[down] / 2
        return weights

    def _check_tied(self, name: str, other: str, shape: tuple[int, ...]) -> None:
        """Refuse a weight of its own where the config says that it is another's: transformers would use it."""
        if name in self._holders and not torch.equal(self._read(name, shape), self._read(other, shape)):
            raise CheckpointError(
                f"{self.folder}: config.json says that '{name}' is '{other}' (tie_word_embeddings), but the files hold "
                "another one. Set tie_word_embeddings to false to keep it, or remove it from the files."
            )

    def _check_names(self, known: set[str]) -> None:
        # Rotary frequencies, which old files hold, follow from the config.
        unknown = sorted(name for name in self._holders.keys() - known if not name.endswith("rotary_emb.inv_freq"))
        if unknown:
            raise CheckpointError(
                f"{self.folder} holds {len(unknown)} weights that a {self.config.family.model_type} model without "
                f"biases and adapters has no place for, such as {unknown[0]}. Nothing may be left out; use a model "
                "without them."
            )

    def _read(self, name: str, shape: tuple[int, ...]) -> Tensor:
        if name not in self._holders:
            raise CheckpointError(f"{self.folder} has no weight '{name}', which its config.json asks for.")
        tensor: Tensor = self._holders[name].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{self.folder}: the weight '{name}' has the shape {tuple(tensor.shape)}, config.json asks for "
                f"{shape}. The files belong to different models."
            )
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"{self.folder}: the weight '{name}' is of the type {tensor.dtype}. Supported are numbers with a "
                "fraction, such as float32 or bfloat16; save the model unquantized."
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
    return HubModel(folder, read_hub_config(folder / CONFIG_FILE))


def _opened(path: Path) -> Any:
    try:
        return safe_open(path, framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {path}: {error}. Restore the file.") from error


def _write_json(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
