"""Who has to say something by when."""

import time
from collections.abc import Hashable
from typing import Generic, TypeVar

Who = TypeVar("Who", bound=Hashable)


class Awaited(Generic[Who]):
    """Who has to say something that no lease's deadline watches over: that it is ready, or how fast it is.

    Args:
        timeout_s: How long each may take.
    """

    def __init__(self, timeout_s: float) -> None:
        self.timeout_s = timeout_s
        self._due: dict[Hashable, tuple[float, Who]] = {}  # the first is due first

    def expect(self, who: Who, *, by: Hashable) -> None:
        """Wait from now on.

        Args:
            who: For whom.
            by: What the word comes by; one may have several.
        """
        self.forget(by)
        self._due[by] = time.monotonic() + self.timeout_s, who

    def forget(self, by: Hashable) -> None:
        """The word is here, or will not come."""
        self._due.pop(by, None)

    def rest_s(self, timeout_s: float | None) -> float | None:
        """Return for how long to listen: so long, but not beyond the moment when the first is due."""
        for due_s, _ in self._due.values():
            rest_s = max(0.0, due_s - time.monotonic())
            return rest_s if timeout_s is None else min(rest_s, timeout_s)
        return timeout_s

    def late(self) -> list[Who]:
        """Return those whose time is over."""
        now_s = time.monotonic()
        return list(dict.fromkeys(who for due_s, who in self._due.values() if due_s <= now_s))
