import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.dataparallel.ledger import Ledger
from slipstream.dataparallel.ranges import RangeSet


def units(ranges):
    return [number for start, stop in ranges for number in range(start, stop)]


@given(st.permutations(range(12)))
def test_range_set_merges_whatever_the_order(order):
    numbers = RangeSet()
    for number in order:
        numbers.add(number, number + 1)
    assert list(numbers) == [(0, 12)]
    assert len(numbers) == 12


@given(st.sets(st.integers(0, 60)), st.integers(0, 70))
def test_take_gives_the_least_and_keeps_the_rest(held, count):
    numbers = RangeSet((number, number + 1) for number in sorted(held))
    taken = units(numbers.take(count))
    assert taken == sorted(held)[:count]
    assert units(numbers) == sorted(held)[count:]
    assert len(numbers) == len(held) - len(taken)


@pytest.mark.parametrize("range_", [(1, 3), (0, 1), (3, 5), (2, 2), (0, 9)])
def test_range_set_refuses_what_it_holds(range_):
    numbers = RangeSet([(0, 4)])
    with pytest.raises(ValueError, match="held already"):
        numbers.add(*range_)


actions = st.lists(
    st.tuples(
        st.sampled_from(["issue", "commit", "release", "expire", "give_back", "fail"]),
        st.integers(0, 4),
        st.integers(1, 7),
    ),
    max_size=60,
)


@given(actions)
def test_whatever_happens_every_microbatch_is_in_one_account(steps):
    ledger, leases, committed, waiting = Ledger(microbatch_tokens=16), [], [], set()
    failed, dropped = {}, set()  # microbatches that failed once, by whom; and twice
    for now, (action, worker, number) in enumerate(steps):
        if action == "issue":
            before = ledger.frontier
            lease = ledger.issue(worker, 1, number, deadline_s=now + 3.0 * number)
            got = list(lease.microbatches())
            assert len(got) == number == lease.num_microbatches
            old = [each for each in got if each < before]
            may = sorted(each for each in waiting if failed.get(each) != worker)
            may.sort(key=lambda each: each not in failed)
            assert old == sorted(may[: len(old)]), "the oldest go out first, what failed before the rest"
            assert len(old) == number or len(old) == len(may), "nothing new while something waits"
            waiting -= set(old)
            leases.append(lease)
        elif action == "commit" and leases:
            lease = leases[number % len(leases)]
            if ledger.commit(lease.id, num_tokens=16 * lease.num_microbatches):
                committed += lease.microbatches()
        elif action == "give_back" and leases:
            lease = leases[number % len(leases)]
            if ledger.give_back(lease.id):
                waiting |= set(lease.microbatches())
        elif action == "fail" and leases:
            lease = leases[number % len(leases)]
            again = {each for each in lease.microbatches() if each in failed} - dropped
            if ledger.open_lease(lease.id) is None:
                assert ledger.fail(lease.id) == {}
            else:
                blamed = {failed[each] for each in again}
                assert set(ledger.fail(lease.id).values()) == blamed
                dropped |= again
                for each in set(lease.microbatches()) - again:
                    failed[each] = lease.worker
                    waiting.add(each)
        elif action == "release":
            for lease in ledger.release(worker):
                assert lease.worker == worker
                waiting |= set(lease.microbatches())
        elif action == "expire":
            for lease in ledger.expire(float(now)):
                assert lease.deadline_s <= now
                waiting |= set(lease.microbatches())
            assert ledger.next_deadline_s > now
        balance = ledger.balance()
        assert balance.holds, balance
        assert len(committed) == len(set(committed)) == balance.committed / 16
        assert balance.returned == 16 * len(waiting)
        assert balance.dropped == 16 * len(dropped)
        missing = [unit for unit in range(ledger.frontier) if unit not in dropped.union(committed)]
        assert ledger.lag == (ledger.frontier - missing[0] if missing else 0)
    copy = Ledger(microbatch_tokens=16)
    copy.load_state_dict(json.loads(json.dumps(ledger.state_dict())))
    assert copy.state_dict() == ledger.state_dict()
    assert copy.balance() == ledger.balance()
    assert copy.next_deadline_s == ledger.next_deadline_s
    assert copy.issue(9, 1, 3, deadline_s=0.0) == ledger.issue(9, 1, 3, deadline_s=0.0)


def test_a_lease_counts_once():
    ledger = Ledger(microbatch_tokens=4)
    lease = ledger.issue(0, 1, 2, deadline_s=1.0)
    assert ledger.commit(lease.id, num_tokens=8)
    assert not ledger.commit(lease.id, num_tokens=8)
    assert not ledger.give_back(lease.id)
    assert ledger.tokens_committed == 8


def test_a_worker_that_miscounts_its_tokens_unbalances_the_ledger():
    ledger = Ledger(microbatch_tokens=4)
    ledger.commit(ledger.issue(0, 1, 2, deadline_s=1.0).id, num_tokens=7)
    assert not ledger.balance().holds


def test_memory_follows_the_open_leases_not_the_run():
    ledger = Ledger(microbatch_tokens=1)
    slow = ledger.issue(0, 1, 1, deadline_s=1e9)
    for _ in range(1000):
        ledger.commit(ledger.issue(1, 1, 3, deadline_s=1e9).id, num_tokens=3)
    assert len(ledger.state_dict()["committed"]) == 1
    assert ledger.lag == 3001
    ledger.commit(slow.id, num_tokens=1)
    assert ledger.state_dict()["committed"] == [(0, 3001)]
    assert ledger.lag == 0


def test_what_failed_goes_to_another_worker_and_is_dropped_if_that_one_fails_too():
    ledger = Ledger(microbatch_tokens=4)
    first = ledger.issue(0, 1, 2, deadline_s=1.0)
    assert ledger.fail(first.id) == {}
    assert ledger.issue(0, 1, 1, deadline_s=1.0).ranges == ((2, 3),), "not again to the same"
    second = ledger.issue(1, 1, 3, deadline_s=1.0)
    assert second.ranges == ((0, 2), (3, 4))
    assert ledger.balance().returned == 0
    assert ledger.fail(second.id) == {first.id: 0}
    assert (ledger.dropped, ledger.num_dropped, ledger.balance().returned) == (((0, 2),), 2, 4)
    assert ledger.issue(0, 1, 1, deadline_s=1.0).ranges == ((3, 4),), "that failed but once"
    assert ledger.balance().holds


def test_who_is_alone_gets_what_it_failed_on_again():
    ledger = Ledger(microbatch_tokens=4)
    ledger.fail(ledger.issue(0, 1, 1, deadline_s=1.0).id)
    lease = ledger.issue(0, 1, 1, deadline_s=1.0, is_alone=True)
    assert lease.ranges == ((0, 1),)
    ledger.commit(lease.id, num_tokens=4)
    assert ledger.state_dict()["suspects"] == []
    assert ledger.balance().holds
