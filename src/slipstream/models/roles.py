"""What a parameter is for, told by its name. Optimizers are chosen by role, never by shape alone.

A tied head on the last stage is a matrix like any other by shape; only its role keeps it from Muon.
"""

from typing import Literal, get_args

from slipstream.errors import ConfigError

Role = Literal[
    "embedding",
    "head",
    "norm",
    "q",
    "k",
    "v",
    "o",
    "ffn_gate",
    "ffn_up",
    "ffn_down",
    "expert_gate",
    "expert_up",
    "expert_down",
    "router",
    "bias",
    "matrix",
    "other",
]
"""`matrix`: of a block, of a model that has other names than ours; `other`: what AdamW takes, whatever it is."""

_ROLE_OF_MODULE: dict[str, Role] = {
    "embed": "embedding",
    "head": "head",
    "norm": "norm",
    "attention_norm": "norm",
    "ffn_norm": "norm",
    "q_norm": "norm",
    "k_norm": "norm",
    "q": "q",
    "k": "k",
    "v": "v",
    "o": "o",
    "gate": "ffn_gate",
    "up": "ffn_up",
    "down": "ffn_down",
    "expert_gate": "expert_gate",
    "expert_up": "expert_up",
    "expert_down": "expert_down",
    "router": "router",
}

_MATRIX_ROLES = frozenset(
    {"q", "k", "v", "o", "ffn_gate", "ffn_up", "ffn_down", "expert_gate", "expert_up", "expert_down", "matrix"}
)


def role(name: str) -> Role:
    """Return the role of a parameter by its global name.

    The module that owns the parameter decides; prefixes that wrappers put before the name do not matter.

    Args:
        name: A dotted name such as ``blocks.0.attention.q.weight``.

    Raises:
        ConfigError: No role is known for the owning module.

    Example:
        >>> role("blocks.0.attention.q.weight"), role("head.norm.weight"), role("head.weight")
        ('q', 'norm', 'head')
    """
    module, _, leaf = name.rpartition(".")
    owner = module.rpartition(".")[2]
    if owner not in _ROLE_OF_MODULE or leaf not in ("weight", "bias"):
        raise ConfigError(
            f"no role is known for the parameter '{name}'. Known are weights and biases of modules named "
            f"{', '.join(_ROLE_OF_MODULE)}. For a model with other names, give a role function of your own that "
            f"returns one of {', '.join(get_args(Role))}."
        )
    return "bias" if leaf == "bias" else _ROLE_OF_MODULE[owner]


def is_matrix_role(role: str) -> bool:
    """Return whether a role is that of a matrix inside a block, which matrix rules such as Muon may take.

    Embedding, head, norms, biases and routers are not.

    Example:
        >>> is_matrix_role("ffn_up"), is_matrix_role("head")
        (True, False)
    """
    return role in _MATRIX_ROLES
