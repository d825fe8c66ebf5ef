"""The training loop; every rank of a run goes through the same one."""

import collections
import dataclasses
import math
import signal
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import NonFiniteError
from slipstream.executor import BatchSource, Executor, StepReport
from slipstream.train.checkpoint import Checkpoint
from slipstream.train.evaluate import Evaluation, evaluate
from slipstream.train.metrics import (
    JsonLines,
    model_flops_utilisation,
    peak_memory_bytes,
    router_figures,
)
from slipstream.train.progress import Reporter
from slipstream.train.rundir import RunDir
from slipstream.train.saving import CheckpointWriter, run_manifest
from slipstream.train.summary import summarize
from slipstream.train.trackers import Trackers

WORKER_FIGURES = ("microbatches_by_worker", "throughput_share", "pushes_rejected", "restarts", "ledger_balanced")
"""What ``metrics.jsonl`` says of workers now and then."""


class TimedSource:
    """Counts the seconds spent in fetching batches.

    Args:
        source: Gives the batch of an index.
        state: Says where the batch of an index begins; none: its index says all.
    """

    def __init__(self, source: BatchSource, *, state: Callable[[int], Mapping[str, Any]] | None = None) -> None:
        self._source = source
        self.state = state
        self._spent_s = 0.0

    def __call__(self, index: int) -> Batch:
        """Return the batch of an index."""
        begin = time.perf_counter()
        batch = self._source(index)
        self._spent_s += time.perf_counter() - begin
        return batch

    def take_s(self) -> float:
        """Return the seconds since the last call."""
        spent, self._spent_s = self._spent_s, 0.0
        return spent


@dataclasses.dataclass
class StopFlag:
    """Set when the process was asked to stop."""

    requested: bool = False


@contextmanager
def stop_signals(given: StopFlag | None = None) -> Iterator[StopFlag]:
    """Turn the first SIGTERM or Ctrl-C into a request to stop after the step; a second one acts at once.

    Args:
        given: Somebody else sets it, and signals are left as they are.
    """
    if given is not None:
        yield given
        return
    flag = StopFlag()
    previous = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}

    def handle(number: int, frame: object) -> None:
        flag.requested = True
        signal.signal(number, previous[signal.Signals(number)])

    try:
        for number in previous:
            signal.signal(number, handle)
        yield flag
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


