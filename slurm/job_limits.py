"""Limits on jobs: hardware and access rules of partitions, and the limits of accounting.

Accounting limits apply if ``AccountingStorageEnforce`` contains ``limits`` or ``safe`` (manual page
of slurm.conf); their names are those of sacctmgr. If several set the same limit, the first of these
counts: the partition's QOS, the job's QOS, the association
(https://slurm.schedmd.com/resource_limits.html, "hierarchy"; the flag OverPartQOS, which swaps the
first two, is ignored). The usage of other users' jobs (Grp...) is unknown: Slurm refuses a job over
such a limit, and it is submitted again later.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rlinf.errors import PlanError, did_you_mean
from slurm.client import (
    NodeType,
    Partition,
    QueuedJob,
    SlurmClient,
    default_partition,
    partition_names,
)
from slurm.discovery import (
    SCONTROL_PARTITIONS,
    build_partition,
    enforces_limits,
    parse_limits,
    parse_partition_records,
    query_accounting,
)
from slurm.inventory import AccountingLimits, Association, Inventory, PartitionInventory, QosLimits
from slurm.jobs import JobResources

NESTED_ACCOUNTS_SINCE = (23, 11)
"""From about this Slurm version on, a listed account includes the accounts below it (manual page of
slurm.conf). These are not queried, so the list of accounts is then not checked."""


@dataclass(frozen=True)
class PartitionAccess:
    """The accounts and QOS that a partition accepts, in lower case as Slurm compares them.

    None allows all but the denied ones.
    """

    accounts: frozenset[str] | None = None
    denied_accounts: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None
    denied_qos: frozenset[str] = frozenset()

    def check(self, account: str, qos: str, partition: str, where: str) -> None:
        """Check that the partition accepts jobs of an account and a QOS; "" is unknown.

        Raises:
            PlanError: the partition does not accept them.
        """
        for what, name, allowed, denied in (
            ("account", account, self.accounts, self.denied_accounts),
            ("QOS", qos, self.qos, self.denied_qos),
        ):
            # If some are allowed, Slurm ignores the denied ones.
            refused = (
                name.casefold() in denied if allowed is None else name.casefold() not in allowed
            )
            if name and refused:
                only = "" if allowed is None else f", only of {', '.join(sorted(allowed))}"
                raise PlanError(
                    f"{where}.partition: partition {partition!r} takes no jobs of {what} "
                    f"{name}{only}; choose another partition, or another {what} in the site file "
                    "(cluster.site)"
                )


def partition_access(partition: PartitionInventory, version: str) -> PartitionAccess:
    """Return the access rules of a partition, as a version of Slurm applies them."""
    accounts = _names(partition.allowed_accounts)
    denied = frozenset[str]() if accounts is not None else _names(partition.denied_accounts)
    numbers = tuple(int(n) for n in re.findall(r"\d+", version)[:2])
    return PartitionAccess(
        None if not numbers or numbers >= NESTED_ACCOUNTS_SINCE else accounts,
        denied or frozenset(),
        _names(partition.allowed_qos),
        _names(partition.denied_qos) or frozenset(),
    )


def _names(listed: Collection[str] | None) -> frozenset[str] | None:
    return None if listed is None else frozenset(name.casefold() for name in listed)


MAX_ARRAY_SIZE = 1001
MAX_JOB_COUNT = 10000
"""Defaults of slurm.conf."""
QUEUE_FULL_MESSAGES = ("SubmitJob", "job queue full", "temporarily unable to accept job")
"""Parts of sbatch's refusal when there are too many jobs now. ``AssocMaxSubmitJobLimit`` and the
like come at once, MaxJobCount after sbatch has retried for two minutes (observed on 22.05)."""


@dataclass(frozen=True)
class Quota:
    """A limit on the number of pending and running jobs, and the jobs that count against it."""

    max_jobs: int
    description: str
    """``MaxSubmitJobs of account vision``."""
    account: str | None = None
    """Only jobs of this account count; None: of any account. The same for QOS and partitions."""
    qos: str | None = None
    partitions: frozenset[str] | None = None
    """Names in lower case."""

    def counts(self, job: QueuedJob) -> bool:
        """Return True if a job in the queue counts against this limit."""
        return (
            job.state.is_active
            and self.account in (None, job.account)
            and self.qos in (None, job.qos)
            and (
                self.partitions is None
                or any(
                    name.casefold() in self.partitions for name in partition_names(job.partition)
                )
            )
        )


@dataclass(frozen=True)
class _Rules:
    """The limits of one level of the hierarchy: a QOS or an association."""

    who: str
    scope: Quota
    """The jobs that its MaxSubmitJobs counts; the number may be absent (-1)."""
    jobs: int | None
    wall_min: int | None
    per_job: Mapping[str, int]
    in_all: Mapping[str, int]
    """The smaller limit on the total of several jobs: of one user or of all users."""


class SharedLimit(NamedTuple):
    """A limit on the total of several jobs."""

    owner: str
    """The QOS or account that sets the limit."""
    key: str
    """Key of the plan, or ``jobs``."""
    name: str
    """Slurm's name of the limit."""
    maximum: int


