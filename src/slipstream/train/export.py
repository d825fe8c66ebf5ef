"""A run as a model folder of the Hugging Face hub, compared with transformers where it is installed."""

import dataclasses
import importlib.util
import math
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from slipstream import __version__
from slipstream.data.hub_tokenizer import write_hub_tokenizer
from slipstream.data.text_checks import PROBE_TEXT
from slipstream.errors import CheckpointError, ConfigError
from slipstream.executor import Point
from slipstream.folders import whole_folder
from slipstream.models.families import family_of
from slipstream.models.huggingface import write_hub_model
from slipstream.models.shapes import num_parameters
from slipstream.staleness.words import delay_words
from slipstream.train.checkpoint import open_checkpoint, step_folder
from slipstream.train.rundir import RunDir
from slipstream.train.trained import NEWEST, TrainedModel, open_trained, run_config

LARGEST_DIFFERENCE = 1e-2
"""Of logits in float32; rounding alone stays far below, another computation goes far beyond."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Export:
    """What was written."""

    folder: Path
    step: int
    files: tuple[str, ...]
    max_abs_logit_difference: float | None
    """Between transformers' model and ours, in float32; ``None``: transformers is not installed."""


def export_hub(run: str | Path, out: str | Path, *, weights: Point = "x", checkpoint: str = NEWEST) -> Export:
    """Write a checkpoint of a run as a model folder that transformers reads.

    Args:
        run: Run directory.
        out: Folder to make; must not exist.
        weights: ``x``, which was trained on, or ``y``, the optimizer's own.
        checkpoint: ``newest``, ``best`` by validation loss, or a step.

    Raises:
        CheckpointError: There is no such complete checkpoint, or transformers computes something else from the folder.
        ConfigError: ``out`` exists or cannot be written, ``run`` is no run, or no family of the hub computes the model.
        DataError: The run's tokenizer is missing or another one.

    Cost: Memory for the weights, and with transformers for two models in float32.
    """
    run, out = Path(run), Path(out)
    if out.exists():
        raise ConfigError(f"{out} exists; nothing was written. Give a folder that does not exist.")
    if not RunDir(run).holds_run:
        raise ConfigError(f"{run} is no run directory. Give the --run-dir of a run that has saved a checkpoint.")
    model = open_trained(run, weights=weights, checkpoint=checkpoint)
    try:
        with whole_folder(out) as part:
            _write(part, model, weights=weights)
            difference = logit_difference(part, model)
            _refuse_difference(difference, f"the export of {run}")
    except (OSError, SafetensorError) as error:  # the latter for a disk that is full, among others
        reason = getattr(error, "strerror", None) or error
        raise ConfigError(f"cannot write {out}: {reason}. Give another folder.") from error
    assert model.step is not None
    files = tuple(sorted(path.name for path in out.iterdir()))
    return Export(folder=out, step=model.step, files=files, max_abs_logit_difference=difference)


def logit_difference(folder: Path, model: TrainedModel) -> float | None:
    """Return the largest difference between the logits of transformers' model in a folder and of ours, in float32.

    Both see the same text, and 512 ids drawn from the vocabulary, or as many as it has and the context holds.

    Returns:
        ``None`` where transformers is not installed.
    """
    if importlib.util.find_spec("transformers") is None:
        return None
    from transformers import AutoModelForCausalLM  # an extra, and slow to import

    # Whatever the class, it is called as every model of transformers is.
    try:
        theirs: Any = AutoModelForCausalLM.from_pretrained(str(folder), dtype=torch.float32)
    except Exception as error:  # whatever its checks raise
        raise CheckpointError(
            f"transformers cannot load {folder}: {type(error).__name__}: {error}. Restore its files, or check that the "
            "installed transformers is 5.0 or later."
        ) from error
    ours = model.module()
    with torch.no_grad():
        largest = [(theirs.eval()(input_ids=ids).logits.float() - ours(ids)).abs().max() for ids in _probe_ids(model)]
    return float(torch.stack(largest).max())  # Python's max would let go what is not a number


