"""A driver's job is small whatever a site says; a run has at most one, and none is lost."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from launchers.launcher import JobSpec
from launchers.sbatch import restarting_script
from launchers.submission_queue import write_submitted_job
from pipeline import resume
from pipeline.commands import driver_job
from pipeline.commands import driver_job as submission
from pipeline.commands.cli import app
from pipeline.commands.driver_job import driver_resources, submit_run, write_dry_run
from pipeline.commands.experiment import prepare_run, reopen_run
from pipeline.commands.status import read_status
from pipeline.commands.stop import stop_run
from pipeline.plan import parse_plan
from pipeline.resources import ClusterConfig
from pipeline.resume import create_run
from pipeline.run import Run
from pipeline.run_control import (
    check_no_driver_job,
    find_driver_job,
    last_driver_job_id,
    start_lock,
)
from rlinf import package_paths
from rlinf.config import validate
from rlinf.errors import ConfigError, PlanError, RunLockedError, SlurmError
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.jobs import JobResources
from slurm.site import load_site
from tests.cluster.test_runs import words
from tests.slurm.wrapped import BANNER, FOOTER, write_command

Compose = Callable[..., dict[str, Any]]
SINFO = "".join(
    f"{partition}{number}|{partition}|idle|64|500000|{gres}|\n"
    for partition, gres in (("cpu", "(null)"), ("gpu", "gpu:a100:4"))
    for number in range(4)
)
RULES = "AllowAccounts=ALL AllowQos=ALL QoS=N/A MaxTime=UNLIMITED State=UP"
GPU_JOBS = {
    "account": "team",
    "qos": "gpu",
    "constraint": "a100",
    "reservation": "gpus",
    "exclude": "c9",
    "setup": ["module load cuda"],
    "env": {"X": "y"},
    "sbatch": {
        "exclusive": True,
        "mem-per-cpu": "9G",
        "mail-type": "ALL",
        "nodelist": "g1",
        "licenses": "cuda",
        "dependency": "singleton",
        "time-min": "1-0",
        "wckey": "w",
        "comment": "ours",
    },
}
"""What a site may say of all of its jobs, thinking of those with GPUs."""


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins of Slurm's commands, whose jobs are files: state and comment.

    What they answer stands between the texts of a site.
    """
    at = tmp_path / "slurm"
    (at / "jobs").mkdir(parents=True)
    for name, text in (("banner", BANNER), ("footer", FOOTER), ("sinfo.txt", SINFO)):
        (at / name).write_text(text)

    def command(name: str, script: str) -> None:
        write_command(at, name, f"cat {at}/banner\n{script}\ncat {at}/footer")

    command(
        "sbatch",
        f"(flock 9; id=$((71 + $(ls {at}/jobs | wc -l))); sleep 0.2; "
        f"echo \"PENDING $(grep -o 'rlinf-[0-9a-f]*' ${{@: -1}} | head -1)\" > {at}/jobs/$id; "
        f"[ -e {at}/kill ] && kill -9 $PPID; echo $id) 9> {at}/lock",
    )
    command(
        "squeue",
        f'for job in {at}/jobs/*; do [ -e "$job" ] || continue; id=${{job##*/}}; '
        'read -r state mark < "$job"; case "$*" in *%k*) echo "$id|ours $mark";; '
        '*) echo "$id|$state|cpu|team|normal||None";; esac; done',
    )
    command("scancel", f"for id in $@; do echo CANCELLED > {at}/jobs/$id; done")
    version = "echo slurm-wlm 22.05.8"
    command("sinfo", f'case "$*" in *version*) {version};; *) cat {at}/sinfo.txt;; esac')
    records = "".join(
        f"PartitionName={name} Default={default} {RULES}\n"
        for name, default in (("cpu", "YES"), ("gpu", "NO"))
    )
    (at / "partitions").write_text(records)
    settings = "echo 'ClusterName = dev'; echo 'SLURM_VERSION = 22.05.8'"
    command("scontrol", f'case "$*" in *config*) {settings};; *) cat {at}/partitions;; esac')
    write_command(at, "sacctmgr", "exit 1")
    monkeypatch.setenv("PATH", f"{at}{os.pathsep}{os.environ['PATH']}")
    return at


