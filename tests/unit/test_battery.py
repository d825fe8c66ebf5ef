"""The common battery: every rule x every method against staleness x several delays, through the one update path.

A new rule is a row of ``RULES``, a new method a row of ``METHODS``; the tests below then hold for it or say what does
not. They drive ``Updater`` as an executor does, on problems small enough for seconds.
"""

import contextlib
import dataclasses
import functools
import json
from collections.abc import Callable, Mapping
from functools import partial

import pytest
import torch
from torch import Tensor, nn

from slipstream.assembly import publish_method, scheduled_rate, slot_tensors
from slipstream.config import AgcConfig, Config, OptimConfig, StalenessConfig
from slipstream.models.roles import role
from slipstream.optim import build_optimizers, export_state, import_state, join_tensors, split_tensors
from slipstream.optim.lr import lr_factor
from slipstream.staleness.backward import backward_on, build_backward
from slipstream.staleness.corrections import Slots, build_corrections
from slipstream.staleness.delay import DelayLine
from slipstream.staleness.gradient import Gradient, global_norm
from slipstream.staleness.step_size import build_step_size
from slipstream.staleness.updater import Updater, UpdateReport
from slipstream.staleness.versions import VersionedWeights

RULES = {
    "adamw": OptimConfig(name="adamw", lr=0.04),
    "muon": OptimConfig(name="muon", lr=0.07, adamw_lr=0.05),
    "sgd-momentum": OptimConfig(name="torch.optim.SGD", lr=0.02, args={"momentum": 0.9}),
    "nadam": OptimConfig(name="torch.optim.NAdam", lr=0.05),
    "rmsprop": OptimConfig(name="torch.optim.RMSprop", lr=0.02),
    "adagrad": OptimConfig(name="torch.optim.Adagrad", lr=0.2),
    "nadamw": OptimConfig(name="nadamw", lr=0.06),
    "asyncpp": OptimConfig(name="nadamw", lr=0.07, args={"betas": [0.99, 0.999]}),
    "lion": OptimConfig(name="lion", lr=0.03),
    "normuon": OptimConfig(name="normuon", lr=0.07, adamw_lr=0.05),
    "soap": OptimConfig(name="soap", lr=0.08, adamw_lr=0.05),
    "adan": OptimConfig(name="adan", lr=0.06),
    "mars": OptimConfig(name="mars", lr=0.05),
    "basis-rotation": OptimConfig(name="basis_rotation", lr=0.05, adamw_lr=0.05),
}
"""Rates at which every method below converges at every delay below."""

AGC = AgcConfig(min_pairs=2, ramp_steps=2)
"""Of an effect within the few steps below."""

