import gzip
import hashlib
import json
import os
import random
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

from slipstream.data import (
    ByteTokenizer,
    Dataset,
    Progress,
    builtin_source,
    load_tokenizer,
    open_data,
    prepare,
    read_manifest,
)
from slipstream.data import tokenizer as tokenizer_module
from slipstream.errors import ConfigError, DataError

WORDS = ["king", "sword", "night", "the", "of", "and", "ghost", "Où", "love", "crown"]


def records(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    rng = random.Random(seed)
    return [
        {"id": str(i), "author": f"author {rng.randrange(20)}", "text": " ".join(rng.choices(WORDS, k=8)) + f" {i}"}
        for i in range(count)
    ]


def write_records(path: Path, rows: list[dict[str, str]]) -> Path:
    text = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(gzip.compress(text, mtime=0) if path.suffix == ".gz" else text)
    return path


def documents(data: Dataset, split: str) -> list[str]:
    tokens = data.train if split == "train" else data.validation
    ids = tokens.read(0, len(tokens))
    ends = np.flatnonzero(ids == data.tokenizer.eos_id)
    assert ends[-1] == len(ids) - 1
    return [data.tokenizer.decode(part[part != data.tokenizer.eos_id]) for part in np.split(ids, ends[:-1] + 1)]


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_every_document_is_on_one_side_as_it_was(tmp_path, tokenizer: str) -> None:
    rows = records(200)
    source = write_records(tmp_path / "a.jsonl", rows)
    manifest = prepare([source], tmp_path / "data", tokenizer=tokenizer, vocab_size=300, shard_tokens=1000)
    data = open_data(tmp_path / "data")
    assert data.manifest == manifest
    train, validation = documents(data, "train"), documents(data, "validation")
    assert sorted(train + validation) == sorted(row["text"] for row in rows)
    assert 5 <= len(validation) <= 40
    for split, texts in (("train", train), ("validation", validation)):
        info = manifest.splits[split]
        assert info.documents == len(texts)
        assert info.num_bytes == sum(len(text.encode()) for text in texts)
        assert info.num_tokens == len(data.train if split == "train" else data.validation)
    assert len(manifest.splits["train"].shards) > 1
    assert manifest.split_rule.key == "text"


def test_order_within_a_side_is_that_of_the_source(tmp_path) -> None:
    prepare([write_records(tmp_path / "a.jsonl", records(100))], tmp_path / "data")
    numbers = [int(text.split()[-1]) for text in documents(open_data(tmp_path / "data"), "train")]
    assert numbers == sorted(numbers)


def test_groups_are_never_torn(tmp_path) -> None:
    rows = records(300)
    prepare([write_records(tmp_path / "a.jsonl.gz", rows)], tmp_path / "data", split_key="author")
    data = open_data(tmp_path / "data")
    author = {row["text"]: row["author"] for row in rows}
    sides = {split: {author[text] for text in documents(data, split)} for split in ("train", "validation")}
    assert sides["train"]
    assert sides["validation"]
    assert sides["train"].isdisjoint(sides["validation"])
    assert data.manifest.split_rule.key == "field author"


def test_split_is_the_documented_hash(tmp_path) -> None:
    rows = records(100)
    source = write_records(tmp_path / "a.jsonl", rows)
    manifest = prepare([source], tmp_path / "data", salt="pepper", validation_fraction=0.25)
    threshold = int(manifest.split_rule.threshold, 16)
    assert threshold == int(0.25 * 2**64)
    held_out = {
        row["text"]
        for row in rows
        if int.from_bytes(hashlib.sha256(b"pepper\0" + row["text"].encode()).digest()[:8], "big") < threshold
    }
    assert set(documents(open_data(tmp_path / "data"), "validation")) == held_out
    prepare([source], tmp_path / "other", salt="paprika", validation_fraction=0.25)
    assert set(documents(open_data(tmp_path / "other"), "validation")) != held_out


def test_growing_corpus_keeps_its_split_and_copies_stay_together(tmp_path) -> None:
    rows = records(100)
    prepare([write_records(tmp_path / "a.jsonl", rows)], tmp_path / "one")
    prepare([write_records(tmp_path / "b.jsonl", rows + records(100, seed=1) + rows)], tmp_path / "two")
    one, two = open_data(tmp_path / "one"), open_data(tmp_path / "two")
    assert set(documents(one, "validation")) <= set(documents(two, "validation"))
    assert set(documents(two, "train")).isdisjoint(documents(two, "validation"))


@pytest.mark.parametrize("count", [2, 3, 5])
@pytest.mark.parametrize("fraction", [1e-9, 0.1, 1 - 1e-9])
def test_few_documents_leave_neither_side_empty(tmp_path, count: int, fraction: float) -> None:
    source = write_records(tmp_path / "a.jsonl", records(count))
    manifest = prepare([source], tmp_path / "data", validation_fraction=fraction)
    assert all(split.documents > 0 and split.num_tokens > 0 for split in manifest.splits.values())


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_built_in_text_is_cut_into_contiguous_blocks(tmp_path, tokenizer: str) -> None:
    manifest = prepare([builtin_source()], tmp_path / "data", tokenizer=tokenizer, vocab_size=400)
    with builtin_source().open("rb") as stream:
        text = gzip.decompress(stream.read()).decode()
    data = open_data(tmp_path / "data")
    blocks = documents(data, "train") + documents(data, "validation")
    assert sum(map(len, blocks)) == len(text)
    # Each block stands somewhere in the text, and the places fill it without gap or overlap.
    spans = sorted((text.index(block), len(block)) for block in blocks)
    assert [start for start, _ in spans] == [0, *np.cumsum([size for _, size in spans])[:-1].tolist()]
    assert all(block.endswith("\n\n") for block in blocks if block != text[-len(block) :])
    held_out = manifest.splits["validation"].num_bytes / len(text)
    assert 0.09 < held_out < 0.11
    assert manifest.split_rule.key == "block"
    assert manifest.sources[0].documents == len(blocks)


def test_built_in_text_is_reproducible_and_the_known_one() -> None:
    with builtin_source().open("rb") as stream:
        packed = stream.read()
    assert packed[4:8] == b"\0\0\0\0"  # no time stamp
    digest = hashlib.sha256(gzip.decompress(packed)).hexdigest()
    assert digest == "86c4e6aa9db7c042ec79f339dcb96d42b0075e16b8fc2e86bf0ca57e2dc565ed"


def test_only_document_is_cut_wherever_it_stands(tmp_path) -> None:
    text = "".join(f"Line {i} of a play.\n" for i in range(200))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "play.txt").write_text(text)
    (tmp_path / "one" / "empty.txt").write_text(" \n")
    lone = write_records(tmp_path / "a.jsonl", [{"text": text}])
    results = [
        prepare([source], tmp_path / f"data{i}")
        for i, source in enumerate((tmp_path / "one" / "play.txt", tmp_path / "one", lone))
    ]
    assert len({manifest.digest() for manifest in results}) == 1
    assert results[0].split_rule.key == "block"


