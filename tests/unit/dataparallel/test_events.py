from slipstream.dataparallel.emulation import Emulation
from slipstream.dataparallel.events import EventQueue


def test_equal_times_keep_their_order_also_after_a_restore():
    queue: EventQueue[str] = EventQueue()
    for name, at_s in (("c", 2.0), ("a", 1.0), ("b", 1.0), ("d", 2.0)):
        queue.schedule(at_s, name)
    copy: EventQueue[str] = EventQueue()
    copy.restore(queue.now_s, queue.pending())
    for each in (queue, copy):
        assert [each.pop() for _ in range(4)] == ["a", "b", "c", "d"]
        assert each.now_s == 2.0
        assert each.next_s == float("inf")


def test_the_past_is_now():
    queue: EventQueue[str] = EventQueue(now_s=5.0)
    queue.schedule(1.0, "late")
    assert queue.pop() == "late"
    assert queue.now_s == 5.0


def test_jitter_keeps_the_mean_and_depends_on_nothing_but_worker_and_cycle():
    emulation = Emulation(microbatch_s=0.1, speeds=(1.0, 0.25), jitter=0.3, seed=3)
    times = [emulation.cycle_s(1, cycle, 2) for cycle in range(4000)]
    assert abs(sum(times) / len(times) / (2 * 0.1 / 0.25) - 1) < 0.02
    assert times[17] == emulation.cycle_s(1, 17, 2) != emulation.cycle_s(0, 17, 2) / 0.25
    assert Emulation(microbatch_s=0.1, speeds=(0.5,)).cycle_s(0, 9, 3) == 0.1 * 3 / 0.5
    assert Emulation(microbatch_s=0.1, speeds=(0.5,)).speed(1) == 1.0