METHODS = {
    "none": StalenessConfig(),
    "ef-0.5": StalenessConfig(error_feedback=0.5),
    "ef-1": StalenessConfig(error_feedback=1.0),
    "ef-2": StalenessConfig(error_feedback=2.0),
    "ef-auto": StalenessConfig(error_feedback="auto"),
    "ef-auto-windowed": StalenessConfig(error_feedback="auto", sync_until_step=1, sync_from_step=40),
    "ef-1-windowed": StalenessConfig(error_feedback=1.0, sync_until_step=2, sync_from_step=40),
    "dc-asgd": StalenessConfig(correction="dc_asgd", correction_strength=0.5),
    "dc-asgd-adaptive": StalenessConfig(correction="dc_asgd_adaptive", correction_strength=0.1),
    "dc-asgd+ef-1": StalenessConfig(correction="dc_asgd", correction_strength=0.5, error_feedback=1.0),
    "gap-aware": StalenessConfig(correction="gap_aware"),
    "gradient-feedback": StalenessConfig(correction="gradient_feedback", correction_strength=0.5),
    "spectrain": StalenessConfig(prediction="spectrain"),
    "xpipe": StalenessConfig(prediction="xpipe"),
    "backward-newest": StalenessConfig(backward_weights="newest"),
    "pipemare-t2": StalenessConfig(backward_weights="pipemare"),
    "pipemare-t1-t2": StalenessConfig(backward_weights="pipemare", lr_discount="pipemare", lr_discount_steps=20),
    "pipemare-t2+ef-1": StalenessConfig(backward_weights="pipemare", error_feedback=1.0),
    "agc": StalenessConfig(correction="agc", agc=AGC),
    "agc-mean": StalenessConfig(correction="agc", agc=dataclasses.replace(AGC, displacement="ema")),
    "agc-fisher-root": StalenessConfig(correction="agc", agc=dataclasses.replace(AGC, curvature="fisher_root")),
    "agc-damping": StalenessConfig(correction="agc_damping", agc=AGC),
    "agc+ef-1": StalenessConfig(correction="agc", agc=AGC, error_feedback=1.0),
    "lr-inverse-staleness": StalenessConfig(lr_discount="inverse_staleness"),
    "lr-pipemare": StalenessConfig(lr_discount="pipemare", lr_discount_steps=20),
    "lr-aalr": StalenessConfig(lr_discount="aalr", aalr_threshold=0.8),
}
ONLY_WITH = {"spectrain": ("sgd-momentum",), "xpipe": ("adamw", "nadam", "nadamw", "asyncpp")}
"""Methods that read what some rules alone keep; every other method goes with every rule."""

DAMPING = ("gap-aware", "lr-inverse-staleness", "lr-pipemare", "pipemare-t1-t2", "lr-aalr")
"""Methods that shorten the steps of stale gradients, and so get less far in as many steps."""

EVERY_METHOD = ("adamw", "muon", "sgd-momentum")
"""Rules that go through every method always: adaptive, orthogonalized, neither."""

A_METHOD_A_SEAM = ("none", "ef-1", "ef-auto", "dc-asgd-adaptive", "pipemare-t2", "lr-inverse-staleness")
"""What the other rules go through always; all the rest of the product is marked slow."""

DELAYS = (0, 1, 3)
PAIRS = [
    pytest.param(
        rule, method, marks=() if rule in EVERY_METHOD or method in (*A_METHOD_A_SEAM, "xpipe") else pytest.mark.slow
    )
    for method in METHODS
    for rule in RULES
    if rule in ONLY_WITH.get(method, RULES)
]

every_pair = pytest.mark.parametrize(("rule", "method"), PAIRS)


def at_delays(*delays: int) -> pytest.MarkDecorator:
    """Every pair at the largest delay, which asks most of it; one method a seam at the others too, the rest as slow."""
    return pytest.mark.parametrize(
        ("delay", "rule", "method"),
        [
            pytest.param(
                delay,
                *pair.values,
                marks=pair.marks if delay == max(delays) or pair.values[1] in A_METHOD_A_SEAM else pytest.mark.slow,
            )
            for delay in delays
            for pair in PAIRS
        ],
    )


every_method_in_use = pytest.mark.parametrize(("rule", "method"), [pair for pair in PAIRS if pair.values[1] != "none"])

Weights = Mapping[str, Tensor]

# Names by which the real routing tells matrices of blocks from all else, so Muon runs beside its AdamW.
UP, DOWN, NORM = "blocks.0.ffn.up.weight", "blocks.0.ffn.down.weight", "head.norm.weight"
LINEAR = "blocks.1.attention.o.weight"
IDLE = "blocks.1.ffn.up.weight"
"""A parameter of no influence, such as an expert that no token goes to."""
SHAPES = {UP: (6, 8), DOWN: (8, 4), NORM: (4,), LINEAR: (6, 4), IDLE: (3, 2)}
TRAINED = (UP, DOWN, NORM, LINEAR)
TOTAL_STEPS = 50


def model(weights: Weights, x: Tensor) -> tuple[Tensor, Tensor]:
    """Two problems side by side: a network of two layers, and a linear one, which is convex."""
    return torch.tanh(x @ weights[UP]) @ weights[DOWN] * weights[NORM], x @ weights[LINEAR]


