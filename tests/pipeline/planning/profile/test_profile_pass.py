"""The profile pass itself, on this machine, with the run's own stages."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any, get_args

import pytest

from launchers.local import LocalLauncher
from pipeline.commands.experiment import prepare_run, run_sft
from pipeline.plan import Plan, StagePlan
from pipeline.planning.profile import profile_pass
from pipeline.planning.profile.device_kinds import DeviceKind, local_kind
from pipeline.planning.profile.measurement import (
    MIN_REPEATS,
    ProfileTask,
    Trial,
    load_trial,
)
from pipeline.planning.profile.profile_pass import (
    ProfileOptions,
    ProfilePass,
    batch_sizes_to_measure,
    is_finished,
    profile_run,
    record_job_outcome,
)
from pipeline.planning.profile.schema import OverheadName, Profile, ProfileIdentity, kind_key
from pipeline.resources import ClusterConfig
from rlinf.config import RunConfig, validate
from rlinf.errors import ConfigError, InputError, PlanError, RunLockedError, StageError
from slurm.jobs import JobState, JobStatus
from stages.flow import on_policy
from tests.pipeline.planning.planner import clusters
from tests.pipeline.planning.profile.examples import task

Compose = Callable[..., dict[str, Any]]
WORDS = ("cluster=local", "sft.max_steps=0")


@pytest.fixture(autouse=True)
def all_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any spread will do: the machine that runs the tests is busy."""
    monkeypatch.setattr("pipeline.planning.profile.measurement.CONVERGED_SHARE", 1e9)
    monkeypatch.setattr("pipeline.planning.profile.profile_pass.MEASURED_ITERATIONS", 2)


@pytest.mark.timeout(900)
def test_a_pass_measures_every_stage_and_a_second_one_is_done_at_once(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = prepare_run(compose(*WORDS))
    # It ends once all is settled; on a busy machine, where that may never be, once time is up.
    options = ProfileOptions(minutes=4, processes=2)
    made = profile_run(run, options, run_sft)
    made.check_identity(ProfileIdentity.of(run.config), "profile.json")
    assert Profile.model_validate_json(made.model_dump_json()) == made
    assert made.samples == 16
    assert len(made.lengths) % 16 == 0
    assert made.weights_bytes > 10_000
    local = made.kinds["local"]
    for stage in on_policy.stages:
        whole = [p for p in local.points if p.stage == stage and p.samples == made.samples]
        assert sorted(p.processes for p in whole) == ([1] if stage == "reward" else [1, 2])
        for point in whole:
            assert point.cold is not None
            assert point.time is not None
            assert point.time.median_s > 0
            assert point.peak_memory_bytes is not None
            assert point.peak_memory_bytes > 50 << 20
    names = {entry.name for entry in local.overheads}
    # On a busy machine there may be no time for stages as separate jobs.
    assert names >= set(get_args(OverheadName)) - {"submission", "alone", "dispatch"}
    assert local.overhead_s("imports", 1) > 0.5
    assert not (run.folder / "it").exists(), "the run itself has made no iteration"
    # Once all is settled no job is started.
    for path in (run.folder.parent / ".profiles").rglob("trial.json"):
        trial = load_trial(path)
        assert trial is not None
        assert trial.iterations >= 2
        values = ProfileTask.model_validate_json((path.parent / "task.json").read_text())
        for size in values.batch_sizes * MIN_REPEATS:
            trial = trial.with_repeat(size, 1.0)
        trial.save(path)
    monkeypatch.setattr(
        LocalLauncher, "submit", lambda self, job: pytest.fail(f"started {job.name}")
    )
    # Too little time for stages as separate jobs, which a busy machine may not have finished.
    again = profile_run(run, ProfileOptions(minutes=1, processes=2), run_sft)
    assert again.kinds["local"].points == local.points


def test_a_job_that_was_killed_is_a_failed_point_and_the_next_goes_on(
    compose: Compose, tmp_path: Path
) -> None:
    run = prepare_run(compose(*WORDS))
    run_sft(run)
    wanted = task(
        run, tmp_path / "trial", batch_sizes=batch_sizes_to_measure(run.config, 1), seconds=600
    )
    process = start(wanted)
    deadline = time.monotonic() + 60
    while (trial := load_trial(wanted.trial_path)) is None or not trial.repeats:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.01)
    # Kill it in the middle of a stage, not between two iterations.
    while True:
        process.send_signal(signal.SIGSTOP)
        trial = load_trial(wanted.trial_path)
        assert trial is not None
        if trial.running is not None:
            break
        process.send_signal(signal.SIGCONT)
        time.sleep(0.01)
    process.kill()
    process.wait()
    record_job_outcome(wanted, JobStatus(JobState.FAILED, -9, "killed by SIGKILL"))
    failed = load_trial(wanted.trial_path)
    assert failed is not None
    assert failed.samples[-1].failure == "killed by SIGKILL"
    assert failed.samples[-1].stage == trial.running.stage
    smaller = [size for size in wanted.batch_sizes if size < trial.running.batch_size]
    again = wanted.model_copy(update={"seconds": 0.1})
    assert start(again).wait(60) == 0
    after = load_trial(wanted.trial_path)
    assert after is not None
    assert after.iterations >= trial.iterations + (2 if smaller else 0)
    assert after.running is None


