"""What is known of a model before it is built: its checks, names, shapes and FLOPs. Imports no torch."""

import math

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError


def check_model(cfg: ModelConfig) -> None:
    """Check that the settings describe a model.

    A ``vocab_size`` of 0 passes: it stands for the tokenizer's, which may not have been read yet. Whatever needs the
    number itself (building, counting, cutting into stages) calls :func:`check_complete`.

    Args:
        cfg: The settings.

    Raises:
        ConfigError: A size that is not positive, heads that do not divide the width, key/value heads that do not
            divide the heads, an odd head width, a dropout outside [0, 1), or experts that cannot be chosen.

    Example:
        >>> check_model(ModelConfig(dim=100, num_heads=3))
        Traceback (most recent call last):
        ...
        slipstream.errors.ConfigError: model.num_heads is 3, which does not divide model.dim 100. ...
    """
    for name in ("num_layers", "dim", "num_heads", "num_kv_heads", "ffn_dim"):
        size = getattr(cfg, name)
        if size < 1:
            raise ConfigError(f"model.{name} is {size}. Allowed: whole numbers from 1.")
    if cfg.vocab_size < 0:
        raise ConfigError(
            f"model.vocab_size is {cfg.vocab_size}. Allowed: whole numbers from 1, or 0 for the tokenizer's."
        )
    if cfg.dim % cfg.num_heads:
        raise ConfigError(
            f"model.num_heads is {cfg.num_heads}, which does not divide model.dim {cfg.dim}. "
            f"Allowed: {_divisors(cfg.dim)}; or change model.dim."
        )
    if cfg.num_heads % cfg.num_kv_heads:
        raise ConfigError(
            f"model.num_kv_heads is {cfg.num_kv_heads}, which does not divide model.num_heads {cfg.num_heads}. "
            f"Allowed: {_divisors(cfg.num_heads)}."
        )
    if cfg.head_dim < 0:
        raise ConfigError(f"model.head_dim is {cfg.head_dim}. Allowed: even numbers from 2, or 0 for dim / num_heads.")
    if head_dim(cfg) % 2:
        quotient = f"model.dim {cfg.dim} / model.num_heads {cfg.num_heads}"
        given = f"model.head_dim {cfg.head_dim}" if cfg.head_dim else quotient
        raise ConfigError(
            f"{given} gives heads of odd width {head_dim(cfg)}, but rotary positions turn channels in pairs. Choose "
            "them so that the width is even."
        )
    if cfg.sliding_window < 0:
        raise ConfigError(
            f"model.sliding_window is {cfg.sliding_window}. Allowed: whole numbers from 1, or 0 for none."
        )
    if not 0 <= cfg.dropout < 1:
        raise ConfigError(f"model.dropout is {cfg.dropout}. Allowed: from 0 (none) to below 1.")
    for name in ("rope_theta", "norm_eps", "init_std"):
        value = getattr(cfg, name)
        if not (value > 0 and math.isfinite(value)):
            raise ConfigError(f"model.{name} is {value}. Allowed: finite numbers above 0.")
    _check_experts(cfg)


def _check_experts(cfg: ModelConfig) -> None:
    for name in ("num_experts", "expert_ffn_dim", "num_shared_experts", "num_dense_layers"):
        if getattr(cfg, name) < 0:
            raise ConfigError(f"model.{name} is {getattr(cfg, name)}. Allowed: whole numbers from 0.")
    if not cfg.num_experts:
        for name in ("num_shared_experts", "num_dense_layers"):
            if given := getattr(cfg, name):
                raise ConfigError(
                    f"model.{name} is {given}, but model.num_experts is 0: no layer has experts. Leave it at 0, or set "
                    "model.num_experts."
                )
        return
    if not 1 <= cfg.experts_per_token <= cfg.num_experts:
        raise ConfigError(
            f"model.experts_per_token is {cfg.experts_per_token}. Allowed: from 1 to model.num_experts "
            f"{cfg.num_experts}."
        )
    if cfg.experts_per_token == 1 and cfg.router_renormalize:
        raise ConfigError(
            "model.experts_per_token is 1 and model.router_renormalize is true: the one weight would always be 1, and "
            "the router would not learn whom to choose. Set model.router_renormalize to false, or take more experts."
        )
    if cfg.num_dense_layers >= cfg.num_layers:
        raise ConfigError(
            f"model.num_dense_layers is {cfg.num_dense_layers}, which leaves none of the {cfg.num_layers} layers to "
            f"experts. Allowed: from 0 to {cfg.num_layers - 1}; for a dense model set model.num_experts to 0."
        )
    for name in ("router_aux_loss", "router_z_loss"):
        value = getattr(cfg, name)
        if not 0 <= value < math.inf:
            raise ConfigError(f"model.{name} is {value}. Allowed: finite numbers from 0.")


