"""The run directory: what lies where, and who may write into one that is in use."""

import dataclasses
import shutil
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import ConfigError
from slipstream.train.disk import writing


@dataclasses.dataclass(frozen=True)
class RunDir:
    """Paths of one run.

    Args:
        path: The folder; made by :meth:`prepare`.
    """

    path: Path

    @property
    def config(self) -> Path:
        """The resolved settings."""
        return self.path / "config.toml"

    @property
    def metrics(self) -> Path:
        """One JSON object a step."""
        return self.path / "metrics.jsonl"

    @property
    def evaluations(self) -> Path:
        """One JSON object an evaluation."""
        return self.path / "evaluations.jsonl"

    @property
    def summary(self) -> Path:
        """Written when the last step is done: a run without it is not finished."""
        return self.path / "summary.json"

    @property
    def checkpoints(self) -> Path:
        """A folder a saved step."""
        return self.path / "checkpoints"

    @property
    def tokenizer(self) -> Path:
        """The data's tokenizer, without which the weights mean nothing."""
        return self.path / "tokenizer"

    @property
    def trace(self) -> Path:
        """What each rank did when, where the settings ask for it."""
        return self.path / "trace.json"

    @property
    def origin(self) -> Path:
        """Whose weights the run begins with, where they are not drawn."""
        return self.path / "initialised_from.json"

    @property
    def status(self) -> Path:
        """Whether a process trains here, and how the last one ended."""
        return self.path / "status.json"

    @property
    def trackers(self) -> Path:
        """What trackers know the run by, so that a resumed run continues there."""
        return self.path / "trackers.json"

    @property
    def tensorboard(self) -> Path:
        """Event files, with the tracker `tensorboard`."""
        return self.path / "tensorboard"

    @property
    def wandb(self) -> Path:
        """What the tracker `wandb` keeps on this machine."""
        return self.path / "wandb"

    def _files(self) -> list[Path]:
        """Return what a run leaves behind, without its status, which is locked by whoever is about to train."""
        files = [
            self.config,
            self.metrics,
            self.evaluations,
            self.summary,
            self.checkpoints,
            self.trace,
            self.tokenizer,
            self.origin,
        ]
        return [*files, self.trackers, self.tensorboard, self.wandb]

    @property
    def holds_run(self) -> bool:
        """Whether a run has begun here."""
        return self.config.exists() or self.metrics.exists() or any(self.checkpoints.glob("step-*"))

    def check(self, *, resume: bool, overwrite: bool) -> None:
        """Refuse to touch a run that is already here, unless told what to do with it. Changes nothing.

        Raises:
            ConfigError: The folder holds a run and neither flag is given, or both are, or it is no folder.
        """
        if resume and overwrite:
            raise ConfigError("--resume and --overwrite exclude each other: continue the run, or begin it anew?")
        try:
            is_file, holds_run = self.path.exists() and not self.path.is_dir(), self.holds_run
        except OSError as error:
            raise ConfigError(
                f"cannot look into the run directory {self.path}: {error.strerror}. Choose another --run-dir."
            ) from error
        if is_file:
            raise ConfigError(f"the run directory {self.path} is a file. Choose another --run-dir.")
        if holds_run and not (resume or overwrite):
            raise ConfigError(
                f"the run directory {self.path} already holds a run. Continue it with --resume, begin anew with "
                "--overwrite (its metrics and checkpoints are removed), or choose another --run-dir."
            )

    def prepare(self, *, resume: bool, begin: Callable[[], None] | None = None) -> None:
        """Make the folder; without ``resume``, remove what an earlier run left in it, and nothing else.

        Args:
            resume: Keep everything.
            begin: Called once the folder is there, before anything is removed.

        Raises:
            ConfigError: The folder cannot be made.
            CheckpointError: What is in it cannot be removed.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(
                f"cannot make the run directory {self.path}: {error.strerror}. Choose another --run-dir."
            ) from error
        if begin is not None:
            begin()
        with writing(self.path):
            for path in [] if resume else self._files():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink(missing_ok=True)
            for partial in self.checkpoints.glob(".saving-*"):
                shutil.rmtree(partial)
