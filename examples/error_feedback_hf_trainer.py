"""Error feedback in the Hugging Face Trainer: build the optimizer yourself, attach, and hand it over.

Saving, resuming, gradient accumulation, clipping and schedules stay the Trainer's; the plug-in's state is in the
optimizer.pt of its checkpoints. Needs ``pip install 'slipstream[hf]'``, and no download: the model is small, new, and
reads bytes.

    python examples/error_feedback_hf_trainer.py
"""

import gzip
import importlib.resources
import tempfile

import torch
import transformers

from slipstream.optim.plugin import Delay, ErrorFeedback, attach, is_attached

LENGTH, STEPS = 32, 20


class Bytes(torch.utils.data.Dataset):
    """Windows of the text that comes with the package."""

    def __init__(self) -> None:
        packed = importlib.resources.files("slipstream").joinpath("data/texts/shakespeare.txt.gz").read_bytes()
        text = bytearray(gzip.decompress(packed)[: LENGTH * 2000])
        self.windows = torch.frombuffer(text, dtype=torch.uint8).long().view(-1, LENGTH)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self.windows[index], "labels": self.windows[index]}


def build_trainer(folder: str) -> transformers.Trainer:
    transformers.set_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    attach(optimizer, Delay(1), ErrorFeedback(c=1.0))
    schedule = transformers.get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=5, num_training_steps=STEPS)
    arguments = transformers.TrainingArguments(
        output_dir=folder,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        max_steps=STEPS,
        save_steps=STEPS // 2,
        logging_steps=STEPS // 4,
        report_to=[],
        use_cpu=True,
        disable_tqdm=True,
    )
    return transformers.Trainer(model, arguments, train_dataset=Bytes(), optimizers=(optimizer, schedule))


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        trainer = build_trainer(folder)
        trainer.train()
        print(f"still attached after training: {is_attached(trainer.optimizer)}")
        resumed = build_trainer(folder)
        resumed.train(resume_from_checkpoint=f"{folder}/checkpoint-{STEPS // 2}")
    pairs = zip(trainer.model.parameters(), resumed.model.parameters(), strict=True)
    print(f"resumed == continuous, to the bit: {all(torch.equal(a, b) for a, b in pairs)}")


if __name__ == "__main__":
    main()
