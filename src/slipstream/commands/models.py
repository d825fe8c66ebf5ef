"""`eval`, `generate` and `export hf`: a model that is trained."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Literal

import tyro

from slipstream.arguments import EvalArgs, ExportHfArgs, GenerateArgs, refuse_given
from slipstream.config import Config
from slipstream.strict_json import json_text

if TYPE_CHECKING:
    import torch


def export_hf(argv: Sequence[str]) -> int:
    """Write a run as a folder that Hugging Face transformers reads."""
    args = tyro.cli(ExportHfArgs, args=argv, prog="slipstream export hf")
    from slipstream.train.export import export_hub

    export = export_hub(args.run, args.out, weights=args.weights, checkpoint=args.checkpoint)
    if args.json:
        found = {"out": str(export.folder), "step": export.step, "weights": args.weights, "files": export.files}
        print(json_text({**found, "max_abs_logit_difference": export.max_abs_logit_difference}))
        return 0
    print(f"{export.folder}: weights {args.weights} of step {export.step}; {', '.join(export.files)}")
    if export.max_abs_logit_difference is None:
        print("not checked against transformers, which is not installed: pip install 'slipstream[hf]'")
    else:
        print(f"loaded with transformers: largest logit difference {export.max_abs_logit_difference:.3g}")
    return 0


def evaluate(argv: Sequence[str]) -> int:
    """Evaluate a run or a model folder on a task's file."""
    args = tyro.cli(EvalArgs, args=argv, prog="slipstream eval")
    from slipstream.evaluation.perplexity import reads_records
    from slipstream.evaluation.scoring import Scorer
    from slipstream.evaluation.tasks import run_task
    from slipstream.train.trained import open_trained

    if args.task != "perplexity":
        refuse_given({"--text-field": args.text_field}, f"with the task {args.task}")
    elif args.text_field is not None and not reads_records(args.file):
        refuse_given({"--text-field": args.text_field}, "on prepared data and on plain text, which have no fields")
    model = open_trained(args.model, weights=args.weights, checkpoint=args.checkpoint)
    scorer = Scorer(model, device=_device(args.device), max_length=args.max_length)
    found = run_task(scorer, args.task, args.file, limit=args.limit, text_field=args.text_field or "text")
    if args.json:
        print(json_text(found))
        return 0
    width = max(map(len, found))
    for name, value in found.items():
        unknown = "beyond all numbers" if name == "perplexity" else "not known"
        shown = unknown if value is None else value if isinstance(value, int) else f"{value:.5g}"
        print(f"{name:<{width}}  {shown}")
    return 0


def generate(argv: Sequence[str]) -> int:
    """Continue a text with a run or a model folder."""
    args = tyro.cli(GenerateArgs, args=argv, prog="slipstream generate")
    from slipstream.evaluation.generation import generate
    from slipstream.train.trained import open_trained

    if args.temperature == 0:
        refuse_given({"--seed": args.seed}, "at a --temperature of 0, which draws nothing")
    written = generate(
        open_trained(args.model, weights=args.weights, checkpoint=args.checkpoint),
        args.prompt,
        max_new_tokens=args.max_new_tokens,
        temperature=args.temperature,
        seed=args.seed or 0,
        device=_device(args.device),
    )
    print(json_text(written._asdict()) if args.json else args.prompt + written.text)
    return 0


def _device(name: Literal["auto", "cpu", "cuda"]) -> "torch.device":
    from slipstream.config import TrainConfig
    from slipstream.device import choose_device

    return choose_device(Config(train=TrainConfig(device=name)))
