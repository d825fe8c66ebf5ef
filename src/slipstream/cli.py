"""The command line: parse, call, print."""

import dataclasses
import json
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import tyro

from slipstream import __version__
from slipstream.arguments import (
    BenchExchangeArgs,
    BenchPipelineArgs,
    CompareArgs,
    ConfigArgs,
    DoctorArgs,
    EvalArgs,
    ExportHfArgs,
    GenerateArgs,
    InspectArgs,
    PrepareArgs,
    ReportArgs,
    ShowArgs,
    SimulateArgs,
    SimulateAsyncDpArgs,
    StabilityArgs,
    TrainArgs,
    WatchArgs,
    refuse_given,
)
from slipstream.config import Config, explicit_settings, load_toml, to_toml
from slipstream.console import silence
from slipstream.errors import ConfigError, SlipstreamError, nearest
from slipstream.plan.simulate import build_timeline, run_simulate
from slipstream.plan.stability import StabilityConfig, run_stability, stability_text

if TYPE_CHECKING:
    import torch

    from slipstream.data import TokenizerInfo


def train(argv: Sequence[str]) -> int:
    """Train a model."""
    from slipstream.console import Console
    from slipstream.train.launch import launch
    from slipstream.train.progress import ConsoleReporter

    args = _parse_config_args(TrainArgs, argv, prog="slipstream train")
    if not args.resume:
        refuse_given({"--allow-change": args.allow_change or None}, "without --resume")
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
        given=_given_settings(argv, args.config),
    )
    if summary is not None:
        print(_summary_table(summary, other, run_dir=config.run_dir))
    return 0


