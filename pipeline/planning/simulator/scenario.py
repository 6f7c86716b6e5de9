"""Scenarios: disturbances that a simulation adds to a plan; all are off by default."""

from __future__ import annotations

from pydantic import Field

from rlinf.config import Section


class LengthDistribution(Section):
    """Samples of unequal length, so that some workers of a stage end later than others.

    Relative lengths have mean 1. They are drawn from a lognormal distribution cut at ``longest``.
    The measured duration of the stage is the mean of the simulated durations.
    """

    stage: str = "rollout"
    samples: int = Field(ge=1)
    """Samples of one iteration."""
    sigma: float = Field(default=0.8, ge=0, le=10)
    """Standard deviation of the logarithm of a length; 0: all lengths are equal."""
    longest: float = Field(default=4.0, gt=1, allow_inf_nan=False)
    """Maximum length (the limit on new tokens), as a multiple of the mean length."""


class StragglerModel(Section):
    """GPUs that are slow for a while. In a stage without inputs (the rollout), workers fetch work
    whenever they are free; in other stages the slowest GPU determines the speed."""

    per_gpu_hour: float = Field(gt=0)
    """Number of times that a GPU becomes slow, per hour."""
    factor: float = Field(default=2.0, ge=1)
    """Factor by which work takes longer while the GPU is slow."""
    mean_s: float = Field(default=600.0, gt=0)
    """Mean duration of a slow phase (exponential)."""


class Scenario(Section):
    """The disturbances of a simulation; by default none, so pools work at their measured speed."""

    startup_s: float = Field(default=0.0, ge=0)
    """Seconds from the start of a job to its first work: processes, weights, compilation."""
    lengths: LengthDistribution | None = None
    stragglers: StragglerModel | None = None
    queue: bool = False
    """True if jobs wait in the queue: exponential, with the kind's expected wait as the mean."""
    losses: bool = False
    """True if jobs are preempted or fail as often as the problem expects (Poisson). The job waits
    in the queue again, and its pool repeats the current chunk."""
    walltime_s: float | None = Field(default=None, gt=0)
    """Time limit of a job, seconds; a job that ends is followed by a new one. None: no limit."""
