"""The plug-in under schedulers, gradient scalers, Accelerate and the Hugging Face Trainer."""

import copy

import pytest
import torch
from torch import nn

from slipstream.errors import ConfigError
from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached, remove

SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10),
    "lambda": lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: step / 5),
    "one-cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "sequential": lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
        optimizer,
        [
            torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=3),
            torch.optim.lr_scheduler.ExponentialLR(optimizer, gamma=0.9),
        ],
        milestones=[3],
    ),
}


def build(**options) -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    return model, torch.optim.AdamW(model.parameters(), lr=0.05, **options)


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, 4, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return torch.tanh(model(batch(step))).square().mean()


@pytest.mark.parametrize("scheduler", SCHEDULERS)
def test_schedulers_set_the_rates_they_would_set_alone(scheduler, recwarn):
    """Attached before or after the scheduler is built, which replaces the optimizer's step by its own."""
    runs = []
    for order in ("none", "attach first", "attach last"):
        model, optimizer = build()
        if order == "attach first":
            attach(optimizer, Delay(1), ErrorFeedback())
        schedule = SCHEDULERS[scheduler](optimizer)
        if order == "attach last":
            attach(optimizer, Delay(1), ErrorFeedback())
        rates, weights = [], []
        for step in range(8):
            loss_of(model, step).backward()
            optimizer.step()
            optimizer.zero_grad()
            rates.append(optimizer.param_groups[0]["lr"])
            weights.append(model.weight.detach().clone())
            schedule.step()
        runs.append((rates, torch.stack(weights)))
    (plain_rates, _), (first_rates, first), (last_rates, last) = runs
    assert plain_rates == first_rates == last_rates
    assert torch.equal(first, last)
    assert not [warning for warning in recwarn if "optimizer.step()" in str(warning.message)]


def scaler_run(*, fused: bool, unscale: bool, methods, overflow_at=(3,), steps=8) -> list[torch.Tensor]:
    model, optimizer = build(fused=fused)
    attach(optimizer, *methods)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    weights = []
    for step in range(steps):
        scaler.scale(loss_of(model, step)).backward()
        if step in overflow_at:
            model.weight.grad[0, 0] = float("inf")
        if unscale:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        weights.append(model.weight.detach().clone())
    return weights


@pytest.mark.parametrize("methods", [(Delay(1),), (ErrorFeedback(),), (Delay(2), ErrorFeedback())])
@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_holds_nothing_and_changes_nothing(fused, methods):
    """With a gradient scaler: what follows is as if the batch had never been there."""
    weights = scaler_run(fused=fused, unscale=True, methods=methods)
    assert torch.equal(weights[3], weights[2])
    assert all(torch.isfinite(weight).all() for weight in weights)
    model, optimizer = build(fused=fused)
    attach(optimizer, *methods)
    for step in (0, 1, 2, 4, 5, 6, 7):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert torch.allclose(model.weight, weights[step], rtol=1e-5, atol=1e-7), f"step {step}"


def test_a_fused_optimizer_must_be_given_unscaled_gradients_to_delay():
    """It is given scaled ones, and would unscale an old gradient by the scale of today."""
    with pytest.raises(ConfigError, match=r"scaler\.unscale_\(optimizer\)"):
        scaler_run(fused=True, unscale=False, methods=(Delay(1),))


def test_a_fused_optimizer_may_unscale_by_itself_under_error_feedback():
    """Which reads no gradients."""
    ours = scaler_run(fused=True, unscale=False, methods=(ErrorFeedback(),))
    unscaled = scaler_run(fused=True, unscale=True, methods=(ErrorFeedback(),))
    assert torch.allclose(torch.stack(ours), torch.stack(unscaled), rtol=1e-5, atol=1e-7)


def test_gradient_accumulation_and_clipping_act_before_the_plugin():
    """One hold and one release a step, whatever happened to the gradient before it."""
    results = []
    for num_parts in (1, 2):
        model, optimizer = build()
        attach(optimizer, Delay(1), ErrorFeedback())
        for step in range(6):
            for part in batch(step).chunk(num_parts):
                (torch.tanh(model(part)).square().mean() / num_parts).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.weight.detach().clone())
    assert torch.allclose(results[0], results[1], atol=1e-6)


class Wrapper:
    """What DeepSpeed's and Megatron-Core's optimizers look like from outside: no torch optimizer, but they hold one."""

    def __init__(self, optimizer: object) -> None:
        self.optimizer = optimizer


