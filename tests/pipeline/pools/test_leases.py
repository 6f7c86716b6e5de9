"""Jobs of pools are renewed, replaced and given up, by a launcher whose jobs run as a test says."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from launchers.launcher import JobSpec, Launcher
from pipeline.commands.experiment import validate_experiment
from pipeline.pools import leases
from pipeline.pools.leases import Lease, LeaseManager, pool_states
from pipeline.resources import ClusterConfig
from pipeline.run import Run
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, InputError, PlanError, StageError
from slurm.jobs import JobState, JobStatus
from stages.timeout_retries import MAX_TIMEOUTS

TWO = {
    "pools": [
        {"stages": ["rollout"], "devices": {"local": 1}},
        {"stages": ["reward", "inference", "train"], "devices": {"local": 1}},
    ]
}
ELASTIC = {"pools": [{**TWO["pools"][0], "workers": 2}, TWO["pools"][1]]}
RUNNING = JobStatus(JobState.RUNNING)


class Jobs:
    """A launcher and the manager of its jobs."""

    def __init__(self, values: dict[str, Any], folder: Path, plan: dict[str, Any] = TWO) -> None:
        config, checked_plan = validate_experiment(values | {"plan": plan})
        self.submitted: list[str] = []
        """Names of the jobs, which are their ids too."""
        self.states: dict[str, JobStatus] = {}
        self.cancelled: list[str] = []
        self.busy: set[Lease] = set()
        self.lost: list[str] = []
        self.dismissed: list[str] = []
        self.polls: list[list[str]] = []
        launcher = SimpleNamespace(
            submit=self.submit,
            submit_hetjob=lambda jobs: [self.submit(job) for job in jobs],
            poll=self.poll,
            cancel=self.cancelled.extend,
            cancel_for_outputs=lambda folders: None,
        )
        self.pools = pool_states(checked_plan)
        self.manager = LeaseManager(
            Run(folder, config),
            checked_plan,
            ClusterConfig(launcher="local", max_retries=1),
            cast(Launcher, launcher),
            self.pools,
            self.busy.__contains__,
            lambda worker, order: self.dismissed.append(worker),
            lambda lease, reason: self.lost.append(lease.name),
        )

    def poll(self, ids: Collection[str]) -> dict[str, JobStatus]:
        self.polls.append(list(ids))
        return {job: self.states.get(job, RUNNING) for job in ids}

    def submit(self, job: JobSpec) -> str:
        self.submitted.append(job.name.removeprefix("pool/"))
        return self.submitted[-1]

    def connect(self, number: int, left_s: float | None = None) -> Lease:
        """All workers of the newest lease of a pool connect; it ends in ``left_s`` seconds."""
        lease = self.pools[number].leases[-1]
        lease.started_at = time.time() - 600.0
        ends = None if left_s is None else time.time() + left_s
        assert self.manager.on_joined(lease.primary_worker, {"rank": 0, "ends": ends}) is lease
        return lease


@pytest.fixture
def jobs(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Jobs:
    made = Jobs(compose("cluster=local"), tmp_path)
    made.manager.start(0)
    return made


def test_a_lease_that_ends_soon_gets_a_successor_and_leaves_when_idle(jobs: Jobs) -> None:
    old = jobs.connect(0, left_s=5.0)
    jobs.busy.add(old)
    jobs.manager.renew()
    assert jobs.submitted == ["pool-0-0", "pool-1-0", "pool-0-1"]
    new = jobs.connect(0, left_s=600.0)
    jobs.manager.renew()
    assert jobs.pools[0].active_lease is new
    assert not jobs.dismissed, "it still has work"
    jobs.busy.clear()
    jobs.manager.renew()
    assert jobs.dismissed == old.workers()
    assert jobs.submitted[3:] == []


def test_a_lost_lease_is_replaced_after_its_last_writes(jobs: Jobs) -> None:
    lease = jobs.connect(0)
    jobs.manager.on_worker_lost(lease.primary_worker, "silent")
    jobs.manager.replace_lost()
    assert jobs.lost == ["pool-0-0"]
    assert jobs.manager.cancel_abandoned() == lease.workers(), "nobody is there who could write"
    assert jobs.cancelled == ["pool-0-0"]
    lease = jobs.connect(1)
    jobs.manager.abandon(lease, "one rank failed", count_failure=False)
    assert jobs.manager.cancel_abandoned() == []
    assert jobs.pools[1].active_lease is None
    jobs.manager.on_worker_left(lease.primary_worker)
    assert jobs.manager.cancel_abandoned() == lease.workers()
    assert jobs.manager.on_joined(lease.primary_worker, {"rank": 0}) is None
    jobs.manager.renew()
    assert jobs.submitted[2:] == ["pool-1-1"], "the failure of the other one costs a pause"


def test_leases_that_are_lost_together_cost_one_query(jobs: Jobs) -> None:
    for number in range(2):
        jobs.manager.on_worker_lost(jobs.connect(number).primary_worker, "silent")
    jobs.manager.replace_lost()
    jobs.manager.replace_lost()
    assert jobs.polls == [["pool-0-0", "pool-1-0"]]
    assert jobs.lost == ["pool-0-0", "pool-1-0"]


def test_a_pool_that_fails_without_any_finished_work_stops_the_run(
    jobs: Jobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MIN_PAUSE_S", 0.0)
    jobs.manager.count_finished(jobs.pools[0].leases[0])
    for number in range(3):
        jobs.states[f"pool-0-{number}"] = JobStatus(JobState.FAILED, 1, "NonZeroExit")
        if number < 2:
            jobs.manager.poll_jobs()
            jobs.manager.renew()
    with pytest.raises(StageError, match=r"pool 0 failed 2 times: job pool-0-2 failed"):
        jobs.manager.poll_jobs()


def test_bad_input_is_not_tried_again(jobs: Jobs) -> None:
    jobs.states["pool-0-0"] = JobStatus(JobState.FAILED, EXIT_BAD_INPUT, "no such file")
    with pytest.raises(InputError, match="pool 0: no such file"):
        jobs.manager.poll_jobs()


def test_generators_come_and_go(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> None:
    jobs = Jobs(compose("cluster=local"), tmp_path, ELASTIC)
    jobs.manager.start(2)
    assert sorted(jobs.submitted) == ["pool-0w0-0", "pool-0w1-0", "pool-1-0"]
    second = jobs.connect(2)
    jobs.busy.add(second)
    jobs.manager.scale(1)
    jobs.manager.renew()
    assert not jobs.dismissed, "it still has work"
    jobs.busy.clear()
    jobs.manager.renew()
    assert jobs.dismissed == second.workers()
    jobs.states[second.job] = JobStatus(JobState.DONE, 0)
    jobs.manager.poll_jobs()
    jobs.manager.cancel_abandoned()
    jobs.manager.renew()
    assert [pool.name for pool in jobs.pools] == ["0w0", "1"]


@pytest.mark.parametrize("stage", ["rollout", "rollout.generate"])
def test_work_that_is_longer_than_a_lease_is_given_up(jobs: Jobs, stage: str) -> None:
    def end(left_s: float, *, finished: bool = False) -> None:
        """A lease ends with work: its workers leave, and Slurm stops its job."""
        lease = jobs.connect(0, left_s)
        lease.stages.add(stage)
        lease.num_finished = int(finished)
        jobs.manager.on_worker_left(lease.primary_worker)
        jobs.states[lease.job] = JobStatus(JobState.PREEMPTED, EXIT_REQUEUE)
        jobs.manager.poll_jobs()
        jobs.manager.renew()

    for _ in range(2):
        for _ in range(MAX_TIMEOUTS - 1):
            end(5.0)
        end(5.0, finished=True)
        end(400.0)  # preempted long before its end
    for _ in range(MAX_TIMEOUTS - 1):
        end(5.0)
    with pytest.raises(PlanError, match=rf"pools\[0\].*before they finished {stage}, which"):
        end(5.0)


def test_a_generator_that_is_wanted_again_has_its_own_slot(
    compose: Callable[..., dict[str, Any]], tmp_path: Path
) -> None:
    jobs = Jobs(compose("cluster=local"), tmp_path, ELASTIC)
    jobs.manager.start(4)
    for number in range(2, 5):
        jobs.connect(number)
    third, last = (pool.leases[-1] for pool in jobs.manager.generators[2:])
    jobs.busy.add(third)
    jobs.manager.scale(2)
    jobs.manager.renew()
    jobs.manager.on_worker_left(last.primary_worker)
    jobs.manager.renew()
    assert jobs.manager.cancel_abandoned() == last.workers()
    jobs.manager.renew()
    assert [pool.slot for pool in jobs.manager.generators] == [0, 1, 2]
    for _ in range(2):
        jobs.manager.scale(4)
        jobs.busy.clear()
        jobs.manager.renew()
        assert [pool.slot for pool in jobs.manager.generators] == [0, 1, 2, 3]
    assert jobs.dismissed == last.workers(), "the third was wanted again before it could leave"


def test_a_successor_that_fails_is_submitted_again_after_a_pause(jobs: Jobs) -> None:
    jobs.connect(0, left_s=5.0)
    jobs.manager.renew()
    jobs.states["pool-0-1"] = JobStatus(JobState.FAILED, 1, "NonZeroExit")
    jobs.manager.poll_jobs()
    jobs.manager.renew()
    assert jobs.submitted == ["pool-0-0", "pool-1-0", "pool-0-1"]
    jobs.pools[0].retry_at = 0.0
    jobs.manager.renew()
    assert jobs.submitted[3:] == ["pool-0-2"]


def test_a_generator_with_bad_input_does_not_keep_a_failing_pool_alive(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leases, "MIN_PAUSE_S", 0.0)
    jobs = Jobs(compose("cluster=local"), tmp_path, ELASTIC)
    jobs.manager.start(2)
    jobs.connect(0)
    jobs.states["pool-0w1-0"] = JobStatus(JobState.FAILED, EXIT_BAD_INPUT, "no such file")
    jobs.manager.poll_jobs()
    jobs.states["pool-0w0-0"] = JobStatus(JobState.FAILED, 1, "NonZeroExit")
    jobs.manager.poll_jobs()
    jobs.manager.renew()
    jobs.states["pool-0w0-1"] = JobStatus(JobState.FAILED, 1, "NonZeroExit")
    with pytest.raises(StageError, match="pool 0w0 failed 2 times"):
        jobs.manager.poll_jobs()
