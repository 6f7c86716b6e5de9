"""Builds a profile from trials: medians and intervals of repeats, failures, mixtures of kinds."""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.plan import StagePlan
from pipeline.planning.profile.device_kinds import DeviceKind
from pipeline.planning.profile.measurement import StageTiming, Trial
from pipeline.planning.profile.schema import (
    KindProfile,
    MeasuredLink,
    Measurement,
    MemoryLocation,
    Mixture,
    Overhead,
    ProfilePoint,
    QueueWait,
    ResponseLengths,
    WaitHistory,
)
from slurm.inventory import Inventory, NodeGroup
from stages.flow import Flow, on_policy

MAX_LENGTHS = 2000
"""Maximum number of response lengths in a profile."""
QUANTILES = (0.1, 0.5, 0.9)
"""Quantiles of past queue waits in a profile."""


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
        hosts=tuple(sorted({host for trial in trials for host in trial.hosts})),
        memory=memory_location(trials),
        points=tuple(point for trial in trials for point in points(trial, flow)),
        overheads=(*overheads(trials), *stage_job_overheads),
        links=tuple(links(trials)),
        waits=tuple(waits),
    )


def memory_location(trials: Sequence[Trial]) -> MemoryLocation | None:
    """Return where a kind's memory peaks were measured: on the device if any process used one."""
    locations = {trial.memory for trial in trials} - {None}
    return "device" if "device" in locations else next(iter(locations), None)


def points(trial: Trial, flow: Flow = on_policy) -> list[ProfilePoint]:
    """Return the measured points of a trial. If its job had several processes, stages that always
    run in one process are omitted."""
    timings: dict[tuple[str, int, int | None], list[StageTiming]] = defaultdict(list)
    for timing in trial.samples:
        if trial.processes == 1 or not flow.all_stages[timing.stage].single_process:
            timings[timing.stage, timing.samples, timing.token_budget].append(timing)
    return [_point(trial, repeats) for repeats in timings.values()]


