"""Other people's models: a pipeline of any number of stages computes what one process computes, to the bit."""

import dataclasses

import pytest
import torch
from tests.distributed.harness import whole
from tests.distributed.own_models import MODELS, Data, own_on_rank, own_settings, own_single, workload
from tests.distributed.pool import shared_pool

from slipstream.config import resolve
from slipstream.errors import ConfigError
from slipstream.train.metrics import read_json_lines
from slipstream.train.own import fit, open_own
from slipstream.train.progress import SilentReporter
from slipstream.train.single import SingleExecutor
from slipstream.train.trained import open_trained


def as_pipeline(config, num_stages, schedule="two_bw"):
    pipeline = dataclasses.replace(config.pipeline, num_stages=num_stages, pipeline_schedule=schedule)
    staleness = dataclasses.replace(config.staleness, delay=None)
    changed = dataclasses.replace(config, executor="pipeline", pipeline=pipeline, staleness=staleness)
    return resolve(changed, vocab_size=1, cuda=False)


def on_pipeline(kind, config):
    return whole(shared_pool(config.pipeline.num_stages).run(own_on_rank, kind, config))


@pytest.mark.parametrize("num_stages", [1, 2, 3])
@pytest.mark.parametrize(
    ("rule", "feedback", "dtype"), [("adamw", 0.0, "float32"), ("muon", 1.0, "float32"), ("muon", 1.0, "bfloat16")]
)
@pytest.mark.parametrize("kind", MODELS)
def test_two_bw_is_a_delay_of_one(kind, rule, feedback, dtype, num_stages):
    config = own_settings(
        optim={"name": rule}, staleness={"delay": 1, "error_feedback": feedback}, train={"compute_dtype": dtype}
    )
    expected = own_single(kind, config)
    assert on_pipeline(kind, as_pipeline(config, num_stages)) == expected
    assert [step[4] for step in expected.steps] == [0, 1, 1, 1, 1]
    assert len({loss for _, loss, _ in expected.losses}) == 5


@pytest.mark.parametrize("kind", MODELS)
def test_a_flushing_schedule_is_no_delay(kind):
    config = own_settings(staleness={"delay": 0})
    assert on_pipeline(kind, as_pipeline(config, 2, "one_f_one_b")) == own_single(kind, config)


def test_one_step_is_that_of_a_plain_loop():
    """Without dropout: the module as its owner would call it, and torch's own optimizer."""
    config = own_settings(
        optim={
            "name": "torch.optim.SGD",
            "lr": 0.1,
            "max_grad_norm": 0.0,
            "weight_decay": 0.0,
            "lr_schedule": "constant",
        },
        staleness={"delay": 0},
        train={"num_steps": 1},
        pipeline={"num_microbatches": 1},
    )
    work = workload("words", config)
    parts = work.model
    own = parts._whole  # its head is a leaf of its own here
    for module in own.modules():
        if isinstance(module, torch.nn.Dropout):
            module.p = 0.0
    executor = SingleExecutor(config, work.source, device=torch.device("cpu"), model=parts)
    batch = work.source(0)
    x = own.embed(torch.from_numpy(batch.inputs))
    for block in own.blocks:
        x = block(x)
    loss = parts.loss_sum(own.head(x), torch.from_numpy(batch.targets)) / batch.num_tokens
    loss.backward()
    report = executor.run_step()
    assert report.loss == pytest.approx(loss.item(), rel=1e-6)
    masters = executor._parts.updater.masters
    with torch.no_grad():
        for name, parameter in own.named_parameters():
            gradient = parameter.grad
            if name == "head.weight":
                continue
            if name == "embed.weight":
                gradient = gradient + own.head.weight.grad
            torch.testing.assert_close(masters[name].detach(), parameter - 0.1 * gradient, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_a_module_of_any_type_has_masters_of_float32(dtype):
    config = own_settings(optim={"name": "muon"}, staleness={"delay": 1}, train={"num_steps": 2})
    images = MODELS["images"]
    losses = []
    for build in (lambda: images.build().to(dtype), lambda: images.build().to(dtype).float()):
        model = dataclasses.replace(images, build=build)
        work = open_own(model, Data("images", rows=6, microbatch=2), config, 0, None)
        executor = SingleExecutor(config, work.source, device=torch.device("cpu"), model=work.model)
        losses.append([executor.run_step().loss for _ in range(2)])
        assert {master.dtype for master in executor._parts.updater.masters.values()} == {torch.float32}
    assert losses[0] == losses[1]


def test_from_settings_to_summary_and_on_from_a_checkpoint(tmp_path):
    """Two stages as processes of their own; resumed in one process, then on two again."""
    data = Data("recommender", rows=6, microbatch=2)
    model = MODELS["recommender"]
    config = own_settings(
        optim={"name": "muon"},
        staleness={"delay": 1, "error_feedback": 1.0},
        evaluate={"every_steps": 2},
        train={"num_steps": 6},
    )
    one = fit(model, data, dataclasses.replace(config, run_dir=str(tmp_path / "one")))

    def at(step, executor):
        train = dataclasses.replace(config.train, num_steps=step)
        staleness = dataclasses.replace(config.staleness, delay=None if executor == "pipeline" else 1)
        return dataclasses.replace(
            config, run_dir=str(tmp_path / "two"), executor=executor, train=train, staleness=staleness
        )

    fit(model, data, at(2, "pipeline"))
    fit(model, data, at(4, "single"), resume=True)
    two = fit(model, data, at(6, "pipeline"), resume=True)
    assert one["weights_sha256"] == two["weights_sha256"]
    assert one["val_bits_per_byte"] is None
    rows = [
        [
            (row["step"], row["val_loss"], row["val_loss_y"])
            for row in read_json_lines(tmp_path / run / "evaluations.jsonl")
        ]
        for run in ("one", "two")
    ]
    assert rows[0] == rows[1]
    with pytest.raises(ConfigError, match="trained a module of your own"):
        open_trained(tmp_path / "two")


def test_a_setting_of_the_decoder_is_said_to_have_no_effect_once(tmp_path):
    said = []

    class Heard(SilentReporter):
        def note(self, text):
            said.append(text)

    config = own_settings(
        run_dir=str(tmp_path),
        train={"num_steps": 1},
        data={"text_field": "body"},
        model={"router_aux_loss": 0.1},
        log={"trace_steps": 3},
    )
    fit(MODELS["recommender"], Data("recommender", rows=6, microbatch=2), config, reporter=Heard())
    assert [each for each in said if each.startswith("warning")] == [
        "warning: model.router_aux_loss, data.text_field: no effect on a model of your own.",
        "warning: log.trace_steps has no effect with the executor 'single'.",
    ]
