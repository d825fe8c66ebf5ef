"""Task files -> prompts as lm-eval writes them; a wrong format names file and line."""

import bz2
import gzip
import json
import tarfile
from pathlib import Path

import pytest

from slipstream.errors import DataError
from slipstream.evaluation.questions import read_questions

HELLASWAG = """Roof: A man is on a roof. he
3
sings.
rips tiles off.
holds a cube.
starts pulling up  roofing.
Family: How to sleep well. Go to bed early. Stay there.
0
One.
Two.
Three.
Four.
"""
HEADER = "question,choice0,choice1,choice2,choice3,answer\n"


def mmlu(folder, subject="high_school_physics", num_examples=6, num_tests=2):
    for split, count in (("dev", num_examples), ("test", num_tests)):
        (folder / split).mkdir(exist_ok=True)
        rows = "".join(f' "{subject} {split} {i},\nnext? ",a,b,c,d,{i % 4}\n' for i in range(count)).replace(' "', '"')
        (folder / split / f"{subject}_{split}.csv").write_text(HEADER + rows)


def test_hellaswag_lines(tmp_path):
    (tmp_path / "h.txt").write_text(HELLASWAG)
    first, second = read_questions("hellaswag", tmp_path / "h.txt")
    assert first.context == "Roof: A man is on a roof. He"
    assert first.choices == ("sings.", "rips tiles off.", "holds a cube.", "starts pulling up roofing.")
    assert (first.gold, second.gold) == (3, 0)
    assert second.context == "Family: How to sleep well. Go to bed early. Stay there."


def test_hellaswag_records_are_prepared_as_lm_eval_prepares_them(tmp_path):
    record = {
        "activity_label": "Family",
        "ctx_a": "[header] How to sleep [title] Go to bed [step] Stay.",
        "ctx_b": "the Man",
        "endings": [" a [substeps] b", "c", "d", "e"],
        "label": "1",
    }
    (tmp_path / "h.jsonl").write_text(json.dumps(record) + "\n")
    (question,) = read_questions("hellaswag", tmp_path / "h.jsonl")
    assert question.context == "Family: How to sleep. Go to bed Stay. The man"
    assert question.choices == ("a b", "c", "d", "e")
    assert question.gold == 1


def test_mmlu_prompt_has_five_examples(tmp_path):
    mmlu(tmp_path)
    questions = read_questions("mmlu", tmp_path)
    assert len(questions) == 2
    parts = questions[1].context.split("\n\n")
    assert parts[0] == "The following are multiple choice questions (with answers) about high school physics."
    assert parts[5] == "high_school_physics dev 4,\nnext?\nA. a\nB. b\nC. c\nD. d\nAnswer: A"
    assert parts[6:] == ["high_school_physics test 1,\nnext?\nA. a\nB. b\nC. c\nD. d\nAnswer:"]
    assert questions[1].choices == ("A", "B", "C", "D")
    assert questions[1].gold == 1


def test_blimp(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"sentence_good": "Cats run.", "sentence_bad": "Cats runs."}) + "\n")
    (question,) = read_questions("blimp", tmp_path / "p.jsonl")
    assert (question.context, question.choices, question.gold) == ("", ("Cats run.", "Cats runs."), 0)


def test_a_limit_takes_from_each_file_in_turn(tmp_path):
    mmlu(tmp_path, "anatomy", num_tests=3)
    mmlu(tmp_path, "zoology", num_tests=1)
    asked = [
        question.context.rpartition("\n\n")[2].split(",")[0] for question in read_questions("mmlu", tmp_path, limit=3)
    ]
    assert asked == ["anatomy test 0", "zoology test 0", "anatomy test 1"]
    assert len(read_questions("mmlu", tmp_path)) == 4


def test_packed_files_and_archives(tmp_path):
    mmlu(tmp_path)
    with tarfile.open(tmp_path / "m.tar.xz", "w:xz") as archive:
        for split in ("dev", "test"):
            archive.add(tmp_path / split, arcname=f"mmlu/{split}")
    assert read_questions("mmlu", tmp_path / "m.tar.xz") == read_questions("mmlu", tmp_path)
    (tmp_path / "h.txt.bz2").write_bytes(bz2.compress(HELLASWAG.encode()))
    assert len(read_questions("hellaswag", tmp_path / "h.txt.bz2")) == 2


