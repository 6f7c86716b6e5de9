"""Predicts from data sheets the seconds that a stage takes with a parallel layout.

A layout (:mod:`pipeline.planning.cost.layout`) divides a model over GPUs. Compute time follows the
roofline model; communication time follows the latency and bandwidth of links. Sources: Narayanan et
al. 2021 (arXiv 2104.04473, sections 2 and 3) for 1F1B and tensor-parallel communication;
Rajbhandari et al. 2020 (arXiv 1910.02054, section 7) for sharded data parallelism; Pope et al. 2022
(arXiv 2211.05102) for memory-bound decoding.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.cost import hardware
from pipeline.planning.cost.hardware import GpuDevice, LinkModel
from pipeline.planning.cost.layout import CandidateLayout, PipelineStages, split_pipeline
from pipeline.planning.cost.memory import (
    kv_bytes_per_token,
    mean_context,
    running_requests,
    stage_memory,
)
from pipeline.planning.cost.model_shape import ModelShape
from pipeline.planning.cost.workload import (
    GenerationWorkload,
    InferenceWorkload,
    TrainingWorkload,
    Workload,
)

Array = np.ndarray
Seconds = Any
"""Seconds: a number, or an array if the :class:`CandidateLayout` has arrays of many layouts."""

LENGTH_POINTS = 48
"""Number of decoding steps at which the distribution of response lengths is evaluated."""
SYNC_CHUNK_BYTES = 64 * 2**20
"""Chunk size in which nodes forward weights (assumed)."""


@dataclass(frozen=True)
class TimeBreakdown:
    """The seconds of a stage, divided by the resource that limits them; the sum is the duration."""

    compute_s: Seconds = 0.0
    bandwidth_s: Seconds = 0.0
    """Reading and writing the GPU's memory."""
    communication_s: Seconds = 0.0
    bubble_s: Seconds = 0.0
    """Filling and draining the pipeline."""
    overhead_s: Seconds = 0.0
    """Kernel launches."""

    @property
    def total(self) -> Seconds:
        """The sum of all parts."""
        return sum(vars(self).values())

    def map_parts(self, change: Callable[[Any], Any]) -> TimeBreakdown:
        """Return the breakdown with ``change`` applied to every part."""
        return TimeBreakdown(*(change(part) for part in vars(self).values()))

    def __add__(self, other: TimeBreakdown) -> TimeBreakdown:
        return TimeBreakdown(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


BOUNDS = ("compute", "memory bandwidth", "communication", "bubble", "overhead")
"""Names of the parts of :class:`TimeBreakdown`, in order."""


def stage_seconds(
    shape: ModelShape, layout: CandidateLayout, work: Workload, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds of one iteration. Memory only matters to generation: it limits the number
    of running requests, and the time is infinite if no request fits."""
    if isinstance(work, TrainingWorkload):
        return _training(shape, layout, work, device)
    if isinstance(work, InferenceWorkload):
        return _inference(shape, layout, work, device)
    return _generation(shape, layout, work, device)


class PassCounts(NamedTuple):
    """The cost of one micro-batch in forward passes; a backward pass computes as much as two."""

    compute: int
    """Number of computed forward passes."""
    scores: int
    """Additional computations of only the attention scores."""
    exchanges: int
    """Number of passes that communicate; a backward pass communicates once."""


TRAINING_PASSES = {"selective": PassCounts(3, 1, 2), "full": PassCounts(4, 0, 3)}
"""Passes of a training step by activation recomputation."""


def _training(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of an iteration of training.

    The pipeline takes ``sum_s tau_s + (m - 1) max_s tau_s`` under 1F1B (Narayanan et al. 2021,
    section 2.2, for pipeline stages ``s`` with seconds ``tau_s`` and ``m`` micro-batches). To this
    are added the sends that fill and drain the pipeline, the gradient all-reduce over replicas, and
    the optimizer step, which is limited by memory bandwidth.
    """
    passes = TRAINING_PASSES[layout.recompute]
    micro_batches = -(-work.samples // (layout.dp * layout.micro_batch))
    step = _pipeline(shape, layout, work.tokens, device, passes, micro_batches)
    sync = _gradient_sync(shape, layout, work, device, micro_batches)
    step = step + _optimizer(shape, layout, work, device) + TimeBreakdown(communication_s=sync)
    return step.map_parts(lambda part: work.steps * part)


def _inference(
    shape: ModelShape, layout: CandidateLayout, work: InferenceWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of a forward pass over all samples, in micro-batches through the pipeline."""
    micro_batches = -(-work.samples // (layout.dp * layout.micro_batch))
    return _pipeline(shape, layout, work.tokens, device, PassCounts(1, 0, 1), micro_batches)


def _pipeline(
    shape: ModelShape,
    layout: CandidateLayout,
    tokens: int,
    device: GpuDevice,
    passes: PassCounts,
    micro_batches: Any,
) -> TimeBreakdown:
    stages = split_pipeline(shape, layout.pp)
    stage_times = micro_batch_seconds(shape, stages, layout, tokens, device, passes)
    total = np.asarray(stage_times.total)
    slowest = np.argmax(total, axis=-1)[..., None]

    def take_slowest(part: Any) -> Any:
        part = np.broadcast_to(part, total.shape)
        return micro_batches * np.take_along_axis(part, slowest, -1)[..., 0]

    busy = stage_times.map_parts(take_slowest)
    fill = (total * stages.multiplicity).sum(-1) - total.max(-1)
    # Activations are sent forward, and in training gradients are sent back.
    directions = 1 if passes.compute == 1 else 2
    send_s = directions * _boundary_seconds(shape, layout, tokens, device)
    return replace(busy, bubble_s=fill + send_s)


def micro_batch_seconds(
    shape: ModelShape,
    stages: PipelineStages,
    layout: CandidateLayout,
    tokens: int,
    device: GpuDevice,
    passes: PassCounts,
) -> TimeBreakdown:
    """Return the seconds of each pipeline stage for one micro-batch: ``[..., stages]``."""
    tp, ep, size = (np.asarray(v)[..., None] for v in (layout.tp, layout.ep, layout.micro_batch))
    score_flops = stages.layers * shape.score_flops(tokens / 2)
    flops = passes.compute * (stages.flops + score_flops) + passes.scores * score_flops
    # The head is never recomputed.
    flops = flops + min(passes.compute, 3) * stages.head * shape.head_flops
    reads = passes.compute * shape.dtype_bytes * (stages.shared / tp + stages.routed / (tp * ep))
    compute, bandwidth = device.roofline(flops * size * tokens / tp, reads)
    # Norms, activation functions and residuals write and read the stored activations.
    activation_bytes = 2 * passes.compute * stages.activation_bytes * size * tokens / tp
    bandwidth = bandwidth + device.roofline(0.0, activation_bytes)[1]
    communication_s = _layer_communication(
        shape, stages.layers, stages.sparse, tp, ep, size * tokens, device
    )
    return TimeBreakdown(
        compute,
        bandwidth,
        passes.exchanges * communication_s,
        overhead_s=passes.compute * stages.layers * device.layer_overhead_s,
    )


def _layer_communication(
    shape: ModelShape, layers: Any, sparse: Any, tp: Any, ep: Any, tokens: Any, device: GpuDevice
) -> Any:
    """Return the seconds of tensor- and expert-parallel communication in a forward pass.

    There are two all-reduces of the hidden states per layer (Narayanan et al. 2021, section 2.3),
    and two all-to-alls per sparse layer, to the experts and back.
    """
    hidden_bytes = tokens * shape.hidden * shape.dtype_bytes
    seconds = 2 * layers * hardware.all_reduce_seconds(device.group_link(tp, 1), tp, hidden_bytes)
    if shape.experts:
        link = device.group_link(ep, tp, pairwise=True)
        expert_bytes = shape.active_experts * hidden_bytes / tp
        seconds = seconds + 2 * sparse * hardware.all_to_all_seconds(link, ep, expert_bytes)
    return seconds


def _boundary_seconds(
    shape: ModelShape, layout: CandidateLayout, tokens: int, device: GpuDevice
) -> Seconds:
    """Return the seconds in which the hidden states of a micro-batch pass all pipeline boundaries.

    Each tensor-parallel rank sends its share (Narayanan et al. 2021, section 4.1).
    """
    if layout.pp == 1:
        return 0.0
    bytes_per_rank = layout.micro_batch * tokens * shape.hidden * shape.dtype_bytes / layout.tp
    link = device.group_link(layout.pp, layout.tp * layout.dp)
    return (layout.pp - 1) * link.send_seconds(bytes_per_rank)


def _gradient_sync(
    shape: ModelShape,
    layout: CandidateLayout,
    work: TrainingWorkload,
    device: GpuDevice,
    micro_batches: Any,
) -> Seconds:
    """Return the seconds to sum gradients over replicas, for the largest pipeline stage.

    Without sharding this is an all-reduce. ZeRO 1 and 2 need a reduce-scatter and an all-gather,
    which take as long. With ZeRO 3, each micro-batch gathers weights twice and reduce-scatters
    gradients (as long as an all-gather). With hybrid sharding, each micro-batch also all-reduces
    gradient shards over the copies of the states (``work.copies``).
    """
    shared, routed = _largest_pipeline_stage(shape, layout)
    shards = work.shards(layout.dp) if work.zero == 3 else layout.dp
    groups = [(device.group_link(shards, layout.tp), shards, shared)]
    if shape.experts:
        expert_replicas = np.maximum(1, shards // layout.ep)
        link = device.group_link(expert_replicas, layout.tp * layout.ep)
        groups.append((link, expert_replicas, routed))
    weight_bytes, gradient_bytes = work.state.weights, work.state.gradients
    if work.zero < 3:
        return sum(
            hardware.all_reduce_seconds(link, count, gradient_bytes * parameters)
            for link, count, parameters in groups
        )
    copies_s: Seconds = 0.0
    if work.copies > 1:
        link = device.group_link(work.copies, layout.tp * shards)
        shard_bytes = gradient_bytes * (shared + routed) / shards
        copies_s = hardware.all_reduce_seconds(link, work.copies, shard_bytes)
    return micro_batches * sum(
        (
            2 * hardware.all_gather_seconds(link, count, weight_bytes * parameters)
            + hardware.all_gather_seconds(link, count, gradient_bytes * parameters)
            for link, count, parameters in groups
        ),
        copies_s,
    )


def _optimizer(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds to read and write all states, and to transfer offloaded states."""
    shared, routed = _largest_pipeline_stage(shape, layout)
    if work.zero:
        shards = work.shards(layout.dp)
        shared, routed = shared / shards, routed / np.maximum(1, shards // layout.ep)
    bytes_per_parameter = work.state.gradients + 2 * work.state.optimizer + work.state.weights
    transfer_s: Seconds = 0.0
    if work.optimizer_limit_bytes is not None:  # offloaded
        transfer_s = 2 * work.state.optimizer * (shared + routed) / device.host.bytes_per_s
    return TimeBreakdown(
        bandwidth_s=device.roofline(0.0, bytes_per_parameter * (shared + routed))[1],
        communication_s=transfer_s,
    )


def _largest_pipeline_stage(shape: ModelShape, layout: CandidateLayout) -> tuple[Any, Any]:
    """Return two maximums over pipeline stages: shared and routed parameters per GPU."""
    stages = split_pipeline(shape, layout.pp)
    return stages.shared.max() / layout.tp, stages.routed.max() / (layout.tp * layout.ep)


def _generation(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of prefill and of decoding with continuous batching; infinite if no request
    fits.

    A replica generates ``R`` responses of random length ``L``, at most ``C`` at the same time. If
    ``R <= C``, all start together, and ``R P(L > t)`` are running after ``t`` steps. Otherwise the
    engine is full until the queue is empty. Then the remaining length of a running request is
    distributed as ``P(residual > t) = E[(L - t)+] / E[L]`` (the residual life of renewal theory).
    Requests that still run ``t`` steps after that had generated ``E[(L - t)+^2] / (2 E[(L - t)+])``
    tokens when the queue became empty, on average. The phase with a full engine has
    ``(R E[L] - C E[residual]) / C`` steps.
    """
    capacity = running_requests(shape, layout, work, device)
    requests = np.ceil(work.samples / np.asarray(layout.dp, dtype=np.float64))
    running = np.maximum(np.minimum(capacity, requests), 1.0)
    lengths = np.sort(work.lengths)
    mean_length = float(lengths.mean())
    grid = _step_grid(lengths)
    midpoints, widths = (grid[1:] + grid[:-1]) / 2, np.diff(grid)
    expected_excess = np.maximum(lengths[None] - grid[:, None], 0.0).mean(1)
    # Means of P(L > t) and of P(residual > t) over each interval.
    survival = -np.diff(expected_excess) / widths
    residual = (expected_excess[1:] + expected_excess[:-1]) / 2 / mean_length
    mean_residual = float((residual * widths).sum())
    is_full = capacity < requests
    full_tokens = np.maximum(requests * mean_length - running * mean_residual, 0.0)
    full_steps = np.where(is_full, full_tokens / running, 0.0)
    decode = decode_step(shape, layout, running, mean_context(work), device)
    # When the queue is empty, n requests run. Later, each of them still runs with probability q, at
    # least one with probability 1 - (1 - q)^n; if any does, n q / (1 - (1 - q)^n) run on average.
    probability = np.where(is_full[..., None], residual, survival)
    any_running = 1 - (1 - probability) ** running[..., None]
    mean_running = running[..., None] * probability / np.maximum(any_running, 1e-300)
    num_running = np.where(any_running > 0, mean_running, 1.0)
    excess = np.maximum(lengths[None] - midpoints[:, None], 0.0)
    past_tokens = (excess**2).mean(1) / (2 * np.maximum(excess.mean(1), 1e-300))
    context = work.prompt_tokens + midpoints + np.where(is_full[..., None], past_tokens, 0.0)
    tp, ep = np.asarray(layout.tp)[..., None], np.asarray(layout.ep)[..., None]
    tail = decode_step(shape, CandidateLayout(tp, ep=ep), num_running, context, device).map_parts(
        lambda part: (widths * any_running * part).sum(-1)
    )
    prefill = _prefill(shape, layout, work, np.ceil(requests / work.group_size), device)
    infeasible = TimeBreakdown(bandwidth_s=np.where(capacity > 0, 0.0, np.inf))
    return prefill + decode.map_parts(lambda part: full_steps * part) + tail + infeasible


def _step_grid(lengths: Array) -> Array:
    """Return steps ``[points]`` from 0 to the longest length, denser where many responses end."""
    quantiles = np.quantile(lengths, np.linspace(0, 1, LENGTH_POINTS // 2))
    grid = np.linspace(0, lengths[-1], LENGTH_POINTS // 2)
    return np.unique(np.concatenate([[0.0], quantiles, grid]))


def decode_step(
    shape: ModelShape, layout: CandidateLayout, running: Any, context: Any, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds to decode one token of ``running`` requests with ``context`` tokens each.

    All used weights and the whole KV cache are read once. Of ``E`` routed experts, ``running``
    tokens with ``k`` experts each use ``E (1 - (1 - k / E)^running)`` on average.
    """
    tp, ep = np.asarray(layout.tp), np.asarray(layout.ep)
    expert_share: Any = 1.0
    if shape.experts:
        # Replicas that share experts combine their tokens.
        expert_share = 1 - (1 - shape.active_experts / shape.experts) ** (running * ep)
    shared = float(shape.shared_parameters.sum()) + shape.embedding_parameters
    routed = float(shape.expert_parameters.sum())
    weight_bytes = shape.dtype_bytes * (shared / tp + expert_share * routed / (tp * ep))
    flops = running * shape.forward_flops(0.0) / tp
    score_flops = running * shape.layers * shape.score_flops(context) / tp
    cache_bytes = running * context * kv_bytes_per_token(shape, tp)
    # Attention depends on one matmul and precedes the next, so their times add up.
    matmul_s, weights_s = device.roofline(flops, weight_bytes)
    score_s, cache_s = device.roofline(score_flops, cache_bytes)
    communication_s = _layer_communication(
        shape, shape.layers, int(shape.sparse.sum()), tp, ep, running, device
    )
    overhead = shape.layers * device.layer_overhead_s
    compute_s, bandwidth_s = matmul_s + score_s, weights_s + cache_s
    return TimeBreakdown(compute_s, bandwidth_s, communication_s, overhead_s=overhead)


def _prefill(
    shape: ModelShape,
    layout: CandidateLayout,
    work: GenerationWorkload,
    prompts: Any,
    device: GpuDevice,
) -> TimeBreakdown:
    """Return the seconds to process prompts, in chunks so large that compute is the limit."""
    tokens = prompts * work.prompt_tokens
    # Only the last token of each prompt needs logits.
    flops = tokens * (shape.forward_flops(work.prompt_tokens / 2) - shape.head_flops)
    hidden_bytes = tokens * shape.hidden * shape.dtype_bytes
    link = device.group_link(layout.tp, 1)
    all_reduce_s = hardware.all_reduce_seconds(link, layout.tp, hidden_bytes)
    compute_s = device.roofline(flops / layout.tp, 0.0)[0]
    return TimeBreakdown(compute_s, 0.0, 2 * shape.layers * all_reduce_s)


def switch_seconds(
    shape: ModelShape, layout: CandidateLayout, work: Workload, device: GpuDevice
) -> Seconds:
    """Return the seconds to load a stage's weights and optimizer states and to offload them again.

    Each GPU has its own link to the host; activations, gradients and caches are discarded.
    """
    memory = stage_memory(shape, layout, work)
    return 2 * device.host.send_seconds(memory.weights + memory.optimizer)


def sync_seconds(
    shape: ModelShape, source: GpuDevice, target: GpuDevice, relay: tuple[LinkModel, ...] = ()
) -> float:
    """Return the seconds to send the weights from GPUs of one kind to GPUs of another.

    One node sends each byte once, over ``relay`` (hosts, a shared filesystem) if there is no direct
    connection. Nodes of the target forward chunks to each other, which costs only latency.
    """
    links = (source.inter, *relay, target.inter, target.intra)
    weight_bytes = float(shape.parameters * shape.dtype_bytes)
    return hardware.path_seconds(links, weight_bytes, SYNC_CHUNK_BYTES)
