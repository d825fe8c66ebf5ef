"""Settings that the executor does not look at are named, each once."""

import pytest

from slipstream.config import from_dict, resolve
from slipstream.train.idle import idle_settings


def resolved(executor, **tables):
    return resolve(from_dict({"executor": executor, **tables}), vocab_size=257, cuda=False)


@pytest.mark.parametrize(
    ("executor", "tables", "said"),
    [
        (
            "single",
            {"dataparallel": {"pushes_per_step": 3, "max_staleness": 2}},
            "dataparallel.pushes_per_step, dataparallel.max_staleness have no effect with the executor 'single'.",
        ),
        ("single", {"log": {"trace_steps": 3}}, "log.trace_steps has no effect with the executor 'single'."),
        (
            "single",
            {"pipeline": {"num_stages": 4, "pipeline_schedule": "gpipe", "num_extra_in_flight": 1}},
            "pipeline.num_stages, pipeline.pipeline_schedule, pipeline.num_extra_in_flight have no effect with the "
            "executor 'single'.",
        ),
        ("pipeline", {"dataparallel": {"num_workers": 3}}, "dataparallel.num_workers has no effect"),
        (
            "pipeline",
            {"pipeline": {"pipeline_schedule": "gpipe", "num_extra_in_flight": 1}},
            "pipeline.num_extra_in_flight has no effect with the schedule 'gpipe', only with two_bw.",
        ),
        (
            "dataparallel",
            {
                "pipeline": {"pipeline_schedule": "one_f_one_b", "num_extra_in_flight": 1},
                "dataparallel": {"num_stages": 2},
            },
            "pipeline.num_extra_in_flight has no effect with the schedule 'one_f_one_b'",
        ),
        (
            "dataparallel",
            {"pipeline": {"num_stages": 7, "pipeline_schedule": "gpipe"}, "log": {"trace_steps": 3}},
            "pipeline.num_stages, pipeline.pipeline_schedule, log.trace_steps have no effect",
        ),
        ("dataparallel", {"dataparallel": {"num_workers": 1, "max_staleness": 3}}, "max_staleness 3 has no effect"),
    ],
)
def test_what_has_no_effect_is_named_once(executor, tables, said):
    (sentence,) = idle_settings(resolved(executor, **tables))
    assert said in sentence


@pytest.mark.parametrize(
    ("executor", "tables"),
    [
        ("single", {"pipeline": {"num_microbatches": 8}}),
        ("pipeline", {"pipeline": {"num_extra_in_flight": 1}}),
        ("dataparallel", {"pipeline": {"num_extra_in_flight": 1}, "dataparallel": {"num_stages": 2}}),
        ("pipeline", {"log": {"trace_steps": 3}, "pipeline": {"num_stages": 4}, "train": {"max_skipped_steps": 9}}),
        ("dataparallel", {"dataparallel": {"num_workers": 2, "max_staleness": 3}}),
        ("dataparallel", {"dataparallel": {"mode": "sync"}, "train": {"max_skipped_steps": 9}}),
        ("dataparallel", {"train": {"max_skipped_steps": 9}}),
    ],
)
def test_what_has_an_effect_is_not(executor, tables):
    assert idle_settings(resolved(executor, **tables)) == []


@pytest.mark.parametrize(
    ("model", "sentences"),
    [
        ({"router_aux_loss": 0.1}, ["model.router_aux_loss has no effect with a model.num_experts of 0"]),
        (
            {"experts_per_token": 4, "expert_ffn_dim": 8, "router_renormalize": False, "router_z_loss": 0.1},
            ["model.experts_per_token, model.expert_ffn_dim, model.router_renormalize, model.router_z_loss have no"],
        ),
        ({"num_experts": 4, "router_aux_loss": 0.1}, []),
        ({}, []),
    ],
)
def test_what_speaks_of_experts_where_there_are_none(model, sentences):
    found = idle_settings(from_dict({"model": model}))
    assert len(found) == len(sentences)
    assert all(each.startswith(sentence) for each, sentence in zip(found, sentences, strict=True))


@pytest.mark.parametrize(
    ("files", "sentences"),
    [
        ([], ["data.text_field has no effect without data.stream"]),
        (["a.txt", "folder/b.txt.gz"], ["data.text_field has no effect on plain text"]),
        (["a.txt", "folder/b.jsonl"], []),
    ],
)
def test_a_field_of_the_text_where_nothing_has_fields(tmp_path, files, sentences):
    (tmp_path / "folder").mkdir()
    for name in files:
        (tmp_path / name).touch()
    stream = [str(tmp_path / name) for name in ("a.txt", "folder") if files]
    found = idle_settings(from_dict({"data": {"stream": stream, "text_field": "body"}}))
    assert len(found) == len(sentences)
    assert all(each.startswith(sentence) for each, sentence in zip(found, sentences, strict=True))
    assert idle_settings(from_dict({"data": {"stream": stream}})) == []
