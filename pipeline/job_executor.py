"""From plan and cluster settings to launcher jobs, and their ends back to the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from launchers.launcher import JobSpec, Launcher
from pipeline.executors import Outcome
from pipeline.graph import StageNode
from pipeline.plan import Plan, StagePlan
from pipeline.resources import (
    PartitionInfo,
    pool_resources,
    with_default_gpus,
    with_default_partition,
)
from pipeline.run import Run
from rlinf.channels.curve_sockets import INTERFACE_VARIABLE, LOOPBACK
from rlinf.channels.process_group import LAYOUT_VARIABLE
from rlinf.config import RunConfig, Section
from rlinf.errors import EXIT_REQUEUE, ConfigError, RequeueRequested
from rlinf.interpreters import configured_interpreter, resolve_interpreter, set_interpreters
from slurm.jobs import JobResources, JobState, JobStatus
from slurm.sbatch_options import EnvironmentVariables, OptionText, ShellText
from stages.flow import Flow
from stages.runner import StageCall

if TYPE_CHECKING:
    from slurm.job_limits import Quotas

JobRequests = dict[str, list[JobResources]]
"""By key of the plan, each with what it may ask for; several ways: any one of them is enough."""
QUEUE_NOTICE_S = 10.0
"""A job that waits longer than this is spoken of."""
log = logging.getLogger("rlinf")


class DriverJobConfig(Section):
    """What the job of a driver asks for (``rlinf submit``).

    It is a small job without GPUs. Of a site file it has what every job needs to start (account,
    set-up lines, container, environment), and nothing that makes a job large or sends it to GPUs.
    """

    partition: OptionText | None = None
    """Null: the cluster's default one."""
    cpus: int = Field(default=1, gt=0)
    mem_mb: int = Field(default=4000, gt=0)
    """Memory, MiB."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes, before which it requeues itself. Null: a day, or what the
    partition and accounting allow."""
    mail: OptionText | None = None
    """Whom Slurm tells when the job ends or fails."""
    account: OptionText | None = None
    """Null: the site file's."""
    qos: OptionText | None = None
    """Null: what the site file says of this very partition if it has no GPUs, else Slurm's default.
    So for the next two."""
    constraint: OptionText | None = None
    reservation: OptionText | None = None
    exclude: OptionText | None = None
    """Null: the site file's."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options by long name, which :func:`slurm.sbatch_options.check_driver_options`
    checks."""

    @field_validator("sbatch")
    @classmethod
    def _obeyed(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        from slurm.sbatch_options import check_driver_options

        return check_driver_options(value)


class ClusterConfig(Section):
    """How stages become processes. Never changes a result."""

    launcher: Literal["inprocess", "local", "slurm"] = "inprocess"
    """In the driver's process, as processes of this machine, or as Slurm jobs."""
    site: Path | None = None
    """File that describes the cluster's partitions: account, set-up lines, container, ..."""
    poll_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the queue; 30 or more on a cluster shared with others."""
    retries: int = Field(default=2, ge=0)
    """Further attempts at a stage that failed for no stated reason."""
    env: EnvironmentVariables = {}
    """Environment of every stage."""
    interface: ShellText | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. By default the loopback where all processes are of this machine, else everywhere."""
    pool_grace_s: float = Field(default=600.0, gt=0)
    """How long pools wait for another driver when theirs was killed, or failed, before they give
    their devices back."""
    driver: DriverJobConfig = DriverJobConfig()
    notify: tuple[ShellText, ...] = ()
    """A command, as a list of words, that is run at the end of the run and when it fails, with the
    run's name and ``finished``, ``failed`` or ``stopped`` as its last arguments."""

    @property
    def bind_interface(self) -> str | None:
        """Where sockets of the run listen; None: on all networks of their nodes."""
        return self.interface or (None if self.launcher == "slurm" else LOOPBACK)


def create_launcher(
    cluster: ClusterConfig, plan: Plan, driver: JobResources | None = None
) -> Launcher:
    """The launcher of the settings, after checking that it can run the plan.

    Args:
        driver: what the job asks for in which the driver runs; None: it is in none.

    Raises:
        PlanError: the plan asks for what the cluster does not have.
        SlurmError: Slurm is not there or does not answer.
    """
    if cluster.launcher == "local":
        from launchers.local import LocalLauncher

        return LocalLauncher()
    from launchers.submitit import SubmititLauncher
    from slurm.client import SlurmClient
    from slurm.job_limits import check_resources, read_quotas

    client = SlurmClient(poll_interval_s=cluster.poll_s)
    partitions, quotas = client.partitions(), read_quotas(client)
    if cluster.site is not None:
        from slurm.site import load_site

        load_site(cluster.site).check_partitions(partitions, cluster.site)
    jobs = plan_job_requests(plan, cluster)
    for key, ways in jobs.items():
        for needs in ways:
            check_resources(needs, partitions, key)
    check_quotas(plan, jobs, quotas, driver)
    check_hetjobs(plan, cluster)
    return SubmititLauncher(client, quotas)


def check_quotas(
    plan: Plan, jobs: JobRequests, quotas: Quotas, driver: JobResources | None = None
) -> None:
    """See that accounting allows the jobs of a plan, each and those that run at the same time.

    Args:
        jobs: see :func:`plan_job_requests`.
        driver: as for :func:`create_launcher`; it runs beside all of them.

    Raises:
        PlanError: it does not; names the key of the plan and the limit.
    """
    for key, ways in jobs.items():
        for needs in ways:
            quotas.check(needs, key)
    beside = {} if driver is None else {"cluster.driver": [driver]}
    for together in [jobs] if plan.pools else [{key: ways} for key, ways in jobs.items()]:
        quotas.check_concurrent({**beside, **together})


def plan_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """What the jobs of a plan ask for; in pools no stage is a job of its own."""
    if plan.pools:
        return pool_job_requests(plan, cluster)
    stages = plan.flow.all_stages
    return {f"stages.{name}": [job_resources(plan.stage_plan(name), cluster)] for name in stages}


def resolve_plan(plan: Plan, cluster: ClusterConfig) -> Plan:
    """The plan with what only the cluster can tell.

    Raises:
        SlurmError: Slurm is not there or does not answer.
    """
    if cluster.launcher != "slurm" or not (plan.pools or cluster.site):
        return plan
    from slurm.client import SlurmClient

    return resolve_for(plan, SlurmClient().partitions())


def resolve_for(plan: Plan, partitions: Mapping[str, PartitionInfo]) -> Plan:
    """The same, of partitions that are known."""
    # The site file may say more of the default partition than of others.
    return (
        with_default_gpus(plan, partitions)
        if plan.pools
        else with_default_partition(plan, partitions)
    )


def pool_job_requests(plan: Plan, cluster: ClusterConfig) -> JobRequests:
    """What the jobs ask for that all run at the same time.

    Components of a heterogeneous job are jobs to Slurm's limits. An elastic pool goes on with any
    one of its workers: those that ask for different things stand in its list.
    """
    found: JobRequests = {}
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            parts = pool_resources(plan, number, slot)
            several = zip(pool.gpus, parts, strict=False)
            named = [("", parts[0])] if len(parts) == 1 else [(f" on {k}", p) for k, p in several]
            for on, part in named:
                ways = found.setdefault(f"pools[{number}]{on}", [])
                needs = job_resources(part, cluster)
                if needs not in ways:
                    ways.append(needs)
    return found


def check_hetjobs(plan: Plan, cluster: ClusterConfig) -> None:
    """See that what will be heterogeneous jobs can be.

    Raises:
        PlanError: their components ask for what Slurm cannot tell apart.
    """
    from launchers.sbatch import check_hetjob_options

    jobs = []
    for number in [n for n, pool in enumerate(plan.pools) if pool.workers is None]:
        key, parts = f"pools[{number}]", pool_resources(plan, number)
        jobs.append(
            [(f"{key} on {part.partition}", job_resources(part, cluster)) for part in parts]
        )
    for components in [[part for job in jobs for part in job]] if plan.hetjob else jobs:
        check_hetjob_options(components)


def job_resources(
    plan: StagePlan, cluster: ClusterConfig, interpreter: str | None = None
) -> JobResources:
    """What a job of a stage asks for: the plan's numbers with the site's settings.

    Args:
        interpreter: see :func:`stage_interpreter`.
    """
    from slurm.site import load_site

    extra: dict[str, Any] = {}
    if cluster.site:
        site = load_site(cluster.site)
        extra = site.settings_for(plan.partition).resource_arguments()
        extra["env"] = {**extra.get("env", {}), **set_interpreters(site.interpreters)}
    network = {INTERFACE_VARIABLE: cluster.bind_interface} if cluster.bind_interface else {}
    layout = {LAYOUT_VARIABLE: str(plan.layout)} if plan.layout.parallel_dims() else {}
    env = {**extra.pop("env", {}), **network, **layout, **cluster.env}
    if plan.constraint is not None:
        extra["constraint"] = plan.constraint
    return base_resources(plan, interpreter=interpreter, env=env, **extra)


def base_resources(plan: StagePlan, **further: Any) -> JobResources:
    """What a job asks for by the plan's numbers.

    Args:
        further: other fields, such as the site's settings.
    """
    return JobResources(
        partition=plan.partition,
        nodes=plan.nodes,
        tasks_per_node=plan.processes,
        gpus_per_node=plan.gpus,
        gpu_type=plan.gpu_type,
        speed_weights=plan.speed_weights,
        cpus_per_task=plan.cpus,
        mem_mb=plan.mem_mb,
        time_limit_min=plan.time_limit_min,
        **further,
    )


def stage_interpreter(config: RunConfig, flow: Flow, *stages: str) -> str | None:
    """The interpreter of the process that runs some stages; None: this one.

    Raises:
        ConfigError: it is not there, or they need different ones.
    """
    found: dict[str | None, str] = {}
    for stage in stages:
        entry = flow.all_stages[stage]
        # The warm start depends on both, and saves what the trainer made.
        depends = [name for name in ("trainer", "engine") if name in entry.config_sections]
        section = entry.holds or next(iter(depends), None)
        name = None if section is None else configured_interpreter(config, section)
        if section is not None:
            path = None if name is None else resolve_interpreter(name, f"{section}.python")
            found.setdefault(path, f"{section}.python of {stage}")
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found.values())}: one process cannot run them under two interpreters; "
            "name the same, or give these stages pools or jobs of their own"
        )
    return next(iter(found), None)


