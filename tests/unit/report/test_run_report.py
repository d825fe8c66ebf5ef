"""`slipstream report`: what is said is what the files hold."""

import json
import re

import numpy as np
import pytest
from tests.unit.report.fake_runs import expert_run, pipeline_run, worker_run, write_lines, write_run
from tests.unit.report.test_report import Tags

from slipstream.cli import main
from slipstream.errors import ConfigError, counted
from slipstream.report.lines import DIGIT, STEPS, Line, Mark, line_chart
from slipstream.report.run_charts import spike_steps
from slipstream.report.run_report import render_runs, run_figures, write_run_report
from slipstream.report.run_staleness import staleness_counts
from slipstream.report.run_timeline import measured_timeline
from slipstream.report.run_verdict import verdict
from slipstream.report.runs import open_runs
from slipstream.report.svg import Scale, tick_format
from slipstream.train.metrics import read_json_lines


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    pipeline_run(folder / "sync", schedule="one_f_one_b", step_s=0.1, bubble=0.3, end_loss=1.5)
    pipeline_run(folder / "late", delay=1, step_s=0.05, end_loss=1.6)
    worker_run(folder / "workers")
    expert_run(folder / "experts")
    return folder


def parsed(html: str) -> Tags:
    tags = Tags()
    tags.feed(html)
    assert tags.open == []
    return tags


def sentences(*paths):
    return verdict(open_runs(paths))


def test_everything_there_is_has_a_picture(folder):
    html = render_runs(open_runs([folder / name for name in ("sync", "late", "workers", "experts")]))
    headings = ["sync / late / workers / experts", "Loss", "Validation", "Speed", "Staleness", "Stability", "Experts"]
    headings += ["Methods against staleness", "Workers", "The gradient compensator by group", "The async-aware rate"]
    headings += ["Pipeline", "Figures", "Settings that differ"]
    assert parsed(html).headings == headings
    assert (html.count("<h3>Factor</h3>"), html.count("<h3>aalr/factor</h3>")) == (1, 0), "drawn once"
    assert html.count("</i><span>experts</span><b>at the end 0.90</b>") == 1, "a rate without workers, too"
    assert not re.search(
        r"https?:|//[a-z]|@import|<script|<link|<img|src=", html.replace("http://www.w3.org/2000/svg", "")
    )
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', html)


@pytest.mark.parametrize(
    "figures",
    [[1.0, 1 - 1.2e-13], [1.5, 1.5 + 2.2e-16], [1e-15, 2e-15], [-1e-16, 1e-16], [1e-300, 3e-300], [0.0], [-2.0]],
)
def test_figures_that_hardly_differ_can_be_drawn(figures, tmp_path):
    def extras(step):
        return {"method_metrics": {"a/cosine": figures[step % len(figures)]}}

    run = write_run(tmp_path / "run", num_steps=20, evaluate_every=20, extras=extras)
    html = render_runs(open_runs([run]))
    assert "<h3>a/cosine</h3>" in html
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', html)


@pytest.mark.parametrize("high", [1.0, 1e-9, 3e-13, 4e-40])
def test_an_axis_has_ticks_however_small_its_figures(high):
    ticks = Scale(low=0.0, high=high, start=0, end=100).ticks()
    assert 3 <= len(set(ticks)) == len(ticks) <= 6
    texts = [format(each, tick_format(ticks)) for each in ticks]
    assert len(set(texts)) == len(texts)


def test_what_is_not_there_has_none(tmp_path):
    run = write_run(tmp_path / "run", num_steps=30, evaluate_every=30)
    assert parsed(render_runs(open_runs([run]))).headings == [
        "run",
        "Loss",
        "Speed",
        "Staleness",
        "Stability",
        "Figures",
        "Settings other than the defaults",
    ]


@pytest.mark.parametrize("num_steps", [1, 2, 3, 7])
def test_a_run_that_has_only_begun_can_be_drawn(tmp_path, num_steps):
    run = write_run(tmp_path / "run", num_steps=num_steps, evaluate_every=99)
    (run / "summary.json").unlink()
    html = render_runs(open_runs([run]))
    assert "ended at step" in html
    assert not re.search(r'(points|cx|cy|x|y|width|height)="[^"]*(nan|inf)', html)


