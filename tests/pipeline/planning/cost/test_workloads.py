"""Times and memory of workloads: equal to values by hand, to papers, and to stepping."""

from __future__ import annotations

import heapq
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.cost.data_sheet import BANDWIDTH_EFFICIENCY, LinkModel
from pipeline.planning.cost.workloads import (
    GenerationWorkload,
    InferenceWorkload,
    StateBytes,
    TrainingWorkload,
    decode_step_s,
    kv_bytes_per_token,
)
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

MIXED = StateBytes(2, 2, 12)
"""bfloat16 with Adam in float32 (Rajbhandari et al. 2020, section 3.1)."""


@pytest.mark.parametrize(("zero", "gigabytes"), [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)])
def test_states_are_those_of_the_zero_paper(zero, gigabytes):
    """Rajbhandari et al. 2020, figure 1 and table 1: 7.5 B parameters over 64 replicas."""
    shape = gpt(36, 4096, 32)
    used, doubled = (
        TrainingWorkload(64, tokens, zero=zero, state=MIXED).memory_bytes(shape, 64)
        for tokens in (1, 2)
    )
    states = used - (doubled - used)
    if zero == 3:
        # The paper leaves out the two layers that are whole at a time.
        states = states - 2 * 2 * shape.shared_parameters.max()
    assert states / 1e9 * (7.5e9 / shape.parameters) == pytest.approx(gigabytes, rel=0.01)


@pytest.mark.parametrize("work", [TrainingWorkload(64, 1000), InferenceWorkload(64, 1000)])
def test_memory_must_hold_the_longest_sequence(work):
    short, mean, longest = (
        replace(work, tokens=1, longest=n).memory_bytes(SMALL, 1) for n in (1, 1000, 3000)
    )
    assert longest - short == pytest.approx(2999 / 999 * (mean - short))
    assert work.memory_bytes(SMALL, 1) == mean


def test_keys_and_values_are_those_of_the_paper_on_paged_attention():
    """Kwon et al. 2023, section 1: 800 KB for a token of OPT-13B."""
    assert kv_bytes_per_token(gpt(40, 5120, 40)) == 800 * 1024


@given(st.integers(1, 4096))
@settings(deadline=None)
def test_sharing_more_states_and_recomputing_more_never_take_memory(tokens):
    work = TrainingWorkload(64, tokens, zero=1)
    total = [replace(work, zero=zero).memory_bytes(LLAMA_3_8B, 8) for zero in (0, 1, 2)]
    assert total == sorted(total, reverse=True)
    assert replace(work, recompute="full").memory_bytes(LLAMA_3_8B, 8) <= total[1]


def test_a_training_step_by_hand():
    """Two replicas on two nodes of one GPU each, three steps."""
    shape, tokens, micro_batches = gpt(4, 1024, 16), 512, 6
    device = replace(A100, gpus_per_node=1)
    work = TrainingWorkload(
        2 * micro_batches, tokens, steps=3, zero=0, recompute="full", state=MIXED
    )
    flops = device.flops * device.flops_efficiency
    bandwidth = device.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    layers = shape.layer_flops.sum() + 4 * shape.score_flops(tokens / 2)
    compute = tokens * (4 * layers + 3 * shape.head_flops) / flops
    activations = 2 * 4 * tokens * shape.activation_bytes().sum() / bandwidth
    launches = 4 * 4 * device.layer_overhead_s
    states = (2 + 2 + 2 * 12) * shape.parameters / bandwidth
    synced = device.inter.all_reduce_s(2, 2 * shape.parameters)
    expected = 3 * (micro_batches * (compute + activations + launches) + states + synced)
    assert work.seconds(shape, 2, device) == pytest.approx(expected)


def test_zero_3_gathers_weights_twice_and_scatters_gradients_for_each_micro_batch():
    shape, work = LLAMA_3_8B, TrainingWorkload(32, 512, micro_batch=2, state=MIXED)
    sharded = work.seconds(shape, 8, A100)
    free = replace(A100, intra=LinkModel(0.0, 1e30))
    each = 3 * A100.intra.all_gather_s(8, 2 * shape.parameters)
    assert sharded - work.seconds(shape, 8, free) == pytest.approx(2 * each)


def test_gathered_weights_have_the_type_of_the_pass():
    """FSDP2 casts shards before it gathers them: half the bytes, in memory and on the wire."""
    shape, work = LLAMA_3_8B, TrainingWorkload(32, 512, micro_batch=2)
    half = replace(work, gathered_bytes=2)
    layer = float(shape.shared_parameters.max())
    saved = work.memory_bytes(shape, 8) - half.memory_bytes(shape, 8)
    assert saved == pytest.approx(2 * 2 * layer)
    gathered = [one.gather_s(shape, 8, A100) for one in (work, half)]
    assert gathered == [A100.intra.all_gather_s(8, n * shape.parameters) for n in (4, 2)]
    assert replace(work, zero=2).gather_s(shape, 8, A100) == 0


