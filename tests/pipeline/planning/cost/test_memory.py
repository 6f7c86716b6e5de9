"""Bytes per GPU, and what is said when they do not suffice."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.layout import CandidateLayout
from pipeline.planning.cost.memory import kv_bytes_per_token, running_requests, stage_memory
from pipeline.planning.cost.workload import (
    GenerationWorkload,
    InferenceWorkload,
    StateBytes,
    TrainingWorkload,
)
from tests.pipeline.planning.cost.shapes import (
    LLAMA_3_8B,
    LLAMA_3_70B,
    MIXTRAL,
    SMALL,
    gpt,
    tiny_device,
)

GIB = 2**30


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_are_those_of_the_zero_paper(zero, gigabytes):
    """Rajbhandari et al. 2020, figure 1 and table 1: 7.5 B parameters over 64 replicas."""
    shape = gpt(36, 4096, 32)
    used = stage_memory(shape, CandidateLayout(dp=64), TrainingWorkload(64, 1, zero=zero))
    states = used.weights + used.gradients + used.optimizer
    if zero == 3:
        # The paper leaves out the two layers that are whole at a time.
        states = states - 2 * 2 * shape.shared_parameters.max()
    assert states / 1e9 * (7.5e9 / shape.parameters) == pytest.approx(gigabytes, rel=0.01)


def test_experts_are_sharded_over_expert_parallel_ranks_and_states_over_replicas():
    shared = MIXTRAL.parameters - MIXTRAL.expert_parameters.sum()
    routed = MIXTRAL.expert_parameters.sum()
    used = stage_memory(
        MIXTRAL, CandidateLayout(tp=2, dp=8, ep=4), TrainingWorkload(64, 10, zero=1)
    )
    assert used.weights == pytest.approx(2 * (shared / 2 + routed / 8))
    assert used.gradients == used.weights
    assert used.optimizer == pytest.approx(12 * (shared / 16 + routed / 16))


def test_memory_must_hold_the_longest_sequence():
    usual, longest = TrainingWorkload(64, 1000), TrainingWorkload(64, 1000, 3000)
    for work in (usual, InferenceWorkload(64, 1000)):
        longer = replace(work, longest=3000)
        here = stage_memory(SMALL, CandidateLayout(), work).activations
        assert stage_memory(SMALL, CandidateLayout(), longer).activations == pytest.approx(3 * here)
    assert (
        stage_memory(SMALL, CandidateLayout(), longest).weights
        == stage_memory(SMALL, CandidateLayout(), usual).weights
    )


def test_keys_and_values_are_those_of_the_paper_on_paged_attention():
    """Kwon et al. 2023, section 1: 800 KB for a token of OPT-13B."""
    assert kv_bytes_per_token(gpt(40, 5120, 40), 1) == 800 * 1024
    # Fewer key-value heads than processes: each has one.
    assert kv_bytes_per_token(LLAMA_3_70B, 16) == kv_bytes_per_token(LLAMA_3_70B, 8)


def test_the_first_pipeline_stage_holds_activations_of_all_micro_batches_in_flight():
    shape, work = gpt(8, 1024, 16), TrainingWorkload(64, 512)
    flat = stage_memory(shape, CandidateLayout(pp=1), work)
    deep = stage_memory(shape, CandidateLayout(pp=4), work)
    layers = shape.activation_bytes().sum() * 512
    logits = 512 * (shape.head_activation_bytes + 4 * shape.vocab)
    assert flat.activations == pytest.approx(layers + logits)
    # Four stages with a quarter of the layers each, and four micro-batches: as much; or the last
    # stage, which has one micro-batch and the logits.
    stages = [layers / 4 * (4 - s) + logits * (s == 3) for s in range(4)]
    assert any(deep.activations == pytest.approx(stage) for stage in stages)


layout_choices = st.builds(
    CandidateLayout,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([4, 8, 32]),
    ep=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 4]),
    recompute=st.sampled_from(["selective", "full"]),
)
works = st.one_of(
    st.builds(
        TrainingWorkload,
        st.integers(200, 1000),
        st.integers(10, 4000),
        zero=st.integers(0, 3),
        state=st.builds(StateBytes, st.sampled_from([2, 4])),
    ),
    st.builds(InferenceWorkload, st.integers(200, 1000), st.integers(10, 4000)),
)


@given(st.sampled_from([MIXTRAL, LLAMA_3_70B]), layout_choices, works)
def test_memory_never_falls_with_fewer_gpus_or_more_work(shape, layout, work):
    here = stage_memory(shape, layout, work).total
    near = 1 - 1e-12
    if layout.tp > 1:
        assert stage_memory(shape, replace(layout, tp=layout.tp // 2), work).total >= here * near
    fewer = replace(layout, dp=layout.dp // 2, ep=min(layout.ep, layout.dp // 2))
    assert stage_memory(shape, fewer, work).total >= here * near
    larger = replace(layout, micro_batch=2 * layout.micro_batch)
    assert stage_memory(shape, larger, work).total >= here * near
    assert stage_memory(shape, layout, replace(work, longest=2 * work.tokens)).total >= here * near


@given(layout_choices, st.integers(10, 4000))
def test_sharing_more_states_and_recomputing_more_never_take_memory(layout, tokens):
    totals = [
        stage_memory(MIXTRAL, layout, TrainingWorkload(512, tokens, zero=zero)).total
        for zero in (0, 1, 2)
    ]
    assert totals == sorted(totals, reverse=True)
    work = TrainingWorkload(512, tokens)
    full, selective = (
        stage_memory(MIXTRAL, replace(layout, recompute=how), work).activations
        for how in ("full", "selective")
    )
    # Where few layers are kept at once, the one that is recomputed counts.
    layer = MIXTRAL.activation_bytes().max() + 2 * MIXTRAL.hidden * MIXTRAL.layers
    assert full <= selective + layout.micro_batch * tokens * layer / layout.tp


@given(st.integers(1, 20), st.integers(1, 4000), st.floats(20, 80))
@settings(deadline=None)
def test_running_requests_fill_the_memory_that_is_left(tp_power, longest, gib):
    tp = 2 ** (tp_power % 4)
    device = tiny_device(gib)
    work = GenerationWorkload(np.array([1.0, longest]), 10_000, 100, max_running=100_000)
    layout = CandidateLayout(tp=tp)
    count = running_requests(LLAMA_3_8B, layout, work, device)
    least = stage_memory(LLAMA_3_8B, layout, work)
    if not count:
        assert least.total > device.usable_bytes
        return
    assert least.total <= device.usable_bytes
    room = device.usable_bytes - least.weights - least.activations
    context = 100 + (1 + longest**2) / (2 * (1 + longest))
    each = kv_bytes_per_token(LLAMA_3_8B, tp) * context
    assert count * each <= room or count == 1
    assert (count + 1) * each > room
