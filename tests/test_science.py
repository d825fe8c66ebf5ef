"""The effect this project is about, over paired seeds: claims are on 95 % intervals, never on single runs.

What is run is ``benchmarks/staleness_effect.py``, whose recorded results have the figures.
"""

import pytest
from staleness_effect import Effect, Interval, Losses, Scale, difference, measure

TINY = Scale(
    num_layers=2,
    dim=32,
    ffn_dim=64,
    batch_size=8,
    num_steps=200,
    lr_warmup_steps=20,
    num_validation_sequences=256,
)


def test_delay_hurts_adamw_and_error_feedback_helps():
    losses = measure(seeds=(0, 1, 2), scale=TINY, rates={"adamw": {"lr": 0.004}}, num_workers=1)
    effect = Effect.of(losses["adamw"])
    assert Interval.of(effect.delay_gap).low > 0
    assert Interval.of(effect.improvement).low > 0


@pytest.fixture(scope="module")
def losses() -> Losses:
    return measure()


@pytest.mark.slow
@pytest.mark.timeout(3600)
class TestAtLaptopScale:
    """120 thousand parameters; every run takes some 20 s on a core of its own."""

    def test_every_run_learned(self, losses):
        """A byte at random costs ln 257 = 5.5 nats, one drawn by its frequency 3.3."""
        assert all(loss < 2.6 for by_arm in losses.values() for runs in by_arm.values() for loss in runs)

    def test_adamw_suffers_from_one_update_of_delay(self, losses):
        assert Interval.of(Effect.of(losses["adamw"]).delay_gap).low > 0

    def test_muon_suffers_much_less(self, losses):
        adamw, muon = (Effect.of(losses[rule]).delay_gap for rule in ("adamw", "muon"))
        assert Interval.of(difference(adamw, muon)).low > 0
        assert Interval.of(difference(adamw, [2 * gap for gap in muon])).low > 0, "not even half as much"

    @pytest.mark.parametrize("rule", ["adamw", "muon"])
    def test_error_feedback_closes_part_of_the_gap(self, losses, rule):
        assert Interval.of(Effect.of(losses[rule]).improvement).low > 0
