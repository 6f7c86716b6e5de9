"""Seconds of stages: monotone, additive, and equal to what stepping through the work gives."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.hardware import (
    LinkModel,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
)
from pipeline.planning.cost.layout import CandidateLayout, split_pipeline
from pipeline.planning.cost.memory import running_requests
from pipeline.planning.cost.times import decode_step, stage_seconds, switch_seconds, sync_seconds
from pipeline.planning.cost.workload import GenerationWorkload, InferenceWorkload, TrainingWorkload
from tests.pipeline.planning.cost.shapes import (
    A100,
    H100,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MIXTRAL,
    gpt,
)

layout_choices = st.builds(
    CandidateLayout,
    tp=st.sampled_from([1, 2, 4, 8]),
    pp=st.sampled_from([1, 2, 4]),
    dp=st.sampled_from([4, 8, 32]),
    ep=st.sampled_from([1, 2, 4]),
    micro_batch=st.sampled_from([1, 2, 4]),
)
works = st.one_of(
    st.builds(
        TrainingWorkload,
        st.integers(200, 1000),
        st.integers(10, 4000),
        zero=st.sampled_from([0, 1, 3]),
    ),
    st.builds(InferenceWorkload, st.integers(200, 1000), st.integers(10, 4000)),
)
shapes = st.sampled_from([LLAMA_3_70B, MIXTRAL, LLAMA_3_8B])


@given(shapes, layout_choices, works)
def test_more_work_and_slower_gpus_never_take_less(shape, layout, work):
    here = stage_seconds(shape, layout, work, A100).total
    near = 1 - 1e-12
    assert here > 0
    assert (
        stage_seconds(shape, layout, replace(work, tokens=work.tokens + 1), A100).total
        >= here * near
    )
    more = replace(work, samples=work.samples + layout.dp * layout.micro_batch)
    assert stage_seconds(shape, layout, more, A100).total >= here * near
    for slower in (
        replace(A100, slowdown=1.5),
        replace(A100, flops=A100.flops / 2),
        replace(A100, bandwidth_bytes_per_s=A100.bandwidth_bytes_per_s / 2),
        replace(A100, intra=LinkModel(1e-3, 1e9)),
        replace(A100, inter=LinkModel(1e-2, 1e9)),
    ):
        assert stage_seconds(shape, layout, work, slower).total >= here * near


@given(shapes, layout_choices, works)
def test_no_layout_beats_the_peak(shape, layout, work):
    passes = 3 if isinstance(work, TrainingWorkload) else 1
    flops = passes * work.samples * work.tokens * shape.forward_flops(work.tokens / 2)
    peak = layout.gpus * A100.flops * A100.flops_efficiency
    assert stage_seconds(shape, layout, work, A100).total >= flops / peak * (1 - 1e-9)


@given(st.integers(1, 40), st.sampled_from([1, 2, 4, 8]))
def test_a_pipeline_of_like_stages_has_the_bubble_of_1f1b(micro_batches, pp):
    """``(p - 1) / m`` of the ideal time (Narayanan et al. 2021, section 2.2.1)."""
    shape = replace(gpt(8, 1024, 16, vocab=2), qkv_bias=False)
    free = replace(A100, intra=LinkModel(0.0, 1e30), inter=LinkModel(0.0, 1e30))
    times = stage_seconds(
        shape, CandidateLayout(pp=pp), InferenceWorkload(micro_batches, 2048), free
    )
    busy = times.total - times.bubble_s
    assert times.bubble_s / busy == pytest.approx((pp - 1) / micro_batches, rel=1e-3)


def test_a_training_step_by_hand():
    """Two pipeline stages on two nodes of one GPU, two replicas of each, three steps."""
    shape, tokens, micro_batches = gpt(4, 1024, 16), 512, 6
    device = replace(A100, gpus_per_node=1)
    work = TrainingWorkload(2 * micro_batches, tokens, steps=3, zero=0)
    got = stage_seconds(shape, CandidateLayout(pp=2, dp=2, recompute="full"), work, device)
    flops = device.flops * device.flops_efficiency
    bandwidth = device.bandwidth_bytes_per_s * device.bandwidth_efficiency
    layers = shape.layer_flops.sum() / 2 + 2 * shape.score_flops(tokens / 2)
    first = tokens * 4 * layers / flops
    last = tokens * (4 * layers + 3 * shape.head_flops) / flops
    between = 2 * 4 * tokens * shape.activation_bytes().sum() / 2 / bandwidth
    overhead = 4 * 2 * device.layer_overhead_s
    assert got.compute_s == pytest.approx(3 * micro_batches * last)
    assert got.overhead_s == pytest.approx(3 * micro_batches * overhead)
    send = device.inter.send_seconds(2 * tokens * shape.hidden)
    # A forward and a backward pass of the first stage, and a send each way.
    assert got.bubble_s == pytest.approx(3 * (first + between + overhead + 2 * send))
    largest = split_pipeline(shape, 2).shared.max()
    states = (2 + 2 + 2 * 12) * largest / bandwidth
    assert got.bandwidth_s == pytest.approx(3 * (micro_batches * between + states))
    assert got.communication_s == pytest.approx(
        3 * all_reduce_seconds(device.inter, 2, 2 * largest)
    )


def test_zero_3_gathers_weights_twice_and_scatters_gradients_for_each_micro_batch():
    shape, work = LLAMA_3_8B, TrainingWorkload(32, 512, zero=3)
    got = stage_seconds(shape, CandidateLayout(dp=8, micro_batch=2), work, A100)
    each = 3 * all_gather_seconds(A100.intra, 8, 2 * shape.parameters)
    assert got.communication_s == pytest.approx(2 * each)


def test_sparse_layers_send_tokens_to_their_experts_and_back():
    work, layout = InferenceWorkload(8, 512), CandidateLayout(dp=8, ep=8)
    got = stage_seconds(MIXTRAL, layout, work, A100)
    sent = 2 * 512 * MIXTRAL.hidden * 2
    assert got.communication_s == pytest.approx(2 * 32 * all_to_all_seconds(A100.intra, 8, sent))


def test_the_prompt_of_a_group_is_read_once():
    alone, grouped = (
        stage_seconds(
            LLAMA_3_8B, CandidateLayout(), GenerationWorkload(np.array([1.0]), 64, 4096, size), H100
        ).compute_s
        for size in (1, 8)
    )
    assert grouped == pytest.approx(alone / 8, rel=0.05)


@given(shapes, st.sampled_from([1, 2]), works)
def test_many_layouts_at_once_are_as_each_alone(shape, pp, work):
    columns = np.array([[1, 4, 1, 1], [2, 8, 2, 2], [8, 16, 4, 4]]).T
    many = stage_seconds(shape, CandidateLayout(columns[0], pp, *columns[1:]), work, A100)
    for i in range(3):
        tp, dp, ep, micro = (int(n) for n in columns[:, i])
        one = stage_seconds(shape, CandidateLayout(tp, pp, dp, ep, micro), work, A100)
        assert many.total[i] == pytest.approx(one.total)


def stepped_engine(lengths: np.ndarray, room: int) -> int:
    """Decoding steps until the last response is done, a new one starting where one ends."""
    running: list[float] = []
    end = 0.0
    for length in lengths:
        begin = heapq.heappop(running) if len(running) == room else 0.0
        heapq.heappush(running, begin + length)
        end = max(end, begin + length)
    return int(end)


@pytest.mark.parametrize("room", [4, 32, 500])
@pytest.mark.parametrize("spread", [0.2, 1.0])
def test_continuous_batching_takes_as_many_steps_as_stepping_through_it(room, spread):
    """On a device where nothing but a step's overhead takes time, one second each."""
    rng = np.random.default_rng(0)
    lengths = np.maximum(1, rng.lognormal(5, spread, 4000).round())
    device = replace(
        A100,
        flops=1e40,
        bandwidth_bytes_per_s=1e40,
        memory_bytes=1e15,
        layer_overhead_s=1 / LLAMA_3_8B.layers,
    )
    samples = 400
    work = GenerationWorkload(lengths, samples, 1, max_running=room)
    got = stage_seconds(LLAMA_3_8B, CandidateLayout(), work, device).total
    true = np.mean([stepped_engine(rng.choice(lengths, samples), room) for _ in range(200)])
    assert got == pytest.approx(true, rel=0.05)


