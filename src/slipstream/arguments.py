"""What each command can be told. The field docstrings are the ``--help`` texts."""

import dataclasses
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Annotated, Literal

import tyro

from slipstream.bench.settings import BenchExchangeConfig, BenchPipelineConfig
from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.plan.fleet import FleetConfig
from slipstream.plan.simulate import SimulateConfig
from slipstream.plan.stability import StabilityConfig

Flag = Annotated[bool, tyro.conf.FlagCreatePairsOff]


@dataclasses.dataclass(frozen=True, kw_only=True)
class ConfigArgs(Config):
    """A whole run: every setting is a flag, by its dotted name."""

    config: str = ""
    """TOML file to take settings from; flags come before it, it comes before the defaults."""

    def settings(self) -> Config:
        """Return the run's settings without the arguments of the command."""
        return Config(**{field.name: getattr(self, field.name) for field in dataclasses.fields(Config)})


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainArgs(ConfigArgs):
    """Train a model.

    Every setting of the config file is a flag by its dotted name; flags come before the file, the file before the
    defaults. With --resume and without --config, the run's own config is taken.
    """

    resume: Flag = False
    """Continue the run in the run directory from its newest complete checkpoint."""
    overwrite: Flag = False
    """Begin anew in a run directory that holds a run; its metrics and checkpoints are removed."""
    allow_change: tuple[str, ...] = ()
    """Settings that a resumed run may change although they change what is trained."""
    beside: str = ""
    """Run directory of a finished run to print this one's summary beside."""
    init_from: str = ""
    """Run directory whose weights (y of its newest checkpoint) to begin with, and whose model settings to take."""
    init_from_hf: str = ""
    """Model folder in the layout of the Hugging Face hub to begin with; its model settings are taken."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ShowArgs(ConfigArgs):
    """Print the settings that `train` would use, as TOML."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class PrepareArgs:
    """Turn text into token shards: txt and jsonl files (also .gz, .zst), parquet, arrow, and folders of them."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files and folders."""
    out: Path
    """Folder to make; must not exist or be empty."""
    tokenizer: Literal["bytes", "bpe"] | None = None
    """`bytes`, or `bpe` (trained on the training split); none: bytes."""
    tokenizer_from: Path | None = None
    """Model folder, run directory or prepared data whose tokenizer to use instead."""
    vocab_size: int | None = None
    """Tokens of a `bpe` tokenizer; none: 4096."""
    text_field: str | None = None
    """Field of a record that holds the text; none: text."""
    split_key: str | None = None
    """Field (such as an author) whose records all go to one side of the split; none: each document by itself."""
    validation_fraction: float = 0.1
    """Share of the documents held out."""
    num_workers: int = 0
    """Processes that read and encode; 0: one for each core, and one in all where the text is small."""
    json: Flag = False
    """Print the manifest as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class InspectArgs:
    """Check prepared data and show decoded samples of each split."""

    path: Annotated[str, tyro.conf.Positional] = ""
    """Folder made by `slipstream data prepare`; none: the built-in Shakespeare."""
    num_samples: int = 3
    """Samples of each split."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateArgs(SimulateConfig):
    """Simulate a pipeline schedule without running it: draw its timeline, and say what it costs."""

    json: Flag = False
    """Print the figures as JSON, and no drawing."""
    svg: Path | None = None
    """File to draw the timeline into."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class SimulateAsyncDpArgs(FleetConfig):
    """Simulate asynchronous data parallelism without computing anything: throughput, staleness and server load.

    The protocol, the batches and the ledger are those of a real run. Beside it stands synchronous training on the same
    workers. Links and server cost nothing unless --link-gbps or --server-ms say so.
    """

    json: Flag = False
    """Print the figures as JSON, and no bars."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchPipelineArgs(BenchPipelineConfig):
    """Time pipeline schedules, ours and those of torch.distributed.pipelining, on one model in alternation."""

    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchExchangeArgs(BenchExchangeConfig):
    """Time how weights and gradients pass between the server and worker processes, beside a plain copy of memory."""

    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class StabilityArgs(StabilityConfig):
    """Say how large learning rate x curvature may be under delay, or how large it is in a run."""

    probe: str = ""
    """Run directory: measure the sharpness at its newest checkpoint beside the limits (of the run's own momentum)."""
    probe_batches: int | None = None
    """With --probe: training batches to measure it on; none: 4."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class CompareArgs:
    """Train a grid of runs (rule x remedy x delay x learning rate x batch x seed) and compare them.

    Writes table.json, table.md and report.html; the cells are ordinary run directories under `cells`. The same command
    again goes on with what is interrupted and passes over what has a result.
    """

    grid: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="CONFIG")] = ""
    """TOML file of a grid, such as those in configs/compare."""
    from_config: Annotated[str, tyro.conf.arg(name="from", metavar="CONFIG")] = ""
    """In place of a grid: a training config. Compares synchronous training, one step of delay, and that with error
    feedback, and says whether to switch."""
    run_dir: Path
    """Folder of the comparison."""
    num_workers: int | None = None
    """Runs at a time; none: the cores by the threads of a run, on CUDA one."""
    num_seeds: int | None = None
    """With --from: seeds to train each with; none: 3."""
    tolerance: float | None = None
    """With --from: share of the synchronous loss that a switch may cost; none: 0.005."""
    overwrite: Flag = False
    """Train cells anew whose settings have changed since they were trained."""
    json: Flag = False
    """Print table.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportHfArgs:
    """Write a checkpoint of a run as a folder that Hugging Face transformers reads.

    With transformers installed the folder is loaded again and the largest difference of logits is printed.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to make; must not exist."""
    weights: Literal["x", "y"] = "x"
    """`x`, which the run was trained on, or `y`, the optimizer's own."""
    checkpoint: str = "newest"
    """`newest`, `best` by validation loss (with checkpoint.keep_best), or a step."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class EvalArgs:
    """Evaluate a run or a model folder: hellaswag, mmlu (5 examples), blimp, or perplexity of texts."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|HF_DIR")]
    """Run directory, or folder in the layout of the Hugging Face hub."""
    task: Literal["hellaswag", "mmlu", "blimp", "perplexity"]
    """What to evaluate."""
    file: str
    """File of the task, a folder of files or a tar archive; for perplexity text, JSON lines, or prepared data."""
    limit: int | None = None
    """Most items; of several files one from each in turn."""
    weights: Literal["x", "y"] = "x"
    """Of a run: `x`, which it was trained on, or `y`, the optimizer's own."""
    checkpoint: str = "newest"
    """Of a run: `newest`, `best` by validation loss (with checkpoint.keep_best), or a step."""
    max_length: int | None = None
    """Most tokens the model sees at once; none: the length it was trained on."""
    text_field: str | None = None
    """With perplexity: field of a JSON record that holds the text; none: text."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class GenerateArgs:
    """Continue a text with a run or a model folder."""

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN|HF_DIR")]
    """Run directory, or folder in the layout of the Hugging Face hub."""
    prompt: str = ""
    """Text to continue; empty: the beginning of a document."""
    max_new_tokens: int = 200
    """Tokens to write at most."""
    temperature: float = 0.0
    """Logits are divided by it before a token is drawn; 0: always the likeliest token."""
    seed: int | None = None
    """Seed of the draws, with a temperature; none: 0."""
    weights: Literal["x", "y"] = "x"
    """Of a run: `x`, which it was trained on, or `y`, the optimizer's own."""
    checkpoint: str = "newest"
    """Of a run: `newest`, `best` by validation loss (with checkpoint.keep_best), or a step."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ReportArgs:
    """Draw one or several runs as one HTML file that needs no network.

    Loss against tokens and against time, validation, speed, staleness, gradient norms with their spikes, workers,
    experts, what methods tell of themselves, the pipeline as it ran where it was traced, and settings that differ.
    Works on runs under way, too.
    """

    runs: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RUN...")]
    """Run directories."""
    out: str = ""
    """File to write; none: report.html in the directory of a lone run, or here."""
    json: Flag = False
    """Print the figures and the verdict as JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WatchArgs:
    """Follow a run under way from another terminal, until it ends.

    Exit code 0: it finished, or was asked to stop; 1: it failed. Ctrl-C ends only the watching.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    interval: float = 1.0
    """Seconds between two looks."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Say what this machine offers and whether everything needed is there."""

    json: Flag = False
    """Print JSON."""