def _given_settings(argv: Sequence[str], path: str) -> set[str]:
    """Return the dotted names of the settings that were given, on the command line or in its config file."""
    given = {word[2:].partition("=")[0].replace("-", "_") for word in argv if word.startswith("--")}
    return given | (explicit_settings(path) if path else set())


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
    from slipstream.console import Console
    from slipstream.data import prepare
    from slipstream.data.files import hold_records
    from slipstream.data.hub_tokenizer import open_hub_tokenizer
    from slipstream.data.prepare import VOCAB_SIZE
    from slipstream.data.prepare_progress import PrepareReporter

    args = tyro.cli(PrepareArgs, args=argv, prog="slipstream data prepare")
    tokenizer = args.tokenizer or "bytes"
    if args.tokenizer_from is not None:
        refuse_given({"--tokenizer": args.tokenizer, "--vocab-size": args.vocab_size}, "with --tokenizer-from")
    elif tokenizer != "bpe":
        refuse_given({"--vocab-size": args.vocab_size}, "without --tokenizer bpe")
    sources = [str(source) for source in args.sources]
    if args.text_field is not None and not hold_records(sources):
        refuse_given({"--text-field": args.text_field}, "on plain text, which has no fields")
    with PrepareReporter(Console(stderr=True)) as reporter:
        manifest = prepare(
            sources,
            args.out,
            tokenizer=tokenizer if args.tokenizer_from is None else open_hub_tokenizer(args.tokenizer_from),
            vocab_size=VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
            text_field=args.text_field or "text",
            split_key=args.split_key,
            validation_fraction=args.validation_fraction,
            num_workers=args.num_workers or None,
            progress=reporter,
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
    from slipstream.console import Console
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
    from slipstream.bench.pipeline import run_bench_pipeline
    from slipstream.bench.table import bench_table, explanation
    from slipstream.console import Console

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

        own = {
            f"--{field.name.replace('_', '-')}": getattr(args, field.name)
            for field in dataclasses.fields(StabilityConfig)
            if getattr(args, field.name) != field.default
        }
        refuse_given(own, "with --probe, which takes the run's own")
        count = ProbeConfig.num_batches if args.probe_batches is None else args.probe_batches
        found = run_probe(ProbeConfig(run=args.probe, num_batches=count))
        print(json.dumps(found, indent=1) if args.json else probe_text(found))
        return 0
    refuse_given({"--probe-batches": args.probe_batches}, "without --probe")
    config = StabilityConfig(
        momentum=args.momentum, delay=args.delay, error_feedback=args.error_feedback, nesterov=args.nesterov
    )
    print(json.dumps(run_stability(config), indent=1) if args.json else stability_text(config))
    return 0


def compare(argv: Sequence[str]) -> int:
    """Train a grid of runs and compare them; or ask whether a config of yours stands a delay."""
    args = tyro.cli(CompareArgs, args=argv, prog="slipstream compare")
    from slipstream.console import Console
    from slipstream.report.compare import NUM_SEEDS, TOLERANCE, compare_grid, grid_and_judge
    from slipstream.train.many import train_all
    from slipstream.train.many_progress import ConsoleObserver

    if args.grid:
        own = {"--num-seeds": args.num_seeds, "--tolerance": args.tolerance}
        refuse_given(own, "with a grid, which has seeds of its own and no verdict")
    grid, judge = grid_and_judge(
        args.grid,
        args.from_config,
        num_seeds=NUM_SEEDS if args.num_seeds is None else args.num_seeds,
        tolerance=TOLERANCE if args.tolerance is None else args.tolerance,
    )
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

    export = export_hub(args.run, args.out, weights=args.weights, checkpoint=args.checkpoint)
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
    from slipstream.evaluation.perplexity import reads_records
    from slipstream.evaluation.scoring import Scorer
    from slipstream.evaluation.tasks import run_task
    from slipstream.train.trained import open_trained

    if args.task != "perplexity":
        refuse_given({"--text-field": args.text_field}, f"with the task {args.task}")
    elif args.text_field is not None and not reads_records(args.file):
        refuse_given({"--text-field": args.text_field}, "on prepared data and on plain text, which have no fields")
    model = open_trained(args.model, weights=args.weights, checkpoint=args.checkpoint)
    scorer = Scorer(model, device=_device(args.device), max_length=args.max_length)
    found = run_task(scorer, args.task, args.file, limit=args.limit, text_field=args.text_field or "text")
    if args.json:
        print(json.dumps(found, indent=1))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        shown = "beyond all numbers" if value is None else value if isinstance(value, int) else f"{value:.5g}"
        print(f"{name:<{width}}  {shown}")
    return 0


def generate(argv: Sequence[str]) -> int:
    """Continue a text with a run or a model folder."""
    args = tyro.cli(GenerateArgs, args=argv, prog="slipstream generate")
    from slipstream.evaluation.generation import generate
    from slipstream.train.trained import open_trained

    if args.temperature == 0:
        refuse_given({"--seed": args.seed}, "at a --temperature of 0, which draws nothing")
    written = generate(
        open_trained(args.model, weights=args.weights, checkpoint=args.checkpoint),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed or 0,
        device=_device(args.device),
    )
    print(json.dumps(written._asdict(), indent=1) if args.json else args.prompt + written.text)
    return 0


def _device(name: Literal["auto", "cpu", "cuda"]) -> "torch.device":
    from slipstream.config import TrainConfig
    from slipstream.device import choose_device

    return choose_device(Config(train=TrainConfig(device=name)))


def report(argv: Sequence[str]) -> int:
    """Draw one or several runs as one HTML file."""
    args = tyro.cli(ReportArgs, args=argv, prog="slipstream report")
    from slipstream.report.run_report import write_run_report

    written = write_run_report(args.runs, args.out)
    if args.json:
        print(json.dumps({"out": str(written.out), "verdict": written.verdict, "runs": written.figures}, indent=1))
    else:
        print("\n".join([*written.verdict, str(written.out)]))
    return 0


def watch(argv: Sequence[str]) -> int:
    """Follow a run under way."""
    args = tyro.cli(WatchArgs, args=argv, prog="slipstream watch")
    from slipstream.console import Console
    from slipstream.report.watch import watch as follow

    return follow(args.run, console=Console(), interval_s=args.interval)


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
    "report": report,
    "watch": watch,
    "eval": evaluate,
    "generate": generate,
    "export hf": export_hf,
    "doctor": doctor,
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command that ``argv`` (``sys.argv`` without the program) names; return the exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        code = _run(words)
        sys.stdout.flush()  # a reader that is gone shows here, not when the process ends
    except BrokenPipeError:
        silence()
        return 0
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130  # as shells have it: 128 and the number of the signal
    return code


def _run(words: Sequence[str]) -> int:
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


def _command_name(words: Sequence[str]) -> str:
    """Return the command that the first one or two words name.

    Raises:
        ConfigError: They name none.
    """
    group = [name for name in COMMANDS if name.startswith(f"{words[0]} ")]
    # After `simulate`, a command and the first word of another, a word that is no flag is meant for the other's second.
    is_of_group = bool(group) and len(words) > 1 and not words[1].startswith("-")
    for length in (2,) if is_of_group else (2, 1):
        if (name := " ".join(words[:length])) in COMMANDS:
            return name
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
