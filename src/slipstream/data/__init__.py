"""Text -> tokens -> batches.

`prepare` turns files into shards, `open_data` checks and opens them, `Loader` makes batches, `inspect_data` shows what
is there. `open_stream` and `StreamLoader` do without shards.
"""

from slipstream.data.dataset import Dataset, open_data
from slipstream.data.inspection import DataReport, Sample, SplitReport, inspect_data
from slipstream.data.loader import IGNORE, Batch, Loader
from slipstream.data.manifest import Manifest, ShardInfo, SourceInfo, SplitInfo, SplitRule, TokenizerInfo, read_manifest
from slipstream.data.prepare import Progress, builtin_source, prepare
from slipstream.data.shards import ShardWriter, TokenArray, open_split
from slipstream.data.stream import TokenStream, open_stream
from slipstream.data.stream_loader import StreamLoader, StreamState
from slipstream.data.tokenizer import BpeTokenizer, ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
    "IGNORE",
    "Batch",
    "BpeTokenizer",
    "ByteTokenizer",
    "DataReport",
    "Dataset",
    "Loader",
    "Manifest",
    "Progress",
    "Sample",
    "ShardInfo",
    "ShardWriter",
    "SourceInfo",
    "SplitInfo",
    "SplitReport",
    "SplitRule",
    "StreamLoader",
    "StreamState",
    "TokenArray",
    "TokenStream",
    "Tokenizer",
    "TokenizerInfo",
    "builtin_source",
    "inspect_data",
    "load_tokenizer",
    "open_data",
    "open_split",
    "open_stream",
    "prepare",
    "read_manifest",
    "train_bpe",
]
