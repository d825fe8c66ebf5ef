"""What a report of runs says in sentences, with numbers."""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from slipstream.errors import counted
from slipstream.report.figures import Curve
from slipstream.report.run_charts import spike_steps
from slipstream.report.runs import Row, Run, loss_units_of, units_of
from slipstream.report.statistics import SMOOTHING, smoothed
from slipstream.report.worker_charts import worker_sentence
from slipstream.train.metrics import Totals, duration, quantity

SAME_TIME = 0.01
"""Share by which times may differ and still be called equal."""

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
    if not run.tells_idle:
        found = dataclasses.replace(found, bubble_fraction=None)
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
        best = min(
            (row for row in run.evaluations if row["step"] and math.isfinite(row["val_loss"])),
            key=lambda row: float(row["val_loss"]),
            default=last,
        )
        # The second is true where the newest is not a number.
        if best is not last and not best["val_loss"] >= last["val_loss"] - NEAR:
            below = last["val_loss"] - best["val_loss"]
            less = f", {below:.3f} below the newest" if math.isfinite(below) else ""
            yield f"It was better before: {best['val_loss']:.3f} at step {best['step']}{less}."
    total = totals(run)
    idle = "" if total.bubble_fraction is None else f"ranks idle {total.bubble_fraction:.1%} of the time; "
    yield (
        f"{total.tokens_per_s:,.0f} {run.units} a second; {idle}"
        f"gradients {total.staleness_mean:.2f} updates stale in the mean, {total.staleness_max} at most."
    )
    if run.workers is not None:
        yield worker_sentence([run.workers])
    yield _troubles(run, "")


def _unit(evaluation: Row) -> str:
    bits = evaluation.get("val_bits_per_byte")
    return "a unit" if bits is None else f"nats per token ({bits:.3f} bits per byte)"


def _loss(runs: Sequence[Run]) -> Iterator[str]:
    """Compare the newest validation losses that are of the same tokens, on both sides."""
    if not _is_same_data(runs):
        yield "The runs read different data, so their losses cannot be compared."
        return
    evaluated = [run for run in runs if len(_after_training(run)[0])]
    if len(evaluated) < 2:
        return
    if len({(run.config.data.sequence_length, run.config.evaluate.num_sequences) for run in evaluated}) > 1:
        yield "The runs were evaluated on other sequences, so their validation losses cannot be compared."
        return
    if missing := [run.name for run in runs if run not in evaluated]:
        yield f"Not evaluated yet: {', '.join(missing)}."
    known, tokens = _at_equal_tokens(evaluated)
    if not known:
        yield "The runs were never evaluated after equal tokens, so their validation losses are not compared."
        return
    yield _ranking(evaluated, known, tokens)
    if len({_fall_of_the_rate(run) for run in evaluated}) > 1:
        yield "Their rates had not fallen alike by then: a rate that has fallen gives a lower loss at once."
    yield (
        "One run of each: a difference may be chance. slipstream compare trains paired seeds and gives intervals."
        if len({(run.config.model.seed, run.config.data.seed) for run in runs}) == 1
        else "The runs differ in their seed, so a difference may be chance. slipstream compare gives intervals."
    )


def _ranking(runs: Sequence[Run], known: Sequence[tuple[float, str]], tokens: float | None) -> str:
    """Say which loss is the lowest, and by how much; what is not finite is no loss to rank."""
    after = "" if tokens is None else f"After {quantity(tokens)} {units_of(runs)}, as far as all are, "
    ranked = sorted(each for each in known if math.isfinite(each[0]))
    diverged = [f"{name} has diverged" for loss, name in known if not math.isfinite(loss)]
    if not ranked:
        return f"{after}{'; '.join(diverged)}."
    lowest, name = ranked[0]
    others = [
        f"{other} is {'as good' if loss - lowest < NEAR else f'{loss - lowest:.3f} above it'}"
        for loss, other in ranked[1:]
    ]
    rest = "; ".join([*others, *diverged])
    return f"{after}{name} has the lowest validation loss, {lowest:.3f} {loss_units_of(runs)}: {rest}."


