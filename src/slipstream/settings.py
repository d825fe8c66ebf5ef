"""Every setting of a run: frozen dataclasses that build nothing. The field docstrings are the ``--help`` texts."""

import dataclasses
import json
from typing import Annotated, Any, Literal

import tyro


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
LrSchedule = Literal["cosine", "linear", "constant", "wsd"]
Coefficient = float | Literal["auto"]

SCHEDULE_DELAY: dict[str, int] = {"two_bw": 1, "one_f_one_b": 0, "gpipe": 0, "interleaved": 0}
"""Staleness that each pipeline schedule gives every gradient after the first."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which tokens to train on."""

    path: str = ""
    """Folder made by `slipstream data prepare`; empty: the built-in Shakespeare, as bytes."""
    stream: tuple[str, ...] = ()
    """Files and folders of text to train on, read as training goes on; tokenizer and held-out side are those of
    `path`. Empty: the shards of `path`."""
    text_field: str = "text"
    """Field of a record that holds the text (with `stream`, where it has files with fields)."""
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
    sliding_window: int = 0
    """Positions that a position attends to, itself and those right before it, as in Mistral; 0: all."""
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
    """A short name (`adamw`, `muon`, ...: docs/methods/rules.md has them all), or the dotted name of any
    torch.optim.Optimizer."""
    lr: float = 1e-3
    """Peak learning rate."""
    weight_decay: float = 0.1
    """Decoupled weight decay of matrices; vectors get none."""
    args: Table = dataclasses.field(default_factory=dict)
    """Further arguments of the optimizer named above (on the command line: a JSON object)."""
    adamw_lr: float | None = None
    """With muon and other rules for matrices: peak learning rate of what AdamW keeps (embedding, head, vectors); none:
    lr."""
    adamw_args: Table = dataclasses.field(default_factory=dict)
    """With those rules: further arguments of that AdamW (on the command line: a JSON object)."""
    max_grad_norm: float = 1.0
    """Global gradient norm above which the gradient is scaled down; 0: never."""
    lr_schedule: LrSchedule = "cosine"
    """Shape of the decay after the warm-up. `wsd`: none until the last updates, in which the rate falls as
    1 - sqrt(share of them)."""
    lr_warmup_steps: int = 0
    """Updates over which the rate rises linearly from 0."""
    lr_total_steps: int | None = None
    """Updates after which the rate has reached its end (of workers with local steps: their batches); none: all of
    train.num_steps. Its own setting, so that a shorter run keeps its rates."""
    lr_final_fraction: float = 0.1
    """Rate at the end as a fraction of the peak."""
    lr_decay_fraction: float = 0.2
    """With wsd: share of lr_total_steps that the decay takes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class AgcConfig:
    """The adaptive gradient compensator (staleness.correction `agc`, and its control `agc_damping`)."""

    groups: Literal["role_depth", "global"] = "role_depth"
    """Parameters that share a curvature: those of a role in the same blocks, or all."""
    blocks_per_group: int = 1
    """Blocks that a group of role_depth covers."""
    curvature: Literal["secant_group", "secant_diag", "fisher", "fisher_root"] = "secant_group"
    """One number a group; or the mean square of the gradient, or its root, with one scale a group. `secant_diag`,
    element by element, needs probes."""
    probe_every: int = 0
    """Every so many gradients (of each worker) one microbatch is computed again at newer weights, and curvature and
    gain come from these pairs alone (executor `single`, and `dataparallel` with the engine `inline`); 0: no probes, but
    gradients that were computed at the same time, with any executor."""
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
    """A run's metrics.jsonl: batch b has the largest staleness of that run's step b + 1 (`staleness_max`), from the
    beginning again when the rows end; of workers that is more than their mean (executor `single`)."""
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
    """Updates without delay at the start; error feedback begins after them (executors `single`, `pipeline`)."""
    sync_from_step: int = 0
    """Update from which on there is no delay and no error feedback; 0: never (executors `single`, `pipeline`)."""
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
    num_stages: int = 1
    """Pipeline stages of each worker, a process each; with more than 1 a worker is a whole pipeline (engine
    `process`)."""
    mode: Literal["async", "sync"] = "async"
    """`async`: nobody waits. `sync`: all gradients are averaged at every step, in equal shares, and everyone waits for
    the slowest."""
    pushes_per_step: int = 0
    """Gradients that make a step; 0: as many as there are workers, which keeps staleness lowest. 1: a step for each
    gradient, so that weights change soonest and gradients are stalest (K - 1 updates in the mean, of K workers)."""
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
    """For experiments: speeds to imitate, such as 1,1,1,0.25, by sleeping or on the virtual clock of the engine
    `inline`; 1 is that of emulate_microbatch_ms; none: all alike. Those of real machines are measured, not set."""
    emulate_microbatch_ms: float = 0.0
    """Compute time of a microbatch at speed 1, at least four times the real one; 0: as long as it takes, and 100 ms of
    the virtual clock with the engine `inline`."""
    emulate_jitter: float = 0.0
    """Standard deviation of the logarithm of each cycle's time."""
    seed: int = 0
    """Seed of the jitter, and of the rounding of `wire` `int8`."""
    ray_address: str = ""
    """host:port of the Ray cluster to run on, with this machine as one of its nodes (engine `ray`); none: one of the
    run's own, on this machine, that no other can reach."""
    ray_gpus: float = 1.0
    """GPUs that the server and each worker ask Ray for where they compute on CUDA; 0.25: four share one."""
    ray_transport: Literal["object_store", "c10d"] = "object_store"
    """What carries weights and gradients (engine `ray`): Ray's object store, or a connection of torch.distributed with
    each worker."""
    ray_log: Switch = False
    """Show what Ray and the workers' processes print."""


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
    compile: Switch = False
    """Compile blocks and loss with torch.compile (Inductor): the first step takes some seconds to a minute longer, each
    later one less, and rounding differs. All executors still agree to the bit."""
    max_skipped_steps: int = 3
    """Updates in a row that may be skipped for a non-finite gradient before the run stops."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvaluateConfig:
    """Held-out loss, on the trained weights x and on the optimizer's weights y."""

    every_steps: int = 0
    """Updates between evaluations; 0: only before the first and after the last."""
    num_sequences: int = 256
    """Validation sequences read, spread evenly over the split; all where the split has no more."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When the whole state is saved. A run always saves at its last step."""

    every_steps: int = 0
    """Updates between checkpoints; 0: only the last."""
    keep_last: int = 2
    """Complete checkpoints kept; older ones are removed."""
    keep_best: Switch = False
    """Also save at each evaluation whose val_loss is the smallest so far, and keep that checkpoint however old."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class LogConfig:
    """What is shown while training. metrics.jsonl always has every step."""

    every_steps: int = 10
    """Updates between lines of the log; also between rows that hold `method_metrics` and `workers`."""
    trace_steps: int = 0
    """Steps, from this start on, whose actions trace.json shows for each rank (executor `pipeline`); 0: none."""
    trackers: tuple[Literal["tensorboard", "wandb", "trackio"], ...] = ()
    """Where the run is shown as well; each is an extra to install (`slipstream[tensorboard]` and so on)."""


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
    def gradients_per_worker(self) -> int:
        """Gradients that a worker has under way at most: two where it is a pipeline that does not drain."""
        is_two_bw = self.dataparallel.num_stages > 1 and self.pipeline.pipeline_schedule == "two_bw"
        return 2 if self.executor == "dataparallel" and is_two_bw else 1

    @property
    def batch_size(self) -> int:
        """Sequences a batch."""
        return self.train.microbatch_size * self.pipeline.num_microbatches

    @property
    def batch_tokens(self) -> int:
        """Tokens a batch."""
        return self.batch_size * self.data.sequence_length
