"""Memory of each pipeline stage, 1F1B against PipeDream-2BW: what the pages on the pipeline say, measured.

    python benchmarks/pipeline_memory.py [--write benchmarks/results/pipeline_memory.md]

Every stage is a process. Two things are measured in it. Bytes that live from one action to the next, by what they are
for: distinct storages of the published weights, the optimizer's own weights and state, sums of gradients, what the
graphs of microbatches in flight have kept, and messages. And the peak of torch's CPU allocator over the whole run,
which also sees what lives within an action only.
"""

import argparse
import dataclasses
import datetime
import functools
import gc
import os
import platform
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

from slipstream.config import Config, from_dict, resolve
from slipstream.data.loader import Batch
from slipstream.pipeline.runtime import PipelineExecutor
from slipstream.pipeline.stage import StageProgram
from slipstream.pipeline.transport import Transport
from slipstream.train.processes import RankContext, run_processes

VOCAB_SIZE = 257
NUM_STEPS = 4
RUNS = {
    "1F1B": {"pipeline_schedule": "one_f_one_b"},
    "2BW": {"pipeline_schedule": "two_bw"},
    "2BW, error feedback": {"pipeline_schedule": "two_bw", "error_feedback": 1.0},
    "2BW, 2 extra in flight": {"pipeline_schedule": "two_bw", "num_extra_in_flight": 2},
}
PARTS = ("weights", "masters", "optimizer", "gradients", "activations", "messages")


@dataclasses.dataclass
class Usage:
    """Peaks of one stage, in bytes."""

    num_parameters: int
    of_microbatch: int
    in_flight: int
    peaks: dict[str, int]
    all_parts: int
    allocator: int


