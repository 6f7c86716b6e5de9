"""GPU-hours are counted by partition over all drivers of a run, and a budget ends the run."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import given
from hypothesis import strategies as st

from launchers.launcher import JobSpec
from launchers.local import LocalLauncher
from pipeline.commands.experiment import compose_words, prepare_run, reopen_run
from pipeline.commands.status import read_status, status_table
from pipeline.commands.workflow import prepare_workflow
from pipeline.driver import Driver
from pipeline.executors import InProcessExecutor
from pipeline.gpu_hours import (
    GpuBudget,
    GpuHours,
    MeteredLauncher,
    check_budget,
    driver_gpus,
    format_gpu_hours,
    read_gpu_hours,
)
from pipeline.run import Run
from rlinf.errors import ConfigError, PlanError
from slurm.jobs import JobResources, JobState, JobStatus
from tests.conftest import TINY
from tests.pipeline.helpers import contents, run_here

HOUR = 3600.0


class Clock:
    """A clock that tests set."""

    now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def open_hours(tmp_path: Path, clock: Clock) -> Callable[[], GpuHours]:
    """Opens the GPU-hours of one run, as each of its drivers does."""
    return lambda: GpuHours(tmp_path, clock)


def test_gpus_count_while_a_job_runs(open_hours: Callable[[], GpuHours], clock: Clock) -> None:
    hours = open_hours()
    hours.observe("1", {"a100": 4}, is_running=False)
    clock.now += HOUR
    assert hours.total == 0, "it waited"
    hours.observe("1", {"a100": 4}, is_running=True)
    clock.now += HOUR / 2
    assert hours.total == pytest.approx(2)
    hours.observe("1", {"a100": 4}, is_running=False)
    clock.now += HOUR
    hours.observe("2", {"h100": 1}, is_running=True)
    clock.now += HOUR
    hours.observe("2", {"h100": 1}, is_running=True)
    assert hours.total == pytest.approx(3)
    assert read_gpu_hours(hours.run) == pytest.approx({"a100": 2, "h100": 1})
    assert format_gpu_hours(read_gpu_hours(hours.run), 8) == "3 of 8 (a100 2, h100 1)"


def test_a_job_that_slurm_starts_again_counts_twice_without_its_wait(
    open_hours: Callable[[], GpuHours], clock: Clock
) -> None:
    hours = open_hours()
    for _ in range(2):
        hours.observe("7", {"a100": 1}, is_running=True)
        clock.now += HOUR
        hours.observe("7", {"a100": 1}, is_running=False)
        clock.now += HOUR
    assert hours.total == pytest.approx(2)


def test_a_job_that_outlives_its_driver_counts_without_a_gap(
    open_hours: Callable[[], GpuHours], clock: Clock
) -> None:
    open_hours().observe("7", {"a100": 1}, is_running=True)
    clock.now += HOUR
    later = open_hours()
    later.observe("7", {"a100": 1}, is_running=True)
    clock.now += HOUR
    assert later.total == pytest.approx(2)


def test_a_job_that_ended_without_a_driver_counts_as_accounting_says(
    open_hours: Callable[[], GpuHours], clock: Clock
) -> None:
    first = open_hours()
    for _ in range(2):
        first.observe("7", {"a100": 1}, is_running=True)
        clock.now += HOUR
    later = open_hours()
    later.observe("7", {"a100": 1}, is_running=False)
    assert later.total == pytest.approx(1), "no more is known than when it was seen last"
    assert later.unaccounted == ["7"]
    later.correct({"7": 1.5 * HOUR})
    assert later.total == pytest.approx(1.5)
    assert not later.unaccounted
    assert read_gpu_hours(later.run) == pytest.approx({"a100": 1.5})


def test_the_file_does_not_grow_with_the_jobs_of_a_run(
    open_hours: Callable[[], GpuHours], clock: Clock
) -> None:
    hours = open_hours()
    for number in range(50):
        hours.observe(str(number), {"a100": 2}, is_running=True)
        clock.now += HOUR
        hours.observe(str(number), {"a100": 2}, is_running=False)
        # Accounting knows every second job.
        hours.correct({job: HOUR for job in hours.unaccounted if int(job) % 2})
    size = (hours.run / "gpu_hours.json").stat().st_size
    assert size < 600
    assert hours.total == pytest.approx(100)
    assert open_hours().total == pytest.approx(100)


def test_a_preempted_job_that_waits_again_holds_no_gpus(
    open_hours: Callable[[], GpuHours], clock: Clock
) -> None:
    states = [JobState.PENDING, JobState.RUNNING, JobState.PENDING, JobState.RUNNING, JobState.DONE]
    hours = open_hours()
    queue = SimpleNamespace(
        submit=lambda job: "12", poll=lambda ids: {"12": JobStatus(states.pop(0))}
    )
    launcher = MeteredLauncher(cast(Any, queue), hours, lambda ids: {})
    resources = JobResources(partition="a100", gpus_per_node=1)
    job_id = launcher.submit(JobSpec("train/0", (), hours.run, hours.run, resources))
    while states:
        launcher.poll([job_id])
        clock.now += HOUR
    assert hours.total == pytest.approx(2)


@given(
    polls=st.lists(
        st.tuples(st.floats(0, 100), st.sets(st.integers(0, 3)), st.booleans()), max_size=30
    )
)
def test_hours_never_shrink_and_never_exceed_the_time_of_the_gpus(
    polls: list[tuple[float, set[int], bool]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    clock, folder = Clock(), tmp_path_factory.mktemp("run")
    start, hours, last = clock.now, GpuHours(folder, clock), 0.0
    for seconds, running, is_new_driver in polls:
        if is_new_driver:
            hours.write()
            hours = GpuHours(folder, clock)
            last = min(last, hours.total)  # what only this driver knows may be lost with it
        clock.now += seconds
        for job in range(4):
            hours.observe(str(job), {"a100": job + 1}, is_running=job in running)
        assert hours.total >= last - 1e-9
        assert hours.total <= 10 * (clock.now - start) / HOUR + 1e-9
        last = hours.total


def test_a_damaged_file_is_named(open_hours: Callable[[], GpuHours]) -> None:
    hours = open_hours()
    hours.write()
    (hours.run / "gpu_hours.json").write_text("{")
    with pytest.raises(ConfigError, match=r"gpu_hours\.json.*count from zero"):
        open_hours()


def test_a_launcher_meters_real_processes(tmp_path: Path) -> None:
    queries: list[list[str]] = []

    def elapsed_s(ids: Collection[str]) -> Mapping[str, float]:
        queries.append(sorted(ids))
        return {}

    hours = GpuHours(tmp_path)
    launcher = MeteredLauncher(LocalLauncher(), hours, elapsed_s)
    resources = JobResources(partition="a100,h100", gpus_per_node=2)
    words = ("-n1", "-r1", "import time; time.sleep(1)")
    job = JobSpec("sleep", words, tmp_path, tmp_path, resources, module="timeit")
    start = time.time()
    job_id = launcher.submit(job)
    while launcher.poll([job_id])[job_id].state.is_active:
        time.sleep(launcher.poll_interval_s)
    wall = time.time() - start
    launcher.close()
    assert 2 * 1 <= hours.total * HOUR <= 2 * wall
    assert list(read_gpu_hours(tmp_path)) == ["a100,h100"]
    assert len(queries) == 1


def quiet_words(root: Path, *more: str) -> list[str]:
    words = [*TINY, "iterations=4", "++log.trackers=[]", *more]
    return ["experiment=arithmetic_grpo", f"++run.root={root}", *words]


def test_a_run_ends_within_its_budget_and_continues_with_a_larger_one(tmp_path: Path) -> None:
    run_here(quiet_words(tmp_path / "reference"))
    run = prepare_run(compose_words(quiet_words(tmp_path)))
    clock = Clock()

    def drive(limit: float | None) -> tuple[Driver, GpuHours]:
        hours = GpuHours(run.folder, clock)
        budget = GpuBudget(hours, limit, {"here": 1})
        driver = Driver(run, SlowExecutor(run, clock), budget=budget)
        driver.drive()
        return driver, hours

    driver, hours = drive(8.0)
    finished = len(list((run.folder / "it").glob("*/sync/manifest.json")))
    assert driver.is_over_budget
    assert 0 < finished < 4
    assert 8.0 - 2 * hours.total / finished < hours.total <= 8.0
    assert not driver._running
    driver, hours = drive(None)
    assert not driver.is_over_budget
    assert contents(run.folder) == contents(tmp_path / "reference" / "tiny")
    assert hours.total > 8.0


class SlowExecutor(InProcessExecutor):
    """Each stage takes half an hour by the clock of the test."""

    def __init__(self, run: Run, clock: Clock) -> None:
        super().__init__(run)
        self._clock = clock

    def start(self, *args: Any) -> None:
        self._clock.now += HOUR / 2
        super().start(*args)


def test_status_and_commands_tell_of_the_budget(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("pipeline.commands.experiment.driver_gpus", lambda _: {"here": 8})
    monkeypatch.setattr("pipeline.gpu_hours.driver_gpus", lambda _: {"here": 8})
    run_here(quiet_words(tmp_path, "budget.gpu_hours=1e-9"))
    shown = capsys.readouterr().err
    assert "of 1e-09 GPU-hours are used" in shown
    assert f"rlinf resume {tmp_path / 'tiny'} budget.gpu_hours=" in shown
    status = read_status(tmp_path / "tiny")
    assert status.gpu_hours["here"] > 0
    assert "of 1e-09 (here " in str(list(status_table(status).columns[1].cells))
    run = reopen_run(tmp_path / "tiny", ["budget.gpu_hours=100"])
    assert run.config.budget.gpu_hours == 100


def test_a_budget_without_gpus_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    with pytest.raises(PlanError, match="set gpus in the plan"):
        check_budget(5, "slurm", [JobResources()])
    with pytest.raises(PlanError, match="where there is no GPU"):
        check_budget(5, "local", [])
    check_budget(5, "slurm", [JobResources(), JobResources(gpus_per_node=1)])
    check_budget(None, "local", [])
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,3")
    assert driver_gpus("local") == {"this machine": 2}
    check_budget(5, "local", [])


def test_the_gpus_of_the_drivers_own_job_count(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_PARTITION": "h100",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_GPUS_ON_NODE": "4",
    }.items():
        monkeypatch.setenv(name, value)
    assert driver_gpus("inprocess") == {"h100": 8}


def test_snakemake_refuses_a_budget(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError, match=r"budget\.gpu_hours: Snakemake"):
        prepare_workflow({"experiment": "arithmetic_short", "budget__gpu_hours": 3})
