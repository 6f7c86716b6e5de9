"""The placement problem of a run, built from its profile: for pools, or for a job per stage."""

from __future__ import annotations

import statistics
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.planning.planner.available_devices import (
    PartitionDevices,
    job_count_limits,
    shared_capacities,
)
from pipeline.planning.planner.first_chunk import first_chunk_shares
from pipeline.planning.planner.problem import GpuKind, PlacementProblem, PlacementStage
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.stage_times import (
    Correction,
    StageTable,
    StageTables,
    StageTimes,
    num_work_items,
)
from rlinf.errors import PlanError
from stages.factory import create_algorithm, engine_max_batch
from stages.flow import flow_of

MIXING_EFFICIENCY = 0.95
"""Speed of several kinds together on one stage, relative to the sum of their speeds: the goal of
the benchmark ``hetero_efficiency`` (assumed)."""
CHUNK_CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of chunks that are considered if they divide the number of prompts."""


def build_problem(
    request: PlanRequest, requested_kinds: Collection[str] = ()
) -> tuple[PlacementProblem, StageTables]:
    """Build the placement problem, and the tables of its times.

    Args:
        requested_kinds: kinds to include even if a better kind has the same nodes.

    Raises:
        PlanError: stages cannot run on any of the devices; the message names all of them.
    """
    flow, pins = flow_of(request.config), request.pins
    are_jobs = request.execution == "jobs"
    sources = request.stage_dependencies() if are_jobs else flow.direct_dependencies()
    elastic_stage = None if are_jobs else flow.elastic_stage
    required = {*requested_kinds, *_pinned_kinds(request)}
    devices = _considered_devices(request, required)
    measured, errors = dict[str, dict[str, tuple[StageTimes, StageTable]]](), list[str]()
    for name in sources:
        try:
            measured[name] = _stage_tables(request, name, devices)
        except PlanError as error:
            errors.append(str(error))
    if errors:  # all at once, because each stage may need another number of devices
        raise PlanError("; ".join(errors))
    devices = _drop_useless_kinds(devices, measured, required)
    tables = {
        name: {kind: table for kind, (_, table) in row.items() if kind in devices}
        for name, row in measured.items()
    }
    # Each generator is a job with one device, so kinds may be mixed, but not GPUs with CPUs.
    generators, same_type = tables.get(elastic_stage or "", {}), False
    if elastic_stage is not None:
        if elastic_stage not in pins:
            generators = tables[elastic_stage] = _prefer_gpus(generators, devices)
        same_type = len({devices[kind].kind.gpus_per_node > 0 for kind in generators}) == 1
    chunks = [n for n in CHUNK_CHOICES if request.config.rollout.batch_size % n == 0]
    algorithm_streams = create_algorithm(request.config).supports_streaming
    stages = []
    for name, after in sources.items():
        spec, options = flow.all_stages[name], dict[str, Any]()
        if name == elastic_stage:
            times = [t for kind, (t, _) in measured[name].items() if kind in generators]
            options = _chunk_parameters(request, times, chunks)
        if spec.holds == "trainer" and not are_jobs:
            options["switch_s"] = _switch_times(devices)
        stages.append(
            PlacementStage(
                name,
                {kind: table.rates for kind, table in tables[name].items()},
                after,
                streams=spec.output_stream is not None or algorithm_streams,
                divisible=spec.uses_device,
                **options,
            )
        )
    problem = PlacementProblem(
        stages,
        [_gpu_kind(name, entry) for name, entry in devices.items()],
        are_jobs=are_jobs,
        chunks=(1,) if are_jobs else chunks,
        sync=None if are_jobs else ("train", "rollout"),
        sync_s={} if are_jobs else _sync_times(devices),
        mixing=MIXING_EFFICIENCY,
        mixes=frozenset({elastic_stage} if elastic_stage and same_type else ()),
        shared=shared_capacities(devices),
        most_jobs=job_count_limits(devices),
    )
    return problem, tables


def _gpu_kind(name: str, entry: PartitionDevices) -> GpuKind:
    return GpuKind(
        name,
        entry.count,
        entry.price,
        tuple(entry.waits_s.items()),
        entry.interruptions_per_hour,
        entry.per_node,
        entry.max_job_devices if entry.max_job_devices < entry.count else 0,
    )


def _considered_devices(
    request: PlanRequest, required: Collection[str]
) -> dict[str, PartitionDevices]:
    """Return the kinds without a better kind, which have every node once, and other kinds that are
    required, or allow longer or larger jobs or more devices than their better kind. Kinds without
    preemption are first, so that they are preferred to equal ones."""
    devices = request.priced_devices()

    def adds_capacity(entry: PartitionDevices) -> bool:
        better = devices.get(entry.better_kind or "")
        return better is None or any(
            getattr(entry, name) > getattr(better, name)
            for name in ("limit_s", "max_job_devices", "count")
        )

    names = sorted(devices, key=lambda name: devices[name].is_preemptible)
    return {n: devices[n] for n in names if n in required or adds_capacity(devices[n])}


def _pinned_kinds(request: PlanRequest) -> set[str]:
    """Return kinds to which a stage is pinned, while it is not pinned to their better kind."""
    return {
        name
        for kinds in request.pins.values()
        for name in kinds & request.devices.keys()
        if request.devices[name].better_kind not in kinds
    }


def _drop_useless_kinds(
    devices: Mapping[str, PartitionDevices],
    measured: Mapping[str, Mapping[str, tuple[StageTimes, StageTable]]],
    required: Collection[str],
) -> dict[str, PartitionDevices]:
    """Remove kinds whose better kind allows each stage the same numbers of GPUs."""

    def counts(stage: str, kind: str) -> set[int]:
        tables = measured[stage]
        return {*np.flatnonzero(tables[kind][1].rates).tolist()} if kind in tables else set()

    def is_useful(name: str, better: str) -> bool:
        return any(counts(stage, name) - counts(stage, better) for stage in measured)

    return {
        name: entry
        for name, entry in devices.items()
        if name in required or entry.better_kind is None or is_useful(name, entry.better_kind)
    }


def _stage_tables(
    request: PlanRequest, stage: str, devices: Mapping[str, PartitionDevices]
) -> dict[str, tuple[StageTimes, StageTable]]:
    """Return the times and the table of a stage, by kind.

    Raises:
        PlanError: the stage cannot run on any of the kinds.
    """
    flow, result, reasons = flow_of(request.config), dict[str, tuple[StageTimes, StageTable]](), []
    for kind, entry in devices.items():
        if kind not in request.pins.get(stage, devices):
            continue
        try:
            times = StageTimes(entry, stage, flow.all_stages[stage], request.profile)
            table = times.table(
                num_work_items(stage, request.config),
                request.corrections.get((stage, kind), Correction()),
                is_job=request.execution == "jobs",
                one_device_jobs=stage == flow.elastic_stage and request.execution != "jobs",
                any_shape=request.is_user_plan,
            )
        except PlanError as error:
            reasons.append(f"{kind}: {error}")
        else:
            result[kind] = times, table
    if not result:
        reason = "; ".join(reasons) or "no device is allowed"
        raise PlanError(f"stage {stage!r} fits nowhere: {reason}")
    return result


def _chunk_parameters(
    request: PlanRequest, stage_times: Sequence[StageTimes], chunks: Sequence[int]
) -> dict[str, Any]:
    """Return ``again`` and ``lead`` of a rollout stage: see :class:`PlacementStage`."""
    lines = [t.time_line(min(point.processes for point in t.measured)) for t in stage_times]
    # The fixed shares of the kinds differ, so use their mean.
    fixed = statistics.fmean(max(0.0, a) / max(1e-9, a + b) for a, b in lines)
    config, profile = request.config, request.profile
    max_processes = min(config.rollout.batch_size, sum(t.devices.count for t in stage_times))
    counts = [1 << i for i in range(max_processes.bit_length())]
    shares = first_chunk_shares(
        profile.lengths, profile.samples, engine_max_batch(config), counts, chunks, fixed
    )
    return {"again": fixed, "lead": shares}


def _prefer_gpus(
    tables: Mapping[str, StageTable], devices: Mapping[str, PartitionDevices]
) -> dict[str, StageTable]:
    """Exclude kinds without GPUs if the stage also runs on GPUs, because all jobs of a pool make
    the same request."""
    gpu_tables = {kind: table for kind, table in tables.items() if devices[kind].kind.gpus_per_node}
    return gpu_tables or dict(tables)


def _switch_times(devices: Mapping[str, PartitionDevices]) -> dict[str, float]:
    """Return the mean seconds to offload or load the trainer, for devices with their own memory."""
    return {
        kind: sum(entry.profile.overhead_s(name, 1) for name in ("offload", "onload")) / 2
        for kind, entry in devices.items()
        if entry.has_device_memory
    }


def _sync_times(devices: Mapping[str, PartitionDevices]) -> dict[tuple[str, str], float]:
    """Return the seconds to write new weights on one kind and to load them on another."""
    return {
        (source, target): a.profile.overhead_s("publish", 1)
        + b.profile.overhead_s("weight_load", 1)
        for source, a in devices.items()
        for target, b in devices.items()
    }
