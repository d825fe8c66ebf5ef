"""A model of yours as the pipeline takes it: any ``nn.Module`` that says where its embedding, blocks and head are."""

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from slipstream.compiled import while_training
from slipstream.errors import ConfigError
from slipstream.models.llama import stable_seed
from slipstream.models.own_stage import CallBlock, OwnStage
from slipstream.models.partition import StageSpec
from slipstream.models.parts import Loss
from slipstream.models.roles import Role

Names = str | tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class OwnModel:
    """Where the parts of a module of yours are.

    It is trained as ``head(blocks[n-1](... blocks[0](embed(inputs))))``; its own ``forward`` is not called. What
    embedding and blocks give are tensors of one shape.

    With more than one stage, ``build``, ``loss``, ``call_block`` and ``role`` are sent to other processes, so they must
    be functions of a module's top level.

    Example:
        >>> def build():
        ...     blocks = nn.Sequential(nn.Tanh(), nn.Linear(8, 8))
        ...     return nn.ModuleDict({"embed": nn.Linear(4, 8), "blocks": blocks, "head": nn.Linear(8, 2)})
        >>> def loss(output, targets):
        ...     return nn.functional.mse_loss(output, targets, reduction="sum")
        >>> parts = OwnParts(OwnModel(build=build, loss=loss), torch.ones(3, 4), torch.ones(3, 2), seed=0)
        >>> parts.num_blocks, parts.message_shape, parts.role("blocks.1.weight"), parts.role("head.bias")
        (2, (3, 8), 'matrix', 'bias')
    """

    build: Callable[[], nn.Module]
    """Makes the module on the CPU, the same one in every process: torch's seed is set before it is called."""
    loss: Loss
    """Output and targets -> the loss *summed* over the units (images, ratings, tokens) that the batch says it has."""
    embed: Names = "embed"
    """Name of the submodule that takes the inputs, such as ``model.embed_tokens``; or several, called in turn."""
    blocks: str = "blocks"
    """Name of the container of the blocks: a ModuleList, Sequential or ModuleDict."""
    head: Names = "head"
    """Name of the submodule that gives the output; or several, called in turn."""
    call_block: CallBlock | None = None
    """``(stage, block, x) -> x``, for blocks that need more than x. ``stage`` has the submodules of your module by
    their names, so that tables which all blocks share are found there; what has no parameters is on every stage."""
    costs: tuple[float, ...] | None = None
    """Cost of each block, by which stages are cut; ``None``: its number of parameters."""
    role: Callable[[str], Role] | None = None
    """Role of a parameter by its name; ``None``: matrices of blocks, and stacks of them, are ``matrix``, which Muon
    takes; weights of embeddings and convolutions are not."""


