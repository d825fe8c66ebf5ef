"""Attaching to an optimizer and letting go of it."""

from collections.abc import Iterator
from typing import Any, TypeVar

from torch.optim import Optimizer

from slipstream.errors import ConfigError
from slipstream.optim.plugin.hooks import Hooks
from slipstream.optim.plugin.methods import Delay, ErrorFeedback

OptimizerT = TypeVar("OptimizerT")


def attach(optimizer: OptimizerT, *methods: Delay | ErrorFeedback) -> OptimizerT:
    """Delay an optimizer's gradients, look ahead along its updates, or both, from its next step on.

    Attach before a checkpoint is loaded. Afterwards works too, as state of the plug-in that the optimizer has is taken
    up, except for a checkpoint from the first tau steps of a delay. Copies made by ``copy.deepcopy`` and pickle have
    the state but, as torch makes them, no hooks; attach to them again.

    Args:
        optimizer: Any ``torch.optim.Optimizer``; or a wrapper without hooks that holds one as ``.optimizer``
            (Accelerate, DeepSpeed, Megatron-Core), or a container of several as ``.optimizers`` or
            ``.chained_optimizers`` (torchtitan, Megatron-Core): then it is those that are attached to.
        methods: One :class:`Delay`, one :class:`ErrorFeedback`, or one of each, in any order. ``Delay(0)`` and
            ``ErrorFeedback(0)`` take no part: the optimizer's steps stay bitwise what they were.

    Returns:
        The same object.

    Raises:
        ConfigError: It is no optimizer, something is attached already, or the methods are not as above.
        CheckpointError: The optimizer's state holds gradients of another delay.

    Example:
        >>> import torch
        >>> weight = torch.nn.Parameter(torch.zeros(1))
        >>> optimizer = attach(torch.optim.AdamW([weight]), ErrorFeedback(c=1.0))
        >>> is_attached(optimizer)
        True
    """
    if not methods or len({type(method) for method in methods}) < len(methods):
        raise ConfigError(f"attach: given {list(methods)}; give one Delay, one ErrorFeedback, or one of each.")
    for method in methods:
        if not isinstance(method, Delay | ErrorFeedback):
            raise ConfigError(f"attach: given {method!r}; a method is Delay(tau) or ErrorFeedback(c).")
    bases = list(_bases(optimizer))
    if any(_hooks(base) for base in bases):
        raise ConfigError(
            f"attach: {type(optimizer).__name__} has a plug-in already. Call remove(optimizer) first to change it."
        )
    for base in bases:
        Hooks(methods).install(base)
    return optimizer


def remove(optimizer: Any) -> None:
    """Go on without the plug-in: gradients that are held are dropped, and the parameters move from ``x`` to ``y``.

    ``y`` is the point that the optimizer's moments belong to. To keep ``x`` (to export it, say), copy the parameters
    first.

    Args:
        optimizer: What was given to :func:`attach`.

    Raises:
        ConfigError: Nothing is attached.
    """
    if not is_attached(optimizer):
        raise ConfigError(
            f"remove: nothing is attached to this {type(optimizer).__name__}. A copy made by copy.deepcopy or pickle "
            "has lost its hooks: attach to it again first."
        )
    for base in _bases(optimizer):
        hooks = _hooks(base)
        assert hooks is not None
        hooks.uninstall(base)


def is_attached(optimizer: Any) -> bool:
    """Return whether the plug-in is at work, on every optimizer of a container.

    Worth an assertion wherever an optimizer may have been copied, pickled or built anew (DeepSpeed does so with
    Adagrad): without its hooks training is silently synchronous.

    Args:
        optimizer: What was given to :func:`attach`, or a copy of it.
    """
    return all(_hooks(base) is not None for base in _bases(optimizer))


def _bases(optimizer: Any) -> Iterator[Optimizer]:
    """Yield the optimizers that do the steps."""
    for name in ("optimizers", "chained_optimizers"):
        parts = getattr(optimizer, name, None)
        if isinstance(parts, list | tuple) and parts:
            for part in parts:
                yield from _bases(part)
            return
    if isinstance(optimizer, Optimizer) and "_optimizer_step_pre_hooks" in vars(optimizer):
        yield optimizer
    elif hasattr(optimizer, "optimizer"):
        if optimizer.optimizer is not None:  # Megatron-Core's stubs, on ranks without parameters, hold none
            yield from _bases(optimizer.optimizer)
    else:
        raise ConfigError(
            f"given {type(optimizer).__name__}; the plug-in attaches to a torch.optim.Optimizer, or to an object that "
            "holds one as .optimizer or several as .optimizers."
        )


def _hooks(optimizer: Optimizer) -> Hooks | None:
    owners = (getattr(hook, "__self__", None) for hook in optimizer._optimizer_step_pre_hooks.values())
    return next((owner for owner in owners if isinstance(owner, Hooks)), None)