def check_complete(cfg: ModelConfig) -> None:
    """Check as :func:`check_model`, and that the vocabulary size has been filled in.

    Raises:
        ConfigError: As :func:`check_model`, or ``vocab_size`` is still 0.
    """
    check_model(cfg)
    if cfg.vocab_size == 0:
        raise ConfigError(
            "model.vocab_size is 0, which stands for the tokenizer's number of tokens, but no tokenizer has filled it "
            "in. Give a number from 1, or fill it in: dataclasses.replace(cfg, vocab_size=tokenizer.vocab_size)."
        )


def head_dim(cfg: ModelConfig) -> int:
    """Return the channels of one attention head."""
    return cfg.head_dim or cfg.dim // cfg.num_heads


def expert_layers(cfg: ModelConfig) -> range:
    """Return the layers that have experts."""
    return range(cfg.num_dense_layers, cfg.num_layers) if cfg.num_experts else range(0)


def expert_width(cfg: ModelConfig) -> int:
    """Return the inner width of one expert."""
    return cfg.expert_ffn_dim or cfg.ffn_dim


def shared_width(cfg: ModelConfig) -> int:
    """Return the inner width of the feed-forward beside the experts; 0: there is none."""
    return cfg.num_shared_experts * expert_width(cfg)


def parameter_shapes(cfg: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of the whole model by its global name, in module order.

    Matrices are stored (out, in), as in :class:`torch.nn.Linear`; those of a layer's experts are one tensor (experts,
    out, in). A tied pair stands here as the two leaves it is.

    Raises:
        ConfigError: As :func:`check_complete`.

    Example:
        >>> shapes = parameter_shapes(ModelConfig(num_layers=1, dim=8, num_heads=2, num_kv_heads=1, vocab_size=5))
        >>> shapes["blocks.0.attention.k.weight"], shapes["head.weight"]
        ((4, 8), (5, 8))
    """
    check_complete(cfg)
    width = cfg.dim
    q_width, kv_width = cfg.num_heads * head_dim(cfg), cfg.num_kv_heads * head_dim(cfg)
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (cfg.vocab_size, width)}
    for layer in range(cfg.num_layers):
        block = f"blocks.{layer}"
        shapes |= {
            f"{block}.attention_norm.weight": (width,),
            f"{block}.attention.q.weight": (q_width, width),
            f"{block}.attention.k.weight": (kv_width, width),
            f"{block}.attention.v.weight": (kv_width, width),
            f"{block}.attention.o.weight": (width, q_width),
            **dict.fromkeys([f"{block}.attention.{n}_norm.weight" for n in "qk" if cfg.qk_norm], (head_dim(cfg),)),
            f"{block}.ffn_norm.weight": (width,),
            **{f"{block}.ffn.{name}.weight": shape for name, shape in _ffn_shapes(cfg, layer).items()},
        }
    return shapes | {"head.weight": (cfg.vocab_size, width), "head.norm.weight": (width,)}


def _ffn_shapes(cfg: ModelConfig, layer: int) -> dict[str, tuple[int, ...]]:
    def dense(prefix: str, inner: int) -> dict[str, tuple[int, ...]]:
        return {f"{prefix}gate": (inner, cfg.dim), f"{prefix}up": (inner, cfg.dim), f"{prefix}down": (cfg.dim, inner)}

    if layer not in expert_layers(cfg):
        return dense("", cfg.ffn_dim)
    packed = {name: (cfg.num_experts, *shape) for name, shape in dense("expert_", expert_width(cfg)).items()}
    shared = dense("shared.", shared_width(cfg)) if cfg.num_shared_experts else {}
    return {"router": (cfg.num_experts, cfg.dim), **packed, **shared}


def parameter_names(cfg: ModelConfig) -> list[str]:
    """Return the global name of every parameter of the whole model, in module order.

    Raises:
        ConfigError: As :func:`check_complete`.
    """
    return list(parameter_shapes(cfg))


def tied_names(cfg: ModelConfig) -> dict[str, str]:
    """Return the leaves that are held equal to another: its name by theirs; empty when nothing is tied."""
    return {"head.weight": "embed.weight"} if cfg.tie_embeddings else {}


def num_parameters(cfg: ModelConfig) -> int:
    """Return the number of weights of the whole model; a tied pair counts once.

    Raises:
        ConfigError: As :func:`check_complete`.
    """
    tied = tied_names(cfg)
    return sum(math.prod(shape) for name, shape in parameter_shapes(cfg).items() if name not in tied)


def num_active_parameters(cfg: ModelConfig) -> int:
    """Return the weights that take part in the forward pass of one token: those of the other experts do not.

    Example:
        >>> cfg = ModelConfig(vocab_size=10, num_experts=8, experts_per_token=2)
        >>> num_parameters(cfg) - num_active_parameters(cfg) == 4 * 6 * 3 * 128 * 352
        True

    Raises:
        ConfigError: As :func:`check_complete`.
    """
    idle = (cfg.num_experts - cfg.experts_per_token) * 3 * cfg.dim * expert_width(cfg)
    return num_parameters(cfg) - len(expert_layers(cfg)) * idle


def block_flops(cfg: ModelConfig, *, layer: int, sequence_length: int) -> int:
    """Return the FLOPs of one block's forward pass per token.

    2 FLOPs for each weight of its matrices, and 4 T D (D: the width of all heads together) for the attention scores
    and their weighted sum over T positions. Norms, rotary positions, softmax and the activation function are left out.

    Of experts only those count that a token goes through.

    Args:
        cfg: The model.
        layer: Index of the block.
        sequence_length: T, tokens a sequence; 0 leaves the scores out.
    """
    q_width, kv_width = cfg.num_heads * head_dim(cfg), cfg.num_kv_heads * head_dim(cfg)
    attention = 2 * q_width * cfg.dim + 2 * kv_width * cfg.dim
    ffn = 3 * cfg.dim * cfg.ffn_dim
    if layer in expert_layers(cfg):
        ffn = cfg.dim * (cfg.num_experts + 3 * (cfg.experts_per_token * expert_width(cfg) + shared_width(cfg)))
    return 2 * (attention + ffn) + 4 * sequence_length * q_width


def head_flops(cfg: ModelConfig) -> int:
    """Return the FLOPs of the head's forward pass per token: 2 V D."""
    return 2 * cfg.vocab_size * cfg.dim


