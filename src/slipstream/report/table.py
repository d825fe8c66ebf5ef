"""The table of a comparison: one row an arm, at equal learning rate and best against best."""

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from slipstream.report.cells import Arm
from slipstream.report.grid import ALL, NONE
from slipstream.report.results import ArmResult
from slipstream.report.statistics import Estimate, mean, paired, share_closed


@dataclasses.dataclass(frozen=True, kw_only=True)
class TableRow:
    """One arm against those it is measured by. All figures are of the seeds that finished.

    Attributes:
        result: The arm.
        val_loss: Nats per token, on the published weights x; ``None`` where no seed finished.
        val_bits_per_byte: The same in bits per byte.
        perplexity: The same as perplexity per token, seed by seed.
        gap: To plain synchronous training of the same rule, paired by seed; ``None`` where there is none to pair with.
        gap_to_best: To the best synchronous arm of the rule, with any remedy.
        best_sync: That arm.
        closed: Share of the plain delay's gap that the remedy closes; ``None`` for what is synchronous.
        gaps: To plain synchronous training, by seed.
        perplexity_gap: To plain synchronous training, in perplexity, paired by seed.
        against: To the arm that the remedy names, paired by seed; ``None``: it names none.
        against_remedy: The remedy of that arm.
    """

    result: ArmResult
    val_loss: Estimate | None
    val_bits_per_byte: Estimate | None
    gap: Estimate | None
    gap_to_best: Estimate | None
    best_sync: Arm | None
    closed: Estimate | None
    gaps: Mapping[int, float]
    perplexity: Estimate | None = None
    perplexity_gap: Estimate | None = None
    against: Estimate | None = None
    against_remedy: str = ""

    @property
    def arm(self) -> Arm:
        """All but the seed."""
        return self.result.arm

    def to_json(self) -> dict[str, Any]:
        """Return the row as ``table.json`` has it; what is not known is ``None``."""
        arm = self.arm
        return {
            "rule": arm.rule,
            "remedy": arm.remedy,
            "delay": arm.delay,
            "lr": arm.lr,
            "read": arm.read,
            "batch": arm.batch,
            "workers": arm.workers,
            "batch_size": self.result.cells[0].cell.config.batch_size,
            "error_feedback": self.result.cells[0].cell.config.staleness.error_feedback,
            "num_seeds": len(self.result.val_loss) + self.result.count("diverged"),
            **_figures("val_loss", self.val_loss),
            **_figures("val_bits_per_byte", self.val_bits_per_byte),
            **_figures("val_perplexity", self.perplexity),
            **_figures("gap_to_sync", self.gap),
            **_figures("perplexity_gap_to_sync", self.perplexity_gap),
            "against_remedy": self.against_remedy,
            **_figures("against", self.against),
            **self.staleness,
            **_figures("gap_to_best_sync", self.gap_to_best),
            "best_sync": None if self.best_sync is None else {"remedy": self.best_sync.remedy, "lr": self.best_sync.lr},
            "gap_closed_share": None if self.closed is None else self.closed.mean,
            "gap_closed_share_ci95": None if self.closed is None else self.closed.interval,
            "num_diverged": self.result.count("diverged"),
            "num_crashed": self.result.count("crashed"),
            "num_spikes": self.result.num_spikes,
        }

    @property
    def staleness(self) -> dict[str, float]:
        """Mean and largest staleness of asynchronous workers, over the seeds; empty of others."""
        means = [run.staleness_mean for run in self.result.workers if run.staleness_mean is not None]
        largest = [run.staleness_max for run in self.result.workers if run.staleness_max is not None]
        return {"staleness_mean": sum(means) / len(means), "staleness_max": max(largest)} if means and largest else {}


def _figures(name: str, estimate: Estimate | None) -> dict[str, Any]:
    if estimate is None:
        return {f"{name}_mean": None, f"{name}_ci95": None}
    return {f"{name}_mean": estimate.mean, f"{name}_ci95": estimate.interval}


def at_equal_lr(results: Sequence[ArmResult], against: Mapping[str, str] | None = None) -> list[TableRow]:
    """Return a row an arm, each measured by the synchronous arms of its rule, batch and learning rate.

    Args:
        results: All arms.
        against: By remedy, another one to show the difference to.
    """
    by_arm = {result.arm: result for result in results}
    rows = []
    for result in results:
        arm = result.arm
        peers = [each for each in results if _is_peer(each.arm, arm) and each.arm.lr == arm.lr]
        plain = arm._replace(remedy=NONE)
        other = by_arm.get(arm._replace(remedy=(against or {}).get(arm.remedy, "")))
        rows.append(_row(result, peers=peers, plain_delay=by_arm.get(plain), other=other))
    return rows


def best_against_best(results: Sequence[ArmResult], against: Mapping[str, str] | None = None) -> list[TableRow]:
    """Return a row for each arm at its best learning rate, measured by synchronous arms at theirs.

    The best rate is that of the smallest mean loss among the rates at which the fewest seeds failed.

    Args:
        results: All arms.
        against: By remedy, another one to show the difference to.
    """
    best = best_over_lr(results)
    rows = []
    for key, result in best.items():
        peers = [each for each in best.values() if _is_peer(each.arm, key)]
        other = best.get(key._replace(remedy=(against or {}).get(key.remedy, "")))
        rows.append(_row(result, peers=peers, plain_delay=best.get(key._replace(remedy=NONE)), other=other))
    return rows


