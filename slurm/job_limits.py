"""Limits on jobs: hardware and access rules of partitions, and limits of accounting.

Accounting limits apply if ``AccountingStorageEnforce`` contains ``limits`` or ``safe`` (manual page
of slurm.conf); their names are those of sacctmgr. If a limit is set several times, the first of
these applies: the partition's QOS, the job's QOS, the association
(https://slurm.schedmd.com/resource_limits.html, "hierarchy"; the flag OverPartQOS, which swaps the
first two, is ignored). Limits over the jobs of several users (Grp...) are not checked against the
usage of other users, which is unknown: if Slurm refuses a job, the job is submitted again later.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from rlinf.errors import PlanError, did_you_mean
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import (
    MAX_ARRAY_SIZE,
    MAX_JOB_COUNT,
    Inventory,
    NodeGroup,
    PartitionInventory,
    default_partition,
    is_accepted,
)
from slurm.jobs import JobResources, partition_names
from slurm.records import AccountingLimits, Association, QosLimits, QueuedJob

NESTED_ACCOUNTS_SINCE = (23, 11)
"""From about this Slurm version on, an account in a list includes its subaccounts (manual page of
slurm.conf). Subaccounts are not queried, so lists of accounts are then not checked."""


QUEUE_FULL_MESSAGES = ("SubmitJob", "job queue full", "temporarily unable to accept job")
"""Parts of sbatch's error message if there are too many jobs. If a limit of accounting is exceeded,
sbatch fails immediately (``AssocMaxSubmitJobLimit`` and similar). If MaxJobCount is exceeded, it
first retries for two minutes (observed on 22.05)."""


@dataclass(frozen=True)
class JobCountLimit:
    """A limit on the number of pending and running jobs, and the jobs that count against it."""

    max_jobs: int
    """-1: no limit."""
    description: str
    """Text for messages: ``MaxSubmitJobs of account vision``."""
    account: str | None = None
    """Only jobs of this account count; None: of any account. QOS and partitions work likewise."""
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
class _LimitLevel:
    """The limits of one level of the hierarchy: a QOS or an association. None: no limit."""

    owner: str
    """The QOS or account, for messages: ``account vision``."""
    submit_limit: JobCountLimit
    """Its MaxSubmitJobs; ``max_jobs`` is -1 without a limit."""
    max_running: int | None
    """Maximum number of running jobs (MaxJobs)."""
    max_wall_min: int | None
    max_tres_per_job: Mapping[str, int]
    """Maximum amounts by Slurm's names of resources (TRES), such as ``gres/gpu``."""
    max_tres_all_jobs: Mapping[str, int]
    """Maximum totals of several jobs: the lower of the limits per user and for all users."""


class SharedLimit(NamedTuple):
    """A limit on the total of several jobs."""

    owner: str
    """The QOS or account that sets the limit."""
    key: str
    """The limited amount: a key of the plan, or ``jobs``."""
    name: str
    """Slurm's name of the limit."""
    maximum: int