def test_several_text_files_are_a_document_each(tmp_path) -> None:
    folder = tmp_path / "plays"
    folder.mkdir()
    for i in range(12):
        (folder / f"{i:02d}.txt").write_text(f"Play {i}.\n" * 100)
    manifest = prepare([folder], tmp_path / "data")
    assert sum(split.documents for split in manifest.splits.values()) == 12
    assert [source.name for source in manifest.sources][:2] == ["plays/00.txt", "plays/01.txt"]
    assert manifest.sources[0].sha256 == hashlib.sha256((folder / "00.txt").read_bytes()).hexdigest()


def test_empty_documents_are_passed_over_and_counted(tmp_path) -> None:
    rows = [*records(30), {"text": ""}, {"text": " \n\t"}, {"text": ""}]
    manifest = prepare([write_records(tmp_path / "a.jsonl", rows)], tmp_path / "data")
    assert (manifest.sources[0].documents, manifest.sources[0].empty_documents) == (30, 3)
    assert sum(split.documents for split in manifest.splits.values()) == 30


def test_bpe_learns_from_the_training_side_alone(tmp_path) -> None:
    rows = records(100)
    source = write_records(tmp_path / "a.jsonl", rows)
    prepare([source], tmp_path / "plain")
    data = open_data(tmp_path / "plain")
    held_out = documents(data, "validation")
    # The hash looks at the group, so the text may change without changing sides.
    marked = [
        {"text": row["text"] + (" xylophone" * 5 if row["text"] in held_out else ""), "key": row["text"]}
        for row in rows
    ]
    plain = [{"text": row["text"], "key": row["text"]} for row in rows]
    for name, content in (("marked", marked), ("unmarked", plain)):
        write_records(tmp_path / f"{name}.jsonl", content)
        prepare([tmp_path / f"{name}.jsonl"], tmp_path / name, tokenizer="bpe", vocab_size=320, split_key="key")
    assert any("xylophone" in text for text in documents(open_data(tmp_path / "marked"), "validation"))
    assert load_tokenizer(tmp_path / "marked").fingerprint() == load_tokenizer(tmp_path / "unmarked").fingerprint()


