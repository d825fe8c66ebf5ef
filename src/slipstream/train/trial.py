"""The optimizer's trial step, where it leaves nothing behind."""

import torch

from slipstream.config import Config
from slipstream.errors import ConfigError
from slipstream.optim.build import check_optim


def try_optim(config: Config, *, device: torch.device, trains_here: bool) -> list[str]:
    """Check the optimizer as :func:`slipstream.optim.build.check_optim` does.

    A process that only starts others and waits for them tries on the host: a step on CUDA would make a context there,
    which holds hundreds of megabytes of the first rank's device as long as the run lasts. What the host refuses is
    tried where it will be done, since some rules are for CUDA alone.

    Args:
        config: Resolved settings.
        device: Where the run will compute.
        trains_here: Whether this process does.

    Returns:
        Warnings.

    Raises:
        ConfigError: The optimizer cannot be used.
    """
    if not trains_here:
        try:
            return check_optim(config.optim, num_steps=config.train.num_steps)
        except ConfigError:
            if device.type == "cpu":
                raise
    return check_optim(config.optim, num_steps=config.train.num_steps, device=device)
