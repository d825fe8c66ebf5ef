"""The protocol without tensors: a driver of a few lines lets workers of given speeds go round on the event queue."""

import dataclasses
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.dataparallel.batching import DynamicBatches, EqualBatches
from slipstream.dataparallel.emulation import Emulation
from slipstream.dataparallel.events import EventQueue
from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.messages import Order, Push
from slipstream.dataparallel.sequencer import Sequencer
from slipstream.errors import ConfigError, NonFiniteError

TOKENS = 16


def sequencer(*, total=12, pushes=0, dynamic=False, most=0, **options) -> Sequencer:
    kind = DynamicBatches if dynamic else EqualBatches
    policy = kind(step_microbatches=total, pushes_per_step=pushes, max_microbatches=most)
    return Sequencer(policy, Ledger(microbatch_tokens=TOKENS), **options)


class Drive:
    """Workers that pull, take their time, push, and pull again."""

    def __init__(self, protocol: Sequencer, speeds, *, jitter=0.0):
        self.protocol = protocol
        self.emulation = Emulation(microbatch_s=1.0, speeds=tuple(speeds), jitter=jitter)
        self.queue: EventQueue[Push] = EventQueue()
        self.sequence = dict.fromkeys(range(len(speeds)), 0)
        self.seen: list[int] = []
        for worker in range(len(speeds)):
            protocol.join(worker, 1)
        for worker in range(len(speeds)):
            self.pull(worker)

    def pull(self, worker):
        reply = self.protocol.pull(worker, 1, now_s=self.queue.now_s)
        if reply.order is not None:
            self.work(reply.order)

    def work(self, order: Order):
        self.sequence[order.worker] += 1
        cycle_s = self.emulation.cycle_s(order.worker, self.sequence[order.worker], order.lease.num_microbatches)
        self.queue.schedule(self.queue.now_s + cycle_s, push_of(order, self.sequence[order.worker], compute_s=cycle_s))

    def run(self, num_pushes):
        for _ in range(num_pushes):
            push = self.queue.pop()
            verdict = self.protocol.push(push)
            assert verdict.is_accepted
            self.seen.append(verdict.staleness)
            self.pull(push.worker)
            for order in self.protocol.admit(now_s=self.queue.now_s):
                self.work(order)
        return self.seen


def shares(protocol: Sequencer) -> list[float]:
    counts = [protocol.members[worker].microbatches for worker in sorted(protocol.members)]
    return [count / sum(counts) for count in counts]


def push_of(order: Order, sequence: int, **changes) -> Push:
    fields = {
        "worker": order.worker,
        "incarnation": order.incarnation,
        "sequence": sequence,
        "epoch": order.epoch,
        "lease_id": order.lease.id,
        "read_version": order.version,
        "num_tokens": TOKENS * order.lease.num_microbatches,
        "compute_s": 1.0,
    }
    return Push(**fields | changes)


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize(
    ("speeds", "pushes"),
    [((1, 1, 1, 1), 4), ((1, 1, 1, 0.25), 4), ((1, 2, 4, 8), 4), ((1, 2, 4, 8), 1), ((1, 0.7, 2.3, 0.4, 1.9, 1.1), 2)],
)
def test_mean_staleness_is_in_flight_less_one_over_pushes_a_step(speeds, pushes, dynamic):
    protocol = sequencer(total=24, pushes=pushes, dynamic=dynamic)
    drive = Drive(protocol, speeds, jitter=0.2)
    drive.run(4000)
    per_step = protocol.num_accepted / protocol.version
    assert protocol.staleness.mean == pytest.approx((len(speeds) - 1) / per_step, rel=0.02)
    assert protocol.pushes_per_step == pytest.approx(per_step, rel=0.2), "whole microbatches make cycles uneven"
    # The setting is kept, unless the fastest would need more than a step's microbatches.
    fits = not dynamic or max(speeds) * len(speeds) / sum(speeds) <= pushes
    assert protocol.staleness.mean <= 1.05 * (len(speeds) - 1) / pushes
    assert not fits or protocol.staleness.mean == pytest.approx((len(speeds) - 1) / pushes, rel=0.2)
    assert protocol.staleness.total == 4000 == sum(member.staleness.total for member in protocol.members.values())
    if not dynamic:
        assert per_step == pytest.approx(pushes, rel=0.001)
        assert protocol.pushes_per_step == pytest.approx(pushes)


