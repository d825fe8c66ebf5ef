"""The command line: parse, call, print."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import tyro

from slipstream import __version__
from slipstream.bench.settings import BenchExchangeConfig, BenchPipelineConfig
from slipstream.config import Config, load_toml, to_toml
from slipstream.errors import ConfigError, SlipstreamError, nearest
from slipstream.plan.fleet import FleetConfig
from slipstream.plan.simulate import SimulateConfig, build_timeline, run_simulate
from slipstream.plan.stability import StabilityConfig, run_stability, stability_text

if TYPE_CHECKING:
    import torch

    from slipstream.data import TokenizerInfo

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
    """Turn text into token shards: txt, jsonl and jsonl.gz files, and folders of them."""

    sources: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Files and folders."""
    out: Path
    """Folder to make; must not exist or be empty."""
    tokenizer: Literal["bytes", "bpe"] = "bytes"
    """`bytes`, or `bpe` (trained on the training split)."""
    tokenizer_from: Path | None = None
    """Model folder or prepared data whose tokenizer to use instead."""
    vocab_size: int = 4096
    """Tokens of a `bpe` tokenizer."""
    text_field: str = "text"
    """Field of a JSON record that holds the text."""
    split_key: str | None = None
    """Field (such as an author) whose records all go to one side of the split; none: each document by itself."""
    validation_fraction: float = 0.1
    """Share of the documents held out."""
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
    probe_batches: int = 4
    """Training batches to measure it on."""
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
    num_seeds: int = 3
    """With --from: seeds to train each with."""
    tolerance: float = 0.005
    """With --from: share of the synchronous loss that a switch may cost."""
    overwrite: Flag = False
    """Train cells anew whose settings have changed since they were trained."""
    json: Flag = False
    """Print table.json."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportHfArgs:
    """Write a run's newest checkpoint as a folder that Hugging Face transformers reads.

    With transformers installed the folder is loaded again and the largest difference of logits is printed.
    """

    run: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """Run directory."""
    out: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="OUT")]
    """Folder to make; must not exist."""
    weights: Literal["x", "y"] = "x"
    """`x`, which the run was trained on, or `y`, the optimizer's own."""
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
    """File of the task, a folder of files or a tar archive; for perplexity text, or JSON lines."""
    limit: int | None = None
    """Most items; of several files one from each in turn."""
    weights: Literal["x", "y"] = "x"
    """Of a run: `x`, which it was trained on, or `y`, the optimizer's own."""
    max_length: int | None = None
    """Most tokens the model sees at once; none: the length it was trained on."""
    text_field: str = "text"
    """With perplexity: field of a JSON record that holds the text."""
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
    seed: int = 0
    """Seed of the draws."""
    weights: Literal["x", "y"] = "x"
    """Of a run: `x`, which it was trained on, or `y`, the optimizer's own."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """Where to compute."""
    json: Flag = False
    """Print JSON."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorArgs:
    """Say what this machine offers and whether everything needed is there."""

    json: Flag = False
    """Print JSON."""


def train(argv: Sequence[str]) -> int:
    """Train a model."""
    from rich.console import Console

    from slipstream.train.launch import launch
    from slipstream.train.progress import ConsoleReporter

    args = _parse_config_args(TrainArgs, argv, prog="slipstream train")
    config = args.settings()
    other = _read_summary(args.beside) if args.beside else None
    reporter = ConsoleReporter(Console(), every_steps=config.log.every_steps)
    summary = launch(
        config,
        reporter=reporter,
        resume=args.resume,
        overwrite=args.overwrite,
        allow_change=args.allow_change,
        init_from=_origin(args),
    )
    if summary is not None:
        print(_summary_table(summary, other, run_dir=config.run_dir))
    return 0


