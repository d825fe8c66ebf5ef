"""Every setting of a run: frozen dataclasses, their TOML form, and the checks that need no file or device.

Precedence is command line > file > default. The field docstrings are the ``--help`` texts.
"""

import dataclasses
import hashlib
import json
import math
import tomllib
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import tomli_w
import tyro

from slipstream.errors import ConfigError, nearest


def _parse_switch(words: list[str]) -> bool:
    if words[0].lower() not in ("true", "false"):
        raise ValueError(f"{words[0]!r} is neither true nor false")
    return words[0].lower() == "true"


def _parse_table(words: list[str]) -> dict[str, Any]:
    table = json.loads(words[0])
    if not isinstance(table, dict):
        raise ValueError(f'{words[0]!r} is not a JSON object such as {{"betas": [0.9, 0.95]}}')
    return table


Switch = Annotated[
    bool,
    tyro.conf.FlagConversionOff,
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="true|false",
        instance_from_str=_parse_switch,
        is_instance=lambda value: isinstance(value, bool),
        str_from_instance=lambda value: [str(value).lower()],
    ),
]
"""A boolean that is written out, so that a flag can also turn off what a file turned on."""

Table = Annotated[
    dict[str, Any],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="JSON",
        instance_from_str=_parse_table,
        is_instance=lambda value: isinstance(value, dict),
        str_from_instance=lambda value: [json.dumps(value)],
    ),
]
"""Arguments of something that is not ours to list."""


def _parse_numbers(words: list[str]) -> tuple[float, ...]:
    try:
        return tuple(float(part) for word in words for part in word.split(",") if part)
    except ValueError:
        raise ValueError(f"{' '.join(words)!r} is not a list of numbers such as 1,1,0.25") from None


Numbers = Annotated[
    tuple[float, ...],
    tyro.constructors.PrimitiveConstructorSpec(
        nargs="*",
        metavar="1,1,0.25",
        instance_from_str=_parse_numbers,
        is_instance=lambda value: isinstance(value, tuple) and all(isinstance(item, float | int) for item in value),
        str_from_instance=lambda value: [",".join(f"{item:g}" for item in value)] if value else [],
    ),
]
"""Numbers with commas or spaces between them."""

Executor = Literal["single", "pipeline", "dataparallel"]
Engine = Literal["inline", "process", "ray"]
PipelineSchedule = Literal["two_bw", "one_f_one_b", "gpipe", "interleaved"]
LrSchedule = Literal["cosine", "linear", "constant"]
Coefficient = float | Literal["auto"]

