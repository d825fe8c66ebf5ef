"""Pictures of asynchronous data parallelism: who waits for whom, and how a gradient becomes stale."""

from sheet import Sheet
from worker_courses import Course, asynchronous, synchronous

SPEEDS = (1.0, 1.0, 1.0, 0.25)
UNTIL_S = 48.0
LEFT, WIDE, ROW = 140.0, 542.0, 27


def _share(course: Course, *, until_s: float) -> float:
    """Return the work done over what the workers could have done."""
    done = sum(min(cycle.end_s, until_s) - cycle.begin_s for cycle in course.cycles)
    return done / (len(SPEEDS) * until_s)


def _panel(sheet: Sheet, course: Course, heading: str, *, top: float) -> float:
    """Draw the cycles of each worker; return the bottom."""
    scale = WIDE / UNTIL_S
    sheet.text((16, top + 12), heading, "head")
    height = ROW * len(SPEEDS)
    for worker, speed in enumerate(SPEEDS):
        y = top + 22 + ROW * worker
        sheet.text((16, y + 15), f"worker {worker}, speed {'¼' if speed == 0.25 else '1'}", "quiet")
        sheet.idle(LEFT + 0.5, y, WIDE, 22)
    for cycle in course.cycles:
        if cycle.begin_s < UNTIL_S:
            y, end_s = top + 22 + ROW * cycle.worker, min(cycle.end_s, UNTIL_S)
            css = "late" if cycle.staleness > 1 else ("c1" if cycle.staleness == 1 else "c2")
            hint = f"reads version {cycle.read_version}, staleness {cycle.staleness}"
            sheet.box(
                LEFT + cycle.begin_s * scale,
                y,
                (end_s - cycle.begin_s) * scale,
                22,
                css,
                text=str(cycle.num_microbatches),
                title=hint,
            )
    for step_s in course.steps_s:
        if step_s <= UNTIL_S:
            x = LEFT + step_s * scale
            sheet.line([(x, top + 17), (x, top + 22)], "line l0")
            sheet.line([(x, top + height + 17), (x, top + height + 22)], "line l0")
    return top + 22 + height + 14


def who_waits() -> str:
    """Four workers, one of them four times slower: with a barrier, without, and with dynamic batches."""
    title = "Four workers, one of them four times slower: who waits for whom"
    sheet = Sheet(
        512,
        title=title,
        label="With a barrier three workers wait for the slowest; without one nobody waits; dynamic batches make all "
        "cycles equally long.",
    )
    sheet.legend(42, [("c2", "gradient of staleness 0"), ("c1", "1"), ("late", "2 or more"), ("idle", "waits")])
    sheet.text((430, 53), "number: microbatches; tick: a step", "quiet")
    until = 4 * UNTIL_S
    panels = (
        ("Synchronous: everyone waits for the slowest", synchronous(SPEEDS, until_s=until, step_microbatches=16)),
        ("Asynchronous, equal batches: nobody waits", asynchronous(SPEEDS, until_s=until, step_microbatches=16)),
        (
            "Asynchronous, dynamic batches: nobody waits, and cycles become equally long",
            asynchronous(SPEEDS, until_s=until, step_microbatches=16, dynamic=True),
        ),
    )
    top = 74.0
    for heading, course in panels:
        top = _panel(sheet, course, heading, top=top)
    return sheet.file()


def staleness_of_a_worker() -> str:
    """One gradient of a slow worker, and the steps that the others make meanwhile."""
    title = "How a gradient becomes stale: one push makes a step, three workers"
    speeds, until_s = (1.0, 0.8, 0.4), 15.0
    course = asynchronous(speeds, until_s=40.0, step_microbatches=2, pushes_per_step=1)
    scale = WIDE / until_s
    sheet = Sheet(
        266,
        title=title,
        label="Staleness is the number of steps between reading the weights and applying the gradient.",
    )
    y_versions = 62
    sheet.text((16, y_versions + 4), "versions", "quiet")
    for step_s in (0.0, *course.steps_s):
        if step_s < until_s:
            x = LEFT + step_s * scale
            sheet.line([(x, y_versions + 12), (x, 190)], "rule")
    for worker, speed in enumerate(speeds):
        sheet.text((16, 104 + 36 * worker), f"worker {worker}, speed {speed:g}", "quiet")
    shown = next(cycle for cycle in course.cycles if cycle.worker == 2 and cycle.begin_s > 2.0)
    for cycle in course.cycles:
        if cycle.begin_s < until_s:
            y, end_s = 89 + 36 * cycle.worker, min(cycle.end_s, until_s)
            css = "late" if cycle is shown else "c2"
            text = f"reads v{cycle.read_version}" if end_s == cycle.end_s else ""
            sheet.box(LEFT + cycle.begin_s * scale, y, (end_s - cycle.begin_s) * scale, 22, css, text=text)
    taken: list[float] = []
    for number, step_s in enumerate([0.0, *course.steps_s]):
        x = LEFT + step_s * scale
        if step_s < until_s and all(abs(x - other) > 27 for other in taken):
            taken.append(x)
            sheet.dot((x, y_versions), "node", radius=12)
            sheet.text((x, y_versions + 4), f"v{number}", anchor="middle")
    begin, end = LEFT + shown.begin_s * scale, LEFT + shown.end_s * scale
    sheet.arrow((begin, 212), (end, 212), "strong")
    sheet.text((begin, 232), f"read version {shown.read_version}", anchor="middle")
    sheet.text((end, 232), f"makes version {shown.read_version + shown.staleness + 1}", anchor="middle")
    sheet.text(
        ((begin + end) / 2, 252),
        f"{shown.staleness} steps by others in between: staleness {shown.staleness}",
        "head",
        anchor="middle",
    )
    return sheet.file()