@given(st.integers(1, 512), st.integers(1, 8000))
@settings(deadline=None)
def test_decoding_reads_all_weights_and_all_keys_and_values(running, context):
    step = decode_step(LLAMA_2_7B, CandidateLayout(), running, context, A100)
    weights = 2 * (LLAMA_2_7B.parameters - LLAMA_2_7B.embedding_parameters)
    held = running * context * 2 * 32 * 4096 * 2
    least = (weights + held) / A100.bandwidth_bytes_per_s
    assert step.total >= least
    if running == 1:
        assert step.bandwidth_s == pytest.approx(least / A100.bandwidth_efficiency, rel=1e-3)


def test_one_token_meets_its_experts_and_many_tokens_all():
    bandwidth = A100.bandwidth_bytes_per_s * A100.bandwidth_efficiency
    one, many = (decode_step(MIXTRAL, CandidateLayout(), n, 0, A100).bandwidth_s for n in (1, 64))
    visited = 12_879_925_248 - MIXTRAL.embedding_parameters
    every = MIXTRAL.parameters - MIXTRAL.embedding_parameters
    assert one == pytest.approx(2 * visited / bandwidth, rel=1e-3)
    # Eight replicas share the experts: their tokens meet them together.
    together = decode_step(MIXTRAL, CandidateLayout(dp=8, ep=8), 8, 0, A100).bandwidth_s
    shared = every - MIXTRAL.expert_parameters.sum()
    assert together == pytest.approx(
        2 * (shared + MIXTRAL.expert_parameters.sum() / 8) / bandwidth, rel=1e-3
    )
    assert many == pytest.approx(2 * every / bandwidth, rel=1e-3)


