"""One set of options for every batch script: none twice, none against another."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlinf.errors import PlanError
from slurm.jobs import JobResources
from slurm.sbatch_options import (
    MEMORY_OPTIONS,
    check_site_options,
    check_srun_options,
    portable_options,
    sbatch_options,
    srun_options,
)
from slurm.site import load_site


@given(
    st.dictionaries(st.sampled_from(MEMORY_OPTIONS), st.sampled_from(["4G", 4000, False])),
    st.none() | st.integers(1, 9),
    st.integers(0, 2),
)
def test_memory_is_asked_for_in_one_way(
    further: dict[str, Any], mem_mb: int | None, gpus: int
) -> None:
    needs = JobResources(mem_mb=mem_mb, gpus_per_node=gpus, sbatch=further)
    found = sbatch_options("a", needs)
    requests = [key for key in MEMORY_OPTIONS if key in found]
    assert len(requests) <= 1
    if mem_mb:
        assert found["mem"] == f"{mem_mb}M", "the plan's, which is said of this job"
    elif requests:
        assert found[requests[0]] == further[requests[0]]


def test_memory_per_gpu_is_for_jobs_with_gpus() -> None:
    site = {"mem-per-gpu": "32G"}
    assert "mem-per-gpu" not in sbatch_options("a", JobResources(sbatch=site))
    assert sbatch_options("a", JobResources(sbatch=site, gpus_per_node=1))["mem-per-gpu"] == "32G"


def test_gres_of_the_site_stands_beside_the_gpus() -> None:
    needs = JobResources(gpus_per_node=2, gpu_type="a100", sbatch={"gres": "nvme:1"})
    assert sbatch_options("a", needs)["gres"] == "gpu:a100:2,nvme:1"
    assert "gres" not in sbatch_options("a", JobResources())


def test_a_time_of_the_site_is_for_jobs_without_one() -> None:
    assert sbatch_options("a", JobResources(sbatch={"time": 60}))["time"] == 60
    assert sbatch_options("a", JobResources(sbatch={"time": 60}, time_limit_min=5))["time"] == 5


def test_names_with_underscores_and_switched_off_options() -> None:
    needs = JobResources(sbatch={"mail_user": "ada", "exclusive": False, "contiguous": True})
    found = sbatch_options("stage/3", needs)
    assert found["mail-user"] == "ada"
    assert found["contiguous"] is True
    assert "exclusive" not in found
    assert "wckey" not in found, "only a site knows its own"
    assert found["job-name"] == "stage-3"


@pytest.mark.parametrize(
    ("sbatch", "advice"),
    [
        ({"account": "b"}, "account: b"),
        ({"qos": "gpu"}, "qos: gpu"),
        ({"constraint": "a100"}, "constraint: a100"),
        ({"nodes": 2}, "the plan decides nodes"),
        ({"ntasks": 2}, "set processes"),
        ({"cpus_per_task": 2}, "set cpus"),
        ({"gpus-per-node": 2}, "set gpus"),
        ({"gres": "gpu:2"}, "gpu out of gres"),
        ({"gres": "nvme:1,gpu:a100:2"}, "gpu out of gres"),
        ({"partition": "gpu"}, "the plan decides partition"),
        ({"array": "0-3"}, "the program decides array"),
        ({"output": "x.log"}, "the program decides output"),
        ({"parsable": True}, "the program decides parsable"),
        ({"clusters": "hill"}, "the program decides clusters"),
        ({"container-image": "/x.sqsh"}, "write it under srun"),
        ({"container": "/bundle"}, "write it under srun"),
        ({"no-container-entrypoint": True}, "write it under srun"),
        ({"c": 4}, "long name"),
        ({"--": 4}, "long name"),
        ({"mem": "4G", "mem-per-cpu": "1G"}, "mem and mem-per-cpu exclude each other"),
        ({"mem-per-cpu": "1G", "mem_per_gpu": "1G"}, "exclude each other"),
        ({"mail-user": "a", "mail_user": "b"}, "mail-user is set twice"),
        ({"comment": "a\ntouch x #"}, "comment: .*control character"),
        ({"wckey": "w\n"}, "wckey: .*control character"),
        ({"comment": "a\\b"}, "comment: .*backslash"),
    ],
)
def test_what_would_not_be_obeyed_is_refused_with_its_cure(
    sbatch: dict[str, Any], advice: str, tmp_path: Any
) -> None:
    with pytest.raises(ValueError, match=advice):
        check_site_options(sbatch)
    path = tmp_path / "site.yaml"
    path.write_text(json.dumps({"defaults": {"sbatch": sbatch}}))
    with pytest.raises(PlanError, match=f"cluster.site.*sbatch.*{advice}"):
        load_site(path)


@pytest.mark.parametrize(
    ("srun", "advice"),
    [
        ({"gpus-per-task": 1}, "the plan decides gpus-per-task; set gpus"),
        ({"cpus_per_task": 2}, "set cpus"),
        ({"mem": "4G"}, "set mem_mb"),
        ({"time": 5}, "set time_limit_min"),
        ({"gres": "gpu:2"}, "set gpus"),
        ({"export": "NONE"}, "the program decides it"),
        ({"qos": "gpu"}, "the job itself has qos"),
        ({"het-group": 1}, "the program decides it"),
        ({"output": "x"}, "the program decides it"),
        ({"n": 1}, "long srun option"),
        ({"mpi": "a", "--mpi": "b"}, "set twice"),
        ({"comment": "a\0"}, "null character"),
    ],
)
def test_srun_options_that_would_not_be_obeyed_are_refused(
    srun: dict[str, Any], advice: str, tmp_path: Any
) -> None:
    with pytest.raises(ValueError, match=advice):
        check_srun_options(srun)
    path = tmp_path / "site.yaml"
    path.write_text(json.dumps({"partitions": {"gpu": {"srun": srun}}}))
    with pytest.raises(PlanError, match=f"cluster.site.*srun.*{advice}"):
        load_site(path)


def test_srun_starts_processes_near_their_gpus_and_as_the_site_wants() -> None:
    needs = JobResources(cpus_per_task=4, tasks_per_node=8, gpus_per_node=8)
    assert "--distribution=block:block" in srun_options(needs)
    assert not [word for word in srun_options(JobResources()) if "distribution" in word]
    site = {
        "container_image": "/x.sqsh",
        "distribution": "cyclic",
        "label": False,
        "no-shell": True,
    }
    found = srun_options(replace(needs, srun=site))
    assert {"--container-image=/x.sqsh", "--distribution=cyclic", "--no-shell"} <= set(found)
    assert "--cpus-per-task=4" in found
    assert not [word for word in found if "label" in word]


def test_what_a_site_may_add_is_taken_as_it_is() -> None:
    further = {
        "comment": "x",
        "wckey": "w",
        "mem-per-cpu": "2G",
        "exclusive": True,
        "export": "NONE",
    }
    assert check_site_options(further) == further


def test_a_small_job_keeps_what_makes_it_start_and_be_accounted() -> None:
    kept = {"comment": "x", "wckey": "w", "export": "NONE", "nice": 5}
    large = {"exclusive": True, "mem": "0", "gres": "nvme:1", "nodelist": "g1", "licenses": "a"}
    large |= {"mail_type": "ALL", "hold": True, "mem_per_cpu": "4G", "time": 5, "hint": "x"}
    assert portable_options({**kept, **large}) == kept


@pytest.mark.parametrize(
    "needs",
    [
        JobResources(partition="a\nb"),
        JobResources(account="a\nb"),
        JobResources(gpus_per_node=1, gpu_type="a\nb"),
        JobResources(sbatch={"comment": "a\nb"}),
        JobResources(sbatch={"a\nb": True}),
    ],
)
def test_no_script_has_options_of_more_than_a_line_whoever_gave_them(needs: JobResources) -> None:
    with pytest.raises(PlanError, match=r"stage/3: .* of sbatch: .*control character"):
        sbatch_options("stage/3", needs)
