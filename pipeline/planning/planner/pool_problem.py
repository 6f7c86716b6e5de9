"""The placement problem of pools, built from a profile.

A rollout passes its samples on in chunks. A process decodes as many samples at once as its engine
has rows; the next sample uses the row of a finished sample. A decoding step takes ``c0``, plus
``c1`` for each running sample. The assignment of samples to chunks is fixed, so the first of ``m``
chunks is ready when the longest of the first ``1 / m`` of the samples has ended. If lengths have a
tail, this is long after ``1 / m`` of the time; if all lengths are equal, it is at the end.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.planning.cost.rates import RateTable, RateTables, measured_rates
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
"""Minimum number of sampled lengths, over all sampled batches."""
BATCH_DRAWS = (2, 256)
"""Minimum and maximum number of sampled batches."""
MAX_LENGTH_STEPS = 512
"""Maximum steps of a sample; if a sample is longer, all lengths are scaled down."""


def first_chunk_shares(
    lengths: Sequence[int],
    samples: int,
    rows: int | None,
    processes: Sequence[int],
    chunk_counts: Sequence[int],
    fixed: float,
    seed: int = 0,
) -> dict[int, dict[int, float]]:
    """Return the share of the rollout's time after which the first chunk is ready, by number of
    chunks, then by number of processes.

    Args:
        lengths: measured steps of samples.
        samples: samples of a batch.
        rows: samples that a process decodes concurrently; None: all.
        processes: numbers of processes.
        chunk_counts: numbers of chunks.
        fixed: share of a process's time that does not depend on the number of samples.
        seed: seed of the sampled batches; the same seed gives the same result.
    """
    scaled = np.asarray(lengths, np.float64)
    scaled = scaled / max(1.0, scaled.max() / MAX_LENGTH_STEPS)
    measured = np.maximum(1, np.rint(scaled)).astype(np.int64)
    rng = np.random.default_rng(seed)
    draws = min(max(MIN_SAMPLED_LENGTHS // samples, BATCH_DRAWS[0]), BATCH_DRAWS[1])
    sizes = (samples // 2, samples)
    half, whole = (_decode_steps(rng.choice(measured, (draws, n)), rows) for n in sizes)
    steps, tokens = whole[1].max(1).mean(), samples * float(measured.mean())
    # The number of steps in the tail does not depend on the size of the batch.
    tail = 2 * half[1].max(1).mean() - steps if samples > 1 else steps
    c0 = min(fixed / max(tail, 1e-9), 1 / steps)
    c1 = (1 - c0 * steps) / tokens
    shares: dict[int, dict[int, float]] = {m: {} for m in chunk_counts}
    for count in processes:
        per_process = math.ceil(samples / count)
        begins, ends = _decode_steps(rng.choice(measured, (draws * count, per_process)), rows)
        elapsed = _elapsed_times(begins, ends, c0, c1)
        last = np.take_along_axis(elapsed, ends.max(1, keepdims=True), 1).reshape(draws, count)
        for m in chunk_counts:
            first = ends[:, : math.ceil(per_process / m)].max(1, keepdims=True)
            ready = np.take_along_axis(elapsed, first, 1).reshape(draws, count)
            share = float((ready.max(1) / last.max(1)).mean())
            shares[m][count] = min(1.0, max(1 / m, share))
    return shares


def _decode_steps(lengths: Array, rows: int | None) -> tuple[Array, Array]:
    """Return the steps at which samples begin and end, ``[processes, n]`` each, in the order of
    ``lengths``."""
    processes, count = lengths.shape
    begins, ends = np.zeros_like(lengths), lengths.copy()
    if rows is None or count <= rows:
        return begins, ends
    indices, row_ends = np.arange(processes), ends[:, :rows].copy()
    for sample in range(rows, count):
        row = row_ends.argmin(1)
        begins[:, sample] = row_ends[indices, row]
        ends[:, sample] += begins[:, sample]
        row_ends[indices, row] = ends[:, sample]
    return begins, ends


def _elapsed_times(begins: Array, ends: Array, c0: float, c1: float) -> Array:
    """Return the time until the end of each step, ``[processes, steps + 1]``, relative to the whole
    rollout on one process."""
    processes, steps = len(ends), int(ends.max())
    change = np.zeros((processes, steps + 1))
    indices = np.repeat(np.arange(processes), ends.shape[1])
    np.add.at(change, (indices, begins.ravel()), 1)
    np.add.at(change, (indices, ends.ravel()), -1)
    running = change.cumsum(1)[:, :-1]
    cost = np.where(running > 0, c0 + c1 * running, 0.0)
    return np.concatenate([np.zeros((processes, 1)), cost.cumsum(1)], axis=1)


CHUNK_CHOICES = (1, 2, 4, 8, 16, 32)
"""Numbers of chunks that are considered if they divide the number of prompts."""


def build_pool_problem(
    request: PlanRequest, requested_kinds: Collection[str] = ()
) -> tuple[PlacementProblem, RateTables]:
    """Build the placement problem, and the tables of its rates.

    Args:
        requested_kinds: kinds to include even if a better kind has the same nodes.

    Raises:
        PlanError: a stage cannot run on any of the devices.
    """
    devices = _considered_devices(request, requested_kinds)
    algorithm_streams = create_algorithm(request.config).supports_streaming
    stages, generator_times = [], list[StageTimes]()
    flow = flow_of(request.config)
    sources = flow.direct_dependencies()
    chunks = [n for n in CHUNK_CHOICES if request.config.rollout.batch_size % n == 0]
    stage_rates = {name: _stage_rates(request, name, devices) for name in sources}
    tables: dict[str, dict[str, RateTable]] = {
        n: {k: t for k, (_, t) in row.items()} for n, row in stage_rates.items()
    }
    devices = _drop_useless_kinds(devices, tables, {*requested_kinds, *_pinned_kinds(request)})
    for name, after in sources.items():
        kind_tables = {kind: table for kind, table in tables[name].items() if kind in devices}
        if name == flow.elastic_stage and name not in request.pins:
            kind_tables = _prefer_gpus(kind_tables, devices)
        tables[name] = kind_tables
        chunk_parameters: dict[str, Any] = {}
        if name == flow.elastic_stage:
            generator_times = [t for kind, (t, _) in stage_rates[name].items() if kind in devices]
            chunk_parameters = _chunk_parameters(request, generator_times, chunks)
        stages.append(
            PlacementStage(
                name,
                {kind: table.rates for kind, table in kind_tables.items()},
                after,
                streams=flow.all_stages[name].output_stream is not None or algorithm_streams,
                divisible=flow.all_stages[name].uses_device,
                beside=flow.all_stages[name].holds != "trainer",
                switch_s=_switch_times(devices) if flow.all_stages[name].holds == "trainer" else {},
                **chunk_parameters,
            )
        )
    # Each generator is a job with one device, so kinds may be mixed, but not GPUs with CPUs.
    generators = tables.get(flow.elastic_stage or "", {})
    same_type = len({devices[kind].kind.gpus_per_node > 0 for kind in generators}) == 1
    problem = PlacementProblem(
        stages,
        [
            GpuKind(
                name,
                entry.count,
                entry.price,
                entry.wait_s(1),
                entry.interruptions_per_hour,
                entry.per_node,
                tuple(entry.waits_s.items()) if len(set(entry.waits_s.values())) > 1 else (),
                entry.max_job_devices if entry.max_job_devices < entry.count else 0,
            )
            for name, entry in devices.items()
        ],
        chunks=chunks,
        sync_s=_sync_times(devices, request.profile),
        mixing=_min_mixing_efficiency(generator_times),
        mixes=frozenset({flow.elastic_stage} if flow.elastic_stage and same_type else ()),
        allowed={s: kinds & devices.keys() for s, kinds in request.pins.items() if s in sources},
        shared=shared_capacities(devices),
        most_jobs=job_count_limits(devices),
    )
    return problem, tables


def _considered_devices(
    request: PlanRequest, requested_kinds: Collection[str]
) -> dict[str, PartitionDevices]:
    """Return the kinds without a better kind, which have every node once, and other kinds that are
    requested or pinned, or allow longer or larger jobs or more devices than their better kind."""
    devices = request.priced_devices()
    required = {*requested_kinds, *_pinned_kinds(request)}

    def adds_capacity(entry: PartitionDevices) -> bool:
        better = devices.get(entry.better_kind or "")
        return better is None or any(
            getattr(entry, name) > getattr(better, name)
            for name in ("limit_s", "max_job_devices", "count")
        )

    return {n: entry for n, entry in devices.items() if n in required or adds_capacity(entry)}


def _pinned_kinds(request: PlanRequest) -> set[str]:
    """Return kinds to which a stage is pinned, while it is not pinned to their better kind."""
    return {
        name
        for kinds in request.pins.values()
        for name in kinds & request.devices.keys()
        if request.devices[name].better_kind not in kinds
    }


def _drop_useless_kinds(
    devices: Mapping[str, PartitionDevices], tables: RateTables, required: Collection[str]
) -> dict[str, PartitionDevices]:
    """Remove kinds whose better kind allows each stage the same numbers of GPUs."""

    def is_useful(name: str, better: str) -> bool:
        for stage_tables in tables.values():
            rates = stage_tables[name].rates if name in stage_tables else np.zeros(1)
            better_rates = stage_tables[better].rates if better in stage_tables else np.zeros(1)
            better_rates = np.pad(better_rates, (0, max(0, len(rates) - len(better_rates))))
            if np.any((rates > 0) & (better_rates[: len(rates)] == 0)):
                return True
        return False

    return {
        name: entry
        for name, entry in devices.items()
        if name in required or entry.better_kind is None or is_useful(name, entry.better_kind)
    }


def _stage_rates(
    request: PlanRequest, stage: str, devices: Mapping[str, PartitionDevices]
) -> dict[str, tuple[StageTimes, RateTable]]:
    """Return the times and rates of a stage, by kind.

    Raises:
        PlanError: the stage cannot run on any of the kinds.
    """
    result, reasons = dict[str, tuple[StageTimes, RateTable]](), []
    spec = flow_of(request.config).all_stages[stage]
    for kind, entry in devices.items():
        try:
            times = StageTimes(entry, stage, spec, request.profile)
            result[kind] = times, _rate_table(times, request)
        except PlanError as error:
            reasons.append(f"{kind}: {error}")
    if not result:
        raise PlanError(f"stage {stage!r} fits nowhere: {'; '.join(reasons)}")
    return result


def _min_mixing_efficiency(generator_times: Sequence[StageTimes]) -> float:
    return min(
        (mixing_efficiency(pair) for pair in combinations(generator_times, 2)),
        default=DEFAULT_MIXING_EFFICIENCY,
    )


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
        profile.lengths.samples, profile.samples, engine_max_batch(config), counts, chunks, fixed
    )
    return {"again": fixed, "lead": shares}


def _prefer_gpus(
    tables: Mapping[str, RateTable], devices: Mapping[str, PartitionDevices]
) -> dict[str, RateTable]:
    """Exclude kinds without GPUs if the stage also runs on GPUs, because all jobs of a pool make
    the same request."""
    gpu_tables = {kind: table for kind, table in tables.items() if devices[kind].kind.gpus_per_node}
    return gpu_tables or dict(tables)


def _rate_table(times: StageTimes, request: PlanRequest) -> RateTable:
    """Return the rates of a stage on 0 to all devices of a kind, without the time to load."""
    count = times.devices.count
    counts = np.arange(count + 1)
    table = measured_rates(
        times.measured,
        request.profile.samples,
        count,
        runnable=times.can_run(counts),
        max_gpus=num_work_items(times.stage, request.config),
        memory_bytes=times.peak_memory_bytes or math.nan,
        interpolate=times.can_interpolate,
    )
    if not table.rates.any():
        raise PlanError(times.refusal_for(count) or "no available number of devices was measured")
    correction = request.corrections.get((times.stage, times.devices.name), Correction())
    spread = np.minimum(table.spread, correction.spread)
    rates = table.rates / correction.work_factor
    # A pool is one job, but an elastic pool is a job per device.
    is_elastic = times.stage == flow_of(request.config).elastic_stage
    job_devices = np.minimum(counts, 1) if is_elastic else counts
    rates = np.where(job_devices <= times.devices.max_job_devices, rates, 0.0)
    if not rates.any():
        raise PlanError(
            f"jobs have at most {times.devices.max_job_devices} devices, but the stage needs "
            f"more ({times.devices.allowance.refusal or 'MaxNodes'})"
        )
    limit_min = times.devices.time_limit_min
    if limit_min is not None:
        # A job that ends before its first stage would repeat that stage forever.
        startup_s = sum(part.mean for part in times.overheads(1).values())
        fastest_s = startup_s + 1 / rates.max()
        rates = np.where(rates * (60 * limit_min - startup_s) >= 1, rates, 0.0)
        if not rates.any():
            raise PlanError(
                f"start and work take {fastest_s / 60:.1f} minutes at best, "
                f"{times.devices.time_limit_of} allows jobs of {limit_min}"
            )
    return replace(table, rates=rates, spread=spread)


def _switch_times(devices: Mapping[str, PartitionDevices]) -> dict[str, float]:
    """Return the mean seconds to offload or load the trainer, for devices with their own memory."""
    return {
        kind: sum(entry.profile.overhead_s(name, 1) for name in ("offload", "onload")) / 2
        for kind, entry in devices.items()
        if entry.has_device_memory
    }


def _sync_times(
    devices: Mapping[str, PartitionDevices], profile: Profile
) -> dict[tuple[str, str], float]:
    """Return the minimum seconds to transfer new weights between pools, by network or files."""
    return {
        (source, target): min(transfer_seconds(a, b, profile).values())
        for source, a in devices.items()
        for target, b in devices.items()
    }


def transfer_seconds(
    a: PartitionDevices, b: PartitionDevices, profile: Profile
) -> dict[str, float]:
    """Return the seconds to transfer new weights between two kinds, by transport: ``file``, and the
    backends of the links that were measured between their nodes."""
    file_s = a.profile.overhead_s("publish", 1) + b.profile.overhead_s("weight_load", 1)
    seconds = {"file": file_s}
    for link in measured_links(profile, a, b):
        duration_s = _link_seconds(link, profile.weights_bytes)
        seconds[link.backend] = min(duration_s, seconds.get(link.backend, duration_s))
    return seconds


def measured_links(
    profile: Profile, a: PartitionDevices, b: PartitionDevices
) -> list[MeasuredLink]:
    """Return the measured links between nodes of two kinds."""
    kinds = {a.kind.name, b.kind.name}
    return [
        link
        for link in (*profile.links, *a.profile.links)
        if link.path in ("inter_node", "inter_partition") and set(link.between) == kinds
    ]


def _link_seconds(link: MeasuredLink, size: int) -> float:
    return link.latency_s.value + size / link.bandwidth_bytes_per_s.value
