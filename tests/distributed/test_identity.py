"""The pipeline computes what one process computes, to the last bit: losses, gradient norms, weights, evaluations.

Whatever the number of stages, the schedule's delay is all that remains of it. Each setting runs in one process and on
the ranks of a pool; nothing is rounded before the comparison. The evaluations before, between and after the steps are
part of what is compared, so neither may disturb the other.
"""

import functools
import itertools

import pytest
from tests.distributed.harness import (
    as_pipeline,
    batch_of,
    on_rank,
    pipeline_executor,
    run_config,
    settings,
    single,
    whole,
)
from tests.distributed.pool import CPU, shared_pool

from slipstream.config import SCHEDULE_DELAY
from slipstream.train.launch import launch
from slipstream.train.metrics import read_json_lines
from slipstream.train.progress import SilentReporter
from slipstream.train.single import SingleExecutor

HARD = {"dropout": 0.2, "activation_checkpointing": True}


def on_pipeline(config):
    return whole(shared_pool(config.pipeline.num_stages).run(on_rank, config))


# Every combination of any three of the four settings.
MATRIX = [
    pytest.param(rule, feedback, tied, hard, id=f"{rule}-ef{feedback}-{'tied' if tied else 'untied'}-{hard:d}")
    for rule, feedback, tied in itertools.product(("adamw", "muon"), (0, 1), (False, True))
    for hard in [((rule == "muon") + feedback + tied) % 2 == 0]
]


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(("rule", "feedback", "tied", "hard"), MATRIX)
def test_two_bw_is_a_delay_of_one(num_stages, rule, feedback, tied, hard):
    config = settings(
        optim={"name": rule},
        staleness={"delay": 1, "error_feedback": float(feedback)},
        model=(HARD if hard else {}) | {"tie_embeddings": tied},
    )
    expected = single(config)
    assert on_pipeline(as_pipeline(config, num_stages)) == expected
    assert [step[4] for step in expected.steps] == [0, 1, 1, 1, 1]


# Two layers of experts on two stages at p = 4, and experts that get no token in some batch.
EXPERTS = {
    "num_experts": 24,
    "experts_per_token": 2,
    "expert_ffn_dim": 12,
    "num_shared_experts": 1,
    "num_dense_layers": 2,
    "router_aux_loss": 0.1,
    "router_z_loss": 0.01,
}


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("rule", "feedback", "hard"), [("adamw", 0, True), ("adamw", 1, False), ("muon", 0, False), ("muon", 1, True)]
)
def test_experts_and_what_their_routers_report(num_stages, rule, feedback, hard):
    config = settings(
        optim={"name": rule},
        staleness={"delay": 1, "error_feedback": float(feedback)},
        model=EXPERTS | (HARD if hard else {}),
    )
    expected = single(config)
    assert on_pipeline(as_pipeline(config, num_stages)) == expected
    routers = [report for step in expected.steps for report in step[7]]
    assert len(routers) == 2 * len(expected.steps)
    assert min(report.load_min for report in routers) == 0
    assert all(report.aux_loss > 0 for report in routers)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "layers"), [("one_f_one_b", 2, 4), ("one_f_one_b", 4, 4), ("interleaved", 2, 5)]
)
def test_experts_on_a_flushing_schedule_are_no_delay(schedule, num_stages, layers):
    config = settings(optim={"name": "muon"}, staleness={"delay": 0}, model=HARD | EXPERTS | {"num_layers": layers})
    assert on_pipeline(as_pipeline(config, num_stages, schedule)) == single(config)


def test_experts_in_bfloat16():
    config = settings(
        optim={"name": "muon"},
        staleness={"delay": 1, "error_feedback": 1.0},
        model=HARD | EXPERTS,
        train={"compute_dtype": "bfloat16"},
    )
    assert on_pipeline(as_pipeline(config, 4)) == single(config)


@pytest.mark.parametrize("coefficient", ["router_aux_loss", "router_z_loss"])
def test_both_auxiliary_losses_are_in_what_is_compared(coefficient):
    with_both, without = (
        single(settings(staleness={"delay": 1}, model=EXPERTS | change)) for change in ({}, {coefficient: 0.0})
    )
    assert with_both.steps[0][1] == without.steps[0][1]
    assert with_both.steps[0][2] != without.steps[0][2]


