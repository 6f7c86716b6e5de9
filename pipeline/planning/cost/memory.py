"""Memory per GPU of a stage under a layout.

Sources: Rajbhandari et al. 2020 (ZeRO, arXiv 1910.02054, sections 3 and 5) for states and their
sharding; Korthikanti et al. 2022 (arXiv 2205.05198, section 4) for activations with tensor and
sequence parallelism; Narayanan et al. 2021 (arXiv 2104.04473, section 2.2) for the micro-batches in
flight under 1F1B; Kwon et al. 2023 (arXiv 2309.06180) for the paged KV cache.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.planning.cost.hardware import GIB, GpuDevice
from pipeline.planning.cost.layout import CandidateLayout, PipelineStages, split_pipeline
from pipeline.planning.cost.model_shape import FLOAT32, ModelShape
from pipeline.planning.cost.workload import (
    GenerationWorkload,
    InferenceWorkload,
    TrainingWorkload,
    Workload,
)

Array = np.ndarray
Bytes = Any
"""Bytes: a number or an array of the layouts' shape."""

PREFILL_TOKENS = 8192
"""Maximum tokens of a prefill chunk of an engine (vLLM's default is near it)."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of a GPU by purpose; for a pipeline, of the stage that needs most."""

    weights: Bytes = 0.0
    gradients: Bytes = 0.0
    optimizer: Bytes = 0.0
    activations: Bytes = 0.0
    """Activations for the backward pass, and the logits."""
    kv_cache: Bytes = 0.0

    @property
    def total(self) -> Bytes:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache

    def __str__(self) -> str:
        parts = {name: float(value) for name, value in vars(self).items() if np.any(value)}
        return ", ".join(f"{name.replace('_', ' ')} {_gib(value)}" for name, value in parts.items())


def stage_memory(shape: ModelShape, layout: CandidateLayout, work: Workload) -> MemoryBreakdown:
    """Return the bytes per GPU, of the shape of the layouts.

    For generation the KV cache is that of one request of the longest length, the minimum to run.
    The remaining memory determines how many requests run at once (:func:`running_requests`).
    """
    if isinstance(work, TrainingWorkload):
        stages = training_memory(shape, split_pipeline(shape, layout.pp), layout, work)
        return _worst_stage(stages)
    if isinstance(work, InferenceWorkload):
        return _inference(shape, layout, work)
    return _generation(shape, layout, work)


