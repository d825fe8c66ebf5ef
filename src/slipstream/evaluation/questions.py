r"""Files of multiple-choice tasks -> questions, each prompted as lm-eval prompts it.

=========  ==========================================================================================
hellaswag  text of six lines a question (``label: context``, number of the right ending, four endings),
           or JSON lines with ``activity_label``, ``ctx_a``, ``ctx_b``, ``endings``, ``label``
mmlu       CSV files ``SUBJECT_test.csv`` and, for the five examples, ``SUBJECT_dev.csv``, with the
           columns question, choice0 to choice3, answer (a number or a letter)
blimp      JSON lines with ``sentence_good`` and ``sentence_bad``
=========  ==========================================================================================
"""

import csv
import dataclasses
import io
import itertools
import json
import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal

from slipstream.data.text_checks import check_text
from slipstream.errors import DataError, nearest
from slipstream.evaluation.files import read_task_files

QuestionTask = Literal["hellaswag", "mmlu", "blimp"]

NUM_EXAMPLES = 5
"""Answered questions before each of MMLU's."""
_LETTERS = "ABCD"
_MMLU_COLUMNS = ("question", "choice0", "choice1", "choice2", "choice3", "answer")
# The last sentence, where it is only begun: in lower case, after the end of another, itself without an end.
_BEGUN = re.compile(r"(?<=[.!?] )[a-z][^.!?]*$")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Question:
    """One item of a multiple-choice task."""

    context: str
    choices: tuple[str, ...]
    """What may follow the context, after a space."""
    gold: int
    """Number of the right choice."""


def read_questions(task: QuestionTask, path: str | Path, *, limit: int | None = None) -> list[Question]:
    """Read the questions of a task.

    Args:
        task: Which format and prompt.
        path: A file, a folder or an archive (see :func:`read_task_files`).
        limit: Most questions; of several files one from each in turn, so that few questions are not of one kind.

    Raises:
        DataError: A file is not in the task's format, with file and line.
    """
    suffixes, read = _TASKS[task]
    parts = read(read_task_files(path, suffixes=suffixes))
    in_turn = itertools.chain.from_iterable(itertools.zip_longest(*parts)) if limit is not None else _all(parts)
    questions = list(itertools.islice((question for question in in_turn if question is not None), limit))
    if not questions:
        raise DataError(f"{path} holds no question of the task '{task}'.")
    return questions


def _all(parts: list[list[Question]]) -> Iterator[Question]:
    return itertools.chain.from_iterable(parts)


def _hellaswag(files: list[tuple[str, str]]) -> list[list[Question]]:
    return [_hellaswag_records(*file) if file[1].lstrip()[:1] == "{" else _hellaswag_lines(*file) for file in files]


def _hellaswag_lines(name: str, text: str) -> list[Question]:
    lines = text.split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    questions = []
    for start in range(0, len(lines), 6):
        found = lines[start : start + 6]
        if len(found) != 6 or not found[0].strip():
            given = f"{len(found)}" if len(found) != 6 else "an empty first"
            raise DataError(
                f"{name}, line {start + 1}: a question of HellaSwag has six lines (`label: context`, the number of the "
                f"right ending, four endings); this one has {given}."
            )
        query, gold, *endings = found
        number = _gold(gold, 4, where=f"{name}, line {start + 2}")
        # The file has lost where the begun sentence starts, which lm-eval capitalizes.
        query = _BEGUN.sub(lambda begun: begun.group().capitalize(), query.strip())
        questions.append(_hellaswag_question(query, endings, number))
    return questions


def _hellaswag_records(name: str, text: str) -> list[Question]:
    questions = []
    for where, record in _records(name, text):
        label, first, second = (_text(record, key, where) for key in ("activity_label", "ctx_a", "ctx_b"))
        endings = record.get("endings")
        if not (isinstance(endings, list) and len(endings) == 4 and all(isinstance(each, str) for each in endings)):
            raise DataError(f"{where}: 'endings' must be a list of four texts.")
        for ending in endings:
            check_text(ending, what=f"{where}: an ending")
        gold = _gold(str(record.get("label")), 4, where=where)
        questions.append(_hellaswag_question(f"{label}: {first} {second.capitalize()}", endings, gold))
    return questions


def _hellaswag_question(query: str, endings: list[str], gold: int) -> Question:
    return Question(context=_without_brackets(query), choices=tuple(map(_without_brackets, endings)), gold=gold)