def size(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of all distinct storages."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}
    return sum(storages.values())


class Meter:
    """Follows one rank's executor from action to action."""

    def __init__(self, executor: PipelineExecutor) -> None:
        self.executor = executor
        (self.program,) = executor._programs.values()
        self.kept: dict[int, dict[int, int]] = {}
        self.peaks = dict.fromkeys(PARTS, 0)
        self.all_parts = self.in_flight = self.of_microbatch = 0
        self._count_kept(self.program)
        self._run = executor._run
        executor._run = self.run

    def _count_kept(self, program: StageProgram) -> None:
        """Learn what autograd keeps of each microbatch; weights are no part of it."""
        forward, backward = program.forward, program.backward
        weights = {leaf.untyped_storage().data_ptr() for leaves in program.parts.leaves for leaf in leaves.values()}

        def counted_forward(microbatch: int, version: int, received: Tensor | None) -> Tensor | None:
            kept = self.kept[microbatch] = {}

            def pack(tensor: Tensor) -> Tensor:
                storage = tensor.untyped_storage()
                if storage.data_ptr() not in weights:
                    kept[storage.data_ptr()] = storage.nbytes()
                return tensor.detach()

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                return forward(microbatch, version, received)

        def counted_backward(microbatch: int, received: Tensor | None) -> Tensor | None:
            gradient = backward(microbatch, received)
            del self.kept[microbatch]
            return gradient

        program.forward, program.backward = counted_forward, counted_backward

    def run(self, action: object) -> None:
        """Run an action, then look at what lives."""
        self._run(action)
        executor, parts = self.executor, self.program.parts
        sums = [*self.program._accumulator._sums.values()]
        waiting = [t for gradient in executor._gradients.values() for t in gradient.tensors.values() if t is not None]
        flow = executor._flow
        messages = [*flow.received.values(), *flow.produced.values()]
        for channel in flow.channels.values():
            messages += [tensor for _, tensor, _ in channel._sending]
            messages += [buffer for posted in channel._receiving.values() for _, buffer in posted]
        states = [state for optimizer in parts.updater.optimizers.values() for state in optimizer.state.values()]
        now = {
            "weights": size(tensor for buffer in parts.updater.weights._buffers for tensor in buffer.values()),
            "masters": size(parts.updater.masters.values()),
            "optimizer": size(value for state in states for value in state.values() if isinstance(value, Tensor)),
            "gradients": size(sums + waiting),
            "activations": sum(sum(kept.values()) for kept in self.kept.values()),
            "messages": size(messages),
        }
        self.peaks = {part: max(self.peaks[part], now[part]) for part in PARTS}
        self.all_parts = max(self.all_parts, sum(now.values()))
        self.in_flight = max(self.in_flight, len(self.kept))
        self.of_microbatch = max([self.of_microbatch, *(sum(kept.values()) for kept in self.kept.values())])


def batch_of(config: Config, index: int) -> Batch:
    """Return tokens that depend on the index alone."""
    shape = (2, config.batch_size, config.data.sequence_length)
    inputs, targets = np.random.default_rng(index).integers(VOCAB_SIZE, size=shape)
    return Batch(index=index, inputs=inputs, targets=targets)


def measure_rank(context: RankContext, configs: dict[str, Config]) -> dict[str, Usage]:
    """Train a few steps of each setting as one rank."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=context.store, rank=context.rank, world_size=context.num_ranks)
    cpu = torch.device("cpu")
    transport = Transport(rank=context.rank, num_ranks=context.num_ranks, device=cpu, timeout_s=300.0)
    found = {}
    for name, config in configs.items():
        context.note(context.rank, name)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            executor = PipelineExecutor(config, functools.partial(batch_of, config), transport=transport)
            meter = Meter(executor)
            for _ in range(NUM_STEPS):
                executor.run_step()
            executor.close()
        num_parameters = sum(master.numel() for master in meter.program.parts.updater.masters.values())
        found[name] = Usage(
            num_parameters=num_parameters,
            of_microbatch=meter.of_microbatch,
            in_flight=meter.in_flight,
            peaks=meter.peaks,
            all_parts=meter.all_parts,
            allocator=allocator_peak(profiler),
        )
        del executor, meter, profiler
        gc.collect()  # or the next run would be credited with what is freed of this one
    return found


def allocator_peak(profiler: profile) -> int:
    """Return the most bytes that were allocated at once while the profiler ran."""
    assert profiler.profiler is not None
    now = most = 0
    for event in profiler.profiler.kineto_results.events():
        if event.name() == "[memory]":
            now += event.nbytes()
            most = max(most, now)
    return most


def configs_of(args: argparse.Namespace, dtype: str) -> dict[str, Config]:
    """Return the settings of each run."""
    base = {
        "executor": "pipeline",
        "data": {"sequence_length": args.sequence_length},
        "model": {"num_layers": 2 * args.num_stages, "dim": args.dim, "ffn_dim": 11 * args.dim // 4},
        "train": {"num_steps": NUM_STEPS, "microbatch_size": 4, "compute_dtype": dtype},
    }
    configs = {}
    for name, settings in RUNS.items():
        pipeline = {"num_stages": args.num_stages, "num_microbatches": args.num_microbatches}
        pipeline |= {key: value for key, value in settings.items() if key != "error_feedback"}
        staleness = {"error_feedback": settings.get("error_feedback", 0.0)}
        table = base | {"pipeline": pipeline, "staleness": staleness}
        configs[name] = resolve(from_dict(table), vocab_size=VOCAB_SIZE, cuda=False)
    return configs


def mib(num_bytes: float) -> str:
    """Return bytes in MiB."""
    return f"{num_bytes / 2**20:.1f}"


def table(results: dict[str, list[Usage]]) -> list[str]:
    """Return the lines of a Markdown table, a stage a row."""
    lines = [
        "| schedule | stage | in flight | " + " | ".join(PARTS) + " | together | allocator's peak |",
        "| --- | ---: | ---: |" + " ---: |" * (len(PARTS) + 2),
    ]
    for name, stages in results.items():
        for stage, usage in enumerate(stages):
            cells = [mib(usage.peaks[part]) for part in PARTS] + [mib(usage.all_parts), mib(usage.allocator)]
            lines.append(f"| {name} | {stage} | {usage.in_flight} | " + " | ".join(cells) + " |")
    return lines


def statements(results: dict[str, list[Usage]], *, num_bytes: int) -> list[str]:
    """Hold the statements about memory against the measured bytes."""
    flushing, ours = results["1F1B"], results["2BW"]
    extra, feedback = results["2BW, 2 extra in flight"], results["2BW, error feedback"]

    def more(part: str, unit: int, other: list[Usage] = flushing) -> str:
        return ", ".join(
            f"{(b.peaks[part] - a.peaks[part]) / (unit * a.num_parameters):.2f}" for a, b in zip(other, ours)
        )

    def in_microbatches(usages: list[Usage]) -> str:
        return ", ".join(f"{usage.peaks['activations'] / usage.of_microbatch:.2f}" for usage in usages)

    held = ", ".join(mib(b.all_parts - a.all_parts) for a, b in zip(ours, feedback))
    transient = ", ".join(mib(b.allocator - a.allocator) for a, b in zip(ours, feedback))
    return [
        f"* One more copy of the weights in the compute type ({num_bytes} bytes a parameter) than 1F1B, by stage: "
        f"{more('weights', num_bytes)} copies."
        + (
            " Both keep masters beside the weights; synchronous training in float32 could do without, and over that "
            "least 2BW costs two copies."
            if num_bytes == 4
            else ""
        ),
        f"* One more accumulator (4 bytes a parameter), by stage: {more('gradients', 4)} accumulators.",
        f"* Activations of p - s microbatches on stage s. 1F1B: {in_microbatches(flushing)}; 2BW: "
        f"{in_microbatches(ours)}; with 2 extra: {in_microbatches(extra)} microbatches.",
        f"* Error feedback keeps nothing: {held} MiB more from action to action. The allocator's peak changes by "
        f"{transient} MiB"
        + (
            "."
            if num_bytes == 4
            else ": while it steps, a stage keeps its old masters in float32, which the narrower buffer cannot hold."
        ),
    ]


def main() -> None:
    """Measure, print the tables, and write them where asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-stages", type=int, default=4)
    parser.add_argument("--num-microbatches", type=int, default=6)
    parser.add_argument("--dim", type=int, default=256)
    parser.add_argument("--sequence-length", type=int, default=64)
    parser.add_argument("--write", type=Path, help="Markdown file to write as well")
    args = parser.parse_args()
    lines = [
        "# Memory of each pipeline stage",
        "",
        f"{datetime.date.today()}, `python benchmarks/pipeline_memory.py --num-stages {args.num_stages} "
        f"--num-microbatches {args.num_microbatches} --dim {args.dim} --sequence-length {args.sequence_length}`, "
        f"torch {torch.__version__}, {platform.machine()} with {os.cpu_count()} cores, one process a stage.",
        "",
        f"{2 * args.num_stages} blocks, 4 sequences a microbatch, AdamW, {NUM_STEPS} steps. MiB; each column is its "
        "own peak over the run, *together* is the peak of their sum after any action, and the *allocator's peak* also "
        "holds what lives within an action. Weights are the published copies, masters the optimizer's own in float32, "
        "gradients the sums of batches, messages those sent and not yet known to have left, received and posted for.",
    ]
    for dtype, num_bytes in (("float32", 4), ("bfloat16", 2)):
        configs = configs_of(args, dtype)
        by_rank = run_processes(
            measure_rank, configs, num_ranks=args.num_stages, timeout_s=300.0, remedy="Start the benchmark again."
        )
        results = {name: [found[name] for found in by_rank] for name in configs}
        lines += ["", f"## Computed in {dtype}", "", *table(results), "", *statements(results, num_bytes=num_bytes)]
    print("\n".join(lines))
    if args.write:
        args.write.parent.mkdir(parents=True, exist_ok=True)
        args.write.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
