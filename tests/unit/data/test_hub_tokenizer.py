"""Tokenizers as files of the hub give the ids that ours give."""

import json

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from slipstream.data.hub_tokenizer import HubTokenizer, named_begin_id, open_hub_tokenizer, write_hub_tokenizer
from slipstream.data.text_checks import same_ids
from slipstream.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe
from slipstream.errors import DataError

TEXTS = [
    "To be, or not to be\n\n",
    "  caf\u00e9 \u65e5\u672c \U0001f600\t\x00\x7f\u00ad\u00a0",
    "",
    "a<|endoftext|>b",
    "'s don't \u00c3\u0100\u0142",
]


def tokenizer(name):
    return (
        ByteTokenizer()
        if name == "bytes"
        else train_bpe(["to be or not to be, that is the question " * 9], vocab_size=280)
    )


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_written_tokenizer_gives_the_same_ids(tmp_path, name):
    ours = tokenizer(name)
    write_hub_tokenizer(ours, tmp_path, context_length=64)
    theirs = HubTokenizer((tmp_path / "tokenizer.json").read_text(), ours.eos_id)
    assert theirs.vocab_size == ours.vocab_size
    for text in TEXTS:
        assert theirs.encode(text) == ours.encode(text)
        assert theirs.decode([*theirs.encode(text), ours.eos_id]) == text
    assert [each.tolist() for each in theirs.encode_batch(TEXTS)] == [ours.encode(text) for text in TEXTS]
    assert np.array_equal(theirs.token_bytes(), ours.token_bytes())


def test_every_byte_has_its_own_id(tmp_path):
    write_hub_tokenizer(ByteTokenizer(), tmp_path, context_length=64)
    theirs = HubTokenizer((tmp_path / "tokenizer.json").read_text(), 256)
    text = "".join(map(chr, range(0x800)))
    assert theirs.encode(text) == list(text.encode())
    assert theirs.decode(range(0x80)) == "".join(map(chr, range(0x80)))


@pytest.mark.parametrize("name", ["bytes", "bpe"])
def test_a_written_folder_gives_the_very_tokenizer_back(tmp_path, name):
    write_hub_tokenizer(tokenizer(name), tmp_path, context_length=64)
    assert open_hub_tokenizer(tmp_path).fingerprint() == tokenizer(name).fingerprint()


def test_a_tokenizer_of_the_hub_is_saved_and_loaded(tmp_path):
    write_hub_tokenizer(tokenizer("bpe"), tmp_path, context_length=64)
    (tmp_path / "slipstream_tokenizer.json").unlink()
    hub = open_hub_tokenizer(tmp_path)
    assert hub.name == "hub"
    assert hub.eos_id == tokenizer("bpe").eos_id
    (tmp_path / "saved").mkdir()
    hub.save(tmp_path / "saved")
    back = load_tokenizer(tmp_path / "saved")
    assert back.fingerprint() == hub.fingerprint()
    assert back.encode("to be") == tokenizer("bpe").encode("to be")
    changed = json.loads((tmp_path / "saved" / "tokenizer.json").read_text())
    changed["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "saved" / "tokenizer.json").write_text(json.dumps(changed))
    with pytest.raises(DataError, match="the file has changed"):
        load_tokenizer(tmp_path / "saved")


def test_what_the_hub_puts_around_a_text_is_not_written(tmp_path):
    """The data has none of it, so the model has not learnt what it means."""
    for name in ("theirs", "written"):
        (tmp_path / name).mkdir()
    write_hub_tokenizer(tokenizer("bpe"), tmp_path / "theirs", context_length=64)
    file = tmp_path / "theirs" / "tokenizer.json"
    backend = tokenizers.Tokenizer.from_file(str(file))
    end = tokenizer("bpe").eos_id
    backend.post_processor = processors.TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", end)]
    )
    theirs = HubTokenizer(backend.to_str(), end)
    write_hub_tokenizer(theirs, tmp_path / "written", context_length=64)
    written = tokenizers.Tokenizer.from_file(str(tmp_path / "written" / "tokenizer.json"))
    assert written.encode("to be").ids == theirs.encode("to be") != backend.encode("to be").ids
    assert same_ids(open_hub_tokenizer(tmp_path / "written"), theirs)


