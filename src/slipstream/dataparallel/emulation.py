"""Workers of given speeds: how long would a cycle take, whatever it takes here? Imports no torch."""

import dataclasses
import math
import random

from slipstream.settings import DataParallelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Emulation:
    """Emulated compute times.

    Args:
        microbatch_s: Seconds a microbatch at speed 1.
        speeds: Of each worker; who comes beyond them has speed 1.
        jitter: Standard deviation of the logarithm of each cycle's time; its mean stays what the speed says.
        seed: Of the jitter, a pure function of worker and cycle.
    """

    microbatch_s: float
    speeds: tuple[float, ...] = ()
    jitter: float = 0.0
    seed: int = 0

    @classmethod
    def of(cls, settings: DataParallelConfig) -> "Emulation":
        """Return what the settings of a run name; a microbatch without emulated time takes none."""
        return cls(
            microbatch_s=settings.emulate_microbatch_ms / 1000,
            speeds=settings.emulate_speeds,
            jitter=settings.emulate_jitter,
            seed=settings.seed,
        )

    def speed(self, worker: int) -> float:
        """Return a worker's nominal speed."""
        return self.speeds[worker] if worker < len(self.speeds) else 1.0

    def cycle_s(self, worker: int, cycle: int, num_microbatches: int) -> float:
        """Return the seconds of a worker's cycle.

        Args:
            worker: Who.
            cycle: Counts the worker's cycles.
            num_microbatches: In it.
        """
        seconds = num_microbatches * self.microbatch_s / self.speed(worker)
        if not self.jitter:
            return seconds
        draw = random.Random(f"{self.seed}/{worker}/{cycle}").gauss(0.0, 1.0)
        return seconds * math.exp(self.jitter * draw - self.jitter**2 / 2)
