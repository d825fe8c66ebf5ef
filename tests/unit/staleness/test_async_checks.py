"""Settings of AGC and AALR: what they accept, what is named as idle, what is refused."""

import dataclasses

import pytest

from slipstream.config import from_dict, load_toml, to_dict, to_toml
from slipstream.errors import ConfigError
from slipstream.staleness.checks import check_staleness


def checked(delay: int, *, num_steps: int = 2000, **staleness) -> list[str]:
    tables = {"staleness": {"delay": delay, **staleness}, "train": {"num_steps": num_steps}}
    return check_staleness(from_dict(tables), delay=delay)


@pytest.mark.parametrize(
    ("delay", "staleness", "said"),
    [
        (0, {"correction": "agc"}, "staleness.correction 'agc' has no effect at a delay of 0"),
        (1, {"agc": {"trust_radius": 1.0}}, "staleness.agc have no effect without correction 'agc'"),
        (1, {"correction": "agc", "correction_strength": 0.5}, "staleness.correction_strength 0.5 has no effect"),
        (1, {"correction": "agc", "num_steps": 200}, "has no effect in 200 steps: it begins after 200 pairs"),
        (0, {"lr_discount": "aalr"}, "'aalr' has no effect at a delay of 0"),
        (3, {"lr_discount": "aalr"}, "exceeds the delay of 3, and the threshold is 4.5"),
        (3, {"lr_discount": "aalr", "aalr_threshold": 3}, "'aalr' has no effect with the executor 'single'"),
        (4, {"lr_discount": "aalr", "aalr_threshold": 1}, "multiplied by 0.25"),
        (1, {"aalr_threshold": 2.0}, "staleness.aalr_threshold has no effect without lr_discount 'aalr'"),
    ],
)
def test_what_has_no_effect_or_always_the_same_is_named_once(delay, staleness, said):
    found = checked(delay, **staleness)
    assert len(found) == 1
    assert said in found[0]


def test_a_threshold_is_judged_by_the_number_of_workers():
    """Five workers of one update each have a mean staleness of 4; five to an update, of 4 / 5."""

    def warnings(pushes: int, threshold: float) -> list[str]:
        workers = {"num_workers": 5, "pushes_per_step": pushes}
        staleness = {"lr_discount": "aalr", "aalr_threshold": threshold}
        tables = {"executor": "dataparallel", "dataparallel": workers, "staleness": staleness}
        return check_staleness(from_dict(tables), delay=None)

    assert "5 gradients in flight at 1 an update" in warnings(1, 2.0)[0]
    assert "multiplied by 0.5" in warnings(1, 2.0)[0]
    assert warnings(1, 4.0) == warnings(0, 0.8) == []
    assert "multiplied by 0.5" in warnings(0, 0.4)[0]


@pytest.mark.parametrize(
    ("num_steps", "dataparallel", "is_idle"),
    [
        (60, {"num_workers": 4}, False),  # 240 pairs
        (60, {"num_workers": 4, "pushes_per_step": 1}, True),
        (50, {"num_workers": 4}, True),  # 200, of which the last comes too late
        (100, {"num_workers": 2, "max_microbatches": 1}, False),  # four pushes make a step then
    ],
)
def test_workers_bring_a_pair_with_each_push(num_steps, dataparallel, is_idle):
    tables = {"executor": "dataparallel", "dataparallel": dataparallel, "staleness": {"correction": "agc"}}
    found = check_staleness(from_dict(tables | {"train": {"num_steps": num_steps}}), delay=None)
    assert [f"has no effect in {num_steps} steps" in sentence for sentence in found] == [True] * is_idle


@pytest.mark.parametrize(
    ("workers", "said"),
    [
        ({"pushes_per_step": 1, "max_staleness": 5}, "4 workers at 1 gradients a step, whose mean staleness is 3"),
        ({"pushes_per_step": 1, "max_staleness": 6}, None),
        ({"max_staleness": 1}, "From about 2 they hardly do"),
        ({"max_staleness": 2}, None),
        ({"pushes_per_step": 1, "max_staleness": 3, "max_microbatches": 4}, None),  # two gradients a step, then
        ({"pushes_per_step": 1}, None),
    ],
)
def test_a_bound_that_makes_workers_wait_is_named(workers, said):
    tables = {"executor": "dataparallel", "dataparallel": {"num_workers": 4, **workers}}
    found = check_staleness(from_dict(tables | {"pipeline": {"num_microbatches": 8}}), delay=None)
    assert (said is None) == (found == [])
    assert said is None or said in found[0]


@pytest.mark.parametrize("correction", ["agc", "agc_damping"])
@pytest.mark.parametrize("curvature", ["secant_group", "fisher", "fisher_root"])
def test_what_has_an_effect_is_not(correction, curvature):
    assert checked(1, correction=correction, agc={"curvature": curvature}) == []


@pytest.mark.parametrize(
    ("staleness", "said"),
    [
        ({"correction": "agc", "agc": {"curvature": "secant_diag"}}, "needs two gradients of one batch"),
        ({"lr_discount": "aalr", "aalr_threshold": -1.0}, r"aalr_threshold is -1\.0; give 'auto' or a mean"),
    ],
)
def test_what_makes_no_sense_is_refused(staleness, said):
    with pytest.raises(ConfigError, match=said):
        checked(1, **staleness)


def test_the_tables_survive_a_file(tmp_path):
    tables = {"correction": "agc", "agc": {"groups": "global", "decay": 0.9}, "lr_discount": "aalr"}
    for threshold in ("auto", 2.5):
        config = from_dict({"staleness": {**tables, "aalr_threshold": threshold}})
        path = tmp_path / "config.toml"
        path.write_text(to_toml(config))
        assert load_toml(path) == config
        assert to_dict(config)["staleness"]["aalr_threshold"] == threshold
    assert dataclasses.asdict(config)["staleness"]["agc"]["groups"] == "global"


def test_misspelt_settings_are_told():
    with pytest.raises(ConfigError, match=r"unknown key 'staleness\.agc\.trust_radios'.*trust_radius"):
        from_dict({"staleness": {"agc": {"trust_radios": 0.1}}})
    with pytest.raises(ConfigError, match=r"'staleness\.aalr_threshold' must be a number or 'auto', given 'atuo'"):
        from_dict({"staleness": {"aalr_threshold": "atuo"}})
