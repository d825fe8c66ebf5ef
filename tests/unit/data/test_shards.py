import dataclasses
import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import (
    ByteTokenizer,
    Manifest,
    ShardInfo,
    ShardWriter,
    SplitInfo,
    SplitRule,
    TokenArray,
    TokenizerInfo,
    open_split,
    read_manifest,
)
from slipstream.data.manifest import MANIFEST_FILE
from slipstream.data.shards import HEADER
from slipstream.errors import DataError


def write_data(folder: Path, ids: np.ndarray, *, vocab_size: int = 257, shard_tokens: int = 10) -> Manifest:
    splits = {}
    for split in ("train", "validation"):
        with ShardWriter(folder, split, vocab_size=vocab_size, shard_tokens=shard_tokens) as writer:
            for part in np.array_split(ids, 4):
                writer.write(part)
        splits[split] = SplitInfo(documents=1, num_bytes=len(ids), num_tokens=len(ids), shards=writer.shards)
    manifest = Manifest(
        tokenizer=TokenizerInfo(
            name="bytes", vocab_size=vocab_size, eos_id=256, fingerprint=ByteTokenizer().fingerprint()
        ),
        split_rule=SplitRule(key="text", salt="", validation_fraction=0.1, threshold="0" * 16),
        splits=splits,
        sources=[],
    )
    (folder / MANIFEST_FILE).write_text(manifest.to_json())
    return manifest


def edit_manifest(folder: Path, change) -> None:
    table = json.loads((folder / MANIFEST_FILE).read_text())
    change(table)
    (folder / MANIFEST_FILE).write_text(json.dumps(table))


@pytest.mark.parametrize(("vocab_size", "itemsize"), [(257, 2), (65_536, 2), (65_537, 4)])
def test_ids_come_back_from_shards_of_the_fitting_type(tmp_path, vocab_size: int, itemsize: int) -> None:
    ids = np.random.default_rng(0).integers(0, vocab_size, 37)
    ids[0] = vocab_size - 1
    manifest = write_data(tmp_path, ids, vocab_size=vocab_size)
    shards = manifest.splits["train"].shards
    assert [shard.num_tokens for shard in shards] == [10, 10, 10, 7]
    assert [shard.name for shard in shards][:2] == ["train-00000.tokens", "train-00001.tokens"]
    assert (tmp_path / shards[0].name).stat().st_size == shards[0].num_bytes == HEADER.size + 10 * itemsize
    tokens = open_split(tmp_path, "train")
    assert tokens.read(0, len(tokens)).dtype == np.int64
    np.testing.assert_array_equal(tokens.read(0, len(tokens)), ids)


def test_layout_of_a_shard_is_the_documented_one(tmp_path) -> None:
    with ShardWriter(tmp_path, "train", vocab_size=257, shard_tokens=10) as writer:
        writer.write(np.array([1, 256]))
    raw = (tmp_path / "train-00000.tokens").read_bytes()
    payload = b"\x01\x00\x00\x01"
    assert raw[:8] == b"SLIPTOK\0"
    assert [int.from_bytes(raw[a:b], "little") for a, b in ((8, 12), (12, 16), (16, 24))] == [1, 2, 2]
    assert raw[24:56] == hashlib.sha256(payload).digest()
    assert raw[64:] == payload


@given(sizes=st.lists(st.integers(0, 5), min_size=1, max_size=6), data=st.data())
def test_array_reads_over_all_parts(sizes: list[int], data: st.DataObject) -> None:
    ids = np.arange(sum(sizes))
    tokens = TokenArray("train", np.split(ids, np.cumsum(sizes)[:-1]))
    start = data.draw(st.integers(0, len(ids)))
    stop = data.draw(st.integers(start, len(ids)))
    assert len(tokens) == len(ids)
    np.testing.assert_array_equal(tokens.read(start, stop), ids[start:stop])


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (2, 1), (0, 6), (6, 7)])
def test_array_never_cuts_a_range_short(start: int, stop: int) -> None:
    with pytest.raises(IndexError, match="train split, which has 5"):
        TokenArray("train", [np.arange(5)]).read(start, stop)


def test_reading_gives_a_copy(tmp_path) -> None:
    write_data(tmp_path, np.arange(20))
    tokens = open_split(tmp_path, "train")
    tokens.read(0, 20)[:] = 0
    assert tokens.read(19, 20)[0] == 19


def test_nothing_written_makes_no_shard(tmp_path) -> None:
    with ShardWriter(tmp_path, "train", vocab_size=257, shard_tokens=10) as writer:
        writer.write(np.array([], dtype=np.int64))
    assert writer.shards == []
    assert list(tmp_path.iterdir()) == []


def truncate(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-3])


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


