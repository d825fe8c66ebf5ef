import gzip
import hashlib
import itertools
import os
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data.files import SourceFile, find_files
from slipstream.data.records import Document
from slipstream.data.sources import cut_blocks, read_chunks, read_documents, read_placed
from slipstream.errors import DataError


def read(path: Path, *, text_field: str = "text", split_key: str | None = None) -> list[Document]:
    (source,) = find_files([path])
    return list(read_documents(source, text_field=text_field, split_key=split_key))


def write(path: Path, content: bytes) -> Path:
    if path.suffix == ".gz":
        content = gzip.compress(content)
    elif path.suffix == ".zst":
        # Two frames: large corpora are packed in many, and half of a line may be in each.
        zstandard = pytest.importorskip("zstandard")
        half = len(content) // 2
        content = zstandard.compress(content[:half]) + zstandard.compress(content[half:])
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_text_file_is_one_document_as_it_stands(tmp_path, suffix: str) -> None:
    path = write(tmp_path / f"a.txt{suffix}", "Où\r\n\r\nthere\n".encode())
    assert read(path) == [Document(text="Où\r\n\r\nthere\n")]


@pytest.mark.parametrize("suffix", ["", ".gz", ".zst"])
def test_records_give_text_and_group(tmp_path, suffix: str) -> None:
    lines = b'{"text": "one", "author": "A"}\n\n   \n{"author": "B\\u00e9", "text": ""}\n{"text": "x\\ny", "author": 3}'
    path = write(tmp_path / f"a.jsonl{suffix}", lines)
    assert read(path, split_key="author") == [
        Document(text="one", group="A"),
        Document(text="", group="Bé"),
        Document(text="x\ny", group="3"),
    ]
    assert read(path, text_field="text")[2] == Document(text="x\ny")


def test_byte_order_mark_is_not_text(tmp_path) -> None:
    assert read(write(tmp_path / "a.txt", b"\xef\xbb\xbfhello"))[0].text == "hello"
    assert read(write(tmp_path / "a.jsonl", b'\xef\xbb\xbf{"text": "hello"}'))[0].text == "hello"
    assert read(write(tmp_path / "b.txt", b"hello\xef\xbb\xbf"))[0].text == "hello\ufeff"


def test_folders_are_searched_in_order_and_other_files_passed_over(tmp_path) -> None:
    folder = tmp_path / "books"
    (folder / "sub").mkdir(parents=True)
    for name in ("b.txt", "a.jsonl", "sub/c.txt.gz", "notes.md", ".hidden.txt"):
        (folder / name).write_bytes(b"")
    single = write(tmp_path / "z.txt", b"")
    names = [file.name for file in find_files([single, folder])]
    assert names == ["z.txt", "books/a.jsonl", "books/b.txt", "books/sub/c.txt.gz"]


def test_a_file_is_taken_once_however_many_ways_lead_to_it(tmp_path) -> None:
    folder = tmp_path / "books"
    (folder / "sub").mkdir(parents=True)
    for name in ("a.txt", "sub/b.txt"):
        (folder / name).write_bytes(b"")
    (folder / "loop").symlink_to(".")
    (folder / "sub" / "up").symlink_to("..")
    (folder / "z").symlink_to("sub")
    (folder / "z.txt").symlink_to("a.txt")
    (tmp_path / "elsewhere").mkdir()
    write(tmp_path / "elsewhere" / "c.txt", b"")
    (folder / "far").symlink_to(tmp_path / "elsewhere")
    names = ["books/a.txt", "books/far/c.txt", "books/sub/b.txt"]
    assert [file.name for file in find_files([folder])] == names
    assert [file.name for file in find_files([folder, folder / "a.txt", folder / "sub", folder])] == names


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: os.symlink("nothing", path)], ids=["pipe", "broken link"])
def test_what_is_named_as_a_text_and_is_no_file_is_refused(tmp_path, make) -> None:
    write(tmp_path / "a.txt", b"")
    make(tmp_path / "b.txt")
    with pytest.raises(DataError, match=r"b\.txt is a link to nothing, or no file"):
        find_files([tmp_path])