def needs_of(folder: Path, site: dict[str, Any], **driver: Any) -> JobResources:
    path = folder / "site.yaml"
    path.write_text(yaml.safe_dump(site))
    cluster = validate(
        ClusterConfig, {"launcher": "slurm", "site": str(path), "driver": driver}, "cluster"
    )
    inventory = discover_inventory(SlurmClient(), with_usage=False)
    needs = driver_resources(cluster, parse_plan({}, "plan"), inventory)
    # The cache of site files goes by path.
    path.rename(folder / "seen.yaml")
    load_site.cache_clear()
    return needs


def options(folder: Path, needs: JobResources) -> set[str]:
    """The options of a driver's script, with their values."""
    job = JobSpec("driver/x", (), folder / "o", folder / "l", needs, "m")
    lines = restarting_script(job).splitlines()
    return {line.removeprefix("#SBATCH --") for line in lines if line.startswith("#SBATCH --")}


def names(found: set[str]) -> set[str]:
    return {option.partition("=")[0] for option in found}


SMALL = {
    *(
        "account",
        "comment",
        "cpus-per-task",
        "error",
        "exclude",
        "job-name",
        "mem",
        "nodes",
    ),
    *("nodes", "ntasks-per-node", "open-mode", "output", "partition", "requeue", "signal", "time"),
    "wckey",
}


def test_a_driver_is_a_small_cpu_job_whatever_the_site_says_of_all(
    slurm: Path, tmp_path: Path
) -> None:
    needs = needs_of(tmp_path, {"defaults": GPU_JOBS})
    found = options(tmp_path, needs)
    assert names(found) == SMALL
    assert {"account=team", "exclude=c9", "mem=4000M", "partition=cpu"} <= found
    assert {"nodes=1", "ntasks-per-node=1", "cpus-per-task=1", "wckey=w"} <= found
    assert needs.setup == ("module load cuda",)
    assert needs.env["X"] == "y"


def test_a_driver_in_a_partition_with_gpus_has_nothing_of_its_jobs(
    slurm: Path, tmp_path: Path
) -> None:
    needs = needs_of(tmp_path, {"partitions": {"gpu": GPU_JOBS}}, partition="gpu")
    assert names(options(tmp_path, needs)) == SMALL


def test_a_driver_goes_to_a_partition_without_gpus_if_the_default_one_has_some(
    slurm: Path, tmp_path: Path
) -> None:
    """Among several it prefers one that is long, shared and large, and that accepts the job."""
    records = {
        "gpu": "Default=YES",
        "cpu": "Default=NO",
        "short": "Default=NO MaxTime=00:30:00",
        "whole": "Default=NO OverSubscribe=EXCLUSIVE",
        "closed": "Default=NO State=DOWN",
        "others": "Default=NO AllowAccounts=others",
    }
    (slurm / "partitions").write_text(
        "".join(
            f"PartitionName={name} {text} "
            + " ".join(w for w in RULES.split() if w.partition("=")[0] not in text)
            + "\n"
            for name, text in records.items()
        )
    )
    nodes = "".join(
        f"n{number}|{name}|idle|64|500000|(null)|\n"
        for name in records
        if name != "gpu"
        for number in range(4 if name == "cpu" else 9)
    )
    (slurm / "sinfo.txt").write_text(SINFO + nodes)
    site = {"defaults": {"account": "team", "python_command": ["apptainer"], "srun": {"mpi": "x"}}}
    needs = needs_of(tmp_path, site)
    assert (needs.partition, needs.time_limit_min) == ("cpu", 24 * 60)
    assert not needs.python_command, "the driver calls sbatch, which a container may lack"
    assert not needs.srun
    assert needs_of(tmp_path, site, partition="gpu").partition == "gpu", "as the user wants it"