def training_memory(
    shape: ModelShape, stages: PipelineStages, layout: CandidateLayout, work: TrainingWorkload
) -> MemoryBreakdown:
    """Return weights, gradients, optimizer states and activations of each stage: ``[..., stages]``.

    On stage ``s`` there are ``pp - s`` micro-batches in flight, or all if there are fewer. With
    ZeRO stage 3 two layers are complete at a time: the current one and the one being fetched. Of
    offloaded optimizer states at least those of the embedding are on the device at once.
    """
    tp, dp, ep, micro = (_column(v) for v in (layout.tp, layout.dp, layout.ep, layout.micro_batch))
    shared, routed = stages.shared / tp, stages.routed / (tp * ep)
    shards = work.shards(dp)
    mine, divided = shared + routed, shared / shards + routed * ep / shards

    def kept(bytes_each: float, from_stage: int) -> Array:
        return bytes_each * (divided if work.zero >= from_stage else mine)

    weights = kept(work.state.weights, 3)
    if work.zero == 3:
        largest = float((shape.shared_parameters + shape.expert_parameters).max())
        weights = weights + 2 * work.state.weights * largest / tp * (shards > 1)
    in_flight = np.minimum(-(-work.samples // (dp * micro)), layout.pp - stages.number)
    # The gradient of the logits is as large as they are.
    per_token = stages.head * (shape.head_activation_bytes + FLOAT32 * shape.vocab)
    if layout.recompute == "full":
        inputs = float(shape.activation_bytes("full").max())
        # The layer that is recomputed is complete in memory.
        per_token = per_token + stages.largest_activation_bytes
        per_token = per_token + in_flight * stages.layers * inputs
    else:
        per_token = per_token + in_flight * stages.activation_bytes
    tokens = micro * max(work.longest, work.tokens)
    optimizer = kept(work.state.optimizer, 1)
    if work.state_on_device is not None:
        least = work.state.optimizer * shape.embedding_parameters / tp / shards
        most = np.maximum(work.state_on_device, least * (work.state_on_device > 0))
        optimizer = np.minimum(optimizer, most)
    return MemoryBreakdown(
        weights, kept(work.state.gradients, 2), optimizer, per_token * tokens / tp
    )


def _inference(
    shape: ModelShape, layout: CandidateLayout, work: InferenceWorkload
) -> MemoryBreakdown:
    """Return the memory of weights, one layer's activations and the logits."""
    tp, ep, micro = (_column(value) for value in (layout.tp, layout.ep, layout.micro_batch))
    stages = split_pipeline(shape, layout.pp)
    tokens = micro * max(work.longest, work.tokens)
    per_token = np.maximum(
        stages.largest_activation_bytes, stages.head * shape.head_activation_bytes
    )
    weights = shape.dtype_bytes * (stages.shared / tp + stages.routed / (tp * ep))
    return _worst_stage(MemoryBreakdown(weights, activations=per_token * tokens / tp))


def _generation(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload
) -> MemoryBreakdown:
    longest = work.prompt_tokens + float(work.lengths.max())
    passing = shape.activation_bytes().max() * PREFILL_TOKENS
    passing = passing + FLOAT32 * shape.vocab * work.max_running
    whole = split_pipeline(shape, 1)
    weights = whole.shared[0] / layout.tp + whole.routed[0] / (layout.tp * layout.ep)
    zero = 0.0 * np.asarray(layout.gpus)
    return MemoryBreakdown(
        weights=shape.dtype_bytes * weights + zero,
        activations=passing / layout.tp + zero,
        kv_cache=longest * kv_bytes_per_token(shape, layout.tp) + zero,
    )


def mean_context(work: GenerationWorkload) -> float:
    """Return the mean tokens of a running request: its prompt and its response so far.

    A response of length L is present L times as long as one token, half complete on average: the
    mean is ``E[L^2] / (2 E[L])`` (the mean age in renewal theory).
    """
    lengths = work.lengths
    return work.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))


def kv_bytes_per_token(shape: ModelShape, tp: Any) -> Any:
    """Return the KV cache bytes of one token on one GPU; with fewer heads than GPUs, each GPU has
    one."""
    heads = np.maximum(shape.kv_heads / np.asarray(tp), 1.0)
    return 2.0 * shape.layers * heads * shape.head_dim * shape.dtype_bytes


def running_requests(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> Any:
    """Return how many requests of mean length a replica runs at once: at least 1, at most the
    engine's limit; 0 if not even one of the longest fits. float64 of the layouts' shape."""
    least = _generation(shape, layout, work)
    free = device.usable_bytes - least.weights - least.activations
    each = mean_context(work) * kv_bytes_per_token(shape, layout.tp)
    count = np.clip(np.floor(free / each), 1, work.max_running)
    return np.where(free >= least.kv_cache, count, 0.0)


def _column(value: Any) -> Array:
    """Add an axis for pipeline stages after the layouts' axes."""
    return np.asarray(value)[..., None]


def _worst_stage(stages: MemoryBreakdown) -> MemoryBreakdown:
    """Return the stage of ``[..., stages]`` that uses most memory."""
    parts = np.broadcast_arrays(*vars(stages).values())
    worst = np.argmax(sum(parts), axis=-1)[..., None]
    return MemoryBreakdown(*(np.take_along_axis(part, worst, -1)[..., 0] for part in parts))


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
