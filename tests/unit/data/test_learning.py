"""The sample that a tokenizer is trained on: even, bounded, of the training side, and the same in any order."""

import json

import pytest

from slipstream.data.corpus import Corpus
from slipstream.data.files import find_files
from slipstream.data.learning import training_texts
from slipstream.data.packing import SplitAt
from slipstream.data.tokenizer import cut_pieces

NOVEL = "".join(f"chapter {i // 400}, line {i}: the king and the ghost of the night\n" for i in range(24_000))
LETTERS = [f"letter {i}: love and crown" for i in range(4_000)]
TEXTS = [NOVEL, *LETTERS]
TOTAL = sum(map(len, TEXTS))
NONE_HELD_OUT = SplitAt(salt="", threshold=0)


def sampled(folder, most_bytes, *, texts=TEXTS, split=NONE_HELD_OUT):
    source = folder / "a.jsonl"
    source.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    corpus = Corpus(files=find_files([str(source)]), text_field="text", split_key=None, salt="")
    done = []
    found = list(training_texts(corpus, split, total_bytes=TOTAL, most_bytes=most_bytes, report=done.append))
    assert done[-1] == sum(map(len, texts))
    return found


@pytest.mark.parametrize("share", [0.2, 0.4])
def test_a_sample_is_even_over_documents_of_any_length(tmp_path, share):
    """A novel larger than the sample gives its share, from its beginning to its end, and so do letters."""
    found = sampled(tmp_path, int(share * TOTAL))
    letters = [text for text in found if text.startswith("letter")]
    pieces = [text for text in found if not text.startswith("letter")]
    assert sum(map(len, found)) == pytest.approx(share * TOTAL, rel=0.2)
    assert len(letters) == pytest.approx(share * len(LETTERS), rel=0.2)
    assert max(map(len, pieces)) < 2 * 2048
    quarters = [sum(NOVEL.find(piece) * 4 // len(NOVEL) == quarter for piece in pieces) for quarter in range(4)]
    assert min(quarters) >= 0.5 * share * len(list(cut_pieces(NOVEL))) / 4


def test_a_larger_sample_holds_the_smaller_one_and_order_does_not_matter(tmp_path):
    small, large = (set(sampled(tmp_path, int(share * TOTAL))) for share in (0.1, 0.3))
    assert small < large
    turned = set(sampled(tmp_path, int(0.3 * TOTAL), texts=TEXTS[::-1]))
    firsts = {next(cut_pieces(NOVEL)), LETTERS[-1]}  # the first piece there is is always taken
    assert large - firsts == turned - firsts


@pytest.mark.parametrize("most_bytes", [TOTAL, 10 * TOTAL])
def test_a_small_corpus_is_taken_whole(tmp_path, most_bytes):
    assert "".join(sampled(tmp_path, most_bytes)) == "".join(TEXTS)


def test_no_text_that_is_held_out_is_learnt_and_one_is_always_learnt(tmp_path):
    split = SplitAt(salt="", threshold=2**63)
    whole = "".join(sampled(tmp_path, TOTAL, split=split))
    assert 0 < whole.count("letter") < len(LETTERS)
    assert all(text in whole for text in sampled(tmp_path, TOTAL // 3, split=split))
    assert len(sampled(tmp_path, 1, split=split)) == 1
