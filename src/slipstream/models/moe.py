"""A mixture of experts: each token goes through a few of many feed-forwards, chosen by a router.

Shapes are written as suffixes of names:
    B batch, T time, N = B T positions, D model width, E experts, K experts a token, F inner width of an expert,
    S = N K slots, one for each expert that a position goes to

    x_ND -> router (matrix, softmax over E, top K) -> slots sorted by expert
         -> down(silu(gate(x)) * up(x)) of each expert on its own slots -> back in order, weighted, summed over K
         (+ the shared expert, through which every position goes)

No expert has a capacity, so no token is dropped. Slots move by permutations, whose gradients are permutations, and sums
run over a dimension of fixed length: nothing is accumulated in an order that the hardware chooses.

**What is per microbatch.** The balance loss is a product of two means, the share of slots and the mean probability of
an expert, and both are taken over the positions of one microbatch, padding and uncounted targets included. A batch's
balance loss is the mean over its microbatches. So its gradient is the same for any number of stages and any schedule,
and slightly another for another number of microbatches; that of the z-loss, a mean over positions, and that of the
cross-entropy are the same there too.

**An expert without tokens** in a batch has a gradient of zero, not none, for the experts of a layer are one tensor. Its
momentum fades and still moves it, and weight decay goes on; the gradient's norm does not notice it.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from slipstream.config import ModelConfig
from slipstream.models.shapes import expert_width

MicrobatchKey = tuple[int, int]
"""(batch, microbatch): what dropout masks and routers' notes are of"""


class RouterReport(NamedTuple):
    """What the router of one layer did in one batch."""

    load_max: float
    """Slots of the fullest expert, over the mean of all: 1 is balance, E / K the most."""
    load_min: float
    """Slots of the emptiest expert, over the mean."""
    entropy: float
    """Of a position's probabilities, in nats, mean over positions; ln E at most."""
    aux_loss: float
    """What balance loss and z-loss, with their coefficients, add to the batch's loss."""


class RouterLog:
    """What the routers of a stage note while they train, until a batch is taken.

    Args:
        batch_share: Weight of a microbatch in its batch. The auxiliary losses of a microbatch count by it, as its
            cross-entropy does: one divided by the number of microbatches.
    """

    def __init__(self, *, batch_share: float = 1.0) -> None:
        self.batch_share = batch_share
        self._notes: dict[MicrobatchKey, dict[int, Tensor]] = {}

    def __deepcopy__(self, memo: Mapping[int, Any]) -> "RouterLog":
        """Return itself: the modules of all versions of the weights note in one log."""
        return self

    def note(self, key: MicrobatchKey, layer: int, numbers: Tensor) -> None:
        """Keep a forward's numbers; activation checkpointing, which computes them again, changes nothing."""
        self._notes.setdefault(key, {})[layer] = numbers

    def take(self, batch: int) -> dict[int, Tensor]:
        """Return the figures of a batch by layer, after its last backward, and forget them.

        Returns:
            The fields of :class:`RouterReport` as float64 vectors.
        """
        return self._taken(sorted(key for key in self._notes if key[0] == batch))

    def take_of(self, keys: Iterable[MicrobatchKey]) -> dict[int, Tensor]:
        """Return the figures of some microbatches, as :meth:`take` does."""
        return self._taken(sorted(key for key in keys if key in self._notes))

    def take_all(self) -> dict[int, Tensor]:
        """Return the figures of all microbatches noted, of whatever batches, as :meth:`take` does."""
        return self._taken(sorted(self._notes))

    def _taken(self, keys: Sequence[MicrobatchKey]) -> dict[int, Tensor]:
        sums: dict[int, Tensor] = {}
        for layer, numbers in ((layer, numbers) for key in keys for layer, numbers in self._notes.pop(key).items()):
            sums[layer] = sums[layer] + numbers if layer in sums else numbers
        return {layer: _report(numbers) for layer, numbers in sums.items()}


def attach_log(module: nn.Module, log: RouterLog) -> None:
    """Let every mixture of experts inside a module, and inside its copies, note in a log."""
    for each in module.modules():
        if isinstance(each, MixtureOfExperts):
            each.log = log