def start(wanted: ProfileTask) -> subprocess.Popen[bytes]:
    wanted.folder.mkdir(parents=True, exist_ok=True)
    path = wanted.folder / "task.json"
    path.write_text(wanted.model_dump_json())
    return subprocess.Popen(
        [sys.executable, "-m", "pipeline.planning.profile.bench_main", str(path)]
    )


def test_the_run_s_own_batch_and_smaller_ones_are_measured(compose: Compose) -> None:
    config = validate(RunConfig, compose("algorithm.minibatches=4"))
    assert batch_sizes_to_measure(config, 1) == (4, 2, 1)
    assert batch_sizes_to_measure(config, 4) == (4,)
    uneven = validate(RunConfig, compose("algorithm.minibatches=16"))
    assert batch_sizes_to_measure(uneven, 1) == (4,)


@pytest.mark.parametrize(
    ("status", "error"),
    [
        (JobStatus(JobState.FAILED, 65, "optimizer.lr: wrong"), InputError),
        (JobStatus(JobState.FAILED, 1, "ValueError: something else"), StageError),
        (JobStatus(JobState.OUT_OF_MEMORY, None, "oom-kill"), None),
        (JobStatus(JobState.TIMEOUT, None, ""), None),
        (JobStatus(JobState.PREEMPTED, None, ""), None),
    ],
)
def test_only_want_of_memory_and_lost_nodes_are_no_errors(
    compose: Compose, tmp_path: Path, status: JobStatus, error: type[Exception] | None
) -> None:
    wanted = task(prepare_run(compose(*WORDS)), tmp_path)
    if error is None:
        record_job_outcome(wanted, status)
        assert not is_finished(wanted)
    else:
        with pytest.raises(error, match=r"profile of local on 1 processes: .*(wrong|else)"):
            record_job_outcome(wanted, status)


def test_an_unknown_partition_is_refused_before_anything_runs(compose: Compose) -> None:
    run = prepare_run(compose(*WORDS))
    with pytest.raises(PlanError, match=r"--partition a100: .*valid: local"):
        profile_run(run, ProfileOptions(partitions=("a100",)), run_sft)
    assert not (run.folder / "sft").exists()