def _fall_of_the_rate(run: Run) -> tuple[object, ...]:
    """Return what says how far the rate has fallen after some tokens."""
    optim, config = run.config.optim, run.config
    if optim.lr_schedule == "constant":
        return ("constant",)
    total = (optim.lr_total_steps or config.train.num_steps) * config.batch_tokens
    share = optim.lr_decay_fraction if optim.lr_schedule == "wsd" else None
    return optim.lr_schedule, optim.lr_final_fraction, share, total


def _at_equal_tokens(runs: Sequence[Run]) -> tuple[list[tuple[float, str]], float | None]:
    """Return the newest validation losses that are of equal tokens, and those tokens.

    Returns:
        No losses where there are no equal tokens; tokens ``None`` where all losses are the newest there are.
    """
    curves = [_after_training(run) for run in runs]
    shortest = min((tokens for tokens, _ in curves), key=lambda tokens: float(tokens[-1]))
    for wanted in reversed(shortest.tolist()):
        places = [int(np.argmin(np.abs(tokens - wanted))) for tokens, _ in curves]
        if all(abs(tokens[at] - wanted) <= SAME_TOKENS * wanted for (tokens, _), at in zip(curves, places)):
            known = [(float(losses[at]), run.name) for run, (_, losses), at in zip(runs, curves, places)]
            is_newest = all(at == len(tokens) - 1 for (tokens, _), at in zip(curves, places))
            return known, None if is_newest else wanted
    return [], None


def _after_training(run: Run) -> Curve:
    tokens, losses = run.validation(run.tokens)
    return tokens[tokens > 0], losses[tokens > 0]


def _is_same_data(runs: Sequence[Run]) -> bool:
    return len({(Path(run.config.data.path).resolve(), run.config.data.stream) for run in runs}) == 1


def _time_to_loss(runs: Sequence[Run]) -> Iterator[str]:
    """Say how long each took to the lowest smoothed training loss that all have reached."""
    if not _is_same_data(runs) or len({run.is_virtual for run in runs}) > 1:
        return
    # Smoothed over the same tokens, for a mean lags behind by what it is taken over.
    span = SMOOTHING * min(float(run.tokens[-1]) for run in runs)
    curves = {}
    for run in runs:
        steps = max(round(span / (float(run.tokens[-1]) / len(run.rows))), 2)
        curves[run.name] = np.minimum.accumulate(smoothed(run.figures("loss").tolist(), span=steps))
    target = max(float(curve[-1]) for curve in curves.values())
    if not math.isfinite(target):
        return
    reached = []
    for run in runs:
        at = int(np.argmax(curves[run.name] <= target))
        reached.append((float(run.seconds[at]), float(run.tokens[at]), run.name))
    reached.sort()
    units = units_of(runs)
    times = "; ".join(f"{name} {_span(seconds)} and {quantity(tokens)} {units}" for seconds, tokens, name in reached)
    (first_s, _, first), (last_s, _, last) = reached[0], reached[-1]
    if last_s < first_s * (1 + SAME_TIME):
        who = "all are there equally soon"
    else:
        who = f"{first} is there first, {last_s / first_s:.2f} times as fast as {last}"
    yield f"To a training loss of {target:.3f}, which all reach, it takes {times}: {who}."


def _span(seconds: float) -> str:
    return duration(seconds) if seconds >= 10 else f"{seconds:.1f}s"


def _speed(runs: Sequence[Run]) -> Iterator[str]:
    rates = sorted(((totals(run).tokens_per_s, run.name) for run in runs), reverse=True)
    listed = "; ".join(f"{name} {rate:,.0f}" for rate, name in rates)
    clocks = {run.is_virtual for run in runs}
    clock = ", each by its own clock" if True in clocks else ""
    gain = f"; the fastest is {rates[0][0] / rates[-1][0]:.2f} times the slowest" if len(clocks) == 1 else ""
    yield f"{units_of(runs).capitalize()} a second{clock}: {listed}{gain}."


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
