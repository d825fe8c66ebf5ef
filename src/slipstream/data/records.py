"""Documents, and the records that hold them: lines of JSON here, rows of tables in :mod:`slipstream.data.tables`."""

import dataclasses
import json
from collections.abc import Iterator, Mapping
from typing import Any

from slipstream.data.files import SourceFile, decode, opened, reading
from slipstream.errors import DataError, nearest


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """A text that is kept in one piece and on one side of the split."""

    text: str
    group: str | None = None
    """Value of the split key, if one was given."""

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing but white space."""
        return not self.text or self.text.isspace()

    @property
    def num_bytes(self) -> int:
        """Size of the text in UTF-8."""
        return len(self.text) if self.text.isascii() else len(self.text.encode())


Placed = tuple[int, int, Document]
"""A document with the group of records it is in (row group of a table; 0 in a file of lines) and its number there."""


def read_lines(source: SourceFile, *, text_field: str, split_key: str | None, row: int = 0) -> Iterator[Placed]:
    """Yield the documents of a file of JSON lines, from number ``row`` on; blank lines are none.

    Raises:
        DataError: See :func:`slipstream.data.sources.read_documents`.
    """
    offset, found = 0, 0
    with reading(source), opened(source) as stream:
        for number, line in enumerate(stream, start=1):
            begin, offset = offset, offset + len(line)
            text = decode(line, source=source, offset=begin)
            if text.isspace():
                continue
            if found < row:  # was read before, so it need not be parsed
                found += 1
                continue
            where = f"{source.file}, line {number}"
            yield 0, found, document_of(_parse(text, where=where), text_field, split_key, where=where, unit="line")
            found += 1


def document_of(
    record: Mapping[str, Any], text_field: str, split_key: str | None, *, where: str, unit: str
) -> Document:
    """Return what a record holds.

    Args:
        record: Values by field.
        text_field: Field of the text.
        split_key: Field of the group; none: no groups.
        where: File and place, for errors.
        unit: What is to be mended there: `line`, `row`.

    Raises:
        DataError: A field is missing or null, or is none that UTF-8 can hold.
    """
    value = _field(record, text_field, where=where, unit=unit)
    if not isinstance(value, str):
        raise DataError(f"{where}: the field '{text_field}' must be a text, given {_kind(value)}.")
    _refuse_surrogates(value, what="the text", where=where, unit=unit)
    group = None
    if split_key is not None:
        named = _field(record, split_key, where=where, unit=unit)
        group = named if isinstance(named, str) else json.dumps(named, sort_keys=True, default=str)
        _refuse_surrogates(group, what=f"the field '{split_key}'", where=where, unit=unit)
    return Document(text=value, group=group)


def _parse(text: str, *, where: str) -> dict[str, Any]:
    try:
        record = json.loads(text.rstrip("\r\n"))
    except (ValueError, RecursionError) as error:
        reason = f"{error.msg} at column {error.colno}" if isinstance(error, json.JSONDecodeError) else str(error)
        raise DataError(
            f"{where}: not JSON: {reason}. Each line must hold one JSON object; mend or remove it."
        ) from error
    if not isinstance(record, dict):
        raise DataError(f"{where}: a JSON object is needed, given {_kind(record)}. Mend or remove the line.")
    return record


def _field(record: Mapping[str, Any], name: str, *, where: str, unit: str) -> Any:
    if record.get(name) is None:
        state = "is null" if name in record else "is missing"
        present = ", ".join(f"'{key}'" for key in record) or "none"
        raise DataError(
            f"{where}: the field '{name}' {state}.{nearest(name, record.keys() - {name})} Fields here: {present}. "
            f"Name another field, or mend the {unit}."
        )
    return record[name]


def _refuse_surrogates(text: str, *, what: str, where: str, unit: str) -> None:
    if text.isascii():
        return
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: character {error.start} of {what} is half of a surrogate pair ({text[error.start]!r}), which "
            f"UTF-8 cannot hold. Mend or remove the {unit}."
        ) from error


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a text", bool: "true or false", type(None): "null"}
    names |= {int: "a number", float: "a number", bytes: "bytes"}
    return names.get(type(value), f"a {type(value).__name__}")
