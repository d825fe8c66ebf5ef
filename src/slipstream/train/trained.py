"""A trained model with its tokenizer, from a run directory or from a model folder of the Hugging Face hub."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from torch import Tensor

from slipstream.assembly import llama_parts
from slipstream.config import Config, ModelConfig, from_dict
from slipstream.data.hub_tokenizer import HubTokenizer, named_begin_id, open_hub_tokenizer
from slipstream.data.tokenizer import IDENTITY_FILE, ByteTokenizer, Tokenizer, load_tokenizer
from slipstream.errors import CheckpointError, ConfigError, DataError
from slipstream.executor import Point
from slipstream.models.huggingface import is_hub_model, open_hub_model
from slipstream.models.llama import Head, Stage, whole_model
from slipstream.models.parts import master_names
from slipstream.models.shapes import parameter_names, tied_names
from slipstream.train.checkpoint import (
    Checkpoint,
    best_step,
    checkpoint_steps,
    newest_complete,
    open_checkpoint,
    step_folder,
)
from slipstream.train.rundir import RunDir

NEWEST, BEST = "newest", "best"
"""Names of checkpoints; others are named by their step."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainedModel:
    """Weights, and what is needed to use them."""

    path: Path
    """Where they came from."""
    cfg: ModelConfig
    weights: Mapping[str, Tensor]
    """By parameter name, a tied pair once, as they are stored."""
    tokenizer: Tokenizer | None
    """``None``: a model folder without one."""
    context_length: int
    """Tokens of the sequences it was trained on."""
    step: int | None = None
    """Updates made; ``None``: not a run."""
    begin_ids: tuple[int, ...] = ()
    """What the model was trained to see before every text; nothing where it was trained here."""
    prefix_id: int | None = None
    """What stands before a first token that is predicted from no text; ``None``: the end of a document."""

    def module(self, device: torch.device | str = "cpu") -> Stage:
        """Return the model in float32, ready to compute without dropout or gradients."""
        module, tied = whole_model(self.cfg, device="meta"), tied_names(self.cfg)
        state = {name: self.weights[tied.get(name, name)] for name in parameter_names(self.cfg)}
        module.load_state_dict({name: tensor.to(device, torch.float32) for name, tensor in state.items()}, assign=True)
        return module.requires_grad_(False).eval()

    def body_and_head(self, device: torch.device | str = "cpu") -> tuple[Stage, Head]:
        """Return :meth:`module` in two, for logits of some positions alone: they take the most memory."""
        body = self.module(device)
        head, body.head = body.head, None
        assert head is not None
        return body, head

    def need_tokenizer(self) -> Tokenizer:
        """Return the tokenizer.

        Raises:
            DataError: There is none.
        """
        if self.tokenizer is None:
            open_hub_tokenizer(self.path)  # says what is missing
            raise DataError(f"{self.path} has no tokenizer. Put its tokenizer.json there.")
        return self.tokenizer

    def begun(self, ids: list[int]) -> list[int]:
        """Return the ids of a text as the model takes it: after what begins one, and never none."""
        return [*self.begin_ids, *ids] or [self.first_id]

    @property
    def first_id(self) -> int:
        """The id from which the first token of a text is predicted."""
        return self.need_tokenizer().eos_id if self.prefix_id is None else self.prefix_id

    def check_ids(self, ids: Iterable[int]) -> None:
        """Make sure that the model has every id that its tokenizer gave a text.

        A tokenizer may name more than the model has, such as one for padding that nobody uses.

        Raises:
            DataError: It has not.
        """
        largest = max(ids, default=0)
        if largest >= self.cfg.vocab_size:
            raise DataError(
                f"the tokenizer of {self.path} gives the id {largest}, the model has the ids 0 to "
                f"{self.cfg.vocab_size - 1}: they belong to different models. Restore its tokenizer's files."
            )


def open_trained(path: str | Path, *, weights: Point = "x", checkpoint: str = NEWEST) -> TrainedModel:
    """Read a trained model.

    Args:
        path: A run directory, or a model folder of the hub.
        weights: Of a run: ``x``, which it was trained on, or ``y``, the optimizer's own.
        checkpoint: Of a run: ``newest``, ``best`` by validation loss, or a step.

    Raises:
        CheckpointError: There is no such complete checkpoint, or a file is missing or damaged.
        ConfigError: ``path`` is neither, or the run of a module of one's own; its architecture is not supported; ``y``
            or a checkpoint was asked of a model folder.
        DataError: The tokenizer is not that of the checkpoint, or cannot be read.
    """
    path = Path(path)
    run_dir = RunDir(path)
    if run_dir.holds_run:
        return _of_run(run_dir, weights, chosen_checkpoint(run_dir, checkpoint))
    if is_hub_model(path):
        if checkpoint != NEWEST:
            raise ConfigError(f"{path} is a model folder, which has no checkpoints. Leave --checkpoint out.")
        if weights == "y":
            raise ConfigError(f"{path} is a model folder, which holds one set of weights. Leave --weights out.")
        return _of_hub(path)
    raise ConfigError(
        f"{path} is neither a run directory (with config.toml and checkpoints) nor a model folder (with config.json). "
        "Give one of the two."
    )