def stage_job(node: StageNode, call: StageCall, run: Path, needs: JobResources) -> JobSpec:
    """The launcher's view of a stage call."""
    return JobSpec(node.name, call.argv(), call.output_folder, run / "logs" / node.stage, needs)


@dataclass
class QueueLog:
    """Says which jobs were submitted where, and why one does not start."""

    shown: bool = True
    """Whether there is a queue."""
    _since: dict[str, float] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def on_submit(self, name: str, identity: str, partition: str | None) -> None:
        """A job was handed to the launcher."""
        self._since[name] = time.monotonic()
        if self.shown:
            log.info("%s: job %s, partition %s", name, identity, partition or "(Slurm's default)")

    def on_status(self, name: str, identity: str, status: JobStatus) -> None:
        """How a job that has not ended is; each reason to wait is said once."""
        known = self._reasons.get(name)
        if status.state is JobState.PENDING:
            late = self.shown and time.monotonic() - self._since.get(name, 0.0) > QUEUE_NOTICE_S
            reason = status.reason or "no reason given"
            if late and reason != known:
                self._reasons[name] = reason
                log.info("%s: job %s waits: %s", name, identity, reason)
        elif known is not None:
            del self._reasons[name]
            log.info("%s: job %s runs%s", name, identity, status.node and f" on {status.node}")


