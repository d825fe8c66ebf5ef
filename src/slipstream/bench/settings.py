"""What `bench` is asked to time, and which schedules fit the sizes. Imports no torch."""

import dataclasses
import math
from collections.abc import Mapping
from types import MappingProxyType
from typing import Literal, get_args

from slipstream.config import (
    Config,
    DataConfig,
    ModelConfig,
    OptimConfig,
    PipelineConfig,
    PipelineSchedule,
    TrainConfig,
    resolve,
)
from slipstream.errors import ConfigError, nearest
from slipstream.models.partition import stages
from slipstream.pipeline.schedules import schedule_spec

OURS: tuple[PipelineSchedule, ...] = ("gpipe", "one_f_one_b", "interleaved", "two_bw")
"""Our schedules."""

TORCH: Mapping[str, str] = MappingProxyType(
    {
        "torch_gpipe": "ScheduleGPipe",
        "torch_1f1b": "Schedule1F1B",
        "torch_interleaved": "ScheduleInterleaved1F1B",
        "torch_interleaved_zb": "ScheduleInterleavedZeroBubble",
        "torch_zbv": "ScheduleZBVZeroBubble",
    }
)
"""torch.distributed.pipelining's schedules, by the names they have here."""

NAMES = (*OURS, *TORCH)
SPLITTING = ("torch_interleaved_zb", "torch_zbv")
"""Schedules that compute the gradients of inputs and of weights at different times."""

_EMULATED_DIM = 16
"""Width of the tiny model that sleeping stages hold the weights of."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPipelineConfig:
    """Time pipeline schedules, ours and those of torch.distributed.pipelining, on one model in alternation."""

    num_stages: int = 2
    """Ranks, each a process; schedules with several stages a rank cut the model into twice as many."""
    num_microbatches: int = 2
    """Microbatches a batch."""
    schedules: tuple[str, ...] = ()
    """Names, separated by blanks or commas: gpipe one_f_one_b interleaved two_bw, torch_gpipe torch_1f1b
    torch_interleaved torch_interleaved_zb torch_zbv; none: all that fit the sizes."""
    rounds: int = 3
    """How often each schedule is run; they take turns."""
    steps: int = 4
    """Steps measured each time, after those that fill and warm up."""
    num_extra_in_flight: int = 0
    """Further microbatches that two_bw starts ahead, to hide message latency."""
    emulate_forward_ms: float | None = None
    """Sleep this long in place of a rank's forward of one microbatch; messages stay real."""
    emulate_backward_ms: float | None = None
    """The same for the backward; give both or none."""
    emulate_message_bytes: int = 262144
    """Size of the messages between sleeping stages; all ranks copy theirs on the same few cores."""
    dim: int = 256
    """Width of the model that is computed, not emulated."""
    num_layers: int = 8
    """Decoder blocks."""
    sequence_length: int = 256
    """Tokens a sequence."""
    microbatch_size: int = 4
    """Sequences a microbatch."""
    optimizer: str = "adamw"
    """As optim.name of a run: `adamw`, `muon`, or the dotted name of a torch optimizer."""
    timeout_s: float = 120.0
    """Seconds after which a rank gives up waiting for another."""

    @property
    def emulated(self) -> bool:
        """Whether stages sleep instead of computing."""
        return self.emulate_forward_ms is not None


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchExchangeConfig:
    """Time how weights and gradients pass between the server and worker processes, beside a plain copy of memory."""

    engine: Literal["process", "ray"] = "process"
    """Whose transport: shared memory, or Ray's on this machine."""
    ray_transport: Literal["object_store", "c10d"] = "object_store"
    """Which of Ray's, as dataparallel.ray_transport of a run."""
    num_workers: int = 1
    """Worker processes, all at once."""
    megabytes: int = 100
    """Of float32 weights, and so of each gradient."""
    rounds: int = 5
    """How often exchange and plain copy take turns."""
    cycles: int = 10
    """Pulls and pushes of each worker in a round."""


def check_exchange(config: BenchExchangeConfig) -> None:
    """Refuse numbers that cannot be timed.

    Raises:
        ConfigError: One is out of range.
    """
    for field in ("num_workers", "megabytes", "rounds", "cycles"):
        if getattr(config, field) < 1:
            raise ConfigError(f"{field} is {getattr(config, field)}; give 1 or more.")
    if config.engine != "ray" and config.ray_transport != "object_store":
        raise ConfigError(
            f"ray_transport is given, but the engine is '{config.engine}'. Use --engine ray, or leave it out."
        )