def newest_checkpoint(run_dir: RunDir) -> Checkpoint:
    """Return the newest complete checkpoint of a run.

    Raises:
        CheckpointError: There is none.
    """
    checkpoint, passed_over = newest_complete(run_dir.checkpoints)
    if checkpoint is None:
        raise CheckpointError(
            f"there is no complete checkpoint in {run_dir.checkpoints}. Give the directory of a run that has saved one."
            + "".join(f"\n  {sentence}" for sentence in passed_over)
        )
    return checkpoint


def chosen_checkpoint(run_dir: RunDir, choice: str) -> Checkpoint:
    """Return a complete checkpoint of a run by name.

    Args:
        run_dir: The run.
        choice: ``newest``, ``best`` by validation loss, or a step.

    Raises:
        CheckpointError: It is not there, or damaged; for ``best``: none was kept.
        ConfigError: ``choice`` is something else.
    """
    if choice == NEWEST:
        return newest_checkpoint(run_dir)
    if choice == BEST:
        step = best_step(newest_checkpoint(run_dir).manifest)
        if step is None:
            raise CheckpointError(
                f"the run in {run_dir.path} kept no best checkpoint. Train with --checkpoint.keep-best true and "
                "--evaluate.every-steps N, or take the newest."
            )
    elif choice.isdecimal():
        step = int(choice)
    else:
        raise ConfigError(f"the checkpoint {choice!r} cannot be named so. Give newest, best, or a step such as 200.")
    folder = step_folder(run_dir.checkpoints, step)
    if not folder.is_dir():
        steps = ", ".join(map(str, reversed(checkpoint_steps(run_dir.checkpoints))))
        raise CheckpointError(f"{run_dir.checkpoints} has no checkpoint of step {step}. There are: {steps or 'none'}.")
    return open_checkpoint(folder)


def run_config(checkpoint: Checkpoint) -> Config:
    """Return the settings that a checkpoint was saved with."""
    return from_dict(dict(checkpoint.manifest["config"]), source=str(checkpoint.folder))


def _of_run(run_dir: RunDir, weights: Point, checkpoint: Checkpoint) -> TrainedModel:
    if not checkpoint.manifest["tokenizer"]:
        raise ConfigError(
            f"the run in {run_dir.path} trained a module of your own, which only your program can build. Give a run of "
            "`slipstream train`, or load the checkpoint's weights into your module."
        )
    config = run_config(checkpoint)
    prefix = "y" if weights == "y" else f"x@{checkpoint.step}"
    names = master_names(llama_parts(config))
    return TrainedModel(
        path=run_dir.path,
        cfg=config.model,
        weights={name: checkpoint.tensor(f"{prefix}/{name}") for name in names},
        tokenizer=_tokenizer_of_run(run_dir, config, fingerprint=checkpoint.manifest["tokenizer"]),
        context_length=config.data.sequence_length,
        step=checkpoint.step,
    )


def _tokenizer_of_run(run_dir: RunDir, config: Config, *, fingerprint: str) -> Tokenizer:
    """Return the tokenizer kept in the run directory; of an older run, that of its data."""
    folder = run_dir.tokenizer if (run_dir.tokenizer / IDENTITY_FILE).is_file() else Path(config.data.path)
    tokenizer = load_tokenizer(folder) if folder == run_dir.tokenizer or config.data.path else ByteTokenizer()
    if tokenizer.fingerprint() != fingerprint:
        raise DataError(
            f"the tokenizer in {folder} has the fingerprint {tokenizer.fingerprint()[:12]}, the run in {run_dir.path} "
            f"was trained with {fingerprint[:12]}: ids would mean other text. Restore the tokenizer's files."
        )
    return tokenizer


def _of_hub(folder: Path) -> TrainedModel:
    model = open_hub_model(folder)
    is_ours = (folder / IDENTITY_FILE).is_file()
    tokenizer = open_hub_tokenizer(folder) if is_ours or (folder / "tokenizer.json").is_file() else None
    # An export of ours may hold a tokenizer of the hub, but was trained on documents that nothing began.
    theirs = tokenizer if isinstance(tokenizer, HubTokenizer) and not is_ours else None
    return TrainedModel(
        path=folder,
        cfg=model.cfg,
        weights=model.weights(),
        tokenizer=tokenizer,
        context_length=model.context_length,
        begin_ids=() if theirs is None else theirs.begin_ids(),
        prefix_id=None if theirs is None else named_begin_id(folder),
    )