def flip(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[-1] ^= 1
    path.write_bytes(raw)


def overwrite(start: int, content: bytes):
    def change(path: Path) -> None:
        raw = path.read_bytes()
        path.write_bytes(raw[:start] + content + raw[start + len(content) :])

    return change


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (Path.unlink, "cannot read the shard .*validation-00001.tokens: No such file"),
        (truncate, "is cut short: 81 bytes, the manifest says 84"),
        (lengthen, "is longer than it was: 85 bytes, the manifest says 84"),
        (flip, "is corrupt: its sha256 is"),
        (overwrite(0, b"PK"), "is not a token shard"),
        (overwrite(8, b"\x09"), "has format version 9; this program reads 1"),
        (overwrite(12, b"\x04"), "does not match the manifest: bytes an id 4, the manifest says 2"),
        (overwrite(16, b"\x0b"), "does not match the manifest: number of ids 11, the manifest says 10"),
        (overwrite(24, b"\0\0\0\0"), "does not match the manifest: sha256"),
    ],
)
def test_damaged_shards_are_refused(tmp_path, damage, message: str) -> None:
    write_data(tmp_path, np.arange(37))
    damage(tmp_path / "validation-00001.tokens")
    open_split(tmp_path, "train")
    with pytest.raises(DataError, match=f"{message}.*again"):
        open_split(tmp_path, "validation")


def test_only_the_checksum_can_be_left_out(tmp_path) -> None:
    write_data(tmp_path, np.arange(20))
    flip(tmp_path / "train-00000.tokens")
    assert len(open_split(tmp_path, "train", verify=False)) == 20
    truncate(tmp_path / "train-00000.tokens")
    with pytest.raises(DataError, match="cut short"):
        open_split(tmp_path, "train", verify=False)


def test_exchanged_shards_are_refused(tmp_path) -> None:
    write_data(tmp_path, np.arange(20))
    first, second = tmp_path / "train-00000.tokens", tmp_path / "train-00001.tokens"
    first.rename(tmp_path / "x")
    second.rename(first)
    (tmp_path / "x").rename(second)
    with pytest.raises(DataError, match="sha256"):
        open_split(tmp_path, "train", verify=False)


def test_manifest_round_trips(tmp_path) -> None:
    manifest = write_data(tmp_path, np.arange(20))
    assert read_manifest(tmp_path) == manifest
    assert len(manifest.digest()) == 64


def test_digest_follows_the_ids_and_the_tokenizer(tmp_path) -> None:
    folders = [tmp_path / str(i) for i in range(3)]
    for folder in folders:
        folder.mkdir()
    first = write_data(folders[0], np.arange(20))
    assert write_data(folders[1], np.arange(20)).digest() == first.digest()
    assert write_data(folders[2], np.arange(1, 21)).digest() != first.digest()
    other = dataclasses.replace(first, tokenizer=dataclasses.replace(first.tokenizer, fingerprint="f" * 64))
    assert other.digest() != first.digest()
    assert dataclasses.replace(first, sources=[]).digest() == first.digest()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.update(version=2), "has version 2; this program reads 1"),
        (lambda t: t.pop("sources"), "missing or unknown entries: sources"),
        (lambda t: t["tokenizer"].update(colour="red"), "tokenizer is damaged: missing or unknown entries: colour"),
        (lambda t: t["splits"]["train"]["shards"][0].pop("sha256"), "train, shards is damaged: .*entries: sha256"),
        (lambda t: t["splits"]["train"].update(num_tokens="9"), "num_tokens is damaged: '9' is not"),
        (lambda t: t["splits"].pop("validation"), r"lists the splits \['train'\]"),
        (lambda t: t.update(splits=[]), r"splits is damaged: \[\] is not"),
    ],
)
def test_damaged_manifests_are_refused(tmp_path, change, message: str) -> None:
    write_data(tmp_path, np.arange(20))
    edit_manifest(tmp_path, change)
    with pytest.raises(DataError, match=message):
        read_manifest(tmp_path)


def test_missing_manifest_and_broken_json_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"is not prepared data: it has no manifest\.json"):
        read_manifest(tmp_path)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(DataError, match="is not prepared data"):
        read_manifest(tmp_path / "a.txt")
    for content in ('{"version": 1', "\xff"):
        (tmp_path / MANIFEST_FILE).write_text(content, encoding="latin-1")
        with pytest.raises(DataError, match="is damaged, not JSON"):
            read_manifest(tmp_path)
    (tmp_path / MANIFEST_FILE).write_text("[]")
    with pytest.raises(DataError, match="has version None"):
        read_manifest(tmp_path)


def test_shard_info_is_plain_data() -> None:
    info = ShardInfo(name="a", num_tokens=1, num_bytes=66, sha256="0")
    with pytest.raises(dataclasses.FrozenInstanceError):
        info.name = "b"  # type: ignore[misc]
