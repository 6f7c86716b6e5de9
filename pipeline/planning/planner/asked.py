"""What jobs ask for: an option of a stage, or the devices of a pool, as resources of a plan."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from pipeline.plan import StagePlan
from pipeline.planning.profile.kinds import Kind

if TYPE_CHECKING:
    from pipeline.planning.planner.options import Option

TIME_FACTOR = 10
"""Wall time asked for, in predicted times: a limit is for jobs that hang."""
LEAST_MINUTES = 10
MEMORY_FACTOR = 1.5
MEMORY_STEP_MB = 256
MOST_CPUS = 16


def of_devices(kinds: Sequence[Kind], count: int) -> StagePlan:
    """What a job asks for that has so many devices of the first of these kinds.

    Args:
        kinds: several where jobs of each of them ask for the same.
    """
    first, told = kinds[0], {kind.constraint for kind in kinds}
    nodes = -(-count // first.devices_per_node)
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": nodes,
        "processes": -(-count // nodes),
    }
    if first.gpus_per_node:
        values |= {
            "gpus": values["processes"],
            "gpu_type": first.gpu_type or None,
            "constraint": first.constraint or None if len(told) == 1 else None,
            "cpus": min(map(_cpus, kinds)),
        }
    return _plan(values)


def of_option(option: Option) -> StagePlan:
    """What a stage asks for that runs as a job of its own."""
    first = option.devices[0].kind
    values: dict[str, object] = {
        "partition": first.partition or None,
        "nodes": sum(option.nodes),
        "processes": option.processes,
        "time_min": _minutes(option),
    }
    if first.gpus_per_node:
        values |= {"gpus": option.processes if option.device else 0, "cpus": _cpus(first)}
    if values.get("gpus") and first.gpu_type and len(option.devices) == 1:
        values["gpu_type"] = first.gpu_type
    if first.constraint and len(option.devices) == 1:
        values["constraint"] = first.constraint
    if len(option.devices) > 1:
        features = [str(own.feature) for own in option.devices]
        nodes = zip(features, option.nodes, strict=True)
        values["shares"] = dict(zip(features, option.speeds, strict=True))
        values["constraint"] = f"[{'&'.join(f'{name}*{n}' for name, n in nodes)}]"
    if option.peak_memory_bytes and not option.devices[0].has_memory:
        need = MEMORY_FACTOR * option.processes * option.peak_memory_bytes / 2**20
        rounded = math.ceil(need / MEMORY_STEP_MB) * MEMORY_STEP_MB
        values["mem_mb"] = min(rounded, first.mem_mb_per_node) if first.partition else rounded
    return _plan(values)


def _plan(values: dict[str, object]) -> StagePlan:
    return StagePlan.model_validate({k: v for k, v in values.items() if v is not None})


def _minutes(option: Option) -> int:
    asked = max(LEAST_MINUTES, math.ceil(TIME_FACTOR * option.seconds / 60))
    return int(min(asked, option.limit_s / 60))


def _cpus(kind: Kind) -> int:
    """Of a process that has a GPU."""
    return min(MOST_CPUS, max(1, kind.cpus_per_node // kind.gpus_per_node))
