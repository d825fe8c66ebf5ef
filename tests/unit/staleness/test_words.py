import pytest

from slipstream.config import from_dict, resolve
from slipstream.staleness.words import delay_words, has_one_delay

PIPELINE = {"executor": "pipeline", "pipeline": {"num_stages": 2, "num_microbatches": 2}}
WORKERS = {"executor": "dataparallel", "dataparallel": {"num_workers": 2}}


@pytest.mark.parametrize(
    ("tables", "words", "one"),
    [
        ({}, "delay 0", True),
        ({"staleness": {"delay": 3}}, "delay 3", True),
        ({"staleness": {"delay": 3, "delay_blocks": [0, 1]}}, "delay 3 of some parameters", False),
        ({"staleness": {"delay_blocks": [0, 1]}}, "delay 0", True),
        ({"staleness": {"delay_stages": 3}}, "delay by stage, 2 to 0", False),
        ({"staleness": {"delay_weights": [1.0, 1.0]}}, "drawn delay", False),
        ({"staleness": {"delay_replay": "metrics.jsonl"}}, "replayed delay", False),
        (PIPELINE | {"pipeline": {"num_stages": 2, "pipeline_schedule": "two_bw"}}, "delay 1", True),
        (PIPELINE | {"pipeline": {"num_stages": 2, "pipeline_schedule": "gpipe"}}, "delay 0", True),
        (WORKERS, "delay by the workers' speeds", False),
        (WORKERS | {"dataparallel": {"num_workers": 2, "mode": "sync"}}, "delay 0", True),
    ],
)
def test_one_number_stands_for_all_gradients_or_words_do(tables, words, one):
    config = resolve(from_dict(tables), vocab_size=257, cuda=False)
    assert delay_words(config) == words
    assert has_one_delay(config) == one
