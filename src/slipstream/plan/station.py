"""A queue in front of something that serves one message at a time. Imports no torch."""


class Station:
    """A link or processor of the server that serves one message at a time, in the order of their coming.

    Args:
        service_s: Seconds that a message takes of it.
        least_s: Seconds that a message takes in all, if it takes longer elsewhere meanwhile.

    Example:
        >>> link = Station(service_s=1.0, least_s=3.0)
        >>> link.serve(0.0), link.serve(0.0), link.busy_s(1.5)
        (3.0, 4.0, 1.5)
    """

    def __init__(self, *, service_s: float, least_s: float = 0.0) -> None:
        self._service_s = service_s
        self._least_s = least_s
        self._free_s = 0.0
        self._total_s = 0.0

    def serve(self, at_s: float) -> float:
        """Take in a message; return when it is through."""
        start_s = max(at_s, self._free_s)
        self._free_s = start_s + self._service_s
        self._total_s += self._service_s
        return start_s + max(self._service_s, self._least_s)

    def busy_s(self, until_s: float) -> float:
        """Return the seconds served up to a moment."""
        return self._total_s - min(self._total_s, max(0.0, self._free_s - until_s))
