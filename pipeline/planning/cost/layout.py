"""Parallel layouts: tensor, pipeline, data and expert parallelism, and the possible combinations.

Ranks are counted tensor parallel first, then data (with expert) parallel, pipeline last, so that
tensor-parallel groups stay within a node (Narayanan et al. 2021, arXiv 2104.04473, section 3.2).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from pipeline.planning.cost.model_shape import RECOMPUTE, ModelShape, Recompute
from pipeline.planning.cost.workload import GenerationWorkload, TrainingWorkload, Workload

Array = np.ndarray
Count = Any
"""A whole number, or an int64 array of whole numbers."""

MICRO_BATCHES = (1, 2, 4, 8, 16)
"""Micro-batches to try, in samples."""
MAX_EXHAUSTIVE_REPLICAS = 64
"""Up to this limit every number of replicas is tried. Above this limit, a number is tried only if
it reduces the work of the slowest replica, because further sharding of states saves very little."""


@dataclass(frozen=True)
class CandidateLayout:
    """One or many parallel layouts: fields other than ``pp`` and ``recompute`` may be arrays of the
    same shape."""

    tp: Count = 1
    """Tensor parallel: number of processes that share each matrix."""
    pp: int = 1
    """Pipeline parallel: number of pipeline stages, each of consecutive layers."""
    dp: Count = 1
    """Data parallel: number of replicas."""
    ep: Count = 1
    """Expert parallel: number of replicas that share one set of routed experts."""
    micro_batch: Count = 1
    """Samples per replica and forward pass."""
    recompute: Recompute = "selective"
    """Activation recomputation; see :data:`pipeline.planning.cost.model_shape.RECOMPUTE`."""

    @property
    def gpus(self) -> Count:
        """The number of GPUs, each of which has one process."""
        return self.tp * self.pp * self.dp

    def select(self, index: Any) -> CandidateLayout:
        """Return the layouts that an index or mask selects; one index gives plain numbers."""
        columns = np.broadcast_arrays(self.tp, self.dp, self.ep, self.micro_batch)
        selected = [column[index] for column in columns]
        tp, dp, ep, micro = (int(value) if np.ndim(value) == 0 else value for value in selected)
        return replace(self, tp=tp, dp=dp, ep=ep, micro_batch=micro)

    def __str__(self) -> str:
        parts = [f"tp {self.tp}", f"pp {self.pp}", f"dp {self.dp}"]
        if np.any(self.ep != 1):
            parts.append(f"ep {self.ep}")
        return ", ".join([*parts, f"micro-batch {self.micro_batch}", f"recompute {self.recompute}"])


@dataclass(frozen=True)
class PipelineStages:
    """The pipeline stages of a model. Equal stages share one entry of the arrays.

    The embedding is on the first stage; the last norm and the head are on the last stage. If the
    embedding is tied and these stages differ, the last stage has a copy of it.
    """

    first_index: Array
    """Index of the first of the equal stages, int64."""
    multiplicity: Array
    """Number of equal stages, int64."""
    layers: int
    """Number of layers of each stage."""
    shared: Array
    """Parameters that every token uses."""
    routed: Array
    """Parameters of routed experts."""
    flops: Array
    """FLOPs of the layers' matmuls in the forward pass, per token."""
    head: Array
    """1 for the stage with the head, else 0."""
    sparse: Array
    """Number of layers with experts."""
    activation_bytes: Array
    """Bytes per token that all layers store for backward, if attention scores are recomputed."""
    largest_activation_bytes: Array
    """Bytes per token that the largest layer stores for backward."""


@functools.lru_cache(maxsize=256)
def split_pipeline(shape: ModelShape, pp: int) -> PipelineStages:
    """Split the layers into ``pp`` equal pipeline stages; ``pp`` must divide their number."""
    shared = shape.shared_parameters.reshape(pp, -1).sum(1).astype(np.float64)
    shared[0] += shape.embeddings * shape.embedding_parameters
    shared[-1] += shape.hidden + shape.head_parameters
    if shape.tied and pp > 1:
        shared[-1] += shape.embedding_parameters
    activations = shape.activation_bytes().reshape(pp, -1)
    columns = [
        shared,
        shape.expert_parameters.reshape(pp, -1).sum(1),
        shape.layer_flops.reshape(pp, -1).sum(1),
        np.arange(pp) == pp - 1,
        shape.sparse.reshape(pp, -1).sum(1),
        activations.sum(1),
        activations.max(1),
    ]
    table = np.stack(columns, axis=1).astype(np.float64)
    table, first_index, counts = np.unique(table, axis=0, return_index=True, return_counts=True)
    return PipelineStages(first_index, counts, shape.layers // pp, *table.T)


def candidate_layouts(
    shape: ModelShape, work: Workload, gpus: int, gpus_per_node: int
) -> Iterator[CandidateLayout]:
    """Yield the useful layouts on up to ``gpus`` GPUs, in batches with the same ``pp`` and
    ``recompute``.

    ``tp`` divides the heads, ``gpus_per_node`` and the key-value heads (or is a multiple of the
    latter); ``pp`` divides the layers; ``ep`` divides experts and replicas. Every replica has at
    least one sample. Generation has no pipeline.
    """
    is_generation = isinstance(work, GenerationWorkload)
    for pp in [1] if is_generation else _divisors(shape.layers):
        tp, dp, ep, micro_batch = _layout_columns(
            shape, pp, gpus, gpus_per_node, work.samples, (1,) if is_generation else MICRO_BATCHES
        )
        if len(tp):
            for recompute in RECOMPUTE if isinstance(work, TrainingWorkload) else RECOMPUTE[:1]:
                yield CandidateLayout(tp, pp, dp, ep, micro_batch, recompute)


@functools.lru_cache(maxsize=1024)
def _layout_columns(
    shape: ModelShape,
    pp: int,
    gpus: int,
    gpus_per_node: int,
    samples: int,
    micro_batches: tuple[int, ...],
) -> Array:
    """Return ``tp``, ``dp``, ``ep`` and micro-batch of every layout: int64 ``[4, n]``."""
    replicas = _replicas(samples)
    layouts = [np.empty((4, 0), dtype=np.int64)]
    for tp in _divisors(shape.heads):
        if tp > gpus_per_node or gpus_per_node % tp:
            continue
        if shape.kv_heads % tp and tp % shape.kv_heads:
            continue
        dp, ep, size = np.meshgrid(
            replicas[replicas <= gpus // (tp * pp)],
            _divisors(shape.experts) if shape.experts else [1],
            micro_batches,
        )
        # A micro-batch larger than a replica's samples is equivalent to a smaller one.
        valid = (dp % ep == 0) & ((size == 1) | (-(-samples // dp) >= size))
        layouts.append(np.stack([np.full(valid.sum(), tp), dp[valid], ep[valid], size[valid]]))
    return np.concatenate(layouts, axis=1)


def _replicas(samples: int) -> Array:
    """Return the useful numbers of replicas, ascending."""
    numbers = np.arange(1, samples + 1)
    share = -(-samples // numbers)
    reduces_work = share < np.append(samples + 1, share[:-1])
    return numbers[(numbers <= MAX_EXHAUSTIVE_REPLICAS) | reduces_work]


def _divisors(number: int) -> list[int]:
    return [i for i in range(1, number + 1) if number % i == 0]
