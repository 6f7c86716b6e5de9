"""The problem of grain ``segment``: pools of devices held over many iterations, from a profile."""

from __future__ import annotations

from collections.abc import Collection, Mapping

import numpy as np

from pipeline.cost.fit import LEAST_POINTS as FIT_POINTS
from pipeline.cost.fit import Point, fit_times
from pipeline.planner.devices import Devices
from pipeline.planner.options import MIXING
from pipeline.planner.problem import Kind, Problem, Stage
from pipeline.planner.work import ONE_PROCESS, work_items
from pipeline.profile.schema import Link, Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError

Array = np.ndarray
STAGES: Mapping[str, tuple[str, ...]] = {
    "rollout": (),
    "reward": ("rollout",),
    "inference": ("rollout",),
    "train": ("reward", "inference"),
}
"""Stages that hold devices and whose output they take; ``sync`` is the transfer of the weights."""
STREAMING = frozenset({"reward", "inference"})
"""Stages that can begin on a part of their input. Training streams only where one update takes all
samples; with several minibatches each is a choice among all of them."""


def build(
    devices: Mapping[str, Devices],
    profile: Profile,
    config: RunConfig,
    allowed: Mapping[str, Collection[str]],
) -> Problem:
    """The planner's problem.

    Raises:
        PlanError: a stage can run on none of the devices.
    """
    minibatches = int(getattr(config.algorithm, "minibatches", 1) or 1)
    stages = []
    for name, after in STAGES.items():
        rates = {}
        for kind, own in devices.items():
            table = _rates(own, name, profile, config)
            if table is not None:
                rates[kind] = table
        if not rates:
            raise PlanError(f"stage {name!r}: no measurement of it succeeded on any device")
        stages.append(
            Stage(
                name,
                rates,
                after,
                streams=name in STREAMING or (name == "train" and minibatches == 1),
                switch_s=_switches(devices, name),
            )
        )
    kinds = [
        Kind(name, own.count, own.price, own.wait_s(1), own.losses_per_hour)
        for name, own in devices.items()
    ]
    return Problem(
        stages,
        kinds,
        sync_s=_transfers(devices, profile),
        mixing=MIXING,
        allowed={stage: frozenset(kinds) for stage, kinds in allowed.items() if stage in STAGES},
    )


def _rates(own: Devices, stage: str, profile: Profile, config: RunConfig) -> Array | None:
    """Iterations per second ``[count + 1]`` on 0 to all devices of a kind; None: it cannot run."""
    ran = [
        p
        for p in own.profile.points
        if p.stage == stage
        and p.time is not None
        and p.time.median_s > 0
        and p.token_budget in (None, profile.token_budget)
    ]
    if not ran:
        return None
    points = [
        Point(p.processes, p.samples, p.time.median_s, p.time.spread_s, len(p.time.seconds))
        for p in ran
        if p.time is not None
    ]
    rates = np.zeros(own.count + 1)
    most = min(own.count, work_items(stage, config))
    counts = np.arange(1, most + 1)
    if len({(p.processes, p.size) for p in points}) >= FIT_POINTS:
        rates[1 : most + 1] = 1 / fit_times(points).predict(counts, profile.samples).seconds
    else:
        for point in points:
            if point.size == profile.samples and point.processes <= most:
                rates[point.processes] = 1 / point.seconds
    # More devices than a stage can use stand idle.
    rates[most + 1 :] = rates[most]
    if stage in ONE_PROCESS:
        rates[1:] = rates[1]
    return np.maximum.accumulate(rates) if rates.any() else None


def _switches(devices: Mapping[str, Devices], stage: str) -> dict[str, float]:
    """Bringing the trainer out and in again; an engine gets new weights in any case."""
    if stage not in ("inference", "train"):
        return {}
    found = {}
    for name, own in devices.items():
        # What was never off the device costs nothing to bring back.
        seconds = sum(own.profile.overhead_s(part, 1) for part in ("offload", "onload"))
        if own.kind.gpus_per_node and own.kind.gpu_model:
            found[name] = seconds / 2
    return found


def _transfers(devices: Mapping[str, Devices], profile: Profile) -> dict[tuple[str, str], float]:
    """New weights from a pool of one kind to a pool of another: by network, or through files."""
    found = {}
    for source, a in devices.items():
        for target, b in devices.items():
            files = a.profile.overhead_s("publish", 1) + b.profile.overhead_s("weight_load", 1)
            links = [
                link
                for link in (*profile.links, *a.profile.links)
                if link.path in ("inter_node", "inter_partition")
                and set(link.between) == {source, target}
            ]
            sends = [_seconds(link, profile.weights_bytes) for link in links]
            found[source, target] = min([files, *sends])
    return found


def _seconds(link: Link, size: int) -> float:
    return link.latency_s.value + size / link.bandwidth_bytes_per_s.value