SCHEDULE_DELAY: dict[str, int] = {"two_bw": 1, "one_f_one_b": 0, "gpipe": 0, "interleaved": 0}
"""Staleness that each pipeline schedule gives every gradient after the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens to train on."""

    path: str = ""
    """Folder made by `slipstream data prepare`; empty: the built-in Shakespeare, as bytes."""
    sequence_length: int = 128
    """Tokens a sequence."""
    seed: int = 0
    """Seed of the order in which sequences are read."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """Shape of the Llama-style decoder."""

    num_layers: int = 4
    """Decoder blocks."""
    dim: int = 128
    """Width of the residual stream."""
    num_heads: int = 4
    """Query heads; must divide dim."""
    num_kv_heads: int = 2
    """Key and value heads; must divide num_heads."""
    head_dim: int = 0
    """Channels of a head; 0: dim / num_heads."""
    qk_norm: Switch = False
    """Norm each head's queries and keys before they are turned by their positions, as Qwen3 does."""
    ffn_dim: int = 352
    """Inner width of the SwiGLU feed-forward."""
    num_experts: int = 0
    """Experts of a layer, of which each token takes `experts_per_token`; 0: one feed-forward for all tokens."""
    experts_per_token: int = 2
    """Experts that each token goes through (with experts)."""
    expert_ffn_dim: int = 0
    """Inner width of an expert (with experts); 0: ffn_dim."""
    num_shared_experts: int = 0
    """Further experts that every token goes through, kept as one feed-forward so many times as wide (with experts)."""
    num_dense_layers: int = 0
    """First layers that keep one feed-forward of ffn_dim for all tokens (with experts)."""
    router_renormalize: Switch = True
    """Divide the weights of the chosen experts by their sum (with experts)."""
    router_aux_loss: float = 0.01
    """Coefficient of the loss that balances the experts' loads (with experts)."""
    router_z_loss: float = 0.0
    """Coefficient of the loss that keeps the router's scores small (with experts)."""
    vocab_size: int = 0
    """Rows of the embedding, at least the tokenizer's tokens; 0: as many."""
    rope_theta: float = 10000.0
    """Base of the rotary position frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""
    init_std: float = 0.02
    """Standard deviation of initial weights; residual projections get it divided by sqrt(2 num_layers)."""
    tie_embeddings: Switch = False
    """Use one matrix for the embedding and the head (kept as two leaves, updated alike)."""
    dropout: float = 0.0
    """Probability with which a value of the residual branches is dropped in training."""
    activation_checkpointing: Switch = False
    """Recompute each block in the backward pass instead of keeping its activations."""
    seed: int = 0
    """Seed of the initial weights and of dropout."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """The rule that turns a gradient into an update, and its step size."""

    name: str = "adamw"
    """`adamw`, `muon`, or the dotted name of any torch.optim.Optimizer."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors get none."""
    args: Table = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer named above (on the command line: a JSON object)."""
    adamw_lr: float | None = None
    """With muon: peak learning rate of the parameters AdamW keeps (embedding, head, vectors); none: lr."""
    adamw_args: Table = dataclasses.field(default_factory=dict)
    """With muon: further arguments of that AdamW (on the command line: a JSON object)."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down; 0: never."""
    lr_schedule: LrSchedule = "cosine"
    """Shape of the decay after the warm-up."""
    lr_warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    lr_total_steps: int | None = None
    """Updates after which the rate has reached its end; none: train.num_steps. Its own setting, so that a
    shorter run keeps its rates."""
    lr_final_fraction: float = 0.1
    """Rate at the end as a fraction of the peak."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgcConfig:
    """The adaptive gradient compensator (staleness.correction `agc`, and its control `agc_damping`)."""

    groups: Literal["role_depth", "global"] = "role_depth"
    """Parameters that share a curvature: those of a role in the same blocks, or all."""
    blocks_per_group: int = 1
    """Blocks that a group of role_depth covers."""
    curvature: Literal["secant_group", "secant_diag", "fisher", "fisher_root"] = "secant_group"
    """One number a group; or the mean square of the gradient, or its root, with one scale a group. `secant_diag`,
    element by element, needs probes, which no executor makes yet: it is refused."""
    displacement: Literal["exact", "ema"] = "exact"
    """How far the weights moved since they were read: as they are, or a mean step times the staleness."""
    decay: float = 0.99
    """Weight of the past in every average."""
    min_pairs: int = 200
    """Pairs of gradients a group needs before it is corrected; the learning-rate warm-up must be over, too."""
    ramp_steps: int = 500
    """Updates over which the correction rises to its full size."""
    trust_radius: float = 0.5
    """Largest correction of a group as a fraction of its gradient."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StalenessConfig:
    """How stale gradients are, and what is done about it."""

    delay: int | None = None
    """Updates between the weights a batch reads and the newest; none: what the pipeline schedule gives, and 0
    for the executor `single`."""
    error_feedback: Coefficient = 0.0
    """Coefficient c of update-level error feedback: publish x = y + c (y - y_prev); 0: none; `auto`: found while
    training, for each parameter."""
    delay_weights: tuple[float, ...] = ()
    """Relative probabilities of a delay of 0, 1, 2, ...: each batch draws its own (executor `single`)."""
    delay_replay: str = ""
    """A run's metrics.jsonl: batches have the staleness recorded there (executor `single`)."""
    delay_stages: int = 0
    """The original PipeDream at so many stages: stage s has a delay of stages - 1 - s (executor `single`)."""
    delay_roles: tuple[str, ...] = ()
    """Delay only parameters of these roles, or, with `not` first, all others (executor `single`)."""
    delay_blocks: tuple[int, ...] = ()
    """Delay only parameters of the blocks from the first of these two numbers to before the second (`single`)."""
    backward_weights: Literal["read", "newest", "pipemare"] = "read"
    """Weights that the backward multiplies by: those that the forward read, the newest, or the newest led back by
    PipeMare's T2 (executor `single`)."""
    sync_until_step: int = 0
    """Updates without delay at the start; error feedback begins after them (executor `single`)."""
    sync_from_step: int = 0
    """Update from which on there is no delay and no error feedback; 0: never (executor `single`)."""
    prediction: Literal["none", "spectrain", "xpipe"] = "none"
    """Publish weights predicted from the optimizer's momentum, in place of error feedback."""
    prediction_steps: float = 0.0
    """Updates to predict ahead; 0: the delay."""
    correction: Literal[
        "none", "dc_asgd", "dc_asgd_adaptive", "gap_aware", "gradient_feedback", "agc", "agc_damping"
    ] = "none"
    """What is done to a stale gradient."""
    correction_strength: float = 0.0
    """lambda of dc_asgd and dc_asgd_adaptive, c of gradient_feedback."""
    agc: AgcConfig = dataclasses.field(default_factory=AgcConfig)
    lr_discount: Literal["none", "inverse_staleness", "pipemare", "aalr"] = "none"
    """Factor on the learning rate by staleness."""
    lr_discount_steps: int = 0
    """Updates until pipemare uses the whole rate."""
    aalr_threshold: Coefficient = "auto"
    """Mean staleness above which aalr cuts the rate; auto: 1.5 times what the gradients in flight must give."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig:
    """How a batch is cut into microbatches and the model into stages."""

    num_stages: int = 2
    """Pipeline stages, one rank each (executor `pipeline`)."""
    num_microbatches: int = 4
    """Microbatches a batch, accumulated in order; also with the executor `single`."""
    pipeline_schedule: PipelineSchedule = "two_bw"
    """Order of forwards, backwards and optimizer steps (executor `pipeline`)."""
    num_extra_in_flight: int = 0
    """Further microbatches started ahead, to hide message latency (schedule `two_bw`)."""
    timeout_s: float = 120.0
    """Seconds without progress after which a blocked run ends with the name of the blocked action."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataParallelConfig:
    """Workers that train one model at their own speeds (executor `dataparallel`).

    A step is always of the tokens of pipeline.num_microbatches microbatches, whoever computes them.
    """

    num_workers: int = 0
    """Workers; 0: one for each of emulate_speeds, and 2 without them."""
    mode: Literal["async", "sync"] = "async"
    """`async`: nobody waits. `sync`: all gradients are averaged at every step, in equal shares, and everyone waits for
    the slowest."""
    pushes_per_step: int = 0
    """Gradients that make a step; 0: as many as there are workers, which is safe. 1: the least stale weights, and
    steps of one worker's gradient each."""
    dynamic_batches: Switch = True
    """Give faster workers more microbatches, so that all cycles take the same time (mode `async`)."""
    min_microbatches: int = 1
    """Least microbatches of a worker's gradient."""
    max_microbatches: int = 0
    """Most microbatches of a worker's gradient; 0: no limit."""
    max_staleness: int = 0
    """A worker waits for new work while taking it could make any gradient staler than this; 0: no bound."""
    unit: Literal["gradient", "pseudo_gradient"] = "gradient"
    """What a worker pushes. `pseudo_gradient`: it takes local_steps optimizer steps by itself, and pushes how far they
    led (mode `async`)."""
    local_steps: int = 1
    """Optimizer steps that a worker takes between two pushes; a step of the run is then of so many batches."""
    outer_lr: float = 0.7
    """Rate at which the server follows a mean pseudo-gradient; 1: all the way."""
    outer_momentum: float = 0.9
    """Nesterov momentum of the server's steps; 0: none."""
    outer_momentum_every: int = 0
    """Steps of the server between two of that momentum; 0: as many as it takes until all workers have pushed once."""
    outer_momentum_spread: float = 0.0
    """Share of that momentum that each of the steps between takes, at most 1 / outer_momentum_every."""
    wire: Literal["float32", "bfloat16", "int8"] = "float32"
    """Numbers that gradients are pushed in. `int8`: a byte each, and a scale for each 2048 of them."""
    emulate_speeds: Numbers = ()
    """Speed of each worker relative to the first kind, such as 1,1,1,0.25; none: all alike."""
    emulate_microbatch_ms: float = 0.0
    """Compute time of a microbatch at speed 1, at least four times the real one; 0: as long as it takes, and 100 ms of
    the virtual clock with the engine `inline`."""
    emulate_jitter: float = 0.0
    """Standard deviation of the logarithm of each cycle's time."""
    seed: int = 0
    """Seed of the jitter."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length and numerics of the run."""

    num_steps: int = 200
    """Batches, and updates: update k (from 1) is made of batch k-1."""
    microbatch_size: int = 4
    """Sequences a microbatch; a batch has this times pipeline.num_microbatches."""
    threads_per_rank: int = 1
    """CPU threads of each process; a different count may round differently."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute; auto: CUDA where it is available."""
    compute_dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """Type of forward and backward; auto: bfloat16 on CUDA, float32 on CPU. Master weights are always float32."""
    max_skipped_steps: int = 3
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Held-out loss, on the trained weights x and on the optimizer's weights y."""

    every_steps: int = 0
    """Updates between evaluations; 0: only before the first and after the last."""
    num_sequences: int = 256
    """Validation sequences read, from the first on; fewer where the split has fewer."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the whole state is saved. A run always saves at its last step."""

    every_steps: int = 0
    """Updates between checkpoints; 0: only the last."""
    keep_last: int = 2
    """Complete checkpoints kept; older ones are removed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is shown while training. metrics.jsonl always has every step."""

    every_steps: int = 10
    """Updates between lines on a plain terminal or in a file."""
    trace_steps: int = 0
    """Steps, from this start on, whose actions trace.json shows for each rank (executor `pipeline`); 0: none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A whole run."""

    run_dir: str = "runs/default"
    """Where config, metrics, evaluations, summary and checkpoints go."""
    executor: Executor = "single"
    """`single`: one process, any delay. `pipeline`: one rank a stage. `dataparallel`: workers and a parameter
    server."""
    engine: Engine = "process"
    """Where workers live (executor `dataparallel`). `process`: a process each, on this machine. `inline`: in this
    process, on a virtual clock; the same run, to the bit, every time. `ray`: anywhere in a Ray cluster."""
    data: DataConfig = dataclasses.field(default_factory=DataConfig)
    model: ModelConfig = dataclasses.field(default_factory=ModelConfig)
    optim: OptimConfig = dataclasses.field(default_factory=OptimConfig)
    staleness: StalenessConfig = dataclasses.field(default_factory=StalenessConfig)
    pipeline: PipelineConfig = dataclasses.field(default_factory=PipelineConfig)
    dataparallel: DataParallelConfig = dataclasses.field(default_factory=DataParallelConfig)
    train: TrainConfig = dataclasses.field(default_factory=TrainConfig)
    evaluate: EvaluateConfig = dataclasses.field(default_factory=EvaluateConfig)
    checkpoint: CheckpointConfig = dataclasses.field(default_factory=CheckpointConfig)
    log: LogConfig = dataclasses.field(default_factory=LogConfig)

    @property
    def local_steps(self) -> int:
        """Batches that a step of the run takes: more than one where workers take optimizer steps by themselves."""
        settings = self.dataparallel
        is_local = self.executor == "dataparallel" and settings.unit == "pseudo_gradient"
        return settings.local_steps if is_local else 1

    @property
    def batch_size(self) -> int:
        """Sequences a batch."""
        return self.train.microbatch_size * self.pipeline.num_microbatches

    @property
    def batch_tokens(self) -> int:
        """Tokens a batch."""
        return self.batch_size * self.data.sequence_length


