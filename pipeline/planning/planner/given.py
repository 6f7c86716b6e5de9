"""A plan that somebody wrote or edited: what it would take, or which limit it breaks."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from pipeline.plan import Plan, StagePlan
from pipeline.planning.planner.devices import Devices
from pipeline.planning.planner.options import Option, alone, shareable, together
from pipeline.planning.planner.work import Work, work_items
from pipeline.planning.profile.schema import Profile
from rlinf.config import RunConfig
from rlinf.errors import PlanError, nearest
from stages.flow import flow_of


def option_of(
    stage: str,
    plan: Plan,
    devices: Mapping[str, Devices],
    profile: Profile,
    config: RunConfig,
    where: str,
) -> Option:
    """What a plan says of a stage, with the time it is expected to take.

    Raises:
        PlanError: it cannot be; names the key and the limit.
    """
    asked, at = plan.of(stage), f"{where}: stages.{stage}"
    chosen = _devices(asked, devices, at)
    nodes = _nodes(asked, chosen, at)
    for own, mine in zip(chosen, nodes, strict=True):
        if mine > own.kind.nodes:
            raise PlanError(f"{at}.nodes: {mine} asked of {own.name}, which has {own.kind.nodes}")
        if own.most_nodes is not None and sum(nodes) > own.most_nodes:
            raise PlanError(
                f"{at}.nodes: {sum(nodes)} asked of {own.name}, where a job has at most "
                f"{own.most_nodes} (MaxNodes of the partition)"
            )
        if asked.processes > own.per_node:
            raise PlanError(
                f"{at}.processes: {asked.processes} a node, nodes of {own.name} have "
                f"{own.per_node} devices"
            )
    count = sum(nodes) * asked.processes
    chosen = tuple(replace(o, allowance=o.allowance.of_job(asked, count)) for o in chosen)
    works = [Work(own, stage, flow_of(config).table[stage], profile) for own in chosen]
    for work in works:
        _check_memory(work, asked, at)
    most = work_items(stage, config)
    if count > most:
        raise PlanError(f"{at}.processes: {count} in all, there is work for {most}")
    if len(works) == 1:
        option = alone(works[0], nodes[0], asked.processes)
    else:
        option = together((works[0], works[1]), nodes, asked.processes)
    if not math.isfinite(option.seconds):
        raise PlanError(
            f"{at}.processes: nothing is known of {option.count} processes on {option.place}; "
            f"measure with: rlinf profile --processes {option.count}"
        )
    _check_time(option, asked, at)
    return option


def _devices(asked: StagePlan, devices: Mapping[str, Devices], at: str) -> tuple[Devices, ...]:
    partition = asked.partition or ""
    mine = [own for own in devices.values() if own.kind.partition == partition]
    if asked.partition is None and not mine:
        raise PlanError(f"{at}.partition: not given; one of {', '.join(devices)}")
    if not mine:
        partitions = dict.fromkeys(own.kind.partition for own in devices.values())
        raise PlanError(
            f"{at}.partition: {partition!r} is not here, or was not measured"
            f"{nearest(partition, partitions)}; there are {', '.join(partitions)}"
        )
    if isinstance(asked.shares, dict):
        named = [own for own in mine if {own.feature, own.kind.gpu_type} & set(asked.shares)]
        if len(named) == 2 and shareable(*named):
            return tuple(named)
        raise PlanError(
            f"{at}.shares: {', '.join(asked.shares)} are not two kinds of nodes of {partition}"
        )
    typed = [own for own in mine if asked.gpu_type in (None, own.kind.gpu_type)]
    if not typed:
        kinds = ", ".join(own.kind.gpu_type or "none" for own in mine)
        raise PlanError(f"{at}.gpu_type: {partition} has no {asked.gpu_type!r} (it has {kinds})")
    if len(typed) > 1:
        kinds = ", ".join(own.kind.gpu_type for own in typed)
        raise PlanError(
            f"{at}.gpu_type: {partition} has {kinds}, and how long it takes depends on it; name "
            "one, or give shares and a constraint"
        )
    return (typed[0],)


def _nodes(asked: StagePlan, chosen: tuple[Devices, ...], at: str) -> tuple[int, ...]:
    if len(chosen) == 1:
        return (asked.nodes,)
    text = (asked.constraint or "").strip("[]")
    counts = dict(part.split("*") for part in text.split("&") if part.count("*") == 1)
    found = tuple(int(counts.get(str(own.feature), 0)) for own in chosen)
    if sum(found) != asked.nodes or not all(found):
        features = "&".join(f"{own.feature}*N" for own in chosen)
        raise PlanError(
            f"{at}.constraint: {asked.constraint!r} does not say how many of the {asked.nodes} "
            f"nodes are of which kind; write [{features}]"
        )
    return found


def _check_memory(work: Work, asked: StagePlan, at: str) -> None:
    most, name = work.per_node(), work.devices.name
    need = work.peak_memory_bytes >> 20
    if asked.processes > most:
        raise PlanError(
            f"{at}.processes: {asked.processes} a node need {asked.processes * need} MiB "
            f"(measured), nodes of {name} have {work.devices.kind.mem_mb_per_node}; at most {most}"
        )
    on_host = not work.devices.has_memory
    if on_host and asked.mem_mb is not None and asked.mem_mb < asked.processes * need:
        raise PlanError(
            f"{at}.mem_mb: {asked.mem_mb}, but {asked.processes} processes needed "
            f"{asked.processes * need} MiB when measured on {name}"
        )
    if why := work.refused(asked.nodes * asked.processes):
        raise PlanError(f"{at}.processes: {why}")


def _check_time(option: Option, asked: StagePlan, at: str) -> None:
    tight = min(option.devices, key=lambda own: own.limit_s)
    most = tight.limit_s / 60
    if asked.time_min and asked.time_min > most:
        raise PlanError(
            f"{at}.time_min: {asked.time_min} asked, {tight.time_limit_of} allows {most:g}"
        )
    minutes = min(asked.time_min or math.inf, most)
    if option.seconds > 60 * minutes:
        raise PlanError(
            f"{at}.time_min: {minutes:g} minutes, but {option.seconds / 60:.1f} are expected on "
            f"{option.place} {option.size}; it would be requeued for ever"
        )
