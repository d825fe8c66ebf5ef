"""What a comparison says, in sentences."""

import dataclasses
from collections.abc import Sequence

from slipstream.config import coefficient_text
from slipstream.report.cells import Arm
from slipstream.report.grid import NONE
from slipstream.report.statistics import Estimate, ratio
from slipstream.report.table import TableRow, badness, by_rule, figure, percent, signed, whole_reads

TOLERANCE = 0.005
"""Share of the synchronous loss that a switch to a delay may cost."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RuleVerdict:
    """What the smallest delay does to one rule, best against best.

    Attributes:
        name: The rule, with its batch where there are several.
        sync: Plain synchronous training.
        plain: The delay and nothing done about it.
        remedy: The remedy with the smallest loss at that delay; ``None`` where there is none.
        sentence: All of this in words.
    """

    name: str
    sync: TableRow
    plain: TableRow
    remedy: TableRow | None
    sentence: str


def rule_verdicts(best: Sequence[TableRow]) -> list[RuleVerdict]:
    """Return a verdict for each rule that has a synchronous arm and a delayed one.

    Args:
        best: Rows best against best.
    """
    found = []
    for name, rows in by_rule(whole_reads(best)).items():
        sync = next((row for row in rows if row.arm.is_plain_synchronous), None)
        delayed = [row for row in rows if row.arm.delay]
        if sync is None or not delayed:
            continue
        delay = min(row.arm.delay for row in delayed)
        plain = next((row for row in delayed if row.arm.delay == delay and row.arm.remedy == NONE), None)
        if plain is None:
            continue
        remedies = [row for row in delayed if row.arm.delay == delay and row.arm.remedy != NONE]
        remedy = min(remedies, key=lambda row: badness(row.result), default=None)
        sentence = _rule_sentence(name, plain, remedy)
        found.append(RuleVerdict(name=name, sync=sync, plain=plain, remedy=remedy, sentence=sentence))
    return found


def cause(arm: Arm) -> str:
    """Return what an arm differs in from synchronous training, in words."""
    if arm.workers:
        return "asynchronous workers"
    return "one step of delay" if arm.delay == 1 else f"a delay of {arm.delay} steps"


def _rule_sentence(name: str, plain: TableRow, remedy: TableRow | None) -> str:
    steps, s = cause(plain.arm), "" if plain.arm.workers else "s"
    if plain.gap is None:
        return f"{name}: no seed finished both with and without the delay{_failed(plain)}."
    if plain.gap.interval is None or plain.gap.low is None or plain.gap.low > 0:
        text = f"{name}: {steps} cost{s} {figure(plain.gap)} nats per token"
    elif plain.gap.high is not None and plain.gap.high < 0:
        text = f"{name}: {steps} gain{s} {figure(_negated(plain.gap))} nats per token"
    else:
        text = (
            f"{name}: {steps} cost{s} nothing that these seeds could tell from 0 ({signed(plain.gap)} nats per token)"
        )
    text += _failed(plain)
    if remedy is None or remedy.gap is None:
        return f"{text}."
    if remedy.closed is not None and plain.gap.excludes_zero and plain.gap.mean > 0:
        text += f"; {remedy.arm.remedy} closes {percent(remedy.closed)} of it{_failed(remedy)}"
    else:
        text += f"; with {remedy.arm.remedy} the gap is {signed(remedy.gap)}{_failed(remedy)}"
    best = remedy.best_sync
    if best is not None and best.remedy != NONE and remedy.gap_to_best is not None:
        text += f". Synchronous training gains from {best.remedy} too: to it the gap is {signed(remedy.gap_to_best)}"
    return f"{text}."


def _failed(row: TableRow) -> str:
    count, total = row.result.count("diverged"), len(row.result.cells)
    return f" ({count} of {total} seeds diverged)" if count else ""


def _negated(estimate: Estimate) -> Estimate:
    low, high = estimate.low, estimate.high
    return Estimate(mean=-estimate.mean, low=None if high is None else -high, high=None if low is None else -low)


def rules_sentence(verdicts: Sequence[RuleVerdict]) -> str | None:
    """Return how many times more the most sensitive rule loses than the least; ``None`` of fewer than two rules."""
    known = [each for each in verdicts if each.plain.gap is not None and not each.plain.arm.workers]
    if len(known) < 2:
        return None
    most = max(known, key=lambda each: _mean(each.plain.gap))
    least = min(known, key=lambda each: _mean(each.plain.gap))
    times = ratio(most.plain.gaps, least.plain.gaps)
    if times is None or times.interval is None or times.mean <= 0:
        return f"Of the rules, {most.name} loses most and {least.name} least."
    low, high = times.interval
    return f"{most.name} loses {times.mean:.1f} times [{low:.1f}, {high:.1f}] what {least.name} does."


def _mean(estimate: Estimate | None) -> float:
    return 0.0 if estimate is None else estimate.mean


def switch_sentence(best: Sequence[TableRow], *, tolerance: float = TOLERANCE) -> str:
    """Return whether a training config should be switched to one step of delay, and why.

    Args:
        best: Rows of the one rule: synchronous, delayed, delayed with error feedback.
        tolerance: Share of the synchronous loss that the switch may cost: it is advised where the whole interval of
            the gap lies below that, advised against where it lies above, and undecided in between.
    """
    verdicts = rule_verdicts(best)
    if not verdicts or verdicts[0].plain.gap is None or verdicts[0].sync.val_loss is None:
        return "Undecided: too few runs finished to compare them; see the failures."
    verdict = verdicts[0]
    arms = [row for row in (verdict.plain, verdict.remedy) if row is not None and row.gap is not None]
    chosen = min(arms, key=lambda row: badness(row.result))
    gap, loss = chosen.gap, verdict.sync.val_loss
    assert gap is not None
    assert loss is not None
    limit, feedback = tolerance * loss.mean, chosen.result.cells[0].cell.config.staleness.error_feedback
    how = f"with staleness.error_feedback = {coefficient_text(feedback)}" if feedback else "without a remedy"
    cost = f"{signed(gap)} nats per token ({100 * gap.mean / loss.mean:+.2f} % of {loss.mean:.3f})"
    allowed = f"the {100 * tolerance:g} % allowed are {limit:.3f}"
    num_seeds = len(chosen.result.val_loss)
    if chosen.result.count("diverged"):
        return f"Do not switch: one step of delay {how} makes training diverge{_failed(chosen)}."
    if gap.low is None or gap.high is None:
        return f"Undecided: one step of delay {how} costs {cost} on a single seed; run again with --num-seeds 3."
    if gap.high <= limit:
        return (
            f"Switch: one step of delay {how} costs {cost}, {allowed}, and a pipeline that never drains is up to "
            f"{_gain(chosen):.2f} times as fast{_stages(chosen)}."
        )
    if gap.low > limit:
        return (
            f"Do not switch yet: one step of delay {how} costs {cost}, {allowed}; try Muon, a larger momentum or "
            "a lower learning rate first."
        )
    return (
        f"Undecided: one step of delay {how} costs {cost}, {allowed}, and {num_seeds} seeds leave it open; run again "
        f"with --num-seeds {2 * num_seeds}, what is trained is kept."
    )


def _gain(row: TableRow) -> float:
    """Return the ideal gain over a schedule that drains at every step: (m + p - 1) / m."""
    pipeline = row.result.cells[0].cell.config.pipeline
    return (pipeline.num_microbatches + pipeline.num_stages - 1) / pipeline.num_microbatches


def _stages(row: TableRow) -> str:
    pipeline = row.result.cells[0].cell.config.pipeline
    return f" ({pipeline.num_stages} stages, {pipeline.num_microbatches} microbatches)"