def test_the_bound_on_the_norm_is_met_and_passed():
    norms = [step[2] for step in single(settings(staleness={"delay": 1})).steps]
    assert min(norms) < settings().optim.max_grad_norm < max(norms)


MOMENTUM = {"name": "torch.optim.SGD", "args": {"momentum": 0.9}}
AGC = {"min_pairs": 2, "ramp_steps": 0}
REMEDIES = [
    ({"prediction": "spectrain"}, MOMENTUM),
    ({"prediction": "xpipe"}, {}),
    ({"correction": "dc_asgd", "correction_strength": 0.5}, {}),
    ({"correction": "dc_asgd_adaptive", "correction_strength": 0.5}, {}),
    ({"correction": "gap_aware"}, {}),
    ({"correction": "agc", "agc": AGC}, {}),
    ({"correction": "agc", "agc": AGC | {"curvature": "fisher_root", "displacement": "ema"}}, {"name": "muon"}),
    ({"correction": "agc_damping", "agc": AGC}, {}),
    ({"lr_discount": "aalr", "aalr_threshold": 0.5}, {}),
    ({"correction": "gradient_feedback", "correction_strength": 0.5, "error_feedback": 1.0}, {}),
]


@pytest.mark.parametrize(("remedy", "optim"), REMEDIES, ids=[next(iter(each.values())) for each, _ in REMEDIES])
def test_every_remedy_is_the_same_stage_by_stage(remedy, optim):
    config = settings(staleness={"delay": 1} | remedy, model={"tie_embeddings": True}, optim=optim)
    without = settings(staleness={"delay": 1}, model={"tie_embeddings": True}, optim=optim)
    assert single(config).weights != single(without).weights
    assert on_pipeline(as_pipeline(config, 3)) == single(config)


# (stages, microbatches, extra in flight, layers): the least number of microbatches, odd ones, as many stages as
# layers, layers that do not divide evenly, more microbatches in flight than the next batch has.
SIZES = [
    (1, 1, 0, 1),
    (1, 5, 0, 2),
    (2, 1, 0, 2),
    (2, 2, 1, 3),
    (2, 3, 2, 2),
    (2, 7, 0, 5),
    (2, 5, 4, 2),
    (3, 2, 0, 3),
    (3, 3, 1, 5),
    (3, 5, 3, 4),
    (4, 3, 0, 4),
    (4, 4, 1, 7),
    (4, 5, 2, 4),
    (4, 9, 6, 5),
]


@pytest.mark.parametrize(("num_stages", "num_microbatches", "extra", "num_layers"), SIZES)
def test_odd_sizes(num_stages, num_microbatches, extra, num_layers):
    size = 1 + 2 * (num_microbatches % 2)
    config = settings(
        staleness={"delay": 1, "error_feedback": 1.0},
        model=HARD | {"num_layers": num_layers, "tie_embeddings": True},
        pipeline={"num_microbatches": num_microbatches},
        train={"microbatch_size": size},
    )
    assert on_pipeline(as_pipeline(config, num_stages, extra=extra)) == single(config)


def told(rank, config):
    """Train as one rank; return what its methods tell of themselves."""
    executor = pipeline_executor(rank, config)
    for _ in range(config.train.num_steps):
        executor.run_step()
    executor.close()
    return dict(executor.method_metrics())


def test_a_stage_tells_of_its_own_coefficients():
    config = settings(staleness={"delay": 1, "error_feedback": "auto"})
    alone = SingleExecutor(config, functools.partial(batch_of, config), device=CPU)
    for _ in range(config.train.num_steps):
        alone.run_step()
    expected = dict(alone.method_metrics())
    assert any(expected.values())
    assert shared_pool(1).run(told, as_pipeline(config, 1)) == [expected]
    first, last = shared_pool(2).run(told, as_pipeline(config, 2))
    assert first["error_feedback/embedding"] == expected["error_feedback/embedding"]
    assert last["error_feedback/head"] == expected["error_feedback/head"]
    assert first.keys() | last.keys() == expected.keys()


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("rule", "feedback"), [("adamw", 1.0), ("adamw", "auto"), ("muon", 0.0), ("muon", 1.0), ("muon", "auto")]
)
def test_in_bfloat16(num_stages, rule, feedback):
    """What crosses a stage boundary is bfloat16 in one process too."""
    config = settings(
        optim={"name": rule},
        staleness={"delay": 1, "error_feedback": feedback},
        model=HARD | {"tie_embeddings": True},
        train={"compute_dtype": "bfloat16"},
    )
    assert on_pipeline(as_pipeline(config, num_stages)) == single(config)


