"""A correct set of streams passes; each way to spoil it is refused, and the message names the action."""

import pytest

from slipstream.errors import ScheduleError
from slipstream.pipeline.actions import parse_order
from slipstream.pipeline.validation import ScheduleFacts, validate

# two_bw on two ranks, two microbatches a batch, two batches.
GOOD = (
    "0F0@0 0SEND_F0 0F1@0 0SEND_F1 0RECV_B0 0B0@0 0F2@0 0SEND_F2 0RECV_B1 0B1@0 0N@1 0F3@0 0SEND_F3 "
    "0RECV_B2 0B2@0 0O@1 0RECV_B3 0B3@0 0N@2 0O@2",
    "1RECV_F0 1F0@0 1B0@0 1SEND_B0 1RECV_F1 1F1@0 1B1@0 1SEND_B1 1N@1 1RECV_F2 1F2@0 1B2@0 1SEND_B2 "
    "1RECV_F3 1F3@0 1B3@0 1SEND_B3 1N@2 1O@1 1O@2",
)


def check(*texts: str, num_microbatches: int = 2, staleness: int = 1, **options) -> ScheduleFacts:
    streams = [parse_order(text) for text in texts]
    return validate(streams, num_microbatches=num_microbatches, staleness=staleness, **options)


def test_good_streams_pass() -> None:
    assert check(*GOOD) == ScheduleFacts(max_live_versions=2, staleness_max=1, peak_activations=(2, 1))


@pytest.mark.parametrize(
    ("rank", "old", "new", "message"),
    [
        (0, " 0SEND_F1", "", r"1RECV_F1 would take the message 1RECV_F2"),
        (1, " 1SEND_B3", "", r"0RECV_B3 waits for ever \(deadlock\)"),
        (1, "1RECV_F3 ", "", r"1F3@0 comes before its input: 1RECV_F3 is missing"),
        (0, "0RECV_B3 ", "", r"0B3@0 comes before its input: 0RECV_B3 is missing"),
        (0, "0F1@0 0SEND_F1", "0SEND_F1 0F1@0", r"0SEND_F1 comes before what it sends is computed"),
        (0, "0RECV_B0 0B0@0", "0RECV_B1 0B0@0", r"0RECV_B1 would take the message 0RECV_B0, which is first"),
        (0, "0F0@0 0SEND_F0 0F1@0 0SEND_F1", "0F1@0 0SEND_F1 0F0@0 0SEND_F0", r"0F1@0 is out of turn: microbatch 0"),
        (1, "1F1@0 1B1@0", "1B1@0 1F1@0", r"1B1@0 comes before its forward"),
        (0, "0F2@0", "0F2@1", r"0F2@1 reads version 1, but batch 1 must read 0"),
        (1, "1B2@0", "1B2@1", r"1B2@1 reads version 1, but batch 1 must read 0"),
        (0, "0B1@0 0N@1", "0N@1 0B1@0", r"0N@1 comes before the batch's last backward, of microbatch 1"),
        (0, "0N@1 ", "", r"0O@1 comes before 0N@1"),
        (0, " 0O@1", "", r"0O@2 is out of turn: version 1 is next for O"),
        (0, " 0N@2 0O@2", "", r"1O@2 waits for ever"),
        (0, " 0O@2", "", r"0O@2 is missing: its batch ran, but makes no update"),
        (1, "0B3", "0B3", ""),
        (1, " 1N@2 1O@1", " 1O@1 1N@2", ""),
        (0, " 0O@2", " 0O@2 0F4@1", r"stage 0 ends in mid-batch: 5 forwards, 4 backwards"),
        (0, "0F0@0 0SEND_F0", "0F0@0 0SEND_F0 0SEND_F0", r"1RECV_F1 would take the message 1RECV_F0"),
        (0, " 0O@2", " 0O@2 0SEND_F3", r"1RECV_F3 is missing: its message is never received"),
        (0, "0F0@0", "1F0@0", r"1RECV_F0 stands in the stream of rank 1, but stage 1 is on rank 0"),
        (1, "1B3@0", "1B3@0 1SEND_F3", r"1SEND_F3 has no stage to send to; stages are 0 to 1"),
        (0, "0F0@0 0SEND_F0", "0RECV_F0 0F0@0 0SEND_F0", r"0RECV_F0 has no stage to receive from"),
    ],
)
def test_each_fault_names_the_action(rank: int, old: str, new: str, message: str) -> None:
    texts = list(GOOD)
    texts[rank] = texts[rank].replace(old, new, 1)
    if not message:  # allowed variations
        check(*texts)
        return
    assert texts[rank] != GOOD[rank]
    with pytest.raises(ScheduleError, match=message):
        check(*texts)


