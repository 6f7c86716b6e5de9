"""Builds a profile from trials: repeats, failures, overheads and response lengths."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.profile.device_kinds import DeviceKind
from pipeline.planning.profile.measurement import StageTiming, Trial
from pipeline.planning.profile.schema import (
    KindProfile,
    Measurement,
    MemoryLocation,
    Overhead,
    ProfilePoint,
    QueueWait,
)
from stages.flow import Flow, on_policy

MAX_LENGTHS = 2000
"""Maximum number of response lengths in a profile."""


def build_kind_profile(
    kind: DeviceKind,
    trials: Sequence[Trial],
    waits: Iterable[QueueWait],
    stage_job_overheads: Sequence[Overhead] = (),
    flow: Flow = on_policy,
) -> KindProfile:
    """Build the profile of a kind from its trials, at least one of which has a timing.

    Args:
        stage_job_overheads: overheads of separate stage jobs.
    """
    return KindProfile(
        partition=kind.partition,
        gpu_type=kind.gpu_type,
        devices_per_node=kind.devices_per_node,
        duty_cycle=kind.duty_cycle,
        memory=memory_location(trials),
        points=tuple(point for trial in trials for point in points(trial, flow)),
        overheads=(*overheads(trials), *stage_job_overheads),
        waits=tuple(waits),
    )


def memory_location(trials: Sequence[Trial]) -> MemoryLocation | None:
    """Return where a kind's memory peaks were measured: on the device if any process used one."""
    locations = {trial.memory for trial in trials} - {None}
    return "device" if "device" in locations else next(iter(locations), None)


def points(trial: Trial, flow: Flow = on_policy) -> list[ProfilePoint]:
    """Return the measured points of a trial. If its job had several processes, stages that always
    run in one process are omitted."""
    timings: dict[tuple[str, int], list[StageTiming]] = defaultdict(list)
    for timing in trial.samples:
        if trial.processes == 1 or not flow.all_stages[timing.stage].single_process:
            timings[timing.stage, timing.samples].append(timing)
    return [_point(trial, repeats) for repeats in timings.values()]


def _point(trial: Trial, repeats: Sequence[StageTiming]) -> ProfilePoint:
    first = repeats[0]
    fields: dict[str, Any] = {
        "stage": first.stage,
        "nodes": trial.nodes,
        "processes": trial.processes,
        "samples": first.samples,
    }
    succeeded = [timing for timing in repeats if not timing.failure]
    if not succeeded:
        return ProfilePoint(failure=first.failure, **fields)
    cold = [timing for timing in succeeded if timing.cold]
    # A stage that ran only once has no warm time, so its cold time is used.
    warm = [timing for timing in succeeded if not timing.cold] or cold
    return ProfilePoint(
        time=Measurement.of([timing.seconds for timing in warm]),
        cold=Measurement.of([timing.seconds for timing in cold]) if cold else None,
        peak_memory_bytes=max(timing.peak_memory_bytes for timing in succeeded),
        **fields,
    )


def overheads(trials: Sequence[Trial]) -> list[Overhead]:
    """Return the overheads of trials. Of ``submission`` only the shortest repeat is used, because
    longer repeats include waiting for nodes."""
    result = []
    for trial in trials:
        for name, seconds in trial.overheads_s.items():
            measured = [min(seconds)] if name == "submission" else seconds
            size = {"nodes": trial.nodes, "processes": trial.processes}
            result.append(Overhead.of(measured, name=name, **size))
    return result


def lengths(trials: Iterable[Trial]) -> tuple[int, ...]:
    """Return the response lengths, ascending, of the trial with the most full-batch rollouts."""
    best = max((trial.lengths for trial in trials), key=len, default=())
    sampled = np.sort(np.array([n for rollout in best for n in rollout], np.int64))
    if len(sampled) > MAX_LENGTHS:
        sampled = sampled[np.linspace(0, len(sampled) - 1, MAX_LENGTHS).round().astype(int)]
    return tuple(int(length) for length in sampled)


def build_queue_wait(
    nodes: int, expected_s: float | None, past_waits: Sequence[tuple[int, float]]
) -> QueueWait:
    """Return the expected wait: ``expected_s`` if known, else the median of the ``past_waits``
    (pairs of nodes and seconds) of jobs with half to twice as many nodes; 0 without any."""
    similar = [s for size, s in past_waits if nodes <= 2 * size and size <= 2 * nodes]
    if expected_s is None:
        expected_s = float(np.median(similar)) if similar else 0.0
    return QueueWait(nodes=nodes, expected_s=expected_s)
