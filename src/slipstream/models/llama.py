"""A Llama-style decoder, whole or one pipeline stage of it.

Shapes are written as suffixes of names:
    B batch, T time, D model width, H query heads, K key/value heads, C channels of a head, F feed-forward width,
    V vocabulary

    tokens_BT -> embed -> x_BTD -> blocks 0 .. L-1 -> head (norm, matrix) -> logits_BTV

    block:  x = x + dropout(attention(attention_norm(x)))
            x = x + dropout(ffn(ffn_norm(x)))

Any split into stages computes the same numbers, bit for bit: parameters are drawn by their global name, dropout
masks by (batch, microbatch, layer, site), and nothing depends on what else the process holds.
"""

import hashlib
from functools import partial
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from slipstream.compiled import while_training
from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.moe import MicrobatchKey, MixtureOfExperts
from slipstream.models.roles import role
from slipstream.models.rotary import rotary_tables, rotate
from slipstream.models.shapes import check_complete, expert_layers, head_dim, shared_width, tied_names

IGNORED_TARGET = -100
"""A target that does not count in the loss."""


def build_stage(
    cfg: ModelConfig,
    blocks: range,
    *,
    embed: bool,
    head: bool,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    compile: bool = False,
) -> "Stage":
    """Build a part of the model with its initial weights.

    Args:
        cfg: The model.
        blocks: Global indices of the blocks to hold.
        embed: Whether to hold the embedding.
        head: Whether to hold the final norm and the head.
        device: Where to put the parameters; ``meta`` gives shapes without memory or weights.
        dtype: Type of the parameters and of the activations.
        compile: Whether what its blocks compute is compiled while they train; mixtures of experts are not.

    Raises:
        ConfigError: Settings that do not describe a model, ``vocab_size`` still 0, or blocks that it does not have.

    Cost: The parameters, and while drawing them one more of them where device or dtype is not float32 on the CPU.

    Example:
        >>> cfg = ModelConfig(num_layers=4, dim=8, num_heads=2, vocab_size=5)
        >>> stage = build_stage(cfg, range(2, 4), embed=False, head=True)
        >>> stage(torch.zeros(1, 3, 8)).shape
        torch.Size([1, 3, 5])
    """
    check_complete(cfg)
    if any(layer not in range(cfg.num_layers) for layer in blocks):
        raise ConfigError(
            f"the blocks {blocks} were asked for, but model.num_layers is {cfg.num_layers}: allowed are 0 to "
            f"{cfg.num_layers - 1}."
        )
    device = torch.device(device)
    stage = Stage(cfg, blocks, embed=embed, head=head, device=device, dtype=dtype, compile=compile)
    if device.type != "meta":
        _draw_weights(stage, cfg)
    return stage