@pytest.mark.parametrize("pushes", [0, 1, 2])
@pytest.mark.parametrize("dynamic", [False, True])
def test_tokens_and_steps_keep_in_proportion(dynamic, pushes):
    protocol = sequencer(total=24, dynamic=dynamic, pushes=pushes)
    drive = Drive(protocol, (1, 2, 4, 8), jitter=0.2)
    for _ in range(20):
        drive.run(100)
        assert protocol.version == protocol.ledger.tokens_committed // (24 * TOKENS)


@pytest.mark.parametrize("dynamic", [False, True])
def test_what_memory_allows_says_how_many_pushes_make_a_step(dynamic):
    protocol = sequencer(total=16, most=2, dynamic=dynamic)
    drive = Drive(protocol, (1, 1, 1, 1))
    assert protocol.pushes_per_step == 8
    drive.run(400)
    assert protocol.pushes_per_step == 8 == pytest.approx(protocol.num_accepted / protocol.version, rel=0.05)


@pytest.mark.parametrize("pushes", [0, 1])
def test_dynamic_batches_bring_the_largest_staleness_down(pushes):
    largest = {}
    for dynamic in (False, True):
        protocol = sequencer(total=30, pushes=pushes, dynamic=dynamic)
        largest[dynamic] = max(Drive(protocol, (1, 2, 4, 8)).run(600))
    assert largest[False] >= 3 * largest[True], largest


def one_worker(**options):
    protocol = sequencer(total=4, **options)
    protocol.join(7, 1)
    return protocol, protocol.pull(7, 1, now_s=0.0).order


def test_a_push_counts_once():
    protocol, order = one_worker()
    push = push_of(order, 1)
    assert protocol.push(push).makes_step
    for _ in range(3):
        assert protocol.push(push).rejection == "duplicate"
    assert (protocol.version, protocol.num_accepted, protocol.rejected["duplicate"]) == (1, 1, 3)
    assert protocol.ledger.tokens_committed == 4 * TOKENS
    assert protocol.ledger.balance().holds


@pytest.mark.parametrize(
    ("changes", "rejection"),
    [
        ({"worker": 8}, "unknown"),
        ({"incarnation": 0}, "incarnation"),
        ({"incarnation": 2}, "incarnation"),
        ({"epoch": 0}, "epoch"),
        ({"sequence": 0}, "duplicate"),
        ({"lease_id": 99}, "lease"),
        ({"read_version": 3}, "version"),
        ({"is_finite": False}, "non_finite"),
    ],
)
def test_what_does_not_fit_is_not_counted(changes, rejection):
    protocol, order = one_worker()
    verdict = protocol.push(push_of(order, **{"sequence": 1} | changes))
    assert verdict.rejection == rejection
    assert protocol.rejected == {rejection: 1}
    assert (protocol.version, protocol.ledger.tokens_committed, protocol.staleness.total) == (0, 0, 0)
    assert protocol.ledger.balance().holds


def test_pushes_out_of_order_count_once_each_or_not_at_all():
    protocol, first = one_worker()
    assert protocol.push(push_of(first, 1)).is_accepted
    second = protocol.pull(7, 1, now_s=1.0).order
    assert protocol.push(push_of(second, 2)).is_accepted
    assert protocol.push(push_of(first, 1)).rejection == "duplicate"
    assert protocol.push(push_of(first, 3)).rejection == "lease", "an old lease under a new number"
    assert protocol.ledger.tokens_committed == 8 * TOKENS


