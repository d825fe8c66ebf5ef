"""Files of tasks: alone, packed, in a folder or in a tar archive."""

import bz2
import gzip
import lzma
import tarfile
import zlib
from collections.abc import Callable
from pathlib import Path

from slipstream.errors import DataError

_UNPACK: dict[str, Callable[[bytes], bytes]] = {
    ".bz2": bz2.decompress,
    ".xz": lzma.decompress,
    ".gz": gzip.decompress,
}

_NOT_QUESTIONS = ("readme", "license", "licence", "notice", "copying", "changelog", ".", "_")
"""How the names of files begin, in any case, that lie beside questions in a folder or an archive."""


def read_task_files(path: str | Path, *, suffixes: tuple[str, ...]) -> list[tuple[str, str]]:
    """Return the names and texts of the files of a task, by name.

    Args:
        path: A file, also packed with bzip2, xz or gzip; a folder, searched to any depth; or a tar archive of one.
        suffixes: Endings of the names, before that of a packer, that are read in folders and archives; but a README, a
            licence and hidden files are not.

    Raises:
        DataError: Something cannot be read, is not UTF-8, or no file is there.
    """
    path = Path(path)
    try:
        if path.is_dir():
            named = [each for each in sorted(path.rglob("*")) if _holds_questions(str(each), suffixes)]
            files = [(str(each), each.read_bytes()) for each in named if each.is_file()]
        elif tarfile.is_tarfile(path):
            files = _members(path, suffixes)
        else:
            files = [(str(path), path.read_bytes())]
        unpacked = [(name, _unpack(name, data)) for name, data in files]
    except (OSError, EOFError, tarfile.TarError, lzma.LZMAError, zlib.error, ValueError) as error:
        raise DataError(f"cannot read {path}: {getattr(error, 'strerror', None) or error}. Check the file.") from error
    if not unpacked:
        raise DataError(f"{path} holds no file named {' or '.join(f'*{suffix}' for suffix in suffixes)}.")
    return [(name, _text(name, data)) for name, data in unpacked]


def _members(path: Path, suffixes: tuple[str, ...]) -> list[tuple[str, bytes]]:
    with tarfile.open(path) as archive:
        members = sorted((member for member in archive if member.isfile()), key=lambda member: member.name)
        wanted = [member for member in members if _holds_questions(member.name, suffixes)]
        return [(f"{path}/{member.name}", file.read()) for member in wanted if (file := archive.extractfile(member))]


def _holds_questions(name: str, suffixes: tuple[str, ...]) -> bool:
    return _plain_name(name).endswith(suffixes) and not Path(name).name.lower().startswith(_NOT_QUESTIONS)


def _plain_name(name: str) -> str:
    return name.removesuffix(Path(name).suffix) if Path(name).suffix in _UNPACK else name


def _unpack(name: str, data: bytes) -> bytes:
    unpack = _UNPACK.get(Path(name).suffix)
    return unpack(data) if unpack else data


def _text(name: str, data: bytes) -> str:
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{name} is not UTF-8: byte {error.start}. Convert the file.") from error