def load_toml(path: str | Path) -> Config:
    """Read a config file.

    Args:
        path: A TOML file with the tables of :class:`Config`; what it leaves out keeps its default.

    Raises:
        ConfigError: The file cannot be read, is not TOML, or holds an unknown key or a value of a wrong type.
    """
    path = Path(path)
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(
            f"cannot read the config file {path}: {error.strerror}. Give the path of a TOML file."
        ) from error
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path} is not UTF-8 text (byte {error.start}). Give a TOML file.") from error
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path} is not valid TOML: {error}.") from error
    return from_dict(table, source=str(path))


def from_dict(table: Mapping[str, Any], *, source: str = "config") -> Config:
    """Build a :class:`Config` from nested tables, checking every key and type.

    Raises:
        ConfigError: An unknown key (with the nearest name) or a value of a wrong type.
    """
    return typing.cast(Config, _build(Config, table, source=source, prefix=""))


def to_dict(config: Config) -> dict[str, Any]:
    """Return the nested tables of a config, without the settings that are ``None`` (TOML has no null)."""

    def prune(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: prune(item) for key, item in value.items() if item is not None}
        return list(value) if isinstance(value, tuple) else value

    return typing.cast(dict[str, Any], prune(dataclasses.asdict(config)))


def to_toml(config: Config) -> str:
    """Return the TOML text of a config; :func:`load_toml` reads it back to an equal one."""
    return tomli_w.dumps(to_dict(config))


