"""Which layouts are tried, and how a model is cut into pipeline stages."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.layout import MAX_EXHAUSTIVE_REPLICAS, candidate_layouts, split_pipeline
from pipeline.planning.cost.workload import GenerationWorkload, InferenceWorkload, TrainingWorkload
from tests.pipeline.planning.cost.shapes import LLAMA_3_70B, MIXTRAL, SMALL, gpt

SHAPES = [SMALL, MIXTRAL, LLAMA_3_70B, gpt(6, 512, 8)]


@given(
    st.sampled_from(SHAPES),
    st.integers(1, 300),
    st.integers(1, 200),
    st.sampled_from([1, 2, 4, 8]),
)
@settings(deadline=None)
def test_every_layout_is_possible(shape, gpus, samples, per_node):
    for work in (TrainingWorkload(samples, 100), InferenceWorkload(samples, 100)):
        for layout in candidate_layouts(shape, work, gpus, per_node):
            assert np.all(layout.gpus <= gpus)
            assert np.all(shape.heads % layout.tp == 0)
            assert np.all(per_node % layout.tp == 0)
            assert np.all((shape.kv_heads % layout.tp == 0) | (layout.tp % shape.kv_heads == 0))
            assert shape.layers % layout.pp == 0
            assert np.all(layout.dp % layout.ep == 0)
            assert np.all(max(shape.experts, 1) % layout.ep == 0)
            assert np.all(layout.dp <= samples)
            assert np.all((layout.micro_batch - 1) * layout.dp < samples)


@given(st.integers(1, 3000))
def test_no_useful_number_of_replicas_is_left_out(samples):
    """Beyond the first ones all that leave the slowest replica less work than any fewer."""
    work = GenerationWorkload(np.array([10.0]), samples, 10)
    found = {int(n) for layout in candidate_layouts(SMALL, work, 4096, 1) for n in layout.dp}
    least = samples + 1
    for replicas in range(1, samples + 1):
        share = -(-samples // replicas)
        assert (replicas in found) or (replicas > MAX_EXHAUSTIVE_REPLICAS and share == least)
        least = min(least, share)


@pytest.mark.parametrize("shape", SHAPES)
def test_stages_together_hold_the_whole_model(shape):
    for pp in (1, 2, 4) if shape.layers % 4 == 0 else (1, 2, 3):
        stages = split_pipeline(shape, pp)
        assert stages.multiplicity.sum() == pp
        whole = (stages.multiplicity * (stages.shared + stages.routed)).sum()
        copy = shape.embedding_parameters * (shape.tied and pp > 1)
        assert whole == shape.parameters + copy
        assert (stages.multiplicity * stages.flops).sum() == pytest.approx(shape.layer_flops.sum())
        assert (stages.multiplicity * stages.head).sum() == 1
        assert stages.first_index.min() == 0


def test_like_stages_are_kept_once():
    assert len(split_pipeline(LLAMA_3_70B, 40).multiplicity) == 3


def test_one_of_many_layouts_reads_plainly():
    work = TrainingWorkload(64, 100)
    some = next(iter(candidate_layouts(MIXTRAL, work, 64, 8)))
    one = some.select(5)
    assert isinstance(one.tp, int)
    assert str(one).startswith(f"tp {one.tp}, pp 1, dp {one.dp}")