def flops_per_token(cfg: ModelConfig, sequence_length: int) -> int:
    r"""Return the FLOPs that training needs for one token, forward and backward, for model FLOPs utilization.

    .. math:: 6 N + 12 L T D

    with N the weights that take part in a matrix product (blocks and head, of experts those that a token goes through;
    not the norms, and not the embedding, which is a look-up; a tied head counts, for it multiplies), L blocks, T tokens
    a sequence, or of the sliding window where that is shorter, D the width. The backward pass costs twice the forward.
    As is the custom, the attention scores count in full although the causal mask spares half of them, and recomputation
    by activation checkpointing does not count: utilization measures the work that the model needs, not the work done.

    Args:
        cfg: The model.
        sequence_length: T, tokens a sequence.

    Raises:
        ConfigError: As :func:`check_complete`.

    Example:
        >>> cfg = ModelConfig(num_layers=2, dim=8, num_heads=2, num_kv_heads=2, ffn_dim=16, vocab_size=10)
        >>> flops_per_token(cfg, 4) == 6 * (2 * (4 * 8 * 8 + 3 * 8 * 16) + 10 * 8) + 12 * 2 * 4 * 8
        True

    Source: Chowdhery et al., PaLM, arXiv 2204.02311, appendix B.
    """
    check_complete(cfg)
    positions = min(sequence_length, cfg.sliding_window or sequence_length)
    blocks = sum(block_flops(cfg, layer=layer, sequence_length=positions) for layer in range(cfg.num_layers))
    return 3 * (blocks + head_flops(cfg))


def _divisors(number: int) -> str:
    return ", ".join(str(n) for n in range(1, number + 1) if number % n == 0)