def check_settings(config: BenchPipelineConfig) -> None:
    """Refuse numbers that cannot be timed.

    Raises:
        ConfigError: One is out of range, or only one of the emulated times is given.
    """
    positive = "num_microbatches rounds steps emulate_message_bytes dim num_layers sequence_length microbatch_size"
    least = {"num_stages": 2} | dict.fromkeys(positive.split(), 1)
    for field, bound in least.items():
        if getattr(config, field) < bound:
            raise ConfigError(f"{field} is {getattr(config, field)}; give {bound} or more.")
    times = {name: getattr(config, name) for name in ("emulate_forward_ms", "emulate_backward_ms")}
    missing = [name for name, value in times.items() if value is None]
    if len(missing) == 1:
        raise ConfigError(f"{missing[0]} is missing. Give both emulated times, or none to compute.")
    for name, value in times.items():
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name} is {value}; give a finite number of more than 0 ms.")


def choose_schedules(config: BenchPipelineConfig) -> tuple[list[str], dict[str, str]]:
    """Return the schedules to time, and why others were left out.

    Raises:
        ConfigError: A schedule that was asked for is unknown or does not fit the sizes, or none does.
    """
    asked = [name for word in config.schedules for name in word.split(",") if name]
    for name in asked:
        if name not in NAMES:
            raise ConfigError(f"there is no schedule '{name}'.{nearest(name, NAMES)} Allowed: {', '.join(NAMES)}.")
    reasons = {name: reason for name in asked or NAMES if (reason := _obstacle(config, name))}
    if asked and reasons:
        name, reason = next(iter(reasons.items()))
        raise ConfigError(f"{name} cannot be timed here: {reason}")
    chosen = [name for name in dict.fromkeys(asked or NAMES) if name not in reasons]
    if not chosen:
        raise ConfigError(f"no schedule fits these sizes. {NAMES[0]}: {reasons[NAMES[0]]}")
    return chosen, reasons


def run_config(config: BenchPipelineConfig, schedule: PipelineSchedule, *, num_steps: int) -> Config:
    """Return the settings of a training run that computes what is timed.

    Args:
        config: What is timed.
        schedule: Ours; also stands for torch's, which share everything else.
        num_steps: Length of the run.

    Raises:
        ConfigError: The settings contradict each other.
    """
    dim, num_layers, sequence_length = config.dim, config.num_layers, config.sequence_length
    if config.emulated:
        sequence_length = max(1, config.emulate_message_bytes // (4 * config.microbatch_size * _EMULATED_DIM))
        dim, num_layers = _EMULATED_DIM, config.num_stages * (2 if schedule == "interleaved" else 1)
    num_heads = dim // 32 if dim % 32 == 0 else 1
    settings = Config(
        executor="pipeline",
        data=DataConfig(sequence_length=sequence_length),
        model=ModelConfig(
            dim=dim,
            num_layers=num_layers,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            ffn_dim=-(-dim // 12) * 32,  # 8/3 of the width, as Llama has it
        ),
        optim=OptimConfig(name=config.optimizer, lr_schedule="constant"),
        pipeline=PipelineConfig(
            num_stages=config.num_stages,
            num_microbatches=config.num_microbatches,
            pipeline_schedule=schedule,
            num_extra_in_flight=config.num_extra_in_flight if schedule == "two_bw" else 0,
            timeout_s=config.timeout_s,
        ),
        train=TrainConfig(num_steps=num_steps, microbatch_size=config.microbatch_size, device="cpu"),
    )
    return resolve(settings, vocab_size=256, cuda=False)


def _obstacle(config: BenchPipelineConfig, name: str) -> str:
    """Return why a schedule cannot be timed with these sizes; empty: it can."""
    p, m = config.num_stages, config.num_microbatches
    one_a_rank = name in ("gpipe", "one_f_one_b", "two_bw", "torch_gpipe", "torch_1f1b")
    model = run_config(config, "gpipe" if one_a_rank else "interleaved", num_steps=1).model
    try:
        stages(model, p if one_a_rank else 2 * p)
        if name in get_args(PipelineSchedule):
            schedule_spec(
                name,  # type: ignore[arg-type]  # just checked
                num_ranks=p,
                num_microbatches=m,
                num_extra_in_flight=config.num_extra_in_flight if name == "two_bw" else 0,
            )
    except ConfigError as error:
        return str(error)
    if config.emulated and name in SPLITTING:
        return "it splits the backward, which only real computation can be; leave out the emulated times."
    if name == "torch_1f1b" and m < p:
        return f"torch wants at least as many microbatches as stages, given {m} for {p}."
    if name in ("torch_interleaved", "torch_interleaved_zb") and m % max(1, m // p):
        return f"torch wants microbatches that {m // p} rounds of about {p} divide evenly, given {m}."
    return ""
