import dataclasses
import json

import pytest

from slipstream.data import inspect_data, open_data, prepare
from slipstream.errors import ConfigError, DataError


@pytest.fixture
def prepared(tmp_path):
    rows = [{"text": f"é{i:02d}"} for i in range(40)] + [{"text": ""}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    prepare([tmp_path / "a.jsonl"], tmp_path / "data", shard_tokens=50)
    return tmp_path / "data"


def test_report_counts_what_is_there(prepared) -> None:
    report = inspect_data(prepared, planned_tokens=1000)
    data = open_data(prepared)
    assert [split.name for split in report.splits] == ["train", "validation"]
    assert sum(split.documents for split in report.splits) == 40
    assert report.empty_documents == 1
    assert sum(split.fraction for split in report.splits) == pytest.approx(1)
    for split, tokens in zip(report.splits, (data.train, data.validation)):
        assert split.num_tokens == len(tokens) == split.documents * 5
        assert split.num_bytes == split.documents * 4
        assert split.tokens_per_byte == pytest.approx(5 / 4)
        assert split.num_shards == -(-split.num_tokens // 50)
    assert report.epochs == pytest.approx(1000 / len(data.train))
    assert inspect_data(prepared).epochs is None
    assert report.digest == data.manifest.digest()


def test_samples_are_decoded_and_show_where_documents_end(prepared) -> None:
    report = inspect_data(prepared, num_samples=2, sample_tokens=10)
    train = report.splits[0]
    assert [sample.start for sample in train.samples] == [0, train.num_tokens // 2]
    first = train.samples[0].text.split("<|endoftext|>")
    assert len(first) == 3
    assert first[0][0] == first[1][0] == "é"
    assert first[2] == ""


def test_samples_stop_at_the_end(prepared) -> None:
    report = inspect_data(prepared, num_samples=1, sample_tokens=10**6)
    assert [split.samples[0].num_tokens for split in report.splits] == [split.num_tokens for split in report.splits]
    assert inspect_data(prepared, num_samples=0).splits[0].samples == []


def test_report_is_json(prepared) -> None:
    table = json.loads(json.dumps(dataclasses.asdict(inspect_data(prepared))))
    assert table["tokenizer"]["name"] == "bytes"
    assert table["splits"][1]["samples"][0]["text"]


def test_corrupt_data_is_refused(prepared) -> None:
    path = prepared / "validation-00000.tokens"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(DataError, match="cut short"):
        inspect_data(prepared)


@pytest.mark.parametrize("count", [-1, 1001])
def test_a_number_of_samples_that_nobody_looks_at_is_refused(prepared, count) -> None:
    with pytest.raises(ConfigError, match=f"num_samples is {count}; it must be from 0 to 1000"):
        inspect_data(prepared, num_samples=count)
