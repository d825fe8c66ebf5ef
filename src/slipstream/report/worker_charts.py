"""Pictures of what asynchronous workers did: for the report of one run, and for that of a comparison."""

from collections.abc import Iterable, Mapping, Sequence

from slipstream.report.figures import Chart, DataTable, LegendEntry, Palette, Section, arm_text
from slipstream.report.results import ArmResult
from slipstream.report.svg import WIDTH, Canvas, Scale, draw_axes, tick_format
from slipstream.report.workers import RunOfWorkers, WorkerFigures
from slipstream.train.metrics import quantity

MAX_STALENESS = 24
"""Columns of a histogram; what is staler is counted in the last."""

STALENESS_TEXT = (
    "How many of each worker's gradients were how stale; beside its name its share of the tokens, tokens a second by "
    "the run's clock, and mean and largest staleness."
)


def staleness_chart(title: str, run: RunOfWorkers, *, css: str = "c1") -> Chart:
    """Return a histogram of staleness a worker, one below the other on one scale.

    Args:
        title: Of the picture.
        run: What the workers did.
        css: Colour.
    """
    row_height, top, bar_height = 52, 4, 30
    columns = min(run.staleness_max, MAX_STALENESS) + 1
    canvas = Canvas(top + row_height * len(run.workers) + 38, label=f"{title}: staleness of each worker's gradients")
    x = Scale(low=0, high=columns, start=8, end=WIDTH - 12)
    width = min(x(1) - x(0), 60.0)
    for index, worker in enumerate(run.workers):
        base = top + row_height * (index + 1) - 4
        canvas.text((10, base - bar_height - 6), _said(worker), "label")
        canvas.line([(x.start, base), (x.start + columns * width, base)], "rule")
        for tau, count in _columns(worker.histogram, columns):
            height = bar_height * count / max(worker.num_pushes, 1)
            said = f"worker {worker.number}, staleness {tau}: {count} of {worker.num_pushes} gradients"
            canvas.bar(x.start + tau * width + 1, base - height, width - 2, height, f"fill {css}", title=said)
    bottom = top + row_height * len(run.workers)
    every = max(1, columns // 12)
    for tau in range(0, columns, every):
        text = f"{tau}+" if tau == MAX_STALENESS and run.staleness_max > MAX_STALENESS else str(tau)
        canvas.text((x.start + (tau + 0.5) * width, bottom + 13), text, anchor="middle")
    canvas.text((WIDTH / 2, bottom + 31), "staleness in updates", "name", anchor="middle")
    return Chart(title=title, svg=str(canvas), data=_staleness_table(run))


def _staleness_table(run: RunOfWorkers) -> DataTable:
    taus = sorted({tau for worker in run.workers for tau in worker.histogram})
    rows = [
        [
            str(worker.number),
            f"{100 * worker.share:.1f} %",
            "" if worker.tokens_per_s is None else f"{worker.tokens_per_s:.0f}",
            *(str(worker.histogram.get(tau, 0)) for tau in taus),
        ]
        for worker in run.workers
    ]
    return DataTable(head=["worker", "share", "tokens/s", *(f"staleness {tau}" for tau in taus)], rows=rows)


def _said(worker: WorkerFigures) -> str:
    rate = "" if worker.tokens_per_s is None else f", {quantity(worker.tokens_per_s)} tok/s"
    return (
        f"worker {worker.number}: {100 * worker.share:.0f} %{rate}, staleness {worker.staleness_mean:.1f}, "
        f"at most {worker.staleness_max}"
    )


def _columns(histogram: Mapping[int, int], columns: int) -> list[tuple[int, int]]:
    counts = [0] * columns
    for tau, count in histogram.items():
        counts[min(tau, columns - 1)] += count
    return [(tau, count) for tau, count in enumerate(counts) if count]


def gain_chart(title: str, run: RunOfWorkers, *, css: str = "c1") -> Chart:
    """Return the compensator's gain of each group of parameters, and how much it changed the gradient."""
    row_height, top = 19, 4
    bottom = top + row_height * len(run.groups)
    canvas = Canvas(bottom + 38, label=f"{title}: gain of the gradient compensator by group")
    x = Scale(low=0.0, high=1.0, start=92, end=WIDTH - 60)
    for value in x.ticks(4):
        canvas.line([(x(value), top), (x(value), bottom)], "zero" if value == 0 else "rule")
        canvas.text((x(value), bottom + 16), f"{value:g}", anchor="middle")
    canvas.text((WIDTH / 2, bottom + 33), "gain; at the right: size of the correction", "name", anchor="middle")
    for index, group in enumerate(run.groups):
        y = top + row_height * index
        said = f"{group.group}: gain {group.gain:.2f}, curvature {group.curvature:.3g}, cosine {group.cosine:.3f}"
        canvas.text((x.start - 6, y + 13), group.group, "label", anchor="end")
        canvas.bar(x.start, y + 4, x(group.gain) - x.start, 11, f"fill {css}", title=said)
        canvas.text((WIDTH - 8, y + 13), f"{100 * group.relative:.1f} %", "label", anchor="end")
    rows = [
        [each.group, f"{each.gain:.2f}", f"{100 * each.relative:.1f} %", f"{each.curvature:.3g}", f"{each.cosine:.3f}"]
        for each in run.groups
    ]
    head = ["group", "gain", "size of the correction", "curvature", "cosine"]
    return Chart(title=title, svg=str(canvas), data=DataTable(head=head, rows=rows))


def factor_chart(title: str, runs: Mapping[str, tuple[str, RunOfWorkers]]) -> Chart:
    """Return the async-aware factor on the learning rate over steps.

    Args:
        title: Of the picture.
        runs: Colour and run, by name.
    """
    canvas = Canvas(200, label=f"{title}: factor on the learning rate")
    last = max(step for _, run in runs.values() for step, _ in run.lr_factor)
    x = Scale(low=0, high=last, start=46, end=WIDTH - 12)
    y = Scale(low=0.0, high=1.05, start=158, end=8)
    ticks = [(value, quantity(value).replace(".0", "")) for value in x.ticks(4)]
    draw_axes(canvas, x, y, x_label="step", y_label="factor", x_ticks=ticks, y_format=tick_format(y.ticks(6)))
    for css, run in runs.values():
        canvas.line([(x(step), y(factor)) for step, factor in run.lr_factor], f"curve {css}")
    legend = [
        LegendEntry(css=css, label=name, figure=f"at the end {run.lr_factor[-1][1]:.2f}")
        for name, (css, run) in runs.items()
    ]
    return Chart(title=title, svg=str(canvas), legend=legend)


def ledger_sentence(runs: Iterable[RunOfWorkers]) -> str:
    """Return what became of the data and of the gradients, over runs."""
    runs = list(runs)
    count, balanced = len(runs), sum(run.ledger_balanced for run in runs)
    rejected = sum(sum(run.pushes_rejected.values()) for run in runs)
    text = "The ledger balances to the token" if balanced else "The ledger does not balance"
    if count > 1:
        text = f"The ledger balances to the token in {'all' if balanced == count else balanced} of {count} runs"
    return (
        f"{text}; {sum(run.pushes_accepted for run in runs)} gradients counted, {rejected} were rejected, "
        f"{sum(run.tokens_dropped for run in runs)} tokens dropped."
    )


def worker_sections(results: Sequence[ArmResult], palette: Palette) -> list[Section]:
    """Return what a comparison has to show of its workers; of each arm its first seed.

    Args:
        results: All arms.
        palette: Of the report.
    """
    found = {result.arm: result for result in results if result.workers}
    if not found:
        return []
    all_runs = [run for result in found.values() for run in result.workers]
    # What workers do depends on their own settings alone, whatever the gradients are: the first arm of each stands for
    # all others.
    by_settings: dict[str, ArmResult] = {}
    for result in found.values():
        by_settings.setdefault(repr(result.cells[0].cell.config.dataparallel), result)
    stale = [staleness_chart(_settings_text(result), result.workers[0]) for result in by_settings.values()]
    return [
        Section(title="Workers and staleness", text=f"{STALENESS_TEXT} {ledger_sentence(all_runs)}", charts=stale),
        Section(
            title="The gradient compensator by group",
            text="Mean gain over the steps after its beginning: how much of what the curvature foretells is there, by "
            "pairs of gradients that did not make it; 0 switches a correction off. Percentages are the norm of the "
            "correction over that of the gradient.",
            charts=[
                gain_chart(arm_label(result), result.workers[0], css=palette.css(result.arm))
                for result in found.values()
                if len(result.workers[0].groups) > 1 and not _is_repeat(result, found.values())
            ],
        ),
        Section(
            title="The async-aware rate",
            text="Factor on the learning rate by the mean staleness of the last gradients.",
            charts=_factors(list(found.values()), palette),
        ),
    ]


def _is_repeat(result: ArmResult, all_results: Iterable[ArmResult]) -> bool:
    """Whether an earlier arm of the same rule and workers shows its groups already."""
    arm = result.arm
    alike = [each for each in all_results if (each.arm.rule, each.arm.workers) == (arm.rule, arm.workers)]
    return next(each for each in alike if len(each.workers[0].groups) > 1) is not result


def _settings_text(result: ArmResult) -> str:
    settings = result.cells[0].cell.config.dataparallel
    return f"{result.arm.workers}, {'dynamic' if settings.dynamic_batches else 'equal'} batches"


def arm_label(result: ArmResult) -> str:
    """Return what a picture of one arm is called."""
    return f"{result.arm.rule}, {arm_text(result.arm, several_delays=True)}"


def _factors(results: Sequence[ArmResult], palette: Palette) -> list[Chart]:
    by_title: dict[str, dict[str, tuple[str, RunOfWorkers]]] = {}
    for result in results:
        run = result.workers[0]
        if run.lr_factor:
            title = f"{result.arm.rule}, {result.arm.workers}"
            by_title.setdefault(title, {})[arm_text(result.arm)] = (palette.css(result.arm), run)
    return [factor_chart(title, runs) for title, runs in by_title.items()]
