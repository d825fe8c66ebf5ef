"""The one update path: finite? -> clip -> correct -> optimizer step -> publish."""

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from slipstream.errors import StalenessError
from slipstream.staleness.corrections import Correction
from slipstream.staleness.gradient import Gradient, clip
from slipstream.staleness.publish import PublishMethod
from slipstream.staleness.step_size import FullStep, StepSize
from slipstream.staleness.versions import VersionedWeights


@dataclasses.dataclass(frozen=True, kw_only=True)
class UpdateReport:
    """What one update did.

    Attributes:
        version: The version it made; also the number of updates so far.
        staleness: Versions between the weights the gradient read and the newest when it was applied; the largest,
            where several gradients made the update.
        grad_norm: Global norm before clipping.
        lr_factor: Learning rate as a fraction of the peak.
        skipped: The gradient was not finite: the weights stayed, the version went on.
    """

    version: int
    staleness: int
    grad_norm: float
    lr_factor: float
    skipped: bool


class Updater:
    """Owns the master weights of a set of parameters and is the only code that changes them.

    The delay simulator in one process, a pipeline stage and a parameter-server shard each hold one; none has an
    update of its own.

    Args:
        masters: Master weights y by name, float32 (float64 in tests of exactness), each a leaf the optimizers hold.
        optimizers: Unmodified torch optimizers over the masters, by the name of their rule; together they hold each
            master once. Each group's ``initial_lr`` is its peak rate.
        weights: The published versions; must hold the masters' names.
        publish: Writes x from y.
        lr_factor: Rate of update k (from 1) as a fraction of the peak.
        max_grad_norm: Global norm above which a gradient is scaled down; 0: never.
        corrections: Applied in order to each clipped gradient.
        step_size: A factor on the rate by staleness; ``None``: none.
    """

    def __init__(
        self,
        masters: Mapping[str, Tensor],
        optimizers: Mapping[str, torch.optim.Optimizer],
        *,
        weights: VersionedWeights,
        publish: PublishMethod,
        lr_factor: Callable[[int], float],
        max_grad_norm: float = 0.0,
        corrections: Sequence[Correction] = (),
        step_size: StepSize | None = None,
    ) -> None:
        self.masters = dict(masters)
        self.optimizers = dict(optimizers)
        self.weights = weights
        self.publish = publish
        self.num_skipped = 0
        self._lr_factor = lr_factor
        self._max_grad_norm = max_grad_norm
        self.corrections = tuple(corrections)
        self._step_size = step_size or FullStep()

    def step(self, gradient: Gradient, grad_norm: Tensor) -> UpdateReport:
        """Turn a gradient into the next version of the weights: :meth:`prepare`, then :meth:`apply`.

        Args:
            gradient: For the names of :attr:`masters`.
            grad_norm: Scalar global norm of the *whole* model's gradient, of which this updater may hold a part. Not
                finite: the update is skipped, here as on every other holder, and the versions stay aligned.

        Raises:
            StalenessError: The gradient read a version newer than the newest, or one that is no longer held.
        """
        staleness = self.staleness_of(gradient)
        prepared = self.prepare(gradient, grad_norm)
        return self.apply(prepared, stalenesses=(staleness,), grad_norm=float(grad_norm))

    def staleness_of(self, gradient: Gradient) -> int:
        """Return the updates between the version that a gradient read and the newest.

        Raises:
            StalenessError: It read a version newer than the newest.
        """
        staleness = self.weights.latest - gradient.read_version
        if staleness < 0:
            raise StalenessError(
                f"a gradient claims to have read version {gradient.read_version}, the newest is {self.weights.latest}."
            )
        return staleness

    def prepare(
        self, gradient: Gradient, grad_norm: Tensor, *, read: Mapping[str, Tensor] | None = None
    ) -> Gradient | None:
        """Clip a gradient and correct it for its staleness; several may be prepared for one :meth:`apply`.

        Args:
            gradient: For the names of :attr:`masters`; its tensors are scaled in place.
            grad_norm: As in :meth:`step`.
            read: The weights that it was computed on, by name, where :attr:`weights` does not hold them any more; may
                be empty where no correction looks at them.

        Returns:
            What to apply; ``None``: it is not finite.

        Raises:
            StalenessError: As in :meth:`step`.
        """
        staleness = self.staleness_of(gradient)
        if not math.isfinite(float(grad_norm)):
            return None
        clip(gradient.tensors.values(), grad_norm, limit=self._max_grad_norm)
        if read is None:
            read = self._weights_read(gradient)
        for correction in self.corrections:
            gradient = correction.correct(gradient, staleness=staleness, now=self.masters, read=read)
        return gradient

    def apply(self, gradient: Gradient | None, *, stalenesses: Sequence[int], grad_norm: float) -> UpdateReport:
        """Make the next version of the weights of what :meth:`prepare` gave.

        Args:
            gradient: One, or the mean of several; ``None``: the version goes on, the weights stay.
            stalenesses: Of each gradient that it is made of, in the order of their arrival.
            grad_norm: To report.
        """
        update = self.weights.latest + 1
        factor = self._lr_factor(update) * self._step_size.factor(update=update, stalenesses=stalenesses)
        # Also where the step is skipped: what is published may look at the rate.
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = group["initial_lr"] * factor
        # The buffer of the version that was read may be the one written next, so nothing below may look at it.
        published = self.weights.buffer(update)
        self.publish.before_step(self.masters, published, update=update)
        if gradient is None:
            self.num_skipped += 1
        else:
            self._step_optimizers(gradient)
        self.publish.after_step(self.masters, published)
        return UpdateReport(
            version=self.weights.advance(),
            staleness=max(stalenesses),
            grad_norm=grad_norm,
            lr_factor=factor,
            skipped=gradient is None,
        )

    def _weights_read(self, gradient: Gradient) -> Mapping[str, Tensor]:
        oldest = self.weights.read(gradient.read_version)
        if gradient.read_versions is None:
            return oldest
        return {name: self.weights.read(version)[name] for name, version in gradient.read_versions.items()}

    def _step_optimizers(self, gradient: Gradient) -> None:
        for name, master in self.masters.items():
            master.grad = gradient.tensors[name]
        for optimizer in self.optimizers.values():
            optimizer.step()
        for master in self.masters.values():
            master.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the scalars of the state; tensors are saved by name from the public attributes."""
        return {"num_skipped": self.num_skipped, "publish": self.publish.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what :meth:`state_dict` gave."""
        self.num_skipped = int(state["num_skipped"])
        publish = state["publish"]
        self.publish.load_state_dict(publish.get("method", publish))  # within a window, older versions nested it