class OwnParts:
    """An :class:`OwnModel`, built, checked, and tried on one microbatch.

    Args:
        model: Where its parts are.
        inputs: Of one microbatch.
        targets: Of one microbatch.
        seed: Of the initial weights and of dropout.
        compile: Whether blocks and loss are compiled while they train.
        dtype: Which parameters and inputs of floats are cast to in training, and so in the trial.

    Raises:
        ConfigError: A part is missing, a parameter belongs to none, parameters are shared other than between embedding
            and head, a forward changes state, cannot be computed in ``dtype``, or stages could not hand over what
            blocks give.

    Cost:
        Memory for the whole model on the host of every rank, twice while a stage is built.
    """

    router_layers: Sequence[int] = ()

    def __init__(
        self,
        model: OwnModel,
        inputs: Any,
        targets: Any,
        *,
        seed: int,
        compile: bool = False,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        self._model = model
        self._compile = compile
        self._seed = seed
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(stable_seed("weights", seed))
            self._whole = model.build()
        self._embed, self._head = _as_names(model.embed), _as_names(model.head)
        for name in (*self._embed, model.blocks, *self._head):
            _check_submodule(self._whole, name)
        blocks = self._whole.get_submodule(model.blocks)
        self._blocks = [f"{model.blocks}.{name}" for name, _ in blocks.named_children()]
        if not self._blocks:
            raise ConfigError(f"the module's '{model.blocks}' holds no blocks. Name a ModuleList with at least one.")
        self.tied: Mapping[str, str] = self._untie()
        self.names: Sequence[str] = [name for name, _ in self._whole.named_parameters()]
        self._check_parameters()
        self._check_state()
        self._roles = {name: self._role_of(name, parameter) for name, parameter in self._whole.named_parameters()}
        self.message_shape = self._shape_in(dtype, inputs, targets)

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return len(self._blocks)

    def costs(self) -> Sequence[float]:
        """Return the cost of each block; the head's is the last one's too."""
        given = self._model.costs
        if given is None:
            costs = [1.0 + self._num_parameters(name) for name in self._blocks]
            costs[-1] += sum(map(self._num_parameters, self._head))
            return costs
        if len(given) != len(self._blocks):
            raise ConfigError(f"costs has {len(given)} numbers, the model {len(self._blocks)} blocks. Give one each.")
        return given

    def build(self, spec: StageSpec, device: torch.device) -> nn.Module:
        """Return a part of the model."""
        return self._stage(spec).to(device)

    def role(self, name: str) -> Role:
        """Return what a parameter is for."""
        return self._roles[name]

    def loss_sum(self, output: Tensor, targets: Any) -> Tensor:
        """Return the loss, summed over units."""
        return while_training(self._model.loss, compile=self._compile)(output, targets)

    def check_cuts(self, specs: Sequence[StageSpec]) -> None:
        """Make sure that every stage has something to train.

        Raises:
            ConfigError: One has not.
        """
        for number, spec in enumerate(specs):
            calls = [name for name, _ in self._calls(spec)]
            if not sum(map(self._num_parameters, calls)):
                raise ConfigError(
                    f"stage {number} would hold {', '.join(calls)}, which have no parameters. Use fewer stages, or "
                    "give costs by which each stage gets some."
                )

    def _calls(self, spec: StageSpec) -> list[tuple[str, int]]:
        calls = [(name, -1) for name in self._embed] if spec.embed else []
        calls += [(self._blocks[i], i) for i in spec.blocks]
        return calls + ([(name, len(self._blocks)) for name in self._head] if spec.head else [])

    def _stage(self, spec: StageSpec) -> OwnStage:
        return OwnStage(
            copy.deepcopy(self._whole),
            self._calls(spec),
            num_blocks=len(self._blocks),
            call_block=self._model.call_block,
            seed=self._seed,
            compile=self._compile,
        )

    def _untie(self) -> dict[str, str]:
        """Give the head a leaf of its own where it shares the embedding's; return the pair by name."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, parameter in list(self._whole.named_parameters(remove_duplicate=False)):
            other = first.setdefault(id(parameter), name)
            if other == name:
                continue
            embedding = next((each for each in (other, name) if _lies_in(each, self._embed)), None)
            head = next((each for each in (other, name) if _lies_in(each, self._head)), None)
            if tied or embedding is None or head is None or embedding == head:
                raise ConfigError(
                    f"the parameters '{other}' and '{name}' are one. Supported is one such pair, of embed and head."
                )
            tied = {head: embedding}
        for name in tied:
            owner, _, attribute = name.rpartition(".")
            weight = self._whole.get_parameter(name).detach().clone()
            self._whole.get_submodule(owner).register_parameter(attribute, nn.Parameter(weight))
        return tied

    def _check_parameters(self) -> None:
        for name, parameter in self._whole.named_parameters():
            if not _lies_in(name, (*self._embed, *self._blocks, *self._head)):
                raise ConfigError(
                    f"the parameter '{name}' belongs to none of {', '.join(self._embed)} (embed), {self._model.blocks} "
                    f"(blocks) and {', '.join(self._head)} (head), so no stage would train it. Name its module in "
                    "embed or head, or move it into one of them."
                )
            if not (parameter.is_floating_point() and parameter.requires_grad):
                raise ConfigError(
                    f"the parameter '{name}' is of the type {parameter.dtype} with requires_grad "
                    f"{parameter.requires_grad}, but every parameter is trained. Keep constants in buffers."
                )

    def _check_state(self) -> None:
        for name, module in self._whole.named_modules():
            if getattr(module, "track_running_stats", False):
                raise ConfigError(
                    f"'{name}' ({type(module).__name__}) keeps running statistics, which every forward changes: state "
                    "that belongs to no version of the weights. Use a norm without them, such as LayerNorm."
                )

    def _role_of(self, name: str, parameter: nn.Parameter) -> Role:
        if self._model.role is not None:
            return self._model.role(name)
        if parameter.ndim < 2:
            return "bias" if name.endswith("bias") else "norm"
        if _lies_in(name, self._embed):
            return "embedding"
        if _lies_in(name, self._head):
            return "head"
        owner = self._whole.get_submodule(name.rpartition(".")[0])
        if isinstance(owner, nn.Embedding | nn.EmbeddingBag):
            return "embedding"  # a look-up, wherever it stands: positions, or a bias table of attention
        if isinstance(owner, nn.modules.conv._ConvNd):
            return "other"  # its last two sides are no matrix: of a depthwise Conv1d each filter would be one
        return "matrix" if parameter.ndim in (2, 3) else "other"

    def _num_parameters(self, name: str) -> int:
        return sum(parameter.numel() for parameter in self._whole.get_submodule(name).parameters())

    def _shape_in(self, dtype: torch.dtype, inputs: Any, targets: Any) -> tuple[int, ...]:
        """Try the model out as it will be trained; return the shape of what embedding and blocks give."""
        try:
            return self._try_out(dtype, inputs, targets)
        except RuntimeError as error:
            if dtype == torch.float32:
                raise
            shape = self._try_out(torch.float32, inputs, targets)  # raises what has nothing to do with the type
            if isinstance(error, NotImplementedError):
                return shape  # on the host, where it is tried; on CUDA it may well be
            short = str(dtype).removeprefix("torch.")
            raise ConfigError(
                f"the model computes in float32, but not in {short} (train.compute_dtype): "
                f"{str(error).splitlines()[0]}. Parameters and inputs of floats are cast, buffers and tensors made in "
                "a forward keep their type: cast those where they are used, as in x + self.table.to(x.dtype)."
            ) from error

    @torch.no_grad()
    def _try_out(self, dtype: torch.dtype, inputs: Any, targets: Any) -> tuple[int, ...]:
        """Run one microbatch through; return the shape of what embedding and blocks give."""
        stage = self._stage(StageSpec(blocks=range(len(self._blocks)), embed=True, head=True))
        for parameter in stage.parameters():
            parameter.data = parameter.data.to(dtype)
        shapes: dict[str, tuple[int, ...]] = {}

        def watch(name: str, x: Any) -> None:
            if not isinstance(x, Tensor):
                raise ConfigError(f"'{name}' gives {type(x).__name__}; each part must give one tensor.")
            shapes[name] = tuple(x.shape)

        loss = self._model.loss(stage(inputs, watch=watch), targets)
        if not isinstance(loss, Tensor) or loss.ndim:
            shown = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            raise ConfigError(f"loss gives {shown}; it must give a scalar tensor, summed over units.")
        begin = self._embed[-1]
        for name in self._blocks:
            if shapes[name] != shapes[begin]:
                raise ConfigError(
                    f"'{name}' gives a tensor of shape {shapes[name]}, '{begin}' one of {shapes[begin]}. Stages hand "
                    "over tensors of one shape: let embedding and blocks all give the same."
                )
        return shapes[begin]


def _as_names(names: Names) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else names


def _lies_in(name: str, places: Sequence[str]) -> bool:
    return any(name.startswith(f"{place}.") for place in places)


def _check_submodule(whole: nn.Module, name: str) -> None:
    try:
        whole.get_submodule(name)
    except AttributeError as error:
        known = ", ".join(each for each, _ in whole.named_children()) or "none"
        raise ConfigError(
            f"the module has no submodule '{name}' ({error}). It has: {known}. Name embed, blocks and head as they are "
            "called in your module."
        ) from error
