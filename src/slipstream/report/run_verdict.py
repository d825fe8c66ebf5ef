"""What a report of runs says in sentences, with numbers."""

import dataclasses
from collections.abc import Iterator, Sequence

import numpy as np

from slipstream.report.figures import Curve
from slipstream.report.run_charts import spike_steps
from slipstream.report.runs import Row, Run, counted, units_of
from slipstream.report.statistics import smoothed_run
from slipstream.report.worker_charts import worker_sentence
from slipstream.train.metrics import Totals, duration, quantity

SAME_TOKENS = 0.01
"""Share by which tokens may differ and still be called equal: steps of workers are not all of the same tokens."""

NEAR = 1e-3
"""Nats; validation losses closer than this are called equal."""


def verdict(runs: Sequence[Run]) -> list[str]:
    """Return the sentences that a reader came for."""
    if len(runs) == 1:
        return [*_one(runs[0])]
    return [*_loss(runs), *_time_to_loss(runs), *_speed(runs), *(_troubles(run, f"{run.name}: ") for run in runs)]


def totals(run: Run) -> Totals:
    """Return figures over all steps, of workers over all gradients: a step may be of more of them than another."""
    found, workers = Totals.of(run.rows), run.workers
    if workers is None or workers.staleness_mean is None:
        return found
    return dataclasses.replace(found, staleness_mean=workers.staleness_mean)


def final_loss(run: Run) -> float | None:
    """Return the newest validation loss."""
    last = run.last_evaluation
    return None if last is None else float(last["val_loss"])