@dataclass(frozen=True)
class Quotas:
    """The limits of this user on this cluster."""

    cluster: str = ""
    """The cluster's name in accounting; "": unknown, then associations of all clusters count."""
    max_array_size: int = MAX_ARRAY_SIZE
    """Maximum elements of one array."""
    max_jobs: int = MAX_JOB_COUNT
    limits: AccountingLimits = field(default_factory=AccountingLimits)
    partition_qos: Mapping[str, str] = field(default_factory=dict)
    """The QOS of each partition that has one."""
    default_partition: str = ""
    access: Mapping[str, PartitionAccess] = field(default_factory=dict)
    """The accounts and QOS that each partition accepts."""

    def quotas_for(self, needs: JobResources) -> tuple[Quota, ...]:
        """Return the job-count limits that a job with these resources counts against, the
        tightest first."""
        found = {Quota(self.max_jobs, "MaxJobCount of the cluster")}
        for partition in self._partitions(needs):
            scopes = (rules.scope for rules in self._hierarchy(needs, partition))
            first = next((scope for scope in scopes if scope.max_jobs >= 0), None)
            if first is not None:
                found.add(first)
        return tuple(sorted(found, key=lambda quota: (quota.max_jobs, quota.description)))

    def check(self, needs: JobResources, key: str) -> None:
        """Check that a job with these resources can ever run in each partition that it names.

        Raises:
            PlanError: accounting allows no such job, or a partition accepts no jobs of its account
                or QOS; names the limit.
        """
        where = f"plan: {key}"
        for quota in self.quotas_for(needs):
            if quota.max_jobs == 0:
                raise PlanError(f"{where}: {quota.description} is 0: no job may be submitted")
        for partition in self._partitions(needs):
            association = self._association(needs, partition)
            account = needs.account or (association.account if association else "")
            access = self.access.get(partition, PartitionAccess())
            access.check(account, _qos(needs, association), partition, where)
            _check_job(needs, tuple(self._hierarchy(needs, partition)), where)

    def check_concurrent(self, jobs: Mapping[str, Sequence[JobResources]]) -> None:
        """Check that jobs that need each other can run at the same time.

        Args:
            jobs: by key of the plan, the alternative resources of a job, of which one suffices.

        Raises:
            PlanError: accounting never allows all of them at once; names them and the limit.
        """
        requested: dict[SharedLimit, dict[str, int]] = defaultdict(dict)
        for key, ways in jobs.items():
            shares_by_partition = [shares for needs in ways for shares in self.shared_limits(needs)]
            # A limit counts only if the job cannot avoid it by another alternative.
            for limit in set(shares_by_partition[0]).intersection(*shares_by_partition[1:]):
                requested[limit][key] = min(way[limit] for way in shares_by_partition)
        for limit, amounts in requested.items():
            total = sum(amounts.values())
            if len(amounts) > 1 and total > limit.maximum:
                raise PlanError(
                    f"plan: {' and '.join(amounts)}: they run at the same time and ask for "
                    f"{total} {limit.key} in all, {limit.owner} allows {limit.maximum} "
                    f"({limit.name}); lower them or choose another account, QOS or partition"
                )

    def shared_limits(self, needs: JobResources) -> list[dict[SharedLimit, int]]:
        """Return, for each partition that a job names, the shared limits that it counts against
        and the amount that it uses of each."""
        return [
            dict(_shared(needs, tuple(self._hierarchy(needs, partition))))
            for partition in self._partitions(needs)
        ]

    def max_minutes(self, needs: JobResources) -> tuple[int, str] | None:
        """Return the maximum minutes of a job and who sets this limit; None without a limit."""
        found = []
        for partition in self._partitions(needs):
            first = _wall(tuple(self._hierarchy(needs, partition)))
            if first is not None:
                found.append(first)
        return min(found, default=None)

    def _hierarchy(self, needs: JobResources, partition: str) -> Iterator[_Rules]:
        """Yield the levels of the hierarchy for a job; the first one that sets a limit counts."""
        association = self._association(needs, partition)
        theirs = self.partition_qos.get(partition, "")
        if theirs in self.limits.qos:
            shared = frozenset(
                p.casefold() for p, qos in self.partition_qos.items() if qos == theirs
            )
            yield _of_qos(theirs, self.limits.qos[theirs], shared)
        own = _qos(needs, association)
        if own in self.limits.qos and own != theirs:
            yield _of_qos(own, self.limits.qos[own], None)
        if association is not None:
            yield _of_association(association)

    def _association(self, needs: JobResources, partition: str) -> Association | None:
        """Return a job's association; None if the user has several and the job names none."""
        every = self.limits.associations
        own = [a for a in every if not self.cluster or a.cluster in ("", self.cluster)]
        if needs.account is None and len({a.account for a in own}) > 1:
            return None
        own = [a for a in own if needs.account in (None, a.account)]
        special = [a for a in own if a.partition and a.partition == partition.casefold()]
        general = [a for a in own if not a.partition]
        return next(iter([*special, *general]), None)

    def _partitions(self, needs: JobResources) -> tuple[str, ...]:
        return partition_names(needs.partition or self.default_partition)


