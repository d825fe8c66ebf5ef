"""The partition is exact, complete and the same every time."""

import dataclasses
import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.config import ModelConfig
from slipstream.errors import ConfigError
from slipstream.models.llama import build_stage
from slipstream.models.partition import StageSpec, layer_costs, partition, stages, whole
from slipstream.models.shapes import parameter_names

CFG = ModelConfig(num_layers=7, dim=16, num_heads=4, num_kv_heads=2, ffn_dim=24, vocab_size=11)


def every_split(num_layers, num_stages):
    for inner in itertools.combinations(range(1, num_layers), num_stages - 1):
        yield [range(a, b) for a, b in itertools.pairwise((0, *inner, num_layers))]


@settings(max_examples=150, deadline=None)
@given(costs=st.lists(st.integers(0, 20), min_size=1, max_size=9), data=st.data())
def test_equals_brute_force(costs, data):
    num_stages = data.draw(st.integers(1, len(costs)))

    def rank(split):
        totals = [sum(costs[layer] for layer in stage) for stage in split]
        return max(totals), sum(total**2 for total in totals)

    found = partition(costs, num_stages)
    assert rank(found) == min(map(rank, every_split(len(costs), num_stages)))
    assert all(len(stage) > 0 for stage in found)
    assert [layer for stage in found for layer in stage] == list(range(len(costs)))


def test_ties_go_to_shorter_early_stages():
    assert [len(stage) for stage in partition([1.0] * 5, 4)] == [1, 1, 1, 2]
    assert [len(stage) for stage in partition([1.0] * 8, 3)] == [2, 3, 3]


def test_stages_that_the_dearest_leaves_free_are_balanced_too():
    assert [len(stage) for stage in partition([1, 1, 1, 1, 1, 4], 3)] == [2, 3, 1]


def test_the_dearest_stage_comes_before_balance():
    """The split [2, 3], [5], [1] has stage costs 5, 5, 1; the more even 2, 3, 6 would be slower."""
    assert [len(stage) for stage in partition([2, 3, 5, 1], 3)] == [2, 1, 1]


def test_a_dear_head_gives_the_last_stage_fewer_blocks():
    dear_head = dataclasses.replace(CFG, vocab_size=1000)
    assert len(stages(dear_head, 2)[1].blocks) < len(stages(CFG, 2)[1].blocks)


def test_long_sequences_weigh_blocks_up_against_the_head():
    dear_head = dataclasses.replace(CFG, vocab_size=1000)
    share = [costs[-1] / costs[1] for costs in (layer_costs(dear_head), layer_costs(dear_head, sequence_length=4096))]
    assert share[1] < share[0]


def test_experts_cost_what_a_token_goes_through():
    dense = layer_costs(CFG)
    two_of_many = dataclasses.replace(CFG, num_experts=50, experts_per_token=2, expert_ffn_dim=12, num_dense_layers=3)
    costs = layer_costs(two_of_many)
    assert costs[:3] == dense[:3]
    router = 2 * CFG.dim * 50
    assert [cost - router for cost in costs[3:]] == dense[3:]  # 2 x 12 = 24 = ffn_dim


@pytest.mark.parametrize("change", [{}, {"tie_embeddings": True}, {"num_experts": 3, "num_dense_layers": 2}])
@pytest.mark.parametrize("num_stages", range(1, 8))
def test_every_parameter_lives_on_exactly_one_stage(num_stages, change):
    cfg = dataclasses.replace(CFG, **change)
    found = stages(cfg, num_stages)
    assert len(found) == num_stages
    names = []
    for spec in found:
        part = build_stage(cfg, spec.blocks, embed=spec.embed, head=spec.head, device="meta")
        names += [name for name, _ in part.named_parameters()]
    assert names == parameter_names(cfg)


def test_one_stage_is_the_whole():
    assert stages(CFG, 1) == [whole(CFG)] == [StageSpec(blocks=range(7), embed=True, head=True)]


def test_more_stages_than_layers_names_both_numbers_and_the_remedy():
    with pytest.raises(ConfigError, match=r"8 pipeline stages .* 7 layers .* at most 7 stages, or at least 8 layers"):
        stages(CFG, 8)


@pytest.mark.parametrize(("costs", "num_stages"), [([1.0, 2.0], 0), ([1.0, -1.0], 1), ([1.0, float("nan")], 1)])
def test_nonsense_is_refused(costs, num_stages):
    with pytest.raises(ConfigError, match="Allowed"):
        partition(costs, num_stages)


def test_a_vocabulary_not_yet_known_cannot_be_cut():
    with pytest.raises(ConfigError, match="vocab_size is 0"):
        stages(dataclasses.replace(CFG, vocab_size=0), 2)
