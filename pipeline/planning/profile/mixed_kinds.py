"""Mixtures of two kinds of devices in one job: which are possible, and what was measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from pipeline.plan import StagePlan
from pipeline.planning.profile.device_kinds import DeviceKind
from pipeline.planning.profile.measurement import Trial
from pipeline.planning.profile.schema import Mixture
from slurm.inventory import Inventory, NodeGroup


@dataclass(frozen=True)
class KindPair:
    """Two kinds, and a partition whose jobs can have a node of each."""

    kinds: tuple[DeviceKind, DeviceKind]
    partition: str
    features: tuple[str, str]
    """Features by which sbatch distinguishes their nodes in the partition."""

    def request_resources(self, stage_plan: StagePlan, speeds: Sequence[float]) -> StagePlan:
        """Return the request of a job with a node of each kind, one process each, and work by
        speed.

        Args:
            stage_plan: request of a job on two nodes of the first kind.
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
    """Return the pairs of kinds that one job can have, each with the first partition that allows
    it."""
    found = []
    for pair in combinations(kinds, 2):
        for name, partition in inventory.partitions.items():
            groups = [_like(kind, partition.groups) for kind in pair]
            marks = [_feature(group) if group else None for group in groups]
            if partition.is_available and None not in marks and marks[0] != marks[1]:
                found.append(KindPair((pair[0], pair[1]), name, (str(marks[0]), str(marks[1]))))
                break
    return found


def _like(kind: DeviceKind, groups: Sequence[NodeGroup]) -> NodeGroup | None:
    """Return the node group of a kind in a partition."""
    same = (kind.gpu_type, kind.gpus_per_node, kind.cpus_per_node)
    for group in groups:
        if (group.gpu_type, group.gpus_per_node, group.cpus_per_node) == same:
            return group if group.usable_nodes and kind.gpus_per_node else None
    return None


def _feature(group: NodeGroup) -> str | None:
    names = (group.gpu_type, group.gpu_model)
    return next((feature for feature in group.features if feature in names), None)


def relative_speeds(times: Sequence[float]) -> tuple[float, ...]:
    """Return relative speeds of processes by their seconds for the same work.

    They are rounded, so that a continued pass finds the measurements of an earlier one.
    """
    return tuple(round(max(times) / seconds, 1) for seconds in times)


def build_mixtures(
    pair: KindPair, given: Sequence[float], samples: int, trial: Trial
) -> list[Mixture]:
    """Return the mixture of each stage that ran on the whole batch in a trial."""
    found = []
    for stage in dict.fromkeys(sample.stage for sample in trial.samples):
        ran = [s for s in trial.samples if s.stage == stage and s.samples == samples]
        seconds = [s.seconds for s in ran if not (s.failure or s.cold) and s.seconds > 0]
        if seconds:
            names = (pair.kinds[0].name, pair.kinds[1].name)
            found.append(
                Mixture.of(
                    seconds,
                    kinds=names,
                    stage=stage,
                    batch_share=(given[0] / sum(given), given[1] / sum(given)),
                )
            )
    return found