def config_hash(config: Config) -> str:
    """Return 64 hex digits that identify all settings but the run directory."""
    table = to_dict(dataclasses.replace(config, run_dir=""))
    return hashlib.sha256(json.dumps(table, sort_keys=True).encode()).hexdigest()


def coefficient_text(coefficient: Coefficient) -> str:
    """Return a coefficient of error feedback for people.

    Example:
        >>> coefficient_text(1.5), coefficient_text("auto")
        ('1.5', 'auto')
    """
    return coefficient if isinstance(coefficient, str) else f"{coefficient:g}"


def resolve(config: Config, *, vocab_size: int, cuda: bool) -> Config:
    """Replace every setting that means "what fits" by its value, and check settings against one another.

    Args:
        config: As read.
        vocab_size: Of the tokenizer the data was made with.
        cuda: Whether computing happens on CUDA.

    Raises:
        ConfigError: A value out of range, or two settings that contradict each other.
    """
    _check_ranges(config)
    if 0 < config.model.vocab_size < vocab_size:
        raise ConfigError(
            f"model.vocab_size is {config.model.vocab_size}, the data's tokenizer has {vocab_size} tokens. "
            "Leave model.vocab_size at 0 to take the tokenizer's; a larger one adds rows that no token uses."
        )
    dtype = config.train.compute_dtype
    resolved_dtype: Literal["float32", "bfloat16"] = dtype if dtype != "auto" else ("bfloat16" if cuda else "float32")
    total, num_updates = config.optim.lr_total_steps, config.train.num_steps * config.local_steps
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, vocab_size=config.model.vocab_size or vocab_size),
        optim=dataclasses.replace(config.optim, lr_total_steps=num_updates if total is None else total),
        staleness=dataclasses.replace(config.staleness, delay=_resolved_delay(config)),
        train=dataclasses.replace(config.train, compute_dtype=resolved_dtype),
        dataparallel=dataclasses.replace(config.dataparallel, num_workers=_resolved_workers(config)),
    )