def read_quotas(client: SlurmClient) -> Quotas:
    """Query all limits from Slurm.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    settings = client.settings()
    partitions = [
        build_partition(record)
        for record in parse_partition_records(client.run(*SCONTROL_PARTITIONS))
    ]
    accounting = query_accounting(client) if enforces_limits(settings) else None
    return Quotas(
        cluster=settings.get("ClusterName", ""),
        max_array_size=_array_size(settings),
        max_jobs=_number(settings.get("MaxJobCount", ""), MAX_JOB_COUNT),
        limits=parse_limits(*accounting) if accounting else AccountingLimits(),
        **_of_partitions({p.name: p for p in partitions}, settings.get("SLURM_VERSION", "")),
    )


def quotas_from_inventory(inventory: Inventory) -> Quotas:
    """Return the limits that an inventory contains, of accounting and of partitions."""
    limits = inventory.limits if inventory.enforces_limits else None
    return Quotas(
        cluster=inventory.cluster,
        limits=limits or AccountingLimits(),
        **_of_partitions(inventory.partitions, inventory.slurm_version),
    )


def _of_partitions(partitions: Mapping[str, PartitionInventory], version: str) -> dict[str, Any]:
    """Return the fields of :class:`Quotas` that come from the rules of partitions."""
    return {
        "partition_qos": {name: own.qos for name, own in partitions.items() if own.qos},
        "default_partition": default_partition(partitions) or "",
        "access": {name: partition_access(own, version) for name, own in partitions.items()},
    }


def is_queue_full(refusal: str) -> bool:
    """Return True if sbatch refused a job only because there are too many jobs now."""
    return any(word in refusal for word in QUEUE_FULL_MESSAGES)


def _qos(needs: JobResources, association: Association | None) -> str:
    """Return the QOS of a job; "" if unknown."""
    if needs.qos or association is None:
        return needs.qos or ""
    # If there are several, Slurm uses the default one.
    return association.default_qos or (association.qos[0] if len(association.qos) == 1 else "")


def _of_qos(name: str, qos: QosLimits, partitions: frozenset[str] | None) -> _Rules:
    most = -1 if qos.max_submit_per_user is None else qos.max_submit_per_user
    what = f"MaxSubmitJobsPerUser of QOS {name}"
    scope = Quota(most, what, qos=None if partitions else name, partitions=partitions)
    together = dict(qos.max_tres_all_jobs)
    for resource, amount in qos.max_tres_per_user.items():
        together[resource] = min(amount, together.get(resource, amount))
    return _Rules(
        f"QOS {name}",
        scope,
        qos.max_jobs_per_user,
        qos.max_wall_min,
        qos.max_tres_per_job,
        together,
    )


def _of_association(own: Association) -> _Rules:
    most = -1 if own.max_submit is None else own.max_submit
    where = f" in partition {own.partition}" if own.partition else ""
    what = f"MaxSubmitJobs of account {own.account}{where}"
    partitions = frozenset({own.partition}) if own.partition else None
    return _Rules(
        f"account {own.account}{where}",
        Quota(most, what, account=own.account, partitions=partitions),
        own.max_jobs,
        own.max_wall_min,
        own.max_tres_per_job,
        own.max_tres_all_jobs,
    )


def _check_job(needs: JobResources, hierarchy: tuple[_Rules, ...], where: str) -> None:
    """Check a job against the hierarchy's limits; the first level that sets a limit counts."""
    jobs = next((rules for rules in hierarchy if rules.jobs is not None), None)
    if jobs is not None and jobs.jobs == 0:
        raise PlanError(f"{where}: MaxJobs of {jobs.who} is 0: no job may run")
    wall = _wall(hierarchy)
    if wall is not None and (needs.time_limit_min or 0) > wall[0]:
        raise PlanError(
            f"{where}.time_limit_min: {needs.time_limit_min} minutes requested, {wall[1]} allows "
            f"{wall[0]}; lower it (a stage that runs out of time is requeued and goes on)"
        )
    for resource, key, amount in _amounts(needs):
        for limits, scope in (("per_job", "a job"), ("in_all", "all jobs together")):
            first = next((r for r in hierarchy if resource in getattr(r, limits)), None)
            if first is None:
                continue
            most = getattr(first, limits)[resource]
            if amount > most:
                raise PlanError(
                    f"{where}.{key}: {amount} requested in all, {first.who} allows {scope} {most} "
                    f"({resource}); lower it or choose another account, QOS or partition"
                )


