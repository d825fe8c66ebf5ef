"""The executor `pipeline`: runs one rank's stream of actions, whatever schedule it came from."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from slipstream.assembly import StageParts, llama_parts
from slipstream.config import Config
from slipstream.data.loader import Batch
from slipstream.executor import BatchSource, Point, Snapshot, StateReader, StepReport, merged
from slipstream.microbatches import to_device
from slipstream.models.partition import cut
from slipstream.models.parts import ModelParts
from slipstream.pipeline.actions import Action
from slipstream.pipeline.flow import Flow
from slipstream.pipeline.norms import NormExchange
from slipstream.pipeline.phases import phased_stream
from slipstream.pipeline.schedules import ScheduleSpec, schedule_spec
from slipstream.pipeline.stage import StageProgram
from slipstream.pipeline.tied import TiedExchange
from slipstream.pipeline.transport import Channel, Transport
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.updater import UpdateReport

Noter = Callable[[int, str], None]
"""Is told (rank, text) before each action."""

ProgramBuilder = Callable[[Config, BatchSource, ScheduleSpec, Transport], dict[int, StageProgram[StageParts]]]
"""Builds the stages that a rank holds; see :func:`build_programs`."""


class PipelineExecutor:
    """One rank of a pipeline.

    Nothing here knows a schedule's name: forwards, backwards, norms and optimizer steps happen as the stream says,
    and the stream was proven before the run.

    Args:
        config: Resolved settings.
        batches: Gives the batch of an index.
        transport: Connected to the other ranks.
        note: Is told of each action before it runs.
        record_steps: Keep begin and end of every action in :attr:`spans` until so many steps are done.
        build: Builds this rank's stages; none: :func:`build_programs`.
        model: What to train; ``None``: the decoder that the settings describe.
    """

    def __init__(
        self,
        config: Config,
        batches: BatchSource,
        *,
        transport: Transport,
        note: Noter = lambda rank, text: None,
        record_steps: int = 0,
        build: ProgramBuilder | None = None,
        model: ModelParts | None = None,
    ) -> None:
        self._model = model = model or llama_parts(config)
        self._config = config
        self._transport = transport
        self._rank = transport.rank
        self._note = note
        self._spec = pipeline_spec(config)
        self._programs = (build or partial(build_programs, model=model))(config, batches, self._spec, transport)
        self._flow = Flow(config, self._programs, transport, self._spec, shape=model.message_shape)
        self._evaluated: dict[int, Tensor] = {}
        self._gradients: dict[tuple[int, int], Gradient] = {}
        names = next(iter(self._programs.values())).parts.names
        self._norms = NormExchange(transport, names=names, router_layers=model.router_layers)
        self._tied = TiedExchange(transport, [program.parts for program in self._programs.values()])
        self._reports: list[UpdateReport] = []
        self._stream: Iterator[Action] | None = None
        self._stop_requested = False
        self._idle_noted_s = 0.0
        self._num_steps_to_record = record_steps
        self.spans: list[tuple[Action, float, float]] = []
        self._do = self._flow.actions | {"N": self._post_norm, "O": self._step_optimizer}

    @property
    def step(self) -> int:
        """Updates made so far."""
        return next(iter(self._programs.values())).parts.updater.weights.latest

    @property
    def peak_in_flight(self) -> list[int]:
        """Most microbatches between forward and backward, by stage held here."""
        return [program.peak_in_flight for program in self._programs.values()]

    def run_step(self, *, stop_requested: bool = False) -> StepReport:
        """Run actions up to the next optimizer step, that of the rank's last stage included.

        At that point every rank has run the same number of forwards, so all of them may pause here: to evaluate, to
        save, or for good.
        """
        self._stop_requested |= stop_requested
        if self._stream is None:
            self._rehearse()
            self._stream = self._begin_stream()
        for action in self._stream:
            self._run(action)
            if action.op == "O" and len(self._reports) == len(self._programs):
                return self._report()
        raise AssertionError("the stream ended before the step that was asked for")

    @property
    def has_two_points(self) -> bool:
        """Whether x can differ from y by more than a cast."""
        return next(iter(self._programs.values())).parts.updater.publish.changes_weights

    def evaluate(self, batches: Iterable[Batch], point: Point) -> float:
        """Return the summed loss in nats over batches, on every rank.

        The microbatches in flight stay where they are: evaluation has channels of its own, so the pipeline is neither
        drained before nor filled again after.
        """
        batches = list(batches)
        channels = {name: self._flow.channel(name) for name in ("evaluate", "evaluate_wrap")}
        for stage in self._programs:
            if source := self._flow.neighbour(stage, -1, "evaluate"):
                channels[source[1]].expect(source[0], len(batches))
        total = torch.zeros((), dtype=torch.float64, device=self._transport.device)
        for number, batch in enumerate(batches, start=1):
            self._note(self._rank, f"evaluation on {point}, batch {number} of {len(batches)}")
            for stage, program in self._programs.items():
                total += self._evaluate_stage(stage, program, batch, point, channels)
        for channel in channels.values():
            channel.flush()
        owner = (self._spec.num_stages - 1) % self._spec.num_ranks
        self._transport.share_result(total, owner)
        return float(total)

    def snapshot(self) -> Snapshot:
        """Return a copy of the state after the newest update; needs no other rank and no drained pipeline."""
        return merged([program.parts.snapshot() for program in self._programs.values()])

    def method_metrics(self) -> Mapping[str, float]:
        """Return what methods against staleness tell of themselves, by name, on this rank's first stage."""
        return next(iter(self._programs.values())).parts.method_metrics()

    def figures(self) -> Mapping[str, Any]:
        """Return nothing beside what all executors have."""
        return {}

    def restore(self, state: StateReader) -> None:
        """Continue from a saved state; microbatches that were in flight when it was saved run again."""
        assert self._stream is None, "restore before the first step"
        for program in self._programs.values():
            program.parts.restore(state)

    def close(self) -> None:
        """Wait until what was sent has left. Only after the last step: an early stop leaves messages under way."""
        self._flow.flush()

    def _rehearse(self) -> None:
        """Let each stage compile what it computes, where that is wanted, before any waits for another."""
        if self._config.train.compile:
            for stage, program in self._programs.items():
                self._note(self._rank, f"compiling stage {stage}")
                program.rehearse(self.step, self._model.message_shape)

    def _begin_stream(self) -> Iterator[Action]:
        first, end = self.step, self._config.train.num_steps
        self._flow.expect((end - first) * self._spec.num_microbatches)
        self._tied.begin(end - first)
        return phased_stream(self._spec, self._config.staleness, rank=self._rank, first_batch=first, num_batches=end)

    def _run(self, action: Action) -> None:
        self._note(self._rank, str(action))
        if not self._num_steps_to_record:
            self._do[action.op](action)
            return
        begin = time.perf_counter()
        self._do[action.op](action)
        self.spans.append((action, begin, time.perf_counter()))

    def _post_norm(self, action: Action) -> None:
        """Close a batch's gradient on one stage; with the rank's last stage, send its norms on their way."""
        stage, _, _, version = action
        assert version is not None
        program, batch = self._programs[stage], version - 1
        parts = program.parts
        sums = self._tied.offer(parts, program.take_gradients())
        read = program.take_read(batch)
        gradient = Gradient(tensors=parts.by_parameter(sums), read_version=read.version, num_tokens=read.num_tokens)
        self._gradients[stage, version] = gradient
        owned = {name: gradient.tensors[name] for name in parts.owned}
        part = Gradient(tensors=owned, read_version=0, num_tokens=0)
        self._norms.add(version, part, program.take_loss(batch), router=program.take_router(batch))
        if all((each, version) in self._gradients for each in self._programs):
            idle_s = self._idle_s()
            self._norms.post(
                version, stop=self._stop_requested, idle_s=idle_s - self._idle_noted_s, num_tokens=gradient.num_tokens
            )
            self._idle_noted_s = idle_s

    def _step_optimizer(self, action: Action) -> None:
        stage, _, _, version = action
        assert version is not None
        result = self._norms.wait(version)
        parts = self._programs[stage].parts
        gradient = self._tied.complete(parts, self._gradients.pop((stage, version)))
        report = parts.updater.step(gradient, global_norm(result.norms))
        assert report.version == version, f"the schedule makes version {version}, the weights are at {report.version}"
        self._reports.append(report)

    def _report(self) -> StepReport:
        report = self._reports[-1]
        self._reports.clear()
        self._num_steps_to_record = max(self._num_steps_to_record - 1, 0)
        result = self._norms.take(report.version)
        return StepReport(
            step=report.version,
            loss=result.loss,
            grad_norm=report.grad_norm,
            lr=self._config.optim.lr * report.lr_factor,
            staleness=report.staleness,
            num_tokens=result.num_tokens,
            skipped=report.skipped,
            idle_s=result.idle_s,
            num_ranks=self._spec.num_ranks,
            num_devices=self._spec.num_ranks,
            stop=result.stop,
            router=result.router,
        )

    def _evaluate_stage(
        self, stage: int, program: StageProgram[StageParts], batch: Batch, point: Point, channels: dict[str, Channel]
    ) -> Tensor:
        """Pass one batch through one stage; return its loss on the last stage, 0 elsewhere."""
        device = self._transport.device
        if stage == 0:
            x = to_device(batch.inputs, device)
        elif source := self._flow.neighbour(stage, -1, "evaluate"):
            x = channels[source[1]].receive(source[0], what=f"activations for an evaluation at stage {stage}")
        else:
            x = self._evaluated.pop(stage)
        output = program.parts.forward_at(point, x)
        if program.parts.spec.head:
            return self._model.loss_sum(output, to_device(batch.targets, device)).double()
        if destination := self._flow.neighbour(stage, 1, "evaluate"):
            channels[destination[1]].send(output, destination[0])
        else:
            self._evaluated[stage + 1] = output
        return torch.zeros((), dtype=torch.float64, device=device)

    def _idle_s(self) -> float:
        return self._flow.idle_s + self._norms.idle_s + self._tied.idle_s


def pipeline_spec(config: Config) -> ScheduleSpec:
    """Return the schedule that a run's settings name.

    Raises:
        ConfigError: The sizes do not fit the schedule.
    """
    return schedule_spec(
        config.pipeline.pipeline_schedule,
        num_ranks=config.pipeline.num_stages,
        num_microbatches=config.pipeline.num_microbatches,
        num_extra_in_flight=config.pipeline.num_extra_in_flight,
    )


def build_programs(
    config: Config,
    batches: BatchSource,
    spec: ScheduleSpec,
    transport: Transport,
    *,
    model: ModelParts | None = None,
) -> dict[int, StageProgram[StageParts]]:
    """Build the stages that a rank holds, in order."""
    model = model or llama_parts(config)
    cuts = cut(model.costs(), spec.num_stages)
    return {
        stage: StageProgram(
            StageParts(config, cuts[stage], num_versions=spec.staleness + 1, device=transport.device, model=model),
            batches,
            num_microbatches=spec.num_microbatches,
            device=transport.device,
            loss_sum=model.loss_sum,
        )
        for stage in spec.stages(transport.rank)
    }
