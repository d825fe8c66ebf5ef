"""Models that are not ours: images and a recommender without tokens, and a language model with a tied head."""

import functools

import torch
from tests.distributed.harness import Run, facts
from tests.distributed.pool import CPU, Rank
from torch import nn

from slipstream.config import Config, from_dict, resolve
from slipstream.digests import combined_digest
from slipstream.models.own import OwnModel
from slipstream.pipeline.runtime import PipelineExecutor
from slipstream.train.own import OwnBatch, open_own
from slipstream.train.single import SingleExecutor


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.2)

    def forward(self, x):
        return x + self.dropout(self.down(torch.tanh(self.up(self.norm(x)))))


class Images(nn.Module):
    """Convolution and digits: names of their own, and a head of two parts."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.Flatten(), nn.Linear(64, 12))
        self.layers = nn.Sequential(*(Block(12) for _ in range(4)))
        self.final = nn.LayerNorm(12)
        self.classes = nn.Linear(12, 5)


class Recommender(nn.Module):
    """Users and items, the rating between them; a table that all blocks read, and no bias in the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = Pair()
        self.blocks = nn.ModuleDict({name: Block(8) for name in ("first", "second", "third")})
        self.scale = Scale()
        self.head = nn.Linear(8, 1, bias=False)


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(11, 8), nn.Embedding(7, 8)

    def forward(self, inputs):
        return self.users(inputs["user"]) * self.items(inputs["item"]) + inputs["hour"][0].unsqueeze(-1)


class Scale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("table", torch.linspace(0.5, 1.5, 8))

    def forward(self):
        return self.table


class Words(nn.Module):
    """A language model whose head is its embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(9, 8)
        self.blocks = nn.ModuleList(Block(8) for _ in range(3))
        self.head = nn.Linear(8, 9, bias=False)
        self.head.weight = self.embed.weight


def class_loss(output, targets):
    return nn.functional.cross_entropy(output.float(), targets, reduction="sum")


def rating_loss(output, targets):
    rating, weight = targets
    return (weight * (output.float().squeeze(-1) - rating) ** 2).sum()


def word_loss(output, targets):
    return nn.functional.cross_entropy(output.float().flatten(0, 1), targets.flatten(), reduction="sum")


def scaled(stage, block, x):
    return block(x * stage.scale().to(x.dtype))  # buffers keep their type


MODELS = {
    "images": OwnModel(build=Images, loss=class_loss, embed="stem", blocks="layers", head=("final", "classes")),
    "recommender": OwnModel(build=Recommender, loss=rating_loss, call_block=scaled),
    "words": OwnModel(build=Words, loss=word_loss),
}


class Data:
    """Batches drawn by number."""

    def __init__(self, kind: str, *, rows: int, microbatch: int) -> None:
        self.kind, self.rows, self.microbatch = kind, rows, microbatch

    def batch(self, index: int) -> OwnBatch:
        return self._drawn(self.rows, index)

    def validation(self) -> list[OwnBatch]:
        return [self._drawn(self.microbatch, 1000 + i) for i in range(2)]

    def _drawn(self, rows: int, seed: int) -> OwnBatch:
        generator = torch.Generator().manual_seed(seed)
        draw = functools.partial(torch.randint, generator=generator)
        if self.kind == "images":
            images = torch.randn(rows, 1, 8, 8, generator=generator)
            return OwnBatch(inputs=images, targets=draw(5, (rows,)).numpy())
        if self.kind == "words":
            ids = draw(9, (rows, 6))
            return OwnBatch(inputs=ids[:, :-1].numpy(), targets=ids[:, 1:].numpy(), num_units=5 * rows)
        inputs = {"user": draw(11, (rows,)), "item": draw(7, (rows,)), "hour": [torch.rand(rows, generator=generator)]}
        ratings = torch.rand(rows, generator=generator), draw(2, (rows,)).float()
        return OwnBatch(inputs=inputs, targets=ratings, num_units=max(int(ratings[1].sum()), 1))


def own_settings(**changes) -> Config:
    tables = {
        "optim": {"lr": 0.02, "lr_total_steps": 9, "max_grad_norm": 1.0},
        "pipeline": {"num_microbatches": 3},
        "train": {"microbatch_size": 2, "num_steps": 5, "compute_dtype": "float32"},
    }
    for name, change in changes.items():
        tables[name] = tables.get(name, {}) | change if isinstance(change, dict) else change
    return resolve(from_dict(tables), vocab_size=1, cuda=False)


def workload(kind: str, config: Config):
    data = Data(kind, rows=config.batch_size, microbatch=config.train.microbatch_size)
    return open_own(MODELS[kind], data, config, 0, None)


def run(executor, config: Config, validation) -> Run:
    steps, losses = [], []
    for _ in range(config.train.num_steps):
        steps.append(facts(executor.run_step()))
        losses.append((executor.step, executor.evaluate(validation, "x"), executor.evaluate(validation, "y")))
    return Run(tuple(steps), tuple(losses), combined_digest(executor.snapshot().digests))


def own_single(kind: str, config: Config) -> Run:
    torch.set_num_threads(1)
    work = workload(kind, config)
    executor = SingleExecutor(config, work.source, device=CPU, model=work.model)
    return run(executor, config, work.validation)


def own_on_rank(rank: Rank, kind: str, config: Config) -> tuple[Run, dict[str, str]]:
    work = workload(kind, config)
    executor = PipelineExecutor(config, work.source, transport=rank.transport, model=work.model)
    found = run(executor, config, work.validation)
    executor.close()
    return found, dict(executor.snapshot().digests)
