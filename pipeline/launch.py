"""From plan and cluster settings to launcher jobs, and their ends back to the driver."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field, field_validator

from launchers.base import Job, Launcher
from pipeline.flow import Node
from pipeline.needs import Told, pool_needs, with_gpus, with_partition
from pipeline.outcome import Outcome
from pipeline.plan import Plan, StagePlan
from pipeline.run import Run
from rlinf.channels.curve import INTERFACE, LOOPBACK
from rlinf.channels.world import LAYOUT
from rlinf.config import RunConfig, Section
from rlinf.errors import EXIT_REQUEUE, ConfigError, RequeueRequested
from rlinf.interpreters import interpreter, know, named
from slurm.jobs import Resources, State, Status
from slurm.words import Environment, OptionText, Word
from stages.flow import Flow
from stages.runner import StageCall

if TYPE_CHECKING:
    from slurm.quotas import Quotas

Jobs = dict[str, list[Resources]]
"""By key of the plan, each with what it may ask for; several ways: any one of them is enough."""
WAITS_S = 10.0
"""A job that waits longer than this is spoken of."""
log = logging.getLogger("rlinf")


class DriverJob(Section):
    """What the job of a driver asks for (``rlinf submit``).

    It is a small job without GPUs. Of a site file it has what every job needs to start (account,
    set-up lines, container, environment), and nothing that makes a job large or sends it to GPUs.
    """

    partition: OptionText | None = None
    """Null: the cluster's default one."""
    cpus: int = Field(default=1, gt=0)
    mem_mb: int = Field(default=4000, gt=0)
    """Memory, MiB."""
    time_min: int | None = Field(default=None, gt=0)
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
    """Further sbatch options by long name, which :func:`slurm.options.check_driver_options`
    checks."""

    @field_validator("sbatch")
    @classmethod
    def _obeyed(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        from slurm.options import check_driver_options

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
    env: Environment = {}
    """Environment of every stage."""
    interface: Word | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. By default the loopback where all processes are of this machine, else everywhere."""
    pool_grace_s: float = Field(default=600.0, gt=0)
    """How long pools wait for another driver when theirs was killed, or failed, before they give
    their devices back."""
    driver: DriverJob = DriverJob()
    notify: tuple[Word, ...] = ()
    """A command, as a list of words, that is run at the end of the run and when it fails, with the
    run's name and ``finished``, ``failed`` or ``stopped`` as its last arguments."""

    @property
    def listens_on(self) -> str | None:
        """Where sockets of the run listen; None: on all networks of their nodes."""
        return self.interface or (None if self.launcher == "slurm" else LOOPBACK)


def make_launcher(cluster: ClusterConfig, plan: Plan, driver: Resources | None = None) -> Launcher:
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
    from slurm.limits import check_resources
    from slurm.quotas import read_quotas

    client = SlurmClient(poll_s=cluster.poll_s)
    partitions, quotas = client.partitions(), read_quotas(client)
    if cluster.site is not None:
        from slurm.site import load_site

        load_site(cluster.site).check(partitions, cluster.site)
    jobs = plan_jobs(plan, cluster)
    for key, ways in jobs.items():
        for needs in ways:
            check_resources(needs, partitions, key)
    check_quotas(plan, jobs, quotas, driver)
    check_together(plan, cluster)
    return SubmititLauncher(client, quotas)


def check_quotas(plan: Plan, jobs: Jobs, quotas: Quotas, driver: Resources | None = None) -> None:
    """See that accounting allows the jobs of a plan, each and those that run at the same time.

    Args:
        jobs: see :func:`plan_jobs`.
        driver: as for :func:`make_launcher`; it runs beside all of them.

    Raises:
        PlanError: it does not; names the key of the plan and the limit.
    """
    for key, ways in jobs.items():
        for needs in ways:
            quotas.check(needs, key)
    beside = {} if driver is None else {"cluster.driver": [driver]}
    for together in [jobs] if plan.pools else [{key: ways} for key, ways in jobs.items()]:
        quotas.check_together({**beside, **together})


def plan_jobs(plan: Plan, cluster: ClusterConfig) -> Jobs:
    """What the jobs of a plan ask for; in pools no stage is a job of its own."""
    if plan.pools:
        return pool_jobs(plan, cluster)
    stages = plan.flow.table
    return {f"stages.{name}": [resources(plan.of(name), cluster)] for name in stages}


def settled(plan: Plan, cluster: ClusterConfig) -> Plan:
    """The plan with what only the cluster can tell.

    Raises:
        SlurmError: Slurm is not there or does not answer.
    """
    if cluster.launcher != "slurm" or not (plan.pools or cluster.site):
        return plan
    from slurm.client import SlurmClient

    return settled_on(plan, SlurmClient().partitions())


def settled_on(plan: Plan, partitions: Mapping[str, Told]) -> Plan:
    """The same, of partitions that are known."""
    # The site file may say more of the default partition than of others.
    return with_gpus(plan, partitions) if plan.pools else with_partition(plan, partitions)


def pool_jobs(plan: Plan, cluster: ClusterConfig) -> Jobs:
    """What the jobs ask for that all run at the same time.

    Components of a heterogeneous job are jobs to Slurm's limits. An elastic pool goes on with any
    one of its workers: those that ask for different things stand in its list.
    """
    found: Jobs = {}
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            parts = pool_needs(plan, number, slot)
            several = zip(pool.gpus, parts, strict=False)
            named = [("", parts[0])] if len(parts) == 1 else [(f" on {k}", p) for k, p in several]
            for on, part in named:
                ways = found.setdefault(f"pools[{number}]{on}", [])
                needs = resources(part, cluster)
                if needs not in ways:
                    ways.append(needs)
    return found


def check_together(plan: Plan, cluster: ClusterConfig) -> None:
    """See that what will be heterogeneous jobs can be.

    Raises:
        PlanError: their components ask for what Slurm cannot tell apart.
    """
    from launchers.sbatch import check_components

    jobs = []
    for number in [n for n, pool in enumerate(plan.pools) if pool.workers is None]:
        key, parts = f"pools[{number}]", pool_needs(plan, number)
        jobs.append([(f"{key} on {part.partition}", resources(part, cluster)) for part in parts])
    for components in [[part for job in jobs for part in job]] if plan.together else jobs:
        check_components(components)


def resources(plan: StagePlan, cluster: ClusterConfig, interpreter: str | None = None) -> Resources:
    """What a job of a stage asks for: the plan's numbers with the site's settings.

    Args:
        interpreter: see :func:`interpreter_of`.
    """
    from slurm.site import load_site

    extra: dict[str, Any] = {}
    if cluster.site:
        site = load_site(cluster.site)
        extra = site.of(plan.partition).as_resources()
        extra["env"] = {**extra.get("env", {}), **know(site.interpreters)}
    network = {INTERFACE: cluster.listens_on} if cluster.listens_on else {}
    layout = {LAYOUT: str(plan.layout)} if plan.layout.split() else {}
    env = {**extra.pop("env", {}), **network, **layout, **cluster.env}
    if plan.constraint is not None:
        extra["constraint"] = plan.constraint
    return numbers(plan, interpreter=interpreter, env=env, **extra)


def numbers(plan: StagePlan, **further: Any) -> Resources:
    """What a job asks for by the plan's numbers.

    Args:
        further: other fields, such as the site's settings.
    """
    return Resources(
        partition=plan.partition,
        nodes=plan.nodes,
        tasks_per_node=plan.processes,
        gpus_per_node=plan.gpus,
        gpu_type=plan.gpu_type,
        shares=plan.shares,
        cpus_per_task=plan.cpus,
        mem_mb=plan.mem_mb,
        time_min=plan.time_min,
        **further,
    )


def interpreter_of(config: RunConfig, flow: Flow, *stages: str) -> str | None:
    """The interpreter of the process that runs some stages; None: this one.

    Raises:
        ConfigError: it is not there, or they need different ones.
    """
    found: dict[str | None, str] = {}
    for stage in stages:
        entry = flow.table[stage]
        # The warm start depends on both, and saves what the trainer made.
        depends = [name for name in ("trainer", "engine") if name in entry.sections]
        section = entry.loads or next(iter(depends), None)
        name = None if section is None else named(config, section)
        if section is not None:
            path = None if name is None else interpreter(name, f"{section}.python")
            found.setdefault(path, f"{section}.python of {stage}")
    if len(found) > 1:
        raise ConfigError(
            f"{' and '.join(found.values())}: one process cannot run them under two interpreters; "
            "name the same, or give these stages pools or jobs of their own"
        )
    return next(iter(found), None)


def stage_job(node: Node, call: StageCall, run: Path, needs: Resources) -> Job:
    """The launcher's view of a stage call."""
    return Job(node.name, call.argv(), call.out, run / "logs" / node.stage, needs)


@dataclass
class QueueLog:
    """Says which jobs were submitted where, and why one does not start."""

    shown: bool = True
    """Whether there is a queue."""
    _since: dict[str, float] = field(default_factory=dict)
    _reasons: dict[str, str] = field(default_factory=dict)

    def submitted(self, name: str, identity: str, partition: str | None) -> None:
        """A job was handed to the launcher."""
        self._since[name] = time.monotonic()
        if self.shown:
            log.info("%s: job %s, partition %s", name, identity, partition or "(Slurm's default)")

    def seen(self, name: str, identity: str, status: Status) -> None:
        """How a job that has not ended is; each reason to wait is said once."""
        known = self._reasons.get(name)
        if status.state is State.PENDING:
            late = self.shown and time.monotonic() - self._since.get(name, 0.0) > WAITS_S
            reason = status.reason or "no reason given"
            if late and reason != known:
                self._reasons[name] = reason
                log.info("%s: job %s waits: %s", name, identity, reason)
        elif known is not None:
            del self._reasons[name]
            log.info("%s: job %s runs%s", name, identity, status.node and f" on {status.node}")


@dataclass
class LauncherExecutor:
    """Runs stage calls through a launcher."""

    run: Run
    launcher: Launcher
    plan: Plan
    cluster: ClusterConfig
    stopping: Callable[[], bool] = lambda: False
    live: bool = False
    _ids: dict[Node, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._queue = QueueLog(shown=self.cluster.launcher == "slurm")

    @property
    def remains(self) -> str:
        if self.cluster.launcher == "local":
            return "its processes were stopped"
        return f"{len(self._ids)} submitted jobs go on, and a resumed run finds them"

    def start(self, node: Node, call: StageCall) -> None:
        python = interpreter_of(self.run.config, self.plan.flow, node.stage)
        needs = resources(self.plan.of(node.stage), self.cluster, python)
        identity = self.launcher.submit(stage_job(node, call, self.run.folder, needs))
        self._ids[node] = identity
        self._queue.submitted(node.name, identity, needs.partition)

    def ended(self) -> dict[Node, Outcome]:
        """Outcomes of ended jobs; sleeps until a look at the queue is due or a manifest shows."""
        if self.stopping():
            raise RequeueRequested("the driver was asked to stop; resume the run to go on")
        ended: dict[Node, Outcome] = {}
        statuses = self.launcher.poll(list(self._ids.values()))
        for node, identity in list(self._ids.items()):
            status = statuses[identity]
            if status.state.active:
                self._queue.seen(node.name, identity, status)
                continue
            del self._ids[node]
            code = 0 if status.state is State.DONE else status.exit_code or 1
            if status.state in (State.PREEMPTED, State.NODE_FAIL):
                code = EXIT_REQUEUE  # no fault of the stage's
            reason = status.reason or status.state.value
            ended[node] = Outcome(code, f"{status.state.value}: {reason}" if code else "")
        if not ended:
            time.sleep(self.launcher.poll_s)
        return ended

    def cancel(self) -> None:
        """Cancel what still waits or runs."""
        self.launcher.cancel(list(self._ids.values()))
        self._ids.clear()

    def stop(self, *, leave: bool = False) -> None:
        self.launcher.close()