def whole_model(cfg: ModelConfig, *, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> "Stage":
    """Build all blocks with embedding and head; as :func:`build_stage`."""
    return build_stage(cfg, range(cfg.num_layers), embed=True, head=True, device=device, dtype=dtype)


def cross_entropy_sum(logits_BTV: Tensor, targets_BT: Tensor) -> Tensor:
    """Return the cross-entropy in nats, summed over the targets that count.

    The sum, not the mean: who knows the number of valid tokens of the whole batch divides by it, once.

    Args:
        logits_BTV: Scores before the softmax; narrower types than float32 are widened first.
        targets_BT: int64 token ids; ``IGNORED_TARGET`` where a position must not count.

    Returns:
        A scalar, at least float32.
    """
    wide_BTV = logits_BTV.to(torch.promote_types(logits_BTV.dtype, torch.float32))
    return F.cross_entropy(wide_BTV.flatten(0, -2), targets_BT.flatten(), ignore_index=IGNORED_TARGET, reduction="sum")


class Stage(nn.Module):
    """Some blocks of the decoder, with or without embedding and head, under the names they have in the whole.

    Parameters are leaves of their own everywhere, a tied embedding and head included: who updates them keeps the pair
    equal. They may be swapped by reference between forwards (``module._parameters[name] = other``), even while a
    backward pass is outstanding: it uses those that its forward read, with activation checkpointing too. Their values
    must not be changed in place in between. Memory comes uninitialised: :func:`build_stage` draws the weights.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        blocks: range,
        *,
        embed: bool,
        head: bool,
        device: torch.device,
        dtype: torch.dtype,
        compile: bool = False,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self._compile = compile
        self.embed = Embedding(cfg.vocab_size, cfg.dim, device=device, dtype=dtype) if embed else None
        self.blocks = nn.ModuleDict({str(layer): Block(cfg, layer, device=device, dtype=dtype) for layer in blocks})
        self.head = Head(cfg, device=device, dtype=dtype) if head else None

    def forward(self, x: Tensor, *, dropout_key: MicrobatchKey | None = None) -> Tensor:
        """Run the stage.

        Args:
            x: With the embedding, int64 tokens (B, T); without, activations (B, T, D) of the stage before.
            dropout_key: (batch, microbatch), from which the dropout masks follow; none: evaluation, no dropout.

        Returns:
            With the head, logits (B, T, V); without, activations (B, T, D).
        """
        x_BTD = x if self.embed is None else self.embed(x)
        rotary = rotary_tables(x_BTD, head_dim=head_dim(self.cfg), theta=self.cfg.rope_theta)
        for block in self.blocks.values():
            if self.cfg.activation_checkpointing and torch.is_grad_enabled():
                # The weights go in as arguments, so that recomputation finds those of this forward even if others
                # have been put in their places since. No RNG state to restore: masks come from the key.
                weights = dict(block.named_parameters())
                arguments = (block, weights, (x_BTD, rotary, dropout_key), {"compile": self._compile})
                x_BTD = checkpoint(functional_call, *arguments, use_reentrant=False, preserve_rng_state=False)
            else:
                x_BTD = block(x_BTD, rotary, dropout_key, compile=self._compile)
        return x_BTD if self.head is None else cast(Tensor, self.head(x_BTD))


class Linear(nn.Linear):
    """A matrix without bias, left uninitialised: weights are drawn by name once the stage stands."""

    def __init__(self, in_features: int, out_features: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(in_features, out_features, bias=False, device=device, dtype=dtype)

    def reset_parameters(self) -> None:
        """Leave the memory and the global random state as they are."""


class Embedding(nn.Embedding):
    """A row a token, left uninitialised as :class:`Linear`."""

    def reset_parameters(self) -> None:
        """Leave the memory and the global random state as they are."""


class Head(Linear):
    """Final norm, then one score a token of the vocabulary."""

    def __init__(self, cfg: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__(cfg.dim, cfg.vocab_size, device=device, dtype=dtype)
        self.norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return logits (B, T, V)."""
        return super().forward(self.norm(x_BTD))


class Block(nn.Module):
    """Attention and feed-forward, each normed before, dropped out after and added to the residual stream."""

    def __init__(self, cfg: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.cfg = cfg
        self.layer = layer
        # torch's RMSNorm takes the mean square in float32 also where its input is narrower.
        self.attention_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, device=device, dtype=dtype)
        self.attention = Attention(cfg, device=device, dtype=dtype)
        self.ffn_norm = nn.RMSNorm(cfg.dim, eps=cfg.norm_eps, device=device, dtype=dtype)
        self.ffn = _feed_forward(cfg, layer, device=device, dtype=dtype)

    def forward(
        self,
        x_BTD: Tensor,
        rotary: tuple[Tensor, Tensor],
        dropout_key: MicrobatchKey | None,
        *,
        compile: bool = False,
    ) -> Tensor:
        """Return the residual stream after the block (B, T, D)."""
        x_BTD = while_training(Block.attend, compile=compile)(self, x_BTD, rotary, dropout_key)
        # The sizes of experts' shares differ from batch to batch.
        compile &= not isinstance(self.ffn, MixtureOfExperts)
        return while_training(Block.feed, compile=compile)(self, x_BTD, dropout_key)

    def attend(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor], dropout_key: MicrobatchKey | None) -> Tensor:
        """Return the residual stream after the attention (B, T, D)."""
        return x_BTD + self._dropped(self.attention(self.attention_norm(x_BTD), rotary), "attention", dropout_key)

    def feed(self, x_BTD: Tensor, dropout_key: MicrobatchKey | None) -> Tensor:
        """Return the residual stream after the feed-forward (B, T, D)."""
        ffn = partial(self.ffn, key=dropout_key) if isinstance(self.ffn, MixtureOfExperts) else self.ffn
        return x_BTD + self._dropped(ffn(self.ffn_norm(x_BTD)), "ffn", dropout_key)

    def _dropped(self, x_BTD: Tensor, site: str, dropout_key: MicrobatchKey | None) -> Tensor:
        if self.cfg.dropout == 0 or dropout_key is None:
            return x_BTD
        seed = stable_seed("dropout", self.cfg.seed, *dropout_key, self.layer, site)
        generator = torch.Generator(x_BTD.device).manual_seed(seed)
        kept_BTD = torch.rand(x_BTD.shape, generator=generator, device=x_BTD.device) >= self.cfg.dropout
        return x_BTD * (kept_BTD / (1 - self.cfg.dropout)).to(x_BTD.dtype)


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions: H query heads share K key/value heads."""

    def __init__(self, cfg: ModelConfig, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.channels = head_dim(cfg)
        self.window = cfg.sliding_window
        q_width, kv_width = cfg.num_heads * self.channels, cfg.num_kv_heads * self.channels
        self.q = Linear(cfg.dim, q_width, device=device, dtype=dtype)
        self.k = Linear(cfg.dim, kv_width, device=device, dtype=dtype)
        self.v = Linear(cfg.dim, kv_width, device=device, dtype=dtype)
        self.o = Linear(q_width, cfg.dim, device=device, dtype=dtype)
        # One norm for all heads, over the channels of each.
        norm = partial(nn.RMSNorm, self.channels, eps=cfg.norm_eps, device=device, dtype=dtype)
        self.q_norm = norm() if cfg.qk_norm else None
        self.k_norm = norm() if cfg.qk_norm else None

    def forward(self, x_BTD: Tensor, rotary: tuple[Tensor, Tensor]) -> Tensor:
        """Return the attended values (B, T, D); position t sees positions 0 to t, or as many of them as the window."""
        q_BTHC = self.q(x_BTD).unflatten(-1, (-1, self.channels))
        k_BTKC = self.k(x_BTD).unflatten(-1, (-1, self.channels))
        if self.q_norm is not None and self.k_norm is not None:
            q_BTHC, k_BTKC = self.q_norm(q_BTHC), self.k_norm(k_BTKC)
        q_BTHC, k_BTKC = rotate(q_BTHC, rotary), rotate(k_BTKC, rotary)
        v_BTKC = self.v(x_BTD).unflatten(-1, (-1, self.channels))
        q, k, v = (each.transpose(1, 2) for each in (q_BTHC, k_BTKC, v_BTKC))
        if 0 < self.window < x_BTD.shape[1]:
            mask_TT = window_mask(x_BTD.shape[1], self.window, device=x_BTD.device)
            out_BHTC = F.scaled_dot_product_attention(q, k, v, attn_mask=mask_TT, enable_gqa=True)
        else:
            out_BHTC = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return cast(Tensor, self.o(out_BHTC.transpose(1, 2).flatten(-2)))


class FeedForward(nn.Module):
    """SwiGLU: down(silu(gate(x)) * up(x)), inner width F."""

    def __init__(self, dim: int, inner: int, *, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.gate = Linear(dim, inner, device=device, dtype=dtype)
        self.up = Linear(dim, inner, device=device, dtype=dtype)
        self.down = Linear(inner, dim, device=device, dtype=dtype)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Return (B, T, D)."""
        return cast(Tensor, self.down(F.silu(self.gate(x_BTD)) * self.up(x_BTD)))