@dataclass(frozen=True)
class ClusterLimits:
    """All limits of this user on this cluster."""

    cluster: str = ""
    """The cluster's name in accounting; "": unknown, then associations of all clusters count."""
    max_array_size: int = MAX_ARRAY_SIZE
    """Maximum elements of one array."""
    max_jobs: int = MAX_JOB_COUNT
    """MaxJobCount: maximum number of jobs of all users."""
    accounting: AccountingLimits = field(default_factory=AccountingLimits)
    partitions: Mapping[str, PartitionInventory] = field(default_factory=dict)
    slurm_version: str = ""

    def job_count_limits(self, resources: JobResources) -> tuple[JobCountLimit, ...]:
        """Return the limits on the number of jobs to which a job with these resources is subject,
        the tightest first."""
        limits = {JobCountLimit(self.max_jobs, "MaxJobCount of the cluster")}
        for partition in self._partitions(resources):
            candidates = (level.submit_limit for level in self._hierarchy(resources, partition))
            first = next((limit for limit in candidates if limit.max_jobs >= 0), None)
            if first is not None:
                limits.add(first)
        return tuple(sorted(limits, key=lambda limit: (limit.max_jobs, limit.description)))

    def check(self, resources: JobResources, key: str) -> None:
        """Check that a job with these resources can ever run in each partition that it names.

        Raises:
            PlanError: accounting allows no such job, or a partition accepts no jobs of its account
                or QOS. The message names the limit.
        """
        prefix = f"plan: {key}"
        for limit in self.job_count_limits(resources):
            if limit.max_jobs == 0:
                raise PlanError(f"{prefix}: {limit.description} is 0: no job may be submitted")
        for partition in self._partitions(resources):
            association = self._association(resources, partition)
            account = resources.account or (association.account if association else "")
            self._check_access(partition, account, _job_qos(resources, association), prefix)
            _check_job(resources, tuple(self._hierarchy(resources, partition)), prefix)

    def check_concurrent(self, jobs: Mapping[str, Sequence[JobResources]]) -> None:
        """Check that jobs which must run at the same time (pools and the driver) can do so.

        Args:
            jobs: alternative resources of each job, by key of the plan; the job needs only one of
                its alternatives.

        Raises:
            PlanError: accounting never allows all jobs at once. The message names jobs and limit.
        """
        requested: dict[SharedLimit, dict[str, int]] = defaultdict(dict)
        for key, alternatives in jobs.items():
            possible_amounts = [a for r in alternatives for a in self.shared_limits(r)]
            # Slurm may use any of these partitions, so only limits of all of them surely apply.
            for limit in set(possible_amounts[0]).intersection(*possible_amounts[1:]):
                requested[limit][key] = min(amounts[limit] for amounts in possible_amounts)
        for limit, amounts in requested.items():
            total = sum(amounts.values())
            if len(amounts) > 1 and total > limit.maximum:
                raise PlanError(
                    f"plan: {' and '.join(amounts)}: they run at the same time and ask for "
                    f"{total} {limit.key} in all, {limit.owner} allows {limit.maximum} "
                    f"({limit.name}); lower them or choose another account, QOS or partition"
                )

    def shared_limits(self, resources: JobResources) -> list[dict[SharedLimit, int]]:
        """Return the shared limits of a job, with the amount that it uses of each: one mapping for
        each partition that the job names."""
        return [
            dict(_shared_limits(resources, tuple(self._hierarchy(resources, partition))))
            for partition in self._partitions(resources)
        ]

    def max_minutes(self, resources: JobResources) -> tuple[int, str] | None:
        """Return the maximum minutes of a job and the owner of this limit; None without a limit."""
        limits = []
        for partition in self._partitions(resources):
            limit = _max_minutes(tuple(self._hierarchy(resources, partition)))
            if limit is not None:
                limits.append(limit)
        return min(limits, default=None)

    def _hierarchy(self, resources: JobResources, partition: str) -> Iterator[_LimitLevel]:
        """Yield the levels of a job's hierarchy; of each limit, the first level that sets it
        applies."""
        association = self._association(resources, partition)
        partition_qos = self.partitions[partition].qos if partition in self.partitions else ""
        if partition_qos in self.accounting.qos:
            partitions = frozenset(
                name.casefold() for name, p in self.partitions.items() if p.qos == partition_qos
            )
            yield _qos_level(partition_qos, self.accounting.qos[partition_qos], partitions)
        job_qos = _job_qos(resources, association)
        if job_qos in self.accounting.qos and job_qos != partition_qos:
            yield _qos_level(job_qos, self.accounting.qos[job_qos], None)
        if association is not None:
            yield _association_level(association)

    def _association(self, resources: JobResources, partition: str) -> Association | None:
        """Return a job's association; None if it names no account and the user has several."""
        clusters = ("", self.cluster)
        candidates = [
            a for a in self.accounting.associations if not self.cluster or a.cluster in clusters
        ]
        if resources.account is None and len({a.account for a in candidates}) > 1:
            return None
        candidates = [a for a in candidates if resources.account in (None, a.account)]
        specific = [a for a in candidates if a.partition and a.partition == partition.casefold()]
        general = [a for a in candidates if not a.partition]
        return next(iter([*specific, *general]), None)

    def _partitions(self, resources: JobResources) -> tuple[str, ...]:
        return partition_names(resources.partition or default_partition(self.partitions) or "")

    def _check_access(self, name: str, account: str, qos: str, prefix: str) -> None:
        """Check that a partition accepts jobs of an account and a QOS; "" stands for unknown.

        Raises:
            PlanError: the partition does not accept them.
        """
        if (partition := self.partitions.get(name)) is None:
            return
        version = tuple(int(n) for n in re.findall(r"\d+", self.slurm_version)[:2])
        may_be_nested = not version or version >= NESTED_ACCOUNTS_SINCE
        for kind, value, allowed, denied in (
            ("account", account, partition.allowed_accounts, partition.denied_accounts),
            ("QOS", qos, partition.allowed_qos, partition.denied_qos),
        ):
            if not value or (kind == "account" and allowed is not None and may_be_nested):
                continue
            if not is_accepted(value, allowed, denied):
                names = sorted({word.casefold() for word in allowed or ()})
                only = "" if allowed is None else f", only of {', '.join(names)}"
                raise PlanError(
                    f"{prefix}.partition: partition {name!r} takes no jobs of {kind} "
                    f"{value}{only}; choose another partition, or another {kind} in the site file "
                    "(cluster.site; rlinf init-site writes one)"
                )


