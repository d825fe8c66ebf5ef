"""`slipstream eval`: a model, a task and a file -> figures."""

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from slipstream.errors import ConfigError, nearest
from slipstream.evaluation.perplexity import perplexity
from slipstream.evaluation.questions import Question, QuestionTask, read_questions
from slipstream.evaluation.scoring import Score, Scorer

Task = Literal["hellaswag", "mmlu", "blimp", "perplexity"]


def run_task(
    scorer: Scorer, task: str, path: str | Path, *, limit: int | None = None, text_field: str = "text"
) -> dict[str, Any]:
    """Evaluate a model on a task.

    Args:
        scorer: Holds the model.
        task: Name of the task.
        path: Its file, folder or archive; for perplexity also a folder of prepared data.
        limit: Most questions (of several files one from each in turn) or documents.
        text_field: Of `.jsonl` records, for perplexity.

    Returns:
        ``acc``, ``acc_norm``, ``num_items``; or ``nats_per_token``, ``bits_per_byte``, ``perplexity``, ``num_tokens``,
        ``num_bytes``, ``num_items``.

    Raises:
        ConfigError: There is no such task, or ``limit`` is below 1.
        DataError: The file is not in the task's format, with file and line.
    """
    if task not in get_args(Task):
        raise ConfigError(
            f"there is no task '{task}'.{nearest(task, get_args(Task))} Tasks: {', '.join(get_args(Task))}."
        )
    if limit is not None and limit < 1:
        raise ConfigError(f"the limit is {limit}; it must be 1 or more.")
    if limit is not None:
        limit = min(limit, sys.maxsize)  # as far as iterators count, which is all there are
    if task == "perplexity":
        return perplexity(scorer, path, limit=limit, text_field=text_field)
    known: QuestionTask = task  # type: ignore[assignment]  # one of those that are left
    return multiple_choice(scorer, read_questions(known, path, limit=limit))


def multiple_choice(scorer: Scorer, questions: Sequence[Question]) -> dict[str, Any]:
    """Return how often the right choice is the likeliest: as it is, and per character.

    Lengths are those of lm-eval: characters of the choice, without the space before it.
    """
    requests = [(each.context, f" {choice}") for each in questions for choice in each.choices]
    scores = iter(scorer.log_likelihoods(requests))
    taken = [list(itertools.islice(scores, len(each.choices))) for each in questions]
    right = [answers(question, found) for question, found in zip(questions, taken)]
    count = len(questions)
    return {
        "acc": sum(plain for plain, _ in right) / count,
        "acc_norm": sum(normed for _, normed in right) / count,
        "num_items": count,
    }


def answers(question: Question, scores: Sequence[Score]) -> tuple[bool, bool]:
    """Return whether the choice with the largest log-likelihood is right, and that with the largest per character."""
    plain = [score.log_likelihood for score in scores]
    normed = [value / max(len(choice), 1) for value, choice in zip(plain, question.choices)]
    return plain.index(max(plain)) == question.gold, normed.index(max(normed)) == question.gold
