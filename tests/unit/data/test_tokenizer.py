import json
import os
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.data import (
    BpeTokenizer,
    ByteTokenizer,
    Tokenizer,
    builtin_source,
    load_tokenizer,
    prepare,
    train_bpe,
    words,
)
from slipstream.data.tokenizer import BPE_FILE, EOS_TEXT, IDENTITY_FILE, cut_pieces
from slipstream.data.words import SETTLED, WordEncoder
from slipstream.errors import ConfigError, DataError

# With tokens of white space too, which a cut in a wrong place would tear.
SPACES = "\n\n\na \n b\n \n c\t\n\nd\r\n\r\ne   \nf" * 3
TEXTS = [
    SPACES,
    "the cat sat on the mat; the cat spat.\n\n",
    "Où est le chat?\nLe chat est là.\n",
    "the the the the cat cat",
]
BPE = train_bpe(TEXTS, vocab_size=300)
BOTH: list[Tokenizer] = [ByteTokenizer(), BPE]
both = pytest.mark.parametrize("tokenizer", BOTH, ids=lambda t: t.name)

# White space of all kinds, because words are cut there, and the name of the end-of-document id.
TEXT = st.text() | st.lists(
    st.sampled_from(
        ["a", "B9", "é", "本", "。", "\n", "\r\n", " ", "\t", "\x1c", "\x85", "\u180e", "\u2003", "'s", EOS_TEXT]
    )
).map("".join)


@both
@settings(deadline=None)
@given(text=TEXT)
def test_any_text_round_trips(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    assert tokenizer.eos_id not in ids
    assert int(tokenizer.token_bytes()[ids].sum()) == len(text.encode())


@both
@settings(deadline=None)
@given(texts=st.lists(TEXT, max_size=5))
def test_batch_gives_the_same_ids(tokenizer: Tokenizer, texts: list[str]) -> None:
    assert [ids.tolist() for ids in tokenizer.encode_batch(texts)] == [tokenizer.encode(text) for text in texts]


def test_words_are_those_of_the_library() -> None:
    """Every settled character, beside itself, letters, digits, spaces and signs; and what is not settled is left."""
    encoder, num_settled = WordEncoder(BPE._backend), 0
    for first, end in SETTLED:
        # Of Chinese and Hangul, letters all, every 16th.
        step = 16 if end - first > 10_000 else 1
        texts = [f"a{c}b 1{c}{c} {c}2 {c} \n{c}'{c}s." for c in map(chr, range(first, end, step))]
        found = encoder.encode(texts)
        expected = BPE._backend.encode_batch_fast(texts)
        for text, ids, encoding in zip(texts, found, expected):
            if ids is not None:
                assert ids.tolist() == encoding.ids, ascii(text)
                num_settled += 1
    assert num_settled > 6_000
    assert encoder.encode(["\u0530", "a\U0001f600", "\u2c00"]) == [None] * 3


@settings(deadline=None)
@given(text=TEXT)
def test_words_of_any_text_are_those_of_the_library(text: str) -> None:
    (ids,) = WordEncoder(BPE._backend).encode([text])
    assert ids is None or ids.tolist() == BPE._backend.encode(text).ids


def test_table_of_words_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words, "_MAX_CHARS", 100)
    encoder = WordEncoder(BPE._backend)
    for i in range(60):
        text = f"the {i:06d} word{i} cat"
        (ids,) = encoder.encode([text])
        assert ids is not None
        assert ids.tolist() == BPE._backend.encode(text).ids
        assert sum(map(len, encoder._table)) <= 100


@settings(deadline=None)
@given(text=TEXT, piece_chars=st.integers(1, 8))
def test_cutting_long_texts_changes_no_token(text: str, piece_chars: int) -> None:
    pieces = list(cut_pieces(text, piece_chars=piece_chars))
    assert "".join(pieces) == text
    assert [i for piece in pieces for i in BPE.encode(piece)] == BPE.encode(text)


def test_long_text_is_cut_and_joined() -> None:
    text = "".join(TEXTS) * 500
    pieces = list(cut_pieces(text))
    assert len(pieces) > 2
    whole = BPE._backend.encode(text).ids
    assert BPE.encode(text) == whole


@both
def test_end_of_document_and_incomplete_characters_decode(tokenizer: Tokenizer) -> None:
    ids = [*tokenizer.encode("é")]
    assert tokenizer.decode([tokenizer.eos_id]) == ""
    half = tokenizer.decode(ByteTokenizer().encode("é")[:1]) if tokenizer.name == "bytes" else tokenizer.decode(ids)
    assert half in ("\ufffd", "é")


