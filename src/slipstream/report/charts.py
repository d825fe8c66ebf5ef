"""Which pictures a comparison has, in their order."""

from collections.abc import Sequence

from slipstream.report.bars import gap_section, read_section
from slipstream.report.curves import curve_section
from slipstream.report.figures import Palette, Section
from slipstream.report.results import ArmResult
from slipstream.report.sweeps import batch_section, coefficient_section, delay_section, lr_section
from slipstream.report.table import TableRow, distinct
from slipstream.report.worker_charts import worker_sections


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
        *worker_sections(results, palette),
    ]
    return [section for section in found if section is not None and section.charts]