def test_one_run_in_sentences(folder):
    first, second, *more = sentences(folder / "late")
    last = read_json_lines(folder / "late" / "evaluations.jsonl")[-1]
    assert f"from 5.650 to {last['val_loss']:.3f} nats per token" in first
    assert "in 400 steps, 409.6k tokens, 20s of training" in first
    assert second.startswith("20,480 tokens a second; ranks idle 0.0% of the time; gradients 1.00 updates stale")
    assert [each for each in more if each] == []


def test_two_runs_are_compared_in_loss_and_time(folder):
    loss, chance, time, speed, *_ = sentences(folder / "sync", folder / "late")
    assert loss == "sync has the lowest validation loss, 1.550 nats per token: late is 0.100 above it."
    assert "may be chance" in chance
    assert speed == "Tokens a second: late 20,480; sync 10,240; the fastest is 2.00 times the slowest."
    assert re.match(r"To a training loss of 1\.5\d\d, which all reach, it takes sync \d+s and .* late \d+s", time)
    assert "sync is there first" in time, "the late one is still on its way down"


def test_who_takes_half_the_time_is_there_twice_as_fast(tmp_path):
    slow = write_run(tmp_path / "slow", step_s=0.1)
    fast = write_run(tmp_path / "fast", step_s=0.05)
    (time,) = [each for each in sentences(slow, fast) if "which all reach" in each]
    assert time.endswith("fast is there first, 2.00 times as fast as slow.")
    tokens = re.findall(r"and ([\d.]+k) tokens", time)
    assert len(tokens) == 2
    assert tokens[0] == tokens[1]


def test_a_model_without_tokens_has_no_bits_and_no_shape(tmp_path):
    run = write_run(tmp_path / "ratings", num_steps=20, evaluate_every=5)
    rows = read_json_lines(run / "evaluations.jsonl")
    write_lines(run / "evaluations.jsonl", [row | {"val_bits_per_byte": None} for row in rows])
    config = (run / "config.toml").read_text()
    (run / "config.toml").write_text(config.replace("vocab_size = 257", "vocab_size = 0"))
    assert "a unit in 20 steps, 20.5k units" in sentences(run)[0]
    assert "tokens" not in render_runs(open_runs([run])).partition("<h2>Settings")[0].partition("<body")[2]
    facts = render_runs(open_runs([run])).partition('class="answer"')[0]
    assert "parameters" not in facts


def test_losses_of_other_data_are_not_compared(folder, tmp_path):
    other = write_run(tmp_path / "other", {"data": {"path": "elsewhere"}})
    found = sentences(folder / "sync", other)
    assert found[0] == "The runs read different data, so their losses cannot be compared."
    assert not [each for each in found if "lowest validation" in each or "which all reach" in each]


def test_a_run_that_was_better_before_is_told(tmp_path):
    run = write_run(tmp_path / "run", num_steps=100)
    rows = read_json_lines(run / "evaluations.jsonl")
    write_lines(run / "evaluations.jsonl", [*rows[:-1], rows[-1] | {"val_loss": rows[-2]["val_loss"] + 0.2}])
    found = f"It was better before: {rows[-2]['val_loss']:.3f} at step 50, 0.200 below the newest."
    assert found in sentences(run)


def test_troubles_are_named(folder):
    assert spike_steps(open_runs([folder / "experts"])[0]) == {300: "loss and gradient norm"}
    (trouble,) = [each for each in sentences(folder / "experts") if "spike" in each]
    assert trouble == (
        "1 update skipped for a gradient that was not finite; 1 spike of loss or gradient norm, at step 300."
    )
    html = render_runs(open_runs([folder / "experts"]))
    assert (
        "step 300: loss and gradient norm spikes. Loss 6.000, gradient norm 9, staleness 1.0 in the mean, 3 at" in html
    )


