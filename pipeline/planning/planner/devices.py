"""The devices a plan may use: what the cluster has, joined with what was measured on it."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from pipeline.planning.planner.limits import Allowance, allowance
from pipeline.planning.profile.kinds import Kind, group_of, kinds_of, left_out
from pipeline.planning.profile.schema import KindProfile, Profile
from rlinf.errors import PlanError, nearest
from slurm import gpus
from slurm.inventory import Inventory
from slurm.quotas import Shared, quotas_of
from slurm.site import Site


@dataclass(frozen=True)
class Devices:
    """Like devices of one partition."""

    kind: Kind
    profile: KindProfile
    features: tuple[str, ...] = ()
    price: float = 1.0
    """Of one device for an hour, in the site's unit; 1 where the site file says nothing."""
    has_price: bool = False
    """Whether the site file says it."""
    time_limit_min: int | None = None
    time_limit_of: str = ""
    """Whose limit that is: ``partition h100``."""
    allowance: Allowance = field(default_factory=Allowance)
    """Of accounting."""
    most_nodes: int | None = None
    """Of a job; None: all there are."""
    preemptible: bool = False
    losses_per_hour: float = 0.0
    """Expected preemptions and failures of a job."""
    same_as: str | None = None
    """A kind through which all of these nodes are reached too, and better."""
    nodes: frozenset[str] = frozenset()
    """Their names, those that are down included; empty where unknown."""
    down_nodes: int = 0

    @property
    def name(self) -> str:
        """Of the kind."""
        return self.kind.name

    @property
    def per_node(self) -> int:
        """Devices of a node."""
        return self.kind.devices_per_node

    @property
    def count(self) -> int:
        """All of them, or as many as all jobs together may have."""
        caps = [shared.most // amount for shared, amount in self.shares.items()]
        return min([self.kind.nodes * self.per_node, *caps])

    @property
    def shares(self) -> dict[Shared, int]:
        """Limits on what all jobs have together, and how much of it a device takes."""
        return {own: n for own, n in self.allowance.together.items() if own.key != "jobs" and n}

    @property
    def feature(self) -> str | None:
        """A feature by which sbatch finds these nodes among those of the partition."""
        names = (self.kind.gpu_type, self.kind.gpu_model)
        return next((feature for feature in self.features if feature in names), None)

    @property
    def has_memory(self) -> bool:
        """Whether they have memory of their own, which peaks are of; else those are of the node's.

        GPUs that a dev cluster only pretends to have were measured on its CPUs. Where the profile
        does not say, GPUs have it, but for those of a known name whose model the inventory lacks.
        """
        kind, told = self.kind, self.profile.memory
        if told is not None or not kind.gpus_per_node:
            return told == "device" and kind.gpus_per_node > 0
        return bool(kind.gpu_model) or gpus.find(kind.gpu_type) is None

    @property
    def job_nodes(self) -> int:
        """Most nodes of a job."""
        return self.kind.nodes if self.most_nodes is None else min(self.kind.nodes, self.most_nodes)

    @property
    def job_devices(self) -> int:
        """Most devices of a job."""
        most = self.job_nodes * self.per_node
        return most if self.allowance.devices is None else min(most, self.allowance.devices)

    @property
    def limit_s(self) -> float:
        """Longest time of a job."""
        return math.inf if self.time_limit_min is None else 60.0 * self.time_limit_min

    def wait_s(self, nodes: int) -> float:
        """Expected seconds in the queue; what is nearest to so many nodes, 0 if never measured."""
        waits = self.waits_s
        if not waits:
            return 0.0
        return waits[min(waits, key=lambda known: abs(math.log(known / nodes)))]

    @property
    def waits_s(self) -> dict[int, float]:
        """By number of nodes: the wait that was measured."""
        found: dict[int, float] = {}
        for wait in self.profile.waits:
            past = wait.history.q50_s if wait.history else 0.0
            found.setdefault(wait.nodes, past if wait.test_only_s is None else wait.test_only_s)
        return found


def devices_of(
    inventory: Inventory,
    site: Site,
    profile: Profile,
    partitions: Collection[str] = (),
    *,
    given: bool = False,
) -> tuple[dict[str, Devices], tuple[str, ...]]:
    """The devices to plan with, by kind, and notes on those that are left out.

    Nodes that were measured in another partition count as measured.

    Args:
        partitions: use these alone (partitions or kinds); all that were measured by default.
        given: for a plan by hand, which may ask for less with a device than the planner would: with
            those whose allowance is of 0 devices.

    Raises:
        PlanError: one of them is unknown or was not measured, or nothing of this cluster was.
    """
    kinds = kinds_of(inventory, site)
    _known(partitions, kinds, inventory)
    found, missing = {}, []
    closed: dict[str, str] = {}
    quotas = quotas_of(inventory)
    for name, kind in kinds.items():
        if partitions and not {name, kind.partition} & set(partitions):
            continue
        allowed = allowance(quotas, site, kind)
        if allowed.devices == 0 and not given:
            closed[name] = allowed.refused
            continue
        measured = _measured(kind, profile)
        if measured is None:
            missing.append(name)
            continue
        found[name] = _joined(kind, measured, inventory, site, allowed)
    if partitions and missing:
        raise PlanError(
            f"profile: nothing measured on {missing[0]!r}; "
            f"measure it with: rlinf profile --partition {kinds[missing[0]].partition}"
        )
    if closed and (partitions or not found):
        name, why = next(iter(closed.items()))
        raise PlanError(f"{name}: jobs of yours do not run there: {why}")
    if not found:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, this cluster "
            f"{', '.join(kinds) or 'nothing'}; measure here with: rlinf profile"
        )
    notes = [f"{name} was not measured and is left out" for name in missing]
    notes += [f"{name} is left out: {why}" for name, why in closed.items()]
    notes += [
        f"{own.name}: a job has at most {own.most_nodes} of its {own.kind.nodes} nodes (MaxNodes)"
        for own in found.values()
        if own.most_nodes is not None and own.most_nodes < own.kind.nodes
    ]
    notes += [note for own in found.values() if (note := _allowed(own))]
    notes += [note for own in found.values() if (note := left_out(own.kind, inventory))]
    return _told_apart(found, inventory), tuple(notes)


