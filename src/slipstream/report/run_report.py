"""The report of one or several runs: ``slipstream report RUN...``."""

import contextlib
import dataclasses
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from slipstream.config import Config, flattened, to_dict, to_toml
from slipstream.errors import ConfigError, counted
from slipstream.models.shapes import num_parameters
from slipstream.report.figures import DataTable
from slipstream.report.page import GENERATOR, card, data_table, escape, page, part, section_html, span
from slipstream.report.run_charts import run_sections
from slipstream.report.run_timeline import timeline_svg
from slipstream.report.run_verdict import final_loss, totals, verdict
from slipstream.report.runs import Run, colour, open_runs, units_of
from slipstream.staleness.words import delay_words
from slipstream.train.metrics import duration, quantity

MAX_RUNS = 16
"""Of one report: two rounds of the palette."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunReport:
    """What was written."""

    out: Path
    verdict: Sequence[str]
    figures: Mapping[str, Mapping[str, Any]]
    """Of each run, by name."""


def write_run_report(paths: Sequence[str | Path], out: str | Path = "") -> RunReport:
    """Read runs and write their report.

    Args:
        paths: Run directories.
        out: File to write; empty: ``report.html`` in the directory of a lone run, or here.

    Raises:
        ConfigError: A path is no run, or the file cannot be written or is something else.
        CheckpointError: A file of a run is damaged.
    """
    if not paths:
        raise ConfigError("no run was given. Give the --run-dir of one or several runs.")
    if len(paths) > MAX_RUNS:
        raise ConfigError(f"{len(paths)} runs are too many for one report. Give at most {MAX_RUNS}.")
    runs = open_runs(paths)
    file = Path(out) if out else (runs[0].path / "report.html" if len(runs) == 1 else Path("report.html"))
    _check_replaceable(file)
    staged = file.with_name(f".{file.name}.{os.getpid()}")
    try:
        staged.write_text(render_runs(runs), encoding="utf-8")
        staged.replace(file)
    except OSError as error:
        with contextlib.suppress(OSError):
            staged.unlink(missing_ok=True)
        raise ConfigError(
            f"cannot write {file}: {error.strerror}. Give --out a file in a folder that exists."
        ) from error
    return RunReport(out=file, verdict=_sentences(runs), figures={run.name: run_figures(run) for run in runs})


def _check_replaceable(file: Path) -> None:
    """Refuse to overwrite what is no report of ours."""
    if file.is_dir():
        raise ConfigError(f"{file} is a folder. Give --out a file.")
    if file.exists() and GENERATOR not in file.read_text(encoding="utf-8", errors="replace")[:2000]:
        raise ConfigError(f"{file} exists and is no report of Slipstream; nothing was written. Give another --out.")


def render_runs(runs: Sequence[Run]) -> str:
    """Return the report as HTML.

    Args:
        runs: With at least one step each.
    """
    timeline = timeline_svg(runs)
    return page(
        kicker="Slipstream run" if len(runs) == 1 else "Slipstream runs",
        title=runs[0].name if len(runs) == 1 else " / ".join(run.name for run in runs),
        lead="; ".join(dict.fromkeys(_kind(run.config) for run in runs)),
        facts=_facts(runs),
        answers=_sentences(runs),
        cards=[_card(run, colour(runs, run)) for run in runs],
        body=[
            *map(section_html, run_sections(runs)),
            _timeline(timeline) if timeline else "",
            part("Figures", data_table(_figures_table(runs))),
            _settings(runs),
        ],
        footer="All figures are in metrics.jsonl, evaluations.jsonl and summary.json of the run directories.",
    )


def _sentences(runs: Sequence[Run]) -> list[str]:
    return [sentence for sentence in verdict(runs) if sentence]


def _kind(config: Config) -> str:
    """Return what trained, in a few words."""
    optimizer, coefficient = config.optim.name, config.staleness.error_feedback
    remedy = f", error feedback {coefficient}" if coefficient else ""
    if config.executor == "pipeline":
        stages = counted(config.pipeline.num_stages, "stage")
        where = f"pipeline of {stages}, {config.pipeline.pipeline_schedule}"
    elif config.executor == "dataparallel":
        workers = counted(config.dataparallel.num_workers, "worker")
        where = f"{workers}, {config.dataparallel.mode}, engine {config.engine}"
    else:
        where = f"one process, {delay_words(config)}"
    return f"{where}, {optimizer}{remedy}"


def _facts(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return what was trained, as numbers with units; of several runs the smallest and the largest."""
    sizes = [num_parameters(run.config.model) for run in runs if run.units == "tokens"]
    facts = [
        *([(span(sizes), "parameters")] if sizes else []),
        (span([run.last_step for run in runs]), "steps"),
        (span([float(run.tokens[-1]) for run in runs]), units_of(runs)),
        (duration(sum(float(run.seconds[-1]) for run in runs)), "of training" + (" in all" if len(runs) > 1 else "")),
    ]
    return facts if len(runs) == 1 else [(str(len(runs)), "runs"), *facts]