def test_bpe_of_a_large_corpus_learns_from_a_sample(tmp_path, monkeypatch) -> None:
    source = write_records(tmp_path / "a.jsonl", records(300))
    learnt = []
    for limit in (10, 5_000, 10**9):
        monkeypatch.setattr(
            sys.modules["slipstream.data.prepare"], "sample_bytes", lambda vocab_size, limit=limit: limit
        )
        texts: list[str] = []
        real = tokenizer_module.train_bpe

        def spy(given, *, vocab_size: int, texts: list[str] = texts):
            texts += given
            return real(texts, vocab_size=vocab_size)

        monkeypatch.setattr(sys.modules["slipstream.data.prepare"], "train_bpe", spy)
        prepare([source], tmp_path / str(limit), tokenizer="bpe", vocab_size=300)
        learnt.append(len(texts))
    size = read_manifest(tmp_path / "10").splits["train"].documents
    assert 1 <= learnt[0] < 4
    assert 60 < learnt[1] < 200
    assert learnt[2] == size > 250


def test_tokenizer_that_exists_is_used(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", records(50))
    prepare([source], tmp_path / "first", tokenizer="bpe", vocab_size=300)
    tokenizer = load_tokenizer(tmp_path / "first")
    other = write_records(tmp_path / "b.jsonl", records(50, seed=5))
    manifest = prepare([other], tmp_path / "second", tokenizer=tokenizer)
    assert manifest.tokenizer.fingerprint == tokenizer.fingerprint()


@pytest.mark.parametrize("tokenizer", ["bytes", "bpe"])
def test_same_text_gives_the_same_files(tmp_path, tokenizer: str) -> None:
    source = write_records(tmp_path / "a.jsonl", records(80))
    for name in ("one", "two"):
        prepare([source], tmp_path / name, tokenizer=tokenizer, vocab_size=300)
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_processes_change_nothing(tmp_path, monkeypatch) -> None:
    """One set of files, by this process and by three, in many batches; a fault is the same sentence either way."""
    monkeypatch.setattr(sys.modules["slipstream.data.prepare"], "_ENCODE_CHARS", 500)
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(4):
        write_records(folder / f"{i}.jsonl", [*records(40, seed=i), {"text": ""}])
    for name, num_workers in (("one", 1), ("three", 3)):
        calls: list[Progress] = []
        prepare(
            [folder],
            tmp_path / name,
            tokenizer="bpe",
            vocab_size=300,
            shard_tokens=700,
            num_workers=num_workers,
            progress=calls.append,
        )
        written = [call.num_tokens for call in calls if call.phase == "write"]
        assert len(written) > 10
        assert written == sorted(written)
    assert files(tmp_path / "one") == files(tmp_path / "three")
    with (folder / "2.jsonl").open("a") as stream:
        stream.write("{}\n")
    said = []
    for num_workers in (1, 3):
        with pytest.raises(DataError, match=r"2\.jsonl, line 42: the field 'text' is missing") as caught:
            prepare([folder], tmp_path / "faulty", num_workers=num_workers)
        said.append(str(caught.value))
    assert said[0] == said[1]
    assert not (tmp_path / "faulty").exists()


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="the system does not tell")
def test_of_itself_it_starts_no_more_processes_than_it_has_cores(monkeypatch) -> None:
    module = sys.modules["slipstream.data.prepare"]
    monkeypatch.setattr(module, "_SHARED_BYTES", 0)
    monkeypatch.setattr(os, "cpu_count", lambda: 64)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {3, 5})
    assert module._num_workers([]) == 2


