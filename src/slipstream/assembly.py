"""From settings to the parts that one rank holds: modules, master weights, optimizers, update path."""

import copy
from collections.abc import Callable, Container, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from slipstream.config import Coefficient, Config
from slipstream.executor import Point, Snapshot, StateReader
from slipstream.models.moe import RouterLog, attach_log
from slipstream.models.partition import StageSpec
from slipstream.models.parts import LlamaParts, ModelParts, master_names, tied_pair
from slipstream.models.roles import role
from slipstream.models.shapes import parameter_shapes
from slipstream.optim.build import build_optimizers
from slipstream.optim.lr import rate_factor
from slipstream.optim.state import WHOLE_OPTIMIZER, export_state, import_state, join_tensors, split_tensors
from slipstream.staleness.agc import Rate
from slipstream.staleness.auto_feedback import AutoErrorFeedback
from slipstream.staleness.checks import check_pairs
from slipstream.staleness.corrections import Slots, build_corrections
from slipstream.staleness.measured import Measured
from slipstream.staleness.prediction import WeightPrediction
from slipstream.staleness.publish import PublishMasters, PublishMethod, Windowed, build_publish_method
from slipstream.staleness.step_size import build_step_size
from slipstream.staleness.updater import Updater
from slipstream.staleness.versions import VersionedWeights