def local_devices(profile: Profile, kind: Kind) -> dict[str, Devices]:
    """This machine alone.

    Raises:
        PlanError: it was not measured.
    """
    measured = _measured(kind, profile)
    if measured is None:
        raise PlanError(
            f"profile: it has {', '.join(profile.kinds)}, not this machine; "
            "measure it with: rlinf profile"
        )
    return {kind.name: Devices(kind, measured)}


def with_counts(devices: Mapping[str, Devices], counts: Mapping[str, int]) -> dict[str, Devices]:
    """The same with other numbers of devices: ``{"h100": 8}``; of whatever the same nodes are in.

    Raises:
        PlanError: an unknown kind, or a number that whole nodes do not give.
    """
    out = dict(devices)
    for name, count in counts.items():
        if name not in out:
            raise PlanError(f"{name}={count}: no such kind{nearest(name, out)}; {_names(out)}")
        own = out[name]
        if count < 0 or count % own.per_node:
            raise PlanError(f"{name}={count}: nodes of {name} have {own.per_node} devices each")
        for other in [n for n in out if name in (n, out[n].same_as)]:
            nodes, theirs = count // own.per_node, out[other]
            if theirs.kind.nodes < own.kind.nodes:  # has some of the nodes alone
                nodes = min(nodes, theirs.kind.nodes)
            if count == 0:
                del out[other]
            else:
                kind = replace(theirs.kind, nodes=nodes)
                names, allowed = _named(theirs.nodes, nodes, name), theirs.allowance.of_kind(kind)
                out[other] = replace(
                    theirs, kind=kind, nodes=names, down_nodes=0, allowance=allowed
                )
    return out


def with_floors(devices: Mapping[str, Devices], estimated: Profile) -> dict[str, Devices]:
    """The same, with what the model's shapes say cannot hold a stage as failures, below the least
    number of processes that was tried; above it measurements alone count."""
    out = dict(devices)
    for name, own in devices.items():
        least: dict[str, int] = {}
        for point in own.profile.points:
            least[point.stage] = min(point.processes, least.get(point.stage, point.processes))
        guessed = estimated.kinds[name].points if name in estimated.kinds else ()
        failed = [p for p in guessed if not p.ok and p.processes < least.get(p.stage, 0)]
        points = (*own.profile.points, *failed)
        out[name] = replace(own, profile=own.profile.model_copy(update={"points": points}))
    return out


