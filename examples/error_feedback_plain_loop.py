"""Error feedback in a loop of your own: what a step of delay costs, and how much of it comes back.

A byte-level model is trained three times from the same weights on the same batches: as usual; with every gradient one
step late, as in a pipeline that never flushes; and so with error feedback. The loop does not know which it is.

    python examples/error_feedback_plain_loop.py
"""

import gzip
import importlib.resources

import torch
from torch import nn

from slipstream.optim.plugin import Delay, ErrorFeedback, attach

CONTEXT, BATCH, STEPS = 16, 64, 200


def text_bytes() -> torch.Tensor:
    """The text that comes with the package, as byte values."""
    packed = importlib.resources.files("slipstream").joinpath("data/texts/shakespeare.txt.gz").read_bytes()
    return torch.frombuffer(bytearray(gzip.decompress(packed)[:500_000]), dtype=torch.uint8).long()


def build_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Embedding(256, 24), nn.Flatten(), nn.Linear(24 * CONTEXT, 128), nn.GELU(), nn.Linear(128, 256)
    )


def train(*methods: Delay | ErrorFeedback) -> float:
    """Return the mean loss of the last 50 steps, in nats a byte."""
    text, model = text_bytes(), build_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3, betas=(0.9, 0.95))
    if methods:
        attach(optimizer, *methods)  # the one line that is not in every loop
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=STEPS)
    order = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(STEPS):
        starts = torch.randint(len(text) - CONTEXT, (BATCH,), generator=order)
        windows = text[starts[:, None] + torch.arange(CONTEXT + 1)]
        loss = nn.functional.cross_entropy(model(windows[:, :-1]), windows[:, -1])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return sum(losses[-50:]) / 50


def main() -> None:
    arms = {"synchronous": (), "delay 1": (Delay(1),), "delay 1, error feedback": (Delay(1), ErrorFeedback(c=1.0))}
    for name, methods in arms.items():
        print(f"{name:24}  {train(*methods):.3f} nats/byte")


if __name__ == "__main__":
    main()