def _origin(args: TrainArgs) -> str:
    """Return what a new run takes its weights from, if anything.

    Raises:
        ConfigError: Two are named, or one is not of the kind its flag says.
    """
    if args.init_from and args.init_from_hf:
        raise ConfigError("--init-from and --init-from-hf exclude each other: give one model to begin with.")
    is_run = bool(args.init_from)
    path = Path(args.init_from or args.init_from_hf)
    if path != Path() and (path / "config.toml").is_file() != is_run:
        kind, other = ("run directory", "--init-from-hf") if is_run else ("model folder", "--init-from")
        raise ConfigError(f"{path} is no {kind}. Give one, or use {other}.")
    return args.init_from or args.init_from_hf


def config_show(argv: Sequence[str]) -> int:
    """Print the settings that `train` would use."""
    print(to_toml(_parse_config_args(ShowArgs, argv, prog="slipstream config show").settings()), end="")
    return 0


def data_prepare(argv: Sequence[str]) -> int:
    """Turn text files into token shards."""
    from slipstream.data import prepare
    from slipstream.data.hub_tokenizer import open_hub_tokenizer

    args = tyro.cli(PrepareArgs, args=argv, prog="slipstream data prepare")
    manifest = prepare(
        [str(source) for source in args.sources],
        args.out,
        tokenizer=args.tokenizer if args.tokenizer_from is None else open_hub_tokenizer(args.tokenizer_from),
        vocab_size=args.vocab_size,
        text_field=args.text_field,
        split_key=args.split_key,
        validation_fraction=args.validation_fraction,
    )
    if args.json:
        print(manifest.to_json(), end="")
        return 0
    print(f"{args.out}: {_tokenizer_text(manifest.tokenizer)}, split by {manifest.split_rule.key}")
    for name, split in manifest.splits.items():
        print(
            f"  {name:<10}  {split.documents} documents, {split.num_tokens} tokens, {split.num_bytes} bytes, "
            f"{len(split.shards)} shards"
        )
    if empty := sum(source.empty_documents for source in manifest.sources):
        print(f"  {empty} empty documents were passed over")
    return 0


def data_inspect(argv: Sequence[str]) -> int:
    """Check prepared data and show decoded samples."""
    from slipstream.data import inspect_data

    args = tyro.cli(InspectArgs, args=argv, prog="slipstream data inspect")
    report = inspect_data(args.path, num_samples=args.num_samples)
    if args.json:
        print(json.dumps(dataclasses.asdict(report), indent=1))
        return 0
    print(f"{report.path or 'built-in Shakespeare'}: {_tokenizer_text(report.tokenizer)}")
    print(f"split by {report.split_rule.key}, digest {report.digest[:12]}, checksums verified")
    for split in report.splits:
        print(
            f"\n{split.name}: {split.documents} documents, {split.num_tokens} tokens in {split.num_shards} shards, "
            f"{split.num_bytes} bytes ({split.fraction:.1%} of all), {split.tokens_per_byte:.3f} tokens per byte"
        )
        for sample in split.samples:
            print(f"--- tokens {sample.start} to {sample.start + sample.num_tokens - 1}\n{sample.text}")
    return 0


def _tokenizer_text(info: "TokenizerInfo") -> str:
    return f"tokenizer '{info.name}' of {info.vocab_size} tokens, fingerprint {info.fingerprint[:12]}"