def _resolved_workers(config: Config) -> int:
    speeds, given = config.dataparallel.emulate_speeds, config.dataparallel.num_workers
    if config.executor != "dataparallel":
        return given
    if speeds and given and len(speeds) != given:
        raise ConfigError(
            f"dataparallel.num_workers is {given}, but dataparallel.emulate_speeds has {len(speeds)} speeds. Give a "
            "speed for each worker, or leave num_workers at 0."
        )
    return given or len(speeds) or 2


def _resolved_delay(config: Config) -> int:
    given = config.staleness.delay
    if config.executor == "single":
        return given or 0
    if config.executor == "dataparallel":
        if given:
            raise ConfigError(
                f"staleness.delay is {given}, but with the executor 'dataparallel' the workers' speeds say how stale a "
                "gradient is. Leave staleness.delay out, or use --executor single."
            )
        return 0
    schedule = config.pipeline.pipeline_schedule
    implied = SCHEDULE_DELAY[schedule]
    if given not in (None, implied):
        raise ConfigError(
            f"staleness.delay is {given}, but the pipeline schedule '{schedule}' gives a delay of {implied}. "
            "Leave staleness.delay out, choose another pipeline.pipeline_schedule, or use --executor single."
        )
    return implied


def _check_ranges(config: Config) -> None:
    """Refuse numbers that no run can use. Model and optimizer settings are checked where they are understood."""
    for name, value in _flat(dataclasses.asdict(config)).items():
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, float) and not math.isfinite(number):
                raise ConfigError(f"{name} is {number}; give a finite number.")
    at_least_one = {
        "data.sequence_length": config.data.sequence_length,
        "train.num_steps": config.train.num_steps,
        "train.microbatch_size": config.train.microbatch_size,
        "train.threads_per_rank": config.train.threads_per_rank,
        "pipeline.num_microbatches": config.pipeline.num_microbatches,
        "pipeline.num_stages": config.pipeline.num_stages,
        "evaluate.num_sequences": config.evaluate.num_sequences,
        "checkpoint.keep_last": config.checkpoint.keep_last,
        "log.every_steps": config.log.every_steps,
        "staleness.agc.blocks_per_group": config.staleness.agc.blocks_per_group,
        "dataparallel.min_microbatches": config.dataparallel.min_microbatches,
        "dataparallel.local_steps": config.dataparallel.local_steps,
    }
    not_negative = {
        "staleness.delay": config.staleness.delay or 0,
        "staleness.agc.min_pairs": config.staleness.agc.min_pairs,
        "staleness.agc.ramp_steps": config.staleness.agc.ramp_steps,
        "staleness.agc.trust_radius": config.staleness.agc.trust_radius,
        "pipeline.num_extra_in_flight": config.pipeline.num_extra_in_flight,
        "evaluate.every_steps": config.evaluate.every_steps,
        "checkpoint.every_steps": config.checkpoint.every_steps,
        "log.trace_steps": config.log.trace_steps,
        "dataparallel.num_workers": config.dataparallel.num_workers,
        "dataparallel.pushes_per_step": config.dataparallel.pushes_per_step,
        "dataparallel.max_microbatches": config.dataparallel.max_microbatches,
        "dataparallel.max_staleness": config.dataparallel.max_staleness,
        "dataparallel.outer_lr": config.dataparallel.outer_lr,
        "dataparallel.outer_momentum_every": config.dataparallel.outer_momentum_every,
        "dataparallel.emulate_microbatch_ms": config.dataparallel.emulate_microbatch_ms,
        "dataparallel.emulate_jitter": config.dataparallel.emulate_jitter,
        "train.max_skipped_steps": config.train.max_skipped_steps,
        "optim.max_grad_norm": config.optim.max_grad_norm,
    }
    for bound, values in ((1, at_least_one), (0, not_negative)):
        for name, value in values.items():
            if not value >= bound:
                raise ConfigError(f"{name} is {value}; it must be {bound} or more.")
    if not 0 <= config.staleness.agc.decay < 1:
        raise ConfigError(
            f"staleness.agc.decay is {config.staleness.agc.decay:g}; allowed is 0 (only the newest) to below 1, and "
            "0.99 is usual."
        )
    if not config.pipeline.timeout_s > 0:
        raise ConfigError(f"pipeline.timeout_s is {config.pipeline.timeout_s}; it must be more than 0 seconds.")


