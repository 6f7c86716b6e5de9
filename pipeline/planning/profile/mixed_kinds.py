"""Mixtures of two kinds of devices in one job: the possible pairs and their measurements."""

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
    """Two kinds, and a partition in which a job can have nodes of both."""

    kinds: tuple[DeviceKind, DeviceKind]
    partition: str
    features: tuple[str, str]
    """Features by which sbatch selects their nodes in the partition."""

    def request_resources(self, stage_plan: StagePlan, speeds: Sequence[float]) -> StagePlan:
        """Return the request of a job with a node and a process of each kind, weighted by speed.

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
    """Return the pairs of kinds that one job can have, with the first partition that allows it."""
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
    """Return the node group of a kind in a partition."""
    hardware = (kind.gpu_type, kind.gpus_per_node, kind.cpus_per_node)
    for group in groups:
        if (group.gpu_type, group.gpus_per_node, group.cpus_per_node) == hardware:
            return group if group.usable_nodes and kind.gpus_per_node else None
    return None


def _selecting_feature(group: NodeGroup) -> str | None:
    names = (group.gpu_type, group.gpu_model)
    return next((feature for feature in group.features if feature in names), None)


def relative_speeds(times: Sequence[float]) -> tuple[float, ...]:
    """Return relative speeds of processes from their seconds for the same work.

    They are rounded, because they are part of the key under which measurements are cached.
    """
    return tuple(round(max(times) / seconds, 1) for seconds in times)


def build_mixtures(
    pair: KindPair, speeds: Sequence[float], samples: int, trial: Trial
) -> list[Mixture]:
    """Return the mixture of each stage that processed the whole batch in a trial."""
    mixtures = []
    for stage in dict.fromkeys(sample.stage for sample in trial.samples):
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