@dataclass
class JobExecutor:
    """Runs stage calls through a launcher."""

    run: Run
    launcher: Launcher
    plan: Plan
    cluster: ClusterConfig
    should_stop: Callable[[], bool] = lambda: False
    supports_streaming: bool = False
    _ids: dict[StageNode, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._queue = QueueLog(shown=self.cluster.launcher == "slurm")

    @property
    def interrupt_note(self) -> str:
        if self.cluster.launcher == "local":
            return "its processes were stopped"
        return f"{len(self._ids)} submitted jobs go on, and a resumed run finds them"

    def start(self, node: StageNode, call: StageCall) -> None:
        python = stage_interpreter(self.run.config, self.plan.flow, node.stage)
        needs = job_resources(self.plan.stage_plan(node.stage), self.cluster, python)
        identity = self.launcher.submit(stage_job(node, call, self.run.folder, needs))
        self._ids[node] = identity
        self._queue.on_submit(node.name, identity, needs.partition)

    def poll(self) -> dict[StageNode, Outcome]:
        """Outcomes of ended jobs; sleeps until a look at the queue is due or a manifest shows."""
        if self.should_stop():
            raise RequeueRequested("the driver was asked to stop; resume the run to go on")
        ended: dict[StageNode, Outcome] = {}
        statuses = self.launcher.poll(list(self._ids.values()))
        for node, identity in list(self._ids.items()):
            status = statuses[identity]
            if status.state.is_active:
                self._queue.on_status(node.name, identity, status)
                continue
            del self._ids[node]
            code = 0 if status.state is JobState.DONE else status.exit_code or 1
            if status.state in (JobState.PREEMPTED, JobState.NODE_FAIL):
                code = EXIT_REQUEUE  # no fault of the stage's
            reason = status.reason or status.state.value
            ended[node] = Outcome(code, f"{status.state.value}: {reason}" if code else "")
        if not ended:
            time.sleep(self.launcher.poll_interval_s)
        return ended

    def cancel(self) -> None:
        """Cancel what still waits or runs."""
        self.launcher.cancel(list(self._ids.values()))
        self._ids.clear()

    def stop(self, *, keep_jobs: bool = False) -> None:
        self.launcher.close()
