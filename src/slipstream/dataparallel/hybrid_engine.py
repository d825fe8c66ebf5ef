"""The hybrid: every worker is a whole pipeline, a process a stage, and workers are asynchronous to one another.

::

    worker 0, stage 0   | F F B F B F B F B ... |  <- weights of stage 0, its gradients ->  shard 0
    worker 0, stage 1   |   F B F B F B F B ... |  <- weights of stage 1, its gradients ->  shard 1
    worker 1, stage 0   | F F B F B ...         |  <- weights of stage 0, its gradients ->  shard 0
    worker 1, stage 1   |   F B F B ...         |  <- weights of stage 1, its gradients ->  shard 1

An order names one version and one lease for all stages of a worker, and a push counts when the parts of all stages are
here. The versions of orders that are out are held, so no stage can find another version than the rest.
"""

import dataclasses
import math

import torch
from torch import Tensor

from slipstream.config import Config
from slipstream.dataparallel.crew import Crew, Heard, Seat
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.process_engine import ProcessEngine
from slipstream.dataparallel.replica_crew import ReplicaCrew, ReplicaSeat
from slipstream.dataparallel.shard import StepRecord
from slipstream.dataparallel.shared import HeldBoard, Layout
from slipstream.dataparallel.stage_process import Part, Ready, asks_ahead, work_stage
from slipstream.dataparallel.transport import WeightsOffered
from slipstream.dataparallel.worker_process import Calibrated, Drain, Failed, Hello, WorkerMain
from slipstream.errors import ConfigError
from slipstream.executor import StepReport
from slipstream.staleness.gradient import Gradient, global_norm


