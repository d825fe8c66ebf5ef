"""Delayed gradients and error feedback for optimizers in people's own training loops.

Two lines in a loop that stays as it is::

    from slipstream.optim.plugin import Delay, ErrorFeedback, attach

    attach(optimizer, Delay(1), ErrorFeedback(c=1.0))

It works on torch's own optimizer hooks, so the optimizer keeps its identity: schedulers, gradient scalers, Accelerate
and checkpoints see the object they saw before. Between steps the parameters are the published weights ``x``, which the
forward pass reads and ``model.state_dict()`` saves; within a step they are the optimizer's own weights ``y``. All state
is in ``optimizer.state_dict()``.
"""

from slipstream.optim.plugin.attachment import attach, is_attached, remove
from slipstream.optim.plugin.methods import Delay, ErrorFeedback

__all__ = ["Delay", "ErrorFeedback", "attach", "is_attached", "remove"]