def test_batches_of_encoding_change_nothing(tmp_path, monkeypatch) -> None:
    source = write_records(tmp_path / "a.jsonl", records(80))
    prepare([source], tmp_path / "one")
    monkeypatch.setattr(sys.modules["slipstream.data.prepare"], "_ENCODE_CHARS", 100)
    prepare([source], tmp_path / "two")
    assert files(tmp_path / "one") == files(tmp_path / "two")


def test_progress_reaches_all_bytes_in_each_phase(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", records(80))
    calls: list[Progress] = []
    manifest = prepare(
        [source],
        tmp_path / "data",
        tokenizer="bpe",
        vocab_size=300,
        progress=calls.append,
    )
    total = sum(split.num_bytes for split in manifest.splits.values())
    last = {call.phase: (call.num_bytes, call.total_bytes) for call in calls}
    assert last == {"survey": (total, 0), "train tokenizer": (total, total), "write": (total, total)}
    assert calls[-1].num_tokens == sum(split.num_tokens for split in manifest.splits.values())


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", r"no text in a\.txt: empty, or nothing but white space"),
        (" \n\n ", r"no text in a\.txt"),
        ("Hello.\n", r"too little text in a\.txt .*: one document of 7 bytes\. .* at least 512 characters"),
    ],
)
def test_too_little_text_is_refused(tmp_path, content: str, message: str) -> None:
    (tmp_path / "a.txt").write_text(content)
    with pytest.raises(DataError, match=message):
        prepare([tmp_path / "a.txt"], tmp_path / "data")
    assert not (tmp_path / "data").exists()


def test_copies_of_one_text_are_refused(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"text": "to be"}] * 7)
    with pytest.raises(DataError, match="35 bytes in 7 documents, all with the same text"):
        prepare([source], tmp_path / "data")


def test_shortest_text_that_can_be_cut(tmp_path) -> None:
    (tmp_path / "a.txt").write_text("".join(f"{i:03d} " for i in range(128)))
    manifest = prepare([tmp_path / "a.txt"], tmp_path / "data")
    assert [split.documents for split in manifest.splits.values()] == [1, 1]


