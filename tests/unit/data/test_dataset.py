import shutil

import pytest

from slipstream.data import ByteTokenizer, builtin_source, open_data, prepare, train_bpe
from slipstream.data.tokenizer import IDENTITY_FILE
from slipstream.errors import DataError


@pytest.fixture
def prepared(tmp_path):
    prepare([builtin_source()], tmp_path / "data")
    return tmp_path / "data"


def test_built_in_data_is_that_of_prepare(prepared) -> None:
    built_in, folder = open_data(""), open_data(prepared)
    assert built_in.manifest == folder.manifest
    for split in ("train", "validation"):
        left, right = getattr(built_in, split), getattr(folder, split)
        assert left.name == right.name == split
        assert (left.read(0, len(left)) == right.read(0, len(right))).all()


def test_built_in_data_leaves_no_file(tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    open_data("")
    assert list(tmp_path.iterdir()) == []


def test_tokenizer_of_other_shards_is_refused(prepared) -> None:
    train_bpe(["a b c a b c"], vocab_size=260).save(prepared)
    with pytest.raises(DataError, match=r"does not match the shards: .*'bpe', 259 tokens.*'bytes', 257 tokens"):
        open_data(prepared)


def test_tokenizer_other_than_expected_is_refused(prepared) -> None:
    right = ByteTokenizer().fingerprint()
    assert open_data(prepared, expected_tokenizer=right).tokenizer.name == "bytes"
    for folder in (prepared, ""):
        with pytest.raises(DataError, match=f"made with the tokenizer 'bytes' .*{right}.*expected is .* ffff"):
            open_data(folder, expected_tokenizer="ffff")


def test_missing_parts_are_refused(prepared, tmp_path) -> None:
    (prepared / IDENTITY_FILE).unlink()
    with pytest.raises(DataError, match=f"cannot read .*{IDENTITY_FILE}"):
        open_data(prepared)
    shutil.rmtree(prepared)
    with pytest.raises(DataError, match=r"is not prepared data: it has no manifest\.json"):
        open_data(prepared)


def test_one_changed_bit_is_found_only_when_asked(prepared) -> None:
    path = prepared / "train-00000.tokens"
    raw = bytearray(path.read_bytes())
    raw[1000] ^= 1
    path.write_bytes(raw)
    with pytest.raises(DataError, match=r"train-00000\.tokens is corrupt"):
        open_data(str(prepared))
    assert len(open_data(prepared, verify=False).train) > 0
