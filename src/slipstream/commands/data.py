"""`data prepare` and `data inspect`."""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import tyro

from slipstream.arguments import InspectArgs, PrepareArgs, refuse_given
from slipstream.strict_json import json_text

if TYPE_CHECKING:
    from slipstream.data import TokenizerInfo


def data_prepare(argv: Sequence[str]) -> int:
    """Turn text files into token shards."""
    from slipstream.console import Console
    from slipstream.data import prepare
    from slipstream.data.files import hold_records
    from slipstream.data.hub_tokenizer import open_hub_tokenizer
    from slipstream.data.prepare import VOCAB_SIZE
    from slipstream.data.prepare_progress import PrepareReporter

    args = tyro.cli(PrepareArgs, args=argv, prog="slipstream data prepare")
    tokenizer = args.tokenizer or "bytes"
    if args.tokenizer_from is not None:
        refuse_given({"--tokenizer": args.tokenizer, "--vocab-size": args.vocab_size}, "with --tokenizer-from")
    elif tokenizer != "bpe":
        refuse_given({"--vocab-size": args.vocab_size}, "without --tokenizer bpe")
    sources = [str(source) for source in args.sources]
    if args.text_field is not None and not hold_records(sources):
        refuse_given({"--text-field": args.text_field}, "on plain text, which has no fields")
    with PrepareReporter(Console(stderr=True)) as reporter:
        manifest = prepare(
            sources,
            args.out,
            tokenizer=tokenizer if args.tokenizer_from is None else open_hub_tokenizer(_folder(args.tokenizer_from)),
            vocab_size=VOCAB_SIZE if args.vocab_size is None else args.vocab_size,
            text_field=args.text_field or "text",
            split_key=args.split_key,
            validation_fraction=args.validation_fraction,
            num_workers=args.num_workers or None,
            progress=reporter,
        )
    if args.json:
        print(manifest.to_json(), end="")
        return 0
    print(f"{args.out}: {_tokenizer_text(manifest.tokenizer)}, split by {manifest.split_rule.key}")
    for name, split in manifest.splits.items():
        print(
            f"  {name:<10}  {split.documents} documents, {split.num_tokens} tokens, {split.num_bytes} bytes, "
            f"{len(split.shards)} shards"
        )
    if empty := sum(source.empty_documents for source in manifest.sources):
        print(f"  {empty} empty documents were passed over")
    return 0


def _folder(path: Path) -> Path:
    """Return where the tokenizer of a model, a run or prepared data lies."""
    from slipstream.train.rundir import RunDir

    run_dir = RunDir(path)
    return run_dir.tokenizer if run_dir.holds_run else path


def data_inspect(argv: Sequence[str]) -> int:
    """Check prepared data and show decoded samples."""
    from slipstream.data import inspect_data

    args = tyro.cli(InspectArgs, args=argv, prog="slipstream data inspect")
    report = inspect_data(args.path, num_samples=args.num_samples)
    if args.json:
        print(json_text(dataclasses.asdict(report)))
        return 0
    print(f"{report.path or 'built-in Shakespeare'}: {_tokenizer_text(report.tokenizer)}")
    print(f"split by {report.split_rule.key}, digest {report.digest[:12]}, checksums verified")
    for split in report.splits:
        print(
            f"\n{split.name}: {split.documents} documents, {split.num_tokens} tokens in {split.num_shards} shards, "
            f"{split.num_bytes} bytes ({split.fraction:.1%} of all), {split.tokens_per_byte:.3f} tokens per byte"
        )
        for sample in split.samples:
            print(f"--- tokens {sample.start} to {sample.start + sample.num_tokens - 1}\n{sample.text}")
    return 0


def _tokenizer_text(info: "TokenizerInfo") -> str:
    return f"tokenizer '{info.name}' of {info.vocab_size} tokens, fingerprint {info.fingerprint[:12]}"
