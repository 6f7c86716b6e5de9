"""Batch scripts for eight kinds of sites, as stored and as an administrator would want them."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from slurm.inventory import load_inventory
from slurm.sbatch_options import MEMORY_OPTIONS
from tests.sites import profiles

COMPONENTS = re.compile(r"^#SBATCH hetjob$", re.MULTILINE)


def scripts(name: str) -> dict[str, str]:
    """The stored scripts of a profile."""
    folder = profiles.FOLDER / name / "scripts"
    return {path.name: path.read_text() for path in sorted(folder.iterdir())}


def options(component: str) -> dict[str, str]:
    """The options of a script, or of a component of a heterogeneous job; "" for flags."""
    lines = re.findall(r"^#SBATCH --([a-z-]+)(?:=(.*))?$", component, re.MULTILINE)
    assert len({name for name, _ in lines}) == len(lines), "an option is given twice"
    return {name: value.strip("'") for name, value in lines}


EVERY = [(name, script) for name in profiles.NAMES for script in scripts(name)]


@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_dry_run_writes_the_stored_scripts_without_slurm(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # without the commands of Slurm
    for key in ("SLURM_MEM_PER_CPU", "SLURM_CPUS_PER_TASK", "SLURM_GRES", "SBATCH_EXCLUSIVE"):
        monkeypatch.setenv(key, "7")
    written = profiles.write_scripts(name, tmp_path)
    assert written == scripts(name), "meant to change? python -m tests.sites.record"


@pytest.mark.parametrize(("name", "script"), EVERY)
def test_a_job_asks_for_memory_in_one_way_and_for_a_known_partition(name: str, script: str) -> None:
    inventory = load_inventory(profiles.FOLDER / name / "inventory.json")
    for component in COMPONENTS.split(scripts(name)[script]):
        found = options(component)
        assert len([key for key in MEMORY_OPTIONS if key in found]) <= 1
        partition = inventory.partitions[found["partition"]]
        if not partition.knows_memory:
            assert not {*MEMORY_OPTIONS} & set(found)
        assert "wckey" not in found or name == "no_accounting"


@pytest.mark.parametrize("name", profiles.NAMES)
def test_the_driver_is_a_small_cpu_job_outside_of_any_container(name: str) -> None:
    text = scripts(name)["driver.sh"]
    found = options(text)
    assert not {"exclusive", "gres", "constraint", "mail-user", "licenses"} & set(found)
    assert (found["nodes"], found["ntasks-per-node"], found["cpus-per-task"]) == ("1", "1", "1")
    assert not re.search("apptainer exec|--container", text)
    assert profiles.PYTHON in text
    inventory = load_inventory(profiles.FOLDER / name / "inventory.json")
    has_cpus = any(not partition.gpus for partition in inventory.partitions.values())
    assert not (has_cpus and inventory.partitions[found["partition"]].gpus)


@pytest.mark.parametrize(
    ("name", "script", "expected"),
    [
        ("per_cpu_memory", "rollout.sh", {"mem-per-cpu": "3800M", "gres": "gpu:rtx_a6000:2"}),
        ("per_cpu_memory", "train.sh", {"mem": "120000M", "nodes": "2"}),
        ("exclusive_nodes", "pool-0.sh", {"nodes": "2", "gres": "gpu:3", "mail-type": "FAIL"}),
        ("exclusive_nodes", "driver.sh", {"partition": "normal", "time": "1440"}),
        ("gpu_types", "rollout.sh", {"partition": "old", "gres": "gpu:4"}),
        ("gpu_types", "reward.sh", {"partition": "cpu"}),
        ("gpu_types", "driver.sh", {"partition": "cpu"}),
        ("gpu_types", "train.sh", {"partition": "gpu", "constraint": "hbm80g"}),
        ("accounts", "driver.sh", {"partition": "cpu", "account": "main", "qos": "long"}),
        ("accounts", "train.sh", {"partition": "gpu", "account": "ai", "qos": "gpu"}),
        ("accounts", "sync.sh", {"partition": "cpu", "account": "main", "qos": "long"}),
        ("no_accounting", "pool-1.sh", {"wckey": "rl", "exclude": "box2", "gres": "gpu:4"}),
        ("no_accounting", "driver.sh", {"partition": "login", "wckey": "rl"}),
        ("cpu_only", "train.sh", {"partition": "batch", "export": "NONE", "mem": "64000M"}),
    ],
)
def test_a_job_has_the_options_of_its_site(
    name: str, script: str, expected: dict[str, str]
) -> None:
    found = options(scripts(name)[script])
    assert {key: found.get(key) for key in expected} == expected


def test_pools_of_a_heterogeneous_job_fill_nodes() -> None:
    text = scripts("heterogeneous_partition")["pools.sh"]
    first, second = (options(part) for part in COMPONENTS.split(text))
    assert (first["gres"], first["nodes"], first["ntasks-per-node"]) == ("gpu:a100:4", "2", "4")
    assert (second["gres"], second["nodes"], second["ntasks-per-node"]) == ("gpu:h100:8", "1", "8")
    assert text.count("--distribution=block:block") == 2


def test_a_container_is_around_each_process_and_not_around_the_batch_script() -> None:
    found = scripts("containers")
    (start,) = [line for line in found["train.sh"].splitlines() if line.startswith("srun")]
    assert "--container-image=/images/rlinf.sqsh" in start
    assert " python3 -u -m launchers.job_entrypoint" in start
    (start,) = [line for line in found["rollout.sh"].splitlines() if line.startswith("srun")]
    assert "apptainer exec --nv --bind /scratch /images/rlinf.sif python3 -u -m" in start
    assert not any("#SBATCH --container" in text for text in found.values())


def test_a_cluster_without_generic_resources_is_asked_for_none() -> None:
    assert not any("gres" in text for text in scripts("cpu_only").values())


@pytest.mark.parametrize("name", profiles.NAMES)
def test_a_plan_of_a_profile_names_no_partition_that_its_cluster_lacks(name: str) -> None:
    inventory = load_inventory(profiles.FOLDER / name / "inventory.json")
    site = yaml.safe_load((profiles.FOLDER / name / "site.yaml").read_text())
    assert set(site.get("partitions", {})) <= set(inventory.partitions)