class StageParts:
    """Everything one rank holds of a model: the whole of it, or one pipeline stage.

    A tied pair is two leaves but one *parameter*, under the embedding's name: a stage with both leaves has one master
    for them, and when they live on two stages both keep the master and make the same update.

    Args:
        config: Resolved settings.
        spec: Which part of the model.
        num_versions: Versions of the weights held at once.
        device: Where everything lives.
        model: What it is a part of; ``None``: the decoder that the settings describe.

    Attributes:
        model: The whole, of which it is a part.
        names: Parameters of the *whole* model in module order, a tied pair once.
        modules: One module a buffer of the ring; version v is computed with ``modules[v % num_versions]``.
        leaves: The leaf parameters of each module, by leaf name.
        parameter_of: Parameter name of each leaf name.
        tied_pair: Leaf names of a tied embedding and head, wherever they live; ``None``: the model ties nothing.
        updater: The update path over the masters held here.
        step_size: Its factor on the rate by staleness.
        router_log: What the routers of all modules note; empty without experts.
    """

    def __init__(
        self,
        config: Config,
        spec: StageSpec,
        *,
        num_versions: int,
        device: torch.device,
        model: ModelParts | None = None,
    ) -> None:
        self.model = model = model or llama_parts(config)
        tied = model.tied
        self.spec = spec
        self.names = master_names(model)
        module = model.build(spec, device)
        self.tied_pair = tied_pair(model)
        self.parameter_of = {leaf: tied.get(leaf, leaf) for leaf, _ in module.named_parameters()}
        initial = {self.parameter_of[leaf]: tensor.detach() for leaf, tensor in module.named_parameters()}
        masters = {name: nn.Parameter(tensor.to(torch.float32, copy=True)) for name, tensor in initial.items()}
        dtype = getattr(torch, config.train.compute_dtype)
        weights = VersionedWeights(initial, num_buffers=num_versions, dtype=dtype)
        self.router_log = RouterLog(batch_share=1 / config.pipeline.num_microbatches)
        attach_log(module, self.router_log)
        self.modules = [module] + [copy.deepcopy(module) for _ in range(num_versions - 1)]
        self.leaves = [
            bind(each, {leaf: weights.buffer(version)[name] for leaf, name in self.parameter_of.items()})
            for version, each in enumerate(self.modules)
        ]
        self._mixed: nn.Module | None = None
        optimizers = build_optimizers(masters, config.optim, role=model.role)
        factor = rate_factor(config.optim, num_steps=config.train.num_steps)
        self.step_size = build_step_size(config.staleness, num_in_flight=num_versions)
        self.updater = Updater(
            masters,
            optimizers,
            weights=weights,
            publish=publish_method(config, optimizers),
            lr_factor=factor,
            max_grad_norm=config.optim.max_grad_norm,
            corrections=build_corrections(
                config.staleness,
                role=model.role,
                lr=scheduled_rate(optimizers, factor),
                warmup_steps=config.optim.lr_warmup_steps,
            ),
            step_size=self.step_size,
        )

    @property
    def owned(self) -> list[str]:
        """Parameters this rank answers for: all it holds but a tied one whose embedding lives elsewhere."""
        return [name for name in self.updater.masters if name in self.parameter_of]

    @property
    def live(self) -> range:
        """Versions of the weights that can be read now."""
        return self.updater.weights.live

    def by_parameter(self, sums: Mapping[str, Tensor]) -> dict[str, Tensor | None]:
        """Turn gradients by leaf name into gradients by parameter name; a tied pair's are added, embedding first."""
        return sum_by_parameter(sums, self.updater.masters, tied_pair=self.tied_pair)

    def module(self, version: int) -> nn.Module:
        """Return the module whose leaves hold a live version."""
        self.updater.weights.read(version)
        return self.modules[version % len(self.modules)]

    def mixed_module(self, versions: Mapping[str, int]) -> tuple[nn.Module, dict[str, nn.Parameter]]:
        """Return a module whose leaves hold each a version of its own, and those leaves.

        Args:
            versions: Live version of each leaf. Where all are the same, this is that version's own module.
        """
        weights, count = self.updater.weights, len(self.modules)
        for version in set(versions.values()):
            weights.read(version)
        if len(set(versions.values())) == 1:
            version = next(iter(versions.values()))
            return self.modules[version % count], self.leaves[version % count]
        if self._mixed is None:
            self._mixed = copy.deepcopy(self.modules[0])
        leaves = {leaf: self.leaves[version % count][leaf] for leaf, version in versions.items()}
        for leaf, parameter in leaves.items():
            owner, _, attribute = leaf.rpartition(".")
            self._mixed.get_submodule(owner).register_parameter(attribute, parameter)
        return self._mixed, leaves

    def forward_at(self, point: Point, x: Any) -> Tensor:
        """Compute one microbatch for evaluation: no dropout, no gradient.

        Args:
            point: The newest published weights ``x``, or the masters ``y`` (cast to the compute dtype).
            x: As the stage takes it.
        """
        weights = self.updater.weights
        values: Mapping[str, Tensor] = weights.read(weights.latest)
        if point == "y":
            values = {name: master.detach().to(values[name].dtype) for name, master in self.updater.masters.items()}
        with torch.no_grad():
            tensors = {leaf: values[name] for leaf, name in self.parameter_of.items()}
            output: Tensor = functional_call(self.modules[0], tensors, (x,))
        return output

    def snapshot(self) -> Snapshot:
        """Return a copy, on the host, of all state that a resumed run needs."""
        tensors: dict[str, Tensor] = {}
        scalars: dict[str, Any] = {
            "updater": self.updater.state_dict(),
            "step_size": self.step_size.state_dict(),
            "optim": {},
        }
        weights = self.updater.weights
        for name in self.owned:
            tensors[f"y/{name}"] = self.updater.masters[name]
            for version in weights.live:
                tensors[f"x@{version}/{name}"] = weights.read(version)[name]
        for optimizer in self.updater.optimizers.values():
            for name, state in export_state(optimizer).items():
                if name in self.parameter_of or name == WHOLE_OPTIMIZER:
                    held, scalars["optim"][name] = split_tensors(state)
                    tensors |= {f"optim/{name}/{path}": tensor for path, tensor in held.items()}
        for prefix, slots in self._slots().items():
            tensors |= slot_tensors(prefix, slots, names=self.parameter_of)
        copies = {name: tensor.detach().to("cpu", copy=True).contiguous() for name, tensor in tensors.items()}
        return Snapshot(tensors=copies, scalars=scalars)

    def _slots(self) -> dict[str, Slots]:
        """Return what methods against staleness keep, by the beginning of its path in a checkpoint."""
        slots = {f"correction/{position}": each.slots for position, each in enumerate(self.updater.corrections)}
        return {**slots, "publish": self.updater.publish.slots}

    def method_metrics(self) -> dict[str, float]:
        """Return what corrections, the discount and error feedback tell of themselves, by name."""
        found = self._error_feedback_by_role()
        for method in (*self.updater.corrections, self.step_size):
            if isinstance(method, Measured):
                found |= method.metrics()
        return found

    def _error_feedback_by_role(self) -> dict[str, float]:
        """Return the mean coefficient by role, where error feedback sets it itself."""
        coefficients = self.updater.publish.coefficients()
        if not coefficients:
            return {}
        by_role: dict[str, list[float]] = {}
        for name, value in zip(coefficients, torch.stack(list(coefficients.values())).tolist(), strict=True):
            by_role.setdefault(f"error_feedback/{self.model.role(name)}", []).append(value)
        return {kind: sum(held) / len(held) for kind, held in by_role.items()}

    def restore(self, state: StateReader) -> None:
        """Take the parts of a saved state that this rank holds."""
        updater = self.updater
        with torch.no_grad():
            for name, master in updater.masters.items():
                master.copy_(state.tensor(f"y/{name}"))
        versions = {int(name[2:].split("/")[0]) for name in state.tensor_names if name.startswith("x@")}
        updater.weights.restore(
            {version: {n: state.tensor(f"x@{version}/{n}") for n in updater.masters} for version in versions}
        )
        optim_state = {
            name: join_tensors(tree, partial(_read_optim_tensor, state, name))
            for name, tree in state.scalars["optim"].items()
            if name in updater.masters or name == WHOLE_OPTIMIZER
        }
        for optimizer in updater.optimizers.values():
            import_state(optimizer, optim_state)
        for prefix, slots in self._slots().items():
            restore_slots(prefix, slots, state, updater.masters)
        updater.load_state_dict(state.scalars["updater"])
        if state.scalars.get("step_size"):  # absent in a checkpoint of an older version
            self.step_size.load_state_dict(state.scalars["step_size"])