def refuse_given(flags: Mapping[str, object], where: str) -> None:
    """Refuse flags that would have no effect.

    Args:
        flags: What was given, by flag; ``None``: not given.
        where: Why they would have none.

    Raises:
        ConfigError: One was given.

    Example:
        >>> refuse_given({"--seed": None}, "at a --temperature of 0")
    """
    given = [flag for flag, value in flags.items() if value is not None]
    if given:
        verb, them = ("has", "it") if len(given) == 1 else ("have", "them")
        raise ConfigError(f"{' and '.join(given)} {verb} no effect {where}. Leave {them} out.")


def refuse_bytes(lines: Iterable[str]) -> None:
    """Refuse settings that are no text: a run writes them into its config.toml, which is UTF-8.

    Args:
        lines: Settings, as they would be written.

    Raises:
        ConfigError: One holds a byte that is not UTF-8, such as one in the name of a folder.

    Example:
        >>> refuse_bytes(['run_dir = "runs"'])
    """
    for line in lines:
        # Python keeps a byte that it cannot decode as half of a character.
        if any(0xDC80 <= ord(sign) <= 0xDCFF for sign in line):
            said = line.encode("ascii", "backslashreplace").decode()
            raise ConfigError(f"{said} is not UTF-8 text, as settings must be. Rename the file or folder.")
