"""What a comparison says, in sentences."""

import dataclasses
from collections.abc import Mapping, Sequence

from slipstream.config import coefficient_text
from slipstream.report.cells import Arm
from slipstream.report.grid import NONE
from slipstream.report.statistics import Estimate, ratio
from slipstream.report.table import TableRow, badness, by_rule, distinct, figure, percent, signed, whole_reads

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
        num_remedies: Those it is the best of.
        sentence: All of this in words.
    """

    name: str
    sync: TableRow
    plain: TableRow
    remedy: TableRow | None
    num_remedies: int
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
        # What changes nothing at this delay is the plain delay once more, not one of several tries.
        remedies = distinct([plain, *(row for row in delayed if row.arm.delay == delay and row.arm.remedy != NONE)])[1:]
        remedy = min(remedies, key=lambda row: badness(row.result), default=None)
        sentence = _rule_sentence(name, plain)
        if plain.gap is not None and remedy is not None and remedy.gap is not None:
            sentence += _remedy_part(plain.gap, remedy, len(remedies))
            sentence += _control_part(remedy, {row.arm: row for row in rows})
        found.append(
            RuleVerdict(
                name=name, sync=sync, plain=plain, remedy=remedy, num_remedies=len(remedies), sentence=f"{sentence}."
            )
        )
    return found


def cause(arm: Arm) -> str:
    """Return what an arm differs in from synchronous training, in words."""
    if arm.workers:
        return "asynchronous workers"
    return "one step of delay" if arm.delay == 1 else f"a delay of {arm.delay} steps"


def _rule_sentence(name: str, plain: TableRow) -> str:
    """Return what the delay costs a rule, without a full stop."""
    steps, s = cause(plain.arm), "" if plain.arm.workers else "s"
    if plain.gap is None:
        return f"{name}: no seed finished both with and without the delay{_failed(plain)}"
    if plain.gap.interval is None or plain.gap.low is None or plain.gap.low > 0:
        text = f"{name}: {steps} cost{s} {figure(plain.gap)} nats per token"
    elif plain.gap.high is not None and plain.gap.high < 0:
        text = f"{name}: {steps} gain{s} {figure(_negated(plain.gap))} nats per token"
    else:
        text = (
            f"{name}: {steps} cost{s} nothing that these seeds could tell from 0 ({signed(plain.gap)} nats per token)"
        )
    return text + _failed(plain)


def _remedy_part(plain_gap: Estimate, remedy: TableRow, num_remedies: int) -> str:
    """Return what the best remedy does, and of how many it is the best."""
    name = remedy.arm.remedy
    best = f"of {num_remedies} remedies {name} has the smallest loss" if num_remedies > 1 else ""
    if remedy.closed is not None and plain_gap.excludes_zero and plain_gap.mean > 0:
        start = f"{best}, and" if best else name
        return f"; {start} closes {percent(remedy.closed)} of it{_failed(remedy)}"
    start = f"{best}: with it" if best else f"with {name}"
    return f"; {start} the gap is {signed(remedy.gap)}{_failed(remedy)}"


def _control_part(remedy: TableRow, rows: Mapping[Arm, TableRow]) -> str:
    """Return the gap to the best synchronous arm where that has a remedy, and whether it surely gains from it."""
    best = remedy.best_sync
    if best is None or best.remedy == NONE or remedy.gap_to_best is None:
        return ""
    gap = rows[best].gap if best in rows else None
    is_gain = gap is not None and gap.high is not None and gap.high < 0
    how = f"gains from {best.remedy} too" if is_gain else f"has the smaller mean with {best.remedy}, maybe by chance"
    return f". Synchronous training {how}: to it the gap is {signed(remedy.gap_to_best)}"


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
    by_means = f"Of {len(known)} rules {most.name} loses most and {least.name} least by the means"
    if times is None or times.interval is None or times.mean <= 0:
        return f"{by_means}."
    low, high = times.interval
    proportion = f"{times.mean:.1f} times [{low:.1f}, {high:.1f}]"
    if len(known) > 2:
        return f"{by_means}, {proportion} as much."
    return f"{most.name} loses {proportion} what {least.name} does."


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
    num_diverged, num_without = chosen.result.count("diverged"), verdict.sync.result.count("diverged")
    if 0 < num_diverged <= num_without:
        return (
            f"Undecided: synchronous training diverges as well{_failed(verdict.sync)}; lower the learning rate and "
            "compare again."
        )
    if num_diverged:
        less = f", synchronous training less often{_failed(verdict.sync)}" if num_without else ""
        return f"Do not switch: one step of delay {how} makes training diverge{_failed(chosen)}{less}."
    if gap.low is None or gap.high is None:
        return f"Undecided: one step of delay {how} costs {cost} on a single seed; run again with --num-seeds 3."
    if gap.high <= limit:
        return (
            f"Switch: one step of delay {how} costs {cost}, {allowed}, and a pipeline that never drains is up to "
            f"{_gain(chosen):.2f} times as fast{_stages(chosen)}."
        )
    if gap.low > limit:
        muon = "" if "muon" in chosen.result.cells[0].cell.config.optim.name.lower() else "Muon, "
        return (
            f"Do not switch yet: one step of delay {how} costs {cost}, {allowed}; try {muon}a larger momentum or "
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