def read_cluster_limits(client: SlurmClient) -> ClusterLimits:
    """Query all limits from Slurm.

    Raises:
        SlurmError: Slurm is not installed or does not answer.
    """
    return cluster_limits_from_inventory(discover_inventory(client, with_usage=False))


def cluster_limits_from_inventory(inventory: Inventory) -> ClusterLimits:
    """Return the limits that an inventory contains, of accounting and of partitions."""
    accounting = inventory.limits if inventory.enforces_limits else None
    return ClusterLimits(
        cluster=inventory.cluster,
        max_array_size=inventory.max_array_size,
        max_jobs=inventory.max_jobs,
        accounting=accounting or AccountingLimits(),
        partitions=inventory.partitions,
        slurm_version=inventory.slurm_version,
    )


def is_queue_full(refusal: str) -> bool:
    """Return True if sbatch refused a job only because there are too many jobs now."""
    return any(word in refusal for word in QUEUE_FULL_MESSAGES)


def _job_qos(resources: JobResources, association: Association | None) -> str:
    """Return the QOS of a job; "" if unknown."""
    if resources.qos or association is None:
        return resources.qos or ""
    # If the association has several QOS, Slurm uses the default one.
    return association.default_qos or (association.qos[0] if len(association.qos) == 1 else "")


def _qos_level(name: str, qos: QosLimits, partitions: frozenset[str] | None) -> _LimitLevel:
    """Return the limits of a QOS.

    Args:
        partitions: the partitions that have this QOS: all of their jobs count. None: the jobs
            that have this QOS count.
    """
    max_jobs = -1 if qos.max_submit_per_user is None else qos.max_submit_per_user
    description = f"MaxSubmitJobsPerUser of QOS {name}"
    submit_limit = JobCountLimit(
        max_jobs, description, qos=None if partitions else name, partitions=partitions
    )
    all_jobs = dict(qos.max_tres_all_jobs)
    for resource, amount in qos.max_tres_per_user.items():
        all_jobs[resource] = min(amount, all_jobs.get(resource, amount))
    return _LimitLevel(
        f"QOS {name}",
        submit_limit,
        qos.max_jobs_per_user,
        qos.max_wall_min,
        qos.max_tres_per_job,
        all_jobs,
    )


def _association_level(association: Association) -> _LimitLevel:
    max_jobs = -1 if association.max_submit is None else association.max_submit
    suffix = f" in partition {association.partition}" if association.partition else ""
    description = f"MaxSubmitJobs of account {association.account}{suffix}"
    partitions = frozenset({association.partition}) if association.partition else None
    return _LimitLevel(
        f"account {association.account}{suffix}",
        JobCountLimit(max_jobs, description, account=association.account, partitions=partitions),
        association.max_jobs,
        association.max_wall_min,
        association.max_tres_per_job,
        association.max_tres_all_jobs,
    )


