"""Which pictures a comparison has, in their order."""

from collections.abc import Sequence

from slipstream.report.bars import gap_section, read_section
from slipstream.report.curves import curve_section
from slipstream.report.figures import Palette, Section, arm_text
from slipstream.report.results import ArmResult
from slipstream.report.sweeps import batch_section, coefficient_section, delay_section, lr_section
from slipstream.report.table import TableRow, distinct
from slipstream.report.worker_charts import Shown, gain_section, rate_section, worker_section, worker_sentence


def sections(results: Sequence[ArmResult], best: Sequence[TableRow]) -> list[Section]:
    """Return all pictures that a grid has something to show in.

    Args:
        results: All arms.
        best: Their rows best against best.
    """
    palette = Palette(result.arm for result in results)
    best = distinct(best)
    found = [
        gap_section(best, palette),
        curve_section(best, palette),
        read_section(best, palette),
        delay_section(best, palette),
        coefficient_section(best, palette),
        lr_section(results, palette),
        batch_section(best, palette),
        *_worker_sections(results, palette),
    ]
    return [section for section in found if section is not None and section.charts]


def _worker_sections(results: Sequence[ArmResult], palette: Palette) -> list[Section]:
    """Return what asynchronous workers did; of each arm in its first seed."""
    found = [result for result in results if result.workers]
    # What workers do depends on their own settings alone, whatever the gradients are: the first arm of each stands for
    # all others.
    by_settings: dict[str, ArmResult] = {}
    for result in found:
        by_settings.setdefault(repr(result.cells[0].cell.config.dataparallel), result)
    # The groups of a rule and its workers are shown once.
    by_crew: dict[tuple[str, str], ArmResult] = {}
    for result in found:
        if len(result.workers[0].groups) > 1:
            by_crew.setdefault((result.arm.rule, result.arm.workers), result)
    # What an arm's factors follow is the staleness, at any rate and batch: one curve of each.
    rates: dict[str, dict[str, tuple[str, str, Sequence[tuple[int, float]]]]] = {}
    for result in found:
        arm, name = result.arm, arm_text(result.arm)
        figures = (name, palette.css(arm), result.workers[0].lr_factor)
        rates.setdefault(f"{arm.rule}, {arm.workers}", {}).setdefault(name, figures)
    return [
        worker_section(
            [Shown(_settings_text(result), "c1", result.workers[0]) for result in by_settings.values()],
            said=worker_sentence([run for result in found for run in result.workers]),
        ),
        gain_section(
            (
                f"{result.arm.rule}, {arm_text(result.arm, several_delays=True)}",
                palette.css(result.arm),
                result.workers[0].groups,
            )
            for result in by_crew.values()
        ),
        rate_section({title: list(runs.values()) for title, runs in rates.items()}),
    ]


def _settings_text(result: ArmResult) -> str:
    settings = result.cells[0].cell.config.dataparallel
    return f"{result.arm.workers}, {'dynamic' if settings.dynamic_batches else 'equal'} batches"
