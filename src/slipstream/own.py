"""Train a model of your own: what to import from.

::

    from slipstream.own import Config, OwnBatch, OwnModel, fit
"""

from slipstream.config import (
    CheckpointConfig,
    Config,
    EvaluateConfig,
    LogConfig,
    OptimConfig,
    PipelineConfig,
    StalenessConfig,
    TrainConfig,
)
from slipstream.models.own import OwnModel
from slipstream.train.own import OwnBatch, OwnData, fit
from slipstream.train.own_hub import own_causal_lm

__all__ = [
    "CheckpointConfig",
    "Config",
    "EvaluateConfig",
    "LogConfig",
    "OptimConfig",
    "OwnBatch",
    "OwnData",
    "OwnModel",
    "PipelineConfig",
    "StalenessConfig",
    "TrainConfig",
    "fit",
    "own_causal_lm",
]
