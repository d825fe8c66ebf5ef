"""Whether a text is one, and whether two tokenizers take text alike."""

from slipstream.data.tokenizer import Tokenizer
from slipstream.errors import DataError

PROBE_TEXT = "To be, or not to be: that\n\n  is 1603 caf\u00e9s, na\u00efve don't\t\u2026 \u65e5\u672c <|endoftext|>"
"""Words, white space, digits, several scripts and what spells a special token: tokenizers part ways on these."""


def same_ids(one: Tokenizer, other: Tokenizer) -> bool:
    """Return whether two tokenizers give the same ids, as far as a text that tells tokenizers apart shows."""
    if one.fingerprint() == other.fingerprint():
        return True
    return one.eos_id == other.eos_id and one.encode(PROBE_TEXT) == other.encode(PROBE_TEXT)


def check_text(text: str, *, what: str) -> str:
    """Return a text that can be written as UTF-8.

    Args:
        text: Of JSON, whose escapes may spell half a character, or of a command line that was not UTF-8.
        what: Names it.

    Raises:
        DataError: It holds a lone surrogate.
    """
    try:
        text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise DataError(
            f"{what} is not text: character {error.start} is {text[error.start]!a}, half of a character or a byte that "
            "is not UTF-8. Give UTF-8 text."
        ) from error
    return text