class Container:
    """What torchtitan's OptimizersContainer and Megatron-Core's ChainedOptimizer look like."""

    def __init__(self, **parts: list) -> None:
        vars(self).update(parts)


@pytest.mark.parametrize(
    "wrap",
    [
        lambda a, b: Wrapper(Wrapper(a)),
        lambda a, b: Container(optimizers=[a, b]),
        lambda a, b: Container(chained_optimizers=[Wrapper(a), Wrapper(b)]),
        lambda a, b: Container(chained_optimizers=[Wrapper(a), Wrapper(None)]),  # a rank without parameters of a kind
    ],
)
def test_wrappers_and_containers_are_looked_through(wrap):
    (model, first), (_, second) = build(), build()
    outer = wrap(first, second)
    assert attach(outer, Delay(1)) is outer
    assert is_attached(outer)
    assert is_attached(first)
    model.weight.grad = torch.ones_like(model.weight)
    before = model.weight.detach().clone()
    first.step()
    assert torch.equal(model.weight.detach(), before), "the first gradient is held"
    remove(outer)
    assert not is_attached(outer)
    assert not is_attached(first)


def test_a_container_counts_as_attached_only_as_a_whole():
    (_, first), (_, second) = build(), build()
    attach(first, Delay(1))
    assert not is_attached(Container(optimizers=[first, second]))


def test_accelerate_keeps_it_and_resumes_exactly(tmp_path):
    accelerate = pytest.importorskip("accelerate")

    def train(steps, *, load=None, save=None, attach_to_the_wrapper=False):
        accelerator = accelerate.Accelerator(cpu=True)
        model, optimizer = build()
        if not attach_to_the_wrapper:
            attach(optimizer, Delay(1), ErrorFeedback())
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        if attach_to_the_wrapper:
            attach(optimizer, Delay(1), ErrorFeedback())
        assert is_attached(optimizer)
        assert is_attached(optimizer.optimizer)
        if load is not None:
            accelerator.load_state(str(load))
        weights = []
        for step in steps:
            with accelerator.accumulate(model):
                accelerator.backward(loss_of(model, step))
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            weights.append(accelerator.unwrap_model(model).weight.detach().clone())
        if save is not None:
            accelerator.save_state(str(save))
        return weights

    continuous = train(range(8))
    first = train(range(4), save=tmp_path / "checkpoint")
    rest = train(range(4, 8), load=tmp_path / "checkpoint")
    assert all(torch.equal(a, b) for a, b in zip(continuous, first + rest, strict=True))
    wrapped = train(range(8), attach_to_the_wrapper=True)
    assert all(torch.equal(a, b) for a, b in zip(continuous, wrapped, strict=True))
    model, optimizer = build()
    for step in range(3):
        loss_of(model, step).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not torch.equal(model.weight, continuous[2]), "the plug-in was at work"


class Rows(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        x = torch.randn(4, generator=torch.Generator().manual_seed(index))
        return {"x": x, "labels": x.roll(1)[:3]}


class Regression(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = torch.tanh(self.layer(x))
        return {"loss": (logits - labels).square().mean(), "logits": logits}


def test_hugging_face_trainer_keeps_it_and_resumes_exactly(tmp_path):
    transformers = pytest.importorskip("transformers")

    methods = (Delay(1), ErrorFeedback())

    def train(folder, *, methods=methods, resume=False):
        model = Regression()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
        if methods:
            attach(optimizer, *methods)
        arguments = transformers.TrainingArguments(
            output_dir=str(folder),
            per_device_train_batch_size=4,
            max_steps=8,
            save_steps=4,
            logging_steps=1,
            report_to=[],
            use_cpu=True,
            seed=1,
            disable_tqdm=True,
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        trainer = transformers.Trainer(model, arguments, train_dataset=Rows(), optimizers=(optimizer, schedule))
        checkpoint = str(folder / "checkpoint-4") if resume else None
        trainer.train(resume_from_checkpoint=checkpoint)
        assert is_attached(trainer.optimizer) == bool(methods)
        return copy.deepcopy(model.layer.weight.detach())

    continuous = train(tmp_path)
    assert torch.equal(train(tmp_path, resume=True), continuous)
    assert not torch.equal(train(tmp_path / "plain", methods=()), continuous), "the plug-in was at work"