class HybridEngine(ProcessEngine):
    """Workers that are pipelines; see above.

    Args:
        config: Resolved settings.
        device: Where the server computes; with CUDA, stages have devices of their own.
        main: What a stage process does.

    Cost:
        Of shared memory, 2 copies of the weights a worker and 2 more, and 2 gradients a worker. In each stage process
        2 copies of that stage's weights.

    Raises:
        ConfigError: There are fewer CUDA devices than a worker has stages.
    """

    def __init__(self, config: Config, *, device: torch.device, main: WorkerMain = work_stage) -> None:
        num_stages = config.dataparallel.num_stages
        if device.type == "cuda" and torch.cuda.device_count() < num_stages:
            raise ConfigError(
                f"a worker has {num_stages} stages (dataparallel.num_stages), each on a CUDA device of its own, and "
                f"there are {torch.cuda.device_count()}. Use fewer stages, or --train.device cpu."
            )
        self._asks_ahead = asks_ahead(config)
        self._idle_s = 0.0
        super().__init__(config, device=device, main=main)
        self._position = {name: at for at, name in enumerate(self.server.parts[0].names)}

    def _open(self, weights: Layout, gradient: Layout, main: WorkerMain) -> tuple[WeightsOffered, Crew]:
        updaters = [parts.updater for parts in self.server.parts]
        num_orders = self.config.dataparallel.num_workers * self.config.gradients_per_worker
        self._boards = [HeldBoard(Layout.of(each.weights.read(0)), num_readers=num_orders) for each in updaters]
        crew = ReplicaCrew(
            self.config,
            boards=self._boards,
            gradients=[Layout.of(each.masters) for each in updaters],
            device=self.device,
            main=main,
        )
        return self._boards[0], crew

    @property
    def _calibration_microbatches(self) -> int:
        return 4 * self.config.dataparallel.num_stages

    def _publish(self) -> None:
        held = self.server.sequencer.in_flight.readers.keys()
        for board, parts in zip(self._boards, self.server.parts, strict=True):
            weights = parts.updater.weights
            board.publish(weights.latest, weights.read(weights.latest), held=held)

    def _handle(self, heard: Heard) -> StepRecord | None:
        seat, report = heard.seat, heard.report
        assert isinstance(seat, ReplicaSeat)
        match report:
            case Ready():
                seat.is_asking = True
                if len(seat.orders) < self.config.gradients_per_worker:
                    self._ask(seat)
            case Part():
                return self._take(seat, report)
            case Hello() | Calibrated():
                self._collect(seat, report)
            case Failed() if self._trace and "PeerError" in report.trace:
                pass  # it says only that another stage is gone
            case _:
                return super()._handle(heard)
        return None

    def _collect(self, seat: ReplicaSeat, report: Hello | Calibrated) -> None:
        """Take the word of a stage for the worker's once all have spoken: it is as fast as its slowest."""
        seat.paces.append(report.pace_s if isinstance(report, Hello) else report.microbatch_s)
        if len(seat.paces) < len(seat.links):
            return
        slowest, seat.paces = max(seat.paces), []
        if isinstance(report, Hello):
            self._join(seat, dataclasses.replace(report, pace_s=slowest))
        else:
            self._time(seat.worker, slowest)

    def _may_make_step(self, heard: Heard) -> bool:
        report, seat = heard.report, heard.seat
        if not isinstance(report, Part) or not isinstance(seat, ReplicaSeat):
            return False
        is_last = len(seat.parts.get(report.order.lease.id, ())) == len(seat.links) - 1
        return is_last and self.server.sequencer.completes_step(report.num_tokens)

    def _take(self, seat: ReplicaSeat, part: Part) -> StepRecord | None:
        """Keep a stage's part where it lies until all are here; then hand the gradient to the server."""
        self._idle_s += part.idle_s
        order = part.order
        held = seat.parts.setdefault(order.lease.id, {})
        held[part.stage] = part
        if len(held) < len(seat.links):
            return None
        parts = [held[stage] for stage in range(len(seat.links))]
        del seat.parts[order.lease.id]
        assert all(each.order == order for each in parts), "one gradient, one version"
        is_answer = order in seat.orders
        if is_answer:  # and not a copy of an earlier message
            seat.orders.remove(order)
        record = self._push(seat, order, parts)
        if record is not None:
            self._publish()
        # A slot is written again by the second order after, so the gradient is added before anything is asked for.
        if seat.is_asking or (is_answer and not self._asks_ahead):
            self._ask(seat)
        self._admit()
        return record

    def _push(self, seat: ReplicaSeat, order: Order, parts: list[Part]) -> StepRecord | None:
        gradients, grad_norm = self._gradients(seat, parts)
        first, last = parts[0], parts[-1]
        assert last.loss is not None
        push = Push(
            worker=order.worker,
            incarnation=order.incarnation,
            sequence=first.sequence,
            epoch=order.epoch,
            lease_id=order.lease.id,
            read_version=order.version,
            num_tokens=last.num_tokens,
            is_finite=bool(torch.isfinite(grad_norm)),
            compute_s=first.compute_s,
            communication_s=first.communication_s,
            router=tuple(row for part in parts for row in part.router),
            wire_bytes=sum(part.wire_bytes for part in parts),
            wire_error=_joint_error(parts),
        )
        verdict = self.server.judge(push)
        if not verdict.is_accepted:
            return None
        self._deaths.pop(seat.worker, None)
        is_borrowed = self.device.type == "cpu" and seat.gradient.is_reference
        return self.server.add(push, verdict, gradients, grad_norm, loss=last.loss, is_borrowed=is_borrowed)

    def _gradients(self, seat: ReplicaSeat, parts: list[Part]) -> tuple[list[Gradient], Tensor]:
        """Return the gradients of all shards and the norm of them together.

        A tied pair on two stages has a part of its gradient from each; both shards get the sum, embedding first.
        """
        held = [
            {
                name: None if tensor is None else tensor.to(self.device)
                for name, tensor in link.gradient.read(part.sequence, part.idle).items()
            }
            for link, part in zip(seat.links, parts, strict=True)
        ]
        norms = torch.zeros(len(self._position), dtype=torch.float32, device=self.device)
        for tensors, part in zip(held, parts, strict=True):
            where = torch.tensor([self._position[name] for name in tensors], device=self.device)
            norms[where] = torch.tensor(part.norms, dtype=torch.float32, device=self.device)
        pair = self.server.parts[0].tied_pair
        if pair is not None and len(held) > 1:
            embedding, head = held[0][pair[0]], held[-1][pair[0]]
            assert embedding is not None
            assert head is not None
            total = embedding + head
            norms[self._position[pair[0]]] = torch.linalg.vector_norm(total)
            held[0][pair[0]], held[-1][pair[0]] = total, total.clone()
        gradients = [
            Gradient(tensors=tensors, read_version=part.order.version, num_tokens=part.num_tokens, worker=seat.worker)
            for tensors, part in zip(held, parts, strict=True)
        ]
        return gradients, global_norm(norms)

    def _ask(self, seat: Seat) -> None:
        """Ask for work on a worker's behalf. If it has to wait, it finishes what has begun, and its order comes later.

        It is told, rather than left to find out: its stages must all drain at the same place of their streams.
        """
        assert isinstance(seat, ReplicaSeat)
        seat.is_asking = False
        reply = self.server.pull(seat.worker, seat.incarnation, now_s=self.now_s)
        if reply.order is not None:
            self._send(seat, reply.order)
        elif reply.action != "wait":
            self._crew.tell(seat, None)
        elif seat.orders:
            self._crew.tell(seat, Drain())

    def _send(self, seat: Seat, order: Order) -> None:
        assert isinstance(seat, ReplicaSeat)
        seat.orders.append(order)
        self._crew.tell(seat, order)
        if not self._asks_ahead:
            self._crew.tell(seat, Drain())

    def report(self, record: StepRecord, *, step_s: float, stop: bool) -> StepReport:
        """Return what the training loop is told of a step, with the time that stages have waited since the last."""
        idle_s, self._idle_s = self._idle_s, 0.0
        num_ranks = self.config.dataparallel.num_workers * len(self._boards)
        return dataclasses.replace(super().report(record, step_s=step_s, stop=stop), idle_s=idle_s, num_ranks=num_ranks)

    def figures(self) -> dict[str, object]:
        """Return what a run's summary holds beside an ordinary run's."""
        return super().figures() | {
            "num_stages": len(self._boards),
            "pipeline_schedule": self.config.pipeline.pipeline_schedule,
        }


def _joint_error(parts: list[Part]) -> float:
    """Return the error of all parts relative to the norm of all."""
    squares = [math.fsum(norm**2 for norm in part.norms) for part in parts]
    lost = sum(part.wire_error**2 * square for part, square in zip(parts, squares, strict=True))
    return math.sqrt(lost / sum(squares)) if sum(squares) else 0.0