def _told_apart(found: Mapping[str, Devices], inventory: Inventory) -> dict[str, Devices]:
    """With ``same_as``: of partitions over the same nodes the one that is not preempted is better,
    then the one with longer jobs, then the one with more of the nodes, then the smaller one."""
    nodes = {name: own.nodes for name, own in found.items()}

    def rank(name: str) -> tuple[bool, float, int, int, str]:
        own, partition = found[name], inventory.partitions[found[name].kind.partition]
        return own.preemptible, -own.limit_s, -len(nodes[name]), partition.nodes, name

    better: dict[str, str] = {}
    ranked = sorted(found, key=rank)
    for i, name in enumerate(ranked):
        for other in ranked[:i]:
            if other not in better and nodes[name] and nodes[name] <= nodes[other]:
                better.setdefault(name, other)
    return {name: replace(own, same_as=better.get(name)) for name, own in found.items()}


def _known(wanted: Collection[str], kinds: Mapping[str, Kind], inventory: Inventory) -> None:
    names = set(kinds) | {kind.partition for kind in kinds.values()}
    for name in wanted:
        if name in names:
            continue
        if name in inventory.partitions:
            raise PlanError(f"partition {name}: no node of it can be used now")
        raise PlanError(f"no partition {name!r} here{nearest(name, names)}")


def _measured(kind: Kind, profile: Profile) -> KindProfile | None:
    own = profile.kinds.get(kind.name)
    if own is not None:
        if own.devices_per_node != kind.devices_per_node:
            raise PlanError(
                f"profile: kinds.{kind.name}.devices_per_node: measured on nodes of "
                f"{own.devices_per_node} devices, here they have {kind.devices_per_node}; "
                f"measure again with: rlinf profile --partition {kind.partition}"
            )
        return own
    for other in profile.kinds.values():
        alike = other.gpu_type == kind.gpu_type and other.devices_per_node == kind.devices_per_node
        if kind.gpu_type and alike and math.isclose(other.duty_cycle, kind.duty_cycle):
            return other
    return None


def _named(nodes: frozenset[str], count: int, kind: str) -> frozenset[str]:
    """So many nodes: of those there are, and of others that might be added to a kind."""
    if not nodes:
        return nodes
    return frozenset([*sorted(nodes), *(f"{kind} + {i}" for i in range(count))][:count])


def _allowed(own: Devices) -> str:
    """A note on what accounting allows of a kind, where that is less than there is."""
    there, most = own.kind.nodes * own.per_node, own.count
    if most < there:
        tight = min(own.shares.items(), key=lambda item: item[0].most // item[1])[0]
        return (
            f"{own.name}: {most} of its {there} devices are planned with: {tight.who} allows all "
            f"jobs together {tight.most} ({tight.name})"
        )
    if own.allowance.devices is not None and own.job_devices < own.job_nodes * own.per_node:
        return f"{own.name}: {own.allowance.refused}"
    return ""


def _joined(
    kind: Kind, measured: KindProfile, inventory: Inventory, site: Site, allowed: Allowance
) -> Devices:
    group = group_of(kind, inventory)
    price = group.cost_per_gpu_hour if group else None
    limits = [allowed.longest] if allowed.longest else []
    if (own := inventory.partitions[kind.partition].time_limit_min) is not None:
        limits.append((own, f"partition {kind.partition}"))
    longest = min(limits, default=None)
    return Devices(
        kind=kind,
        profile=measured,
        features=group.features if group else (),
        price=price or 1.0,
        has_price=price is not None,
        time_limit_min=longest[0] if longest else None,
        time_limit_of=longest[1] if longest else "",
        allowance=allowed,
        most_nodes=inventory.partitions[kind.partition].max_nodes_per_job,
        preemptible=inventory.preemptible(kind.partition),
        losses_per_hour=site.of(kind.partition).losses_per_hour,
        nodes=frozenset(group.nodes if group else ()),
        down_nodes=group.down_nodes if group else 0,
    )


def _names(devices: Sequence[str] | Mapping[str, object]) -> str:
    return f"there are {', '.join(devices)}"