def test_a_plan_that_names_no_partition_is_measured_on_the_default_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = clusters.inventory()
    part = there.partitions["h100"].model_copy(update={"is_default": True})
    inventory = there.model_copy(update={"partitions": {**there.partitions, "h100": part}})
    monkeypatch.setattr(profile_pass, "load_or_survey", lambda source, site: inventory)
    cluster = ClusterConfig(launcher="slurm")
    assert [
        kind.name for kind in profile_pass._kinds_to_measure(cluster, Plan(), on_policy, ())
    ] == ["h100"]
    named = Plan(stages={"train": StagePlan(partition="a100")})
    assert [
        kind.name for kind in profile_pass._kinds_to_measure(cluster, named, on_policy, ())
    ] == [
        "h100",
        "a100",
    ]
    monkeypatch.setattr(profile_pass, "load_or_survey", lambda source, site: there)
    with pytest.raises(PlanError, match="the plan has none, and the cluster has no default"):
        profile_pass._kinds_to_measure(cluster, Plan(), on_policy, ())


def test_a_damaged_trial_is_refused_until_fresh(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Jobs on their own have no trial.
    monkeypatch.setattr("pipeline.planning.profile.profile_pass.measure_stage_jobs", lambda *_: [])
    run = prepare_run(compose(*WORDS))
    key = kind_key(ProfileIdentity.of(run.config), local_kind())
    trial = run.folder.parent / ".profiles" / key / "1x1" / "trial.json"
    trial.parent.mkdir(parents=True)
    trial.write_text('{"key": ')
    with pytest.raises(PlanError, match=r"trial\.json is not valid JSON.*--fresh"):
        profile_run(run, ProfileOptions(minutes=0.01, processes=1), run_sft)
    fresh = profile_run(run, ProfileOptions(minutes=0.01, processes=1, fresh=True), run_sft)
    assert fresh.kinds["local"].points


@pytest.mark.parametrize("minutes", [0.3, 0.5, 2.0, 10.0])
def test_a_pass_takes_no_longer_than_it_is_given(
    compose: Compose, monkeypatch: pytest.MonkeyPatch, minutes: float
) -> None:
    """Of jobs that take 8 s to start and then measure for as long as they are told."""
    clock, measured = [1000.0], []

    def submit(
        self: ProfilePass, kind: DeviceKind, group: list[ProfileTask], seconds: float
    ) -> dict[str, ProfileTask]:
        for wanted in group:
            clock[0] += 8 + seconds
            measured.append(wanted.processes)
            trial = Trial(key=wanted.key, nodes=1, processes=wanted.processes)
            wanted.folder.mkdir(parents=True, exist_ok=True)
            trial.save(wanted.trial_path)
        return {}

    def own_jobs(*given: Any) -> list[Any]:
        clock[0] = given[-1]
        return []

    monkeypatch.setattr("pipeline.planning.profile.profile_pass.time.time", lambda: clock[0])
    monkeypatch.setattr("pipeline.planning.profile.profile_pass.measure_stage_jobs", own_jobs)
    monkeypatch.setattr(ProfilePass, "submit", submit)
    run = prepare_run(compose(*WORDS))
    plan, options = Plan.from_run(run.folder), ProfileOptions(minutes=minutes)
    launcher: Any = None
    work = ProfilePass(
        run, ClusterConfig(), plan, launcher, ProfileIdentity.of(run.config), options
    )
    kind = replace(local_kind(), cpus_per_node=4, gpus_per_node=0, nodes=1)
    work.measure_kind(kind, 60 * minutes)
    assert clock[0] - 1000 <= 60 * minutes + 1
    assert set(measured) == ({1, 2} if minutes < 0.5 else {1, 2, 4})


def test_two_passes_over_one_run_are_refused(compose: Compose) -> None:
    run = prepare_run(compose(*WORDS))
    with run.lock(), pytest.raises(RunLockedError):
        profile_run(run, ProfileOptions(), run_sft)


def test_a_run_that_cannot_be_composed_is_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", "profile", "experiment=none", f"run.root={tmp_path}"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == ConfigError.exit_code
    assert "none" in done.stderr
    assert "Traceback" not in done.stderr
    assert not list(tmp_path.iterdir())