def test_figures_are_shown_in_a_unit_of_few_digits():
    places = np.arange(10.0)
    for scale, name in (
        *((2e4, "thousand norms"), (1.0, "norms"), (2e-4, "norms, in thousandths")),
        *((3e7, "norms, in 10^6"), (2e30, "norms, in 10^27"), (4e-9, "norms, in 10^-12")),
    ):
        line = Line(label="run", css="c0", curve=(places, np.full(10, scale)))
        mark = Mark(at=(5.0, scale), title="here")
        chart = line_chart("Norm", [line], across=STEPS, up="norms", smooth=False, marks=[mark], clip="clip")
        assert f">{name}</text>" in chart.svg
        heights = [float(each) for each in re.findall(r'points="[^"]*,([\d.]+)" clip-path', chart.svg)]
        (ring,) = re.findall(r'class="mark" cx="[\d.]+" cy="([\d.]+)"', chart.svg)
        assert heights == [float(ring)], "a mark lies on its curve"
        assert max(len(tick) for tick in re.findall(r'text-anchor="end">([^<]*)<', chart.svg)) <= 5


def test_long_figures_have_room_before_the_axis():
    left = []
    for values in (np.array([1.0, 2.0]), np.array([1.3807, 1.3818])):
        line = Line(label="run", css="c0", curve=(np.arange(2.0), values))
        chart = line_chart("Entropy", [line], across=STEPS, up="nats", smooth=False, clip="clip")
        ticks = re.findall(r'x="([\d.]+)" y="[\d.]+" text-anchor="end">([^<]*)<', chart.svg)
        left.append((float(ticks[0][0]), max(len(tick) for _, tick in ticks)))
    (short, _), (long, digits) = left
    assert digits > 5
    assert long == short + DIGIT * (digits - 5)


def test_workers_shares_and_ledger(folder, tmp_path):
    (run,) = open_runs([folder / "workers"])
    assert run.workers is not None
    shares = run.workers.workers
    assert [each.microbatches for each in shares] == [308, 307, 308, 77]
    assert shares[3].share == pytest.approx(0.077)
    assert shares[3].fair == pytest.approx(0.25 / 3.25)
    assert [each.tokens_per_s for each in shares] == pytest.approx([20480 * each.share for each in shares])
    assert shares[0].staleness_mean == pytest.approx((175 + 2 * 50) / 250)
    assert staleness_counts(run) == {0: 100, 1: 700, 2: 200}
    assert run_figures(run)["staleness_mean"] == 1.1, "of gradients, not of steps, as the summary has it"
    (sentence,) = [each for each in verdict([run]) if "ledger" in each]
    assert sentence == (
        "4 workers trained at 96.7% of the sum of their own speeds; the ledger balances: 409,600 tokens committed, "
        "128 dropped; 1,000 gradients counted, 2 rejected; 1 restart of workers."
    )
    (live,) = open_runs([worker_run(tmp_path / "live", finished=False)])
    assert live.workers is not None
    assert [each.microbatches for each in live.workers.workers] == [308, 307, 308, 77], "from the newest row"
    assert live.workers.workers[0].staleness_mean is None
    html = render_runs([live])
    assert "<h3>live: shares</h3>" in html
    assert "<h3>live: staleness</h3>" not in html
    (sentence,) = [each for each in verdict([live]) if "ledger" in each]
    assert "the ledger balances; 2 gradients rejected; 1 restart" in sentence


def test_the_pipeline_is_drawn_as_it_ran_beside_its_simulation(folder):
    (run,) = open_runs([folder / "late"])
    timeline = measured_timeline(run)
    assert len(timeline.ranks) == 3
    assert timeline.step_time_ms == pytest.approx(10.2)  # three microbatches of 3 ms, a step of 0.4, and messages
    html = render_runs([run])
    assert "as it ran" in html
    assert "its schedule, simulated with its median times" in html
    assert html.count("10.2 ms a step") == 1
    assert html.count("9.4 ms a step") == 1, "in the simulation messages cost nothing"