def test_a_driver_names_no_memory_where_slurm_does_not_know_it(slurm: Path, tmp_path: Path) -> None:
    (slurm / "sinfo.txt").write_text(SINFO.replace("|500000|", "|1|"))
    assert needs_of(tmp_path, {}).mem_mb is None
    assert "mem" not in names(options(tmp_path, needs_of(tmp_path, {})))
    with pytest.raises(PlanError, match=r"cluster\.driver\.mem_mb: 900 requested, .* have 1"):
        needs_of(tmp_path, {}, mem_mb=900)


def test_a_driver_with_the_site_file_of_another_cluster_is_refused(
    slurm: Path, tmp_path: Path
) -> None:
    site = {"partitions": {"normal": {}, "gpu-a100": {}}}
    with pytest.raises(PlanError, match=r"site file of another cluster\?.*rlinf init-site"):
        needs_of(tmp_path, site)


def test_what_is_said_of_its_own_partition_of_cpus_holds(slurm: Path, tmp_path: Path) -> None:
    own = {"qos": "long", "reservation": "drivers", "sbatch": {"exclusive": True}}
    needs = needs_of(tmp_path, {"defaults": GPU_JOBS, "partitions": {"cpu": own}})
    found = options(tmp_path, needs)
    assert {"qos=long", "reservation=drivers"} <= found
    assert not {"exclusive", "constraint"} & names(found)


def test_what_the_driver_section_says_comes_before_all(slurm: Path, tmp_path: Path) -> None:
    settings = {"account": "own", "qos": "q", "constraint": "c", "reservation": "r", "exclude": "e"}
    needs = needs_of(
        tmp_path,
        {"defaults": GPU_JOBS},
        sbatch={"exclusive": True, "nice": 9},
        mail="ada",
        **settings,
    )
    found = options(tmp_path, needs)
    assert {f"{key}={value}" for key, value in settings.items()} <= found
    assert {"exclusive", "nice=9", "mail-user=ada", "mail-type=END,FAIL"} <= found


@pytest.mark.parametrize(
    ("sbatch", "words"), [({"array": "0-3"}, "array"), ({"mem": 1, "mem-per-cpu": 1}, "mem_mb")]
)
def test_options_that_a_driver_cannot_have_are_refused(sbatch: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=f"driver.sbatch.*{words}"):
        validate(ClusterConfig, {"driver": {"sbatch": sbatch}}, "cluster")


def test_a_driver_lasts_no_longer_than_accounting_allows(slurm: Path, tmp_path: Path) -> None:
    text = (slurm / "scontrol").read_text()
    settings = "echo 'AccountingStorageEnforce = limits'; echo 'ClusterName = dev'"
    (slurm / "scontrol").write_text(text.replace("echo 'ClusterName = dev'", settings))
    rows = {"qos": "normal|0||02:00:00|||||", "assoc": "dev|team||normal||||||normal"}
    write_command(
        slurm,
        "sacctmgr",
        f"case \"$*\" in *qos*) echo '{rows['qos']}';; *) echo '{rows['assoc']}';; esac",
    )
    assert needs_of(tmp_path, {}).time_limit_min == 120
    assert needs_of(tmp_path, {}, time_limit_min=60).time_limit_min == 60


def test_a_dry_run_shows_what_sbatch_answers_to_each_script(slurm: Path, tmp_path: Path) -> None:
    start = "sbatch: Job 9 to start at 2026-01-02T03:04:05 using 1 processors on nodes cpu0"
    write_command(slurm, "sbatch", f"echo '{start}' >&2")
    call = words(tmp_path, "cluster=slurm")
    lines = write_dry_run(call, {})
    assert f"  driver.sh: {start.removeprefix('sbatch: ')}" in lines
    assert f"  train.sh: {start.removeprefix('sbatch: ')}" in lines
    assert lines[-1] == "nothing was submitted"
    refusal = "echo 'sbatch: error: Job violates accounting/QOS policy' >&2; exit 1"
    write_command(slurm, "sbatch", f"case $* in *train.sh) {refusal};; esac; echo '{start}' >&2")
    with pytest.raises(SlurmError, match=r"sbatch would refuse 1 of \d+ scripts") as error:
        write_dry_run(call, {})
    assert "  train.sh: refused: Job violates accounting/QOS policy" in str(error.value)
    assert "  driver.sh: Job 9 to start" in str(error.value)
    assert (tmp_path / "tiny.dry-run" / "train.sh").exists()
    assert not (tmp_path / "tiny").exists()


