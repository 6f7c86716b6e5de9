"""Batch scripts say what is meant, whatever the words hold; and jobs are submitted by them."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from launchers.hydra_sweeps import patch_submitit
from launchers.job_entrypoint import ModuleCall
from launchers.launcher import JobSpec
from launchers.sbatch import (
    array_script,
    batch_script,
    check_hetjob_options,
    check_submission,
    hetjob_script,
    new_tag,
    restarting_script,
    submit_hetjob,
    submit_jobs,
    submit_restarting,
)
from rlinf.errors import PlanError, SlurmError
from slurm.jobs import JobResources
from tests.slurm.wrapped import wrap, write_command

ODD = """a 'b' "c" $HOME; `d` * \\n"""
A100 = JobResources(
    "a100", gpus_per_node=1, gpu_type="a100", env={"X": ODD}, setup=("module load x",)
)
CPU = JobResources("cpu")


def job(folder: Path, *further: JobResources) -> JobSpec:
    return JobSpec("pool/one", ("--name", ODD), folder / "o", folder / "l o", A100, "m", further)


def test_calls_and_settings_survive_the_shell(tmp_path: Path) -> None:
    script = hetjob_script([job(tmp_path, CPU), job(tmp_path)])
    options, body = script.split("\n\n", 1)
    assert options.count("#SBATCH hetjob") == 2
    assert options.count("#SBATCH --gres=gpu:a100:1") == 2
    assert options.count("#SBATCH --gres=none") == 1, "of the one before it, it would have a GPU"
    starts = [shlex.split(part) for part in body.split("srun ")[1:]]
    assert [[w for w in words if w.startswith("--het-group")] for words in starts] == [
        ["--het-group=0", "--het-group=1"],
        ["--het-group=2"],
    ]
    steps = [words[i + 1] for words in starts for i, word in enumerate(words) if word == "-c"]
    assert len(steps) == 3
    for step, groups in zip(steps, ("0,1", "0,1", "2"), strict=True):
        *setup, last = step.split("\n")
        assert f"export RLINF_HET_GROUPS={groups}" in setup
        call = ModuleCall.from_json(shlex.split(last)[-1])
        assert (call.module, call.argv) == ("m", ("--name", ODD))
    assert f"export X={shlex.quote(ODD)}" in steps[0]
    assert "module load x" in steps[0]
    assert "module load x" not in steps[1]


@pytest.mark.parametrize(
    ("change", "option"),
    [({"time_limit_min": 60}, "time"), ({"mem_mb": 300}, "mem"), ({"sbatch": {"nice": 7}}, "nice")],
)
def test_what_one_component_would_take_over_is_refused(
    change: dict[str, object], option: str
) -> None:
    more = replace(A100, **change)  # type: ignore[arg-type]
    check_hetjob_options([("pools[0]", A100), ("pools[1]", CPU)])
    check_hetjob_options([("pools[0]", A100), ("pools[1]", more)])
    with pytest.raises(PlanError, match=rf"pools\[0\] and pools\[1\].*--{option} "):
        check_hetjob_options([("pools[0]", more), ("pools[1]", CPU)])


SITE = {"mem-per-cpu": "2G", "exclusive": True, "comment": "of a site"}
STAGE = JobResources("a100", tasks_per_node=2, cpus_per_task=3, mem_mb=700, sbatch=SITE)


def scripts(folder: Path) -> dict[str, str]:
    """The script of each kind: one job, an array, jobs that start together, a driver."""
    job = JobSpec("a/b", ("--x",), folder / "o", folder / "l", STAGE, "m")
    return {
        "alone": batch_script([job]),
        "array": array_script([job, job]),
        "hetjob": hetjob_script([job, job]),
        "restarting": restarting_script(job),
    }


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("writer", ["alone", "array", "hetjob", "restarting"])
def test_every_script_says_each_thing_once_and_gives_tasks_their_cpus(
    tmp_path: Path, writer: str
) -> None:
    text = scripts(tmp_path)[writer]
    for component in text.split("#SBATCH hetjob"):
        lines = [line for line in component.splitlines() if line.startswith("#SBATCH --")]
        names = [line.removeprefix("#SBATCH --").partition("=")[0] for line in lines]
        assert sorted(set(names)) == sorted(names), "options given twice"
        assert not [name for name in names if "_" in name]
        assert [name for name in names if name.startswith("mem")] == ["mem"]
        assert "#SBATCH --mem=700M" in lines
        assert "#SBATCH --cpus-per-task=3" in lines
        assert "#SBATCH --exclusive" in lines
        assert "wckey" not in names, "where wckeys are enforced, a foreign one is refused"
    starts = text.split("srun ")[1:]
    assert starts
    for start in starts:
        words = shlex.split(start.split(" : ")[0].split("&\n")[0])
        assert "--cpus-per-task=3" in words
        assert "--export=ALL" in words
        assert "--kill-on-bad-exit=1" in words


def test_a_killed_driver_is_requeued_from_outside_of_its_container(tmp_path: Path) -> None:
    needs = replace(STAGE, python_command=("apptainer", "exec", "x.sif", "python3"))
    text = restarting_script(JobSpec("d", (), tmp_path / "o", tmp_path / "l", needs, "m"))
    (line,) = [line for line in text.splitlines() if "slurm.requeue" in line]
    assert line.strip() == f"{shlex.quote(sys.executable)} -m slurm.requeue && sleep 60"
    assert "apptainer exec x.sif python3 -u -m launchers.job_entrypoint" in text


def test_the_answer_to_a_tested_script_is_that_of_slurm(tmp_path: Path, slurm: Path) -> None:
    script = tmp_path / "job.sh"
    script.write_text("#!/bin/bash\n")
    answer = "sbatch: Job 12 to start at 2026-01-02T03:04:05 using 1 processors on nodes n1"
    write_command(slurm, "sbatch", f"echo Welcome >&2; echo '{answer}' >&2; echo $@ > {slurm}/args")
    assert check_submission(script) == answer.removeprefix("sbatch: ")
    assert (slurm / "args").read_text() == f"--test-only {script}\n"
    refusal = "sbatch: error: Memory specification can not be satisfied"
    write_command(slurm, "sbatch", f"echo '{refusal}' >&2; exit 1")
    with pytest.raises(SlurmError, match=r"^Memory specification can not be satisfied$"):
        check_submission(script)


@pytest.mark.usefixtures("slurm")
@pytest.mark.parametrize("writer", ["alone", "array", "hetjob", "restarting"])
def test_a_script_for_an_odd_folder_and_odd_options_runs_nothing_else(
    tmp_path: Path, writer: str
) -> None:
    needs = replace(
        STAGE, sbatch={"comment": "it's $HOME `touch x` #"}, python_command=("a b", "$c\nd")
    )
    one = JobSpec("a/b", ("--x",), tmp_path / "o", tmp_path / "l 'o' $(touch x)", needs, "m")
    text = {
        "alone": lambda: batch_script([one]),
        "array": lambda: array_script([one, one]),
        "hetjob": lambda: hetjob_script([one, one]),
        "restarting": lambda: restarting_script(one),
    }[writer]()
    assert text.count("--x") == 1 + (writer in ("array", "hetjob"))
    head = text.split("\nexport ")[0].split("\nsrun ")[0]
    assert all(not line or line.startswith("#") for line in head.splitlines())
    write_command(tmp_path / "slurm", "srun", f'printf "%s\\n" "$@" > {tmp_path}/words')
    here = tmp_path / "here"
    here.mkdir()
    # As a file, which Slurm makes of it, too.
    (tmp_path / "script").write_text(text)
    subprocess.run(["bash", tmp_path / "script"], cwd=here, check=True, timeout=20)
    assert not list(here.iterdir())
    assert str(one.log_dir) in (tmp_path / "words").read_text()


def test_jobs_that_could_not_write_their_logs_are_not_submitted(
    tmp_path: Path, slurm: Path
) -> None:
    for way, submit in submissions(tmp_path / "50%j").items():
        with pytest.raises(PlanError, match="contains %"):
            submit()
        assert not (slurm / "calls").exists(), way
    assert not (tmp_path / "50%j").exists()


@pytest.fixture
def slurm(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with stand-ins of sbatch, squeue and scancel; ``answer`` is what sbatch prints.

    sbatch keeps its script and environment, and squeue shows the job that it took as 71.
    """
    at = tmp_path / "slurm"
    write_command(
        at,
        "sbatch",
        f'env > {at}/env; cp "${{@: -1}}" {at}/script; echo "$@" >> {at}/calls; '
        f"grep -o 'rlinf-[0-9a-f]*' {at}/script | head -1 > {at}/mark; cat {at}/answer",
    )
    write_command(
        at, "squeue", f'echo Welcome; [ -s {at}/mark ] && echo "71|(null) $(cat {at}/mark)"'
    )
    write_command(at, "scancel", f'echo "$@" >> {at}/cancelled')
    write_command(at, "srun", "exit 1")
    (at / "answer").write_text(wrap("Submitted batch job 71"))
    monkeypatch.setenv("PATH", f"{at}{os.pathsep}{os.environ['PATH']}")
    return at