def test_a_damaged_trace_is_left_out(folder, tmp_path):
    run = pipeline_run(tmp_path / "run", num_steps=20)
    (run / "trace.json").write_text('{"traceEvents": [{"ph": "X"}]}')
    assert "Pipeline" not in parsed(render_runs(open_runs([run]))).headings


@pytest.mark.parametrize("num_stages", [1, 2, 4])
def test_a_trace_of_other_stages_is_left_out(num_stages, tmp_path):
    path = pipeline_run(tmp_path / "run", num_steps=20)
    config = (path / "config.toml").read_text()
    (path / "config.toml").write_text(config.replace("num_stages = 3", f"num_stages = {num_stages}"))
    html = render_runs(open_runs([path]))
    assert "as it ran" not in html
    assert f"pipeline of {counted(num_stages, 'stage')}," in html


def test_a_run_that_goes_on_is_not_told_by_the_summary_of_its_past(tmp_path):
    path = worker_run(tmp_path / "run")
    rows = read_json_lines(path / "metrics.jsonl")
    new = {"microbatches_by_worker": {"0": 700, "1": 700}, "throughput_share": 0.9}
    new |= {"pushes_rejected": 0, "ledger_balanced": True}
    write_lines(path / "metrics.jsonl", [*rows, rows[-1] | {"step": 401, "workers": new, "staleness_max": 5}])
    (path / "status.json").write_text('{"state": "stopped"}')
    for text in ((path / "summary.json").read_text(), "{", "null"):
        (path / "summary.json").write_text(text)
        (run,) = open_runs([path])
        assert [each.microbatches for each in run.workers.workers] == [700, 700]
        assert max(staleness_counts(run)) == 5
        assert "700" in render_runs([run])


def test_a_finished_run_that_lost_rows_keeps_its_summary(tmp_path):
    path = worker_run(tmp_path / "run")
    write_lines(path / "metrics.jsonl", read_json_lines(path / "metrics.jsonl")[:300])
    (path / "status.json").write_text('{"state": "finished"}')
    assert open_runs([path])[0].summary["num_steps"] == 400


def test_tokens_and_time_add_up_over_rows(folder):
    (run,) = open_runs([folder / "sync"])
    assert run.tokens[-1] == 400 * 1024
    assert run.seconds[-1] == pytest.approx(40.0)
    places, losses = run.validation(run.seconds)
    assert places[:3] == pytest.approx([0.0, 5.0, 10.0])
    assert len(losses) == 9
    assert np.isfinite(losses).all()


@pytest.mark.parametrize(
    ("staleness", "said"),
    [
        ({}, "delay 0"),
        ({"delay": 2}, "delay 2"),
        ({"delay_stages": 4}, "delay by stage, 3 to 0"),
        ({"delay_weights": [1.0, 2.0]}, "drawn delay"),
        ({"delay_replay": "metrics.jsonl"}, "replayed delay"),
        ({"delay": 1, "delay_roles": ["not", "q"]}, "delay 1 of some parameters"),
        ({"delay_weights": [1.0, 2.0], "delay_blocks": [0, 1]}, "drawn delay of some parameters"),
        ({"delay_blocks": [0, 1]}, "delay 0"),
    ],
)
def test_a_run_is_called_by_the_delay_it_had(tmp_path, staleness, said):
    html = render_runs(open_runs([write_run(tmp_path / "run", {"staleness": staleness}, num_steps=5)]))
    assert html.count(f"one process, {said}, adamw<") == 2, "above and on the card"


def test_names_are_told_apart_and_settings_that_differ_listed(tmp_path):
    first = write_run(tmp_path / "a" / "run", {"optim": {"lr": 0.5}}, num_steps=5)
    second = write_run(tmp_path / "b" / "run", {"optim": {"lr": 0.25}}, num_steps=5)
    html = render_runs(open_runs([first, second]))
    assert "<td>a/run</td>" not in html
    assert '<td class="name">a/run</td>' in html
    table = html[html.index("Settings that differ") :]
    assert '<td class="name">optim.lr</td><td>0.5</td><td>0.25</td>' in table
    assert "run_dir</td>" not in table


