"""Uneven shares on unlike GPUs, against enumeration."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.planning.cost.device import from_data_sheet
from pipeline.planning.cost.layout import Layout, cut
from pipeline.planning.cost.memory import training_stages
from pipeline.planning.cost.split import PipelineCosts, pipeline_costs, split_layers, split_samples
from pipeline.planning.cost.times import TRAINING_PASSES, micro_batch
from pipeline.planning.cost.work import Training
from rlinf.data.packing import balance
from rlinf.errors import PlanError
from tests.pipeline.planning.cost.shapes import A100, LLAMA_3_8B, LLAMA_3_70B, MIXTRAL

H200 = from_data_sheet("h200-sxm", inter_bytes_per_s=400e9)


def slowest_stage(costs: PipelineCosts, split: tuple[int, ...]) -> float:
    """Seconds of the slowest stage; infinite where one's memory does not suffice."""
    worst, start = 0.0, 0
    for s, count in enumerate(split):
        part = slice(start, start + count)
        if costs.layer_bytes[s, part].sum() > costs.room_bytes[s] + 1e-9:
            return np.inf
        worst = max(worst, costs.layer_s[s, part].sum())
        start += count
    return worst


def compositions(layers: int, stages: int):
    for bars in itertools.combinations(range(1, layers), stages - 1):
        yield tuple(int(n) for n in np.diff((0, *bars, layers)))


@st.composite
def pipelines(draw):
    stages = draw(st.integers(1, 4))
    layers = draw(st.integers(stages, 9))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    speed = rng.choice([1.0, 1.0, 2.5, 3.0], (stages, 1))
    size = rng.integers(1, 4, layers) * rng.integers(1, 3, (stages, 1)).astype(float)
    return PipelineCosts(
        layer_s=rng.integers(1, 5, layers) / speed,
        layer_bytes=size,
        room_bytes=rng.integers(4, 25, stages).astype(float),
    )


@given(pipelines())
def test_layers_are_split_as_well_as_any_split_can_be(costs):
    stages, layers = costs.layer_s.shape
    best = min(slowest_stage(costs, split) for split in compositions(layers, stages))
    if np.isinf(best):
        with pytest.raises(PlanError, match=f"of {layers} layers fit"):
            split_layers(costs)
        return
    found = split_layers(costs)
    assert sum(found) == layers
    assert min(found) >= 1
    assert slowest_stage(costs, found) == pytest.approx(best)


def test_a_kind_twice_as_quick_gets_twice_the_layers():
    costs = PipelineCosts(
        layer_s=np.array([[1.0] * 24, [0.5] * 24]),
        layer_bytes=np.ones((2, 24)),
        room_bytes=np.full(2, 100.0),
    )
    assert split_layers(costs) == (8, 16)


def test_more_stages_than_layers_are_refused():
    with pytest.raises(PlanError, match="2 layers cannot fill 3"):
        PipelineCosts(np.ones((3, 2)), np.ones((3, 2)), np.ones(3))


def test_the_error_says_how_many_layers_fit_and_what_is_lacking():
    gib = 2.0**30
    costs = PipelineCosts(np.ones((2, 8)), np.full((2, 8), gib), np.array([3.5, 2.0]) * gib)
    with pytest.raises(PlanError, match=r"at most 3, 2 of 8 layers.*lacks 3\.0 GiB"):
        split_layers(costs)


@pytest.mark.parametrize("how", ["selective", "full"])
@pytest.mark.parametrize("shape", [LLAMA_3_8B, MIXTRAL])
def test_stages_of_like_gpus_cost_what_the_formulas_of_an_even_cut_say(shape, how):
    layout, work = Layout(tp=2, pp=4, dp=2, recompute=how), Training(64, 2048)
    costs = pipeline_costs(shape, layout, work, [A100] * 4)
    stages = cut(shape, 4, merge=False)
    even = micro_batch(shape, stages, layout, 2048, A100, TRAINING_PASSES[how]).total
    assert costs.layer_s[0].reshape(4, -1).sum(1) == pytest.approx(even, rel=0.02)
    held = training_stages(shape, stages, layout, work).total
    for s in range(4):
        mine = costs.layer_bytes[s].reshape(4, -1).sum(1)[s]
        assert A100.usable_bytes - costs.room_bytes[s] + mine == pytest.approx(held[s])


def test_unlike_gpus_share_a_pipeline_by_speed_and_memory():
    layout, work = Layout(tp=8, pp=2), Training(64, 2048)
    split = split_layers(pipeline_costs(LLAMA_3_70B, layout, work, [A100, A100]))
    # The last stage has the head as well.
    assert 40 <= split[0] <= 42
    quick = split_layers(pipeline_costs(LLAMA_3_70B, layout, work, [A100, H200]))
    assert quick[1] > 1.8 * quick[0]
    with pytest.raises(PlanError, match="of 80 layers fit"):
        split_layers(pipeline_costs(LLAMA_3_70B, Layout(pp=2), work, [A100, H200]))
    with pytest.raises(PlanError, match="1 kinds of GPUs for 2 pipeline stages"):
        pipeline_costs(LLAMA_3_70B, layout, work, [A100])


@given(st.integers(0, 12), st.lists(st.integers(0, 5), min_size=1, max_size=4))
def test_samples_are_shared_as_well_as_any_sharing_can_be(samples, speeds):
    if not any(speeds):
        with pytest.raises(PlanError, match="one above 0"):
            split_samples(samples, speeds)
        return
    shares = split_samples(samples, speeds)
    assert sum(shares) == samples

    def end(counts):
        if any(n and not v for n, v in zip(counts, speeds, strict=True)):
            return np.inf
        return max(n / v if v else 0.0 for n, v in zip(counts, speeds, strict=True))

    every = itertools.product(range(samples + 1), repeat=len(speeds))
    best = min(end(counts) for counts in every if sum(counts) == samples)
    assert end(shares) == pytest.approx(best)


@given(st.integers(0, 200), st.lists(st.floats(0.1, 10), min_size=1, max_size=12))
def test_the_trainer_arrives_at_the_same_shares(samples, speeds):
    parts = balance([1] * samples, speeds)
    greedy = [len(part) for part in parts]
    ours = split_samples(samples, speeds)
    ends = [max(n / v for n, v in zip(x, speeds, strict=True)) for x in (greedy, ours)]
    assert sum(ours) == sum(greedy)
    assert ends[0] == pytest.approx(ends[1])