def _wall(hierarchy: Sequence[_Rules]) -> tuple[int, str] | None:
    """Return the maximum minutes of a job and the first level that sets them."""
    return next(((r.wall_min, r.who) for r in hierarchy if r.wall_min is not None), None)


def _shared(needs: JobResources, hierarchy: Sequence[_Rules]) -> Iterator[tuple[SharedLimit, int]]:
    """Yield the shared limits that a job counts against, with the amount that it uses."""
    submits = next((r for r in hierarchy if r.scope.max_jobs >= 0), None)
    if submits is not None:
        name = submits.scope.description.split()[0]
        yield SharedLimit(submits.who, "jobs", name, submits.scope.max_jobs), 1
    runs = next((r for r in hierarchy if r.jobs is not None), None)
    if runs is not None and runs.jobs is not None:
        yield SharedLimit(runs.who, "jobs", "MaxJobs", runs.jobs), 1
    for resource, key, amount in _amounts(needs):
        first = next((r for r in hierarchy if resource in r.in_all), None)
        # Jobs may share a node, which then counts once.
        if first is not None and resource != "node":
            yield SharedLimit(first.who, key, resource, first.in_all[resource]), amount


def _array_size(settings: Mapping[str, str]) -> int:
    # MaxArraySize is one more than the largest index.
    most = _number(settings.get("MaxArraySize", ""), MAX_ARRAY_SIZE)
    for word in settings.get("SchedulerParameters", "").split(","):
        key, _, value = word.partition("=")
        if key == "max_array_tasks":
            most = min(most, _number(value, most))
    # MaxArraySize=0 disables arrays; a single job is not an array.
    return max(most, 1)


def _amounts(needs: JobResources) -> Iterator[tuple[str, str, int]]:
    """Yield the total resources of a job: Slurm's name, the plan's key, the amount."""
    yield "node", "nodes", needs.nodes
    yield "cpu", "cpus", needs.cpus_per_task * needs.tasks
    if needs.mem_mb:
        yield "mem", "mem_mb", needs.mem_mb * needs.nodes
    if needs.gpus_per_node:
        gpus = needs.gpus_per_node * needs.nodes
        yield "gres/gpu", "gpus", gpus
        if needs.gpu_type:
            yield f"gres/gpu:{needs.gpu_type}", "gpus", gpus


