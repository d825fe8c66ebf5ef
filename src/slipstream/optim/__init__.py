"""Rules that turn a gradient into an update, their step sizes, and their state by parameter name."""

from slipstream.optim.basis_rotation import BasisRotation
from slipstream.optim.build import build_optimizers, check_optim
from slipstream.optim.lr import lr_factor
from slipstream.optim.muon import Muon, newton_schulz
from slipstream.optim.normuon import NorMuon
from slipstream.optim.rules import find_rule
from slipstream.optim.state import export_state, import_state, join_tensors, split_tensors

__all__ = [
    "BasisRotation",
    "Muon",
    "NorMuon",
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
