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

    def add(self, entries: Mapping[Tensor, dict[str, Any]]) -> None:
        """Put these entries where they belong: beside the rule's own state where there is some, else to wait."""
        for param, entry in entries.items():
            if entry:
                self.write(param).update(entry)

    def add_waiting(self, optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
        """Add the entries that wait outside to a state_dict of the optimizer."""
        for index, param in enumerate(parameters(optimizer)):
            if param in self._waiting:
                state_dict["state"][index] = {**state_dict["state"].get(index, {}), **self._waiting[param]}


def saved_entries(
    optimizer: Optimizer, state_dict: Mapping[str, Any], *, keys: Iterable[Collection[str]]
) -> dict[Tensor, dict[str, Any]]:
    """Return copies of the entries in a state_dict that is about to be loaded, in the types they were saved in.

    Args:
        optimizer: The one that it will be loaded into.
        state_dict: Its ``param_groups`` name the parameters, by number or otherwise, in the optimizer's order.
        keys: As in :func:`complete`.
    """
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    entries = [complete(state_dict["state"].get(name, {}), keys=keys) for name in names]
    return {
        param: {key: _copied(value, param) for key, value in entry.items()}
        for param, entry in zip(parameters(optimizer), entries, strict=False)  # torch compares their numbers
    }


def without_entries(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state_dict as the rule itself made it.

    Loading would cast the entries to their parameters' types, and some rules (AdamW) take any entry for their own.
    """
    states = {
        name: {key: value for key, value in state.items() if not _is_ours(key)} if isinstance(state, Mapping) else state
        for name, state in state_dict["state"].items()
    }
    kept = {name: state for name, state in states.items() if state or not state_dict["state"][name]}
    return {**state_dict, "state": kept}


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
