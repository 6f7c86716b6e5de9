"""Seconds of a stage under a layout, from data sheets, by their bounds.

Compute follows the roofline model, communication the links. Sources: Narayanan et al. 2021 (arXiv
2104.04473, sections 2 and 3) for 1F1B and tensor-parallel communication; Rajbhandari et al. 2020
(arXiv 1910.02054, section 7) for sharded data parallelism; Pope et al. 2022 (arXiv 2211.05102) for
decoding bound by memory bandwidth.
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
"""Seconds: a number or an array of the layouts' shape."""

LENGTH_POINTS = 48
"""Number of points at which the distribution of lengths is evaluated."""
SYNC_CHUNK_BYTES = 64 * 2**20
"""Size of the pieces in which weights are forwarded (assumed)."""


@dataclass(frozen=True)
class TimeBreakdown:
    """Seconds by what bounds them; they add up."""

    compute_s: Seconds = 0.0
    bandwidth_s: Seconds = 0.0
    """Reading and writing the GPU's memory."""
    communication_s: Seconds = 0.0
    bubble_s: Seconds = 0.0
    """Filling and draining the pipeline."""
    overhead_s: Seconds = 0.0
    """Launching work."""

    @property
    def total(self) -> Seconds:
        """The sum of all parts."""
        return sum(vars(self).values())

    def map_parts(self, change: Callable[[Any], Any]) -> TimeBreakdown:
        """Apply a function to every part."""
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
    """Return the seconds of one iteration, of the shape of the layouts.

    Memory is ignored, except for the number of requests that fit: generation is infinite if none
    fits.
    """
    if isinstance(work, TrainingWorkload):
        return _training(shape, layout, work, device)
    if isinstance(work, InferenceWorkload):
        return _inference(shape, layout, work, device)
    return _generation(shape, layout, work, device)


class PassCounts(NamedTuple):
    """The cost of one micro-batch in units of a forward pass; a backward pass computes two."""

    compute: int
    scores: int
    """Additional computations of only the attention scores."""
    exchanges: int
    """Number of passes that communicate; a backward pass communicates once."""


TRAINING_PASSES = {"selective": PassCounts(3, 1, 2), "full": PassCounts(4, 0, 3)}