def _one(run: Run) -> Iterator[str]:
    tokens, seconds = quantity(float(run.tokens[-1])), duration(float(run.seconds[-1]))
    clock = "on the virtual clock" if run.is_virtual else "of training"
    last = run.last_evaluation
    if last is None:
        losses = run.figures("loss")
        tail = losses[-max(len(losses) // 20, 1) :]
        yield (
            f"Training loss {losses[0]:.3f} at first, {tail.mean():.3f} now, in {run.last_step} steps, {tokens} "
            f"{run.units}, {seconds} {clock}."
        )
    else:
        before = f"from {run.evaluations[0]['val_loss']:.3f} " if run.evaluations[0]["step"] == 0 else ""
        yield (
            f"Validation loss {before}to {last['val_loss']:.3f} {_unit(last)} in {last['step']} steps, {tokens} "
            f"{run.units}, {seconds} {clock}."
        )
        best = min((row for row in run.evaluations if row["step"]), key=lambda row: float(row["val_loss"]))
        if best["val_loss"] < last["val_loss"] - NEAR:
            yield (
                f"It was better before: {best['val_loss']:.3f} at step {best['step']}, "
                f"{last['val_loss'] - best['val_loss']:.3f} below the newest."
            )
    total = totals(run)
    yield (
        f"{total.tokens_per_s:,.0f} {run.units} a second; ranks idle {total.bubble_fraction:.1%} of the time; "
        f"gradients {total.staleness_mean:.2f} updates stale in the mean, {total.staleness_max} at most."
    )
    if run.workers is not None:
        yield worker_sentence([run.workers])
    yield _troubles(run, "")


def _unit(evaluation: Row) -> str:
    bits = evaluation.get("val_bits_per_byte")
    return "a unit" if bits is None else f"nats per token ({bits:.3f} bits per byte)"


def _loss(runs: Sequence[Run]) -> Iterator[str]:
    """Compare the newest validation losses, where they are of the same tokens."""
    if not _is_same_data(runs):
        yield "The runs read different data, so their losses cannot be compared."
        return
    evaluated = [run for run in runs if len(_after_training(run)[0])]
    if len(evaluated) < 2:
        return
    known, tokens = _at_equal_tokens(evaluated)
    if not known:
        yield "The runs were never evaluated after equal tokens, so their validation losses are not compared."
        return
    lowest, name = known[0]
    others = "; ".join(
        f"{other} is {'as good' if loss - lowest < NEAR else f'{loss - lowest:.3f} above it'}"
        for loss, other in known[1:]
    )
    after = "" if tokens is None else f"After {quantity(tokens)} {units_of(runs)}, as far as all are, "
    yield f"{after}{name} has the lowest validation loss, {lowest:.3f} nats per token: {others}."
    yield (
        "One run of each: a difference may be chance. slipstream compare trains paired seeds and gives intervals."
        if len({run.config.model.seed for run in runs}) == 1
        else "The runs differ in their seed, so a difference may be chance. slipstream compare gives intervals."
    )


def _at_equal_tokens(runs: Sequence[Run]) -> tuple[list[tuple[float, str]], float | None]:
    """Return the newest validation losses that are of equal tokens, the lowest first, and those tokens.

    Returns:
        No losses where there are no equal tokens; tokens ``None`` where all losses are the newest there are.
    """
    curves = [_after_training(run) for run in runs]
    fewest = min(float(tokens[-1]) for tokens, _ in curves)
    places = [int(np.argmin(np.abs(tokens - fewest))) for tokens, _ in curves]
    if any(abs(tokens[at] - fewest) > SAME_TOKENS * fewest for (tokens, _), at in zip(curves, places)):
        return [], None
    known = sorted((float(losses[at]), run.name) for run, (_, losses), at in zip(runs, curves, places))
    is_newest = all(at == len(tokens) - 1 for (tokens, _), at in zip(curves, places))
    return known, None if is_newest else fewest


def _after_training(run: Run) -> Curve:
    tokens, losses = run.validation(run.tokens)
    return tokens[tokens > 0], losses[tokens > 0]


def _is_same_data(runs: Sequence[Run]) -> bool:
    return len({(run.config.data.path, run.config.model.vocab_size) for run in runs}) == 1


def _time_to_loss(runs: Sequence[Run]) -> Iterator[str]:
    """Say how long each took to the lowest smoothed training loss that all have reached."""
    if not _is_same_data(runs) or len({run.is_virtual for run in runs}) > 1:
        return
    curves = {run.name: np.minimum.accumulate(smoothed_run(run.figures("loss"))) for run in runs}
    target = max(float(curve[-1]) for curve in curves.values())
    reached = []
    for run in runs:
        at = int(np.argmax(curves[run.name] <= target))
        reached.append((float(run.seconds[at]), float(run.tokens[at]), run.name))
    reached.sort()
    units = units_of(runs)
    times = "; ".join(f"{name} {_span(seconds)} and {quantity(tokens)} {units}" for seconds, tokens, name in reached)
    slowest = reached[-1]
    gain = f", {slowest[0] / reached[0][0]:.2f} times as fast as {slowest[2]}" if reached[0][0] > 0 else ""
    first = reached[0][2]
    yield f"To a training loss of {target:.3f}, which all reach, it takes {times}: {first} is there first{gain}."


def _span(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.1f}s"


def _speed(runs: Sequence[Run]) -> Iterator[str]:
    rates = sorted(((totals(run).tokens_per_s, run.name) for run in runs), reverse=True)
    listed = "; ".join(f"{name} {rate:,.0f}" for rate, name in rates)
    clock = ", each by its own clock" if any(run.is_virtual for run in runs) else ""
    gain = f"the fastest is {rates[0][0] / rates[-1][0]:.2f} times the slowest"
    yield f"{units_of(runs).capitalize()} a second{clock}: {listed}; {gain}."


def _troubles(run: Run, before: str) -> str:
    """Return what went wrong in a run; empty where nothing did."""
    found = []
    if run.state != "finished":
        found.append(run.state)
    if run.failure:
        found.append(run.failure.strip().splitlines()[-1].rstrip("."))
    if skipped := sum(bool(row["skipped"]) for row in run.rows):
        found.append(f"{counted(skipped, 'update')} skipped for a gradient that was not finite")
    if steps := list(spike_steps(run)):
        shown = ", ".join(map(str, steps[:6])) + (", ..." if len(steps) > 6 else "")
        found.append(f"{counted(len(steps), 'spike')} of loss or gradient norm, at step {shown}")
    if not found:
        return ""
    text = "; ".join(found)
    return f"{before}{text}." if before else f"{text[0].upper()}{text[1:]}."