def test_a_saved_inventory_is_for_dry_runs_only(slurm: Path, tmp_path: Path) -> None:
    saved = tmp_path / "inventory.json"
    discover_inventory(SlurmClient()).save(saved)
    for command in ("scontrol", "sinfo", "sbatch"):
        write_command(slurm, command, "exit 1")
    call = ["submit", *words(tmp_path, "cluster=slurm"), "--from", str(saved)]
    done = CliRunner().invoke(app, [*call, "--dry-run"])
    assert done.exit_code == 0, done.output
    assert f"sbatch was not called: --from {saved}" in done.output
    assert (tmp_path / "tiny.dry-run" / "driver.sh").exists()
    done = CliRunner().invoke(app, call)
    assert "only with --dry-run" in str(done.exception)
    assert not (tmp_path / "tiny").exists()


@pytest.fixture
def run(slurm: Path, compose: Compose) -> Run:
    return prepare_run(compose("cluster=slurm", "cluster.poll_interval_s=0.2"))


def test_a_run_whose_partition_vanished_is_not_submitted(
    slurm: Path, compose: Compose, tmp_path: Path
) -> None:
    plan = {"stages": {"train": {"partition": "gpu", "gpus": 1}}}
    run = prepare_run({**compose("cluster=slurm"), "plan": plan})
    records = (slurm / "partitions").read_text()
    (slurm / "partitions").write_text(records.replace("PartitionName=gpu", "PartitionName=gpu2"))
    sinfo = (slurm / "sinfo.txt").read_text()
    (slurm / "sinfo.txt").write_text(sinfo.replace("|gpu|", "|gpu2|"))
    with pytest.raises(PlanError, match=r"stages\.train\.partition: no partition 'gpu' .*'gpu2'"):
        submit_run([str(run.folder)], {})
    assert not list((slurm / "jobs").iterdir())


def test_a_submitted_driver_is_known_and_stopped_though_banners_surround_its_id(
    run: Run, slurm: Path
) -> None:
    message = submit_run([str(run.folder)], {})
    assert "the driver is job 71 on cpu" in message[0]
    assert last_driver_job_id(run) == "71"
    assert "job 71, pending" in read_status(run.folder).driver
    with pytest.raises(RunLockedError, match="job 71, pending, drives this run"):
        submit_run([str(run.folder)], {})
    assert stop_run(run.folder) == ["job 71 (driver) cancelled"]
    assert (slurm / "jobs" / "71").read_text() == "CANCELLED\n"
    assert find_driver_job(run) is None
    assert "job 72" in submit_run([str(run.folder)], {})[0]


def test_a_driver_whose_id_is_not_told_is_not_left_behind(run: Run, slurm: Path) -> None:
    text = (slurm / "sbatch").read_text()
    (slurm / "sbatch").write_text(text.replace("; echo $id)", "; echo accepted)"))
    with pytest.raises(SlurmError, match=r"no job id: .*accepted.*job 71 was cancelled"):
        submit_run([str(run.folder)], {})
    assert (slurm / "jobs" / "71").read_text() == "CANCELLED\n"
    assert find_driver_job(run) is None
    (slurm / "sbatch").write_text(text)
    assert "job 72" in submit_run([str(run.folder)], {})[0]


CLIENT = (
    "import sys; from pipeline.commands.driver_job import submit_run; submit_run(sys.argv[1:], {})"
)