def test_a_silent_worker_is_given_up_and_its_late_push_rejected():
    protocol = sequencer(total=4)
    for worker in (0, 1):
        protocol.join(worker, 1)
    orders = [protocol.pull(worker, 1, now_s=0.0).order for worker in (0, 1)]
    deadline_s = orders[1].lease.deadline_s
    assert protocol.push(push_of(orders[0], 1)).is_accepted
    assert protocol.expire(deadline_s - 1e-6) == []
    assert protocol.expire(deadline_s) == [1]
    assert protocol.num_live == 1
    again = protocol.pull(0, 1, now_s=deadline_s).order
    assert set(orders[1].lease.microbatches()) <= set(again.lease.microbatches()), "its microbatches go out again"
    assert again.lease.num_microbatches == 4, "the step stays as large as it was"
    assert protocol.push(push_of(orders[1], 1)).rejection == "lease"
    assert protocol.pull(1, 1, now_s=deadline_s).action == "rejoin"
    protocol.join(1, 2)
    assert protocol.push(push_of(orders[1], 1)).rejection == "incarnation"
    assert protocol.pull(1, 2, now_s=deadline_s).action == "work"
    assert protocol.num_restarts == 1
    assert protocol.ledger.balance().holds


def test_a_worker_that_asks_before_it_is_done_has_time_for_both_and_loses_both():
    protocol = sequencer(total=12)
    for worker in (0, 1):
        protocol.join(worker, 1, pace_s=10.0)
    first, second = (protocol.pull(0, 1, now_s=0.0).order for _ in range(2))
    assert (first.lease.deadline_s, second.lease.deadline_s) == (360.0, 720.0)
    assert protocol.push(push_of(first, 1)).staleness == 0
    third = protocol.pull(0, 1, now_s=10.0).order
    assert protocol.expire(2000.0) == [0], "once, whatever it held"
    assert protocol.members[0].patience == 2.0
    assert protocol.ledger.balance().returned == 12 * TOKENS
    assert [protocol.push(push_of(order, 2)).rejection for order in (second, third)] == ["lease"] * 2
    assert protocol.ledger.balance().holds


def test_a_worker_slower_than_its_deadline_gets_through_in_the_end():
    """A first cycle takes ten times what the server grants: each miss doubles the patience, through every rejoining."""
    protocol, order = one_worker()
    cycle_s, now_s = 10 * order.lease.deadline_s, 0.0
    for incarnation in range(1, 10):
        if now_s + cycle_s <= order.lease.deadline_s:
            break
        now_s = order.lease.deadline_s
        assert protocol.expire(now_s) == [7]
        protocol.join(7, incarnation + 1)
        order = protocol.pull(7, incarnation + 1, now_s=now_s).order
    assert incarnation == 5, "1 + 2 + 4 + 8 were too little"
    assert protocol.push(push_of(order, 1)).is_accepted
    assert protocol.members[7].patience == 1.0
    assert protocol.ledger.balance().holds


def test_an_incarnation_comes_once():
    protocol, _ = one_worker()
    with pytest.raises(ConfigError, match="incarnation 1, but 1 was here"):
        protocol.join(7, 1)


def test_a_worker_of_another_run_is_turned_away_with_both_digests():
    protocol = sequencer(identity="aaaa")
    with pytest.raises(ConfigError, match=r"'bbbb', the server 'aaaa'"):
        protocol.join(0, 1, identity="bbbb")
    assert protocol.num_live == 0