class Trainer:
    """Runs an executor to the last step, with evaluations, checkpoints and metrics when they are due.

    Args:
        config: Resolved settings.
        executor: This rank's share of training, at the step to continue from.
        source: Where the executor takes its batches from.
        validation: Batches to evaluate on.
        tokenizer: Whose ids the batches hold; ``None``: they hold something else.
        flops_per_token: Of forward and backward; ``None``: not known.
        data_sha256: Identifies the data.
        run_dir: Where to write.
        writer: Saves checkpoints.
        reporter: Is told of every event; silent on ranks other than 0.
        rank: 0 writes the run directory's files.
        resumed: The checkpoint the executor was restored from.
        trackers: Are shown every figure, on rank 0.
        stop: Says when to stop; ``None``: signals do.
    """

    def __init__(
        self,
        config: Config,
        executor: Executor,
        *,
        source: TimedSource,
        validation: Sequence[Batch],
        tokenizer: Tokenizer | None,
        flops_per_token: int | None,
        data_sha256: str,
        run_dir: RunDir,
        writer: CheckpointWriter,
        reporter: Reporter,
        device: torch.device,
        rank: int = 0,
        resumed: Checkpoint | None = None,
        trackers: Trackers | None = None,
        stop: StopFlag | None = None,
    ) -> None:
        self._config = config
        self._executor = executor
        self._source = source
        self._validation = validation
        self._tokenizer = tokenizer
        self._flops_per_token = flops_per_token
        self._data_sha256 = data_sha256
        self._run_dir = run_dir
        self._writer = writer
        self._reporter = reporter
        self._device = device
        self._rank = rank
        self._trackers = trackers
        self._stop = stop
        self._step_times: collections.deque[float] = collections.deque(maxlen=50)
        self._skipped_in_a_row = int(resumed.manifest.get("skipped_in_a_row", 0)) if resumed else 0
        self._weights_sha256 = str(resumed.manifest["weights_sha256"]) if resumed else ""
        self._resumed = resumed
        self._initialised_from = resumed.manifest.get("initialised_from") if resumed else None
        self._best: dict[str, Any] | None = resumed.manifest.get("best") if resumed else None
        if rank == 0:
            self._metrics = JsonLines(run_dir.metrics, resume_step=executor.step)
            # What is evaluated anew at once is not kept: it may be of other weights, or there twice.
            kept = executor.step - 1 if self._begins_with_evaluation else executor.step
            self._evaluations = JsonLines(run_dir.evaluations, resume_step=kept)

    def run(self) -> dict[str, Any] | None:
        """Train to the last step.

        Returns:
            The summary, on rank 0 of a run that reached its last step; ``None`` elsewhere, and where the run was
            asked to stop and has saved.

        Raises:
            NonFiniteError: A loss was not finite, or too many gradients in a row were not.
        """
        failed = True
        try:
            summary = self._run()
            failed = False
        finally:
            if self._trackers is not None:
                self._trackers.close(failed=failed)
        return summary

    def _run(self) -> dict[str, Any] | None:
        executor, config = self._executor, self._config
        self._reporter.start(step=executor.step, num_steps=config.train.num_steps)
        if self._rank == 0 and self._metrics.num_kept < executor.step:
            self._reporter.note(
                f"warning: {self._run_dir.metrics} has rows of {self._metrics.num_kept} of the {executor.step} steps "
                "so far; figures of the whole run will be of those and what follows"
            )
        try:
            with stop_signals(self._stop) as stop:
                if self._begins_with_evaluation:
                    evaluation = self._evaluate()
                    if executor.step and self._is_best(evaluation):
                        self._save()
                stopped = False
                while executor.step < config.train.num_steps and not stopped:
                    begin = time.perf_counter()
                    report = executor.run_step(stop_requested=stop.requested)
                    self._record(report, time.perf_counter() - begin)
                    last = report.step == config.train.num_steps
                    stopped = report.stop and not last
                    due = last or stopped or _due(report.step, config.checkpoint.every_steps)
                    if last or _due(report.step, config.evaluate.every_steps):
                        due = self._is_best(self._evaluate()) or due
                    if due:
                        self._save()
                self._weights_sha256 = self._writer.wait() or self._weights_sha256
        except NonFiniteError:
            self._writer.wait()  # all ranks raise this together; what was saved before must be whole
            raise
        finally:
            self._reporter.close()
        if stopped:
            self._reporter.note(
                f"stopped at step {executor.step}, state saved; continue with: "
                f"slipstream train --run-dir {self._run_dir.path} --resume"
            )
            return None
        if self._rank != 0:
            return None
        best = self._best if config.checkpoint.keep_best else None
        more = {
            "weights_sha256": self._weights_sha256,
            "initialised_from": self._initialised_from,
            **executor.figures(),
        }
        return summarize(config, self._run_dir, step=executor.step, best=best, more=more)

    @property
    def _begins_with_evaluation(self) -> bool:
        """Whether the step to continue from is the first, or also the last, where it may have been stopped."""
        return self._executor.step in (0, self._config.train.num_steps)

    def _record(self, report: StepReport, step_s: float) -> None:
        step, batch = report.step, report.step - 1
        if not math.isfinite(report.loss):
            raise NonFiniteError(
                f"non-finite loss: batch {batch} has a loss of {report.loss} at step {step}. Nothing was saved after "
                "it. Lower optim.lr or raise optim.lr_warmup_steps, then go on from the last checkpoint with --resume."
            )
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if report.skipped else 0
        allowed = self._config.train.max_skipped_steps
        if self._skipped_in_a_row > allowed:
            raise NonFiniteError(
                f"non-finite gradients: those of the last {self._skipped_in_a_row} batches, up to batch {batch} at "
                f"step {step}; train.max_skipped_steps allows {allowed} in a row. Lower optim.lr, go on with --resume."
            )
        self._step_times.append(step_s)
        if self._rank != 0:
            return
        wall_s, step_s = step_s, step_s if report.step_s is None else report.step_s
        # Two pushes at one instant of a virtual clock can make two steps, the second in no time.
        tokens_per_s = report.num_tokens / step_s if step_s else None
        row: dict[str, Any] = {
            "step": report.step,
            "loss": report.loss,
            "grad_norm": report.grad_norm,
            "lr": report.lr,
            "tokens_per_s": tokens_per_s,
            "staleness_mean": float(report.staleness if report.staleness_mean is None else report.staleness_mean),
            "staleness_max": report.staleness,
            "bubble_fraction": _bubble_fraction(report, step_s),
            "step_s": step_s,
            "num_tokens": report.num_tokens,
            "data_fraction": self._source.take_s() / wall_s,
            # Of real GPUs, so by the wall's clock also where the executor has a virtual one.
            "mfu": model_flops_utilisation(
                report.num_tokens / wall_s, self._flops_per_token, self._device, num_devices=report.num_devices
            ),
            "peak_memory_bytes": peak_memory_bytes(self._device),
            "skipped": report.skipped,
        }
        if _due(report.step, self._config.log.every_steps):
            row |= self._sometimes()
        if report.router:
            row["router"] = router_figures(report.router, loss=report.loss)
        self._metrics.write(row)
        if self._trackers is not None:
            self._trackers.row(row, of="train")
        remaining = self._config.train.num_steps - report.step
        self._reporter.on_step(row, eta_s=remaining * statistics.fmean(self._step_times))

    def _sometimes(self) -> dict[str, Any]:
        """Return what not every row has: it is longer than all the rest."""
        found: dict[str, Any] = {}
        if metrics := self._executor.method_metrics():
            found["method_metrics"] = dict(metrics)
        if self._config.executor == "dataparallel":
            figures = self._executor.figures()
            found["workers"] = {key: figures[key] for key in WORKER_FIGURES}
        return found

    def _evaluate(self) -> Evaluation:
        begin = time.perf_counter()
        evaluation: Evaluation = evaluate(
            self._executor,
            self._validation,
            token_bytes=self._tokenizer.token_bytes() if self._tokenizer is not None else None,
        )
        if self._rank == 0:
            spent_s = time.perf_counter() - begin
            step = self._executor.step
            row = {"step": step} | dataclasses.asdict(evaluation) | {"evaluation_s": spent_s}
            self._evaluations.write(row)
            if self._trackers is not None:
                self._trackers.row(row, of="validation")
            bits = evaluation.val_bits_per_byte
            units = f"{evaluation.num_tokens} {'units' if bits is None else 'tokens'}"
            self._reporter.note(
                f"evaluation at step {step}: val_loss {evaluation.val_loss:.4f} (x) {evaluation.val_loss_y:.4f} (y), "
                f"{'' if bits is None else f'{bits:.4f} bits per byte, '}{units} in {spent_s:.1f}s"
            )
        return evaluation

    def _is_best(self, evaluation: Evaluation) -> bool:
        """Return whether the state is to be kept as the best so far; all ranks decide alike, on one sum."""
        if not self._config.checkpoint.keep_best or not math.isfinite(evaluation.val_loss):
            return False
        if self._best is not None and evaluation.val_loss >= self._best["val_loss"]:
            return False
        self._best = {"step": self._executor.step, "val_loss": evaluation.val_loss}
        return True

    def _save(self) -> None:
        step = self._executor.step
        if self._rank == 0:
            self._metrics.sync()
            self._evaluations.sync()
        tokenizer = self._tokenizer.fingerprint() if self._tokenizer is not None else ""
        manifest = run_manifest(
            self._config, step=step, tokenizer=tokenizer, data_sha256=self._data_sha256, resumed=self._resumed
        )
        manifest["skipped_in_a_row"] = self._skipped_in_a_row
        if self._initialised_from is not None:
            manifest["initialised_from"] = self._initialised_from
        if self._config.checkpoint.keep_best and self._best is not None:
            manifest["best"] = self._best
        if self._source.state is not None and self._rank == 0:
            manifest["data_state"] = self._source.state(step)
        self._writer.save(step, self._executor.snapshot(), manifest)


def _due(step: int, every_steps: int) -> bool:
    return every_steps > 0 and step % every_steps == 0


def _bubble_fraction(report: StepReport, step_s: float) -> float | None:
    """Return the share of the ranks' time that they waited; ``None`` where nobody counted it."""
    if report.idle_s is None:
        return None
    return report.idle_s / (report.num_ranks * step_s) if step_s else 0.0
