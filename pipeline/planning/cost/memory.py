"""Predicts the memory per GPU of a stage with a parallel layout.

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
"""Bytes: a number, or an array if the :class:`CandidateLayout` has arrays of many layouts."""

PREFILL_TOKENS = 8192
"""Maximum tokens of an engine's prefill chunk (close to vLLM's default)."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of a GPU by purpose, on the pipeline stage with the highest total."""

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
    """Return the bytes per GPU.

    For generation, this is the minimum: the KV cache of only one request, of maximum length. The
    remaining memory determines the number of running requests (:func:`running_requests`).
    """
    if isinstance(work, TrainingWorkload):
        by_stage = training_memory(shape, split_pipeline(shape, layout.pp), layout, work)
        return _worst_stage(by_stage)
    if isinstance(work, InferenceWorkload):
        return _inference(shape, layout, work)
    return _generation(shape, layout, work)


def training_memory(
    shape: ModelShape, stages: PipelineStages, layout: CandidateLayout, work: TrainingWorkload
) -> MemoryBreakdown:
    """Return the memory of each pipeline stage: ``[..., stages]``.

    Pipeline stage ``s`` has ``pp - s`` micro-batches in flight, or fewer if the optimizer step has
    fewer. With ZeRO 3, two layers are unsharded: the current one, and the prefetched next one.
    Of offloaded optimizer states, those of the embedding stay on the GPU unless the limit is 0.
    """
    tp, dp, ep, size = (_column(v) for v in (layout.tp, layout.dp, layout.ep, layout.micro_batch))
    shared, routed = stages.shared / tp, stages.routed / (tp * ep)
    shards = work.shards(dp)
    unsharded, sharded = shared + routed, shared / shards + routed * ep / shards

    def state_bytes(bytes_per_parameter: float, min_zero: int) -> Array:
        return bytes_per_parameter * (sharded if work.zero >= min_zero else unsharded)

    weights = state_bytes(work.state.weights, 3)
    if work.zero == 3:
        largest = float((shape.shared_parameters + shape.expert_parameters).max())
        weights = weights + 2 * work.state.weights * largest / tp * (shards > 1)
    in_flight = np.minimum(-(-work.samples // (dp * size)), layout.pp - stages.first_index)
    # The gradient of the logits has the size of the logits.
    bytes_per_token = stages.head * (shape.head_activation_bytes + FLOAT32 * shape.vocab)
    if layout.recompute == "full":
        input_bytes = float(shape.activation_bytes("full").max())
        # All activations of the layer that is being recomputed are in memory.
        bytes_per_token = bytes_per_token + stages.largest_activation_bytes
        bytes_per_token = bytes_per_token + in_flight * stages.layers * input_bytes
    else:
        bytes_per_token = bytes_per_token + in_flight * stages.activation_bytes
    tokens = size * max(work.longest, work.tokens)
    optimizer = state_bytes(work.state.optimizer, 1)
    if work.optimizer_limit_bytes is not None:
        min_on_device = work.state.optimizer * shape.embedding_parameters / tp / shards
        limit = work.optimizer_limit_bytes
        optimizer = np.minimum(optimizer, np.maximum(limit, min_on_device * (limit > 0)))
    return MemoryBreakdown(
        weights, state_bytes(work.state.gradients, 2), optimizer, bytes_per_token * tokens / tp
    )


def _inference(
    shape: ModelShape, layout: CandidateLayout, work: InferenceWorkload
) -> MemoryBreakdown:
    """Return the memory of the weights, plus the larger of one layer's activations and logits."""
    tp, ep, micro_batch = (_column(value) for value in (layout.tp, layout.ep, layout.micro_batch))
    stages = split_pipeline(shape, layout.pp)
    tokens = micro_batch * max(work.longest, work.tokens)
    bytes_per_token = np.maximum(
        stages.largest_activation_bytes, stages.head * shape.head_activation_bytes
    )
    weights = shape.dtype_bytes * (stages.shared / tp + stages.routed / (tp * ep))
    return _worst_stage(MemoryBreakdown(weights, activations=bytes_per_token * tokens / tp))


def _generation(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload
) -> MemoryBreakdown:
    longest = work.prompt_tokens + float(work.lengths.max())
    activation_bytes = shape.activation_bytes().max() * PREFILL_TOKENS
    activation_bytes = activation_bytes + FLOAT32 * shape.vocab * work.max_running
    stage = split_pipeline(shape, 1)
    weights = stage.shared[0] / layout.tp + stage.routed[0] / (layout.tp * layout.ep)
    zeros = 0.0 * np.asarray(layout.gpus)  # with the shape of the layouts
    return MemoryBreakdown(
        weights=shape.dtype_bytes * weights + zeros,
        activations=activation_bytes / layout.tp + zeros,
        kv_cache=longest * kv_bytes_per_token(shape, layout.tp) + zeros,
    )


def mean_context(work: GenerationWorkload) -> float:
    """Return the mean number of tokens of a running request: its prompt and its response so far.

    A response of length L runs for L steps and is half complete on average, so the mean length so
    far is ``E[L^2] / (2 E[L])`` (the mean age in renewal theory).
    """
    lengths = work.lengths
    return work.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))


def kv_bytes_per_token(shape: ModelShape, tp: Any) -> Any:
    """Return the KV cache bytes of a token on one GPU; a GPU has at least one key-value head."""
    heads = np.maximum(shape.kv_heads / np.asarray(tp), 1.0)
    return 2.0 * shape.layers * heads * shape.head_dim * shape.dtype_bytes


def running_requests(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> Any:
    """Return the number of requests of mean length that a replica runs concurrently, float64: at
    most the engine's limit; 0 if a request of maximum length does not fit."""
    minimum = _generation(shape, layout, work)
    free_bytes = device.usable_bytes - minimum.weights - minimum.activations
    bytes_per_request = mean_context(work) * kv_bytes_per_token(shape, layout.tp)
    count = np.clip(np.floor(free_bytes / bytes_per_request), 1, work.max_running)
    return np.where(free_bytes >= minimum.kv_cache, count, 0.0)


def _column(value: Any) -> Array:
    """Add an axis for pipeline stages after the layouts' axes."""
    return np.asarray(value)[..., None]


def _worst_stage(stages: MemoryBreakdown) -> MemoryBreakdown:
    parts = np.broadcast_arrays(*vars(stages).values())
    worst = np.argmax(sum(parts), axis=-1)[..., None]
    return MemoryBreakdown(*(np.take_along_axis(part, worst, -1)[..., 0] for part in parts))


def _gib(value: float) -> str:
    return f"{value / GIB:.1f} GiB"