def test_three_gradients_in_a_row_that_are_not_finite_are_the_end():
    protocol = sequencer(total=2)
    for worker in (0, 1):
        protocol.join(worker, 1)
    held = protocol.pull(0, 1, now_s=0.0).order
    for sequence, is_finite in enumerate((False, False, True, False, False, False), start=1):
        assert protocol.members[1].state == "live"
        order = protocol.pull(1, 1, now_s=0.0).order
        protocol.push(push_of(order, sequence, is_finite=is_finite))
    assert protocol.members[1].state == "quarantined"
    assert protocol.pull(1, 1, now_s=0.0).action == "stop"
    assert (protocol.rejected["non_finite"], protocol.num_live) == (5, 1)
    assert protocol.push(push_of(held, 1)).is_accepted, "the other goes on"
    assert protocol.ledger.balance().holds
    assert protocol.ledger.balance().returned == 5 * TOKENS, "another shall try them"
    assert protocol.ledger.num_dropped == 0


@pytest.mark.parametrize(("bound", "pushes"), [(1, 4), (2, 4), (3, 1), (5, 1), (1, 2)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_no_gradient_is_staler_than_the_bound(bound, pushes, dynamic):
    protocol = sequencer(total=32, pushes=pushes, dynamic=dynamic, max_staleness=bound)
    seen = Drive(protocol, (1, 2, 4, 8), jitter=0.5).run(800)
    assert max(seen) == bound
    assert protocol.ledger.balance().holds


@pytest.mark.parametrize(
    ("speeds", "bound", "expected"),
    [((1, 1, 1, 8), 2, [1 / 11, 1 / 11, 1 / 11, 8 / 11]), ((1, 1, 1, 1), 3, [0.25] * 4)],
)
def test_nobody_overtakes_a_parked_worker(speeds, bound, expected):
    """A large share needs more room than small ones, which would take what there is for ever; so would the punctual."""
    protocol = sequencer(total=24, pushes=1, dynamic=True, max_staleness=bound)
    drive = Drive(protocol, speeds)
    drive.run(800)
    assert shares(protocol) == pytest.approx(expected, abs=0.02)
    done = protocol.ledger.tokens_committed / TOKENS
    assert done / (drive.queue.now_s * sum(speeds)) > 0.7


@pytest.mark.parametrize("parked", [[2, 1], [[2, 10.0], [1, 11.0]]], ids=["saved", "saved-by-an-older-version"])
def test_parked_workers_are_served_in_the_order_in_which_they_came(parked):
    protocol = sequencer(total=4, pushes=1, max_staleness=1)
    for worker in (0, 1, 2):
        protocol.join(worker, 1)
    out = protocol.pull(0, 1, now_s=0.0).order
    assert protocol.pull(1, 1, now_s=0.0).action == "work"
    assert protocol.pull(2, 1, now_s=0.0).action == "wait"
    protocol.leave(1)
    assert protocol.pull(1, 1, now_s=0.0).action == "rejoin"
    protocol.join(1, 2)
    assert protocol.pull(1, 2, now_s=0.0).action == "wait", "there would be room, but 2 came first"
    state = json.loads(json.dumps(protocol.state_dict()))
    assert state["parked"] == [2, 1]
    protocol.load_state_dict(state | {"parked": parked})
    assert [order.worker for order in protocol.admit(now_s=0.0)] == [2]
    assert protocol.state_dict()["parked"] == [1]
    protocol.push(push_of(out, 1))


def drive_poisoned(protocol, speeds, poison, num_pushes, *, broken=()):
    """Gradients that contain a microbatch of ``poison``, or come from a broken worker, are not finite."""
    drive = Drive(protocol, speeds, jitter=0.2)
    for _ in range(num_pushes):
        push = drive.queue.pop()
        lease = protocol.ledger.open_lease(push.lease_id)
        bad = push.worker in broken or poison & set(lease.microbatches())
        protocol.push(dataclasses.replace(push, is_finite=not bad))
        drive.pull(push.worker)
        for order in protocol.admit(now_s=drive.queue.now_s):
            drive.work(order)
        assert protocol.ledger.balance().holds


@pytest.mark.parametrize("speeds", [(1,), (1, 1), (1, 2, 4, 8)])
@pytest.mark.parametrize("dynamic", [False, True])
def test_one_bad_microbatch_costs_a_lease_and_nobody_his_place(speeds, dynamic):
    protocol = sequencer(total=24, dynamic=dynamic, max_dropped=72)
    drive_poisoned(protocol, speeds, {100}, 300)
    assert {member.state for member in protocol.members.values()} == {"live"}
    assert not any(member.strikes for member in protocol.members.values())
    assert protocol.rejected == {"non_finite": 2}
    assert any(start <= 100 < stop for start, stop in protocol.ledger.dropped)
    assert 1 <= protocol.ledger.num_dropped <= 24
    assert protocol.ledger.lag < 10 * 24


def test_a_broken_worker_goes_and_no_data_is_lost():
    protocol = sequencer(total=24, max_dropped=0)
    drive_poisoned(protocol, (1, 1, 1), set(), 60, broken={1})
    assert [protocol.members[worker].state for worker in range(3)] == ["live", "quarantined", "live"]
    assert (protocol.ledger.num_dropped, protocol.rejected["non_finite"]) == (0, 3)


def test_more_bad_data_than_allowed_ends_the_run_and_is_named():
    protocol = sequencer(total=4, max_dropped=2)
    with pytest.raises(
        NonFiniteError, match=r"3 microbatches, up to step \d+: .* microbatches 5 to 5, 9 to 9, 14 to 14"
    ):
        drive_poisoned(protocol, (1, 1, 1, 1), {5, 9, 14}, 100)


def test_where_everything_fails_the_run_ends_with_the_same_word():
    for speeds in ((1,), (1, 1, 1, 1)):
        with pytest.raises(NonFiniteError, match=r"train\.max_skipped_steps allows 12 microbatches"):
            drive_poisoned(sequencer(total=4, max_dropped=12), speeds, set(range(1000)), 100)


def test_without_the_bound_the_same_workers_exceed_it():
    assert max(Drive(sequencer(total=32, pushes=1), (1, 2, 4, 8), jitter=0.5).run(800)) > 5


def test_a_parked_worker_is_served_when_the_slow_one_dies():
    protocol = sequencer(total=4, pushes=1, max_staleness=1)
    for worker in (0, 1):
        protocol.join(worker, 1)
    slow = protocol.pull(1, 1, now_s=0.0).order
    order = protocol.pull(0, 1, now_s=0.0).order
    protocol.push(push_of(order, 1))
    assert protocol.pull(0, 1, now_s=1.0).action == "wait"
    assert protocol.pull(0, 1, now_s=2.0).action == "wait", "asking again does not jump the queue"
    assert list(protocol.admit(now_s=2.0)) == []
    protocol.leave(1)
    (order,) = protocol.admit(now_s=3.0)
    assert order.worker == 0
    assert set(slow.lease.microbatches()) <= set(order.lease.microbatches())


messages = st.lists(
    st.tuples(st.integers(0, 2), st.sampled_from(["pull", "push", "again", "old", "nan", "die", "late"])), max_size=80
)


@settings(deadline=None)
@given(messages)
def test_under_any_messages_the_accounts_agree(words):
    protocol = sequencer(total=4, dynamic=True, max_staleness=2)
    incarnations, sequences = dict.fromkeys(range(3), 0), dict.fromkeys(range(3), 0)
    out: dict[int, Order] = {}
    sent: list[Push] = []
    counted = 0

    def rejoin(worker):
        incarnations[worker] += 1
        sequences[worker] = 0
        protocol.join(worker, incarnations[worker])

    for now_s, (worker, word) in enumerate(words):
        if word == "pull" and worker not in out:
            reply = protocol.pull(worker, incarnations[worker], now_s=now_s)
            if reply.action == "rejoin":
                rejoin(worker)
            elif reply.order is not None:
                out[worker] = reply.order
        elif word in ("push", "nan") and worker in out:
            sequences[worker] += 1
            push = push_of(out.pop(worker), sequences[worker], is_finite=word == "push")
            sent.append(push)
            counted += push.num_tokens * protocol.push(push).is_accepted
        elif word in ("again", "old") and sent:
            assert not protocol.push(sent[-1 if word == "again" else worker % len(sent)]).is_accepted
        elif word == "die" and worker in protocol.members:
            protocol.leave(worker)
        elif word == "late":
            protocol.expire(now_s + 100.0)
        out |= {order.worker: order for order in protocol.admit(now_s=now_s)}
        assert protocol.ledger.balance().holds
        assert protocol.ledger.tokens_committed == counted
        assert protocol.staleness.largest <= 2
        assert sum(protocol.in_flight.readers.values()) == len(protocol.ledger.state_dict()["open"])


def test_a_restored_server_goes_on_alike_and_after_a_resync_refuses_what_was_in_flight():
    protocol = sequencer(total=30, dynamic=True)
    drive = Drive(protocol, (1, 2, 4, 8), jitter=0.3)
    drive.run(50)
    copy = sequencer(total=30, dynamic=True)
    copy.load_state_dict(json.loads(json.dumps(protocol.state_dict())))
    pending = [push for _, push in drive.queue.pending()]
    drive.run(200)
    twin = Drive(sequencer(total=30, dynamic=True), (1, 2, 4, 8), jitter=0.3)
    twin.run(50)
    twin.protocol.load_state_dict(json.loads(json.dumps(twin.protocol.state_dict())))
    twin.run(200)
    assert twin.protocol.state_dict() == protocol.state_dict()
    copy.resync()
    assert {copy.push(push).rejection for push in pending} == {"epoch"}
    assert copy.num_live == 0
    assert copy.ledger.balance().holds
    assert copy.ledger.balance().open == 0
    copy.join(0, 2)
    assert copy.num_restarts == 0, "the server came back, not the worker"
    frontier, lost = copy.ledger.frontier, copy.ledger.balance().returned
    assert lost == sum(push.num_tokens for push in pending) > 0
    copy.pull(0, 2, now_s=0.0)
    assert copy.ledger.frontier == frontier, "lost work goes out first"
    assert copy.ledger.balance().returned == max(lost - 30 * TOKENS, 0)


def test_an_order_whose_weights_are_gone_is_taken_back():
    protocol, order = one_worker()
    protocol.decline(7, 2, order.lease.id)
    assert protocol.ledger.open_lease(order.lease.id) is not None, "another life of the worker has no say"
    protocol.decline(7, 1, order.lease.id)
    assert protocol.in_flight.get(order.lease.id) is None
    assert protocol.push(push_of(order, 1)).rejection == "lease"
    again = protocol.pull(7, 1, now_s=1.0).order
    assert again.lease.ranges == order.lease.ranges
    assert protocol.ledger.balance().holds


def test_whether_a_push_completes_a_step_is_known_before():
    protocol = sequencer(total=4, pushes=2)
    for worker in (0, 1):
        protocol.join(worker, 1)
    orders = [protocol.pull(worker, 1, now_s=0.0).order for worker in (0, 1)]
    for order, expected in zip(orders, (False, True)):
        push = push_of(order, 1)
        assert protocol.completes_step(push.num_tokens) is expected
        assert protocol.push(push).makes_step is expected


@pytest.mark.parametrize(("pace_s", "deadline_s"), [(0.0, 60.0), (1.0, 60.0), (100.0, 6 * 4 * 100.0)])
def test_a_slow_model_has_time_for_its_first_cycle(pace_s, deadline_s):
    """Otherwise its worker would be given up, come back, and be given up again for ever."""
    protocol = sequencer(total=4, dynamic=True)
    protocol.join(0, 1, pace_s=pace_s)
    order = protocol.pull(0, 1, now_s=0.0).order
    assert order.lease.num_microbatches == 4
    assert order.lease.deadline_s == deadline_s