@pytest.mark.parametrize(
    ("around", "begin"), [("$A", ()), ("<s> $A", (5,)), ("<s> $A <|endoftext|>", (5,)), ("$A <|endoftext|>", ())]
)
def test_what_begins_a_text(tmp_path, around, begin):
    """Not what ends it: a model is to go on with it."""
    write_hub_tokenizer(tokenizer("bpe"), tmp_path, context_length=64)
    end = tokenizer("bpe").eos_id
    backend = tokenizers.Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    backend.enable_padding(direction="left", length=9)
    backend.post_processor = processors.TemplateProcessing(
        single=around, special_tokens=[("<s>", 5), ("<|endoftext|>", end)]
    )
    theirs = HubTokenizer(backend.to_str(), end)
    assert theirs.begin_ids() == begin
    assert theirs.encode("to be") == tokenizer("bpe").encode("to be")


@pytest.mark.parametrize(
    ("named", "expected"), [("<s>", 1), ({"content": "<s>"}, 1), (None, None), ("<nowhere>", None), (7, None)]
)
def test_the_named_token_that_begins_a_text(tmp_path, named, expected):
    backend = tokenizers.Tokenizer(models.WordLevel({"<unk>": 0, "<s>": 1, "</s>": 2}, unk_token="<unk>"))
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "</s>", "bos_token": named}))
    # What the model's own config says is not what a tokenizer of the hub goes by.
    (tmp_path / "config.json").write_text(json.dumps({"bos_token_id": 2}))
    assert named_begin_id(tmp_path) == expected


def test_bytes_of_a_tokenizer_that_writes_spaces_as_low_lines():
    vocabulary = {"<unk>": 0, "</s>": 1, "<0x41>": 2, "\u2581be": 3, "\u00e9": 4}
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    backend.decoder = decoders.ByteFallback()
    backend.add_special_tokens(["<unk>", "</s>"])
    assert HubTokenizer(backend.to_str(), 1).token_bytes().tolist() == [0, 0, 1, 3, 2]


SENTENCE = "the cat sat on the mat"


def with_marks(kind):
    """A vocabulary of parts of words, which it tells from whole ones by a mark."""
    settings = {"vocab_size": 18, "special_tokens": ["<eos>", "<unk>"], "show_progress": False}
    if kind == "##":
        backend = tokenizers.Tokenizer(models.WordPiece(unk_token="<unk>"))
        trainer = trainers.WordPieceTrainer(**settings)
    else:
        backend = tokenizers.Tokenizer(models.BPE(end_of_word_suffix=kind))
        trainer = trainers.BpeTrainer(end_of_word_suffix=kind, **settings)
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.train_from_iterator([SENTENCE] * 9, trainer)
    return backend


@pytest.mark.parametrize("kind", ["##", "</w>"])
def test_marks_of_parts_of_words_are_no_bytes_of_the_text(kind):
    backend = with_marks(kind)
    found = HubTokenizer(backend.to_str(), 0)
    ids = found.encode(SENTENCE)
    assert any(kind in backend.id_to_token(i) for i in ids)
    assert found.token_bytes()[ids].sum() == len(SENTENCE.replace(" ", ""))


def byte_level(folder):
    write_hub_tokenizer(ByteTokenizer(), folder, context_length=64)
    return (folder / "tokenizer.json").read_text()


def test_bytes_of_a_word_added_to_a_byte_level_vocabulary(tmp_path):
    backend = tokenizers.Tokenizer.from_str(byte_level(tmp_path))
    backend.add_tokens(["caf\u00e9"])
    found = HubTokenizer(backend.to_str(), ByteTokenizer.eos_id)
    ids = found.encode("a caf\u00e9")
    assert found.token_bytes()[ids].tolist() == [1, 1, 5]


