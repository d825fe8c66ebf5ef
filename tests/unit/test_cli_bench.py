"""`slipstream simulate` and `slipstream bench pipeline` as a user types them."""

import dataclasses
import itertools
import json
import math
import multiprocessing
import re
from xml.etree import ElementTree

import pytest
import torch

from slipstream.bench.pipeline import summarise
from slipstream.bench.rank import RankResult, Run, Window, synthetic_batches
from slipstream.bench.settings import NAMES, OURS, SPLITTING, BenchPipelineConfig, run_config
from slipstream.cli import main
from slipstream.plan.simulate import SimulateConfig, build_timeline
from slipstream.train.single import SingleExecutor

SIZES = {
    "--dim": 16,
    "--num-layers": 4,
    "--sequence-length": 8,
    "--microbatch-size": 1,
    "--rounds": 1,
    "--steps": 2,
}


def run(*words: object) -> int:
    """Run a command; tyro leaves through SystemExit."""
    try:
        return main([str(word) for word in words])
    except SystemExit as leaving:
        return int(leaving.code or 0)


def bench(capsys, *words: object) -> dict:
    assert run("bench", "pipeline", *itertools.chain(*SIZES.items()), *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def single_norms(config: BenchPipelineConfig, *, delay: int, num_steps: int) -> list[float]:
    """Gradient norms of the same training in one process."""
    settings = run_config(config, "one_f_one_b", num_steps=num_steps)
    settings = dataclasses.replace(
        settings, executor="single", staleness=dataclasses.replace(settings.staleness, delay=delay)
    )
    executor = SingleExecutor(settings, synthetic_batches(settings), device=torch.device("cpu"))
    return [executor.run_step().grad_norm for _ in range(num_steps)]


def test_all_schedules_compute_what_one_process_computes(capsys):
    """Nobody is fast by leaving work out: each step's global gradient norm is that of one process."""
    result = bench(capsys)
    assert set(result["schedules"]) == set(NAMES)
    config = BenchPipelineConfig(dim=16, num_layers=4, sequence_length=8, microbatch_size=1, rounds=1, steps=2)
    flushing = single_norms(config, delay=0, num_steps=3)
    assert len(set(flushing)) == 3
    for name in NAMES:
        norms = result["schedules"][name]["grad_norms"]
        if name == "two_bw":
            assert norms == single_norms(config, delay=1, num_steps=4)
        elif name in OURS:
            assert norms == flushing
        else:
            assert norms == pytest.approx(flushing, rel=1e-5)


def test_figures_follow_from_one_another(capsys):
    result = bench(capsys, "--schedules", "two_bw,one_f_one_b", "torch_1f1b", "--num-microbatches", 4)
    assert list(result["schedules"]) == ["two_bw", "one_f_one_b", "torch_1f1b"]
    work_s = 4 * (result["forward_s"] + result["backward_s"])
    times = {name: each["step_time_s"] for name, each in result["schedules"].items()}
    for name, each in result["schedules"].items():
        assert each["efficiency"] == pytest.approx(work_s / times[name])
        assert each["quartiles_s"][0] <= each["step_time_s"] <= each["quartiles_s"][2]
    assert result["ideal_speedup"] == 5 / 4
    assert result["speedup_vs_torch_1f1b"] == pytest.approx(times["torch_1f1b"] / times["two_bw"])
    best = min(("one_f_one_b", "torch_1f1b"), key=times.__getitem__)
    assert result["best_flushing"] == best
    assert result["speedup_vs_best_flushing"] == pytest.approx(times[best] / times["two_bw"])


def test_emulated_stages_sleep_as_long_as_the_dependencies_demand(capsys):
    """Lower bounds only: sleeping never ends early, and no schedule can beat its chain of dependencies."""
    p, m, forward_s, backward_s = 3, 4, 0.002, 0.004
    emulate = ["--emulate-forward-ms", 2, "--emulate-backward-ms", 4]
    result = bench(capsys, "--num-stages", p, "--num-microbatches", m, *emulate)
    assert set(result["left_out"]) == set(SPLITTING)
    assert set(result["schedules"]) == set(NAMES) - set(SPLITTING)
    assert (result["forward_s"], result["backward_s"]) == (forward_s, backward_s)
    for name, each in result["schedules"].items():
        bubble = 0 if name == "two_bw" else (p - 1) / 2 if "interleaved" in name else p - 1
        assert each["step_time_s"] >= (m + bubble) * (forward_s + backward_s), name


def test_people_get_a_table_and_its_meaning(capsys):
    assert run("bench", "pipeline", *itertools.chain(*SIZES.items()), "--schedules", "two_bw", "torch_1f1b") == 0
    captured = capsys.readouterr()
    assert re.search(r"^two_bw +\d\.\d+ +\d\.\d+ to \d\.\d+ +\d+\.\d% +\d+\.\d+x$", captured.out, re.MULTILINE)
    assert "median time between optimizer steps" in captured.out
    assert "ideal (m + p - 1) / m = 1.500" in captured.out
    assert "timing two_bw, torch_1f1b on 2 ranks" in captured.err


def test_schedules_that_do_not_fit_are_left_out_with_a_reason(capsys):
    result = bench(capsys, "--num-layers", 2, "--num-microbatches", 1)
    assert set(result["schedules"]) == {"gpipe", "one_f_one_b", "two_bw", "torch_gpipe"}
    assert "at least as many microbatches as stages, given 1 for 2" in result["left_out"]["torch_1f1b"]
    assert "4 pipeline stages were asked for, but the model has 2 layers" in result["left_out"]["interleaved"]
    assert result["speedup_vs_torch_1f1b"] is None


WRONG = {
    "unknown": (["--schedules", "two_bv"], r"no schedule 'two_bv'\. Did you mean 'two_bw'\?"),
    "does not fit": (
        ["--schedules", "two_bw", "--num-stages", 4, "--num-microbatches", 2],
        r"two_bw cannot be timed here: two_bw with 4 stages needs at least 3 microbatches",
    ),
    "split while sleeping": (
        ["--schedules", "torch_zbv", "--emulate-forward-ms", 1, "--emulate-backward-ms", 2],
        r"torch_zbv cannot be timed here: it splits the backward",
    ),
    "half emulated": (["--emulate-forward-ms", 1], r"emulate_backward_ms is missing"),
    "time that is none": (["--emulate-forward-ms", "nan", "--emulate-backward-ms", 1], r"emulate_forward_ms is nan"),
    "one stage": (["--num-stages", 1], r"num_stages is 1; give 2 or more"),
    "no rounds": (["--rounds", 0], r"rounds is 0; give 1 or more"),
    "optimizer": (["--optimizer", "adamv"], r"no optimizer 'adamv'"),
    "odd channels": (["--dim", 7], r"dim"),
}


@pytest.mark.parametrize("fault", WRONG)
def test_a_measurement_that_cannot_be_made_is_refused(fault, capsys):
    words, said = WRONG[fault]
    assert run("bench", "pipeline", *words) == 2
    captured = capsys.readouterr()
    assert re.search(said, captured.err), captured
    assert captured.out == ""


@pytest.mark.parametrize(("p", "m"), [(2, 2), (2, 8), (4, 3), (8, 8), (5, 12)])
def test_only_steps_of_the_steady_state_are_measured(p, m):
    """Every measured interval of a simulated run is m (F + B); the one that ends after the fill is not."""
    num_steps, window = 7, Window.of("two_bw")
    timeline = build_timeline(SimulateConfig(num_stages=p, num_microbatches=m, num_batches=num_steps))
    ends = [0.0] + [span.end_ms for span in timeline.ranks[0] if span.action.op == "O"]
    intervals = [later - earlier for earlier, later in itertools.pairwise(ends)]
    measured = intervals[window.before : num_steps - window.after]
    assert len(measured) == num_steps - 2
    assert measured == pytest.approx([3.0 * m] * len(measured))
    assert intervals[window.before - 1] > 3.0 * m


def test_medians_are_taken_within_rounds_then_over_rounds():
    def one(times, cpu=0.5):
        return Run(step_times_s=times, cpu_times_s=[cpu] * len(times), grad_norms=[1.0])

    runs = {
        "two_bw": [one([2.0, 2.0, 90.0]), one([1.0, 3.0, 3.0]), one([50.0, 60.0, 70.0])],
        "gpipe": [one([4.0, 5.0, 6.0]), one([7.5, 7.5, 7.5]), one([7.0, 7.0, 7.0])],
    }
    results = [
        RankResult(runs=runs, alone_s=[(0.2, 0.3), (0.2, 0.3), (9.0, 9.0)]),
        RankResult(runs={name: [one([1.0], cpu=0.8)] for name in runs}, alone_s=[(0.3, 0.6)] * 3),
    ]
    result = summarise(BenchPipelineConfig(num_stages=2, num_microbatches=2), results)
    assert result["schedules"]["two_bw"]["step_time_s"] == 3.0
    assert result["schedules"]["two_bw"]["rounds_s"] == [2.0, 3.0, 60.0]
    assert result["schedules"]["two_bw"]["cpu_time_s"] == 0.8
    assert (result["forward_s"], result["backward_s"]) == (0.3, 0.6)
    assert result["schedules"]["gpipe"]["efficiency"] == pytest.approx(2 * 0.9 / 7.0)
    assert result["best_flushing"] == "gpipe"
    assert result["rounds_speedup"] == {"gpipe": [2.5, 2.5, pytest.approx(7 / 60)]}
    assert result["speedup_vs_best_flushing"] == 2.5, "the rounds' median; 7 / 3 would be of two different rounds"
    assert result["speedup_vs_torch_1f1b"] is None


def test_simulate_prints_what_its_json_promises(capsys):
    p, m, n = 8, 8, 64
    sizes = ["--num-stages", p, "--num-microbatches", m, "--num-batches", n]
    assert run("simulate", "--pipeline-schedule", "two_bw", *sizes, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bubble_fraction"] == pytest.approx((p - 1) / (m * n + p - 1))
    assert (figures["max_live_versions"], figures["staleness_max"]) == (2, 1)
    assert figures["peak_activations"] == list(range(p, 0, -1))
    assert run("simulate", "--pipeline-schedule", "one_f_one_b", *sizes, "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["bubble_fraction"] == pytest.approx((p - 1) / (m + p - 1))
    assert (figures["max_live_versions"], figures["staleness_max"]) == (1, 0)


def test_simulate_draws_in_the_terminal_and_into_a_file(capsys, tmp_path):
    file = tmp_path / "timeline.svg"
    sizes = ["--num-stages", 2, "--num-microbatches", 2, "--num-batches", 2, "--optimizer-ms", 1]
    assert run("simulate", *sizes, "--svg", file) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()[:2]] == [["stage", "0"], ["stage", "1"]]
    assert "█" in out
    assert re.search(r"^staleness_max +1$", out, re.MULTILINE)
    root = ElementTree.fromstring(file.read_text(encoding="utf-8"))
    assert root.tag.endswith("svg")
    assert "two_bw: 2 stages, 2 microbatches a batch" in root.attrib["aria-label"]


def test_simulate_refuses_what_it_cannot_do(capsys, tmp_path):
    assert run("simulate", "--num-stages", 9, "--num-microbatches", 2) == 2
    assert "Raise num_microbatches to 8" in capsys.readouterr().err
    assert run("simulate", "--svg", tmp_path / "none" / "t.svg") == 2
    assert "Give --svg a file in a folder" in capsys.readouterr().err
    assert run("simulate", "--forward-ms", math.inf) == 2
    assert "forward_ms is inf" in capsys.readouterr().err


def test_simulate_names_what_has_no_effect(capsys):
    assert run("simulate", "--pipeline-schedule", "gpipe", "--num-extra-in-flight", 2, "--num-virtual-stages", 3) == 0
    said = capsys.readouterr().err.splitlines()
    assert said == [
        "warning: num_extra_in_flight 2 has no effect with the schedule 'gpipe', only with two_bw.",
        "warning: num_virtual_stages 3 has no effect with the schedule 'gpipe', only with interleaved.",
    ]
    assert run("simulate", "--pipeline-schedule", "interleaved", "--num-virtual-stages", 3) == 0
    assert not capsys.readouterr().err


def test_exchange_is_timed_beside_a_plain_copy(capsys):
    words = ("--megabytes", 1, "--num-workers", 2, "--rounds", 2, "--cycles", 3)
    assert run("bench", "exchange", *words, "--json") == 0
    result = json.loads(capsys.readouterr().out)
    for name in ("copy", "exchange", "summed"):
        assert len(result[f"{name}_rounds"]) == 2
        assert min(result[f"{name}_rounds"]) > 0
    shares = [part / whole for part, whole in zip(result["exchange_rounds"], result["copy_rounds"])]
    assert result["share_of_copy"] == pytest.approx(sum(shares) / 2)
    assert not [process for process in multiprocessing.active_children() if process.name.startswith("worker-")]


def test_nothing_to_exchange(capsys):
    assert run("bench", "exchange", "--megabytes", 0) == 2
    assert "megabytes is 0; give 1 or more" in capsys.readouterr().err