def client(run: Run) -> subprocess.Popen[str]:
    """Another process that submits the run's driver."""
    return subprocess.Popen(
        [sys.executable, "-c", CLIENT, str(run.folder)],
        env={**os.environ, "PYTHONPATH": str(package_paths.ROOT)},
        stderr=subprocess.PIPE,
        text=True,
    )


def test_a_driver_is_found_though_its_submitter_died_before_it_had_the_id(
    run: Run, slurm: Path
) -> None:
    (slurm / "kill").touch()
    process = client(run)
    process.communicate(timeout=90)
    assert process.returncode == -signal.SIGKILL
    (slurm / "kill").unlink()
    deadline = time.monotonic() + 20
    while not (slurm / "jobs" / "71").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert last_driver_job_id(run) is None
    assert "job 71, pending" in read_status(run.folder).driver
    for start in (lambda: submit_run([str(run.folder)], {}), lambda: check_no_driver_job(run)):
        with pytest.raises(RunLockedError, match="job 71, pending, drives this run"):
            start()
    assert stop_run(run.folder) == ["job 71 (driver) cancelled"]
    assert "job 72" in submit_run([str(run.folder)], {})[0]
    assert last_driver_job_id(run) == "72"


def test_the_job_itself_may_drive_before_its_id_is_noted(
    run: Run, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_submitted_job(driver_job.driver_job(run, JobResources()), tag="rlinf-0a")
    (slurm / "jobs" / "71").write_text("RUNNING rlinf-0a\n")
    monkeypatch.setenv("SLURM_JOB_ID", "71")
    check_no_driver_job(run)
    monkeypatch.setenv("SLURM_JOB_ID", "72")
    with pytest.raises(RunLockedError, match="job 71"):
        check_no_driver_job(run)


def test_a_stages_job_without_an_id_is_stopped_too(run: Run, slurm: Path) -> None:
    out = run.folder / "sft"
    write_submitted_job(JobSpec("sft", (), out, out), tag="rlinf-0b")
    (slurm / "jobs" / "71").write_text("RUNNING rlinf-0b\n")
    assert stop_run(run.folder) == ["job 71 (sft) cancelled"]
    assert (slurm / "jobs" / "71").read_text() == "CANCELLED\n"


def test_of_two_submissions_at_once_one_is_refused(run: Run, slurm: Path) -> None:
    processes = [client(run) for _ in range(2)]
    errors = [process.communicate(timeout=120)[1] for process in processes]
    assert sorted(process.returncode for process in processes) == [0, 1], errors
    assert [path.name for path in (slurm / "jobs").iterdir()] == ["71"]
    assert last_driver_job_id(run) == "71"


def test_while_one_submits_another_is_refused(run: Run, slurm: Path) -> None:
    with (
        start_lock(run),
        pytest.raises(RunLockedError, match="another process is starting this run"),
        start_lock(run),
    ):
        pass
    with start_lock(run):
        pass


@pytest.mark.parametrize(
    "start",
    [
        lambda folder, values: submit_run([str(folder), "seed=2"], {}),
        lambda folder, values: reopen_run(folder, ["seed=2"]),
        lambda folder, values: prepare_run({**values, "seed": 2}),
    ],
    ids=["submit", "resume", "run"],
)
def test_of_two_starts_at_once_the_run_is_of_the_one_that_won(
    start: Callable[[Path, dict[str, Any]], object],
    run: Run,
    compose: Compose,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A second start submits a driver just before the first one writes the run."""
    won = []

    def late(*given: Any) -> Run:
        with monkeypatch.context() as once:
            for module in (resume, submission):
                once.setattr(module, "create_run", create_run)
            with contextlib.suppress(RunLockedError):
                submit_run([str(run.folder), "seed=1"], {})
                won.append(1)
        return create_run(*given)

    for module in (resume, submission):
        monkeypatch.setattr(module, "create_run", late)
    with contextlib.suppress(RunLockedError):
        start(run.folder, compose("cluster=slurm", "cluster.poll_interval_s=0.2"))
        won.append(2)
    assert won == [Run.open(run.folder).config.seed]