@pytest.mark.parametrize(
    ("schedule", "num_stages", "num_microbatches"),
    [
        *[
            (schedule, p, m)
            for schedule in ("gpipe", "one_f_one_b")
            for p, m in ((1, 3), (2, 1), (3, 4), (4, 5), (4, 2))
        ],
        *[("interleaved", p, m) for p, m in ((1, 3), (2, 2), (2, 5), (3, 4), (3, 1))],
    ],
)
def test_flushing_schedules_are_no_delay(schedule, num_stages, num_microbatches):
    config = settings(
        optim={"name": "muon"},
        staleness={"delay": 0, "error_feedback": 0.0},
        model=HARD | {"tie_embeddings": True, "num_layers": 6 if schedule == "interleaved" else 4},
        pipeline={"num_microbatches": num_microbatches},
    )
    expected = single(config)
    assert on_pipeline(as_pipeline(config, num_stages, schedule)) == expected
    assert {step[4] for step in expected.steps} == {0}


def test_evaluation_does_not_touch_the_trajectory():
    """Twice in a row, before the first step, after each: the steps are those of a run that never evaluates."""
    config = settings(staleness={"delay": 1, "error_feedback": 1.0}, model={"dropout": 0.2})
    never = single(config, evaluate_at=())
    config = as_pipeline(config, 3)
    for moments in ((0, 1, 2, 3, 4, 5), ()):
        run = whole(shared_pool(3).run(on_rank, config, moments))
        assert (run.steps, run.weights) == (never.steps, never.weights)


def test_one_step_only():
    for steps in (1, 2):
        config = settings(staleness={"delay": 1}, train={"num_steps": steps})
        for num_stages in (1, 3):
            assert on_pipeline(as_pipeline(config, num_stages)) == single(config)


@pytest.mark.parametrize("schedule", ["two_bw", "one_f_one_b"])
def test_from_settings_to_summary(tmp_path, schedule):
    """The whole way: real data, ranks started by the program, files on disk."""
    results = {}
    for name, num_stages in (("single", 1), ("pipeline", 3)):
        config = run_config(
            tmp_path / name,
            executor=name,
            staleness={"delay": SCHEDULE_DELAY[schedule], "error_feedback": 1.0 * (schedule == "two_bw")},
            pipeline={"num_stages": num_stages, "pipeline_schedule": schedule},
        )
        summary = launch(config, reporter=SilentReporter())
        rows = read_json_lines(tmp_path / name / "metrics.jsonl")
        evaluations = read_json_lines(tmp_path / name / "evaluations.jsonl")
        results[name] = (
            [summary[key] for key in ("weights_sha256", "val_loss", "val_loss_y", "val_bits_per_byte", "train_loss")],
            [[row[key] for key in ("step", "loss", "grad_norm", "lr", "staleness_max", "num_tokens")] for row in rows],
            [[row[key] for key in ("step", "val_loss", "val_loss_y", "num_tokens")] for row in evaluations],
        )
    assert results["single"] == results["pipeline"]
    assert len(results["single"][1]) == 6
    assert len(results["single"][2]) == 4


@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("window", "staleness"),
    [
        ({"sync_until_step": 2}, [0, 0, 1, 1, 1]),
        ({"sync_from_step": 4}, [0, 1, 1, 0, 0]),
        ({"sync_until_step": 1, "sync_from_step": 5}, [0, 1, 1, 1, 0]),
        ({"sync_until_step": 9}, [0, 0, 0, 0, 0]),
    ],
    ids=["start", "cool-down", "both", "whole"],
)
def test_steps_without_delay_at_the_start_and_at_the_end(num_stages, window, staleness):
    """The schedule changes twice in mid-run; each evaluation falls into whatever is in flight there."""
    config = settings(
        optim={"name": "muon"},
        staleness={"delay": 1, "error_feedback": 1.0} | window,
        model=HARD | {"tie_embeddings": True},
    )
    expected = single(config)
    assert on_pipeline(as_pipeline(config, num_stages, extra=int(num_stages == 2))) == expected
    assert [step[4] for step in expected.steps] == staleness
