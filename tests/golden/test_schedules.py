"""Each file in schedules/ is a schedule as text: a header with the settings, then one line a rank.

A new schedule needs a file here and no code. A line that changes needs a line in the changelog.
"""

from pathlib import Path

import pytest

from slipstream.pipeline.actions import format_order, parse_order
from slipstream.pipeline.schedules import ScheduleSpec, order, stream

FILES = sorted((Path(__file__).parent / "schedules").glob("*.txt"))

# The example by which two_bw is specified, without its norms: 3 stages, 3 microbatches, 3 batches.
EXAMPLE = [
    "0F0@0 0F1@0 0F2@0 0B0@0 0F3@0 0B1@0 0F4@0 0B2@0 0F5@0 0B3@0 0O@1 "
    "0F6@1 0B4@0 0F7@1 0B5@0 0F8@1 0B6@1 0O@2 0B7@1 0B8@1 0O@3",
    "1F0@0 1F1@0 1B0@0 1F2@0 1B1@0 1F3@0 1B2@0 1F4@0 1B3@0 1F5@0 1B4@0 1O@1 "
    "1F6@1 1B5@0 1F7@1 1B6@1 1F8@1 1B7@1 1O@2 1B8@1 1O@3",
    "2F0@0 2B0@0 2F1@0 2B1@0 2F2@0 2B2@0 2F3@0 2B3@0 2F4@0 2B4@0 2F5@0 2B5@0 2O@1 "
    "2F6@1 2B6@1 2F7@1 2B7@1 2F8@1 2B8@1 2O@2 2O@3",
]


@pytest.mark.parametrize("path", FILES, ids=[path.stem for path in FILES])
def test_schedule_is_as_written(path: Path) -> None:
    header, *lines = path.read_text(encoding="utf-8").splitlines()
    words = header.removeprefix("# ").split()
    with_communication = words[-1] == "communication"
    settings = {key: int(value) for key, value in (word.split("=") for word in words[1:] if "=" in word)}
    span = {key: settings.pop(key) for key in ("first_batch", "num_batches") if key in settings}
    spec = ScheduleSpec(name=words[0], **settings)
    make = stream if with_communication else order

    got = [format_order(make(spec, rank=rank, **span)) for rank in range(spec.num_ranks)]

    assert got == lines
    assert [format_order(parse_order(line)) for line in lines] == lines


def test_two_bw_is_the_specified_example() -> None:
    spec = ScheduleSpec(name="two_bw", num_ranks=3, num_microbatches=3)
    got = [format_order(a for a in order(spec, rank=rank, num_batches=3) if a.op != "N") for rank in range(3)]
    assert got == EXAMPLE