def _check_job(resources: JobResources, hierarchy: tuple[_LimitLevel, ...], prefix: str) -> None:
    """Check a job against the hierarchy's limits; the first level that sets a limit applies."""
    jobs_level = next((level for level in hierarchy if level.max_running is not None), None)
    if jobs_level is not None and jobs_level.max_running == 0:
        raise PlanError(f"{prefix}: MaxJobs of {jobs_level.owner} is 0: no job may run")
    time_limit = _max_minutes(hierarchy)
    if time_limit is not None and (resources.time_limit_min or 0) > time_limit[0]:
        raise PlanError(
            f"{prefix}.time_limit_min: {resources.time_limit_min} minutes requested, "
            f"{time_limit[1]} allows {time_limit[0]}; lower it (a stage out of time is requeued)"
        )
    for resource, key, amount in _requested_amounts(resources):
        for field_name, jobs in (
            ("max_tres_per_job", "a job"),
            ("max_tres_all_jobs", "all jobs together"),
        ):
            level = next((r for r in hierarchy if resource in getattr(r, field_name)), None)
            if level is None:
                continue
            maximum = getattr(level, field_name)[resource]
            if amount > maximum:
                raise PlanError(
                    f"{prefix}.{key}: {amount} requested in all, {level.owner} allows {jobs} "
                    f"{maximum} ({resource}); lower it or choose another account, QOS or partition"
                )


def _max_minutes(hierarchy: Sequence[_LimitLevel]) -> tuple[int, str] | None:
    return next(((r.max_wall_min, r.owner) for r in hierarchy if r.max_wall_min is not None), None)


def _shared_limits(
    resources: JobResources, hierarchy: Sequence[_LimitLevel]
) -> Iterator[tuple[SharedLimit, int]]:
    """Yield the shared limits to which a job is subject, with the amount that it uses."""
    submit_level = next((level for level in hierarchy if level.submit_limit.max_jobs >= 0), None)
    if submit_level is not None:
        limit = submit_level.submit_limit
        name = limit.description.split()[0]
        yield SharedLimit(submit_level.owner, "jobs", name, limit.max_jobs), 1
    jobs_level = next((level for level in hierarchy if level.max_running is not None), None)
    if jobs_level is not None and jobs_level.max_running is not None:
        yield SharedLimit(jobs_level.owner, "jobs", "MaxJobs", jobs_level.max_running), 1
    for resource, key, amount in _requested_amounts(resources):
        level = next((level for level in hierarchy if resource in level.max_tres_all_jobs), None)
        # A node that several jobs share counts once, so node counts cannot be added up.
        if level is not None and resource != "node":
            yield SharedLimit(level.owner, key, resource, level.max_tres_all_jobs[resource]), amount


def _requested_amounts(resources: JobResources) -> Iterator[tuple[str, str, int]]:
    """Yield the total resources of a job: Slurm's name, the plan's key, the amount."""
    yield "node", "nodes", resources.nodes
    yield "cpu", "cpus", resources.cpus_per_task * resources.tasks
    if resources.mem_mb:
        yield "mem", "mem_mb", resources.mem_mb * resources.nodes
    if resources.gpus_per_node:
        gpus = resources.gpus_per_node * resources.nodes
        yield "gres/gpu", "gpus", gpus
        if resources.gpu_type:
            yield f"gres/gpu:{resources.gpu_type}", "gpus", gpus


def check_resources(
    resources: JobResources, partitions: Mapping[str, PartitionInventory], key: str
) -> None:
    """Check that a partition, or each of a list (``a100,h100``), has the resources of a job.

    Args:
        key: the plan's key for error messages, such as ``stages.train``.

    Raises:
        PlanError: unknown or closed partition, unknown GPU type, too many nodes, GPUs, CPUs or
            minutes, or too few nodes that have all resources at once.
    """
    prefix = f"plan: {key}"
    for partition in _named_partitions(resources.partition, partitions, prefix):
        _check_partition(resources, partition, prefix)


