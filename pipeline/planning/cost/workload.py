"""Workloads: the work of a stage in one iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.errors import PlanError

Array = np.ndarray


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter in training: by default bfloat16 with Adam in float32."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Adam's two moments and the float32 copy of the weights (Rajbhandari et al. 2020, arXiv
    1910.02054, section 3.1: 12 bytes)."""


@dataclass(frozen=True)
class TrainingWorkload:
    """Training of one iteration: optimizer steps over sequences."""

    samples: int
    """Sequences per optimizer step."""
    tokens: int
    """Mean length of a sequence, in tokens."""
    longest: int = 0
    """Longest sequence, which determines the memory; 0: the mean."""
    steps: int = 1
    """Optimizer steps per iteration."""
    zero: int = 1
    """ZeRO stage: data-parallel replicas shard nothing (0), optimizer states (1), also gradients
    (2), also weights (3, FSDP)."""
    state: StateBytes = StateBytes()
    copies: int = 1
    """Number of complete copies of the states (hybrid sharding); the replicas are divided equally,
    and each part shards one copy."""
    optimizer_limit_bytes: float | None = None
    """Maximum bytes of optimizer states on a device at a time; the others are in host memory. None:
    nothing is offloaded."""

    def shards(self, replicas: Array | int) -> Array:
        """Return the number of replicas over which each copy of the states is sharded."""
        return np.maximum(1, np.asarray(replicas) // self.copies)

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "tokens", "steps", "copies")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero stage {self.zero}: there are 0, 1, 2 and 3")


@dataclass(frozen=True)
class InferenceWorkload:
    """A forward pass over all ``samples`` sequences of an iteration: log-probs, values or rewards.
    ``tokens`` and ``longest`` are as in :class:`TrainingWorkload`."""

    samples: int
    tokens: int
    longest: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "tokens")


@dataclass(frozen=True)
class GenerationWorkload:
    """Generation of responses with continuous batching."""

    lengths: Array
    """Examples of response lengths, tokens ``[n]``, in any order."""
    samples: int
    """Responses per iteration."""
    prompt_tokens: int
    """Mean length of a prompt."""
    group_size: int = 1
    """Responses per prompt, which share the prompt's KV cache."""
    max_running: int = 256
    """Maximum number of concurrent requests of an engine."""

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "prompt_tokens", "group_size", "max_running")
        lengths = np.asarray(self.lengths, dtype=np.float64)
        if lengths.ndim != 1 or not len(lengths) or not np.all(np.isfinite(lengths)):
            raise PlanError("response lengths must be a list of numbers, at least one")
        if lengths.min() < 1:
            raise PlanError(f"a response of {lengths.min():g} tokens; each must have at least one")
        object.__setattr__(self, "lengths", lengths)


Workload = TrainingWorkload | InferenceWorkload | GenerationWorkload


def _check_positive(work: object, *names: str) -> None:
    for name in names:
        if getattr(work, name) < 1:
            raise PlanError(f"{type(work).__name__}: {name} is {getattr(work, name)}; at least 1")
