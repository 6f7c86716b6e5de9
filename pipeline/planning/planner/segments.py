"""The problem of grain ``segment``: pools of devices held over many iterations, from a profile."""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np

from pipeline.planning.cost.rates import RateTable, measured_rates
from pipeline.planning.planner.devices import Devices
from pipeline.planning.planner.lead import leads
from pipeline.planning.planner.options import MIXING, Correction, mixing
from pipeline.planning.planner.overlap import crowds, few_jobs
from pipeline.planning.planner.problem import Kind, Problem, Stage
from pipeline.planning.planner.request import Request
from pipeline.planning.planner.work import Work, work_items
from pipeline.planning.profile.schema import Link, Profile
from rlinf.errors import PlanError
from stages.flow import flow_of
from stages.parts import engine_rows, make_algorithm

Tables = dict[str, dict[str, RateTable]]
CHUNKS = (1, 2, 4, 8, 16, 32)


def build(request: Request, named: Collection[str] = ()) -> tuple[Problem, Tables]:
    """The planner's problem, and where its rates come from.

    Args:
        named: kinds that are looked at even if their nodes have a better name.

    Raises:
        PlanError: a stage can run on none of the devices.
    """
    devices = _looked_at(request, named)
    begins = make_algorithm(request.config).streams
    stages, mixed = [], list[Work]()
    flow = flow_of(request.config)
    held = flow.after()
    chunks = [n for n in CHUNKS if request.config.rollout.batch % n == 0]
    works = {name: _works(request, name, devices) for name in held}
    tables: Tables = {name: {k: t for k, (_, t) in found.items()} for name, found in works.items()}
    devices = _needed(devices, tables, {*named, *_pinned(request)})
    for name, after in held.items():
        found = {kind: table for kind, table in tables[name].items() if kind in devices}
        if name == flow.elastic and name not in request.pins:
            found = _with_gpus(found, devices)
        tables[name] = found
        parts: dict[str, Any] = {}
        if name == flow.elastic:
            mixed = [work for kind, (work, _) in works[name].items() if kind in devices]
            parts = _parts(request, mixed, chunks)
        stages.append(
            Stage(
                name,
                {kind: table.rates for kind, table in found.items()},
                after,
                streams=flow.table[name].streams is not None or begins,
                divisible=flow.table[name].device,
                beside=flow.table[name].loads != "trainer",
                switch_s=_switches(devices) if flow.table[name].loads == "trainer" else {},
                **parts,
            )
        )
    # A job has like devices; generators are jobs of one device each.
    generators = tables.get(flow.elastic or "", {})
    alike = len({devices[kind].kind.gpus_per_node > 0 for kind in generators}) == 1
    problem = Problem(
        stages,
        [
            Kind(
                name,
                own.count,
                own.price,
                own.wait_s(1),
                own.losses_per_hour,
                own.per_node,
                tuple(own.waits_s.items()) if len(set(own.waits_s.values())) > 1 else (),
                own.job_devices if own.job_devices < own.count else 0,
            )
            for name, own in devices.items()
        ],
        chunks=chunks,
        sync_s=_transfers(devices, request.profile),
        mixing=_mixing(mixed),
        mixes=frozenset({flow.elastic} if flow.elastic and alike else ()),
        allowed={s: kinds & devices.keys() for s, kinds in request.pins.items() if s in held},
        shared=crowds(devices),
        most_jobs=few_jobs(devices),
    )
    return problem, tables


def _looked_at(request: Request, named: Collection[str]) -> dict[str, Devices]:
    """Every node once; again under a worse name that a pin wants, or that allows longer or larger
    jobs, or more of them."""
    priced = request.priced()
    wanted = {*named, *_pinned(request)}

    def longer(own: Devices) -> bool:
        better = priced.get(own.same_as or "")
        return better is None or any(
            getattr(own, name) > getattr(better, name)
            for name in ("limit_s", "job_devices", "count")
        )

    return {name: own for name, own in priced.items() if name in wanted or longer(own)}


def _pinned(request: Request) -> set[str]:
    """Worse names of nodes that a stage is pinned to and not to the better one."""
    return {
        name
        for kinds in request.pins.values()
        for name in kinds & request.devices.keys()
        if request.devices[name].same_as not in kinds
    }


def _needed(
    devices: Mapping[str, Devices], tables: Tables, wanted: Collection[str]
) -> dict[str, Devices]:
    """Without the worse names of nodes under which no stage can do what it cannot otherwise."""

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
        if name in wanted or own.same_as is None or gains(name, own.same_as)
    }


def _works(
    request: Request, stage: str, devices: Mapping[str, Devices]
) -> dict[str, tuple[Work, RateTable]]:
    """By kind: a stage's work there, and its rates.

    Raises:
        PlanError: it can run on none of them.
    """
    found, reasons = dict[str, tuple[Work, RateTable]](), []
    for kind, own in devices.items():
        try:
            work = Work(own, stage, flow_of(request.config).table[stage], request.profile)
            found[kind] = work, _rates(work, request)
        except PlanError as error:
            reasons.append(f"{kind}: {error}")
    if not found:
        raise PlanError(f"stage {stage!r} fits nowhere: {'; '.join(reasons)}")
    return found


