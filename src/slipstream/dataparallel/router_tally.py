"""What the routers of the experts did in the gradients of a step. Imports no torch."""

from collections.abc import Sequence

RouterRows = tuple[tuple[float, ...], ...]
"""Of each layer with experts the fields of :class:`~slipstream.models.moe.RouterReport`: means over microbatches."""


class RouterTally:
    """Collects the figures of gradients until a step is made of them.

    A worker knows the loads of its own microbatches alone, so a step's largest and smallest load are means over its
    gradients, weighted by tokens, not those of all its tokens together.

    Example:
        >>> tally = RouterTally()
        >>> tally.add([(2.0, 0.0)], weight=1)
        >>> tally.add([(1.0, 1.0)], weight=3)
        >>> tally.take(), tally.take()
        (((1.25, 0.75),), ())
    """

    def __init__(self) -> None:
        self._rows: list[tuple[float, Sequence[Sequence[float]]]] = []

    def add(self, rows: Sequence[Sequence[float]], *, weight: float) -> None:
        """Take the figures of a gradient, a row a layer; none of a model without experts."""
        if rows:
            self._rows.append((weight, rows))

    def take(self) -> RouterRows:
        """Return the means since the last step, and begin anew."""
        means = mean_rows(self._rows)
        self._rows = []
        return means

    def state_dict(self) -> list[tuple[float, list[list[float]]]]:
        """Return the state as plain JSON values."""
        return [(weight, [list(row) for row in rows]) for weight, rows in self._rows]

    def load_state_dict(self, state: Sequence[tuple[float, Sequence[Sequence[float]]]]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self._rows = [(weight, rows) for weight, rows in state]


def mean_rows(weighted: Sequence[tuple[float, Sequence[Sequence[float]]]]) -> RouterRows:
    """Return the weighted means of figures, layer by layer and field by field."""
    if not weighted:
        return ()
    weights, tables = zip(*weighted, strict=True)
    total = sum(weights)
    return tuple(
        tuple(
            sum(weight * value for weight, value in zip(weights, values, strict=True)) / total for values in zip(*rows)
        )
        for rows in zip(*tables)
    )