def check_logits(folder: Path, model: TrainedModel) -> str:
    """Compare as :func:`logit_difference` and return what was found as a part of a sentence.

    Raises:
        CheckpointError: The models compute different things.
    """
    difference = logit_difference(folder, model)
    _refuse_difference(difference, str(folder))
    if difference is None:
        return "not compared with transformers, which is not installed (pip install 'slipstream[hf]')"
    return f"compared with transformers: largest logit difference {difference:.3g}"


def _refuse_difference(difference: float | None, what: str) -> None:
    if difference is not None and math.isnan(difference):
        raise CheckpointError(
            f"the logits of {what} are not numbers; nothing was written. Its weights are damaged or have diverged: "
            "take an earlier checkpoint, or restore the files."
        )
    if difference is not None and difference > LARGEST_DIFFERENCE:
        raise CheckpointError(
            f"transformers computes logits from {what} that differ by {difference:.3g} from those computed here; "
            "nothing was written. Check that the installed transformers is 5.0 or later, and report this."
        )


def _probe_ids(model: TrainedModel) -> list[Tensor]:
    length = model.context_length
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randperm(model.cfg.vocab_size, generator=generator)[: min(length, 512)]]
    if model.tokenizer is not None:
        text = [model.tokenizer.eos_id, *model.tokenizer.encode(PROBE_TEXT)]
        model.check_ids(text)
        ids.append(torch.tensor(text[:length]))
    return [each.unsqueeze(0) for each in ids]


def _write(folder: Path, model: TrainedModel, *, weights: Point) -> None:
    tokenizer = model.need_tokenizer()
    write_hub_model(folder, model.cfg, model.weights, context_length=model.context_length, eos_id=tokenizer.eos_id)
    write_hub_tokenizer(tokenizer, folder, context_length=model.context_length)
    (folder / "README.md").write_text(_readme(model, weights), encoding="utf-8")


def _readme(model: TrainedModel, weights: Point) -> str:
    assert model.step is not None
    checkpoint = open_checkpoint(step_folder(RunDir(model.path).checkpoints, model.step), verify=False)
    config, tokenizer = run_config(checkpoint), model.need_tokenizer()
    which = "x, which the run was trained on" if weights == "x" else "y, the optimizer's own"
    rows = {
        "architecture": family_of(model.cfg).architecture,
        "parameters": num_parameters(model.cfg),
        "steps": checkpoint.step,
        "tokens seen": checkpoint.manifest["next_sequence"] * config.data.sequence_length,
        "context": f"{model.context_length} tokens",
        "tokenizer": f"{tokenizer.name}, {tokenizer.vocab_size} tokens",
        "weights": which,
        "sha256 of the run's master weights": checkpoint.manifest["weights_sha256"],
        "optimizer": config.optim.name,
        "gradients": delay_words(config),
        "error feedback": config.staleness.error_feedback,
        "trained with": f"Slipstream {__version__}, torch {checkpoint.manifest['versions']['torch']}",
    }
    table = "\n".join(f"| {name} | {value} |" for name, value in rows.items())
    return (
        "---\nlibrary_name: transformers\npipeline_tag: text-generation\ntags: [slipstream]\n---\n"
        f"# A language model trained with Slipstream\n\n| | |\n|---|---|\n{table}\n\n"
        "```python\nfrom transformers import AutoModelForCausalLM, AutoTokenizer\n\n"
        'tokenizer = AutoTokenizer.from_pretrained(".")\nmodel = AutoModelForCausalLM.from_pretrained(".")\n'
        'inputs = tokenizer("To be", return_tensors="pt")\n'
        "print(tokenizer.decode(model.generate(**inputs, max_new_tokens=40)[0]))\n```\n\n"
        f"Documents were parted by id {tokenizer.eos_id}; a text begins after it. Say here what the data were, what "
        "the model is for, and under which licence it may be used.\n"
    )