def simulate(argv: Sequence[str]) -> int:
    """Simulate a pipeline schedule without running it."""
    from rich.console import Console

    from slipstream.plan.draw import draw_rich, draw_svg

    args = tyro.cli(SimulateArgs, args=argv, prog="slipstream simulate")
    timeline = build_timeline(args)
    figures = run_simulate(args, timeline)
    if args.svg is not None:
        title = f"{args.pipeline_schedule}: {args.num_stages} stages, {args.num_microbatches} microbatches a batch"
        try:
            args.svg.write_text(draw_svg([(args.pipeline_schedule, timeline)], title=title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.svg}: {error.strerror}. Give --svg a file in a folder.") from error
    if args.json:
        print(json.dumps(figures, indent=1))
        return 0
    console = Console()
    console.print(draw_rich(timeline, width=console.width))
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {round(value, 4) if isinstance(value, float) else value}")
    return 0


def bench_pipeline(argv: Sequence[str]) -> int:
    """Time pipeline schedules beside those of torch.distributed.pipelining."""
    args = tyro.cli(BenchPipelineArgs, args=argv, prog="slipstream bench pipeline")
    from rich.console import Console

    from slipstream.bench.pipeline import run_bench_pipeline
    from slipstream.bench.table import bench_table, explanation

    result = run_bench_pipeline(args, note=lambda text: print(text, file=sys.stderr))
    if args.json:
        print(json.dumps(result, indent=1))
        return 0
    Console().print(bench_table(result))
    print("\n".join(explanation(result)))
    return 0


def bench_exchange(argv: Sequence[str]) -> int:
    """Time pushes and pulls of worker processes beside a plain copy of memory."""
    args = tyro.cli(BenchExchangeArgs, args=argv, prog="slipstream bench exchange")
    from slipstream.bench.exchange import exchange_text, run_bench_exchange

    result = run_bench_exchange(args, note=lambda text: print(text, file=sys.stderr))
    print(json.dumps(result, indent=1) if args.json else exchange_text(result))
    return 0


def simulate_async_dp(argv: Sequence[str]) -> int:
    """Simulate asynchronous data parallelism, 8 to 4,096 workers, on paper."""
    from slipstream.plan.async_dp_text import async_dp_text
    from slipstream.plan.simulate_async_dp import simulate_async_dp

    args = tyro.cli(SimulateAsyncDpArgs, args=argv, prog="slipstream simulate async-dp")
    found = simulate_async_dp(args)
    print(json.dumps(found, indent=1) if args.json else async_dp_text(found))
    return 0


def stability(argv: Sequence[str]) -> int:
    """Largest stable learning rate x curvature under delay; with --probe, that of a run."""
    args = tyro.cli(StabilityArgs, args=argv, prog="slipstream stability")
    if args.probe:
        from slipstream.train.probe import ProbeConfig, probe_text, run_probe

        found = run_probe(ProbeConfig(run=args.probe, num_batches=args.probe_batches))
        print(json.dumps(found, indent=1) if args.json else probe_text(found))
        return 0
    config = StabilityConfig(
        momentum=args.momentum, delay=args.delay, error_feedback=args.error_feedback, nesterov=args.nesterov
    )
    print(json.dumps(run_stability(config), indent=1) if args.json else stability_text(config))
    return 0


def compare(argv: Sequence[str]) -> int:
    """Train a grid of runs and compare them; or ask whether a config of yours stands a delay."""
    args = tyro.cli(CompareArgs, args=argv, prog="slipstream compare")
    from rich.console import Console

    from slipstream.report.compare import compare_grid, grid_and_judge
    from slipstream.train.many import train_all
    from slipstream.train.many_progress import ConsoleObserver

    grid, judge = grid_and_judge(args.grid, args.from_config, num_seeds=args.num_seeds, tolerance=args.tolerance)
    observer = ConsoleObserver(Console(stderr=args.json))
    train = partial(train_all, observer=observer, num_workers=args.num_workers, overwrite=args.overwrite)
    result = compare_grid(grid, args.run_dir, train=train, note=observer.note, judge=judge)
    if result is None:
        observer.note("stopped, runs under way are saved; the same command goes on")
        return 0
    print(json.dumps(result.to_json(), indent=1) if args.json else result.to_text(args.run_dir))
    return 1 if result.has_crashed else 0


def export_hf(argv: Sequence[str]) -> int:
    """Write a run as a folder that Hugging Face transformers reads."""
    args = tyro.cli(ExportHfArgs, args=argv, prog="slipstream export hf")
    from slipstream.train.export import export_hub

    export = export_hub(args.run, args.out, weights=args.weights)
    if args.json:
        found = {"out": str(export.folder), "step": export.step, "weights": args.weights, "files": export.files}
        print(json.dumps({**found, "max_abs_logit_difference": export.max_abs_logit_difference}, indent=1))
        return 0
    print(f"{export.folder}: weights {args.weights} of step {export.step}; {', '.join(export.files)}")
    if export.max_abs_logit_difference is None:
        print("not checked against transformers, which is not installed: pip install 'slipstream[hf]'")
    else:
        print(f"loaded with transformers: largest logit difference {export.max_abs_logit_difference:.3g}")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a run or a model folder on a task's file."""
    args = tyro.cli(EvalArgs, args=argv, prog="slipstream eval")
    from slipstream.evaluation.scoring import Scorer
    from slipstream.evaluation.tasks import run_task
    from slipstream.train.trained import open_trained

    model = open_trained(args.model, weights=args.weights)
    scorer = Scorer(model, device=_device(args.device), max_length=args.max_length)
    found = run_task(scorer, args.task, args.file, limit=args.limit, text_field=args.text_field)
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        print(f"{name:<{width}}  {value if isinstance(value, int) else f'{value:.5g}'}")
    return 0


def generate(argv: Sequence[str]) -> int:
    """Continue a text with a run or a model folder."""
    args = tyro.cli(GenerateArgs, args=argv, prog="slipstream generate")
    from slipstream.evaluation.generation import generate
    from slipstream.train.trained import open_trained

    written = generate(
        open_trained(args.model, weights=args.weights),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed,
        device=_device(args.device),
    )
    print(json.dumps(written._asdict(), indent=1) if args.json else args.prompt + written.text)
    return 0


def _device(name: Literal["auto", "cpu", "cuda"]) -> "torch.device":
    from slipstream.config import TrainConfig
    from slipstream.train.rank import choose_device

    return choose_device(Config(train=TrainConfig(device=name)))


def doctor(argv: Sequence[str]) -> int:
    """Say what this machine offers."""
    from slipstream.doctor import examine

    args = tyro.cli(DoctorArgs, args=argv, prog="slipstream doctor")
    findings = examine()
    if args.json:
        print(json.dumps({finding.name: finding.value for finding in findings}, indent=1))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok " if finding.ok else "!! "
            print(f"{mark}{finding.name:<{width}}  {finding.value}")
    return 0 if all(finding.ok for finding in findings) else 1


Summary = dict[str, Any]
Args = TypeVar("Args", bound=ConfigArgs)

COMMANDS: dict[str, Callable[[Sequence[str]], int]] = {
    "train": train,
    "data prepare": data_prepare,
    "data inspect": data_inspect,
    "config show": config_show,
    "simulate": simulate,
    "simulate async-dp": simulate_async_dp,
    "stability": stability,
    "bench pipeline": bench_pipeline,
    "bench exchange": bench_exchange,
    "compare": compare,
    "eval": evaluate,
    "generate": generate,
    "export hf": export_hf,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (``sys.argv`` without the program) names; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        if not words or words[0] in ("-h", "--help"):
            print(_overview())
            return 0 if words else 2
        if words[0] == "--version":
            print(f"slipstream {__version__}")
            return 0
        name = _command_name(words)
        return COMMANDS[name](words[len(name.split()) :])
    except SlipstreamError as error:
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:
        return 0


def _command_name(words: Sequence[str]) -> str:
    """Return the command that the first one or two words name.

    Raises:
        ConfigError: They name none.
    """
    for length in (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    given = " ".join(words[: 2 if group else 1])
    if group and len(words) > 1 and words[1] in ("-h", "--help"):
        print(_overview(group))
        raise SystemExit(0)
    raise ConfigError(
        f"there is no command '{given}'.{nearest(given, COMMANDS)} Commands: {', '.join(group or COMMANDS)}. "
        "Each explains itself with --help."
    )


def _overview(names: Sequence[str] | None = None) -> str:
    lines = [f"slipstream {__version__}: asynchronous pre-training of language models", "", "commands:"]
    shown = list(names or COMMANDS)
    width = max(map(len, shown))
    lines += [f"  {name:<{width}}  {(COMMANDS[name].__doc__ or '').splitlines()[0]}" for name in shown]
    return "\n".join([*lines, "", "slipstream COMMAND --help explains one."])


def _parse_config_args(kind: type[Args], argv: Sequence[str], *, prog: str) -> Args:
    """Parse flags over a config file over the defaults."""
    early = _early_values(argv, ("--config", "--run-dir"))
    path = early["--config"]
    if path is None and "--resume" in argv and early["--run-dir"] is not None:
        own = Path(early["--run-dir"]) / "config.toml"
        path = str(own) if own.exists() else None
    base = load_toml(path) if path else Config()
    tables = {field.name: getattr(base, field.name) for field in dataclasses.fields(Config)}
    return tyro.cli(kind, args=argv, default=kind(config=path or "", **tables), prog=prog)


def _early_values(argv: Sequence[str], flags: Sequence[str]) -> dict[str, str | None]:
    """Return the values of a few flags before everything is parsed: the file they name holds the defaults."""
    values: dict[str, str | None] = dict.fromkeys(flags)
    for position, word in enumerate(argv):
        flag, equals, _ = word.replace("_", "-").partition("=")
        if flag in values:
            if equals:
                values[flag] = word.partition("=")[2]
            elif position + 1 < len(argv):
                values[flag] = argv[position + 1]
    return values


def _summary_table(summary: Summary, other: Summary | None, *, run_dir: str) -> str:
    """Return a summary as lines, beside another run's where there is one."""
    runs = [summary] if other is None else [summary, other]
    rows = [
        ("executor", [_executor_text(run) for run in runs]),
        ("validation loss, before", [f"{run['val_loss_before']:.4f}" for run in runs]),
        ("validation loss, after", [f"{run['val_loss']:.4f} (x) {run['val_loss_y']:.4f} (y)" for run in runs]),
        ("bits per byte", [f"{run['val_bits_per_byte']:.4f}" for run in runs]),
        ("tokens per second", [f"{run['tokens_per_s']:.0f}" for run in runs]),
        ("staleness, mean / max", [f"{run['staleness_mean']:.3f} / {run['staleness_max']}" for run in runs]),
        *_share_row(runs),
        ("bubble fraction", [f"{run['bubble_fraction']:.1%}" for run in runs]),
        ("weights sha256", [run["weights_sha256"][: 64 if other is None else 16] for run in runs]),
    ]
    name_width = max(len(name) for name, _ in rows)
    width = max(len(values[0]) for _, values in rows)
    lines = [
        f"{name:<{name_width}}  {'  '.join(f'{value:<{width}}' for value in values)}".rstrip() for name, values in rows
    ]
    if other is not None:
        gain = summary["tokens_per_s"] / other["tokens_per_s"]
        lines.append(f"{'throughput':<{name_width}}  {gain:.2f}x the other run's")
    return "\n".join([*lines, f"{'run directory':<{name_width}}  {run_dir}"])


def _share_row(runs: Sequence[Summary]) -> list[tuple[str, list[str]]]:
    if all("throughput_share" not in run for run in runs):
        return []
    shares = [f"{run['throughput_share']:.1%}" if "throughput_share" in run else "-" for run in runs]
    return [("of the workers' own speeds", shares)]


def _executor_text(summary: Summary) -> str:
    if summary["executor"] == "single":
        return f"single, delay {summary['delay']}"
    if summary["executor"] == "dataparallel":
        return f"{summary['num_workers']} workers, {summary['mode']}, {summary['engine']}"
    return f"{summary['num_stages']} stages, {summary['pipeline_schedule']}"


def _read_summary(run_dir: str) -> Summary:
    """Read another run's summary.

    Raises:
        ConfigError: The run has none.
    """
    path = Path(run_dir) / "summary.json"
    try:
        summary: Summary = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(
            f"--beside {run_dir}: there is no readable {path}. Give the directory of a run that reached its last step."
        ) from error
    return summary


if __name__ == "__main__":
    sys.exit(main())
