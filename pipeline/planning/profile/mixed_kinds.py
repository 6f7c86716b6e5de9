"""What unlike devices do together in one job: which of them can, and what was measured of it."""

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
    """By which sbatch tells their nodes apart there."""

    def request_resources(self, stage_plan: StagePlan, speeds: Sequence[float]) -> StagePlan:
        """A node of each, with one process, which gets work by its speed.

        Args:
            asked: of a job on two nodes of the first kind.
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
    """The pairs of kinds that one job can have nodes of, each with the first partition that can."""
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
    """The nodes of a kind, as they are in a partition."""
    same = (kind.gpu_type, kind.gpus_per_node, kind.cpus_per_node)
    for group in groups:
        if (group.gpu_type, group.gpus_per_node, group.cpus_per_node) == same:
            return group if group.usable_nodes and kind.gpus_per_node else None
    return None


def _feature(group: NodeGroup) -> str | None:
    names = (group.gpu_type, group.gpu_model)
    return next((feature for feature in group.features if feature in names), None)


def relative_speeds(times: Sequence[float]) -> tuple[float, ...]:
    """Relative speeds of processes that take so many seconds for the same work.

    Rounded, so that a pass that goes on finds what one before measured with them.
    """
    return tuple(round(max(times) / seconds, 1) for seconds in times)


def build_mixtures(
    pair: KindPair, given: Sequence[float], samples: int, trial: Trial
) -> list[Mixture]:
    """What a trial says of each stage that ran there on the whole batch."""
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
