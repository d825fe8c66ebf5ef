"""Do our scorers agree with lm-eval's, item by item?

    python benchmarks/lm_eval_agreement.py RUN --hellaswag FILE --mmlu FOLDER_OR_ARCHIVE [--limit 200]

The run is exported. Then three answer the same items of HellaSwag and of MMLU with five examples:

    slipstream     `slipstream eval`
    adapter        lm-eval with our model through the adapter
    transformers   lm-eval with the export through its own Hugging Face model: nothing of ours computes

Prompts in lm-eval come from its own task files; only the data are local. Needs the extras `eval` and `hf`. No network.
"""

import argparse
import csv
import io
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import lm_eval
import torch
import yaml
from lm_eval.api.task import ConfigurableTask
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks.hellaswag.utils import process_docs

from slipstream.evaluation.files import read_task_files
from slipstream.evaluation.lm_eval_adapter import SlipstreamLM
from slipstream.evaluation.questions import read_questions
from slipstream.evaluation.scoring import Scorer
from slipstream.evaluation.tasks import answers
from slipstream.train.export import export_hub
from slipstream.train.trained import open_trained

TASKS = Path(lm_eval.__file__).parent / "tasks"


class Answer(NamedTuple):
    """To one item: log-likelihoods of its choices, and whether the likeliest, also per character, is right."""

    log_likelihoods: list[float]
    acc: int
    acc_norm: int


class PlainLoader(yaml.SafeLoader):
    """Reads a task file without running the functions it names."""


PlainLoader.add_constructor("!function", lambda loader, node: None)


def task_file(*parts: str) -> dict[str, Any]:
    return yaml.load(TASKS.joinpath(*parts).read_text(), Loader=PlainLoader)  # a SafeLoader


def local_task(config: dict[str, Any], folder: Path, **splits: list[dict[str, Any]]) -> ConfigurableTask:
    """Return one of lm-eval's tasks with its data replaced by ours."""
    files = {}
    for split, records in splits.items():
        path = folder / f"{config['task']}-{split}.jsonl"
        path.write_text("".join(json.dumps(record) + "\n" for record in records))
        files[split] = str(path)
    absent = {key: None for key in ("training_split", "dataset_name") if key in config}
    keep = {key: value for key, value in config.items() if key not in ("tag", "include", "task_alias")}
    source = {"dataset_path": "json", "dataset_kwargs": {"data_files": files, "cache_dir": str(folder / "cache")}}
    return ConfigurableTask(config={**keep, **absent, **source})


def hellaswag(path: str, limit: int, folder: Path) -> list[ConfigurableTask]:
    ((_, text),) = read_task_files(path, suffixes=(".txt",))
    lines = text.splitlines()[: 6 * limit]
    records = []
    for start in range(0, len(lines), 6):
        label, _, context = lines[start].partition(": ")
        begun = re.search(r"^(.*[.!?]) ([a-z][^.!?]*)$", context)
        first, second = begun.groups() if begun else (context, "")
        record = {"activity_label": label, "ctx_a": first, "ctx_b": second, "endings": lines[start + 2 : start + 6]}
        records.append({**record, "label": lines[start + 1]})
    config = {**task_file("hellaswag", "hellaswag.yaml"), "process_docs": process_docs}
    return [local_task(config, folder, validation=records)]


def mmlu(path: str, limit: int, folder: Path) -> list[ConfigurableTask]:
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {"dev": {}, "test": {}}
    for name, text in read_task_files(path, suffixes=("_test.csv", "_dev.csv")):
        subject, split = re.search(r"([^/]+)_(test|dev)\.csv", name).groups()
        rows[split][subject] = [
            {
                "question": row["question"],
                "choices": [row[f"choice{i}"] for i in range(4)],
                "answer": int(row["answer"]),
            }
            for row in csv.DictReader(io.StringIO(text, newline=""))
        ]
    subjects = sorted(rows["test"])
    template = task_file("mmlu", "default", "_default_template_yaml")
    tasks = []
    for position, subject in enumerate(subjects):
        share = limit // len(subjects) + (position < limit % len(subjects))  # in turn, as `slipstream eval` takes them
        config = {**template, **task_file("mmlu", "default", f"mmlu_{subject}.yaml"), "num_fewshot": 5}
        if share:
            tasks.append(local_task(config, folder, test=rows["test"][subject][:share], dev=rows["dev"][subject]))
    return tasks


def answers_of_lm_eval(model: Any, tasks: list[ConfigurableTask]) -> dict[str, list[Answer]]:
    """Return lm-eval's answers by task, in the order of the items."""
    found = lm_eval.simple_evaluate(model=model, tasks=tasks, bootstrap_iters=0, log_samples=True)
    return {
        name: [
            Answer(
                [float(response[0][0]) for response in sample["resps"]],
                int(sample["acc"]),
                # MMLU's choices are single letters, so lm-eval leaves the norm out.
                int(sample.get("acc_norm", sample["acc"])),
            )
            for sample in sorted(samples, key=lambda sample: sample["doc_id"])
        ]
        for name, samples in found["samples"].items()
    }


def answers_of_ours(scorer: Scorer, task: str, path: str, limit: int) -> list[Answer]:
    found = []
    for question in read_questions(task, path, limit=limit):
        scores = scorer.log_likelihoods([(question.context, f" {choice}") for choice in question.choices])
        found.append(Answer([score.log_likelihood for score in scores], *map(int, answers(question, scores))))
    return found


def in_turn(by_task: dict[str, list[Any]]) -> list[Any]:
    rows = [by_task[name] for name in sorted(by_task)]
    return [row[i] for i in range(max(map(len, rows))) for row in rows if i < len(row)]


def shares(found: list[Answer]) -> str:
    return " | ".join(f"{sum(each[i] for each in found) / len(found):.4f}" for i in (1, 2))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run")
    parser.add_argument("--hellaswag")
    parser.add_argument("--mmlu")
    parser.add_argument("--limit", type=int, default=200)
    args = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    print("| task | items | answered by | acc | acc_norm | same answers | largest log-likelihood difference |")
    print("|---|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        export_hub(args.run, folder / "hub")
        scorer = Scorer(open_trained(args.run))
        rivals = {
            "adapter": SlipstreamLM(args.run),
            "transformers": HFLM(pretrained=str(folder / "hub"), device="cpu", dtype="float32", batch_size=4),
        }
        for task, path, build in (("hellaswag", args.hellaswag, hellaswag), ("mmlu", args.mmlu, mmlu)):
            if path is None:
                continue
            ours = answers_of_ours(scorer, task, path, args.limit)
            print(f"| {task} | {len(ours)} | slipstream | {shares(ours)} | | |", flush=True)
            for rival, model in rivals.items():
                theirs = in_turn(answers_of_lm_eval(model, build(path, args.limit, folder)))
                assert len(theirs) == len(ours)
                same = sum(one[1:] == two[1:] for one, two in zip(ours, theirs))
                pairs = [pair for one, two in zip(ours, theirs) for pair in zip(one[0], two[0], strict=True)]
                delta = max(abs(a - b) for a, b in pairs)
                print(f"| {task} | {len(theirs)} | {rival} | {shares(theirs)} | {same} | {delta:.2g} |", flush=True)


if __name__ == "__main__":
    main()