class MixtureOfExperts(nn.Module):
    """The feed-forward of a block, split into experts of which each token takes a few.

    Args:
        cfg: The model.
        layer: Global index of the block.
        shared: A feed-forward for all tokens, beside the chosen ones; ``None``: there is none.
        device: Where the parameters go.
        dtype: Their type. The router computes in float32 at least, whatever it is.

    Cost:
        K of E experts' FLOPs a token, all E experts' memory. Three matrix products an expert, whatever its load: many
        small experts keep a device less busy than few large ones. Activations of K experts and K copies of the input.
        Each forward waits for the device to say how many slots an expert has, and breaks a compiled graph there.

    Source:
        Shazeer et al., arXiv 1701.06538; shared experts: Dai et al., DeepSeekMoE, arXiv 2401.06066.
    """

    def __init__(
        self,
        cfg: ModelConfig,
        layer: int,
        *,
        shared: nn.Module | None,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self.cfg = cfg
        self.layer = layer
        experts, width, inner = cfg.num_experts, cfg.dim, expert_width(cfg)
        self.router = Packed(experts, width, device=device, dtype=dtype)
        self.expert_gate = Packed(experts, inner, width, device=device, dtype=dtype)
        self.expert_up = Packed(experts, inner, width, device=device, dtype=dtype)
        self.expert_down = Packed(experts, width, inner, device=device, dtype=dtype)
        self.shared = shared
        self.log: RouterLog | None = None

    def forward(self, x_BTD: Tensor, key: MicrobatchKey | None) -> Tensor:
        """Return the weighted sum of the chosen experts, and of the shared one, (B, T, D).

        Args:
            x_BTD: Normed activations.
            key: (batch, microbatch): the auxiliary losses join the backward pass, and the log has a note. ``None``:
                evaluation, neither of them.
        """
        x_ND = x_BTD.flatten(0, -2)
        routes = route(x_ND, self.router.weight, cfg=self.cfg)
        weights_NK = routes.weights
        if key is not None:
            share = 1.0 if self.log is None else self.log.batch_share
            loss = share * auxiliary_loss(routes, cfg=self.cfg)
            weights_NK = with_added_loss(weights_NK, loss)
            if self.log is not None:
                self.log.note(key, self.layer, _numbers(routes, loss))
        out_ND = self._experts(x_ND, routes.experts, weights_NK)
        if self.shared is not None:
            out_ND = out_ND + self.shared(x_ND)
        return out_ND.view_as(x_BTD)

    def _experts(self, x_ND: Tensor, experts_NK: Tensor, weights_NK: Tensor) -> Tensor:
        num_choices = experts_NK.shape[1]
        order_S = experts_NK.flatten().argsort(stable=True)
        counts = experts_NK.flatten().bincount(minlength=self.cfg.num_experts).tolist()
        # Copied first and permuted then: the gradient sums the K copies in order, where that of one gather of rows
        # that occur K times would add them up in whatever order.
        copies_SD = x_ND.unsqueeze(1).expand(-1, num_choices, -1).flatten(0, 1)
        rows = torch.split(copies_SD.index_select(0, order_S), counts)
        # unbind, not indexing: its gradient is one stack of the experts' gradients, without E tensors of full size.
        matrices = [each.weight.unbind() for each in (self.expert_gate, self.expert_up, self.expert_down)]
        outputs = [
            F.linear(F.silu(F.linear(own, gate)) * F.linear(own, up), down)
            for own, gate, up, down in zip(rows, *matrices, strict=True)
        ]
        out_NKD: Tensor = torch.cat(outputs).index_select(0, order_S.argsort()).view(-1, num_choices, x_ND.shape[1])
        weighted_NKD: Tensor = out_NKD * weights_NK.unsqueeze(-1).to(out_NKD.dtype)
        return weighted_NKD.sum(1)


class Packed(nn.Module):
    """A tensor of parameters, (experts, width) or (experts, out, in), left uninitialised."""

    def __init__(self, *shape: int, device: torch.device, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(shape, device=device, dtype=dtype))


class Routes(NamedTuple):
    """Where a router sends each position."""

    logits: Tensor
    """(N, E): Scores, at least float32."""
    probabilities: Tensor
    """(N, E): Softmax of the scores over all experts."""
    experts: Tensor
    """(N, K): int64 experts of each position, the likeliest first."""
    weights: Tensor
    """(N, K): What their outputs are weighted with."""


def route(x_ND: Tensor, weight_ED: Tensor, *, cfg: ModelConfig) -> Routes:
    """Choose the experts of each position.

    Scores are computed in float32 also where activations are narrower: two experts whose scores differ by less than
    bfloat16 can tell would be chosen by chance.

    Args:
        x_ND: Normed activations.
        weight_ED: The router's matrix.
        cfg: ``experts_per_token`` K; ``router_renormalize``: divide the K chosen probabilities by their sum.
    """
    wide = torch.promote_types(x_ND.dtype, torch.float32)
    logits_NE = F.linear(x_ND.to(wide), weight_ED.to(wide))
    probabilities_NE = logits_NE.softmax(-1)
    weights_NK, experts_NK = probabilities_NE.topk(cfg.experts_per_token, dim=-1)
    if cfg.router_renormalize:
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
    return Routes(logits_NE, probabilities_NE, experts_NK, weights_NK)


def auxiliary_loss(routes: Routes, *, cfg: ModelConfig) -> Tensor:
    r"""Return balance loss and z-loss of one microbatch, with their coefficients.

    .. math:: a E \sum_e f_e P_e + z \frac{1}{N} \sum_n (\log \sum_e \exp s_{ne})^2

    with f_e the share of slots that expert e has, without gradient, and P_e its mean probability: 1 where either is
    even. The z-loss keeps scores small, where float32 and softmax are precise.

    Args:
        routes: Of all positions of the microbatch.
        cfg: ``router_aux_loss`` a, ``router_z_loss`` z.

    Returns:
        A scalar, at least float32.

    Source:
        Fedus et al., Switch Transformers, arXiv 2101.03961, equation 4, with f over slots for K > 1;
        z-loss: Zoph et al., ST-MoE, arXiv 2202.08906, equation 5.
    """
    loss = routes.logits.new_zeros(())
    if cfg.router_aux_loss:
        counts_E = routes.experts.flatten().bincount(minlength=cfg.num_experts)
        shares_E = counts_E.to(loss.dtype) / routes.experts.numel()
        loss = loss + cfg.router_aux_loss * cfg.num_experts * (shares_E * routes.probabilities.mean(0)).sum()
    if cfg.router_z_loss:
        loss = loss + cfg.router_z_loss * routes.logits.logsumexp(-1).square().mean()
    return loss


def with_added_loss(carrier: Tensor, loss: Tensor) -> Tensor:
    """Return the carrier unchanged; a backward pass through it also brings the gradient of the loss.

    So a loss can arise in the middle of the model, on whatever stage: it needs no way to the end, where the
    cross-entropy is, and its gradient does not depend on how the model is cut. It is that of adding the loss to the one
    that the backward pass started from, which must not be scaled.

    Args:
        carrier: On the path from weights to the loss at the end.
        loss: Scalar.

    Source: the idea is that of Megatron-LM's ``MoEAuxLossAutoScaler``.
    """
    return cast(Tensor, _AddedLoss.apply(carrier, loss))  # type: ignore[no-untyped-call]  # torch's own


class _AddedLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, loss: Tensor) -> Tensor:
        ctx.one = loss.new_ones(())
        return carrier.view_as(carrier)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        return gradients[0], ctx.one


@torch.no_grad()
def _numbers(routes: Routes, loss: Tensor) -> Tensor:
    """Return what adds up over microbatches: slots by expert, positions, their entropies, loss; float64 (E + 3,)."""
    num_positions, num_experts = routes.probabilities.shape
    counts_E = routes.experts.flatten().bincount(minlength=num_experts).double()
    entropy = torch.special.entr(routes.probabilities).sum(dtype=torch.float64)
    return torch.cat((counts_E, torch.stack((counts_E.new_tensor(num_positions), entropy, loss.double()))))


def _report(numbers: Tensor) -> Tensor:
    counts_E, (num_positions, entropy, loss) = numbers[:-3], numbers[-3:].unbind()
    mean = counts_E.mean()
    return torch.stack((counts_E.max() / mean, counts_E.min() / mean, entropy / num_positions, loss))