def _training(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return ``sum_s tau_s + (m - 1) max_s tau_s`` under 1F1B (Narayanan et al. 2021, section 2.2,
    for stages of different duration), the sends that fill and drain the pipeline, the sum of
    gradients over replicas, and the optimizer, which is bound by memory bandwidth."""
    passes = TRAINING_PASSES[layout.recompute]
    micro_batches = -(-work.samples // (layout.dp * layout.micro_batch))
    step = _pipeline(shape, layout, work.tokens, device, passes, micro_batches)
    sync = _gradient_sync(shape, layout, work, device, micro_batches)
    step = step + _optimizer(shape, layout, work, device) + TimeBreakdown(communication_s=sync)
    return step.map_parts(lambda part: work.steps * part)


def _inference(
    shape: ModelShape, layout: CandidateLayout, work: InferenceWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of one forward pass over all samples, in micro-batches through the
    pipeline."""
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
    each = micro_batch(shape, stages, layout, tokens, device, passes)
    total = np.asarray(each.total)
    slowest = np.argmax(total, axis=-1)[..., None]

    def of_slowest(part: Any) -> Any:
        part = np.broadcast_to(part, total.shape)
        return micro_batches * np.take_along_axis(part, slowest, -1)[..., 0]

    busy = each.map_parts(of_slowest)
    fill = (total * stages.count).sum(-1) - total.max(-1)
    # Activations go forward, and gradients back.
    ways = 1 if passes.compute == 1 else 2
    return replace(busy, bubble_s=fill + ways * _boundaries(shape, layout, tokens, device))


def micro_batch(
    shape: ModelShape,
    stages: PipelineStages,
    layout: CandidateLayout,
    tokens: int,
    device: GpuDevice,
    passes: PassCounts,
) -> TimeBreakdown:
    """Return the seconds of each pipeline stage for one micro-batch: ``[..., stages]``."""
    tp, ep, micro = (np.asarray(v)[..., None] for v in (layout.tp, layout.ep, layout.micro_batch))
    score = stages.layers * shape.score_flops(tokens / 2)
    flops = passes.compute * (stages.flops + score) + passes.scores * score
    # The head is never recomputed.
    flops = flops + min(passes.compute, 3) * stages.head * shape.head_flops
    reads = passes.compute * shape.dtype_bytes * (stages.shared / tp + stages.routed / (tp * ep))
    compute, bandwidth = device.roofline(flops * micro * tokens / tp, reads)
    # Norms, activations and residuals between matrix products write and read kept activations.
    moved = 2 * passes.compute * stages.activation_bytes * micro * tokens / tp
    bandwidth = bandwidth + device.roofline(0.0, moved)[1]
    exchange = _layer_communication(
        shape, stages.layers, stages.sparse, tp, ep, micro * tokens, device
    )
    return TimeBreakdown(
        compute,
        bandwidth,
        passes.exchanges * exchange,
        overhead_s=passes.compute * stages.layers * device.layer_overhead_s,
    )


def _layer_communication(
    shape: ModelShape, layers: Any, sparse: Any, tp: Any, ep: Any, tokens: Any, device: GpuDevice
) -> Any:
    """Return the seconds of tensor- and expert-parallel communication of a forward pass of
    ``tokens``.

    There are two all-reduces of the hidden states per layer (Narayanan et al. 2021, section 2.3),
    and two all-to-alls per sparse layer, to the experts and back.
    """
    hidden = tokens * shape.hidden * shape.dtype_bytes
    time = 2 * layers * hardware.all_reduce_seconds(device.group_link(tp, 1), tp, hidden)
    if shape.experts:
        group = device.group_link(ep, tp, pairwise=True)
        visits = shape.active_experts * hidden / tp
        time = time + 2 * sparse * hardware.all_to_all_seconds(group, ep, visits)
    return time


def _boundaries(
    shape: ModelShape, layout: CandidateLayout, tokens: int, device: GpuDevice
) -> Seconds:
    """Return the seconds for one micro-batch's hidden states to pass all pipeline boundaries.

    Each tensor-parallel rank sends its share (Narayanan et al. 2021, section 4.1).
    """
    if layout.pp == 1:
        return 0.0
    size = layout.micro_batch * tokens * shape.hidden * shape.dtype_bytes / layout.tp
    border = device.group_link(layout.pp, layout.tp * layout.dp)
    return (layout.pp - 1) * border.send_seconds(size)


def _gradient_sync(
    shape: ModelShape,
    layout: CandidateLayout,
    work: TrainingWorkload,
    device: GpuDevice,
    micro_batches: Any,
) -> Seconds:
    """Return the seconds to sum gradients over replicas, for the largest stage.

    It is an all-reduce; with sharded states a reduce-scatter and an all-gather, which take as long.
    With ZeRO stage 3 the weights are gathered twice and gradients scattered for each micro-batch,
    within a copy of the model if there are several; the shards of the gradients are then summed
    over the copies.
    """
    shared, routed = _largest(shape, layout)
    shards = work.shards(layout.dp) if work.zero == 3 else layout.dp
    groups = [(device.group_link(shards, layout.tp), shards, shared)]
    if shape.experts:
        copies = np.maximum(1, shards // layout.ep)
        groups.append((device.group_link(copies, layout.tp * layout.ep), copies, routed))
    w, g = work.state.weights, work.state.gradients
    if work.zero < 3:
        return sum(
            hardware.all_reduce_seconds(link, count, g * mine) for link, count, mine in groups
        )
    between: Seconds = 0.0
    if work.copies > 1:
        link = device.group_link(work.copies, layout.tp * shards)
        between = hardware.all_reduce_seconds(link, work.copies, g * (shared + routed) / shards)
    return micro_batches * sum(
        (
            2 * hardware.all_gather_seconds(link, count, w * mine)
            + hardware.all_gather_seconds(link, count, g * mine)
            for link, count, mine in groups
        ),
        between,
    )


def _optimizer(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds to read and write all states once; offloaded states are transferred."""
    shared, routed = _largest(shape, layout)
    if work.zero:
        shards = work.shards(layout.dp)
        shared, routed = shared / shards, routed / np.maximum(1, shards // layout.ep)
    touched = work.state.gradients + 2 * work.state.optimizer + work.state.weights
    moved: Seconds = 0.0
    if work.state_on_device is not None:
        moved = 2 * work.state.optimizer * (shared + routed) / device.host.bytes_per_s
    return TimeBreakdown(
        bandwidth_s=device.roofline(0.0, touched * (shared + routed))[1], communication_s=moved
    )


def _largest(shape: ModelShape, layout: CandidateLayout) -> tuple[Any, Any]:
    """Return the parameters per GPU of the largest stage, with those of routed experts separate."""
    stages = split_pipeline(shape, layout.pp)
    return stages.shared.max() / layout.tp, stages.routed.max() / (layout.tp * layout.ep)


def _generation(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of prefill and of decoding with continuous batching; infinite if no request
    fits.

    A replica has ``R`` responses to generate and room for ``C`` at once. If ``R <= C`` all start
    together and the number still running after ``t`` steps is ``R P(L > t)``. Otherwise the engine
    is full until the queue is empty. Then the rest of a running request is distributed as
    ``P(residual > t) = E[(L - t)+] / E[L]`` (the residual life of renewal theory), its mean age is
    ``E[(L - t)+^2] / (2 E[(L - t)+])``, and the full phase has the remaining steps of the work:
    ``(R E[L] - C E[residual]) / C``.
    """
    room = running_requests(shape, layout, work, device)
    share = np.ceil(work.samples / np.asarray(layout.dp, dtype=np.float64))
    running = np.maximum(np.minimum(room, share), 1.0)
    lengths = np.sort(work.lengths)
    mean = float(lengths.mean())
    edges = _edges(lengths)
    middle, width = (edges[1:] + edges[:-1]) / 2, np.diff(edges)
    more = np.maximum(lengths[None] - edges[:, None], 0.0).mean(1)
    # Mean of P(L > t), and of P(residual > t), over each piece of the time.
    alive = -np.diff(more) / width
    residual = (more[1:] + more[:-1]) / 2 / mean
    mean_residual = float((residual * width).sum())
    full = room < share
    steps = np.where(full, np.maximum(share * mean - running * mean_residual, 0.0) / running, 0.0)
    decode = decode_step(shape, layout, running, mean_context(work), device)
    # The last phase: of n requests at its start each still runs with probability q, some run with
    # probability 1 - (1 - q)^n, and then n q divided by that on average.
    chance = np.where(full[..., None], residual, alive)
    some = 1 - (1 - chance) ** running[..., None]
    left = np.where(some > 0, running[..., None] * chance / np.maximum(some, 1e-300), 1.0)
    rest = np.maximum(lengths[None] - middle[:, None], 0.0)
    age = (rest**2).mean(1) / (2 * np.maximum(rest.mean(1), 1e-300))
    context_tokens = work.prompt_tokens + middle + np.where(full[..., None], age, 0.0)
    wide = CandidateLayout(tp=np.asarray(layout.tp)[..., None], ep=np.asarray(layout.ep)[..., None])
    tail = decode_step(shape, wide, left, context_tokens, device).map_parts(
        lambda part: (width * some * part).sum(-1)
    )
    prefill = _prefill(shape, layout, work, np.ceil(share / work.group_size), device)
    never = TimeBreakdown(bandwidth_s=np.where(room > 0, 0.0, np.inf))
    return prefill + decode.map_parts(lambda part: steps * part) + tail + never


def _edges(lengths: Array) -> Array:
    """Return times from 0 to the longest length, closer together where responses end:
    ``[points]``."""
    marks = np.quantile(lengths, np.linspace(0, 1, LENGTH_POINTS // 2))
    grid = np.linspace(0, lengths[-1], LENGTH_POINTS // 2)
    return np.unique(np.concatenate([[0.0], marks, grid]))


def decode_step(
    shape: ModelShape, layout: CandidateLayout, running: Any, context: Any, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds for one token of each of ``running`` requests with ``context`` tokens.

    All used weights and the whole KV cache are read once; of ``E`` routed experts, ``running``
    tokens with ``k`` experts each use ``E (1 - (1 - k / E)^running)`` on average.
    """
    tp, ep = np.asarray(layout.tp), np.asarray(layout.ep)
    met: Any = 1.0
    if shape.experts:
        # Tokens of all replicas that share the experts use them together.
        met = 1 - (1 - shape.active_experts / shape.experts) ** (running * ep)
    shared = float(shape.shared_parameters.sum()) + shape.embedding_parameters
    routed = float(shape.expert_parameters.sum())
    weights = shape.dtype_bytes * (shared / tp + met * routed / (tp * ep))
    flops = running * shape.forward_flops(0.0) / tp
    scores = running * shape.layers * shape.score_flops(context) / tp
    cache_bytes = running * context * kv_bytes_per_token(shape, tp)
    # Attention comes after one matrix product and before the next: the two do not overlap.
    (compute, bandwidth), (more, reading) = (
        device.roofline(flops, weights),
        device.roofline(scores, cache_bytes),
    )
    exchange = _layer_communication(
        shape, shape.layers, int(shape.sparse.sum()), tp, ep, running, device
    )
    overhead = shape.layers * device.layer_overhead_s
    return TimeBreakdown(compute + more, bandwidth + reading, exchange, overhead_s=overhead)


def _prefill(
    shape: ModelShape,
    layout: CandidateLayout,
    work: GenerationWorkload,
    prompts: Any,
    device: GpuDevice,
) -> TimeBreakdown:
    """Return the seconds to process prompts, in pieces that fill the GPU: bound by arithmetic."""
    tokens = prompts * work.prompt_tokens
    # Only the last token of each prompt needs logits.
    flops = tokens * (shape.forward_flops(work.prompt_tokens / 2) - shape.head_flops)
    hidden = tokens * shape.hidden * shape.dtype_bytes
    reduce = hardware.all_reduce_seconds(device.group_link(layout.tp, 1), layout.tp, hidden)
    return TimeBreakdown(device.roofline(flops / layout.tp, 0.0)[0], 0.0, 2 * shape.layers * reduce)


def switch_seconds(
    shape: ModelShape, layout: CandidateLayout, work: Workload, device: GpuDevice
) -> Seconds:
    """Return the seconds to load a stage's weights and optimizer states from the host and offload
    them.

    Each GPU has its own link to the host; activations, gradients and caches are discarded.
    """
    memory = stage_memory(shape, layout, work)
    return 2 * device.host.send_seconds(memory.weights + memory.optimizer)


def sync_seconds(
    shape: ModelShape, source: GpuDevice, target: GpuDevice, relay: tuple[LinkModel, ...] = ()
) -> float:
    """Return the seconds to move the weights from GPUs of one kind to GPUs of another.

    One node sends each byte once, over ``relay`` (hosts, a shared filesystem) if the two have no
    connection; the target's nodes forward pieces to each other, which costs only latency.
    """
    ways = (source.inter, *relay, target.inter, target.intra)
    size = float(shape.parameters * shape.dtype_bytes)
    return hardware.path_seconds(ways, size, SYNC_CHUNK_BYTES)