def test_where_no_request_fits_generation_never_ends():
    work = GenerationWorkload(np.array([100.0]), 8, 10)
    small = replace(A100, memory_bytes=10 * 2**30)
    assert running_requests(LLAMA_2_7B, CandidateLayout(), work, small) == 0
    times = stage_seconds(LLAMA_2_7B, CandidateLayout(), work, small)
    assert np.isinf(times.total)
    assert not np.isnan(times.total)


@given(st.integers(1, 300), st.integers(1, 3))
def test_more_replicas_never_take_longer_to_generate(samples, tp_power):
    work = GenerationWorkload(np.array([10.0, 200.0, 900.0]), samples, 100)
    dps = np.arange(1, samples + 1)
    layout = CandidateLayout(np.full_like(dps, 2**tp_power), 1, dps)
    times = stage_seconds(LLAMA_3_8B, layout, work, A100).total
    assert np.all(np.diff(times) <= times[:-1] * 0.02)


def test_switching_moves_weights_and_states_both_ways():
    work = TrainingWorkload(64, 100, zero=1)
    layout = CandidateLayout(tp=8, dp=2)
    largest = split_pipeline(LLAMA_3_8B, 1).shared[0] / 8
    expected = 2 * (2 * largest + 12 * largest / 2) / A100.host.bytes_per_s
    assert switch_seconds(LLAMA_3_8B, layout, work, A100) == pytest.approx(expected, rel=1e-3)


def test_weights_take_the_slowest_link_of_the_way():
    size = 2 * LLAMA_3_8B.parameters
    direct = sync_seconds(LLAMA_3_8B, A100, H100)
    assert direct == pytest.approx(size / A100.inter.bytes_per_s, rel=0.1)
    relay = LinkModel(1e-3, 1e9)
    assert sync_seconds(LLAMA_3_8B, A100, H100, (relay,)) == pytest.approx(size / 1e9, rel=0.05)