def test_two_ranks_that_receive_first_wait_for_each_other() -> None:
    with pytest.raises(ScheduleError, match=r"0RECV_B0 waits for ever \(deadlock\); the other ranks wait at: 1RECV_F0"):
        check("0RECV_B0 0F0@0 0SEND_F0 0B0@0", "1RECV_F0 1F0@0 1B0@0 1SEND_B0", num_microbatches=1)


def test_version_that_is_not_published_yet() -> None:
    with pytest.raises(ScheduleError, match=r"0F1@1 reads version 1 before 0O@1: the stage holds 0 at most"):
        check("0F0@0 0B0@0 0N@1 0F1@1 0O@1 0B1@1 0N@2 0O@2", num_microbatches=1, staleness=0)


def test_step_comes_after_the_same_number_of_forwards_everywhere() -> None:
    early = GOOD[1].replace(" 1O@1", "").replace("1N@1", "1N@1 1O@1")
    with pytest.raises(ScheduleError, match=r"0O@1 comes after 4 forwards, on another stage after 2"):
        check(GOOD[0], early)


def test_versions_are_counted() -> None:
    text = "0F0@0 0B0@0 {} 0N@1 0O@1 {} 0N@2 0O@2"
    assert check(text.format("", "0F1@0 0B1@0"), num_microbatches=1).max_live_versions == 2
    assert check(text.format("0F1@0 0B1@0", ""), num_microbatches=1).max_live_versions == 1
    assert check(text.format("", "0F1@1 0B1@1"), num_microbatches=1, staleness=0).max_live_versions == 1


def test_bound_on_activations_is_a_ranks() -> None:
    assert check(*GOOD, max_activations=[2, 1]).peak_activations == (2, 1)
    with pytest.raises(ScheduleError, match=r"0F1@0 is microbatch number 2 in flight on rank 0; 1 allowed"):
        check(*GOOD, max_activations=[1, 1])


def test_split_backward_holds_the_activation_until_the_weight_gradient() -> None:
    text = "0F0@0 0F1@0 0I0@0 0I1@0 0W0@0 0W1@0 0N@1 0O@1"
    assert check(text, staleness=0).peak_activations == (2,)
    with pytest.raises(ScheduleError, match=r"0N@1 comes before the batch's last backward"):
        check("0F0@0 0F1@0 0I0@0 0I1@0 0W0@0 0N@1 0W1@0 0O@1", staleness=0)
    with pytest.raises(ScheduleError, match=r"0W0@0 comes before its input gradient"):
        check("0F0@0 0F1@0 0W0@0 0I0@0 0I1@0 0W1@0 0N@1 0O@1", staleness=0)


def test_stages_on_one_rank_in_the_wrong_order_wait_for_themselves() -> None:
    good = "0F0@0 1F0@0 1B0@0 0B0@0 0N@1 1N@1 0O@1 1O@1"
    assert check(good, num_microbatches=1).peak_activations == (1, 1)
    with pytest.raises(ScheduleError, match="1F0@0 waits for ever"):
        check(good.replace("0F0@0 1F0@0", "1F0@0 0F0@0"), num_microbatches=1)
    with pytest.raises(ScheduleError, match="0O@1 waits for ever"):
        check(good.replace("1N@1 0O@1", "0O@1 1N@1"), num_microbatches=1)


def test_stage_that_does_nothing() -> None:
    with pytest.raises(ScheduleError, match=r"stages \[0, 2\] act"):
        check("0F0@0", "2F0@0")


def test_resumed_streams_hold_the_versions_they_read() -> None:
    text = "0F4@1 0F5@1 0B4@1 0B5@1 0N@3 0O@3"
    facts = check(text, first_batch=2)
    assert facts == ScheduleFacts(max_live_versions=2, staleness_max=1, peak_activations=(2,))


def test_nothing_to_do() -> None:
    assert check("", "").peak_activations == ()