def test_only_one_group_is_refused(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", [{"text": f"text {i}", "author": "A"} for i in range(9)])
    with pytest.raises(DataError, match="all 9 documents have the same 'author'"):
        prepare([source], tmp_path / "data", split_key="author")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokenizer": "bte"}, r"unknown tokenizer 'bte'\. Did you mean 'bpe'\?|Did you mean 'bytes'\?"),
        ({"tokenizer": "bpe", "vocab_size": 10}, "vocab_size is 10"),
        ({"validation_fraction": 0.0}, "validation_fraction is 0.0"),
        ({"validation_fraction": 1.0}, "validation_fraction is 1.0"),
        ({"validation_fraction": float("nan")}, "validation_fraction is nan"),
        ({"shard_tokens": 0}, "shard_tokens is 0"),
        ({"num_workers": 0}, "num_workers is 0"),
        ({"num_workers": 10**20}, "and 1024 at most can"),
        ({"tokenizer": "bpe", "vocab_size": 10**20}, "allowed are 16777216 at most"),
    ],
)
def test_settings_out_of_range_are_refused(tmp_path, settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prepare([builtin_source()], tmp_path / "data", **settings)  # type: ignore[arg-type]


def test_folder_with_files_is_left_alone(tmp_path) -> None:
    out = tmp_path / "data"
    out.mkdir()
    (out / "mine.txt").write_text("precious")
    with pytest.raises(DataError, match="exists and holds files; nothing was written"):
        prepare([builtin_source()], out)
    with pytest.raises(DataError, match="exists and is a file"):
        prepare([builtin_source()], out / "mine.txt")
    assert files(out) == {"mine.txt": b"precious"}


def test_empty_folder_and_missing_parents_are_fine(tmp_path, monkeypatch) -> None:
    (tmp_path / "empty").mkdir()
    prepare([builtin_source()], tmp_path / "empty")
    monkeypatch.chdir(tmp_path)
    prepare([builtin_source()], "deep/er/data")
    assert read_manifest("deep/er/data") == read_manifest(tmp_path / "empty")
    assert [path.name for path in (tmp_path / "deep" / "er").iterdir()] == ["data"]


@pytest.mark.parametrize("target", ["empty", "to/be/made"])
def test_a_link_to_a_folder_is_filled_where_it_leads(tmp_path, target: str) -> None:
    (tmp_path / "disk" / "empty").mkdir(parents=True)
    (tmp_path / "link").symlink_to(Path("disk", target))
    manifest = prepare([builtin_source()], tmp_path / "link")
    assert (tmp_path / "link").is_symlink()
    assert read_manifest(tmp_path / "disk" / target) == manifest


def test_the_working_directory_can_be_filled(tmp_path, monkeypatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    manifest = prepare([builtin_source()], ".")
    assert read_manifest(tmp_path / "here") == manifest
    assert [path.name for path in tmp_path.iterdir()] == ["here"]


def test_what_no_folder_can_replace_is_refused_before_the_work(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr(
        sys.modules["slipstream.data.prepare"], "survey", lambda *_, **__: pytest.fail("the text was read")
    )
    (tmp_path / "volume").mkdir()
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path).name == "volume")
    with pytest.raises(DataError, match=r"volume is a mount point.*volume/data\."):
        prepare([builtin_source()], tmp_path / "volume")
    (tmp_path / "file").touch()
    with pytest.raises(DataError, match="file is a file"):
        prepare([builtin_source()], tmp_path / "file" / "data")
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(DataError, match="may not be written in"):
        prepare([builtin_source()], tmp_path / "a" / "b")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "volume"]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_to_end_leaves_nothing(tmp_path, monkeypatch, number: signal.Signals) -> None:
    def end(self: ByteTokenizer, folder: Path) -> None:
        assert any(Path(folder).glob("*.tokens"))
        assert signal.getsignal(number) is not signal.SIG_DFL  # which would end the tests
        signal.raise_signal(number)

    monkeypatch.setattr(ByteTokenizer, "save", end)
    before = signal.signal(number, signal.SIG_DFL)  # the tests may run without a terminal to hang up
    try:
        with pytest.raises(SystemExit) as caught:
            prepare([builtin_source()], tmp_path / "data")
        assert signal.getsignal(number) is signal.SIG_DFL
    finally:
        signal.signal(number, before)
    assert caught.value.code == 128 + number
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device"), RuntimeError("ours")])
def test_failure_while_writing_leaves_nothing(tmp_path, monkeypatch, error: BaseException) -> None:
    def fail(self: ByteTokenizer, folder: Path) -> None:
        assert any(Path(folder).glob("*.tokens"))
        raise error

    monkeypatch.setattr(ByteTokenizer, "save", fail)
    expected = DataError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected) as caught:
        prepare([builtin_source()], tmp_path / "data")
    assert list(tmp_path.iterdir()) == []
    if isinstance(error, OSError):
        assert "No space left on device. Nothing was left there." in str(caught.value)


def test_fault_in_the_last_line_is_found_before_anything_is_written(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", records(50))
    with source.open("a") as stream:
        stream.write('{"text": ')
    with pytest.raises(DataError, match="line 51: not JSON"):
        prepare([source], tmp_path / "data")
    assert [path.name for path in tmp_path.iterdir()] == ["a.jsonl"]


def test_text_that_changes_meanwhile_is_refused(tmp_path) -> None:
    source = write_records(tmp_path / "a.jsonl", records(50))

    def grow(progress: Progress) -> None:
        if progress.phase == "train tokenizer" and source.stat().st_mtime != 1:
            write_records(source, records(51))
            os.utime(source, (1, 1))

    with pytest.raises(DataError, match="the text changed while it was read"):
        prepare([source], tmp_path / "data", tokenizer="bpe", vocab_size=300, progress=grow)
    assert not (tmp_path / "data").exists()