def best_over_lr(results: Iterable[ArmResult]) -> dict[Arm, ArmResult]:
    """Return each arm at its best learning rate, by the arm with a rate of 0."""
    groups: dict[Arm, list[ArmResult]] = {}
    for result in results:
        groups.setdefault(result.arm._replace(lr=0.0), []).append(result)
    return {key: min(group, key=badness) for key, group in groups.items()}


def badness(result: ArmResult) -> tuple[int, float]:
    """Return what to choose the smallest of: failed seeds, then mean loss."""
    return len(result.cells) - result.count("finished"), result.mean_val_loss


def has_delays(rows: Sequence[TableRow]) -> bool:
    """Whether rows have more than one delay, or workers that make it."""
    return len({(row.arm.delay, row.arm.workers) for row in rows if row.arm.delay}) > 1


def by_rule(rows: Iterable[TableRow]) -> dict[str, list[TableRow]]:
    """Return rows by rule, by batch where there are several, and by workers, each beside what is synchronous."""
    rows = list(rows)
    several = len({row.arm.batch for row in rows}) > 1
    groups: dict[str, list[TableRow]] = {}
    for row in rows:
        groups.setdefault(f"{row.arm.rule}, batch {row.arm.batch}" if several else row.arm.rule, []).append(row)
    return {label: of for name, group in groups.items() for label, of in _by_workers(name, group).items()}


def _by_workers(name: str, rows: Sequence[TableRow]) -> dict[str, list[TableRow]]:
    crews = dict.fromkeys(row.arm.workers for row in rows if row.arm.delay)
    if not any(crews):
        return {name: list(rows)}
    return {
        f"{name}, {crew}" if crew else name: [row for row in rows if not row.arm.delay or row.arm.workers == crew]
        for crew in crews
    }


def distinct(rows: Iterable[TableRow]) -> list[TableRow]:
    """Return rows without those that share their runs with an earlier one: remedies without effect at their delay."""
    first: dict[str, TableRow] = {}
    for row in rows:
        first.setdefault(row.result.cells[0].cell.folder, row)
    return list(first.values())


def whole_reads(rows: Iterable[TableRow]) -> list[TableRow]:
    """Return the rows in which all parameters have the same delay."""
    return [row for row in rows if row.arm.read == ALL]


def _is_peer(arm: Arm, of: Arm) -> bool:
    """Whether an arm is a synchronous one of the same rule and batch."""
    return arm.is_synchronous and arm.rule == of.rule and arm.batch == of.batch


def _row(
    result: ArmResult, *, peers: Sequence[ArmResult], plain_delay: ArmResult | None, other: ArmResult | None
) -> TableRow:
    plain_sync = next((each for each in peers if each.arm.is_plain_synchronous), None)
    best_sync = min(peers, key=badness, default=None)
    gaps = {} if plain_sync is None else paired(result.val_loss, plain_sync.val_loss)
    closed = None
    if plain_delay is not None and plain_sync is not None and not result.arm.is_synchronous:
        closed = share_closed(gaps, paired(plain_delay.val_loss, plain_sync.val_loss))
    return TableRow(
        result=result,
        val_loss=_mean(result.val_loss),
        val_bits_per_byte=_mean(result.val_bits_per_byte),
        gap=_mean(gaps),
        gap_to_best=None if best_sync is None else _mean(paired(result.val_loss, best_sync.val_loss)),
        best_sync=None if best_sync is None else best_sync.arm,
        closed=closed,
        gaps=gaps,
        perplexity=_mean(result.val_perplexity),
        perplexity_gap=None if plain_sync is None else _mean(paired(result.val_perplexity, plain_sync.val_perplexity)),
        against=None if other is None else _mean(paired(result.val_loss, other.val_loss)),
        against_remedy="" if other is None else other.arm.remedy,
    )


def _mean(values: Mapping[int, float]) -> Estimate | None:
    return mean(list(values.values())) if values else None


def figure(estimate: Estimate | None, *, digits: int = 3) -> str:
    """Return a figure and half the width of its interval.

    Example:
        >>> figure(Estimate(mean=2.1, low=2.05, high=2.15))
        '2.100 ± 0.050'
    """
    if estimate is None:
        return "n/a"
    half = "" if estimate.low is None else f" ± {estimate.mean - estimate.low:.{digits}f}"
    return f"{estimate.mean:.{digits}f}{half}"


def signed(estimate: Estimate | None, *, digits: int = 3) -> str:
    """Return a difference with its sign."""
    if estimate is None:
        return "n/a"
    sign = "+" if estimate.mean >= 0 else "\N{MINUS SIGN}"
    half = "" if estimate.low is None else f" ± {estimate.mean - estimate.low:.{digits}f}"
    return f"{sign}{abs(estimate.mean):.{digits}f}{half}"


def percent(estimate: Estimate | None) -> str:
    """Return a share with its interval, which need not be symmetric.

    Example:
        >>> percent(Estimate(mean=0.6, low=0.5, high=0.75))
        '60 % [50, 75]'
    """
    if estimate is None:
        return "n/a"
    text = f"{100 * estimate.mean:.0f} %".replace("-", "\N{MINUS SIGN}")
    if estimate.low is None or estimate.high is None:
        return text
    return f"{text} [{100 * estimate.low:.0f}, {100 * estimate.high:.0f}]".replace("-", "\N{MINUS SIGN}")
