"""Workers that are pipelines: what is refused before anything starts, and the shipped example."""

from pathlib import Path

import pytest

from slipstream.config import from_dict, load_toml, resolve
from slipstream.dataparallel.checks import check_dataparallel
from slipstream.errors import ConfigError
from slipstream.staleness.async_checks import concurrency
from slipstream.train.idle import idle_settings

EXAMPLE = Path(__file__).parents[3] / "configs" / "hybrid.toml"


def settings(num_stages=3, **changes):
    tables = {
        "executor": "dataparallel",
        "pipeline": {"num_microbatches": 8},
        "dataparallel": {"num_workers": 2, "num_stages": num_stages, "min_microbatches": 2},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return resolve(from_dict(tables), vocab_size=257, cuda=False)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"engine": "inline"}, "the engine 'inline' does not run"),
        ({"dataparallel": {"mode": "sync"}}, "with mode 'sync' all of them would drain"),
        ({"dataparallel": {"unit": "pseudo_gradient"}}, "take no optimizer steps of their own"),
        ({"pipeline": {"pipeline_schedule": "gpipe"}}, "'two_bw', which does not drain"),
        ({"dataparallel": {"min_microbatches": 1}}, "at least 2 microbatches"),
        ({"pipeline": {"num_extra_in_flight": 1}}, "at least 3 microbatches"),
    ],
)
def test_refused_with_what_would_do(changes, said):
    check_dataparallel(settings())
    with pytest.raises(ConfigError, match=rf"num_stages is 3, so that each worker is a pipeline.*{said}"):
        check_dataparallel(settings(**changes))
    if "mode" not in changes.get("dataparallel", {}):
        return
    with pytest.raises(ConfigError, match=r"dataparallel\.num_stages is 0; it must be 1 or more"):
        settings(num_stages=0)


def test_a_pipeline_that_does_not_drain_has_two_gradients_under_way():
    assert concurrency(settings(), delay=None) == (4, 2)
    assert concurrency(settings(pipeline={"pipeline_schedule": "one_f_one_b"}), delay=None) == (2, 2)
    assert concurrency(settings(num_stages=1), delay=None) == (2, 2)


def test_the_schedule_has_an_effect_where_workers_have_stages():
    schedule = {"pipeline_schedule": "one_f_one_b"}
    assert not idle_settings(settings(pipeline=schedule))
    (said,) = idle_settings(settings(num_stages=1, pipeline=schedule))
    assert said.startswith("pipeline.pipeline_schedule has no effect")
    one = settings(dataparallel={"num_workers": 1, "max_staleness": 1})
    assert not idle_settings(one), "its gradients are stale by its own"


def test_the_example_is_of_two_workers_of_two_stages():
    config = resolve(load_toml(EXAMPLE), vocab_size=257, cuda=False)
    check_dataparallel(config)
    assert (config.dataparallel.num_workers, config.dataparallel.num_stages) == (2, 2)
    assert not idle_settings(config)
    least_s = (
        config.train.num_steps * config.pipeline.num_microbatches * config.dataparallel.emulate_microbatch_ms / 1e3
    )
    assert least_s / sum(config.dataparallel.emulate_speeds) < 90, "it shall take less than two minutes in all"