@pytest.mark.parametrize(
    ("task", "name", "text", "words"),
    [
        ("hellaswag", "h.txt", HELLASWAG + "Roof: He\n", r"h\.txt, line 13: .* six lines"),
        ("hellaswag", "h.txt", HELLASWAG.replace("\n3\n", "\n4\n"), r"h\.txt, line 2: the right answer is '4'"),
        ("hellaswag", "h.txt", "a plain text\n" * 12, r"h\.txt, line 2: the right answer is 'a plain text'"),
        ("hellaswag", "h.jsonl", '{"ctx": "a"}\n', r"h\.jsonl, line 1: the field 'activity_label'"),
        ("hellaswag", "h.txt", "\n\n", "holds no question"),
        (
            "blimp",
            "p.jsonl",
            '\n{"sentence_good": "a", "sentence_badd": "b"}\n',
            r"line 2: .* Did you mean 'sentence_badd'",
        ),
        ("blimp", "p.jsonl", "[]\n", "line 1: a JSON object"),
        ("blimp", "p.jsonl", "{\n", "line 1: not JSON"),
        ("mmlu", "x_test.csv", HEADER + "q,a,b,c,d,1\n", r"there is no x_dev\.csv"),
        ("mmlu", "x.csv", HEADER, "SUBJECT_test.csv"),
    ],
)
def test_a_wrong_format_names_file_and_line(tmp_path, task, name, text, words):
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=words):
        read_questions(task, tmp_path / name)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("q,a,b,c,d,1\n", r"x_test\.csv, line 1: the columns must be question, choice0"),
        (HEADER + '"a\nb",a,b,c,d,1\nq,a,b,c,1\n', r"x_test\.csv, line 4: 5 columns"),
        (HEADER + '"a\nb",a,b,c,d,1\nq,a,b,c,d,E\n', r"x_test\.csv, line 4: the right answer is 'E'"),
        (HEADER + 'q,"a"b,b,c,d,1\n', r"x_test\.csv, line 2: not CSV"),
    ],
)
def test_a_wrong_mmlu_file_names_file_and_line(tmp_path, text, words):
    mmlu(tmp_path, "x")
    (tmp_path / "test" / "x_test.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        read_questions("mmlu", tmp_path)


def test_a_subject_that_is_there_twice_is_refused(tmp_path):
    for folder in ("de", "en"):
        (tmp_path / folder).mkdir()
        mmlu(tmp_path / folder, "astronomy")
    with pytest.raises(DataError, match=r"are both the test questions of 'astronomy'\. Give a folder or an archive"):
        read_questions("mmlu", tmp_path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(DataError, match=r"cannot read .*gone: No such file"):
        read_questions("blimp", tmp_path / "gone")
    with pytest.raises(DataError, match=r"holds no file named \*\.jsonl"):
        read_questions("blimp", tmp_path)
    (tmp_path / "p.jsonl").write_bytes(b"\xff\n")
    with pytest.raises(DataError, match=r"p\.jsonl is not UTF-8: byte 0"):
        read_questions("blimp", tmp_path / "p.jsonl")
    (tmp_path / "torn.jsonl.xz").write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot read"):
        read_questions("blimp", tmp_path / "torn.jsonl.xz")


def test_what_lies_beside_questions_is_passed_over(tmp_path):
    (tmp_path / "h.txt").write_text(HELLASWAG)
    for name in ("README.txt", "readme.jsonl", "LICENSE.txt", "._h.txt", ".hidden.txt", "notes.md"):
        (tmp_path / name).write_text("This is no question.\n")
    assert len(read_questions("hellaswag", tmp_path)) == 2
    with tarfile.open(tmp_path / "all.tar", "w") as archive:
        for path in sorted(tmp_path.glob("[!a]*.txt")):
            archive.add(path, f"hellaswag/{path.name}")
    assert len(read_questions("hellaswag", tmp_path / "all.tar")) == 2


def test_what_lies_beside_questions_is_not_read(tmp_path, monkeypatch):
    (tmp_path / "h.txt").write_text(HELLASWAG)
    (tmp_path / "model.safetensors").write_text("many gigabytes")
    (tmp_path / "folder.txt").mkdir()
    read, names = Path.read_bytes, []
    monkeypatch.setattr(Path, "read_bytes", lambda path: (names.append(path.name), read(path))[1])
    assert len(read_questions("hellaswag", tmp_path)) == 2
    assert names == ["h.txt"]


def test_a_readme_that_is_asked_for_is_read(tmp_path):
    (tmp_path / "README.txt").write_text(HELLASWAG)
    assert len(read_questions("hellaswag", tmp_path / "README.txt")) == 2


@pytest.mark.parametrize(
    ("task", "record"),
    [
        ("blimp", {"sentence_good": "Cats \ud800 run.", "sentence_bad": "Cats runs."}),
        ("hellaswag", {"activity_label": "A", "ctx_a": "b", "ctx_b": "c", "endings": ["\udfff"] * 4, "label": 0}),
    ],
)
def test_half_a_character_names_its_line(tmp_path, task, record):
    (tmp_path / "p.jsonl").write_text("\n" + json.dumps(record) + "\n")
    with pytest.raises(DataError, match=r"p\.jsonl, line 2: .* is not text"):
        read_questions(task, tmp_path / "p.jsonl")


def test_a_torn_archive_is_a_sentence(tmp_path):
    packed = bytearray(gzip.compress(HELLASWAG.encode() * 20))
    packed[30:60] = bytes(30)
    (tmp_path / "h.txt.gz").write_bytes(packed)
    with pytest.raises(DataError, match="cannot read"):
        read_questions("hellaswag", tmp_path / "h.txt.gz")
