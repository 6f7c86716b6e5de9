"""What is known of the job that a process runs in."""

from __future__ import annotations

from slurm.jobs import JobResources, current_job_resources


def test_a_job_is_told_by_its_variables() -> None:
    assert current_job_resources({}) is None
    assert current_job_resources({"SLURM_JOB_ID": "12"}) == JobResources()
    values = {
        "SLURM_JOB_ID": "12",
        "SLURM_JOB_PARTITION": "gpu",
        "SLURM_JOB_ACCOUNT": "team",
        "SLURM_JOB_QOS": "normal",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_CPUS_ON_NODE": "8",
        "SLURM_MEM_PER_NODE": "4000",
        "SLURM_GPUS_ON_NODE": "4",
    }
    assert current_job_resources(values) == JobResources(
        partition="gpu",
        account="team",
        qos="normal",
        nodes=2,
        cpus_per_task=8,
        mem_mb=4000,
        gpus_per_node=4,
    )
