"""What a stage has to do in one iteration."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from rlinf.errors import PlanError

Array = np.ndarray


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter that training keeps: by default bfloat16 with Adam in float32."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Adam's two moments and the float32 copy of the weights (Rajbhandari et al. 2020, arXiv
    1910.02054, section 3.1: 12 bytes)."""


@dataclass(frozen=True)
class TrainingWorkload:
    """Optimizer steps over sequences."""

    samples: int
    """Sequences of one optimizer step."""
    tokens: int
    """Mean length of a sequence."""
    longest: int = 0
    """Longest sequence, which memory must hold; 0: the mean."""
    steps: int = 1
    """Optimizer steps of one iteration."""
    zero: int = 1
    """What data-parallel replicas share: 0 nothing, 1 optimizer states, 2 also gradients, 3 also
    weights (FSDP)."""
    state: StateBytes = StateBytes()
    copies: int = 1
    """Whole copies of what is shared out, each over as many of the replicas (hybrid sharding); they
    divide the replicas, and one replica is one copy."""
    state_on_device: float | None = None
    """Bytes of optimizer states that are on the device at once, at most; the others wait in the
    host's memory. None: all stay."""

    def shards(self, replicas: Array | int) -> Array:
        """Over how many of the data-parallel replicas a copy is shared out."""
        return np.maximum(1, np.asarray(replicas) // self.copies)

    def __post_init__(self) -> None:
        _positive(self, "samples", "tokens", "steps", "copies")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero stage {self.zero}: there are 0, 1, 2 and 3")


@dataclass(frozen=True)
class InferenceWorkload:
    """One forward pass over sequences: log-probs of a policy, values, model rewards."""

    samples: int
    tokens: int
    longest: int = 0

    def __post_init__(self) -> None:
        _positive(self, "samples", "tokens")


@dataclass(frozen=True)
class GenerationWorkload:
    """Responses to prompts with continuous batching."""

    lengths: Array
    """Response lengths in tokens ``[n]``, a sample of what is expected; order does not matter."""
    samples: int
    """Responses of one iteration."""
    prompt_tokens: int
    """Mean length of a prompt."""
    group_size: int = 1
    """Responses per prompt; the prompt's keys and values are computed once for them."""
    max_running: int = 256
    """Most requests an engine runs at once."""

    def __post_init__(self) -> None:
        _positive(self, "samples", "prompt_tokens", "group_size", "max_running")
        lengths = np.asarray(self.lengths, dtype=np.float64)
        if lengths.ndim != 1 or not len(lengths) or not np.all(np.isfinite(lengths)):
            raise PlanError("response lengths must be a list of numbers, at least one")
        if lengths.min() < 1:
            raise PlanError(f"a response of {lengths.min():g} tokens; each has at least one")
        object.__setattr__(self, "lengths", lengths)


Workload = TrainingWorkload | InferenceWorkload | GenerationWorkload


def _positive(work: object, *names: str) -> None:
    for name in names:
        if getattr(work, name) < 1:
            raise PlanError(f"{type(work).__name__}: {name} is {getattr(work, name)}; at least 1")