def _card(run: Run, css: str) -> str:
    """Return a run's figures at a glance."""
    loss, total = final_loss(run), totals(run)
    value, kind = (float(run.figures("loss")[-1]), "training") if loss is None else (loss, "validation")
    idle = "" if total.bubble_fraction is None else f"{total.bubble_fraction:.1%} idle, "
    lines = [
        f"{total.tokens_per_s:,.0f} {run.units} a second",
        f"{idle}staleness {total.staleness_mean:.2f} / {total.staleness_max}",
        f"{duration(float(run.seconds[-1]))}, {quantity(float(run.tokens[-1]))} {run.units}",
    ]
    return card(
        run.name,
        figure=f"{value:.3f}",
        unit=f"{run.loss_unit}, {kind}",
        what=_kind(run.config),
        more="" if run.state == "finished" else f'<div class="cure">{escape(run.state)}</div>',
        rest=lines,
        css=f"run {css}",
    )


def _timeline(svg: str) -> str:
    text = (
        "The last batches of the trace: as they really ran, and the same schedule simulated with each stage's median "
        "times and messages that cost nothing. What differs is jitter, messages and waiting for the machine. The whole "
        "trace is trace.json, for Perfetto."
    )
    return part("Pipeline", f'<div class="scroll wide" tabindex="0">{svg}</div>', text=text)


def run_figures(run: Run) -> dict[str, Any]:
    """Return a run's figures for programs."""
    total, last = totals(run), run.last_evaluation or {}
    return {
        "path": str(run.path),
        "state": run.state,
        "num_steps": run.last_step,
        "num_tokens": int(run.tokens[-1]),
        "training_s": float(run.seconds[-1]),
        "train_loss": run.rows[-1]["loss"],
        "val_loss": last.get("val_loss"),
        "val_bits_per_byte": last.get("val_bits_per_byte"),
        "peak_memory_bytes": max(row["peak_memory_bytes"] for row in run.rows),
        "num_skipped": sum(bool(row["skipped"]) for row in run.rows),
    } | dataclasses.asdict(total)


def _figures_table(runs: Sequence[Run]) -> DataTable:
    units = units_of(runs)
    head = [
        *("run", "state", "steps", units, "validation loss", "bits per byte", "training loss", f"{units} a second"),
        *("idle", "staleness, mean / most", "skipped", "memory", "time"),
    ]
    rows = []
    for run in runs:
        figures = run_figures(run)
        rows.append(
            [
                run.name,
                run.state,
                f"{run.last_step:,}",
                quantity(figures["num_tokens"]),
                _text(figures["val_loss"]),
                _text(figures["val_bits_per_byte"]),
                _text(figures["train_loss"]),
                f"{figures['tokens_per_s']:,.0f}",
                "" if figures["bubble_fraction"] is None else f"{figures['bubble_fraction']:.1%}",
                f"{figures['staleness_mean']:.2f} / {figures['staleness_max']}",
                str(figures["num_skipped"]),
                quantity(figures["peak_memory_bytes"]) + "B",
                duration(figures["training_s"]),
            ]
        )
    return DataTable(head=head, rows=rows)


def _text(value: float | None) -> str:
    return "" if value is None else f"{value:.4f}"


def _settings(runs: Sequence[Run]) -> str:
    """Return the settings that differ between runs, or from the defaults, and all of them to unfold."""
    flat = {run.name: flattened(to_dict(dataclasses.replace(run.config, run_dir=""))) for run in runs}
    default = flattened(to_dict(Config(run_dir="")))
    whole = "".join(
        f"<details><summary>All settings of {escape(run.name)}</summary>"
        f"<pre>{escape(to_toml(run.config))}</pre></details>"
        for run in runs
    )
    if len(runs) == 1:
        (settings,) = flat.values()
        rows = [
            [key, str(value), str(default.get(key, ""))] for key, value in settings.items() if default.get(key) != value
        ]
        table = data_table(DataTable(head=["setting", "value", "default"], rows=rows)) if rows else ""
        return part("Settings other than the defaults", table + whole)
    keys = dict.fromkeys(key for settings in flat.values() for key in settings)
    rows = [
        [key, *(str(settings.get(key, "")) for settings in flat.values())]
        for key in keys
        if len({str(settings.get(key)) for settings in flat.values()}) > 1
    ]
    if not rows:
        return part("Settings", f"<p>The runs have the same settings.</p>{whole}")
    return part("Settings that differ", data_table(DataTable(head=["setting", *flat], rows=rows)) + whole)