def test_digest_is_of_the_stored_file(tmp_path) -> None:
    path = write(tmp_path / "a.txt.gz", b"hello")
    (source,) = find_files([path])
    stored = path.read_bytes()
    assert source.digest() == (len(stored), hashlib.sha256(stored).hexdigest())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"caf\xc3\xa9 \xff", r"a\.txt is not UTF-8: byte 6 is 0xff"),
        ("a.txt", b"cut \xe6\x9c", r"not UTF-8: byte 4 is 0xe6"),
        ("a.txt.gz", b"caf\xe9!", r"not UTF-8: byte 3 of the unpacked text is 0xe9"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xff"}\n', r"a\.jsonl is not UTF-8: byte 24 is 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2: not JSON: Expecting value at column 10"),
        ("a.jsonl", b"[" * 100_000 + b"\n", r"line 1: not JSON"),
        ("a.jsonl", b'["text"]\n', r"line 1: a JSON object is needed, given a list"),
        ("a.jsonl", b'\n{"txt": "a", "id": 1}\n', r"line 2: the field 'text' is missing\. Did you mean 'txt'\? Fields"),
        ("a.jsonl", b"{}\n", r"line 1: the field 'text' is missing\. Fields here: none"),
        ("a.jsonl", b'{"text": null}\n', r"line 1: the field 'text' is null"),
        ("a.jsonl", b'{"text": 5}\n', r"line 1: the field 'text' must be a text, given a number"),
        ("a.jsonl", b'{"text": "ab\\ud800"}\n', r"line 1: character 2 of the text is half of a surrogate pair"),
    ],
)
def test_faulty_text_is_named_with_its_place(tmp_path, name: str, content: bytes, message: str) -> None:
    with pytest.raises(DataError, match=message):
        read(write(tmp_path / name, content))


@pytest.mark.parametrize("start", ["", "a", "ab", "abc"])
@pytest.mark.parametrize("sign", ["é", "本", "🂱"])
def test_chunks_may_end_inside_a_character(tmp_path, start: str, sign: str) -> None:
    text = start + sign * 600_000
    (source,) = find_files([write(tmp_path / "a.txt", text.encode())])
    chunks = list(read_chunks(source))
    assert len(chunks) > 2
    assert "".join(chunks) == text


def test_offset_is_counted_over_all_chunks(tmp_path) -> None:
    path = write(tmp_path / "a.txt", "é".encode() * 1_100_000 + b"\xff")
    with pytest.raises(DataError, match="byte 2200000 is 0xff"):
        read(path)