def _without_brackets(text: str) -> str:
    """Remove the marks that the texts from WikiHow hold, as lm-eval does."""
    text = text.strip().replace(" [title]", ". ")
    return re.sub(r"\[.*?\]", "", text).replace("  ", " ")


def _mmlu(files: list[tuple[str, str]]) -> list[list[Question]]:
    tests, examples = _by_subject(files, "test"), _by_subject(files, "dev")
    if not tests:
        raise DataError("MMLU needs files named SUBJECT_test.csv, and SUBJECT_dev.csv for the examples; none is there.")
    parts = []
    for subject, test in tests.items():
        if subject not in examples:
            raise DataError(
                f"{test[0]}: there is no {subject}_dev.csv with its {NUM_EXAMPLES} examples. Give the folder or the "
                "archive that holds both."
            )
        shown = [
            f"{question.context} {question.choices[question.gold]}\n\n"
            for question in _mmlu_questions(*examples[subject])[:NUM_EXAMPLES]
        ]
        about = subject.replace("_", " ")
        head = f"The following are multiple choice questions (with answers) about {about}.\n\n" + "".join(shown)
        parts.append([dataclasses.replace(each, context=head + each.context) for each in _mmlu_questions(*test)])
    return parts


def _by_subject(files: list[tuple[str, str]], split: str) -> dict[str, tuple[str, str]]:
    found: dict[str, tuple[str, str]] = {}
    for name, text in files:
        if subject := _subject(name, split):
            if subject in found:
                raise DataError(
                    f"{found[subject][0]} and {name} are both the {split} questions of '{subject}'. Give a folder or "
                    "an archive that holds them once."
                )
            found[subject] = (name, text)
    return found


def _subject(name: str, split: str) -> str:
    found = re.search(rf"([^/\\]+)_{split}\.csv", name)
    return found.group(1) if found else ""


def _mmlu_questions(name: str, text: str) -> list[Question]:
    rows = csv.reader(io.StringIO(text, newline=""), strict=True)
    questions = []
    try:
        header = next(rows, [])
        if tuple(header) != _MMLU_COLUMNS:
            raise DataError(f"{name}, line 1: the columns must be {', '.join(_MMLU_COLUMNS)}; given {header}.")
        begin = rows.line_num + 1
        for row in rows:
            where, begin = f"{name}, line {begin}", rows.line_num + 1
            if len(row) != len(_MMLU_COLUMNS):
                raise DataError(f"{where}: {len(row)} columns; there must be {len(_MMLU_COLUMNS)}.")
            question, *choices, answer = row
            gold = _LETTERS.index(answer) if answer in tuple(_LETTERS) else _gold(answer, 4, where=where)
            lines = [question.strip(), *(f"{letter}. {choice}" for letter, choice in zip(_LETTERS, choices)), "Answer:"]
            questions.append(Question(context="\n".join(lines), choices=tuple(_LETTERS), gold=gold))
    except csv.Error as error:
        raise DataError(f"{name}, line {rows.line_num}: not CSV: {error}.") from error
    return questions


def _blimp(files: list[tuple[str, str]]) -> list[list[Question]]:
    return [
        [
            Question(
                context="", choices=(_text(pair, "sentence_good", where), _text(pair, "sentence_bad", where)), gold=0
            )
            for where, pair in _records(*file)
        ]
        for file in files
    ]


def _records(name: str, text: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        where = f"{name}, line {number}"
        try:
            record = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise DataError(f"{where}: not JSON: {error}. Each line must hold one JSON object.") from error
        if not isinstance(record, dict):
            raise DataError(f"{where}: a JSON object is needed.")
        yield where, record


def _text(record: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(record.get(key), str):
        raise DataError(
            f"{where}: the field '{key}' must be a text.{nearest(key, record.keys() - {key})} Fields here: "
            f"{', '.join(record) or 'none'}."
        )
    return check_text(str(record[key]), what=f"{where}: the field '{key}'")


def _gold(text: str, num_choices: int, *, where: str) -> int:
    if text.strip() not in map(str, range(num_choices)):
        raise DataError(f"{where}: the right answer is {text.strip()!r}; allowed are 0 to {num_choices - 1}.")
    return int(text)


_TASKS: dict[QuestionTask, tuple[tuple[str, ...], Callable[[list[tuple[str, str]]], list[list[Question]]]]] = {
    "hellaswag": ((".txt", ".jsonl"), _hellaswag),
    "mmlu": (("_test.csv", "_dev.csv"), _mmlu),
    "blimp": ((".jsonl",), _blimp),
}
"""Endings of a task's files, and what reads them."""
