"""The jobs of pools: submitted, renewed before they end, let go, and cancelled when given up."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from launchers.backlog import NOTE, noted
from launchers.base import Job, Launcher
from pipeline.launch import ClusterConfig, QueueLog, resources
from pipeline.needs import pool_needs
from pipeline.plan import Plan
from pipeline.pools.jobs import pool_folder, pool_job
from pipeline.pools.leases import Member, PoolState
from pipeline.pools.orders import Send
from pipeline.pools.scaling import wished
from pipeline.run import Run
from rlinf.channels.control import Controller
from slurm.ids import whole_of
from slurm.jobs import Status
from stages.layout import POOLS
from stages.worker.messages import Leave


class Renewal:
    """Keeps every pool of a run with a job.

    Args:
        pools: of the run; generators are added to the list, and leave it.
        busy: whether a lease has something to do.
        send: sends a worker an order.
    """

    def __init__(
        self,
        run: Run,
        plan: Plan,
        cluster: ClusterConfig,
        launcher: Launcher,
        pools: list[PoolState],
        busy: Callable[[Member], bool],
        send: Send,
    ) -> None:
        self._run, self._plan, self._cluster, self._launcher = run, plan, cluster, launcher
        self._pools, self._busy, self._send_to = pools, busy, send
        self._elastic = next((p for p in pools if p.slot is not None), None)
        self._queue = QueueLog(shown=cluster.launcher == "slurm")
        self._ending: list[tuple[Member, float]] = []
        """Leases that were given up, and until when they may write."""

    def open(self) -> None:
        """Submit all pools, or find their jobs that are there; end those of another plan,
        configuration or code that an earlier driver left."""
        for pools in self._units():
            self._open(pools)
        self.scale()
        kept = {str(pool_folder(self._run, pool) / str(pool.lease)) for pool in self._pools}
        notes = (self._run.folder / POOLS).glob(f"*/*/{NOTE}")
        self._launcher.withdraw([note.parent for note in notes if str(note.parent) not in kept])

    @property
    def ending(self) -> list[Member]:
        """Leases that were given up and may still run."""
        return [member for member, _ in self._ending]

    def over(self) -> list[tuple[PoolState, Member, Status]]:
        """The leases whose jobs have ended, by one query for all pools."""
        jobs = [member.job for pool in self._pools for member in pool.members]
        statuses = self._launcher.poll(jobs) if jobs else {}
        found = []
        for pool in self._pools:
            for member in pool.members:
                status = statuses.get(member.job)
                if status is not None and status.state.active:
                    self._queue.seen(f"pool {pool.name}", member.job, status)
                elif status is not None:
                    found.append((pool, member, status))
        return found

    def scale(self) -> None:
        """Have as many generators as was asked for."""
        first = self._elastic
        if first is None:
            return
        slots = [pool for pool in self._pools if pool.slot is not None]
        count = wished(self._run.folder, self._plan, first.number)
        for slot in range(len(slots), count):
            pool = PoolState(first.number, (), pool_needs(self._plan, first.number, slot), slot)
            self._pools.append(pool)
            self._open([pool])
        for pool in slots[count:]:
            pool.retired = True

    def keep_up(self) -> None:
        """Submit what is missing, renew leases that end, let go of those that were renewed."""
        self._retire()
        for pools in self._units():
            if any(pool.retired for pool in pools):
                continue
            newest = [pool.members[-1] for pool in pools if pool.members]
            missing = not newest and all(time.monotonic() >= pool.resume for pool in pools)
            ends = all(member.ready for member in newest) and any(m.due for m in newest)
            if missing or ends:
                for pool in pools:
                    pool.lease += 1
                self._submit(pools)
        for pool in [pool for pool in self._pools if not pool.retired]:
            active = pool.active
            for member in pool.members[:-1]:
                if member is not active and not self._busy(member) and not member.leaving:
                    self._let_go(member)

    def end(self, pool: PoolState, member: Member) -> None:
        """End a lease that was given up.

        Where all its workers are there, they end what they are writing first: a checkpoint, say,
        when a pool that started together with the trainer's was lost.
        """
        patience_s = 0.0
        if member.ready and not member.leaving:
            patience_s = float(resources(pool.needs[0], self._cluster).signal_delay_s)
            self._let_go(member, patience_s)
            pool.writing.append(member)
        self._ending.append((member, time.monotonic() + patience_s))

    def cancel_ended(self, control: Controller) -> None:
        """Cancel the jobs that were given up, and all of whose workers have left or had time to."""
        seen, now = control.workers(), time.monotonic()
        waits = {
            whole_of(member.job)
            for member, until in self._ending
            if now < until and any(w in seen and seen[w].alive for w in member.workers())
        }
        over = [member for member, _ in self._ending if whole_of(member.job) not in waits]
        if not over:
            return
        self._ending = [entry for entry in self._ending if entry[0] not in over]
        for pool in self._pools:
            pool.writing = [member for member in pool.writing if member not in over]
        self._launcher.cancel([member.job for member in over])
        for member in over:
            for worker in member.workers():
                control.forget(worker)

    def _units(self) -> list[list[PoolState]]:
        """The pools, by those that start together."""
        bundle = [p for p in self._pools if self._plan.together and p.slot is None]
        alone = [[pool] for pool in self._pools if pool not in bundle]
        return [bundle, *alone] if bundle else alone

    def _open(self, pools: Sequence[PoolState]) -> None:
        for pool in pools:
            leases = pool_folder(self._run, pool).glob("*")
            known = [int(path.name) for path in leases if path.name.isdigit()]
            pool.lease = max(known, default=0)
        jobs = [self._job(pool) for pool in pools]
        if any((note := noted(job.out)) is not None and note.key != job.key for job in jobs):
            # Their workers have names of their own: those of the last lease may still be there.
            for pool in pools:
                pool.lease += 1
        self._submit(pools)

    def _job(self, pool: PoolState) -> Job:
        return pool_job(self._run, self._plan, self._cluster, pool)

    def _retire(self) -> None:
        """Let generators go that are not wanted any more, when they are through."""
        for pool in [pool for pool in self._pools if pool.retired]:
            for member in list(pool.members):
                if not member.ready:
                    pool.members.remove(member)
                    self._launcher.cancel([member.job])
                elif not self._busy(member) and not member.leaving:
                    self._let_go(member)
            if not pool.members:
                self._pools.remove(pool)

    def _let_go(self, member: Member, commits_s: float = 0.0) -> None:
        """Have workers leave, which may take so long to end what they are writing."""
        member.leaving = True
        for worker in member.workers():
            self._send_to(worker, Leave(commits_s=commits_s))

    def _submit(self, pools: Sequence[PoolState]) -> None:
        jobs = [self._job(pool) for pool in pools]
        for job in jobs:
            job.out.mkdir(parents=True, exist_ok=True)
        launcher = self._launcher
        ids = launcher.submit_together(jobs) if len(jobs) > 1 else [launcher.submit(jobs[0])]
        members = [
            Member(job.name.removeprefix("pool/"), identity, pool.size)
            for pool, job, identity in zip(pools, jobs, ids, strict=True)
        ]
        for pool, job, member in zip(pools, jobs, members, strict=True):
            partitions = ",".join(str(part.partition) for part in job.components)
            self._queue.submitted(f"pool {pool.name}", member.job, partitions)
            member.fellows = tuple(other for other in members if other is not member)
            pool.members.append(member)