SINGLE_ONLY = (
    "delay_weights",
    "delay_replay",
    "delay_stages",
    "delay_roles",
    "delay_blocks",
    "backward_weights",
    "sync_until_step",
    "sync_from_step",
)
"""Settings of :class:`StalenessConfig` that only the executor `single` can follow."""

FREE_TO_CHANGE = (
    "run_dir",
    "executor",
    "engine",
    "data.path",
    "model.activation_checkpointing",
    "pipeline.num_stages",
    "pipeline.pipeline_schedule",
    "pipeline.num_extra_in_flight",
    "pipeline.timeout_s",
    "dataparallel.num_workers",
    "dataparallel.emulate_",
    "train.num_steps",
    "train.device",
    "train.threads_per_rank",
    "train.max_skipped_steps",
    "evaluate.",
    "checkpoint.",
    "log.",
)
"""Settings (or whole tables) that a resumed run may change without becoming another run. The data itself is compared
by its content, wherever it lies."""


def trajectory_changes(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Return the settings that differ between two runs and change what is trained.

    Args:
        old: Tables as :func:`to_dict` gives them.
        new: The same.

    Returns:
        ``(old, new)`` by dotted key.
    """
    before, after = _flat(old), _flat(new)
    keys = sorted(before.keys() | after.keys())
    return {
        key: (before.get(key), after.get(key))
        for key in keys
        if before.get(key) != after.get(key) and not key.startswith(FREE_TO_CHANGE)
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        flat |= _flat(value, f"{prefix}{key}.") if isinstance(value, Mapping) else {prefix + key: value}
    return flat


def _build(cls: type, table: Any, *, source: str, prefix: str) -> Any:
    if not isinstance(table, Mapping):
        raise ConfigError(f"{source}: '{prefix.rstrip('.')}' must be a table, given {table!r}.")
    hints = typing.get_type_hints(cls)
    values = {}
    for key, value in table.items():
        if key not in hints:
            known = ", ".join(hints)
            raise ConfigError(f"{source}: unknown key '{prefix}{key}'.{nearest(key, hints)} Allowed here: {known}.")
        hint = hints[key]
        if dataclasses.is_dataclass(hint):
            values[key] = _build(typing.cast(type, hint), value, source=source, prefix=f"{prefix}{key}.")
        else:
            values[key] = _checked(value, hint, where=f"{source}: '{prefix}{key}'")
    return cls(**values)


def _checked(value: Any, hint: Any, *, where: str, words: Sequence[str] = ()) -> Any:
    """Return ``value`` as the type ``hint``, or say what is allowed; ``words`` would have been as well."""
    origin = typing.get_origin(hint)
    if origin is Literal:
        choices = typing.get_args(hint)
        if value not in choices:
            raise ConfigError(
                f"{where} is {value!r}.{nearest(str(value), choices)} Allowed: {', '.join(map(repr, choices))}."
            )
        return value
    if origin in (types.UnionType, typing.Union):
        if value is None and types.NoneType in typing.get_args(hint):
            return None
        words = [word for arg in typing.get_args(hint) for word in typing.get_args(arg)]
        if value in words:
            return value
        (inner,) = (arg for arg in typing.get_args(hint) if isinstance(arg, type) and arg is not types.NoneType)
        return _checked(value, inner, where=where, words=words)
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if origin is tuple:
        if not isinstance(value, list | tuple):
            raise ConfigError(f"{where} must be a list, given {value!r}.")
        return tuple(
            _checked(item, typing.get_args(hint)[0], where=f"{where}, item {i}") for i, item in enumerate(value)
        )
    expected = origin or hint
    if not isinstance(value, expected) or (isinstance(value, bool) and expected is not bool):
        allowed = " or ".join([_plain_name(expected), *map(repr, words)])
        raise ConfigError(f"{where} must be {allowed}, given {value!r}.")
    return dict(value) if expected is dict else value


def _plain_name(kind: type) -> str:
    names = {int: "a whole number", float: "a number", bool: "true or false", str: "a text", dict: "a table"}
    return names.get(kind, kind.__name__)
