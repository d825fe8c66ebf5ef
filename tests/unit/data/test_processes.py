import os
import signal
import time

import pytest

from slipstream.data.processes import Processes
from slipstream.errors import DataError


def double(number: int) -> int:
    return 2 * number


def die(number: int) -> int:
    os.kill(os.getpid(), signal.SIGKILL)
    return number


def sleep(seconds: int) -> int:
    time.sleep(seconds)
    return seconds


def test_nobody_waits_for_what_is_given_up() -> None:
    def interrupted() -> None:
        with Processes(2) as processes:
            for seconds in processes.in_order(sleep, [0, 3600]):
                assert seconds == 0
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()


def test_results_come_in_order_and_arguments_are_not_taken_far_ahead() -> None:
    taken = []

    def numbers():
        for i in range(20):
            taken.append(i)
            yield i

    with Processes(2) as processes:
        results = processes.in_order(double, numbers())
        assert next(results) == 0
        assert len(taken) <= 6
        assert list(results) == [2 * i for i in range(1, 20)]
        with pytest.raises(DataError, match=r"one of the 2 processes .* was killed; .* Take fewer \(--num-workers\)"):
            list(processes.in_order(die, [1]))
