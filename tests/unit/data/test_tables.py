import itertools
import json
from pathlib import Path
from typing import Any

import pytest

from slipstream.data import prepare
from slipstream.data.files import find_files
from slipstream.data.records import Placed
from slipstream.data.sources import read_placed
from slipstream.errors import DataError

pa = pytest.importorskip("pyarrow")
parquet = pytest.importorskip("pyarrow.parquet")

ROWS = [{"id": i, "text": f"text {i} é", "author": f"author {i % 7}"} for i in range(300)]


def table(rows: list[dict[str, Any]]) -> Any:
    return pa.Table.from_pylist(rows)


def write_parquet(path: Path, rows: list[dict[str, Any]], *, group: int = 100) -> Path:
    parquet.write_table(table(rows), path, row_group_size=group, compression="zstd")
    return path


def write_arrow(path: Path, rows: list[dict[str, Any]], *, group: int = 100, as_file: bool = False) -> Path:
    content = table(rows)
    writer = (pa.ipc.new_file if as_file else pa.ipc.new_stream)(str(path), content.schema)
    with writer:
        writer.write_table(content, max_chunksize=group)
    return path


def read(path: Path, **place: int) -> list[Placed]:
    (source,) = find_files([path])
    return list(read_placed(source, text_field="text", split_key="author", **place))


WRITERS = {
    "parquet": lambda path, rows, **group: write_parquet(path / "a.parquet", rows, **group),
    "arrow stream": lambda path, rows, **group: write_arrow(path / "a.arrow", rows, **group),
    "arrow file": lambda path, rows, **group: write_arrow(path / "a.arrow", rows, as_file=True, **group),
}
every_kind = pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)


@every_kind
@pytest.mark.parametrize("group", [1000, 130, 7])
def test_rows_are_documents_from_any_place_on(tmp_path, write, group: int) -> None:
    whole = read(write(tmp_path, ROWS, group=group))
    assert [(document.text, document.group) for _, _, document in whole] == [(r["text"], r["author"]) for r in ROWS]
    assert [(number, row) for number, row, _ in whole] == [divmod(i, group) for i in range(300)]
    for start in (0, 1, 6, 128, 129, 130, 131, 258, 299):
        number, row, _ = whole[start]
        assert read(tmp_path / whole_name(tmp_path), group=number, row=row) == whole[start:]


def whole_name(folder: Path) -> str:
    return next(path.name for path in folder.iterdir())


@every_kind
def test_tables_and_lines_give_the_same_data(tmp_path, write) -> None:
    (tmp_path / "table").mkdir()
    source = write(tmp_path / "table", ROWS)
    lines = tmp_path / "a.jsonl"
    lines.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    digests = {prepare([each], tmp_path / f"out{i}").digest() for i, each in enumerate((source, lines))}
    assert len(digests) == 1


def test_folder_that_datasets_saved(tmp_path) -> None:
    """As `Dataset.save_to_disk` lays it out, with a cache of `map` that is no part of it."""
    folder = tmp_path / "saved" / "train"
    folder.mkdir(parents=True)
    for i in range(2):
        write_arrow(folder / f"data-0000{i}-of-00002.arrow", ROWS[i::2])
    write_arrow(folder / "cache-0123456789abcdef.arrow", ROWS)
    names = [f"data-0000{i}-of-00002.arrow" for i in range(2)]
    (folder / "state.json").write_text(json.dumps({"_data_files": [{"filename": name} for name in names]}))
    (folder / "dataset_info.json").write_text("{}")
    assert [file.name for file in find_files([tmp_path / "saved"])] == [f"saved/train/{name}" for name in names]
    (folder / "state.json").write_text('{"something": "else"}')
    assert len(find_files([tmp_path / "saved"])) == 3


def test_faulty_rows_are_named(tmp_path) -> None:
    rows = [dict(row) for row in ROWS]
    rows[237]["text"] = None
    with pytest.raises(DataError, match=r"a\.parquet, row 237 \(from 0\): the field 'text' is null.* mend the row"):
        read(write_parquet(tmp_path / "a.parquet", rows))
    with pytest.raises(DataError, match=r"row 237 "):
        read(tmp_path / "a.parquet", group=2, row=30)
    with pytest.raises(DataError, match=r"row 0 \(from 0\): the field 'text' must be a text, given a number"):
        read(write_parquet(tmp_path / "b.parquet", [{"text": 5, "author": "A"}]))
    said = r"c\.arrow has no column 'text'\. Did you mean 'txt'\? Columns here: 'txt', 'author'"
    with pytest.raises(DataError, match=said):
        read(write_arrow(tmp_path / "c.arrow", [{"txt": "a", "author": "A"}]))
    content = pa.array([b"fine", b"caf\xe9"]).cast(pa.binary())
    broken = pa.Array.from_buffers(pa.string(), 2, content.buffers())
    parquet.write_table(pa.table({"text": broken, "author": ["A", "B"]}), tmp_path / "d.parquet")
    with pytest.raises(DataError, match=r"d\.parquet, row 1 \(from 0\): not UTF-8: byte 3 is 0xe9"):
        read(tmp_path / "d.parquet")


@every_kind
def test_a_name_that_two_columns_have_is_refused(tmp_path, write, monkeypatch) -> None:
    names = ["text", "author", "text"]
    monkeypatch.setitem(globals(), "table", lambda rows: pa.Table.from_arrays([["a"], ["A"], ["b"]], names=names))
    with pytest.raises(DataError, match="has 2 columns 'text', and nothing says which"):
        read(write(tmp_path, ROWS))


@every_kind
def test_damaged_tables_are_refused(tmp_path, write) -> None:
    path = write(tmp_path, ROWS)
    whole = path.read_bytes()
    for damage in (b"", b"neither of these formats", whole[: len(whole) // 2]):
        path.write_bytes(damage)
        with pytest.raises(DataError, match=rf"cannot read .*{path.name}: \S.*\. Check the file"):
            read(path)


def test_a_stream_that_was_cut_between_two_batches_is_refused(tmp_path) -> None:
    ends = []
    with (tmp_path / "a.arrow").open("wb") as raw, pa.ipc.new_stream(raw, table(ROWS).schema) as writer:
        for batch in table(ROWS).to_batches(max_chunksize=100):
            writer.write_batch(batch)
            ends.append(raw.tell())
    whole = (tmp_path / "a.arrow").read_bytes()
    assert len(ends) == 3
    assert len(read(tmp_path / "a.arrow")) == len(ROWS)
    for end in ends:
        (tmp_path / "a.arrow").write_bytes(whole[:end])
        with pytest.raises(DataError, match=r"cannot read .*: it lacks the mark that ends a stream"):
            read(tmp_path / "a.arrow")


def test_what_follows_a_stream_is_not_left_out_without_a_word(tmp_path) -> None:
    path = write_arrow(tmp_path / "a.arrow", ROWS)
    path.write_bytes(path.read_bytes() * 2)
    with pytest.raises(DataError, match="goes on after the end of its arrow stream"):
        read(path)


def test_only_what_is_needed_is_read(tmp_path) -> None:
    """The first documents of a file come without the rest of it."""
    path = write_parquet(tmp_path / "a.parquet", ROWS, group=50)
    with path.open("r+b") as stream:
        stream.seek(path.stat().st_size // 2)
        stream.write(b"\0" * 64)
    (source,) = find_files([path])
    placed = itertools.islice(read_placed(source, text_field="text", split_key=None), 10)
    assert [row for _, row, _ in placed] == list(range(10))
    with pytest.raises(DataError, match="cannot read"):
        read(path)
