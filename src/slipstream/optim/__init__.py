"""Rules that turn a gradient into an update, their step sizes, and their state by parameter name."""

from slipstream.optim.build import build_optimizers, check_optim, find_rule
from slipstream.optim.lr import lr_factor
from slipstream.optim.muon import Muon, newton_schulz
from slipstream.optim.state import export_state, import_state, join_tensors, split_tensors

__all__ = [
    "Muon",
    "build_optimizers",
    "check_optim",
    "export_state",
    "find_rule",
    "import_state",
    "join_tensors",
    "lr_factor",
    "newton_schulz",
    "split_tensors",
]