def test_the_command_writes_says_and_prints_json(folder, tmp_path, capsys):
    out = tmp_path / "both.html"
    assert main(["report", str(folder / "sync"), str(folder / "late"), "--out", str(out)]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == str(out)
    assert main(["report", str(folder / "workers"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["out"] == str(folder / "workers" / "report.html")
    assert found["runs"]["workers"]["num_tokens"] == 400 * 1024
    assert any("ledger" in sentence for sentence in found["verdict"])
    assert main(["report", str(folder / "workers")]) == 0, "its own report may be written again"


def test_json_of_a_run_that_has_diverged_is_json(tmp_path, capsys):
    run = write_run(tmp_path / "run", num_steps=20)
    rows = read_json_lines(run / "evaluations.jsonl")
    write_lines(run / "evaluations.jsonl", [row | {"val_loss": float("nan")} for row in rows])
    assert main(["report", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert found["runs"]["run"]["val_loss"] is None


def test_bad_input_is_refused_and_nothing_is_lost(folder, tmp_path):
    mine = tmp_path / "mine.html"
    mine.write_text("my page")
    with pytest.raises(ConfigError, match=r"mine\.html exists and is no report of Slipstream"):
        write_run_report([folder / "sync"], mine)
    assert mine.read_text() == "my page"
    with pytest.raises(ConfigError, match=r"is no run directory: it has no config\.toml"):
        write_run_report([tmp_path])
    with pytest.raises(ConfigError, match="is given twice"):
        write_run_report([folder / "sync", folder / "late" / ".." / "sync"])
    with pytest.raises(ConfigError, match="Give --out a file in a folder that exists"):
        write_run_report([folder / "sync"], tmp_path / "no" / "such.html")
    empty = write_run(tmp_path / "empty", num_steps=2)
    (empty / "metrics.jsonl").write_text("")
    with pytest.raises(ConfigError, match="has made no step yet"):
        write_run_report([empty])
    with pytest.raises(ConfigError, match="no run was given"):
        write_run_report([])
    with pytest.raises(ConfigError, match="17 runs are too many"):
        write_run_report([f"run-{number}" for number in range(17)])


def test_runs_under_way_are_compared_where_all_of_them_are(tmp_path):
    """The one that is ahead has the lower loss only because it is ahead."""
    ahead = write_run(tmp_path / "ahead", num_steps=400, end_loss=1.6)
    behind = write_run(tmp_path / "behind", num_steps=400, end_loss=1.5, finished=False)
    loss, *_ = sentences(ahead, behind)
    assert loss.startswith("After 204.8k tokens, as far as all are, behind has the lowest validation loss, ")
    assert loss.endswith("nats per token: ahead is 0.100 above it.")


def test_losses_after_other_tokens_are_not_compared(tmp_path):
    often = write_run(tmp_path / "often", num_steps=100, evaluate_every=10)
    once = write_run(tmp_path / "once", num_steps=100, evaluate_every=75)
    found = sentences(often, once)
    assert found[0].startswith("The runs were never evaluated after equal tokens")
    assert not [each for each in found if "lowest validation" in each]


def test_the_newest_evaluations_after_equal_tokens_are_found_behind_others(tmp_path):
    """A run's last evaluation is at its end, wherever that falls between the others'."""
    long = write_run(tmp_path / "long", num_steps=400)
    short = write_run(tmp_path / "short", num_steps=120)
    rows = read_json_lines(short / "evaluations.jsonl")
    write_lines(short / "evaluations.jsonl", [*rows, rows[-1] | {"step": 120}])
    assert sentences(long, short)[0].startswith("After 102.4k tokens, as far as all are, ")


@pytest.mark.parametrize(("schedule", "is_told"), [("cosine", True), ("constant", False)])
def test_a_rate_that_has_fallen_further_is_told(tmp_path, schedule, is_told):
    optim = {"optim": {"lr_schedule": schedule}}
    found = sentences(*(write_run(tmp_path / str(num), optim, num_steps=num) for num in (400, 200)))
    assert found[0].startswith("After 204.8k tokens")
    assert any("had not fallen alike" in each for each in found) is is_told


def test_a_run_is_not_faster_than_its_own_beginning(tmp_path):
    """A mean over a share of a run's length lags behind by the more the longer the run is."""
    whole = write_run(tmp_path / "whole", num_steps=1000)
    paths = [whole]
    for num_steps in (100, 200, 500):
        begin = write_run(tmp_path / f"first{num_steps}", num_steps=num_steps)
        write_lines(begin / "metrics.jsonl", read_json_lines(whole / "metrics.jsonl")[:num_steps])
        paths.append(begin)
    (time,) = [each for each in sentences(*paths) if "which all reach" in each]
    assert time.endswith("all are there equally soon.")


def test_who_has_diverged_is_not_ranked(tmp_path):
    good, better, bad = (write_run(tmp_path / name, end_loss=loss) for name, loss in (("a", 1.6), ("b", 1.3), ("n", 1)))
    rows = read_json_lines(bad / "evaluations.jsonl")
    write_lines(bad / "evaluations.jsonl", [*rows[:-1], rows[-1] | {"val_loss": float("nan")}])
    (loss,) = [each for each in sentences(good, bad, better) if "validation" in each]
    assert loss.startswith(
        "b has the lowest validation loss, 1.350 nats per token: a is 0.300 above it; n has diverged."
    )
    assert "better before" in " ".join(sentences(bad))
    write_lines(bad / "evaluations.jsonl", [row | {"val_loss": float("nan")} for row in rows])
    assert "better before" not in " ".join(sentences(bad)), "it never was"


def test_the_same_data_by_another_path_are_the_same(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    tables = [{"data": {"path": path}} for path in ("data", str(tmp_path / "data"))]
    runs = [write_run(tmp_path / str(i), each) for i, each in enumerate(tables)]
    assert "lowest validation loss" in sentences(*runs)[0]
    longer = write_run(tmp_path / "longer", {"data": {"path": "data", "sequence_length": 256}})
    assert sentences(runs[0], longer)[0].startswith("The runs were evaluated on other sequences")
    stream = write_run(tmp_path / "stream", {"data": {"path": "data", "stream": ["texts"]}})
    assert sentences(runs[0], stream)[0].startswith("The runs read different data")


def test_two_models_without_tokens_are_compared_in_their_own_unit(tmp_path):
    runs = [write_run(tmp_path / name, end_loss=loss) for name, loss in (("a", 1.6), ("b", 1.5))]
    for run in runs:
        rows = read_json_lines(run / "evaluations.jsonl")
        write_lines(run / "evaluations.jsonl", [row | {"val_bits_per_byte": None} for row in rows])
    assert sentences(*runs)[0] == "b has the lowest validation loss, 1.550 a unit: a is 0.100 above it."


def test_seeds_of_the_data_are_seeds(tmp_path):
    runs = [write_run(tmp_path / str(seed), {"data": {"seed": seed}}) for seed in (0, 7)]
    assert "differ in their seed" in sentences(*runs)[1]


def test_idle_time_is_a_share_of_the_time(tmp_path):
    """One long step of waiting is not one of many."""
    run = write_run(tmp_path / "run", num_steps=100)
    rows = read_json_lines(run / "metrics.jsonl")
    rows = [row | {"step_s": 0.1, "bubble_fraction": 0.02} for row in rows]
    write_lines(run / "metrics.jsonl", [*rows[:-1], rows[-1] | {"step_s": 10.0, "bubble_fraction": 0.95}])
    assert "ranks idle 49.2% of the time" in sentences(run)[1]


def test_workers_that_do_not_tell_how_long_they_wait_are_not_called_busy(tmp_path):
    run = worker_run(tmp_path / "run")
    assert "idle" not in " ".join(sentences(run))
    assert "% idle" not in render_runs(open_runs([run]))
