"""One stage of a worker that is a pipeline, as a process: it runs cycles for as long as orders come.

All stages of a worker get the same commands in the same order, so all cut their streams alike; the first one asks for
the next while its last microbatch is under way::

    stage 0   | F F F F+ready | F B F B F B F B+ready | ...     an order is there when the last forward has begun
    stage 1   |   F B F B ... push 0 ...

"""

import dataclasses
import itertools
import time
from collections.abc import Iterator
from typing import Any

from torch.distributed import FileStore  # type: ignore[attr-defined]  # public, but not in its export list

from slipstream.assembly import llama_parts, sum_by_parameter
from slipstream.config import Config, config_hash
from slipstream.data import open_data
from slipstream.dataparallel.emulation import Emulation
from slipstream.dataparallel.lease_stage import LeaseProgram, StageBuffers
from slipstream.dataparallel.ledger import Lease
from slipstream.dataparallel.messages import Order
from slipstream.dataparallel.router_tally import RouterRows
from slipstream.dataparallel.worker_process import Calibrate, Calibrated, Drain, Hello, Workplace
from slipstream.device import settle
from slipstream.errors import StalenessError
from slipstream.executor import BatchSource
from slipstream.microbatches import microbatch_loader
from slipstream.models.partition import cut
from slipstream.models.parts import tied_pair
from slipstream.pipeline.actions import Action, add_communication
from slipstream.pipeline.cycle_order import cycle_order
from slipstream.pipeline.flow import Flow
from slipstream.pipeline.schedules import ScheduleSpec
from slipstream.pipeline.transport import Transport, connect
from slipstream.staleness.gradient import Gradient


