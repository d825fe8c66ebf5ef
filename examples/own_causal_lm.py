"""A model of Hugging Face transformers on a pipeline: its own modules, its own folder. Needs the extra `hf`.

    python examples/own_causal_lm.py

A small Llama with tied embeddings, made here, is trained on the built-in Shakespeare, bytes as tokens, on two stages.
"""

import tempfile
from dataclasses import replace
from functools import cached_property

import torch
import transformers

from slipstream.data import Loader, open_data
from slipstream.own import (
    Config,
    EvaluateConfig,
    OptimConfig,
    OwnBatch,
    PipelineConfig,
    StalenessConfig,
    TrainConfig,
    fit,
    own_causal_lm,
)


class Shakespeare:
    """Batches of token ids. What is opened stays behind when the object goes to another process."""

    def __init__(self, *, rows: int, microbatch: int, length: int) -> None:
        self.rows, self.microbatch, self.length = rows, microbatch, length

    def __getstate__(self) -> dict[str, int]:
        return {name: value for name, value in vars(self).items() if isinstance(value, int)}

    @cached_property
    def loader(self) -> Loader:
        return Loader(open_data("").train, sequence_length=self.length, batch_size=self.rows)

    def batch(self, index: int) -> OwnBatch:
        batch = self.loader.batch(index)
        return OwnBatch(inputs=batch.inputs, targets=batch.targets, num_units=batch.num_tokens)

    def validation(self) -> list[OwnBatch]:
        held_out = open_data("").validation
        loader = Loader(
            held_out, sequence_length=self.length, batch_size=self.microbatch, sequential=True, max_sequences=16
        )
        return [OwnBatch(inputs=b.inputs, targets=b.targets, num_units=b.num_tokens) for b in loader]


def main() -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        torch.manual_seed(0)
        shape = transformers.LlamaConfig(
            vocab_size=257,
            hidden_size=48,
            intermediate_size=96,
            num_hidden_layers=3,
            num_attention_heads=4,
            num_key_value_heads=2,
            tie_word_embeddings=True,
        )
        transformers.LlamaForCausalLM(shape).save_pretrained(f"{folder}/model")
        model = own_causal_lm(f"{folder}/model")
        data = Shakespeare(rows=8, microbatch=2, length=32)
        single = Config(
            run_dir=f"{folder}/single",
            optim=OptimConfig(name="muon", lr=0.01, adamw_lr=0.003),
            staleness=StalenessConfig(delay=1, error_feedback=1.0),
            pipeline=PipelineConfig(num_microbatches=4),
            train=TrainConfig(num_steps=20, microbatch_size=2, device="cpu"),
            evaluate=EvaluateConfig(),
        )
        pipeline = replace(
            single,
            run_dir=f"{folder}/pipeline",
            executor="pipeline",
            pipeline=replace(single.pipeline, num_stages=2),
            staleness=replace(single.staleness, delay=None),
        )
        one, two = (fit(model, data, config) for config in (single, pipeline))
    assert one is not None
    assert two is not None
    print(f"loss on held-out text: {two['val_loss_before']:.3f} -> {two['val_loss']:.3f} nats per byte")
    print(f"the same weights, to the bit, in one process: {one['weights_sha256'] == two['weights_sha256']}")


if __name__ == "__main__":
    main()
