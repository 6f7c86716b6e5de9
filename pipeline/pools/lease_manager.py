"""The jobs of pools: submission, renewal before their end, dismissal and cancellation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launchers.launcher import JobSpec, Launcher
from launchers.submission_queue import read_submitted_job
from pipeline.cluster_config import ClusterConfig
from pipeline.job_executor import QueueLog
from pipeline.plan import Plan
from pipeline.pools.autoscaler import target_size
from pipeline.pools.dispatcher import Send
from pipeline.pools.leases import Lease, PoolState, pool_folder, pool_job
from pipeline.resources import job_resources, pool_resources
from pipeline.run import Run
from rlinf.channels.control_link import Controller
from slurm.jobs import JOB_FILE, JobStatus, parent_job_id
from stages.layout import POOLS_FOLDER
from stages.worker.messages import ShutDown


class LeaseManager:
    """Keeps a job running for every pool of a run.

    Args:
        pools: pools of the run; generators are added to the list and removed from it.
        busy: returns whether a lease has work.
        send: sends an order to a worker.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        cluster: ClusterConfig,
        launcher: Launcher,
        pools: list[PoolState],
        busy: Callable[[Lease], bool],
        send: Send,
    ) -> None:
        self._run, self._plan, self._cluster, self._launcher = run, plan, cluster, launcher
        self._pools, self._busy, self._send = pools, busy, send
        self._first_slot = next((p for p in pools if p.slot is not None), None)
        self._queue = QueueLog(shown=cluster.launcher == "slurm")
        self._ending: list[tuple[Lease, float]] = []
        """Abandoned leases, with the time until which they may write."""

    def start(self) -> None:
        """Submit all pools or find their running jobs. Jobs of another plan, configuration or code
        are cancelled."""
        for pools in self._start_groups():
            self._start(pools)
        self.scale()
        current = {
            str(pool_folder(self._run, pool) / str(pool.lease_number)) for pool in self._pools
        }
        job_files = (self._run.folder / POOLS_FOLDER).glob(f"*/*/{JOB_FILE}")
        self._launcher.cancel_for_outputs(
            [file.parent for file in job_files if str(file.parent) not in current]
        )

    @property
    def ending_leases(self) -> list[Lease]:
        """Abandoned leases that may still run."""
        return [lease for lease, _ in self._ending]

    def ended_leases(self) -> list[tuple[PoolState, Lease, JobStatus]]:
        """Return the leases whose jobs have ended, with one query for all pools."""
        jobs = [lease.job for pool in self._pools for lease in pool.leases]
        statuses = self._launcher.poll(jobs) if jobs else {}
        ended = []
        for pool in self._pools:
            for lease in pool.leases:
                status = statuses.get(lease.job)
                if status is not None and status.state.is_active:
                    self._queue.on_status(f"pool {pool.name}", lease.job, status)
                elif status is not None:
                    ended.append((pool, lease, status))
        return ended

    def scale(self) -> None:
        """Adjust the number of generators to its target."""
        first = self._first_slot
        if first is None:
            return
        slots = [pool for pool in self._pools if pool.slot is not None]
        target = target_size(self._run.folder, self._plan, first.number)
        for slot in range(len(slots), target):
            pool = PoolState(first.number, (), pool_resources(self._plan, first.number, slot), slot)
            self._pools.append(pool)
            self._start([pool])
        for pool in slots[target:]:
            pool.is_retired = True

    def renew_leases(self) -> None:
        """Submit missing jobs, renew leases before their end, and dismiss renewed leases."""
        self._retire()
        for pools in self._start_groups():
            if any(pool.is_retired for pool in pools):
                continue
            newest = [pool.leases[-1] for pool in pools if pool.leases]
            is_missing = not newest and all(time.monotonic() >= pool.retry_at for pool in pools)
            needs_renewal = all(lease.is_ready for lease in newest) and any(
                lease.needs_renewal for lease in newest
            )
            if is_missing or needs_renewal:
                for pool in pools:
                    pool.lease_number += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.is_retired]:
            active = pool.active_lease
            for lease in pool.leases[:-1]:
                if lease is not active and not self._busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)

    def end_lease(self, pool: PoolState, lease: Lease) -> None:
        """End an abandoned lease.

        If all its workers are connected, they may first finish their writes, such as a checkpoint
        when another pool of the same heterogeneous job was lost.
        """
        patience_s = 0.0
        if lease.is_ready and not lease.is_leaving:
            patience_s = float(job_resources(pool.resources[0], self._cluster).signal_delay_s)
            self._dismiss(lease, patience_s)
            pool.finishing.append(lease)
        self._ending.append((lease, time.monotonic() + patience_s))

    def cancel_ended(self, control: Controller) -> None:
        """Cancel the jobs of abandoned leases whose workers have left or had enough time."""
        peers, now = control.known_peers(), time.monotonic()
        waiting = {
            parent_job_id(lease.job)
            for lease, deadline in self._ending
            if now < deadline and any(w in peers and peers[w].alive for w in lease.workers())
        }
        expired = [lease for lease, _ in self._ending if parent_job_id(lease.job) not in waiting]
        if not expired:
            return
        self._ending = [entry for entry in self._ending if entry[0] not in expired]
        for pool in self._pools:
            pool.finishing = [lease for lease in pool.finishing if lease not in expired]
        self._launcher.cancel([lease.job for lease in expired])
        for lease in expired:
            for worker in lease.workers():
                control.forget_peer(worker)

    def _start_groups(self) -> list[list[PoolState]]:
        """Return groups of pools; the pools of a group start together."""
        together = [p for p in self._pools if self._plan.hetjob and p.slot is None]
        single = [[pool] for pool in self._pools if pool not in together]
        return [together, *single] if together else single

    def _start(self, pools: Sequence[PoolState]) -> None:
        for pool in pools:
            folders = pool_folder(self._run, pool).glob("*")
            numbers = [int(path.name) for path in folders if path.name.isdigit()]
            pool.lease_number = max(numbers, default=0)
        jobs = [self._job(pool) for pool in pools]
        if any(
            (submitted := read_submitted_job(job.output_dir)) is not None
            and submitted.key != job.content_key
            for job in jobs
        ):
            # A new lease name, because workers of the last lease may still run.
            for pool in pools:
                pool.lease_number += 1
        self._submit(pools)

    def _job(self, pool: PoolState) -> JobSpec:
        return pool_job(self._run, self._plan, self._cluster, pool)

    def _retire(self) -> None:
        """Dismiss retired generators when they have no work."""
        for pool in [pool for pool in self._pools if pool.is_retired]:
            for lease in list(pool.leases):
                if not lease.is_ready:
                    pool.leases.remove(lease)
                    self._launcher.cancel([lease.job])
                elif not self._busy(lease) and not lease.is_leaving:
                    self._dismiss(lease)
            if not pool.leases:
                self._pools.remove(pool)

    def _dismiss(self, lease: Lease, commit_timeout_s: float = 0.0) -> None:
        """Tell workers to stop; they have ``commit_timeout_s`` seconds to finish their writes."""
        lease.is_leaving = True
        for worker in lease.workers():
            self._send(worker, ShutDown(commit_timeout_s=commit_timeout_s))

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [self._job(pool) for pool in pools]
        for job in jobs:
            job.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher
        ids = launcher.submit_hetjob(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        leases = [
            Lease(job.name.removeprefix("pool/"), job_id, pool.size)
            for pool, job, job_id in zip(pools, jobs, ids, strict=True)
        ]
        for pool, job, lease in zip(pools, jobs, leases, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.on_submit(f"pool {pool.name}", lease.job, partitions)
            lease.hetjob_leases = tuple(other for other in leases if other is not lease)
            pool.leases.append(lease)