def _point(trial: Trial, repeats: Sequence[StageTiming]) -> ProfilePoint:
    first = repeats[0]
    fields: dict[str, Any] = {
        "stage": first.stage,
        "nodes": trial.nodes,
        "processes": trial.processes,
        "samples": first.samples,
        "token_budget": first.token_budget,
    }
    succeeded = [timing for timing in repeats if not timing.failure]
    if not succeeded:
        return ProfilePoint(tokens=0, failure=first.failure, **fields)
    cold = [timing for timing in succeeded if timing.cold]
    # A stage that ran only once has no warm time, so its cold time is used.
    warm = [timing for timing in succeeded if not timing.cold] or cold
    names = {name for timing in warm for name in timing.parts_s}
    return ProfilePoint(
        tokens=round(statistics.fmean(timing.tokens for timing in succeeded)),
        time=Measurement.of([timing.seconds for timing in warm]),
        cold=Measurement.of([timing.seconds for timing in cold]) if cold else None,
        parts_s={
            name: statistics.median(timing.parts_s.get(name, 0.0) for timing in warm)
            for name in sorted(names)
        },
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


def links(trials: Sequence[Trial]) -> list[MeasuredLink]:
    """Return one link per path, from the trial with the fewest nodes and processes."""
    links_by_path: dict[str, MeasuredLink] = {}
    for trial in sorted(trials, key=lambda trial: (trial.nodes, trial.processes)):
        for link in trial.links:
            links_by_path.setdefault(link.path, link)
    return list(links_by_path.values())


def lengths(trials: Iterable[Trial], horizon: int) -> ResponseLengths | None:
    """Return the response lengths of the trial with the most full-batch rollouts; None without
    such rollouts."""
    best = max(trials, key=lambda trial: len(trial.lengths), default=None)
    if best is None or not best.lengths:
        return None
    rollouts = [np.asarray(rollout, np.int64) for rollout in best.lengths]
    selected = sampled = np.sort(np.concatenate(rollouts))
    if len(sampled) > MAX_LENGTHS:
        selected = sampled[np.linspace(0, len(sampled) - 1, MAX_LENGTHS).round().astype(int)]
    return ResponseLengths(
        samples=tuple(int(length) for length in selected),
        count=len(sampled),
        truncated_share=best.truncated / len(sampled),
        horizon=horizon,
    )


def build_queue_wait(
    nodes: int, expected_s: float | None, past_waits: Sequence[tuple[int, float]]
) -> QueueWait:
    """Return the expected wait. Its history has the ``past_waits``, pairs of nodes and seconds, of
    jobs with half to twice as many nodes."""
    similar = [s for size, s in past_waits if nodes <= 2 * size and size <= 2 * nodes]
    history = None
    if similar:
        q10, q50, q90 = (float(q) for q in np.quantile(similar, QUANTILES))
        history = WaitHistory(jobs=len(similar), q10_s=q10, q50_s=q50, q90_s=q90)
    return QueueWait(nodes=nodes, test_only_s=expected_s, history=history)


@dataclass(frozen=True)
class KindPair:
    """Two kinds, and a partition in which one job can have nodes of both."""

    kinds: tuple[DeviceKind, DeviceKind]
    partition: str
    features: tuple[str, str]
    """Features by which sbatch selects their nodes in the partition."""

    def request_resources(self, stage_plan: StagePlan, speeds: Sequence[float]) -> StagePlan:
        """Return the request of a job with a node and a process of each kind.

        Args:
            stage_plan: request of a job on two nodes of the first kind.
            speeds: relative speed of each kind, by which the batch is divided.
        """
        values = stage_plan.model_dump(exclude_unset=True)
        values |= {
            "partition": self.partition,
            "gpu_type": None,
            "constraint": f"[{'&'.join(f'{feature}*1' for feature in self.features)}]",
            "speed_weights": dict(zip(self.features, speeds, strict=True)),
            "cpus": max(1, min(stage_plan.cpus, *(kind.cpus_per_node for kind in self.kinds))),
        }
        return StagePlan.model_validate(values)


def mixable_pairs(kinds: Sequence[DeviceKind], inventory: Inventory) -> list[KindPair]:
    """Return the pairs of kinds that one job can have, each with the first partition for both."""
    pairs = []
    for pair in combinations(kinds, 2):
        for name, partition in inventory.partitions.items():
            groups = [_group_of_kind(kind, partition.groups) for kind in pair]
            features = [_selecting_feature(group) if group else None for group in groups]
            if partition.is_available and None not in features and features[0] != features[1]:
                pairs.append(
                    KindPair((pair[0], pair[1]), name, (str(features[0]), str(features[1])))
                )
                break
    return pairs


def _group_of_kind(kind: DeviceKind, groups: Sequence[NodeGroup]) -> NodeGroup | None:
    """Return the group with the hardware of a kind; None: no such group, or it has no GPUs."""
    hardware = (kind.gpu_type, kind.gpus_per_node, kind.cpus_per_node)
    for group in groups:
        if (group.gpu_type, group.gpus_per_node, group.cpus_per_node) == hardware:
            return group if group.usable_nodes and kind.gpus_per_node else None
    return None


def _selecting_feature(group: NodeGroup) -> str | None:
    names = (group.gpu_type, group.gpu_model)
    return next((feature for feature in group.features if feature in names), None)


def relative_speeds(times: Sequence[float]) -> tuple[float, ...]:
    """Return relative speeds of processes from their seconds for the same work. They are rounded,
    because they are part of the key under which measurements are cached."""
    return tuple(round(max(times) / seconds, 1) for seconds in times)


def build_mixtures(
    pair: KindPair, speeds: Sequence[float], samples: int, trial: Trial
) -> list[Mixture]:
    """Return a mixture for each stage that processed the whole batch of ``samples`` in a trial."""
    mixtures = []
    for stage in dict.fromkeys(timing.stage for timing in trial.samples):
        timings = [s for s in trial.samples if s.stage == stage and s.samples == samples]
        seconds = [s.seconds for s in timings if not (s.failure or s.cold) and s.seconds > 0]
        if seconds:
            names = (pair.kinds[0].name, pair.kinds[1].name)
            mixtures.append(
                Mixture.of(
                    seconds,
                    kinds=names,
                    stage=stage,
                    batch_share=(speeds[0] / sum(speeds), speeds[1] / sum(speeds)),
                )
            )
    return mixtures
