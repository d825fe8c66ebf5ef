import collections
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from slipstream.data import Dataset, StreamLoader, open_data, prepare
from slipstream.data import stream as stream_module
from slipstream.data.stream import Place, TokenStream
from slipstream.errors import DataError

TEXTS = [f"document {i} " + "word " * (i % 9) for i in range(120)]


def write_lines(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(autouse=True)
def _small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_module, "_BLOCK_ROWS", 16)


@pytest.fixture(params=["jsonl", "jsonl.zst", "parquet"])
def corpus(request, tmp_path) -> Path:
    """Four files of 30 documents; rows of parquet in groups of 20."""
    folder = tmp_path / "corpus"
    folder.mkdir()
    for i in range(4):
        texts = TEXTS[30 * i : 30 * i + 30]
        path = write_lines(tmp_path / f"{i}.jsonl", texts)
        if request.param == "parquet":
            parquet, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
            parquet.write_table(pa.table({"text": texts}), folder / f"{i}.parquet", row_group_size=20)
        elif request.param == "jsonl.zst":
            zstandard = pytest.importorskip("zstandard")
            (folder / f"{i}.jsonl.zst").write_bytes(zstandard.compress(path.read_bytes()))
        else:
            path.rename(folder / path.name)
    return folder


@pytest.fixture
def data(corpus, tmp_path) -> Dataset:
    prepare([corpus], tmp_path / "data", validation_fraction=0.2)
    return open_data(tmp_path / "data", stream=[str(corpus)])


def loader(data: Dataset, **changes: Any) -> StreamLoader:
    assert data.stream is not None
    return StreamLoader(data.stream, **({"sequence_length": 10, "batch_size": 4, "seed": 1} | changes))


def texts_of(data: Dataset, num_documents: int, *, seed: int = 1) -> list[str]:
    assert data.stream is not None
    found = itertools.islice(data.stream.documents(Place(), seed=seed), num_documents)
    return [data.tokenizer.decode(ids) for _, ids in found]


def same(batch: Any, other: Any) -> bool:
    return bool(
        batch.index == other.index and (batch.inputs == other.inputs).all() and (batch.targets == other.targets).all()
    )


def test_each_epoch_has_every_training_document_once_and_no_other(data) -> None:
    size = data.manifest.splits["train"].documents
    assert 60 < size < 120
    documents = texts_of(data, 3 * size)
    packed = data.train.read(0, len(data.train))
    expected = set(
        data.tokenizer.decode(packed[packed != data.tokenizer.eos_id]).replace("document", "\0document").split("\0")
    )
    epochs = [documents[i * size : (i + 1) * size] for i in range(3)]
    for epoch in epochs:
        assert set(epoch) == expected - {""}
        assert max(collections.Counter(epoch).values()) == 1
    assert epochs[0] != epochs[1] != epochs[2]
    assert texts_of(data, size) == epochs[0]
    assert texts_of(data, size, seed=2) != epochs[0]


def test_batches_are_the_documents_one_after_another(data) -> None:
    assert data.stream is not None
    batches = [loader(data).batch(i) for i in range(3)]
    ids = np.concatenate([ids for _, ids in itertools.islice(data.stream.documents(Place(), seed=1), 40)])
    assert (np.concatenate([batch.inputs.ravel() for batch in batches]) == ids[:120]).all()
    assert (np.concatenate([batch.targets.ravel() for batch in batches]) == ids[1:121]).all()
    assert batches[0].inputs.shape == (4, 10)
    assert batches[0].num_tokens == 40


def test_resumed_from_any_batch_is_as_if_never_stopped(data) -> None:
    """Through more than two epochs; the state goes through JSON, and the batch may have another size from there on."""
    whole = loader(data)
    batches, states = [], []
    for index in range(250):
        states.append(json.loads(json.dumps(whole.state(index))))
        batches.append(whole.batch(index))
    assert {state["place"]["epoch"] for state in states} >= {0, 1, 2}
    assert {state["file_name"][:7] for state in states} == {"corpus/"}
    assert max(state["place"]["token"] for state in states) > 0
    for index in (*range(0, 60, 7), 249):
        resumed = loader(data)
        resumed.resume(index, states[index])
        assert all(same(resumed.batch(i), batches[i]) for i in range(index, min(index + 9, 250)))
    halves = loader(data, batch_size=2)
    halves.resume(100, states[100])
    found = np.concatenate([halves.batch(100).inputs, halves.batch(101).inputs])
    assert (found == batches[100].inputs).all()


