import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from slipstream.data import IGNORE, Batch, Loader, TokenArray
from slipstream.errors import ConfigError, DataError


def tokens(count: int, name: str = "train") -> TokenArray:
    return TokenArray(name, [np.arange(count)])


def windows(loader: Loader, start: int, count: int) -> list[int]:
    inputs, _ = loader.sequences(start, count)
    return [int(row[0]) // loader.sequence_length for row in inputs]


def take(iterator, count: int) -> list[Batch]:
    return list(itertools.islice(iterator, count))


def assert_same(left: list[Batch], right: list[Batch]) -> None:
    assert [batch.index for batch in left] == [batch.index for batch in right]
    for a, b in zip(left, right, strict=True):
        np.testing.assert_array_equal(a.inputs, b.inputs)
        np.testing.assert_array_equal(a.targets, b.targets)


def test_targets_are_the_next_tokens_over_the_whole_window() -> None:
    loader = Loader(tokens(41), sequence_length=4, batch_size=3)
    inputs, targets = loader.sequences(0, loader.num_sequences)
    assert inputs.shape == targets.shape == (10, 4)
    assert inputs.dtype == targets.dtype == np.int64
    np.testing.assert_array_equal(targets, inputs + 1)
    assert sorted(targets.ravel().tolist()) == list(range(1, 41))


@pytest.mark.parametrize(("count", "expected"), [(40, 9), (41, 10), (44, 10), (45, 11)])
def test_number_of_sequences(count: int, expected: int) -> None:
    assert Loader(tokens(count), sequence_length=4, batch_size=3).num_sequences == expected


def test_each_epoch_visits_every_sequence_once_in_its_own_order() -> None:
    loader = Loader(tokens(4 * 50 + 1), sequence_length=4, batch_size=3)
    epochs = [windows(loader, epoch * 50, 50) for epoch in range(4)]
    assert all(sorted(epoch) == list(range(50)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 4
    assert tuple(range(50)) not in {tuple(epoch) for epoch in epochs}


def test_order_is_fixed_by_seed_and_epoch_for_good() -> None:
    """A changed order would silently break the resumption of every run: these numbers must never change."""
    loader = Loader(tokens(4 * 8 + 1), sequence_length=4, batch_size=3, seed=7)
    assert windows(loader, 0, 16) == [4, 1, 6, 3, 2, 7, 5, 0, 3, 1, 6, 2, 5, 4, 0, 7]
    other = Loader(tokens(4 * 8 + 1), sequence_length=4, batch_size=3, seed=8)
    assert windows(other, 0, 8) != windows(loader, 0, 8)


def test_reading_anywhere_in_any_order_gives_the_same() -> None:
    one = Loader(tokens(4 * 11 + 1), sequence_length=4, batch_size=3, seed=1)
    straight = windows(one, 0, 60)
    two = Loader(tokens(4 * 11 + 1), sequence_length=4, batch_size=3, seed=1)
    places = [43, 2, 10, 11, 33, 9, 12, 55, 0]
    assert [windows(two, place, 3) for place in places] == [straight[place : place + 3] for place in places]


@pytest.mark.parametrize("world_size", [1, 2, 3, 6])
def test_global_order_is_the_same_for_any_number_of_ranks(world_size: int) -> None:
    whole = Loader(tokens(4 * 11 + 1), sequence_length=4, batch_size=6).batch(4)
    share = 6 // world_size
    parts = [
        Loader(tokens(4 * 11 + 1), sequence_length=4, batch_size=6).sequences(4 * 6 + rank * share, share)[0]
        for rank in range(world_size)
    ]
    np.testing.assert_array_equal(np.concatenate(parts), whole.inputs)


def test_iteration_and_random_access_agree() -> None:
    loader = Loader(tokens(41), sequence_length=4, batch_size=3)
    assert_same(take(loader, 9), [loader.batch(index) for index in range(9)])


@given(before=st.integers(0, 12), after=st.integers(1, 8), batch_size=st.integers(1, 9), seed=st.integers(0, 2**64 - 1))
def test_a_loader_begins_anywhere(before: int, after: int, batch_size: int, seed: int) -> None:
    settings = {"sequence_length": 4, "batch_size": batch_size, "seed": seed}
    straight = take(Loader(tokens(41), **settings), before + after)
    later = Loader(tokens(41), **settings, cursor=before * batch_size, batch_index=before)
    assert_same(take(later, after), straight[before:])


@given(first=st.integers(1, 9), second=st.integers(1, 9), num_batches=st.integers(0, 6))
def test_another_batch_size_goes_on_where_the_first_stopped(first: int, second: int, num_batches: int) -> None:
    begun = take(Loader(tokens(41), sequence_length=4, batch_size=first), num_batches)
    other = Loader(
        tokens(41), sequence_length=4, batch_size=second, cursor=num_batches * first, batch_index=num_batches
    )
    rest = take(other, 5)
    assert rest[0].index == num_batches
    seen = [value for batch in (*begun, *rest) for value in batch.inputs[:, 0].tolist()]
    assert seen == other.sequences(0, len(seen))[0][:, 0].tolist()


def test_microbatches_cut_a_batch_in_order() -> None:
    batch = Loader(tokens(41), sequence_length=4, batch_size=6).batch(2)
    parts = [batch.microbatch(j, 3) for j in range(3)]
    np.testing.assert_array_equal(np.concatenate([part.inputs for part in parts]), batch.inputs)
    np.testing.assert_array_equal(np.concatenate([part.targets for part in parts]), batch.targets)
    assert {part.index for part in parts} == {2}
    assert batch.num_tokens == 24
    assert sum(part.num_tokens for part in parts) == 24
    with pytest.raises(ConfigError, match="6 sequences do not make 4 equal microbatches"):
        batch.microbatch(0, 4)


@pytest.mark.parametrize("count", [40, 41, 42, 43, 44, 49])
def test_sequential_reads_everything_once_and_pads_the_end(count: int) -> None:
    loader = Loader(tokens(count, "validation"), sequence_length=4, batch_size=3, sequential=True)
    batches = take(loader, 99)
    assert len(batches) == loader.num_batches
    assert all(batch.inputs.shape == (3, 4) for batch in batches)
    targets = np.concatenate([batch.targets.ravel() for batch in batches])
    inputs = np.concatenate([batch.inputs.ravel() for batch in batches])
    assert targets[targets != IGNORE].tolist() == list(range(1, count))
    assert inputs[targets != IGNORE].tolist() == list(range(count - 1))
    assert sum(batch.num_tokens for batch in batches) == count - 1
    assert set(inputs[targets == IGNORE].tolist()) <= {0}


def test_sequential_stops_after_as_many_as_asked() -> None:
    loader = Loader(tokens(41), sequence_length=4, batch_size=3, sequential=True, max_sequences=5)
    batches = take(loader, 99)
    assert [batch.num_tokens for batch in batches] == [12, 8]
    assert loader.num_sequences == 5
    more = Loader(tokens(41), sequence_length=4, batch_size=3, sequential=True, max_sequences=99)
    assert more.num_sequences == 10


@given(count=st.integers(5, 200), asked=st.integers(1, 60))
def test_a_part_is_spread_evenly_over_the_split(count: int, asked: int) -> None:
    """A beginning alone would be of one document, or of the first kind of text that was prepared."""
    whole = -(-(count - 1) // 4)
    loader = Loader(tokens(count), sequence_length=4, batch_size=1, sequential=True, max_sequences=asked)
    read = windows(loader, 0, loader.num_sequences)
    assert loader.num_sequences == min(asked, whole)
    assert read[0] == 0
    assert len(set(read)) == len(read)
    gaps = {after - before for before, after in itertools.pairwise([*read, whole])}
    assert max(gaps) - min(gaps) <= 1
    if asked < whole:
        assert all(batch.num_tokens == 4 for batch in loader), "a part has no room for the short end"


def test_sequential_begins_anywhere_too() -> None:
    settings = {"sequence_length": 4, "batch_size": 3, "sequential": True}
    later = Loader(tokens(41), **settings, cursor=3, batch_index=1)
    assert_same(take(later, 99), take(Loader(tokens(41), **settings), 99)[1:])


def test_epochs() -> None:
    loader = Loader(tokens(41), sequence_length=4, batch_size=3)
    assert loader.epochs_for(10) == 3.0
    assert loader.num_batches == 4


@pytest.mark.parametrize("sequential", [False, True])
@pytest.mark.parametrize(("count", "whole"), [(0, 0), (1, 0), (12, 2)])
def test_less_than_a_batch_is_refused_with_the_counts(count: int, whole: int, sequential: bool) -> None:
    message = f"the train split is too small: {count} tokens make {whole} sequences of 4, a batch needs 3 .13 tokens"
    with pytest.raises(DataError, match=message):
        Loader(tokens(count), sequence_length=4, batch_size=3, sequential=sequential)
    assert Loader(tokens(13), sequence_length=4, batch_size=3, sequential=sequential).num_sequences == 3


@pytest.mark.parametrize(
    ("name", "value"),
    [("sequence_length", 0), ("batch_size", 0), ("seed", -1), ("seed", 2**64), ("cursor", -1), ("max_sequences", 0)],
)
def test_numbers_out_of_range_are_refused(name: str, value: int) -> None:
    settings = {"sequence_length": 4, "batch_size": 3, name: value}
    with pytest.raises(ConfigError, match=f"{name} is {value}"):
        Loader(tokens(41), **settings)


def test_bound_without_an_end_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_sequences is given, but the loader is endless"):
        Loader(tokens(41), sequence_length=4, batch_size=3, max_sequences=2)


def test_global_random_state_is_left_alone() -> None:
    np.random.seed(0)
    before = np.random.get_state()[1].copy()
    take(Loader(tokens(41), sequence_length=4, batch_size=3), 9)
    np.testing.assert_array_equal(np.random.get_state()[1], before)
