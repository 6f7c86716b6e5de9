"""The problem of grain ``segment``: pools of devices held over many iterations, from a profile."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

import numpy as np

from pipeline.cost.rates import RateTable, measured_rates
from pipeline.planner.devices import Devices
from pipeline.planner.options import MIXING
from pipeline.planner.problem import Kind, Problem, Stage
from pipeline.planner.work import Work, work_items
from pipeline.profile.schema import Link, Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError

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
    known = tables(devices, profile, config)
    stages = []
    for name, after in STAGES.items():
        rates = {kind: table.rates for kind, table in known[name].items()}
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


def tables(
    devices: Mapping[str, Devices], profile: Profile, config: RunConfig
) -> dict[str, dict[str, RateTable]]:
    """By stage and kind: its rates on 0 to all devices, and how well they are known.

    A kind is left out where no measurement of the stage succeeded. More devices than a stage can
    use stand idle.
    """
    found: dict[str, dict[str, RateTable]] = {stage: {} for stage in STAGES}
    for stage, by_kind in found.items():
        for kind, own in devices.items():
            try:
                work = Work(own, stage, profile)
            except PlanError:
                continue
            counts = np.arange(own.count + 1)
            table = measured_rates(
                work.measured,
                profile.samples,
                own.count,
                runnable=(counts <= work_items(stage, config)) & (counts < work.failed),
                memory_bytes=work.peak_memory_bytes or math.nan,
            )
            if table.rates.any():
                by_kind[kind] = table
    return found


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
