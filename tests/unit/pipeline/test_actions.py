import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.errors import ScheduleError
from slipstream.pipeline.actions import (
    COMMUNICATION_OPS,
    COMPUTE_OPS,
    STEP_OPS,
    Action,
    add_communication,
    format_order,
    parse,
    parse_order,
)

numbers = st.integers(0, 10**6)
actions = st.one_of(
    st.builds(Action, numbers, st.sampled_from(sorted(COMPUTE_OPS)), numbers, numbers),
    st.builds(Action, numbers, st.sampled_from(sorted(STEP_OPS)), st.none(), numbers),
    st.builds(Action, numbers, st.sampled_from(sorted(COMMUNICATION_OPS)), numbers, st.none()),
)


@given(st.lists(actions))
def test_text_round_trip(order: list[Action]) -> None:
    assert parse_order(format_order(order)) == order


@pytest.mark.parametrize("text", ["", "F", "0X1@0", "-1F0@0", "0F0@", "0F0@0x", "0F0@0 0B0@0", "0SEND0"])
def test_text_that_is_no_action_is_refused(text: str) -> None:
    with pytest.raises(ScheduleError, match="is not an action"):
        parse(text)


@pytest.mark.parametrize(
    ("text", "form"),
    [
        ("0F4", "0FMICROBATCH@VERSION"),
        ("3O2@1", "Write 3O@VERSION"),
        ("0N", "0N@VERSION"),
        ("1RECV_F4@1", "1RECV_FMICROBATCH"),
        ("1SEND_B", "1SEND_BMICROBATCH"),
    ],
)
def test_text_with_wrong_parts_names_the_form(text: str, form: str) -> None:
    with pytest.raises(ScheduleError, match=form):
        parse(text)


def communicate(text: str, *, num_stages: int, num_ranks: int) -> str:
    return format_order(add_communication(parse_order(text), num_stages=num_stages, num_ranks=num_ranks))


def test_ends_of_the_pipeline_have_one_neighbour() -> None:
    assert communicate("0F0@0 0B0@0", num_stages=2, num_ranks=2) == "0F0@0 0SEND_F0 0RECV_B0 0B0@0"
    assert communicate("1F0@0 1B0@0", num_stages=2, num_ranks=2) == "1RECV_F0 1F0@0 1B0@0 1SEND_B0"


def test_stages_on_one_rank_need_no_message() -> None:
    text = "0F0@0 1F0@0 1B0@0 0B0@0 0N@1 1N@1 0O@1 1O@1"
    assert communicate(text, num_stages=2, num_ranks=1) == text


def test_interleaved_wraps_from_the_last_rank_to_the_first() -> None:
    assert communicate("2F0@0", num_stages=4, num_ranks=2) == "2RECV_F0 2F0@0 2SEND_F0"


def test_input_gradient_travels_before_the_weight_gradient() -> None:
    assert communicate("1I0@0 1W0@0", num_stages=3, num_ranks=3) == "1RECV_B0 1I0@0 1SEND_B0 1W0@0"


def test_step_stands_before_the_wait_for_the_next_input() -> None:
    assert communicate("1O@1 1F6@1", num_stages=2, num_ranks=2) == "1O@1 1RECV_F6 1F6@1"


def test_pass_is_lazy() -> None:
    taken: list[int] = []

    def endless():
        for microbatch in itertools.count():
            taken.append(microbatch)
            yield Action(0, "F", microbatch, 0)

    stream = add_communication(endless(), num_stages=2, num_ranks=2)
    assert format_order(itertools.islice(stream, 3)) == "0F0@0 0SEND_F0 0F1@0"
    assert taken == [0, 1]
