"""Times and memory from data sheets: equal to values by hand, to papers, and to stepping."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.data_sheet import (
    CandidateLayout,
    GenerationWorkload,
    InferenceWorkload,
    LinkModel,
    TrainingWorkload,
    all_gather_seconds,
    all_reduce_seconds,
    decode_step,
    device_from_data_sheet,
    device_from_node_group,
    kv_bytes_per_token,
    running_requests,
    stage_memory,
    stage_seconds,
    switch_seconds,
    sync_seconds,
)
from rlinf.errors import PlanError
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup
from tests.pipeline.planning.cost.shapes import (
    A100,
    H100,
    LLAMA_2_7B,
    LLAMA_3_8B,
    LLAMA_3_70B,
    MIXTRAL,
    SMALL,
    gpt,
)

links = st.builds(LinkModel, st.floats(0, 1e-3), st.floats(1e6, 1e12))
sizes = st.floats(1, 1e12)


@pytest.mark.parametrize("model", GPUS)
def test_every_known_gpu_has_a_device(model):
    device = device_from_data_sheet(model)
    assert device.usable_bytes > 0
    assert device.flops > device.bandwidth_bytes_per_s


def test_a_v100_computes_in_float16():
    assert device_from_data_sheet("v100-32gb").flops == 125e12


def test_an_inventory_overrides_the_data_sheet():
    group = NodeGroup(
        count=2,
        gpu_type="a100",
        gpus_per_node=4,
        cpus_per_node=64,
        mem_mb_per_node=1,
        gpu_model="a100-80gb-sxm",
        gpu_memory_gib=79,
        inter_node_bandwidth_bytes_per_s=100e9,
        slowdown=2.0,
    )
    device = device_from_node_group("gpu", group)
    assert (device.name, device.gpus_per_node, device.memory_bytes) == ("gpu", 4, 79 * 2**30)
    assert device.inter.bytes_per_s == pytest.approx(80e9)
    slow, quick = (sum(d.roofline(1e12, 1e6)) for d in (device, A100))
    assert slow == pytest.approx(2 * quick)


def test_unknown_gpus_are_named():
    with pytest.raises(PlanError, match="did you mean 'h100-sxm'"):
        device_from_data_sheet("h100-smx")
    bare = NodeGroup(count=1, gpu_type="x9", gpus_per_node=4, cpus_per_node=1, mem_mb_per_node=1)
    with pytest.raises(PlanError, match=r"'x9'.*gpu_model in the site file"):
        device_from_node_group("odd", bare)
    none = NodeGroup(count=1, cpus_per_node=1, mem_mb_per_node=1)
    with pytest.raises(PlanError, match="have no GPUs"):
        device_from_node_group("cpu", none)


@given(st.floats(0, 1e18), st.floats(0, 1e12))
def test_the_roofline_is_the_larger_side_alone(flops, size):
    compute, bandwidth = A100.roofline(flops, size)
    assert min(compute, bandwidth) == 0
    assert max(compute, bandwidth) == pytest.approx(
        max(flops / (0.7 * 312e12), size / (0.8 * 2039e9))
    )


def test_groups_inside_a_node_use_its_links_and_share_the_way_out():
    inside, outside = A100.group_link(8, 1), A100.group_link(16, 1)
    assert inside.bytes_per_s == A100.intra.bytes_per_s
    assert outside.bytes_per_s == min(A100.inter.bytes_per_s, A100.intra.bytes_per_s)
    assert A100.group_link(4, 8).bytes_per_s == pytest.approx(A100.inter.bytes_per_s / 8)
    assert np.shape(A100.group_link(np.array([2, 16]), 1).bytes_per_s) == (2,)


@given(links, st.integers(1, 64), sizes)
def test_collectives_cost_their_steps_and_at_least_their_bytes(link, count, size):
    ring = (count - 1) * link.send_seconds(size / count)
    assert all_gather_seconds(link, count, size) == pytest.approx(ring)
    time = all_reduce_seconds(link, count, size)
    assert time <= 2 * ring * (1 + 1e-9)
    assert time >= 2 * (count - 1) / count * size / link.bytes_per_s * (1 - 1e-9)


def test_impossible_links_are_refused():
    with pytest.raises(PlanError, match="is invalid"):
        LinkModel(0.0, 0.0)


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


@given(st.integers(1, 4096), st.sampled_from([1, 2, 4, 8]))
@settings(deadline=None)
def test_sharing_more_states_and_recomputing_more_never_take_memory(tokens, tp):
    layout = CandidateLayout(tp, 8)
    total = [
        stage_memory(LLAMA_3_8B, layout, TrainingWorkload(64, tokens, zero=zero)).total
        for zero in (0, 1, 2)
    ]
    assert total == sorted(total, reverse=True)
    full = replace(layout, recompute="full")
    work = TrainingWorkload(64, tokens)
    assert stage_memory(LLAMA_3_8B, full, work).total <= total[1]


def test_a_training_step_by_hand():
    """Two replicas on two nodes of one GPU each, three steps."""
    shape, tokens, micro_batches = gpt(4, 1024, 16), 512, 6
    device = replace(A100, gpus_per_node=1)
    work = TrainingWorkload(2 * micro_batches, tokens, steps=3, zero=0)
    got = stage_seconds(shape, CandidateLayout(dp=2, recompute="full"), work, device)
    flops = device.flops * device.flops_efficiency
    bandwidth = device.bandwidth_bytes_per_s * device.bandwidth_efficiency
    layers = shape.layer_flops.sum() + 4 * shape.score_flops(tokens / 2)
    compute = tokens * (4 * layers + 3 * shape.head_flops) / flops
    activations = 2 * 4 * tokens * shape.activation_bytes().sum() / bandwidth
    assert got.compute_s == pytest.approx(3 * micro_batches * compute)
    assert got.overhead_s == pytest.approx(3 * micro_batches * 4 * 4 * device.layer_overhead_s)
    states = (2 + 2 + 2 * 12) * shape.parameters / bandwidth
    assert got.bandwidth_s == pytest.approx(3 * (micro_batches * activations + states))
    synced = all_reduce_seconds(device.inter, 2, 2 * shape.parameters)
    assert got.communication_s == pytest.approx(3 * synced)


def test_zero_3_gathers_weights_twice_and_scatters_gradients_for_each_micro_batch():
    shape, work = LLAMA_3_8B, TrainingWorkload(32, 512, zero=3)
    got = stage_seconds(shape, CandidateLayout(dp=8, micro_batch=2), work, A100)
    each = 3 * all_gather_seconds(A100.intra, 8, 2 * shape.parameters)
    assert got.communication_s == pytest.approx(2 * each)


def test_the_prompt_of_a_group_is_read_once():
    alone, grouped = (
        stage_seconds(
            LLAMA_3_8B, CandidateLayout(), GenerationWorkload(np.array([1.0]), 64, 4096, size), H100
        ).compute_s
        for size in (1, 8)
    )
    assert grouped == pytest.approx(alone / 8, rel=0.05)


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
    step = decode_step(LLAMA_2_7B, 1, running, context, A100)
    weights = 2 * (LLAMA_2_7B.parameters - LLAMA_2_7B.embedding_parameters)
    held = running * context * 2 * 32 * 4096 * 2
    least = (weights + held) / A100.bandwidth_bytes_per_s
    assert step.total >= least
    if running == 1:
        assert step.bandwidth_s == pytest.approx(least / A100.bandwidth_efficiency, rel=1e-3)


def test_one_token_uses_its_experts_and_many_tokens_use_all():
    bandwidth = A100.bandwidth_bytes_per_s * A100.bandwidth_efficiency
    one, many = (decode_step(MIXTRAL, 1, n, 0, A100).bandwidth_s for n in (1, 64))
    used = 12_879_925_248 - MIXTRAL.embedding_parameters
    every = MIXTRAL.parameters - MIXTRAL.embedding_parameters
    assert one == pytest.approx(2 * used / bandwidth, rel=1e-3)
    assert many == pytest.approx(2 * every / bandwidth, rel=1e-3)


def test_where_no_request_fits_generation_never_ends():
    work = GenerationWorkload(np.array([100.0]), 8, 10)
    small = replace(A100, memory_bytes=10 * 2**30)
    assert running_requests(LLAMA_2_7B, CandidateLayout(), work, small) == 0
    times = stage_seconds(LLAMA_2_7B, CandidateLayout(), work, small)
    assert np.isinf(times.total)
    assert not np.isnan(times.total)


@given(st.integers(1, 300), st.integers(1, 3))
@settings(deadline=None)
def test_more_replicas_never_take_longer_to_generate(samples, tp_power):
    work = GenerationWorkload(np.array([10.0, 200.0, 900.0]), samples, 100)
    layout = CandidateLayout(2**tp_power, np.arange(1, samples + 1))
    times = stage_seconds(LLAMA_3_8B, layout, work, A100).total
    assert np.all(np.diff(times) <= times[:-1] * 0.02)


def test_switching_moves_weights_and_states_both_ways():
    work, layout = TrainingWorkload(64, 100, zero=1), CandidateLayout(tp=8, dp=2)
    parameters = LLAMA_3_8B.parameters / 8
    expected = 2 * (2 * parameters + 12 * parameters / 2) / A100.host.bytes_per_s
    assert switch_seconds(LLAMA_3_8B, layout, work, A100) == pytest.approx(expected, rel=1e-3)


def test_weights_take_the_slowest_link_of_the_way():
    size = 2 * LLAMA_3_8B.parameters
    assert sync_seconds(LLAMA_3_8B, A100, H100) == pytest.approx(
        size / A100.inter.bytes_per_s, rel=0.01
    )