def test_half_a_character_is_no_group(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a", "author": "A"}\n{"text": "b", "author": "B\\udfff"}\n')
    with pytest.raises(DataError, match="line 2: character 1 of the field 'author' is half of a surrogate pair"):
        read(path, split_key="author")


def test_groups_need_the_field(tmp_path) -> None:
    path = write(tmp_path / "a.jsonl", b'{"text": "a", "author": "A"}\n{"text": "b"}\n')
    with pytest.raises(DataError, match="line 2: the field 'author' is missing"):
        read(path, split_key="author")
    with pytest.raises(DataError, match=r"split key 'author' needs records, but .*b\.txt is plain text"):
        read(write(tmp_path / "b.txt", b"a"), split_key="author")


@pytest.mark.parametrize(
    "damage",
    [b"not gzip at all", gzip.compress(b"hello" * 99)[:-12], b"\x1f\x8b\x08\x00" + bytes(30)],
    ids=[
        "other",
        "cut short",
        "header alone",
    ],  # gzip writes the time, which is not the same in each of pytest's workers
)
def test_damaged_gzip_is_refused(tmp_path, damage: bytes) -> None:
    path = tmp_path / "a.txt.gz"
    path.write_bytes(damage)
    with pytest.raises(DataError, match=r"cannot read .*a\.txt\.gz"):
        read(path)


def test_damaged_zst_is_refused(tmp_path) -> None:
    zstandard = pytest.importorskip("zstandard")
    whole = zstandard.compress(b"hello" * 99)
    for damage in (b"not zstandard at all", whole[:-3], whole + whole[:-1], whole + b"more"):
        (tmp_path / "a.txt.zst").write_bytes(damage)
        with pytest.raises(DataError, match=r"cannot read .*a\.txt\.zst: \w+"):
            read(tmp_path / "a.txt.zst")


def test_zst_of_many_chunks_and_an_empty_one(tmp_path) -> None:
    zstandard = pytest.importorskip("zstandard")
    text = "".join(f"{i} " for i in range(400_000))
    packed = zstandard.compress(text.encode())
    (tmp_path / "a.txt.zst").write_bytes(packed + zstandard.compress(b"") + packed)
    assert read(tmp_path / "a.txt.zst")[0].text == text * 2
    (tmp_path / "b.txt.zst").write_bytes(b"")
    assert read(tmp_path / "b.txt.zst")[0].text == ""


def test_what_is_missing_is_said_with_its_command(tmp_path, monkeypatch) -> None:
    for name in ("zstandard", "pyarrow", "pyarrow.parquet"):
        monkeypatch.setitem(sys.modules, name, None)
    for name, package in (("a.jsonl.zst", "zstandard"), ("a.parquet", "pyarrow"), ("a.arrow", "pyarrow")):
        (tmp_path / name).write_bytes(b"")
        said = rf"reading .*{name} needs {package}\. Install it: pip install 'slipstream\[data\]'\."
        with pytest.raises(DataError, match=said):
            read(tmp_path / name)


def test_lines_can_be_read_from_a_number_on(tmp_path) -> None:
    content = b'\xef\xbb\xbf\n{"text": "0"}\n\n{"text": "1"}\n  \n{"text": "2"}\n{"text"\n'
    (source,) = find_files([write(tmp_path / "a.jsonl", content)])
    placed = itertools.islice(read_placed(source, text_field="text", split_key=None, row=1), 2)
    assert [(group, row, document.text) for group, row, document in placed] == [(0, 1, "1"), (0, 2, "2")]
    with pytest.raises(DataError, match="line 7: not JSON"):
        list(read_placed(source, text_field="text", split_key=None, row=2))


def test_unreadable_file_is_refused(tmp_path) -> None:
    class Unreadable(type(tmp_path)):  # type: ignore[misc]
        def open(self, *args, **kwargs):
            raise PermissionError(13, "Permission denied")

    source = SourceFile(name="a.txt", file=Unreadable(tmp_path / "a.txt"))
    for attempt in (lambda: list(read_chunks(source)), source.digest):
        with pytest.raises(DataError, match=r"cannot read .*a\.txt: Permission denied"):
            attempt()


def test_paths_that_hold_no_text_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"there is no file or folder .*nowhere\.txt"):
        find_files([tmp_path / "nowhere.txt"])
    with pytest.raises(DataError, match=r"the folder .* holds no file named \*\.txt"):
        find_files([tmp_path])
    (tmp_path / "a.csv").write_bytes(b"")
    with pytest.raises(DataError, match=r"cannot tell what .*a\.csv holds\. Allowed are files named \*\.txt"):
        find_files([str(tmp_path / "a.csv")])
    with pytest.raises(DataError, match="no source was given"):
        find_files([])
    os.symlink("dangling", tmp_path / "b.txt")
    with pytest.raises(DataError, match="there is no file or folder"):
        find_files([tmp_path / "b.txt"])


@given(text=st.text(alphabet="ab \né"), sizes=st.lists(st.integers(1, 9), max_size=20), block_chars=st.integers(1, 12))
def test_blocks_are_contiguous_and_of_bounded_size(text: str, sizes: list[int], block_chars: int) -> None:
    chunks, rest = [], text
    for size in sizes:
        chunks.append(rest[:size])
        rest = rest[size:]
    blocks = list(cut_blocks(iter([*chunks, rest]), block_chars=block_chars))
    assert "".join(blocks) == text
    assert all(len(block) < 2 * block_chars for block in blocks)
    assert all(len(block) >= block_chars for block in blocks[:-1])


def test_blocks_end_at_paragraphs_before_lines_before_words() -> None:
    text = "one two\nthree\n\nfour five\nsix seven eight nine"
    assert list(cut_blocks(iter([text]), block_chars=10)) == [
        "one two\nthree\n\n",
        "four five\n",
        "six seven ",
        "eight nine",
    ]


def test_chunks_do_not_change_the_blocks() -> None:
    text = "word line\n\n" * 50
    whole = list(cut_blocks(iter([text]), block_chars=20))
    assert list(cut_blocks(iter(list(text)), block_chars=20)) == whole