def submissions(folder: Path) -> dict[str, Callable[[], list[str]]]:
    """Every way to submit, each of which returns ids."""
    resources = JobResources("cpu", sbatch={"comment": "of a user"})
    one = JobSpec("a/b", (), folder / "o", folder / "l", resources, "m")
    two = replace(one, output_dir=folder / "p")
    return {
        "alone": lambda: submit_jobs([one], new_tag()),
        "array": lambda: submit_jobs([one, two], new_tag()),
        "hetjob": lambda: submit_hetjob([one, two], new_tag()),
        "restarting": lambda: [submit_restarting(one, new_tag())],
    }


WAYS = {
    "alone": ["71"],
    "array": ["71_0", "71_1"],
    "hetjob": ["71+0", "71+1"],
    "restarting": ["71"],
}


@pytest.mark.parametrize(
    "sentence", ["Submitted batch job 71", "Submitted batch job 71 on cluster x"]
)
@pytest.mark.parametrize("way", WAYS)
def test_the_id_is_read_past_a_banner(tmp_path: Path, slurm: Path, way: str, sentence: str) -> None:
    (slurm / "answer").write_text(wrap(sentence))
    assert submissions(tmp_path)[way]() == WAYS[way]
    assert "--comment='of a user rlinf-" in (slurm / "script").read_text()
    assert not (slurm / "cancelled").exists()


