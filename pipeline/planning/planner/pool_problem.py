"""The placement problem of pools, built from a profile.

A rollout passes its samples on in chunks. A process decodes as many samples at once as its engine
has rows, and a finished sample leaves its row to the next one. A step costs ``c0``, and each sample
in it ``c1``. The chunks of a batch always contain the same samples, so the first of ``m`` is ready
when the longest of the first ``1 / m`` has ended: long after ``1 / m`` of the time if lengths have
a tail, and only at the end if all are equal.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.planning.cost.rates import RateTable, measured_rates
from pipeline.planning.planner.available_devices import (
    PartitionDevices,
    job_count_limits,
    shared_capacities,
)
from pipeline.planning.planner.problem import GpuKind, PlacementProblem, PlacementStage
from pipeline.planning.planner.request import PlanRequest
from pipeline.planning.planner.stage_options import (
    DEFAULT_MIXING_EFFICIENCY,
    Correction,
    StageTimes,
    mixing_efficiency,
    num_work_items,
)
from pipeline.planning.profile.schema import MeasuredLink, Profile
from rlinf.errors import PlanError
from stages.factory import create_algorithm, engine_max_batch
from stages.flow import flow_of

Array = np.ndarray
MIN_SAMPLED_LENGTHS = 16384
"""Minimum number of sampled lengths."""
BATCH_DRAWS = (2, 256)
"""Minimum and maximum number of sampled batches."""
MAX_LENGTH_STEPS = 512
"""Maximum steps of the longest sample; other lengths are rounded to the same scale."""


def first_chunk_shares(
    lengths: Sequence[int],
    samples: int,
    rows: int | None,
    processes: Sequence[int],
    parts: Sequence[int],
    fixed: float,
    seed: int = 0,
) -> dict[int, dict[int, float]]:
    """Return the share of the rollout after which the first chunk is ready, by number of chunks and
    then of processes.

    Args:
        lengths: measured steps of samples.
        samples: samples of a batch.
        rows: samples that a process decodes at once; None: all.
        fixed: share of the time of one process that half of the batch would take as well.
        seed: seed of the sampled batches; the same seed gives the same result.
    """
    known = np.asarray(lengths, np.float64)
    known = np.maximum(1, np.rint(known / max(1.0, known.max() / MAX_LENGTH_STEPS))).astype(
        np.int64
    )
    rng = np.random.default_rng(seed)
    draws = min(max(MIN_SAMPLED_LENGTHS // samples, BATCH_DRAWS[0]), BATCH_DRAWS[1])
    half, whole = (_decoded(rng.choice(known, (draws, n)), rows) for n in (samples // 2, samples))
    steps, tokens = whole[1].max(1).mean(), samples * float(known.mean())
    # The steps of the tail do not shrink with the batch.
    tail = 2 * half[1].max(1).mean() - steps if samples > 1 else steps
    c0 = min(fixed / max(tail, 1e-9), 1 / steps)
    c1 = (1 - c0 * steps) / tokens
    found: dict[int, dict[int, float]] = {m: {} for m in parts}
    for count in processes:
        each = math.ceil(samples / count)
        begins, ends = _decoded(rng.choice(known, (draws * count, each)), rows)
        spent = _spent(begins, ends, c0, c1)
        last = np.take_along_axis(spent, ends.max(1, keepdims=True), 1).reshape(draws, count)
        for m in parts:
            first = ends[:, : math.ceil(each / m)].max(1, keepdims=True)
            ready = np.take_along_axis(spent, first, 1).reshape(draws, count)
            share = float((ready.max(1) / last.max(1)).mean())
            found[m][count] = min(1.0, max(1 / m, share))
    return found


def _decoded(lengths: Array, rows: int | None) -> tuple[Array, Array]:
    """Return the steps at which samples ``[processes, n]`` begin and end, in the order of
    requests."""
    processes, count = lengths.shape
    begins, ends = np.zeros_like(lengths), lengths.copy()
    if rows is None or count <= rows:
        return begins, ends
    every, busy = np.arange(processes), ends[:, :rows].copy()
    for sample in range(rows, count):
        row = busy.argmin(1)
        begins[:, sample] = busy[every, row]
        ends[:, sample] += begins[:, sample]
        busy[every, row] = ends[:, sample]
    return begins, ends


def _spent(begins: Array, ends: Array, c0: float, c1: float) -> Array:
    """Return the time ``[processes, steps + 1]`` until each step has ended."""
    processes, steps = len(ends), int(ends.max())
    change = np.zeros((processes, steps + 1))
    every = np.repeat(np.arange(processes), ends.shape[1])
    np.add.at(change, (every, begins.ravel()), 1)
    np.add.at(change, (every, ends.ravel()), -1)
    alive = change.cumsum(1)[:, :-1]
    cost = np.where(alive > 0, c0 + c1 * alive, 0.0)
    return np.concatenate([np.zeros((processes, 1)), cost.cumsum(1)], axis=1)


Tables = dict[str, dict[str, RateTable]]
CHUNK_CHOICES = (1, 2, 4, 8, 16, 32)


def build_pool_problem(
    request: PlanRequest, named: Collection[str] = ()
) -> tuple[PlacementProblem, Tables]:
    """Build the placement problem, and the tables from which its rates come.

    Args:
        named: kinds to include even if a better kind contains their nodes.

    Raises:
        PlanError: a stage can run on none of the devices.
    """
    devices = _considered_devices(request, named)
    begins = create_algorithm(request.config).supports_streaming
    stages, mixed = [], list[StageTimes]()
    flow = flow_of(request.config)
    dependencies = flow.device_dependencies()
    chunks = [n for n in CHUNK_CHOICES if request.config.rollout.batch_size % n == 0]
    works = {name: _works(request, name, devices) for name in dependencies}
    tables: Tables = {name: {k: t for k, (_, t) in found.items()} for name, found in works.items()}
    devices = _needed(devices, tables, {*named, *_pinned(request)})
    for name, after in dependencies.items():
        found = {kind: table for kind, table in tables[name].items() if kind in devices}
        if name == flow.elastic_stage and name not in request.pins:
            found = _with_gpus(found, devices)
        tables[name] = found
        parts: dict[str, Any] = {}
        if name == flow.elastic_stage:
            mixed = [work for kind, (work, _) in works[name].items() if kind in devices]
            parts = _parts(request, mixed, chunks)
        stages.append(
            PlacementStage(
                name,
                {kind: table.rates for kind, table in found.items()},
                after,
                streams=flow.all_stages[name].output_stream is not None or begins,
                divisible=flow.all_stages[name].uses_device,
                beside=flow.all_stages[name].holds != "trainer",
                switch_s=_switches(devices) if flow.all_stages[name].holds == "trainer" else {},
                **parts,
            )
        )
    # A job has equal devices; generators are jobs of one device each.
    generators = tables.get(flow.elastic_stage or "", {})
    alike = len({devices[kind].kind.gpus_per_node > 0 for kind in generators}) == 1
    problem = PlacementProblem(
        stages,
        [
            GpuKind(
                name,
                own.count,
                own.price,
                own.wait_s(1),
                own.interruptions_per_hour,
                own.per_node,
                tuple(own.waits_s.items()) if len(set(own.waits_s.values())) > 1 else (),
                own.max_job_devices if own.max_job_devices < own.count else 0,
            )
            for name, own in devices.items()
        ],
        chunks=chunks,
        sync_s=_transfers(devices, request.profile),
        mixing=_mixing(mixed),
        mixes=frozenset({flow.elastic_stage} if flow.elastic_stage and alike else ()),
        allowed={
            s: kinds & devices.keys() for s, kinds in request.pins.items() if s in dependencies
        },
        shared=shared_capacities(devices),
        most_jobs=job_count_limits(devices),
    )
    return problem, tables


def _considered_devices(
    request: PlanRequest, named: Collection[str]
) -> dict[str, PartitionDevices]:
    """Return every node once; again under a worse kind if a pin names it, or if it allows longer,
    larger or more jobs."""
    priced = request.priced_devices()
    wanted = {*named, *_pinned(request)}

    def longer(own: PartitionDevices) -> bool:
        better = priced.get(own.better_kind or "")
        return better is None or any(
            getattr(own, name) > getattr(better, name)
            for name in ("limit_s", "max_job_devices", "count")
        )

    return {name: own for name, own in priced.items() if name in wanted or longer(own)}


def _pinned(request: PlanRequest) -> set[str]:
    """Return the worse kinds to which a stage is pinned, and not to the better kind."""
    return {
        name
        for kinds in request.pins.values()
        for name in kinds & request.devices.keys()
        if request.devices[name].better_kind not in kinds
    }


def _needed(
    devices: Mapping[str, PartitionDevices], tables: Tables, wanted: Collection[str]
) -> dict[str, PartitionDevices]:
    """Remove worse kinds under which no stage gains anything."""

    def gains(name: str, better: str) -> bool:
        for found in tables.values():
            mine = found[name].rates if name in found else np.zeros(1)
            theirs = found[better].rates if better in found else np.zeros(1)
            theirs = np.pad(theirs, (0, max(0, len(mine) - len(theirs))))
            if np.any((mine > 0) & (theirs[: len(mine)] == 0)):
                return True
        return False

    return {
        name: own
        for name, own in devices.items()
        if name in wanted or own.better_kind is None or gains(name, own.better_kind)
    }


def _works(
    request: PlanRequest, stage: str, devices: Mapping[str, PartitionDevices]
) -> dict[str, tuple[StageTimes, RateTable]]:
    """Return the times and rates of a stage, by kind.

    Raises:
        PlanError: the stage can run on none of the kinds.
    """
    found, reasons = dict[str, tuple[StageTimes, RateTable]](), []
    for kind, own in devices.items():
        try:
            work = StageTimes(
                own, stage, flow_of(request.config).all_stages[stage], request.profile
            )
            found[kind] = work, _rates(work, request)
        except PlanError as error:
            reasons.append(f"{kind}: {error}")
    if not found:
        raise PlanError(f"stage {stage!r} fits nowhere: {'; '.join(reasons)}")
    return found


def _mixing(works: Sequence[StageTimes]) -> float:
    """Return the efficiency of the worst pair of kinds of generators."""
    return min(
        (mixing_efficiency(pair) for pair in combinations(works, 2)),
        default=DEFAULT_MIXING_EFFICIENCY,
    )


def _parts(
    request: PlanRequest, works: Sequence[StageTimes], chunks: Sequence[int]
) -> dict[str, Any]:
    """Return the parameters of a rollout that passes its samples on in chunks."""
    lines = [work.time_line(min(point.processes for point in work.measured)) for work in works]
    # The mean over different kinds.
    fixed = statistics.fmean(max(0.0, a) / max(1e-9, a + b) for a, b in lines)
    config, profile = request.config, request.profile
    most = min(config.rollout.batch_size, sum(work.devices.count for work in works))
    counts = [1 << i for i in range(most.bit_length())]
    found = first_chunk_shares(
        profile.lengths.samples, profile.samples, engine_max_batch(config), counts, chunks, fixed
    )
    return {"again": fixed, "lead": found}


def _with_gpus(
    found: Mapping[str, RateTable], devices: Mapping[str, PartitionDevices]
) -> dict[str, RateTable]:
    """If GPUs can generate, exclude kinds without GPUs, because jobs of one pool request the
    same."""
    some = {kind: table for kind, table in found.items() if devices[kind].kind.gpus_per_node}
    return some or dict(found)


def _rates(work: StageTimes, request: PlanRequest) -> RateTable:
    """Return the rates on 0 to all devices of the kind, with everything loaded."""
    count = work.devices.count
    counts = np.arange(count + 1)
    table = measured_rates(
        work.measured,
        request.profile.samples,
        count,
        runnable=work.can_run(counts),
        most=num_work_items(work.stage, request.config),
        memory_bytes=work.peak_memory_bytes or math.nan,
        fits=work.fits,
    )
    if not table.rates.any():
        raise PlanError(
            work.refusal_for(count) or "no number of devices that is there was measured"
        )
    known = request.corrections.get((work.stage, work.devices.name), Correction())
    spread, rates = np.minimum(table.spread, known.spread), table.rates / known.work_factor
    # A pool is one job, an elastic one a job for each device.
    alone = work.stage == flow_of(request.config).elastic_stage
    of_job = np.minimum(counts, 1) if alone else counts
    rates = np.where(of_job <= work.devices.max_job_devices, rates, 0.0)
    if not rates.any():
        raise PlanError(
            f"its jobs have at most {work.devices.max_job_devices} devices, and it runs on more "
            f"alone ({work.devices.allowance.refusal or 'MaxNodes'})"
        )
    limit = work.devices.time_limit_min
    if limit is not None:
        # A job that ends before its first stage does would repeat that stage forever.
        starts = sum(part.mean for part in work.overheads(1).values())
        quickest = starts + 1 / rates.max()
        rates = np.where(rates * (60 * limit - starts) >= 1, rates, 0.0)
        if not rates.any():
            raise PlanError(
                f"start and work take {quickest / 60:.1f} minutes at best, "
                f"{work.devices.time_limit_of} allows jobs of {limit}"
            )
    return replace(table, rates=rates, spread=spread)


def _switches(devices: Mapping[str, PartitionDevices]) -> dict[str, float]:
    """Return the seconds to offload and load the trainer, for devices with their own memory."""
    return {
        name: sum(own.profile.overhead_s(part, 1) for part in ("offload", "onload")) / 2
        for name, own in devices.items()
        if own.has_memory
    }


def _transfers(
    devices: Mapping[str, PartitionDevices], profile: Profile
) -> dict[tuple[str, str], float]:
    """Return the seconds of new weights between pools of two kinds: by network or through files."""
    return {
        (source, target): min(transfer_seconds(a, b, profile).values())
        for source, a in devices.items()
        for target, b in devices.items()
    }


def transfer_seconds(
    a: PartitionDevices, b: PartitionDevices, profile: Profile
) -> dict[str, float]:
    """Return the seconds of new weights from one kind to another, by each measured way: always
    files, and the links between their nodes."""
    files = a.profile.overhead_s("publish", 1) + b.profile.overhead_s("weight_load", 1)
    ways = {"file": files}
    for link in measured_links(profile, a, b):
        duration_s = _seconds(link, profile.weights_bytes)
        ways[link.backend] = min(duration_s, ways.get(link.backend, duration_s))
    return ways


def measured_links(
    profile: Profile, a: PartitionDevices, b: PartitionDevices
) -> list[MeasuredLink]:
    """Return the measured links between nodes of two kinds."""
    ends = {a.profile.partition, b.profile.partition}
    return [
        link
        for link in (*profile.links, *a.profile.links)
        if link.path in ("inter_node", "inter_partition") and set(link.between) == ends
    ]


def _seconds(link: MeasuredLink, size: int) -> float:
    return link.latency_s.value + size / link.bandwidth_bytes_per_s.value
