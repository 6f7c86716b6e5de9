"""Execution of each stage as a job of a launcher."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from launchers.launcher import JobSpec, Launcher
from pipeline.executors import Outcome
from pipeline.graph import StageNode
from pipeline.plan import Plan
from pipeline.resources import (
    ClusterConfig,
    check_hetjobs,
    check_job_limits,
    discover_cluster,
    job_resources,
    plan_job_requests,
    stage_interpreter,
)
from pipeline.run import Run
from rlinf.errors import EXIT_REQUEUE, RequeueRequested
from slurm.jobs import JobResources, JobState, JobStatus
from stages.runner import StageCall

if TYPE_CHECKING:
    from slurm.inventory import Inventory

QUEUE_NOTICE_S = 10.0
"""Seconds in the queue after which the reason that a job waits is logged."""
log = logging.getLogger("rlinf")


def create_launcher(
    cluster: ClusterConfig,
    plan: Plan,
    driver: JobResources | None = None,
    inventory: Inventory | None = None,
) -> Launcher:
    """Create the configured launcher, after checking that it can run the plan.

    Args:
        driver: resources of the job in which the driver runs; None if it runs in no job.
        inventory: the inventory of the cluster; None queries Slurm if its jobs are used.

    Raises:
        PlanError: the plan requests more than the cluster has.
        SlurmError: Slurm is not installed or does not answer.
    """
    if cluster.launcher == "local":
        from launchers.local import LocalLauncher

        return LocalLauncher()
    from launchers.slurm_launcher import SlurmLauncher
    from slurm.client import SlurmClient
    from slurm.job_limits import cluster_limits_from_inventory

    inventory = inventory or discover_cluster(cluster)
    client = SlurmClient(poll_interval_s=cluster.poll_interval_s)
    if inventory is None:
        return SlurmLauncher(client)
    check_plan_fits(cluster, plan, inventory, driver)
    return SlurmLauncher(client, cluster_limits_from_inventory(inventory))


def check_plan_fits(
    cluster: ClusterConfig, plan: Plan, inventory: Inventory, driver: JobResources | None = None
) -> None:
    """Check that the cluster can run the jobs of a plan.

    Args:
        driver: as for :func:`create_launcher`.

    Raises:
        PlanError: the plan requests more than the cluster has, or the site file is of another one.
    """
    from slurm.job_limits import check_resources, cluster_limits_from_inventory

    partitions, cluster_limits = inventory.partitions, cluster_limits_from_inventory(inventory)
    if cluster.site is not None:
        from slurm.site import load_site

        load_site(cluster.site).check_partitions(partitions, cluster.site)
    jobs = plan_job_requests(plan, cluster)
    for key, alternatives in jobs.items():
        for resources in alternatives:
            check_resources(resources, partitions, key)
    check_job_limits(plan, jobs, cluster_limits, driver)
    check_hetjobs(plan, cluster)


def stage_job(node: StageNode, call: StageCall, run: Path, resources: JobResources) -> JobSpec:
    """Return the job specification of a stage call."""
    return JobSpec(node.name, call.argv(), call.output_folder, run / "logs" / node.stage, resources)


@dataclass
class QueueLog:
    """Logs where jobs were submitted and why a job does not start."""

    is_enabled: bool = True
    """Whether to log at all; False for a launcher without a queue."""
    _submitted_at: dict[str, float] = field(default_factory=dict)
    """Monotonic time of the submission, by name of the job."""
    _reasons: dict[str, str] = field(default_factory=dict)
    """Last logged reason to wait, by name of the waiting job."""

    def on_submit(self, name: str, job_id: str, partition: str | None) -> None:
        """Log that a job was submitted."""
        self._submitted_at[name] = time.monotonic()
        if self.is_enabled:
            log.info("%s: job %s, partition %s", name, job_id, partition or "(Slurm's default)")

    def on_status(self, name: str, job_id: str, status: JobStatus) -> None:
        """Log the state of an active job; each reason to wait is logged once."""
        logged_reason = self._reasons.get(name)
        if status.state is JobState.PENDING:
            waited_s = time.monotonic() - self._submitted_at.get(name, 0.0)
            reason = status.reason or "no reason given"
            if self.is_enabled and waited_s > QUEUE_NOTICE_S and reason != logged_reason:
                self._reasons[name] = reason
                log.info("%s: job %s waits: %s", name, job_id, reason)
        elif logged_reason is not None:
            del self._reasons[name]
            log.info("%s: job %s runs%s", name, job_id, status.node and f" on {status.node}")


@dataclass
class JobExecutor:
    """An executor that runs each stage as a job of a launcher."""

    run: Run
    launcher: Launcher
    plan: Plan
    cluster: ClusterConfig
    should_stop: Callable[[], bool] = lambda: False
    supports_streaming: bool = False
    _job_ids: dict[StageNode, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._queue = QueueLog(is_enabled=self.cluster.launcher == "slurm")

    @property
    def interrupt_note(self) -> str:
        if self.cluster.launcher == "local":
            return "its processes were stopped"
        return f"{len(self._job_ids)} submitted jobs continue, and a resumed run finds them"

    def start(self, node: StageNode, call: StageCall) -> None:
        python = stage_interpreter(self.run.config, self.plan.flow, node.stage)
        resources = job_resources(self.plan.stage_plan(node.stage), self.cluster, python)
        job_id = self.launcher.submit(stage_job(node, call, self.run.folder, resources))
        self._job_ids[node] = job_id
        self._queue.on_submit(node.name, job_id, resources.partition)

    def poll(self) -> dict[StageNode, Outcome]:
        """Return the outcomes of ended jobs; sleeps for one polling interval if there are none."""
        if self.should_stop():
            raise RequeueRequested("the driver received a stop signal; resume the run to continue")
        ended: dict[StageNode, Outcome] = {}
        statuses = self.launcher.poll(list(self._job_ids.values()))
        for node, job_id in list(self._job_ids.items()):
            status = statuses[job_id]
            if status.state.is_active:
                self._queue.on_status(node.name, job_id, status)
                continue
            del self._job_ids[node]
            code = 0 if status.state is JobState.DONE else status.exit_code or 1
            if status.state in (JobState.PREEMPTED, JobState.NODE_FAIL):
                code = EXIT_REQUEUE  # not the fault of the stage
            reason = status.reason or status.state.value
            ended[node] = Outcome(code, f"{status.state.value}: {reason}" if code else "")
        if not ended:
            time.sleep(self.launcher.poll_interval_s)
        return ended

    def cancel(self) -> None:
        """Cancel all pending and running jobs."""
        self.launcher.cancel(list(self._job_ids.values()))
        self._job_ids.clear()

    def stop(self, *, keep_jobs: bool = False) -> None:
        self.launcher.close()