@both
@pytest.mark.parametrize("bad", [-1, 10**6])
def test_ids_outside_the_vocabulary_are_refused(tokenizer: Tokenizer, bad: int) -> None:
    with pytest.raises(DataError, match=f"{bad} is outside the vocabulary, 0 to {tokenizer.vocab_size - 1}"):
        tokenizer.decode([bad])


def test_bpe_shortens_text_and_knows_its_size() -> None:
    assert len(BPE.encode("the cat")) < len("the cat")
    assert BPE.vocab_size <= 300
    assert max(BPE.encode("".join(TEXTS))) < BPE.vocab_size
    assert BPE.token_bytes()[BPE.eos_id] == 0
    assert int((BPE.token_bytes() == 1).sum()) == 256


@both
def test_saved_tokenizer_is_the_same(tokenizer: Tokenizer, tmp_path) -> None:
    tokenizer.save(tmp_path)
    loaded = load_tokenizer(tmp_path)
    assert loaded.fingerprint() == tokenizer.fingerprint()
    assert (loaded.name, loaded.vocab_size, loaded.eos_id) == (tokenizer.name, tokenizer.vocab_size, tokenizer.eos_id)
    text = "the cat 本 " + EOS_TEXT
    assert loaded.encode(text) == tokenizer.encode(text)
    np.testing.assert_array_equal(loaded.token_bytes(), tokenizer.token_bytes())


def test_training_is_the_same_in_another_process() -> None:
    program = (
        "from slipstream.data import train_bpe\n"
        f"import sys; sys.stdout.write(train_bpe({TEXTS!r}, vocab_size=300).fingerprint())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    assert result.stdout == BPE.fingerprint()


def test_fingerprints_tell_tokenizers_apart() -> None:
    other = train_bpe([*TEXTS, "zebra zebra zebra"], vocab_size=300)
    assert len({ByteTokenizer().fingerprint(), BPE.fingerprint(), other.fingerprint()}) == 3
    assert len(BPE.fingerprint()) == 64
    assert train_bpe(TEXTS, vocab_size=300).fingerprint() == BPE.fingerprint()


def test_changed_vocabulary_file_is_refused(tmp_path) -> None:
    BPE.save(tmp_path)
    table = json.loads((tmp_path / BPE_FILE).read_text())
    vocabulary = table["model"]["vocab"]
    vocabulary["!"], vocabulary['"'] = vocabulary['"'], vocabulary["!"]
    (tmp_path / BPE_FILE).write_text(json.dumps(table))
    with pytest.raises(DataError, match="the file has changed"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("content", ["{}", '{"model": {"vocab": {"a": 0}, "merges": []}}', '{"model": 3}', "[1]", "{"])
def test_damaged_vocabulary_file_is_refused(content: str, tmp_path) -> None:
    BPE.save(tmp_path)
    (tmp_path / BPE_FILE).write_text(content)
    with pytest.raises(DataError, match="again"):
        load_tokenizer(tmp_path)


def test_missing_and_unknown_tokenizers_are_refused(tmp_path) -> None:
    with pytest.raises(DataError, match=r"cannot read .*No such file"):
        load_tokenizer(tmp_path)
    (tmp_path / IDENTITY_FILE).write_text('{"name": "words"}')
    with pytest.raises(DataError, match="names the tokenizer 'words'; allowed: 'bytes', 'bpe'"):
        load_tokenizer(tmp_path)


def test_merges_that_do_not_fit_are_refused() -> None:
    with pytest.raises(DataError, match="merges do not fit"):
        BpeTokenizer(dict(BPE._vocabulary), [("zz", "qq")])


def test_vocabulary_below_the_bytes_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"vocab_size is 256; .* at least 257"):
        train_bpe(TEXTS, vocab_size=256)
    assert train_bpe(TEXTS, vocab_size=257).vocab_size == 257


def test_built_in_text_round_trips_through_its_own_bpe(tmp_path) -> None:
    manifest = prepare([builtin_source()], tmp_path / "data", tokenizer="bpe", vocab_size=512)
    tokenizer = load_tokenizer(tmp_path / "data")
    assert tokenizer.vocab_size == manifest.tokenizer.vocab_size == 512
    assert sum(split.num_tokens / split.num_bytes for split in manifest.splits.values()) / 2 < 0.6