@pytest.mark.parametrize("answer", ["71", "71;hill"])
@pytest.mark.parametrize("way", WAYS)
def test_the_short_answer_is_read_past_a_banner(
    tmp_path: Path, slurm: Path, way: str, answer: str
) -> None:
    (slurm / "answer").write_text(wrap(answer))
    assert submissions(tmp_path)[way]() == WAYS[way]
    (slurm / "answer").write_text(f"2026\n{answer}\n")
    assert submissions(tmp_path)[way]() == WAYS[way], "the queue tells which number it is"


@pytest.mark.parametrize("way", WAYS)
def test_a_job_whose_id_is_not_told_is_cancelled_and_the_answer_shown(
    tmp_path: Path, slurm: Path, way: str
) -> None:
    (slurm / "answer").write_text("Your job was accepted.\n")
    with pytest.raises(SlurmError, match=r"no job id: 'Your job was accepted.'; job 71 was cancel"):
        submissions(tmp_path)[way]()
    assert (slurm / "cancelled").read_text().split() == ["71"]


@pytest.mark.parametrize("way", WAYS)
def test_an_answer_without_a_job_says_so(tmp_path: Path, slurm: Path, way: str) -> None:
    (slurm / "answer").write_text("Your job was accepted.\n")
    write_command(slurm, "squeue", "echo Welcome")
    with pytest.raises(SlurmError, match="no such job is queued"):
        submissions(tmp_path)[way]()
    assert not (slurm / "cancelled").exists()


@pytest.mark.parametrize("way", WAYS)
def test_a_job_is_submitted_as_from_a_login_node(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """The job would have these too, for its srun to stumble over."""
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    for name in ("SLURM_MEM_PER_CPU", "SLURM_MEM_PER_NODE", "SLURM_NTASKS", "SLURM_JOB_ID"):
        monkeypatch.setenv(name, "7")
    for name in ("SBATCH_EXCLUSIVE", "SBATCH_EXPORT", "SRUN_CPUS_PER_TASK", "SALLOC_QOS"):
        monkeypatch.setenv(name, "7")
    before = dict(os.environ)
    submissions(tmp_path)[way]()
    seen = {line.partition("=")[0] for line in (slurm / "env").read_text().splitlines()}
    foreign = ("SLURM", "SBATCH", "SRUN", "SALLOC")
    assert {name for name in seen if name.startswith(foreign)} == {"SLURM_CONF"}
    assert dict(os.environ) == before


def test_a_sweep_is_submitted_in_the_same_way(
    tmp_path: Path, slurm: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hydra's launcher makes its executor by submitit's AutoExecutor."""
    import submitit

    patch_submitit()
    monkeypatch.setenv("SLURM_MEM_PER_CPU", "7")
    executor = submitit.AutoExecutor(tmp_path, cluster="slurm")
    executor.update_parameters(cpus_per_task=3, mem_gb=4)
    ids = [job.job_id for job in executor.map_array(len, ["a", "b"])]
    assert ids == ["71_0", "71_1"]
    text = (slurm / "script").read_text()
    assert "--cpus-per-task=3" in next(
        line for line in text.splitlines() if line.startswith("srun")
    )
    assert "wckey" not in text
    assert "SLURM_MEM_PER_CPU" not in (slurm / "env").read_text()
    executor.update_parameters(slurm_mem_per_cpu="2G")
    with pytest.raises(PlanError, match="mem and mem_per_cpu exclude each other"):
        executor.map_array(len, ["a", "b"])


@pytest.mark.parametrize(
    "odd",
    [
        {"slurm_comment": "a\ntouch x #"},
        {"slurm_partition": "gpu\n"},
        {"slurm_additional_parameters": {"nice": "1\ntouch x #"}},
        {"slurm_additional_parameters": {"nice\ntouch x": "1"}},
    ],
)
def test_a_sweep_with_an_option_of_several_lines_is_refused(
    tmp_path: Path, slurm: Path, odd: dict[str, object]
) -> None:
    import submitit

    patch_submitit()
    executor = submitit.AutoExecutor(tmp_path, cluster="slurm")
    executor.update_parameters(slurm_setup=["a\nb"], **odd)
    with pytest.raises(PlanError, match=r"hydra\.launcher.*control character"):
        executor.map_array(len, ["a", "b"])
    assert not (slurm / "script").exists()


def test_a_sweep_whose_id_is_not_told_says_that_jobs_may_be_queued(
    tmp_path: Path, slurm: Path
) -> None:
    import submitit

    patch_submitit()
    (slurm / "answer").write_text("Your job was accepted.\n")
    executor = submitit.AutoExecutor(tmp_path, cluster="slurm")
    with pytest.raises(SlurmError, match=r"no job id: 'Your job was accepted.'"):
        executor.submit(len, "a")