@dataclasses.dataclass(frozen=True, kw_only=True)
class StagePlace(Workplace):
    """What a stage process is given.

    Attributes:
        stage: Its number.
        rendezvous: File by which the stages of one worker find each other.
    """

    stage: int
    rendezvous: str


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ready:
    """The first stage begins with the last microbatch it was given: the next order is wanted now."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """A stage's share of a gradient lies in its slot.

    Attributes:
        stage: Which.
        sequence: Of the worker's pushes.
        order: What it is the gradient of.
        num_tokens: Valid tokens of the lease.
        norms: Float32 norm of each parameter of the stage, in order.
        router: What the stage's routers did.
        loss: Mean loss; of the last stage.
        idle: Parameters without a gradient.
        wire_bytes: That it took.
        wire_error: What it lost on its way, relative to its norm.
        compute_s: Seconds since the push before.
        communication_s: Seconds of fetching and pushing, apart from those.
        idle_s: Seconds of waiting for other stages and for orders since the push before.
    """

    stage: int
    sequence: int
    order: Order
    num_tokens: int
    norms: tuple[float, ...]
    router: RouterRows
    loss: float | None
    idle: tuple[str, ...]
    wire_bytes: int
    wire_error: float
    compute_s: float
    communication_s: float
    idle_s: float


@dataclasses.dataclass
class _Cycle:
    """A cycle under way on this stage.

    Attributes:
        order: None: it is for the sake of the time alone.
        last: Its last microbatch.
        marks: When each backward had ended.
        fetch_s: Seconds to fetch its weights.
    """

    order: Order | None
    last: int
    fetch_s: float = 0.0
    marks: list[float] = dataclasses.field(default_factory=list)


def worker_spec(config: Config) -> ScheduleSpec:
    """Return the schedule inside a worker."""
    pipeline = config.pipeline
    num_extra = pipeline.num_extra_in_flight if pipeline.pipeline_schedule == "two_bw" else 0
    return ScheduleSpec(
        name=pipeline.pipeline_schedule,
        num_ranks=config.dataparallel.num_stages,
        num_microbatches=config.dataparallel.min_microbatches,
        num_extra_in_flight=num_extra,
    )


def asks_ahead(config: Config) -> bool:
    """Return whether a worker asks for its next order before its last cycle is done."""
    return config.gradients_per_worker > 1


def work_stage(place: Workplace, *, microbatches: BatchSource | None = None) -> None:
    """Be a stage of a worker until the server says stop, or is gone.

    Args:
        place: What it needs.
        microbatches: Gives the microbatch of a number; ``None``: those of the settings' data.
    """
    assert isinstance(place, StagePlace)
    config = place.config
    settle(config, place.device)
    num_ranks, timeout_s = config.dataparallel.num_stages, config.pipeline.timeout_s
    store = FileStore(place.rendezvous, num_ranks)
    transport = connect(store, rank=place.stage, num_ranks=num_ranks, device=place.device, timeout_s=timeout_s)
    source = microbatches or microbatch_loader(config, open_data(config.data.path, verify=False)).batch
    _StageDesk(place, transport, source).run()


class _StageDesk:
    """Carries out orders, one after another or two at a time."""

    def __init__(self, place: StagePlace, transport: Transport, microbatches: BatchSource) -> None:
        config = place.config
        self._place = place
        self._spec = worker_spec(config)
        model = llama_parts(config)
        spec = cut(model.costs(), self._spec.num_stages)[place.stage]
        self._tied_pair = tied_pair(model)
        self._buffers = StageBuffers(model, spec, place.weights.layout, device=place.device)
        self._program = LeaseProgram(
            self._buffers,
            microbatches,
            step_microbatches=config.pipeline.num_microbatches,
            device=place.device,
            loss_sum=model.loss_sum,
        )
        self._flow = Flow(config, {place.stage: self._program}, transport, self._spec, shape=model.message_shape)
        self._cycles: dict[int, _Cycle] = {}
        self._numbers = itertools.count()
        self._end = 0
        self._sequence = self._num_orders = 0
        self._begin_s = self._waited_s = self._idle_noted_s = 0.0
        self._has_said_hello = False
        self._emulation = Emulation.of(config.dataparallel)

    def run(self) -> None:
        """Run cycles until there are no more."""
        place, spec = self._place, self._spec
        order = cycle_order(stage=place.stage, num_ahead=spec.num_ahead(place.stage), sizes=self._sizes())
        for action in add_communication(order, num_stages=spec.num_stages, num_ranks=spec.num_ranks):
            self._run(action)

    def _sizes(self) -> Iterator[int]:
        """Yield the microbatches of each cycle, and 0 where the pipeline shall drain."""
        # The first forward and backward of a process take long, and no worker shall be judged by them.
        yield self._begin_trial(max(self._spec.num_ranks, 2))
        yield 0
        while True:
            began = time.perf_counter()
            command: Any = self._place.pipe.recv()
            self._waited_s += time.perf_counter() - began
            match command:
                case Order():
                    yield self._begin(command)
                case Drain():
                    yield 0
                case Calibrate():
                    yield self._begin_trial(command.num_microbatches)
                    yield 0
                case _:
                    return

    def _begin(self, order: Order) -> int:
        """Fetch the weights of an order, and get ready for its microbatches."""
        began = time.perf_counter()
        if not self._cycles:  # nothing else is under way: its time begins now
            self._begin_s = began
        if not self._num_orders:
            self._idle_noted_s = self._flow.idle_s + self._waited_s
        self._num_orders += 1
        count = order.lease.num_microbatches
        # Each incarnation has a jitter of its own, or it would live through its predecessor's cycles again.
        cycle = self._num_orders + 1_000_000 * (order.incarnation - 1)
        pace_s = self._emulation.cycle_s(order.worker, cycle, count) / count
        number = self._open(order.lease, order, pace_s=pace_s)
        buffer = self._buffers.flats[number % len(self._buffers.flats)]
        if not self._place.weights.read(order.version, buffer):
            raise StalenessError(
                f"version {order.version} of the weights is not there; it must be held for this order."
            )
        self._cycles[number].fetch_s = time.perf_counter() - began
        return count

    def _begin_trial(self, count: int) -> int:
        lease = Lease(id=0, worker=0, incarnation=0, ranges=((0, count),), deadline_s=0.0)
        self._open(lease, None, pace_s=0.0)
        return count

    def _open(self, lease: Lease, order: Order | None, *, pace_s: float) -> int:
        number = next(self._numbers)
        self._end += lease.num_microbatches
        self._cycles[number] = _Cycle(order=order, last=self._end - 1)
        self._program.begin(number, lease, pace_s=pace_s)
        self._flow.expect(lease.num_microbatches)
        return number

    def _run(self, action: Action) -> None:
        _, op, microbatch, version = action
        if op == "N":
            assert version is not None
            self._hand_in(version - 1)
            return
        if op == "F" and version is not None:
            cycle = self._cycles[version]
            is_last = microbatch == cycle.last and cycle.order is not None
            if is_last and self._place.stage == 0 and asks_ahead(self._place.config):
                self._place.pipe.send(Ready())
        self._flow.actions[op](action)
        if op == "B" and version is not None:
            self._cycles[version].marks.append(time.perf_counter())

    def _hand_in(self, number: int) -> None:
        """Close a cycle: push its gradient, or say how long it took."""
        cycle = self._cycles.pop(number)
        sums, loss = self._program.take_gradients(), self._program.take_loss(number)
        num_tokens = self._program.take_read(number).num_tokens
        router = self._program.end(number)
        if cycle.order is None:
            self._report_trial(cycle)
            return
        place, order = self._place, cycle.order
        computed = time.perf_counter()
        names = list(place.weights.layout.shapes)
        gradient = Gradient(
            tensors=sum_by_parameter(sums, names, tied_pair=self._tied_pair),
            read_version=order.version,
            num_tokens=num_tokens,
        )
        norms = gradient.norms(names, device=place.device)
        self._sequence += 1
        sent = place.gradient.write(self._sequence, gradient.tensors, key=order.lease.ranges[0][0])
        written = time.perf_counter()
        communication_s = cycle.fetch_s + written - computed
        idle_s = self._flow.idle_s + self._waited_s
        part = Part(
            stage=place.stage,
            sequence=self._sequence,
            order=order,
            num_tokens=num_tokens,
            norms=tuple(norms.tolist()),
            router=router,
            loss=None if loss is None else float(loss),
            idle=sent.idle,
            wire_bytes=sent.num_bytes,
            wire_error=sent.relative_error,
            compute_s=max(written - self._begin_s - communication_s, 0.0),
            communication_s=communication_s,
            idle_s=idle_s - self._idle_noted_s,
        )
        self._begin_s, self._idle_noted_s = written, idle_s
        place.pipe.send(part)

    def _report_trial(self, cycle: _Cycle) -> None:
        """Say how long a microbatch takes once the pipeline is full."""
        config, marks = self._place.config, cycle.marks
        pace_s = (marks[-1] - marks[0]) / max(len(marks) - 1, 1)
        if self._has_said_hello:
            self._place.pipe.send(Calibrated(microbatch_s=pace_s))
            return
        self._has_said_hello = True
        nominal_s = self._emulation.microbatch_s / self._emulation.speed(self._place.worker)
        self._place.pipe.send(Hello(identity=config_hash(config), pace_s=max(pace_s, nominal_s)))
