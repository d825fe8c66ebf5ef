"""A module of your own on a pipeline that never drains: no tokens, no transformer, nothing changed in the module.

A small network tells digits of 8 x 8 pixels apart. Two processes hold half of it each and never wait for a batch to
end (PipeDream-2BW). One process with a delay of one update gives the same weights, to the last bit.

    python examples/own_model.py
"""

import tempfile
from dataclasses import replace

import torch
from torch import nn

from slipstream.own import (
    Config,
    EvaluateConfig,
    OptimConfig,
    OwnBatch,
    OwnModel,
    PipelineConfig,
    StalenessConfig,
    TrainConfig,
    fit,
)

SIGNS = ("###.#.#.##.###", ".#.##..#..#.###", "##...#.#.#..###", "##...#.#...###.", "#.##.####..#..#")
"""Digits 0 to 4 in 3 columns, drawn somewhere on 8 x 8 pixels with noise."""


class Mixer(nn.Module):
    """An ordinary module; `embed`, `blocks` and `head` are all that training needs to know."""

    def __init__(self, width: int = 48, depth: int = 4) -> None:
        super().__init__()
        self.embed = nn.Sequential(nn.Flatten(), nn.Linear(64, width))
        self.blocks = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, len(SIGNS)))

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.embed(images)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.dropout(self.down(torch.nn.functional.gelu(self.up(self.norm(x)))))


def loss(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(logits.float(), labels, reduction="sum")  # the batch divides, once


class Digits:
    """Batches by number: the same number gives the same images, in any process."""

    def __init__(self, rows: int, microbatch: int) -> None:
        self.rows, self.microbatch = rows, microbatch

    def batch(self, index: int) -> OwnBatch:
        images, labels = draw(self.rows, seed=index)
        return OwnBatch(inputs=images, targets=labels)

    def validation(self) -> list[OwnBatch]:
        drawn = (draw(self.microbatch, seed=10**6 + i) for i in range(8))
        return [OwnBatch(inputs=images, targets=labels) for images, labels in drawn]


def draw(count: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(len(SIGNS), (count,), generator=generator)
    images = torch.randn(count, 8, 8, generator=generator) * 0.4
    corners = torch.randint(0, 3, (count, 2), generator=generator)
    for image, label, (top, left) in zip(images, labels.tolist(), corners.tolist()):
        sign = [pixel == "#" for pixel in SIGNS[label].ljust(15, ".")]
        image[top : top + 5, left : left + 3] += torch.tensor(sign).view(5, 3)
    return images, labels


def main() -> None:
    torch.set_num_threads(1)
    model = OwnModel(build=Mixer, loss=loss)
    data = Digits(rows=32, microbatch=8)
    with tempfile.TemporaryDirectory() as folder:
        single = Config(
            run_dir=f"{folder}/single",
            optim=OptimConfig(name="muon", lr=0.01, adamw_lr=0.003, lr_warmup_steps=5),
            staleness=StalenessConfig(delay=1, error_feedback=1.0),
            pipeline=PipelineConfig(num_microbatches=4),
            train=TrainConfig(num_steps=60, microbatch_size=8, device="cpu"),
            evaluate=EvaluateConfig(every_steps=30),
        )
        pipeline = replace(
            single,
            run_dir=f"{folder}/pipeline",
            executor="pipeline",
            pipeline=replace(single.pipeline, num_stages=2, pipeline_schedule="two_bw"),
            staleness=replace(single.staleness, delay=None),  # the schedule gives it
        )
        one, two = (fit(model, data, config) for config in (single, pipeline))
    assert one is not None
    assert two is not None
    print(f"loss on held-out digits: {two['val_loss_before']:.3f} -> {two['val_loss']:.3f}, guessing gives 1.609")
    print(f"staleness on two stages: {two['staleness_max']} update, weights {two['weights_sha256'][:16]}")
    print(f"the same weights, to the bit, in one process: {one['weights_sha256'] == two['weights_sha256']}")


if __name__ == "__main__":
    main()
