import time

import pytest
import torch

from slipstream.pipeline.transport import PeerError, wait

CUDA = torch.device("cuda")


class Work:
    """What NCCL gives for an operation: it ends after some questions, or fails."""

    def __init__(self, num_questions, error=None):
        self.left = num_questions
        self.error = error
        self.waits = []

    def is_completed(self):
        self.left -= 1
        return self.left < 0

    def wait(self, *timeout):
        self.waits.append(timeout)
        if self.error:
            raise self.error


def test_on_a_gpu_waiting_is_timed_from_the_wait_on():
    """NCCL counts from where an operation began, and a receive that is posted ahead began long ago."""
    work = Work(3)
    wait(work, what="a message", device=CUDA, timeout_s=60.0)
    assert work.waits == [()], "a timeout of NCCL's own would count from the beginning"


def test_on_a_gpu_a_wait_ends_with_who_was_waited_for():
    begin = time.perf_counter()
    with pytest.raises(PeerError, match=r"waited for a message: nothing came for 0 s \(pipeline\.timeout_s\)"):
        wait(Work(10**9), what="a message", device=CUDA, timeout_s=0.05)
    assert time.perf_counter() - begin >= 0.05


def test_on_a_gpu_an_operation_that_failed_says_why():
    with pytest.raises(PeerError, match="waited for a message: connection closed"):
        wait(Work(0, RuntimeError("connection closed\nstack")), what="a message", device=CUDA, timeout_s=60.0)