def test_inference_with_a_sharded_model_holds_shards_and_gathers_them():
    shape, training = LLAMA_3_8B, TrainingWorkload(32, 512)
    whole = InferenceWorkload(32, 512)
    sharded = replace(whole, sharding=training)
    assert whole.memory_parts(shape, 8)["weights"] == 2 * shape.parameters
    assert sharded.memory_parts(shape, 8)["weights"] == training.weight_bytes(shape, 8)
    assert training.weight_bytes(shape, 8) < 0.35 * 4 * shape.parameters
    added_s = sharded.seconds(shape, 8, A100) - whole.seconds(shape, 8, A100)
    assert added_s == pytest.approx(4 * training.gather_s(shape, 8, A100))


@pytest.mark.parametrize("size", [2, 4, 8])
def test_tensor_parallelism_divides_weights_and_cache_and_sums_hidden_states(size):
    one = GenerationWorkload(np.array([512.0]), 64, 128, max_running=64)
    many = replace(one, tensor_parallel=size)
    for name in ("weights", "KV cache"):
        parts = [work.memory_parts(LLAMA_3_70B, 8)[name] for work in (one, many)]
        assert parts[1] == pytest.approx(parts[0] / size)
    whole_s, divided_s = (decode_step_s(LLAMA_3_70B, 64, 512, A100, n) for n in (1, size))
    sums_s = 2 * 80 * A100.intra.all_reduce_s(size, 64 * 8192 * 2)
    launches_s = 80 * A100.layer_overhead_s
    assert divided_s == pytest.approx((whole_s - launches_s) / size + sums_s + launches_s)
    assert np.isinf(many.seconds(LLAMA_3_70B, size // 2, A100))
    assert many.seconds(LLAMA_3_70B, size, replace(A100, memory_bytes=1e15)) > 0


def test_the_prompt_of_a_group_is_read_once():
    def seconds(prompt: int, size: int) -> float:
        return GenerationWorkload(np.array([1.0]), 64, prompt, size).seconds(LLAMA_3_8B, 1, H100)

    alone, grouped = (seconds(4096, size) - seconds(1, size) for size in (1, 8))
    assert grouped < 0.3 * alone


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
    got = work.seconds(LLAMA_3_8B, 1, device)
    true = np.mean([stepped_engine(rng.choice(lengths, samples), room) for _ in range(200)])
    assert got == pytest.approx(true, rel=0.05)


@given(st.integers(1, 512), st.integers(1, 8000))
@settings(deadline=None)
def test_decoding_reads_all_weights_and_all_keys_and_values(running, context):
    step_s = decode_step_s(LLAMA_2_7B, running, context, A100)
    weights = 2 * (LLAMA_2_7B.parameters - LLAMA_2_7B.embedding_parameters)
    held = running * context * 2 * 32 * 4096 * 2
    least = (weights + held) / A100.bandwidth_bytes_per_s
    assert step_s >= least
    if running == 1:
        launches_s = 32 * A100.layer_overhead_s
        assert step_s == pytest.approx(least / BANDWIDTH_EFFICIENCY + launches_s, rel=1e-3)


def test_one_token_uses_its_experts_and_many_tokens_use_all():
    bandwidth = A100.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY
    device = replace(A100, layer_overhead_s=0.0)
    one, many = (decode_step_s(MIXTRAL, n, 0, device) for n in (1, 64))
    used = 12_879_925_248 - MIXTRAL.embedding_parameters
    every = MIXTRAL.parameters - MIXTRAL.embedding_parameters
    assert one == pytest.approx(2 * used / bandwidth, rel=1e-3)
    assert many == pytest.approx(2 * every / bandwidth, rel=1e-3)


def test_where_no_request_fits_generation_never_ends():
    work = GenerationWorkload(np.array([100.0]), 8, 10)
    small = replace(A100, memory_bytes=10 * 2**30)
    assert work.running_requests(LLAMA_2_7B, small) == 0
    assert np.isinf(work.seconds(LLAMA_2_7B, 1, small))


@given(st.integers(1, 300))
@settings(deadline=None)
def test_more_replicas_never_take_longer_to_generate(samples):
    work = GenerationWorkload(np.array([10.0, 200.0, 900.0]), samples, 100)
    times = np.array([work.seconds(LLAMA_3_8B, n, A100) for n in range(1, samples + 1, 7)])
    assert np.all(np.diff(times) <= times[:-1] * 0.02)