def _named_partitions(
    names: str | None, partitions: Mapping[str, PartitionInventory], prefix: str
) -> Iterator[PartitionInventory]:
    if names is None:
        names = default_partition(partitions)
        if names is None:
            raise PlanError(
                f"{prefix}.partition: this cluster has no default partition"
                f"{did_you_mean('', partitions)}"
            )
    for name in partition_names(names):
        if name not in partitions:
            raise PlanError(
                f"{prefix}.partition: no partition {name!r} here{did_you_mean(name, partitions)}"
            )
        yield partitions[name]


def _check_partition(resources: JobResources, partition: PartitionInventory, prefix: str) -> None:
    label = f"partition {partition.name!r}"
    if not partition.is_available:
        raise PlanError(
            f"{prefix}.partition: {label} is not up and starts no jobs; choose another, or ask "
            "when it will be up"
        )
    if resources.nodes > partition.nodes:
        raise PlanError(
            f"{prefix}.nodes: {resources.nodes} requested, {label} has {partition.nodes}"
        )
    if partition.max_nodes_per_job is not None and resources.nodes > partition.max_nodes_per_job:
        raise PlanError(
            f"{prefix}.nodes: {resources.nodes} requested, {label} allows a job "
            f"{partition.max_nodes_per_job} (MaxNodes); lower it or choose another partition"
        )
    _check_nodes(resources, partition.groups, prefix, label)
    limit = partition.time_limit_min
    if resources.time_limit_min and limit is not None and resources.time_limit_min > limit:
        raise PlanError(
            f"{prefix}.time_limit_min: {resources.time_limit_min} minutes requested, {label} "
            f"allows {limit}; lower it (a stage that runs out of time is requeued and goes on) or "
            "choose another partition"
        )


def _check_nodes(
    resources: JobResources, groups: Sequence[NodeGroup], prefix: str, label: str
) -> None:
    """Check that enough nodes have all the resources that are requested per node."""
    gpus, gpu_type = resources.gpus_per_node, resources.gpu_type
    cpus, mem_mb = resources.cpus_per_task * resources.tasks_per_node, resources.mem_mb or 0
    if gpus:
        gpu_types = {name: 0 for group in groups for name in group.gpus}
        if not gpu_types:
            raise PlanError(
                f"{prefix}.gpus: {label} has no GPUs; name a partition that has "
                "(rlinf inventory lists them)"
            )
        if gpu_type is not None and gpu_type not in gpu_types:
            hint = did_you_mean(gpu_type, gpu_types)
            raise PlanError(f"{prefix}.gpu_type: {label} has no GPU {gpu_type!r}{hint}")
    suitable = list(groups)
    for key, requested, per_node in (
        ("gpus", gpus, lambda group: _gpus(group, gpu_type)),
        ("cpus", cpus, lambda group: group.cpus_per_node or math.inf),
        ("mem_mb", mem_mb, lambda group: group.mem_mb_per_node or math.inf),
    ):
        maximum = max(map(per_node, groups), default=math.inf)
        if requested > maximum:
            raise PlanError(
                f"{prefix}.{key}: {requested} requested, nodes of {label} have {maximum}"
            )
        suitable = [group for group in suitable if requested <= per_node(group)]
    num_suitable = sum(group.count for group in suitable)
    if resources.nodes > num_suitable:
        per_node_texts = [f"{gpus} {gpu_type or 'GPUs'}"] * bool(gpus) + [f"{cpus} CPUs"]
        per_node_texts += [f"{mem_mb} MiB"] * bool(mem_mb)
        node_texts = "; ".join(f"{group.count} with {group.description}" for group in groups)
        raise PlanError(
            f"{prefix}.nodes: {resources.nodes} requested with {', '.join(per_node_texts)} on "
            f"each, {label} has {num_suitable} such nodes ({node_texts})"
        )


def _gpus(group: NodeGroup, gpu_type: str | None) -> int:
    """Return the GPUs per node; without a type, GPUs of all types count."""
    gpus = group.gpus
    return sum(gpus.values()) if gpu_type is None else gpus.get(gpu_type, 0)
