"""What a BPE tokenizer is trained on: of a large corpus a sample, so that training has an end.

Merges of frequent pairs are settled after a few megabytes, while the cost of training grows with the text. On 63 MB of
English novels, measured in bytes a token on pages that were left out, all of the text is better than a sample by:

    =========  =======  =======  =======  =======
    tokens     4 MB     8 MB     16 MB    31 MB
    =========  =======  =======  =======  =======
    4,096      0.26 %   0.08 %   0.04 %   0.03 %
    32,768     1.3 %    0.44 %   0.19 %   0.04 %
    =========  =======  =======  =======  =======

Hence 2 KB of text for each token, within bounds, and no setting for it.
"""

from collections.abc import Callable, Iterator

from slipstream.data.corpus import Corpus
from slipstream.data.packing import SplitAt
from slipstream.data.records import Document
from slipstream.data.tokenizer import cut_pieces

_BYTES_PER_TOKEN = 2**11
_LEAST_BYTES = 2**23
_MOST_BYTES = 2**26


def sample_bytes(vocab_size: int) -> int:
    """Return about how many bytes of text a tokenizer of this size is trained on, where there are more.

    Example:
        >>> [sample_bytes(vocab_size) // 2**20 for vocab_size in (257, 4096, 16384, 10**6)]
        [8, 8, 32, 64]
    """
    return min(max(_BYTES_PER_TOKEN * vocab_size, _LEAST_BYTES), _MOST_BYTES)


def training_texts(
    corpus: Corpus, split: SplitAt, *, total_bytes: int, most_bytes: int, report: Callable[[int], None]
) -> Iterator[str]:
    """Yield the training side of a corpus, of a large one pieces of some 2 KB.

    Each piece is taken by a hash of its text. So they are spread evenly over all documents, however long these are and
    in whatever order; equal text gives an equal sample, and a larger sample holds the smaller one.

    Args:
        corpus: Read once.
        split: Says which side a document is on.
        total_bytes: Of the corpus.
        most_bytes: About as many are taken, where the corpus has more.
        report: Is told the bytes read so far.
    """
    sample = SplitAt(salt=f"tokenizer {split.salt}", threshold=min(2**64, 2**64 * most_bytes // total_bytes))
    done, is_first = 0, True
    for document in corpus.documents():
        if document.is_empty:
            continue
        if split.side(document) == "train":
            for piece in cut_pieces(document.text):
                if is_first or sample.takes(Document(text=piece)):
                    is_first = False  # one at least, so that there is something to learn from
                    yield piece
        done += document.num_bytes
        report(done)