def _number(text: str, default: int) -> int:
    return int(text) if text.isdigit() else default


def check_resources(resources: JobResources, partitions: Mapping[str, Partition], key: str) -> None:
    """Check that a partition, or each of a list (``a100,h100``), has the resources of a job.

    Args:
        key: the plan's key for error messages, such as ``stages.train``.

    Raises:
        PlanError: unknown or closed partition, unknown GPU type, too many nodes, GPUs, CPUs or
            minutes, or too few nodes that have all resources at once.
    """
    where = f"plan: {key}"
    for partition in _chosen(resources.partition, partitions, where):
        _check_partition(resources, partition, where)


def _chosen(
    names: str | None, partitions: Mapping[str, Partition], where: str
) -> Iterator[Partition]:
    if names is None:
        names = default_partition(partitions)
        if names is None:
            raise PlanError(
                f"{where}.partition: this cluster has no default partition"
                f"{did_you_mean('', partitions)}"
            )
    for name in partition_names(names):
        if name not in partitions:
            raise PlanError(
                f"{where}.partition: no partition {name!r} here{did_you_mean(name, partitions)}"
            )
        yield partitions[name]


def _check_partition(needs: JobResources, partition: Partition, where: str) -> None:
    at = f"partition {partition.name!r}"
    if not partition.is_available:
        raise PlanError(
            f"{where}.partition: {at} is {partition.state} and starts no jobs; choose another, or "
            "ask when it will be up"
        )
    if needs.nodes > partition.nodes:
        raise PlanError(f"{where}.nodes: {needs.nodes} requested, {at} has {partition.nodes}")
    if partition.max_nodes is not None and needs.nodes > partition.max_nodes:
        raise PlanError(
            f"{where}.nodes: {needs.nodes} requested, {at} allows a job {partition.max_nodes} "
            "(MaxNodes); lower it or choose another partition"
        )
    _check_nodes(needs, partition.groups, where, at)
    limit = partition.time_limit_min
    if needs.time_limit_min and limit is not None and needs.time_limit_min > limit:
        raise PlanError(
            f"{where}.time_limit_min: {needs.time_limit_min} minutes requested, {at} allows "
            f"{limit}; lower it (a stage that runs out of time is requeued and goes on) or choose "
            "another partition"
        )


def _check_nodes(needs: JobResources, groups: Sequence[NodeType], where: str, at: str) -> None:
    """Check that enough nodes have all resources requested per node at once."""
    gpus, kind = needs.gpus_per_node, needs.gpu_type
    cpus, mem_mb = needs.cpus_per_task * needs.tasks_per_node, needs.mem_mb or 0
    if gpus:
        there = {name: 0 for group in groups for name in group.gpus}
        if not there:
            raise PlanError(f"{where}.devices: {at} has no GPUs")
        if kind is not None and kind not in there:
            raise PlanError(
                f"{where}.gpu_type: {at} has no GPU {kind!r}{did_you_mean(kind, there)}"
            )
    left = list(groups)
    for key, requested, has in (
        ("gpus", gpus, lambda group: _gpus(group, kind)),
        ("cpus", cpus, lambda group: group.cpus or math.inf),
        ("mem_mb", mem_mb, lambda group: group.mem_mb or math.inf),
    ):
        most = max(map(has, groups), default=math.inf)
        if requested > most:
            raise PlanError(f"{where}.{key}: {requested} requested, nodes of {at} have {most}")
        left = [group for group in left if requested <= has(group)]
    fit = sum(group.count for group in left)
    if needs.nodes > fit:
        each = [f"{gpus} {kind or 'GPUs'}"] * bool(gpus) + [f"{cpus} CPUs"]
        each += [f"{mem_mb} MiB"] * bool(mem_mb)
        there_are = "; ".join(f"{group.count} with {group}" for group in groups)
        raise PlanError(
            f"{where}.nodes: {needs.nodes} requested with {', '.join(each)} on each, {at} has "
            f"{fit} such nodes ({there_are})"
        )


def _gpus(group: NodeType, kind: str | None) -> int:
    """Return the GPUs per node; without a type, GPUs of all types count."""
    return sum(group.gpus.values()) if kind is None else group.gpus.get(kind, 0)