def _feed_forward(
    cfg: ModelConfig, layer: int, *, device: torch.device, dtype: torch.dtype
) -> FeedForward | MixtureOfExperts:
    """Return a block's feed-forward: one for all tokens, or experts to choose from."""
    if layer not in expert_layers(cfg):
        return FeedForward(cfg.dim, cfg.ffn_dim, device=device, dtype=dtype)
    width = shared_width(cfg)
    shared = FeedForward(cfg.dim, width, device=device, dtype=dtype) if width else None
    return MixtureOfExperts(cfg, layer, shared=shared, device=device, dtype=dtype)


def window_mask(num_positions: int, window: int, *, device: torch.device | str = "cpu") -> Tensor:
    """Return which positions (columns) each position (rows) sees: itself and the ``window - 1`` before it.

    Example:
        >>> window_mask(4, 2).int().tolist()
        [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]

    Source: Jiang et al., Mistral 7B, arXiv 2310.06825, section 2.
    """
    ones = torch.ones(num_positions, num_positions, dtype=torch.bool, device=device)
    return ones.tril().triu(1 - window)


@torch.no_grad()
def _draw_weights(stage: Stage, cfg: ModelConfig) -> None:
    """Fill norms with 1 and matrices with normal numbers that depend on the seed and the global name alone."""
    tied = tied_names(cfg)
    for name, parameter in stage.named_parameters():
        kind = role(name)
        if kind == "norm":
            parameter.fill_(1.0)
            continue
        # What writes to the residual stream is smaller, since 2 L such terms add up (GPT-2's rule).
        writes = kind in ("o", "ffn_down", "expert_down")
        std = cfg.init_std / (2 * cfg.num_layers) ** 0.5 if writes else cfg.init_std
        generator = torch.Generator().manual_seed(stable_seed("weights", cfg.seed, tied.get(name, name)))
        # Drawn as float32 on the CPU always: the same weights on any device, rounded to dtype.
        plain = parameter.device.type == "cpu" and parameter.dtype == torch.float32
        drawn = parameter if plain else torch.empty(parameter.shape, dtype=torch.float32)
        parameter.copy_(drawn.normal_(0.0, std, generator=generator))


def stable_seed(*parts: str | int) -> int:
    """Return a seed that is the same in every process, unlike Python's own hash."""
    text = "/".join(map(str, parts))
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1
