"""Synchronous data parallelism on worker processes: the same workers, and at every step everyone waits for the last."""

import dataclasses
import operator

import torch

from slipstream.config import Config
from slipstream.dataparallel.crew import Seat
from slipstream.dataparallel.process_engine import MAX_DEATHS, ProcessEngine
from slipstream.dataparallel.ranges import Range
from slipstream.dataparallel.shard import StepRecord
from slipstream.dataparallel.synchronous import sum_gradients
from slipstream.dataparallel.worker_process import Result, WorkerMain, work
from slipstream.errors import StageError
from slipstream.staleness.gradient import Gradient, global_norm


class SynchronousProcessEngine(ProcessEngine):
    """All-reduce at every step, in equal shares, through the server.

    The gradients of all workers are added in the order of their microbatches, clipped once, and make one update, as
    on the engine `inline`, to the bit. A worker that dies is started again, and the step waits for it.

    Args:
        config: Resolved settings.
        device: Where server and workers compute.
        main: What a worker process does.
    """

    def __init__(self, config: Config, *, device: torch.device, main: WorkerMain = work) -> None:
        super().__init__(config, device=device, main=main)
        self._results: dict[int, tuple[tuple[Range, ...], Gradient, float]] = {}

    def _judge(self, seat: Seat, result: Result) -> StepRecord | None:
        """Keep a gradient where it lies until all are here; then make the step, and give everyone new work."""
        order = seat.order
        if order is None or seat.is_retired or result.push.lease_id != order.lease.id:
            return super()._judge(seat, result)
        seat.order = None
        self._deaths.pop(seat.worker, None)
        self._results[seat.worker] = order.lease.ranges, self._gradient(seat, result), result.loss
        # What is not finite makes the whole step so, which is skipped then; nobody is to blame.
        self.server.sequencer.push(dataclasses.replace(result.push, is_finite=True))
        self.server.wire_tally.add(result.push.wire_bytes, result.push.wire_error)
        self.server.router_tally.add(result.push.router, weight=result.push.num_tokens)
        if len(self._results) < self.config.dataparallel.num_workers:
            return None
        record = self._make_step()
        self._results.clear()
        self._ask(seat)
        return record

    def _ask(self, seat: Seat) -> None:
        """Ask for everyone's work once all are here, for shares are equal only then.

        Whose gradient this step has already waits for the next: it died since, and has come back.
        """
        if self.server.sequencer.num_live < self.config.dataparallel.num_workers:
            return
        for each in self._crew.seats:
            if each.incarnation and each.order is None and each.worker not in self._results:
                super()._ask(each)

    def _make_step(self) -> StepRecord:
        results = sorted(self._results.values(), key=operator.itemgetter(0))
        parts = self.server.parts[0]
        gradient = sum_gradients([gradient for _, gradient, _ in results])
        norm = global_norm(gradient.norms(parts.names, device=self.device))
        update = parts.updater.step(gradient, norm)
        self._publish()
        return StepRecord(
            update=update,
            losses=(sum(loss for _, _, loss in results),),
            num_tokens=(gradient.num_tokens,),
            stalenesses=(0,),
        )

    def _on_given_up(self, worker: int) -> None:
        """Synchronous workers cannot do without one of theirs."""
        raise StageError(
            f"{self._trace}\nworker {worker} died {MAX_DEATHS} times in a row at step {self.step}, and with mode "
            "'sync' all others wait for it. Nothing was saved since the last checkpoint; go on with --resume.".lstrip()
        )
