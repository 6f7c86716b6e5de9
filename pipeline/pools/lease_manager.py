"""The jobs of pools: submission, renewal before their end, dismissal and cancellation."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launchers.launcher import JobSpec, Launcher
from launchers.submission_queue import read_job_note
from pipeline.cluster_config import ClusterConfig
from pipeline.job_executor import QueueLog
from pipeline.plan import Plan
from pipeline.pools.autoscaler import target_size
from pipeline.pools.dispatcher import Send
from pipeline.pools.leases import Lease, PoolState, pool_folder, pool_job
from pipeline.resources import job_resources, pool_resources
from pipeline.run import Run
from rlinf.channels.control_link import Controller
from slurm.jobs import JOB_NOTE, JobStatus, parent_job_id
from stages.layout import POOLS_FOLDER
from stages.worker.messages import ShutDown


class LeaseManager:
    """Keeps a job running for every pool of a run.

    Args:
        pools: pools of the run; generators are added to the list and removed from it.
        busy: whether a lease has work.
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
        self._elastic = next((p for p in pools if p.slot is not None), None)
        self._queue = QueueLog(shown=cluster.launcher == "slurm")
        self._ending: list[tuple[Lease, float]] = []
        """Abandoned leases, with the deadline of their writes."""

    def start(self) -> None:
        """Submit all pools or find their running jobs. Jobs of another plan, configuration or code
        are ended."""
        for pools in self._start_groups():
            self._start(pools)
        self.scale()
        current = {
            str(pool_folder(self._run, pool) / str(pool.lease_number)) for pool in self._pools
        }
        notes = (self._run.folder / POOLS_FOLDER).glob(f"*/*/{JOB_NOTE}")
        self._launcher.cancel_for_outputs(
            [note.parent for note in notes if str(note.parent) not in current]
        )

    @property
    def ending_leases(self) -> list[Lease]:
        """Abandoned leases that may still run."""
        return [member for member, _ in self._ending]

    def ended_leases(self) -> list[tuple[PoolState, Lease, JobStatus]]:
        """Return the leases whose jobs have ended, with one query for all pools."""
        jobs = [member.job for pool in self._pools for member in pool.leases]
        statuses = self._launcher.poll(jobs) if jobs else {}
        found = []
        for pool in self._pools:
            for member in pool.leases:
                status = statuses.get(member.job)
                if status is not None and status.state.is_active:
                    self._queue.on_status(f"pool {pool.name}", member.job, status)
                elif status is not None:
                    found.append((pool, member, status))
        return found

    def scale(self) -> None:
        """Adjust the number of generators to its target."""
        first = self._elastic
        if first is None:
            return
        slots = [pool for pool in self._pools if pool.slot is not None]
        count = target_size(self._run.folder, self._plan, first.number)
        for slot in range(len(slots), count):
            pool = PoolState(first.number, (), pool_resources(self._plan, first.number, slot), slot)
            self._pools.append(pool)
            self._start([pool])
        for pool in slots[count:]:
            pool.is_retired = True

    def renew_leases(self) -> None:
        """Submit missing jobs, renew leases before their end, and dismiss renewed leases."""
        self._retire()
        for pools in self._start_groups():
            if any(pool.is_retired for pool in pools):
                continue
            newest = [pool.leases[-1] for pool in pools if pool.leases]
            missing = not newest and all(time.monotonic() >= pool.retry_at for pool in pools)
            ends = all(member.is_ready for member in newest) and any(
                m.needs_renewal for m in newest
            )
            if missing or ends:
                for pool in pools:
                    pool.lease_number += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.is_retired]:
            active = pool.active_lease
            for member in pool.leases[:-1]:
                if member is not active and not self._busy(member) and not member.is_leaving:
                    self._dismiss(member)

    def end_lease(self, pool: PoolState, member: Lease) -> None:
        """End an abandoned lease.

        If all its workers are connected they first finish their writes, such as a checkpoint when
        another pool of the same heterogeneous job was lost.
        """
        patience_s = 0.0
        if member.is_ready and not member.is_leaving:
            patience_s = float(job_resources(pool.resources[0], self._cluster).signal_delay_s)
            self._dismiss(member, patience_s)
            pool.finishing.append(member)
        self._ending.append((member, time.monotonic() + patience_s))

    def cancel_ended(self, control: Controller) -> None:
        """Cancel the jobs of abandoned leases whose workers have left or had enough time."""
        seen, now = control.known_peers(), time.monotonic()
        waits = {
            parent_job_id(member.job)
            for member, until in self._ending
            if now < until and any(w in seen and seen[w].alive for w in member.workers())
        }
        expired = [member for member, _ in self._ending if parent_job_id(member.job) not in waits]
        if not expired:
            return
        self._ending = [entry for entry in self._ending if entry[0] not in expired]
        for pool in self._pools:
            pool.finishing = [member for member in pool.finishing if member not in expired]
        self._launcher.cancel([member.job for member in expired])
        for member in expired:
            for worker in member.workers():
                control.forget_peer(worker)

    def _start_groups(self) -> list[list[PoolState]]:
        """Return the pools grouped by those that start together."""
        bundle = [p for p in self._pools if self._plan.hetjob and p.slot is None]
        alone = [[pool] for pool in self._pools if pool not in bundle]
        return [bundle, *alone] if bundle else alone

    def _start(self, pools: Sequence[PoolState]) -> None:
        for pool in pools:
            leases = pool_folder(self._run, pool).glob("*")
            known = [int(path.name) for path in leases if path.name.isdigit()]
            pool.lease_number = max(known, default=0)
        jobs = [self._job(pool) for pool in pools]
        if any(
            (note := read_job_note(job.output_dir)) is not None and note.key != job.content_key
            for job in jobs
        ):
            # New names, because workers of the last lease may still run.
            for pool in pools:
                pool.lease_number += 1
        self._submit(pools)

    def _job(self, pool: PoolState) -> JobSpec:
        return pool_job(self._run, self._plan, self._cluster, pool)

    def _retire(self) -> None:
        """Dismiss retired generators when they have no work."""
        for pool in [pool for pool in self._pools if pool.is_retired]:
            for member in list(pool.leases):
                if not member.is_ready:
                    pool.leases.remove(member)
                    self._launcher.cancel([member.job])
                elif not self._busy(member) and not member.is_leaving:
                    self._dismiss(member)
            if not pool.leases:
                self._pools.remove(pool)

    def _dismiss(self, member: Lease, commits_s: float = 0.0) -> None:
        """Tell workers to leave; they may first finish their writes for a given time."""
        member.is_leaving = True
        for worker in member.workers():
            self._send(worker, ShutDown(commit_timeout_s=commits_s))

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [self._job(pool) for pool in pools]
        for job in jobs:
            job.output_dir.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher
        ids = launcher.submit_hetjob(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        members = [
            Lease(job.name.removeprefix("pool/"), identity, pool.size)
            for pool, job, identity in zip(pools, jobs, ids, strict=True)
        ]
        for pool, job, member in zip(pools, jobs, members, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.on_submit(f"pool {pool.name}", member.job, partitions)
            member.hetjob_leases = tuple(other for other in members if other is not member)
            pool.leases.append(member)
