"""Scenarios: disturbances that a simulation adds to a plan; all are off by default."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import Annotated, Literal

import numpy as np
from pydantic import Field, model_validator

from rlinf.config import Section
from rlinf.errors import PlanError, did_you_mean

Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
NotNegative = Annotated[float, Field(ge=0, allow_inf_nan=False)]
PURPOSES = ("lengths", "calibration", "stragglers", "waits", "losses")
"""Purposes of random numbers; each purpose has random generators of its own."""


class DecodingReplica(Section):
    """A worker of a decoding stage on one kind of GPU."""

    gpus: int = Field(default=1, ge=1)
    """GPUs of one worker (tensor parallel)."""
    slots: int = Field(default=256, ge=1)
    """Number of samples that a worker runs concurrently; others wait for a slot."""
    fixed_share: float = Field(default=0.5, ge=0, le=1)
    """Share of the time of a decoding step with full slots that does not depend on the number of
    samples: reading the weights, launching kernels."""


class LengthDistribution(Section):
    """Samples of unequal length, which make workers of a stage finish at different times.

    Relative lengths have mean 1. They are drawn from a lognormal distribution cut at ``longest``,
    or from the measured lengths in ``empirical``.
    """

    stage: str = "rollout"
    samples: int = Field(ge=1)
    """Samples of one iteration."""
    sigma: float = Field(default=0.8, ge=0, le=10)
    """Standard deviation of the logarithm of a length; 0: all lengths are equal."""
    longest: float = Field(default=4.0, gt=1, allow_inf_nan=False)
    """Maximum length (the limit on new tokens), as a multiple of the mean length."""
    empirical: tuple[Positive, ...] = ()
    """Measured lengths above 0, in any unit; empty: lengths are lognormal."""
    replicas: dict[str, DecodingReplica] = {}
    """Workers by kind of GPU; a missing kind uses the defaults of ``DecodingReplica``."""
    profiled: bool = True
    """True if the stage's measured duration includes the tail of long samples, so that it is the
    mean of the simulated durations. False if it was measured with samples of equal length."""


class StragglerModel(Section):
    """GPUs that are slow for a while."""

    per_gpu_hour: float = Field(gt=0)
    """Number of times that a GPU becomes slow, per hour."""
    factor: float = Field(default=2.0, ge=1)
    """Factor by which work takes longer while the GPU is slow."""
    mean_s: float = Field(default=600.0, gt=0)
    """Mean duration of a slow phase (exponential)."""
    balanced: frozenset[str] = frozenset({"rollout"})
    """Stages whose workers fetch work whenever they are free; in other stages the slowest GPU
    determines the speed."""


class QueueWaitModel(Section):
    """Queue waits before a job starts; without them jobs start at once."""

    spread: Literal["none", "exponential"] = "exponential"
    """``none``: waits are equal to the kind's expected wait; ``exponential``: that is the mean."""


class InterruptionModel(Section):
    """Preemptions and node failures: a Poisson process for each job, by kind of GPU.

    The job waits in the queue again (``QueueWaitModel``), and its pool is idle meanwhile.
    """

    per_hour: dict[str, NotNegative] = {}
    """Interruptions by kind, instead of the ``interruptions_per_hour`` of the problem."""
    redo: Literal["micro-batch", "iteration"] = "micro-batch"
    """The work that is repeated after an interruption: the chunk (``micro-batch``), or the whole
    iteration in all pools."""


class Walltime(Section):
    """A time limit of jobs. A job that ends is followed by a new job. A pool begins no chunk that
    would end after its job."""

    limit_s: float = Field(gt=0)
    """Time limit of a job, seconds."""
    lead_s: float = Field(default=0.0, ge=0)
    """The next job is submitted this long before the end of the old job, so that both may have GPUs
    for some time; 0: after the end of the old job."""

    @model_validator(mode="after")
    def _check_lead(self) -> Walltime:
        if self.lead_s >= self.limit_s:
            raise ValueError("lead_s must be below limit_s, or jobs would be replaced at once")
        return self


class NetworkModel(Section):
    """Transfers that take time and share the network; without a model only ``sync_s`` counts.

    A transfer of ``n`` bytes takes ``latency_s`` and then ``n / bandwidth``. Concurrent transfers
    share the bandwidth of their pools' GPUs and of the fabric, max-min fairly.
    """

    latency_s: float = Field(default=10e-6, ge=0)
    gpu_bytes_per_s: dict[str, Positive]
    """Bandwidth of one GPU's network card by kind, in each direction."""
    fabric_bytes_per_s: float | None = Field(default=None, gt=0)
    """Maximum of all transfers together (bisection bandwidth); None: no limit."""
    payload: dict[str, dict[str, NotNegative]] = {}
    """Bytes of one iteration from stage to stage, ``payload[source][target]``; 0 if missing."""
    weights_bytes: float | None = Field(default=None, ge=0)
    """Bytes of new weights that the target pool loads; None: use ``sync_s`` of the problem."""


class Scenario(Section):
    """The disturbances of a simulation; by default none, so pools work at their measured speed."""

    capacity: int | None = Field(default=None, ge=1)
    """Maximum chunks in a channel between pools before the sender waits; None: no limit."""
    startup_s: float = Field(default=0.0, ge=0)
    """Seconds from the start of a job to its first work: processes, weights, compilation."""
    lengths: LengthDistribution | None = None
    stragglers: StragglerModel | None = None
    queue: QueueWaitModel | None = None
    losses: InterruptionModel | None = None
    walltime: Walltime | None = None
    network: NetworkModel | None = None


def check_scenario(scenario: Scenario, stages: Collection[str], kinds: Collection[str]) -> None:
    """Check that a scenario names only stages and kinds of a problem.

    Raises:
        PlanError: the scenario has an unknown name; the message suggests a similar one.
    """
    for key, category, name in _referenced_names(scenario):
        known = stages if category == "stage" else kinds
        if name not in known:
            raise PlanError(f"{key}: no {category} {name!r}{did_you_mean(name, known)}")


def _referenced_names(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Yield key, category (stage or kind) and name of everything that a scenario refers to."""
    if scenario.lengths is not None:
        yield "lengths.stage", "stage", scenario.lengths.stage
        yield from (("lengths.replicas", "kind", kind) for kind in scenario.lengths.replicas)
    slow = scenario.stragglers
    if slow is not None and "balanced" in slow.model_fields_set:
        yield from (("stragglers.balanced", "stage", name) for name in sorted(slow.balanced))
    if scenario.losses is not None:
        yield from (("losses.per_hour", "kind", kind) for kind in scenario.losses.per_hour)
    if scenario.network is not None:
        yield from (
            ("network.gpu_bytes_per_s", "kind", k) for k in scenario.network.gpu_bytes_per_s
        )
        for source, targets in scenario.network.payload.items():
            yield "network.payload", "stage", source
            yield from ((f"network.payload.{source}", "stage", name) for name in targets)


def random_generator(seed: int, purpose: str, *ids: int) -> np.random.Generator:
    """Return an independent random generator for a purpose and for the object with the indices
    ``ids``, such as a pool."""
    return np.random.default_rng(np.random.SeedSequence([seed, PURPOSES.index(purpose), *ids]))
