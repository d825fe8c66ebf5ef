"""Shows a run elsewhere as well: TensorBoard, wandb, trackio. Each is an extra, and none can sink a run."""

import importlib.util
import io
import json
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, redirect_stdout
from pathlib import Path
from typing import Any, Protocol

from slipstream.config import Config, to_dict, to_toml
from slipstream.errors import ConfigError
from slipstream.train.disk import write_whole
from slipstream.train.rundir import RunDir

PROJECT = "slipstream"
"""Under which wandb and trackio file a run."""


class Tracker(Protocol):
    """Takes figures."""

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Take the figures of a step; steps never fall."""

    def close(self, *, failed: bool) -> None:
        """End; ``failed``: the run did not end as it should have."""


class TensorBoard:
    """Event files in the run directory, for ``tensorboard --logdir RUN``.

    Args:
        config: Resolved settings.
        identity: Ignored: the folder is the run.
        resume_step: What an earlier part of the run wrote after it is hidden, as it is made anew.
    """

    def __init__(self, config: Config, *, identity: str, resume_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # an extra

        folder = RunDir(Path(config.run_dir)).tensorboard
        new: Any = SummaryWriter
        self._writer = new(str(folder), purge_step=resume_step + 1 if resume_step else None, flush_secs=10)
        if not resume_step:
            self._writer.add_text("config", f"```toml\n{to_toml(config)}```")

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Write."""
        for name, value in figures.items():
            self._writer.add_scalar(name, value, step)

    def close(self, *, failed: bool) -> None:
        """Flush and close."""
        self._writer.close()


class Wandb:
    """A run of Weights and Biases; with ``WANDB_MODE=offline``, its own switch, a folder to be synced later.

    Args:
        config: Resolved settings.
        identity: Of the run there; the same again continues it.
        resume_step: Ignored: figures of steps that it has already are ignored there, and they are the same.
    """

    def __init__(self, config: Config, *, identity: str, resume_step: int) -> None:
        import wandb  # an extra

        path = Path(config.run_dir)
        self._run = wandb.init(
            project=PROJECT,
            name=path.name,
            id=identity,
            resume="allow",
            config=to_dict(config),
            dir=str(path),
            settings=wandb.Settings(silent=True, console="off"),
        )

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Send."""
        self._run.log(dict(figures), step=step)

    def close(self, *, failed: bool) -> None:
        """Send the rest."""
        self._run.finish(exit_code=int(failed))


class Trackio:
    """A run of trackio, which keeps it on this machine unless told otherwise by its own settings.

    Args:
        config: Resolved settings.
        identity: Name of the run there; the same again continues it.
        resume_step: Ignored: what is made anew is the same.
    """

    def __init__(self, config: Config, *, identity: str, resume_step: int) -> None:
        import trackio  # an extra

        self._trackio = trackio
        with _unheard():
            self._run = trackio.init(
                project=PROJECT, name=identity, resume="allow", config=to_dict(config), embed=False, auto_log_gpu=False
            )

    def log(self, figures: Mapping[str, float], *, step: int) -> None:
        """Send."""
        self._run.log(dict(figures), step=step)

    def close(self, *, failed: bool) -> None:
        """Send the rest."""
        with _unheard():
            self._trackio.finish()  # not the run's own: it would be finished once more, aloud, when Python ends


def _unheard() -> AbstractContextManager[Any]:
    """Keep what a package tells of itself out of the log, of which programs read each line; warnings still show."""
    return redirect_stdout(io.StringIO())


KINDS: Mapping[str, Callable[..., Tracker]] = {"tensorboard": TensorBoard, "wandb": Wandb, "trackio": Trackio}
"""By the name in ``log.trackers``, which is also that of the package and of the extra."""


def check_trackers(names: Sequence[str]) -> None:
    """Refuse trackers that are not installed, before anything is trained.

    Raises:
        ConfigError: With the command that installs them.
    """
    missing = [name for name in dict.fromkeys(names) if importlib.util.find_spec(name) is None]
    if missing:
        raise ConfigError(
            f"log.trackers names {' and '.join(missing)}, which {'is' if len(missing) == 1 else 'are'} not installed: "
            f"pip install 'slipstream[{','.join(missing)}]'. Or leave it out; metrics.jsonl has all figures."
        )


class Trackers:
    """All trackers of a run. One that fails is named once and then left out; the run goes on.

    Args:
        config: Resolved settings.
        note: Says a sentence.
        resume_step: Step that the run continues from.
    """

    def __init__(self, config: Config, *, note: Callable[[str], None], resume_step: int = 0) -> None:
        self._note = note
        self._open: dict[str, Tracker] = {}
        names = dict.fromkeys(config.log.trackers)
        identity = _identity(RunDir(Path(config.run_dir))) if names else ""
        for name in names:
            try:
                self._open[name] = KINDS[name](config, identity=identity, resume_step=resume_step)
            except Exception as error:  # whatever it is, training does not need it
                self._give_up(name, error)

    def row(self, row: Mapping[str, Any], *, of: str) -> None:
        """Show a row of ``metrics.jsonl`` or ``evaluations.jsonl``.

        Args:
            row: With ``step``; numbers that are not in lists are shown.
            of: ``train`` or ``validation``.
        """
        if not self._open:
            return
        figures = dict(_numbers(row, f"{of}/"))
        for name, tracker in list(self._open.items()):
            try:
                tracker.log(figures, step=row["step"])
            except Exception as error:
                self._give_up(name, error)

    def close(self, *, failed: bool = False) -> None:
        """End all."""
        for name, tracker in list(self._open.items()):
            try:
                tracker.close(failed=failed)
            except Exception as error:
                self._give_up(name, error)
        self._open.clear()

    def _give_up(self, name: str, error: Exception) -> None:
        self._open.pop(name, None)
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        self._note(f"warning: the tracker {name} fails and is left out from here on; training goes on. {reason}")


def _numbers(row: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, float]]:
    for key, value in row.items():
        if isinstance(value, Mapping):
            yield from _numbers(value, f"{prefix}{key}/")
        elif isinstance(value, int | float) and key != "step":
            yield prefix + key, float(value)


def _identity(run_dir: RunDir) -> str:
    """Return what services know this run by, also when it is resumed; made at its first start."""
    try:
        return str(json.loads(run_dir.trackers.read_text(encoding="utf-8"))["id"])
    except (OSError, ValueError, KeyError):
        identity = f"{run_dir.path.resolve().name}-{uuid.uuid4().hex[:8]}"
        write_whole(run_dir.trackers, json.dumps({"id": identity}) + "\n")
        return identity
