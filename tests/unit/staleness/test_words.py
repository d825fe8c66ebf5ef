import pytest

from slipstream.config import from_dict, resolve
from slipstream.staleness.words import delay_words, one_delay
from slipstream.train.delays import largest_delay

PIPELINE = {"executor": "pipeline", "pipeline": {"num_stages": 2, "num_microbatches": 2}}
WORKERS = {"executor": "dataparallel", "dataparallel": {"num_workers": 2}}


ONE = {"num_workers": 1, "num_stages": 2, "min_microbatches": 2}


@pytest.mark.parametrize(
    ("tables", "words", "delay"),
    [
        ({}, "delay 0", 0),
        ({"staleness": {"delay": 3}}, "delay 3", 3),
        ({"staleness": {"delay": 3, "delay_blocks": [0, 1]}}, "delay 3 of some parameters", None),
        ({"staleness": {"delay_blocks": [0, 1]}}, "delay 0", 0),
        ({"staleness": {"delay_stages": 3}}, "delay by stage, 2 to 0", None),
        ({"staleness": {"delay_weights": [1.0, 1.0]}}, "drawn delay", None),
        ({"staleness": {"delay_replay": "metrics.jsonl"}}, "replayed delay", None),
        (PIPELINE | {"pipeline": {"num_stages": 2, "pipeline_schedule": "two_bw"}}, "delay 1", 1),
        (PIPELINE | {"pipeline": {"num_stages": 2, "pipeline_schedule": "gpipe"}}, "delay 0", 0),
        (WORKERS, "delay by the workers' speeds", None),
        (WORKERS | {"dataparallel": {"num_workers": 2, "mode": "sync"}}, "delay 0", 0),
        (WORKERS | {"dataparallel": {"num_workers": 1}}, "delay 0", 0),
        (WORKERS | {"dataparallel": ONE}, "delay 1", 1),
        (WORKERS | {"dataparallel": ONE, "pipeline": {"pipeline_schedule": "one_f_one_b"}}, "delay 0", 0),
        (WORKERS | {"dataparallel": ONE | {"num_workers": 2}}, "delay by the workers' speeds", None),
    ],
)
def test_one_number_stands_for_all_gradients_or_words_do(tables, words, delay):
    config = resolve(from_dict(tables), vocab_size=257, cuda=False)
    assert delay_words(config) == words
    assert one_delay(config) == delay
    if config.executor == "dataparallel":
        assert largest_delay(config) == delay
