"""Build a profile from trials: repeats become medians with intervals, failures stay failures."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from pipeline.planning.profile.device_kinds import DeviceKind
from pipeline.planning.profile.measurement import StageTiming, Trial
from pipeline.planning.profile.schema import (
    KindProfile,
    MeasuredLink,
    Measurement,
    MemoryLocation,
    Overhead,
    ProfilePoint,
    QueueWait,
    ResponseLengths,
    WaitHistory,
)
from stages.flow import Flow, on_policy

MOST_LENGTHS = 2000
QUANTILES = (0.1, 0.5, 0.9)


def build_kind_profile(
    kind: DeviceKind,
    trials: Sequence[Trial],
    waits: Iterable[QueueWait],
    alone: Sequence[Overhead] = (),
    flow: Flow = on_policy,
) -> KindProfile:
    """Build the profile of a kind from its trials, of which at least one has a sample.

    Args:
        alone: overheads that were measured with separate stage jobs.
    """
    return KindProfile(
        partition=kind.partition,
        gpu_type=kind.gpu_type,
        devices_per_node=kind.devices_per_node,
        duty_cycle=kind.duty_cycle,
        hosts=tuple(sorted({host for trial in trials for host in trial.hosts})),
        memory=memory_location(trials),
        points=tuple(point for trial in trials for point in points(trial, flow)),
        overheads=(*overheads(trials), *alone),
        links=tuple(links(trials)),
        waits=tuple(waits),
    )


def memory_location(trials: Sequence[Trial]) -> MemoryLocation | None:
    """Return where a kind's memory peaks were measured: on the device if any process used one."""
    locations = {trial.memory for trial in trials} - {None}
    return "device" if "device" in locations else next(iter(locations), None)


def points(trial: Trial, flow: Flow = on_policy) -> list[ProfilePoint]:
    """Return the measured points of a trial; single-process stages only if it has one process."""
    groups: dict[tuple[str, int, int | None], list[StageTiming]] = defaultdict(list)
    for sample in trial.samples:
        if trial.processes == 1 or not flow.all_stages[sample.stage].single_process:
            groups[sample.stage, sample.samples, sample.token_budget].append(sample)
    return [_point(trial, group) for group in groups.values()]


def _point(trial: Trial, group: Sequence[StageTiming]) -> ProfilePoint:
    first = group[0]
    shared: dict[str, Any] = {
        "stage": first.stage,
        "nodes": trial.nodes,
        "processes": trial.processes,
        "samples": first.samples,
        "token_budget": first.token_budget,
    }
    ran = [sample for sample in group if not sample.failure]
    if not ran:
        return ProfilePoint(tokens=0, failure=first.failure, **shared)
    cold = [sample for sample in ran if sample.cold]
    # A stage that ran only once has no warm time, so its cold time is used.
    warm = [sample for sample in ran if not sample.cold] or cold
    names = {name for sample in warm for name in sample.parts_s}
    return ProfilePoint(
        tokens=round(statistics.fmean(sample.tokens for sample in ran)),
        time=Measurement.of([sample.seconds for sample in warm]),
        cold=Measurement.of([sample.seconds for sample in cold]) if cold else None,
        parts_s={
            name: statistics.median(sample.parts_s.get(name, 0.0) for sample in warm)
            for name in sorted(names)
        },
        peak_memory_bytes=max(sample.peak_memory_bytes for sample in ran),
        **shared,
    )


def overheads(trials: Sequence[Trial]) -> list[Overhead]:
    """Return the overheads of trials. Of a submission only the fastest counts, because others
    waited for nodes."""
    found = []
    for trial in trials:
        for name, seconds in trial.overheads_s.items():
            counted = [min(seconds)] if name == "submission" else seconds
            where = {"nodes": trial.nodes, "processes": trial.processes}
            found.append(Overhead.of(counted, name=name, **where))
    return found


def links(trials: Sequence[Trial]) -> list[MeasuredLink]:
    """Return one link of each path: the one measured with the fewest processes."""
    found: dict[str, MeasuredLink] = {}
    for trial in sorted(trials, key=lambda trial: (trial.nodes, trial.processes)):
        for link in trial.links:
            found.setdefault(link.path, link)
    return list(found.values())


def lengths(trials: Iterable[Trial], horizon: int) -> ResponseLengths | None:
    """Return the response lengths of the trial with the most; None if no full batch was rolled
    out."""
    best = max(trials, key=lambda trial: len(trial.lengths), default=None)
    if best is None or not best.lengths:
        return None
    every = np.sort(np.concatenate([np.asarray(part, np.int64) for part in best.lengths]))
    kept = every
    if len(every) > MOST_LENGTHS:
        kept = every[np.linspace(0, len(every) - 1, MOST_LENGTHS).round().astype(int)]
    return ResponseLengths(
        samples=tuple(int(length) for length in kept),
        count=len(every),
        truncated_share=best.truncated / len(every),
        horizon=horizon,
    )


def build_queue_wait(
    nodes: int, expected_s: float | None, past: Sequence[tuple[int, float]]
) -> QueueWait:
    """Return the expected wait, from past jobs with half to twice as many nodes."""
    like = [seconds for size, seconds in past if nodes <= 2 * size and size <= 2 * nodes]
    history = None
    if like:
        q10, q50, q90 = (float(q) for q in np.quantile(like, QUANTILES))
        history = WaitHistory(jobs=len(like), q10_s=q10, q50_s=q50, q90_s=q90)
    return QueueWait(nodes=nodes, test_only_s=expected_s, history=history)
