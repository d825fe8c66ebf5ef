"""`simulate`, `simulate async-dp`, `stability`, and `doctor`: what can be known before a run."""

import dataclasses
import sys
from collections.abc import Sequence

import tyro

from slipstream.arguments import DoctorArgs, SimulateArgs, SimulateAsyncDpArgs, StabilityArgs, refuse_given
from slipstream.errors import ConfigError
from slipstream.plan.simulate import build_timeline, run_simulate, without_effect
from slipstream.plan.stability import StabilityConfig, run_stability, stability_text
from slipstream.strict_json import json_text


def simulate(argv: Sequence[str]) -> int:
    """Simulate a pipeline schedule without running it."""
    from slipstream.console import Console
    from slipstream.plan.draw import draw_rich, draw_svg

    args = tyro.cli(SimulateArgs, args=argv, prog="slipstream simulate")
    timeline = build_timeline(args)
    figures = run_simulate(args, timeline)
    for sentence in without_effect(args):
        print(f"warning: {sentence}", file=sys.stderr)
    if args.svg is not None:
        title = f"{args.pipeline_schedule}: {args.num_stages} stages, {args.num_microbatches} microbatches a batch"
        try:
            args.svg.write_text(draw_svg([(args.pipeline_schedule, timeline)], title=title), encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write {args.svg}: {error.strerror}. Give --svg a file in a folder.") from error
    if args.json:
        print(json_text(figures))
        return 0
    console = Console(is_result=True)
    console.print(draw_rich(timeline, width=console.width))
    width = max(map(len, figures))
    for name, value in figures.items():
        print(f"{name:<{width}}  {round(value, 4) if isinstance(value, float) else value}")
    return 0


def simulate_async_dp(argv: Sequence[str]) -> int:
    """Simulate asynchronous data parallelism, 8 to 4,096 workers, on paper."""
    from slipstream.plan.async_dp_text import async_dp_text
    from slipstream.plan.simulate_async_dp import simulate_async_dp

    args = tyro.cli(SimulateAsyncDpArgs, args=argv, prog="slipstream simulate async-dp")
    found = simulate_async_dp(args)
    print(json_text(found) if args.json else async_dp_text(found))
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
        print(json_text(found) if args.json else probe_text(found))
        return 0
    refuse_given({"--probe-batches": args.probe_batches}, "without --probe")
    config = StabilityConfig(
        momentum=args.momentum, delay=args.delay, error_feedback=args.error_feedback, nesterov=args.nesterov
    )
    print(json_text(run_stability(config)) if args.json else stability_text(config))
    return 0


def doctor(argv: Sequence[str]) -> int:
    """Say what this machine offers."""
    from slipstream.doctor import examine

    args = tyro.cli(DoctorArgs, args=argv, prog="slipstream doctor")
    findings = examine()
    if args.json:
        print(json_text({finding.name: finding.value for finding in findings}))
    else:
        width = max(len(finding.name) for finding in findings)
        for finding in findings:
            mark = "ok " if finding.ok else "!! "
            print(f"{mark}{finding.name:<{width}}  {finding.value}")
    return 0 if all(finding.ok for finding in findings) else 1
