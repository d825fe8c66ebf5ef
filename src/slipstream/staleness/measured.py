"""What a method tells of itself while it works."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Measured(Protocol):
    """A correction or a discount with figures of its own, beside what every step reports."""

    def metrics(self) -> dict[str, float]:
        """Return figures by name, each name beginning with the method's."""