def _mixing(works: Sequence[Work]) -> float:
    """Of generators of several kinds what the worst pair keeps of their summed speed."""
    return min((mixing(pair) for pair in combinations(works, 2)), default=MIXING)


def _parts(request: Request, works: Sequence[Work], chunks: Sequence[int]) -> dict[str, Any]:
    """What is known of a rollout that is passed on in parts."""
    lines = [work.line(min(point.processes for point in work.measured)) for work in works]
    # Of unlike kinds the mean.
    fixed = statistics.fmean(max(0.0, a) / max(1e-9, a + b) for a, b in lines)
    config, profile = request.config, request.profile
    most = min(config.rollout.batch, sum(work.devices.count for work in works))
    counts = [1 << i for i in range(most.bit_length())]
    found = leads(
        profile.lengths.samples, profile.samples, engine_rows(config), counts, chunks, fixed
    )
    return {"again": fixed, "lead": found}


def _with_gpus(
    found: Mapping[str, RateTable], devices: Mapping[str, Devices]
) -> dict[str, RateTable]:
    """Where GPUs can generate, kinds without any do not: jobs of one pool ask for the same."""
    some = {kind: table for kind, table in found.items() if devices[kind].kind.gpus_per_node}
    return some or dict(found)


def _rates(work: Work, request: Request) -> RateTable:
    """On 0 to all devices of the kind, everything loaded."""
    count = work.devices.count
    counts = np.arange(count + 1)
    table = measured_rates(
        work.measured,
        request.profile.samples,
        count,
        runnable=work.able(counts),
        most=work_items(work.stage, request.config),
        memory_bytes=work.peak_memory_bytes or math.nan,
        fits=work.fits,
    )
    if not table.rates.any():
        raise PlanError(work.refused(count) or "no number of devices that is there was measured")
    known = request.corrections.get((work.stage, work.devices.name), Correction())
    spread, rates = np.minimum(table.spread, known.spread), table.rates / known.working
    # A pool is one job, an elastic one a job for each device.
    alone = work.stage == flow_of(request.config).elastic
    of_job = np.minimum(counts, 1) if alone else counts
    rates = np.where(of_job <= work.devices.job_devices, rates, 0.0)
    if not rates.any():
        raise PlanError(
            f"its jobs have at most {work.devices.job_devices} devices, and it runs on more alone "
            f"({work.devices.allowance.refused or 'MaxNodes'})"
        )
    limit = work.devices.time_limit_min
    if limit is not None:
        # A job that ends before any stage of it does would begin with the same one for ever.
        starts = sum(part.mean for part in work.overheads(1).values())
        quickest = starts + 1 / rates.max()
        rates = np.where(rates * (60 * limit - starts) >= 1, rates, 0.0)
        if not rates.any():
            raise PlanError(
                f"start and work take {quickest / 60:.1f} minutes at best, "
                f"{work.devices.time_limit_of} allows jobs of {limit}"
            )
    return replace(table, rates=rates, spread=spread)


def _switches(devices: Mapping[str, Devices]) -> dict[str, float]:
    """Bringing the trainer out and in again where devices have a memory of their own."""
    return {
        name: sum(own.profile.overhead_s(part, 1) for part in ("offload", "onload")) / 2
        for name, own in devices.items()
        if own.has_memory
    }


def _transfers(devices: Mapping[str, Devices], profile: Profile) -> dict[tuple[str, str], float]:
    """New weights from a pool of one kind to a pool of another: by network, or through files."""
    return {
        (source, target): min(transfer_ways(a, b, profile).values())
        for source, a in devices.items()
        for target, b in devices.items()
    }


def transfer_ways(a: Devices, b: Devices, profile: Profile) -> dict[str, float]:
    """Seconds that new weights take from a pool of one kind to one of another, by each way that
    was measured: files always, and the links between their nodes."""
    files = a.profile.overhead_s("publish", 1) + b.profile.overhead_s("weight_load", 1)
    ways = {"file": files}
    for link in links(profile, a, b):
        took = _seconds(link, profile.weights_bytes)
        ways[link.backend] = min(took, ways.get(link.backend, took))
    return ways


def links(profile: Profile, a: Devices, b: Devices) -> list[Link]:
    """Measured ways between nodes of two kinds."""
    ends = {a.profile.partition, b.profile.partition}
    return [
        link
        for link in (*profile.links, *a.profile.links)
        if link.path in ("inter_node", "inter_partition") and set(link.between) == ends
    ]


def _seconds(link: Link, size: int) -> float:
    return link.latency_s.value + size / link.bandwidth_bytes_per_s.value
