"""What a simulation adds to a plan's plain work; all of it is off by default."""

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


class DecodingReplica(Section):
    """A worker of a decoding stage on one kind of GPU."""

    gpus: int = Field(default=1, ge=1)
    """GPUs of one worker (tensor parallel)."""
    slots: int = Field(default=256, ge=1)
    """Samples it runs at once; the others wait for a slot."""
    fixed_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a decoding step with all slots in use that does not shrink with fewer of them:
    reading the weights, launching kernels."""


class LengthDistribution(Section):
    """Samples of unequal length: the workers of a stage do not finish together.

    Relative lengths have mean 1, from a lognormal distribution cut at ``longest``, or drawn from
    the measured ones in ``empirical``.
    """

    stage: str = "rollout"
    samples: int = Field(ge=1)
    """Samples of one iteration."""
    sigma: float = Field(default=0.8, ge=0, le=10)
    """Standard deviation of the logarithm of a length; 0: all are equal."""
    longest: float = Field(default=4.0, gt=1, allow_inf_nan=False)
    """The limit on new tokens, in mean lengths."""
    empirical: tuple[Positive, ...] = ()
    """Measured lengths in any unit, instead of the lognormal ones; without those of nothing."""
    replicas: dict[str, DecodingReplica] = {}
    """By kind of GPU; the defaults of ``DecodingReplica`` for a kind that is left out."""
    profiled: bool = True
    """Whether the measured speed of the stage includes its tail already. Then times are scaled so
    that the mean duration is the measured one; otherwise, so that equal lengths take it."""


class Stragglers(Section):
    """GPUs that are slower for a while."""

    per_gpu_hour: float = Field(gt=0)
    """How often a GPU begins to be slow."""
    factor: float = Field(default=2.0, ge=1)
    """How many times longer its work takes."""
    mean_s: float = Field(default=600.0, gt=0)
    """Mean of how long it stays slow (exponential)."""
    balanced: frozenset[str] = frozenset({"rollout"})
    """Stages whose workers take samples as they get done; in others the slowest GPU sets the
    pace of all."""


class QueueWaits(Section):
    """Waits before a job starts; without it jobs start at once."""

    spread: Literal["none", "exponential"] = "exponential"
    """``none``: every wait is that of its kind; ``exponential``: that is the mean."""


class JobInterruptions(Section):
    """Preemption and node failures: a Poisson process for each job, by kind of GPU.

    The job waits in the queue again (``Queue``) and its pool stands still meanwhile.
    """

    per_hour: dict[str, NotNegative] = {}
    """By kind, instead of the ``interruptions_per_hour`` of the problem."""
    redo: Literal["micro-batch", "iteration"] = "micro-batch"
    """What is done again after a loss during work: the micro-batch, or the whole iteration in all
    pools."""


class Walltime(Section):
    """Jobs end after a limit and are followed by new ones.

    A pool begins no micro-batch that would not end within its lease.
    """

    limit_s: float = Field(gt=0)
    lead_s: float = Field(default=0.0, ge=0)
    """How long before the end the next job is submitted; 0: once the old one has ended. For some
    time both may be held."""

    @model_validator(mode="after")
    def _ends(self) -> Walltime:
        if self.lead_s >= self.limit_s:
            raise ValueError("lead_s must be below limit_s, or no job would come to its end")
        return self


class NetworkModel(Section):
    """Transfers that take time and share the network; without it only ``sync_s`` counts.

    A flow of ``n`` bytes takes ``latency_s`` and then ``n / bandwidth``; flows at the same time
    share what the GPUs of their pools and the fabric can carry, max-min fairly.
    """

    latency_s: float = Field(default=10e-6, ge=0)
    gpu_bytes_per_s: dict[str, Positive]
    """By kind: what one GPU's network card carries, in each direction."""
    fabric_bytes_per_s: float | None = Field(default=None, gt=0)
    """What all flows together cannot exceed (bisection bandwidth); None: no limit."""
    payload: dict[str, dict[str, NotNegative]] = {}
    """``payload[source][target]``: bytes of one iteration from stage to stage; 0 if left out."""
    weights_bytes: float | None = Field(default=None, ge=0)
    """Bytes of new weights that the target pool takes in; None: ``sync_s`` of the problem."""


class Scenario(Section):
    """Everything off: pools work at their measured speed and nothing is lost or late."""

    capacity: int | None = Field(default=None, ge=1)
    """Micro-batches a channel between pools holds before the sender waits; None: any number."""
    startup_s: float = Field(default=0.0, ge=0)
    """From the start of a job to its first work: processes, weights, compilation."""
    lengths: LengthDistribution | None = None
    stragglers: Stragglers | None = None
    queue: QueueWaits | None = None
    losses: JobInterruptions | None = None
    walltime: Walltime | None = None
    network: NetworkModel | None = None


def check_scenario(scenario: Scenario, stages: Collection[str], kinds: Collection[str]) -> None:
    """See that a scenario speaks of stages and kinds of a problem alone.

    Raises:
        PlanError: names the key of the first that is none, and the nearest that is.
    """
    for key, what, name in _named(scenario):
        known = stages if what == "stage" else kinds
        if name not in known:
            raise PlanError(f"{key}: no {what} {name!r}{did_you_mean(name, known)}")


def _named(scenario: Scenario) -> Iterator[tuple[str, str, str]]:
    """Keys, and the stages and kinds that they name."""
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
    """Random numbers of one purpose and thing, the same whatever else happens."""
    return np.random.default_rng(np.random.SeedSequence([seed, PURPOSES.index(purpose), *ids]))