def seeded(seed: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def initial_weights(dtype: torch.dtype) -> dict[str, Tensor]:
    return {name: seeded(10 + i, *shape, dtype=dtype) for i, (name, shape) in enumerate(SHAPES.items())}


def teacher(dtype: torch.dtype) -> dict[str, Tensor]:
    """Weights to be found, some way from the initial ones."""
    initial = initial_weights(dtype).items()
    return {name: start + 0.5 * seeded(20 + i, *start.shape, dtype=dtype) for i, (name, start) in enumerate(initial)}


class Run:
    """Trains by one rule, method and delay to match a fixed teacher; each batch is a pure function of its index."""

    def __init__(
        self,
        rule: str,
        method: str,
        delay: int,
        *,
        weight_decay: float = 0.0,
        dtype: torch.dtype = torch.float32,
        published_dtype: torch.dtype | None = None,
    ) -> None:
        staleness = dataclasses.replace(METHODS[method], delay=delay)
        self.line = DelayLine(
            delay,
            sync_until=staleness.sync_until_step,
            sync_from=staleness.sync_from_step - 1 if staleness.sync_from_step else None,
        )
        self.inputs = seeded(0, TOTAL_STEPS + 1, 32, 6, dtype=published_dtype or dtype)
        with torch.no_grad():
            self.targets = model(teacher(self.inputs.dtype), self.inputs)
        masters = {name: nn.Parameter(tensor) for name, tensor in initial_weights(dtype).items()}
        optim = dataclasses.replace(RULES[rule], weight_decay=weight_decay)
        optimizers = build_optimizers(masters, optim, role=role)
        factor = partial(lr_factor, warmup_steps=5, total_steps=TOTAL_STEPS, final_fraction=0.0)
        self.step_size = build_step_size(staleness)
        self.updater = Updater(
            masters,
            optimizers,
            weights=VersionedWeights(masters, num_buffers=self.line.num_versions, dtype=published_dtype or dtype),
            publish=publish_method(Config(staleness=staleness), optimizers),
            lr_factor=factor,
            max_grad_norm=1.0,
            corrections=build_corrections(staleness, role=role, lr=scheduled_rate(optimizers, factor)),
            step_size=self.step_size,
        )
        self.backward = build_backward(staleness.backward_weights, delays=dict.fromkeys(SHAPES, delay))

    @property
    def weights(self) -> VersionedWeights:
        return self.updater.weights

    def losses(self, weights: Weights, batch: int) -> Tensor:
        """Return the mean squared error of either problem."""
        predictions = model(weights, self.inputs[batch])
        return torch.stack([(p - t[batch]).square().mean() for p, t in zip(predictions, self.targets, strict=True)])

    def step(self, change: Callable[[str, Tensor], Tensor | None] | None = None) -> UpdateReport:
        """Make an update of the next batch; ``change`` may replace its gradient by name."""
        batch = self.weights.latest
        version = self.line.read_version(batch)
        leaves = {name: tensor.clone().requires_grad_() for name, tensor in self.weights.read(version).items()}
        with self.saving(leaves, steps=batch - version):
            losses = self.losses(leaves, batch)
        losses.sum().backward()
        tensors: dict[str, Tensor | None] = {}
        for name, leaf in leaves.items():
            found = None if leaf.grad is None else leaf.grad.to(self.updater.masters[name].dtype)
            tensors[name] = change(name, found) if change and found is not None else found
        gradient = Gradient(tensors=tensors, read_version=version, num_tokens=32)
        report = self.updater.step(gradient, global_norm(gradient.norms(SHAPES)))
        if self.backward is not None:
            self.backward.observe(self.weights.read(batch), self.weights.read(batch + 1))
        return report

    def saving(self, leaves: Weights, *, steps: int) -> contextlib.AbstractContextManager[object]:
        """Let a forward keep the weights that the method wants in the backward."""
        if self.backward is None:
            return contextlib.nullcontext()
        newest = self.weights.read(self.weights.latest)
        return backward_on(leaves, {name: self.backward.of(name, newest[name], steps=steps) for name in leaves})

    def slots(self) -> dict[str, Slots]:
        """Return what methods keep, by the place they keep it in."""
        slots = {f"correction/{i}": each.slots for i, each in enumerate(self.updater.corrections)}
        slots["publish"] = self.updater.publish.slots
        return slots if self.backward is None else {**slots, "backward": self.backward.slots}

    def steps(self, count: int) -> "Run":
        for _ in range(count):
            self.step()
        return self

    def evaluate(self) -> Tensor:
        """Return either problem's loss at the newest published weights, on unseen inputs."""
        with torch.no_grad():
            return self.losses(self.weights.read(self.weights.latest), TOTAL_STEPS)

    def state(self) -> dict[str, Tensor]:
        """Return every tensor that decides how the run goes on, copied."""
        tensors = {f"y/{name}": master for name, master in self.updater.masters.items()}
        for version in self.weights.live:
            tensors |= {f"x@{version}/{name}": tensor for name, tensor in self.weights.read(version).items()}
        for optimizer in self.updater.optimizers.values():
            tensors |= {f"optim/{path}": tensor for path, tensor in split_tensors(export_state(optimizer))[0].items()}
        for place, slots in self.slots().items():
            tensors |= slot_tensors(f"slots/{place}", slots)
        return {name: tensor.detach().clone() for name, tensor in tensors.items()}

    def save(self) -> tuple[dict[str, Tensor], str]:
        """Return what a checkpoint holds: tensors, and the rest as JSON."""
        trees = [split_tensors(export_state(optimizer))[1] for optimizer in self.updater.optimizers.values()]
        scalars = {"optim": trees, "live": list(self.weights.live), "updater": self.updater.state_dict()}
        scalars["step_size"] = self.step_size.state_dict()
        return self.state(), json.dumps(scalars)

    def restore(self, saved: tuple[dict[str, Tensor], str]) -> "Run":
        tensors, scalars = saved[0], json.loads(saved[1])
        with torch.no_grad():
            for name, master in self.updater.masters.items():
                master.copy_(tensors[f"y/{name}"])
        self.weights.restore({v: {name: tensors[f"x@{v}/{name}"] for name in SHAPES} for v in scalars["live"]})
        for optimizer, tree in zip(self.updater.optimizers.values(), scalars["optim"], strict=True):
            import_state(optimizer, join_tensors(tree, lambda path: tensors[f"optim/{path}"]))
        for place, slots in self.slots().items():
            for slot, held in slots.items():
                held.update(under(tensors, f"slots/{place}/{slot}/"))
        self.updater.load_state_dict(scalars["updater"])
        if scalars["step_size"]:
            self.step_size.load_state_dict(scalars["step_size"])
        return self


@functools.cache
def plain_state(rule: str, *, delay: int, num_steps: int, weight_decay: float = 0.0) -> dict[str, Tensor]:
    """Return the state after some steps without any method, with which many methods are compared."""
    return Run(rule, "none", delay, weight_decay=weight_decay).steps(num_steps).state()


def under(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


def same(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> bool:
    """Bitwise equality, of types as well."""
    return first.keys() == second.keys() and all(
        tensor.dtype == second[name].dtype and torch.equal(tensor, second[name]) for name, tensor in first.items()
    )


def dtypes(tensors: Mapping[str, Tensor], prefix: str) -> set[torch.dtype]:
    """Return the types of weight-shaped tensors; counters and scalars may have types of their own."""
    return {tensor.dtype for tensor in under(tensors, prefix).values() if tensor.ndim > 0}


def finite(tensors: Mapping[str, Tensor]) -> bool:
    return all(bool(tensor.isfinite().all()) for tensor in tensors.values())


@at_delays(*DELAYS)
def test_converges(rule, method, delay):
    if delay == 0 and method != "none" and METHODS[method].error_feedback in (0, "auto"):
        return  # bitwise what `none` does there: test_is_the_identity_without_staleness
    run = Run(rule, method, delay)
    before = run.evaluate()
    left = run.steps(TOTAL_STEPS).evaluate() / before
    assert float(left.max()) < (0.9 if method in DAMPING and delay > 0 else 1 / 3)


@every_method_in_use
def test_does_something_when_stale(rule, method):
    """Otherwise a method that is not called would pass everything here."""
    plain, run = plain_state(rule, delay=3, num_steps=20), Run(rule, method, 3).steps(20)
    assert not all(torch.equal(run.updater.masters[name], plain[f"y/{name}"]) for name in TRAINED)


@every_method_in_use
def test_is_the_identity_without_staleness(rule, method):
    """True of everything but error feedback by a number, which then looks ahead for nothing: a control."""
    run = Run(rule, method, 0, weight_decay=0.1).steps(8)
    expected = plain_state(rule, delay=0, num_steps=8, weight_decay=0.1)
    found = {name: tensor for name, tensor in run.state().items() if not name.startswith("slots/")}
    assert same(found, expected) == (METHODS[method].error_feedback in (0, "auto"))


@at_delays(1, 3)
def test_state_round_trips(rule, method, delay):
    """Saved after 2 steps, when a delay of 3 has not filled its buffers, and restored into a fresh run: same bits."""
    whole, first, second = (Run(rule, method, delay, weight_decay=0.1) for _ in range(3))
    resumed = second.restore(first.steps(2).save()).steps(5)
    assert same(whole.steps(7).state(), resumed.state())


@every_pair
@pytest.mark.parametrize(
    ("dtype", "published_dtype"),
    [(torch.float64, torch.float64), (torch.float32, torch.float32), (torch.float32, torch.bfloat16)],
)
def test_keeps_dtype(rule, method, dtype, published_dtype):
    state = Run(rule, method, 1, dtype=dtype, published_dtype=published_dtype).steps(4).state()
    assert dtypes(state, "y/") == {dtype}
    assert dtypes(state, "x@") == {published_dtype}
    assert dtypes(state, "optim/") == {dtype}
    assert dtypes(state, "slots/") <= {dtype}
    assert finite(state)


@pytest.mark.parametrize("delay", [0, 3])
@every_pair
def test_survives_missing_gradients(rule, method, delay):
    """IDLE never has a gradient, DOWN has none in every second batch, and one batch has none at all."""
    run = Run(rule, method, delay, weight_decay=0.1)
    initial = run.state()

    def drop_some(name: str, gradient: Tensor) -> Tensor | None:
        batch = run.weights.latest
        return None if batch == 3 or (name == DOWN and batch % 2 == 0) else gradient

    for _ in range(8):
        run.step(drop_some)
    state = run.state()
    assert finite(state)
    assert torch.equal(state[f"y/{IDLE}"], initial[f"y/{IDLE}"])
    assert all(torch.equal(state[f"x@{v}/{IDLE}"], initial[f"y/{IDLE}"]) for v in run.weights.live)
    assert not any(torch.equal(state[f"y/{name}"], initial[f"y/{name}"]) for name in TRAINED)


@pytest.mark.parametrize("delay", [0, 3])
@every_pair
def test_survives_zero_gradients(rule, method, delay):
    """Zeros from the start move nothing (0/0 is what a rule could make of them); training then begins as usual."""
    run = Run(rule, method, delay)
    initial = run.state()
    for _ in range(3):
        assert run.step(lambda name, gradient: torch.zeros_like(gradient)).grad_norm == 0.0
    state = run.state()
    for name in SHAPES:
        assert torch.equal(state[f"y/{name}"], initial[f"y/{name}"])
        assert all(torch.equal(state[f"x@{version}/{name}"], initial[f"y/{name}"]) for version in run.weights.live)
    before = run.evaluate()
    assert bool((run.steps(10).evaluate() < before).all())
