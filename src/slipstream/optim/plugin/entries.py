"""Where the plug-in keeps what belongs to one parameter: in the optimizer's own state, once that exists."""

from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

PREFIX = "slipstream_"
"""Begins every key that the plug-in adds to a parameter's state."""


def parameters(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters as they are grouped now: wrappers exchange them, and some step one group at a time."""
    for group in optimizer.param_groups:
        yield from group["params"]


class Entries:
    """One dict a parameter, inside ``optimizer.state[param]``, beside what the optimizer's rule keeps there.

    A rule takes an entry that is not empty for one that it has filled itself, and torch.distributed.checkpoint takes an
    ``optimizer.state`` that is not empty for a complete one. So an entry waits outside until the rule has made its own,
    and is added to the state_dict on the way out.

    Values are tensors of the parameter's shape and whole numbers, which flattened and sharded checkpoints carry.
    Nothing is kept in ``param_groups``, where a new key would make older flattened checkpoints unreadable.

    Args:
        state: ``optimizer.state`` as it is now.
        waiting: Entries whose parameters have no state yet; changed in place.
    """

    def __init__(self, state: dict[Any, Any], waiting: dict[Tensor, dict[str, Any]]) -> None:
        self._state = state
        self._waiting = waiting

    def read(self, param: Tensor) -> dict[str, Any]:
        """Return an entry, empty if there is none, without creating one."""
        found = self._find(param)
        return {} if found is None else found

    def write(self, param: Tensor) -> dict[str, Any]:
        """Return an entry to be changed."""
        found = self._find(param)
        return self._waiting.setdefault(param, {}) if found is None else found

    def _find(self, param: Tensor) -> dict[str, Any] | None:
        # .get: asking optimizer.state[param] would create the parameter's state.
        entry: dict[str, Any] | None = self._state.get(param)
        if not entry:
            return self._waiting.get(param)
        if param in self._waiting:
            entry.update(self._waiting.pop(param))
        return entry

    def settle(self, params: Iterable[Tensor]) -> None:
        """Move waiting entries into the optimizer's state; its rule has stepped on these parameters."""
        for param in params:
            if param in self._waiting:
                # A rule without state (plain SGD) has made no entry; then this is all there is.
                self._state[param].update(self._waiting.pop(param))

    def unsettle(self, params: Iterable[Tensor]) -> None:
        """Move entries out of states that hold nothing else."""
        for param in params:
            entry = self._state.get(param)
            if entry and all(_is_ours(key) for key in entry):
                self._waiting[param] = self._state.pop(param)

    def drop(self, params: Iterable[Tensor]) -> None:
        """Remove every trace."""
        self._waiting.clear()
        for param in params:
            entry = self._state.get(param)
            if entry:
                for key in [key for key in entry if _is_ours(key)]:
                    del entry[key]
                if not entry:
                    del self._state[param]

    def replace(self, params: Iterable[Tensor], entries: Mapping[Tensor, Mapping[str, Any]]) -> None:
        """Put these entries, or none, in place of whatever the parameters' states hold of the plug-in."""
        for param in params:
            entry = self._state.get(param, {})
            for key in [key for key in entry if _is_ours(key)]:
                del entry[key]
            if entries.get(param):
                self._state[param].update(entries[param])

    def add_waiting(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the entries that wait outside to a state_dict of the optimizer."""
        for index, param in enumerate(parameters(optimizer)):
            if param in self._waiting:
                state_dict["state"][index] = {**state_dict["state"].get(index, {}), **self._waiting[param]}


def saved_entries(
    optimizer: Optimizer, state_dict: Mapping[str, Any], *, keys: Iterable[Collection[str]]
) -> dict[Tensor, dict[str, Any]]:
    """Return copies of the entries in a state_dict that is about to be loaded, in the types they were saved in.

    ``load_state_dict`` casts every floating tensor to its parameter's type; these are put back after it.

    Args:
        optimizer: The one that it will be loaded into.
        state_dict: Its ``param_groups`` name the parameters, by number or otherwise, in the optimizer's order.
        keys: As in :func:`complete`.
    """
    names = [name for group in state_dict.get("param_groups", ()) for name in group["params"]]
    states = state_dict.get("state", {})
    return {
        param: {key: _copied(value, param) for key, value in complete(states.get(name, {}), keys=keys).items()}
        for name, param in zip(names, parameters(optimizer), strict=False)
    }


def complete(entry: Mapping[str, Any], *, keys: Iterable[Collection[str]]) -> dict[str, Any]:
    """Return what an entry holds of the attached methods.

    Args:
        entry: One parameter's state.
        keys: What an entry consists of, for each method. Where some of a method's keys are missing, it has none:
            torch's flattened loading makes empty dicts of what an older checkpoint lacks.
    """
    return {
        key: entry[key]
        for method_keys in keys
        if all(isinstance(entry.get(key), Tensor | int) for key in method_keys)
        for key in method_keys
    }


def _copied(value: Any, param: Tensor) -> Any:
    return value.detach().to(param.device).clone() if isinstance(value, Tensor) else value


def _is_ours(key: Any) -> bool:
    return isinstance(key, str) and key.startswith(PREFIX)