def llama_parts(config: Config) -> LlamaParts:
    """Return the model that a run's settings describe."""
    return LlamaParts(
        cfg=config.model,
        microbatch_size=config.train.microbatch_size,
        sequence_length=config.data.sequence_length,
        compile=config.train.compile,
    )


def sum_by_parameter(
    sums: Mapping[str, Tensor], names: Iterable[str], *, tied_pair: tuple[str, str] | None
) -> dict[str, Tensor | None]:
    """Turn gradients by leaf name into gradients by parameter name.

    Args:
        sums: By leaf name.
        names: Parameters wanted.
        tied_pair: Leaf names of a tied embedding and head, whose gradients are added, embedding first.
    """
    gradients = {name: sums.get(name) for name in names}
    if tied_pair is not None and tied_pair[1] in sums:
        embedding, head = tied_pair
        held = gradients[embedding]
        gradients[embedding] = sums[head] if held is None else held + sums[head]
    return gradients


def scheduled_rate(optimizers: Mapping[str, torch.optim.Optimizer], factor: Callable[[int], float]) -> Rate:
    """Return the rate of a parameter at an update, as the schedule has it.

    Args:
        optimizers: Whose groups hold ``param_names`` and ``initial_lr``.
        factor: Rate of an update (from 1) as a fraction of the peak.
    """
    groups = [group for optimizer in optimizers.values() for group in optimizer.param_groups]
    peaks = {name: float(group["initial_lr"]) for group in groups for name in group["param_names"]}
    return lambda name, update: peaks[name] * factor(update)


def slot_tensors(prefix: str, slots: Slots, *, names: Container[str] | None = None) -> dict[str, Tensor]:
    """Return slots as tensors by path.

    Args:
        prefix: Begins the paths.
        slots: By slot and parameter name.
        names: Parameters to take; ``None``: all.
    """
    return {
        f"{prefix}/{slot}/{name}": tensor
        for slot, held in slots.items()
        for name, tensor in held.items()
        if names is None or name in names
    }


def restore_slots(prefix: str, slots: Slots, state: StateReader, masters: Mapping[str, Tensor]) -> None:
    """Fill slots with what :func:`slot_tensors` gave of the parameters held here."""
    for slot, held in slots.items():
        begin = f"{prefix}/{slot}/"
        names = [name for name in masters if begin + name in state.tensor_names]
        held.update({name: state.tensor(begin + name).to(masters[name].device) for name in names})


def publish_method(config: Config, optimizers: Mapping[str, torch.optim.Optimizer]) -> PublishMethod:
    """Return the publish method that the settings name.

    Raises:
        ConfigError: Settings make no sense together, or the optimizer lacks what a prediction reads.
    """
    check_pairs(config)
    staleness = config.staleness
    method = _error_feedback(staleness.error_feedback, delay=staleness.delay or 0)
    if staleness.prediction != "none":
        num_steps = staleness.prediction_steps or float(staleness.delay or 0)
        method = WeightPrediction(staleness.prediction, num_steps=num_steps, optimizers=optimizers)
    if method.changes_weights and (staleness.sync_until_step or staleness.sync_from_step):
        # Batch b makes update b + 1; the version that the first batch without delay reads must be y already.
        last = staleness.sync_from_step - 2 if staleness.sync_from_step else None
        return Windowed(method, first=staleness.sync_until_step + 1, last=last)
    return method


def check_update_path(config: Config) -> None:
    """Refuse an optimizer or a publish method that cannot take the decoder's parameters, before anything is written.

    Raises:
        ConfigError: As :func:`build_optimizers` and :func:`publish_method`.
    """
    shapes = parameter_shapes(config.model).items()
    params = {name: nn.Parameter(torch.zeros(()).expand(shape)) for name, shape in shapes}  # of one number's memory
    publish_method(config, build_optimizers(params, config.optim, role=role))


def _error_feedback(coefficient: Coefficient, *, delay: int) -> PublishMethod:
    if coefficient != "auto":
        return build_publish_method(coefficient)
    # What is not delayed has nothing to foretell.
    return AutoErrorFeedback(delay=delay) if delay else PublishMasters()


def _read_optim_tensor(state: StateReader, name: str, path: str) -> Tensor:
    return state.tensor(f"optim/{name}/{path}")


def bind(module: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, nn.Parameter]:
    """Replace a module's parameters by new leaves that share the given tensors' memory.

    Args:
        module: Changed in place.
        tensors: A tensor for every parameter name of the module.

    Returns:
        The new leaves by name.
    """
    leaves = {name: nn.Parameter(tensor) for name, tensor in tensors.items()}
    for name, leaf in leaves.items():
        owner, _, attribute = name.rpartition(".")
        module.get_submodule(owner).register_parameter(attribute, leaf)
    return leaves
