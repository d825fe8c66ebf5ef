"""`bench pipeline` and `bench exchange`."""

import sys
from collections.abc import Sequence

import tyro

from slipstream.arguments import BenchExchangeArgs, BenchPipelineArgs
from slipstream.strict_json import json_text


def bench_pipeline(argv: Sequence[str]) -> int:
    """Time pipeline schedules beside those of torch.distributed.pipelining."""
    args = tyro.cli(BenchPipelineArgs, args=argv, prog="slipstream bench pipeline")
    from slipstream.bench.pipeline import run_bench_pipeline
    from slipstream.bench.table import bench_table, explanation
    from slipstream.console import Console

    result = run_bench_pipeline(args, note=lambda text: print(text, file=sys.stderr))
    if args.json:
        print(json_text(result))
        return 0
    Console(is_result=True).print(bench_table(result))
    print("\n".join(explanation(result)))
    return 0


def bench_exchange(argv: Sequence[str]) -> int:
    """Time pushes and pulls of worker processes beside a plain copy of memory."""
    args = tyro.cli(BenchExchangeArgs, args=argv, prog="slipstream bench exchange")
    from slipstream.bench.exchange import exchange_text, run_bench_exchange

    result = run_bench_exchange(args, note=lambda text: print(text, file=sys.stderr))
    print(json_text(result) if args.json else exchange_text(result))
    return 0
