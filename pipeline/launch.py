"""From plan and cluster settings to launcher jobs, and their ends back to the driver."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from launchers.base import Job, Launcher, Resources, State
from pipeline.driver import Outcome
from pipeline.flow import Node
from pipeline.leases import pool_needs
from pipeline.plan import Plan, StagePlan
from pipeline.run import Run
from rlinf.channels.curve import INTERFACE, LOOPBACK
from rlinf.config import Section
from rlinf.errors import RequeueRequested
from stages import SECTIONS
from stages.runner import StageCall


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
    env: dict[str, str] = {}
    """Environment of every stage."""
    interface: str | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. By default the loopback where all processes are of this machine, else everywhere."""

    @property
    def listens_on(self) -> str | None:
        """Where sockets of the run listen; None: on all networks of their nodes."""
        return self.interface or (None if self.launcher == "slurm" else LOOPBACK)


def make_launcher(cluster: ClusterConfig, plan: Plan) -> Launcher:
    """The launcher of the settings, after checking that it can run the plan.

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
    asked = {f"stages.{stage}": plan.of(stage) for stage in SECTIONS}
    for number, pool in enumerate(plan.pools):
        for slot in range(pool.workers or 1):
            for part in pool_needs(plan, number, slot):
                asked[f"pools[{number}] on {part.partition}"] = part
    for key, part in asked.items():
        needs = resources(part, cluster)
        check_resources(needs, partitions, key)
        quotas.check(needs, key)
    check_together(plan, cluster)
    return SubmititLauncher(client, quotas)


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


def resources(plan: StagePlan, cluster: ClusterConfig) -> Resources:
    """What a job of a stage asks for: the plan's numbers with the site's settings."""
    from slurm.site import load_site

    site = load_site(cluster.site).of(plan.partition) if cluster.site else None
    extra: dict[str, Any] = {} if site is None else site.as_resources()
    network = {INTERFACE: cluster.listens_on} if cluster.listens_on else {}
    env = {**extra.pop("env", {}), **network, **cluster.env}
    if plan.constraint is not None:
        extra["constraint"] = plan.constraint
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
        env=env,
        **extra,
    )


def stage_job(node: Node, call: StageCall, run: Path, needs: Resources) -> Job:
    """The launcher's view of a stage call."""
    return Job(node.name, call.argv(), call.out, run / "logs" / node.stage, needs)


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

    def start(self, node: Node, call: StageCall) -> None:
        needs = resources(self.plan.of(node.stage), self.cluster)
        self._ids[node] = self.launcher.submit(stage_job(node, call, self.run.folder, needs))

    def ended(self) -> dict[Node, Outcome]:
        """Outcomes of ended jobs; sleeps until a look at the queue is due or a manifest shows."""
        if self.stopping():
            raise RequeueRequested("the driver was asked to stop; resume the run to go on")
        ended: dict[Node, Outcome] = {}
        statuses = self.launcher.poll(list(self._ids.values()))
        for node, identity in list(self._ids.items()):
            status = statuses[identity]
            if status.state.active:
                continue
            del self._ids[node]
            code = 0 if status.state is State.DONE else status.exit_code or 1
            reason = status.reason or status.state.value
            ended[node] = Outcome(code, f"{status.state.value}: {reason}" if code else "")
        if not ended:
            time.sleep(self.launcher.poll_s)
        return ended

    def cancel(self) -> None:
        """Cancel what still waits or runs."""
        self.launcher.cancel(list(self._ids.values()))
        self._ids.clear()

    def stop(self, *, replaced: bool = False) -> None:
        self.launcher.close()