@pytest.mark.parametrize("end", ["\n", "aa", "byte 10"])
def test_an_end_of_document_that_text_holds_is_refused(tmp_path, end):
    by_signs = tokenizers.Tokenizer(models.BPE(vocab={"\n": 0, "a": 1, "aa": 2}, merges=[("a", "a")])).to_str()
    text, number = {
        "\n": (by_signs, 0),
        "aa": (by_signs, 2),
        "byte 10": (byte_level(tmp_path), 10),
    }[end]
    with pytest.raises(DataError, match=rf"id {number} .* cannot end documents: text holds it"):
        HubTokenizer(text, number)


def whole_pieces(kind):
    """Tokenizers whose vocabulary has the end of a text among the pieces that texts are made of."""
    if kind == "unigram":
        pieces = [("<unk>", 0.0), ("</s>", 0.0), *((sign, -1.0) for sign in "abs<>/ ")]
        backend = tokenizers.Tokenizer(models.Unigram(pieces, unk_id=0))
        backend.decoder = decoders.Fuse()
        backend.add_special_tokens(["</s>"])
        return HubTokenizer(backend.to_str(), 1)
    backend = tokenizers.Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "[UNK]": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.add_tokens(["</s>"])
    return HubTokenizer(backend.to_str(), 1)


@pytest.mark.parametrize("kind", ["unigram", "words"])
@pytest.mark.parametrize("text", ["</s>", "a </s> a", "</s></s> a"])
def test_no_text_spells_the_end_of_a_document(kind, text):
    theirs = whole_pieces(kind)
    ids = theirs.encode(text)
    assert theirs.eos_id not in ids
    assert [each.tolist() for each in theirs.encode_batch(["a", text])] == [theirs.encode("a"), ids]
    if kind == "unigram":
        assert theirs.decode(ids) == text


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(DataError, match=r"tokenizer\.json: No such file"):
        open_hub_tokenizer(tmp_path)
    write_hub_tokenizer(tokenizer("bpe"), tmp_path, context_length=64)
    (tmp_path / "slipstream_tokenizer.json").unlink()
    (tmp_path / "tokenizer_config.json").unlink()
    with pytest.raises(DataError, match='Put "eos_token" into'):
        open_hub_tokenizer(tmp_path)
    end = tokenizer("bpe").eos_id
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [end, 9]}))
    assert open_hub_tokenizer(tmp_path).eos_id == end
    with pytest.raises(DataError, match="tokenizers library"):
        HubTokenizer("{}", 0)


@pytest.mark.parametrize("content", [b"garbage", b"{}", b"[1]", b"\xff\xfe", b'{"model": {"type": "BPE", "vocab": 3}}'])
def test_a_damaged_tokenizer_is_a_sentence(tmp_path, content):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>"}))
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(DataError, match=r"[Rr]estore"):
        open_hub_tokenizer(tmp_path)


def test_a_damaged_identity_is_a_sentence(tmp_path):
    write_hub_tokenizer(tokenizer("bpe"), tmp_path, context_length=64)
    (tmp_path / "slipstream_tokenizer.json").write_text(json.dumps({"name": "hub", "eos_id": None}))
    with pytest.raises(DataError, match="has no 'eos_id'"):
        open_hub_tokenizer(tmp_path)


def test_tokenizers_are_told_apart_by_their_ids(tmp_path):
    write_hub_tokenizer(ByteTokenizer(), tmp_path, context_length=64)
    theirs = HubTokenizer((tmp_path / "tokenizer.json").read_text(), 256)
    assert theirs.fingerprint() != ByteTokenizer().fingerprint()
    assert same_ids(theirs, ByteTokenizer())
    assert not same_ids(tokenizer("bpe"), ByteTokenizer())