def test_batches_are_the_same_whatever_was_read_before(data) -> None:
    """As two stages of one rank ask for them, and further back than is kept."""
    expected = [loader(data).batch(i) for i in range(20)]
    one = loader(data)
    for index in (0, 1, 0, 1, 5, 4, 19, 18, 10, 0, 11, 2):
        assert same(one.batch(index), expected[index])
    later = loader(data)
    later.resume(5, one.state(5))
    assert same(later.batch(6), expected[6])
    with pytest.raises(DataError, match="batch 4 was asked for, but the stream is read from batch 5 on"):
        later.batch(4)


def test_a_long_document_spans_batches(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", ["x" * 500, *TEXTS])
    prepare([source], tmp_path / "data", validation_fraction=1e-9)
    data = open_data(tmp_path / "data", stream=[str(source)])
    whole = loader(data)
    states = [whole.state(i) for i in range(40)]
    assert max(state["place"]["token"] for state in states) > 400
    for index in range(0, 40, 3):
        resumed = loader(data)
        resumed.resume(index, states[index])
        assert same(resumed.batch(index), loader(data).batch(index))


def test_digest_tells_streams_apart(data, corpus) -> None:
    def digest(**changes: Any) -> str:
        return open_data(data_folder, stream=[str(corpus)], **changes).digest()

    data_folder = corpus.parent / "data"
    before = digest()
    assert before == data.digest() != data.manifest.digest()
    path = sorted(corpus.iterdir())[1]
    content = path.read_bytes()
    path.write_bytes(content[:-9] + bytes([content[-9] ^ 1]) + content[-8:])
    assert data.digest() != before
    path.write_bytes(content)
    assert digest() == before
    path.rename(corpus / f"renamed{''.join(path.suffixes)}")
    assert digest() != before


def test_what_cannot_be_streamed_is_refused(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tmp_path / "data")
    with pytest.raises(DataError, match="there is no file or folder"):
        open_data(tmp_path / "data", stream=[str(tmp_path / "nowhere")])
    with pytest.raises(DataError, match=r"line 1: the field 'txt' is missing\. Did you mean 'text'"):
        open_data(tmp_path / "data", stream=[str(source)], text_field="txt")
    with pytest.raises(DataError, match="was cut from one text, so its rule cannot tell"):
        open_data("", stream=[str(source)])
    empty = write_lines(tmp_path / "empty.jsonl", ["", " "])
    data = open_data(tmp_path / "data", stream=[str(empty)])
    with pytest.raises(DataError, match=r"no document of .*empty\.jsonl is for training"):
        loader(data).batch(0)
    data = open_data(tmp_path / "data", stream=[str(source)])
    for state, said in (({}, "does not say where"), ({"place": {"epo": 1}, "next_batch": 3}, "does not say where")):
        with pytest.raises(DataError, match=said):
            loader(data).resume(3, state)
    with pytest.raises(DataError, match="says where batch 2 of the stream begins, needed is 3"):
        loader(data).resume(3, loader(data).state(2))


def test_a_document_that_has_changed_is_noticed(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tmp_path / "data")
    stream = open_data(tmp_path / "data", stream=[str(source)]).stream
    assert isinstance(stream, TokenStream)
    changed = StreamLoader(stream, sequence_length=10, batch_size=1)
    changed.resume(1, {"next_batch": 1, "place": {"token": 999}})
    with pytest.raises(DataError, match="the stream has changed: the document that reading was to go on with, at tok"):
        changed.batch(1)


def test_a_fault_far_in_is_named(tmp_path) -> None:
    source = write_lines(tmp_path / "a.jsonl", TEXTS)
    prepare([source], tmp_path / "data")
    with source.open("a") as stream:
        stream.write("[]\n")
    faulty = loader(open_data(tmp_path / "data", stream=[str(source)]))
    with pytest.raises(DataError, match=r"a\.jsonl, line 121: a JSON object is needed"):
        [faulty.batch(index) for index in range(100)]
