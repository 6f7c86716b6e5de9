"""``rlinf init-site`` writes a site file that can be read, with what Slurm knows and questions."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from pipeline.commands.cli import app
from pipeline.commands.init_site import init_site, site_text
from rlinf.errors import InputError
from slurm.discovery import build_inventory
from slurm.inventory import Inventory, NodeGroup, PartitionInventory
from slurm.records import AccountingLimits, Association
from slurm.site import SiteConfig, load_site
from tests.slurm.clusters import large_cluster

GPU_NODES = NodeGroup(
    count=12, gpu_type="a100", gpus_per_node=4, cpus_per_node=64, mem_mb_per_node=512000
)
CPU_NODES = NodeGroup(count=3, cpus_per_node=64, mem_mb_per_node=256000)


def partition(name: str, *groups: NodeGroup, **settings: Any) -> PartitionInventory:
    return PartitionInventory(name=name, groups=groups, **{"time_limit_min": 2880, **settings})


def inventory(*partitions: PartitionInventory, **settings: Any) -> Inventory:
    return Inventory(
        schema_version=1,
        created_at=datetime(2026, 1, 2, tzinfo=UTC),
        slurm_version="24.05.4",
        partitions={one.name: one for one in partitions},
        **settings,
    )


def association(account: str, *qos: str, default: str = "") -> Association:
    return Association(cluster="big", account=account, qos=qos, default_qos=default)


def read(text: str, folder: Path) -> SiteConfig:
    # A site file is read once per process, so each text gets a file of its own.
    path = folder / f"site-{len(list(folder.iterdir()))}.yaml"
    path.write_text(text)
    return load_site(path)


def test_the_file_can_be_read_and_names_every_partition(tmp_path: Path) -> None:
    cluster = build_inventory(large_cluster(40), datetime.now(UTC))
    site = read(site_text(cluster), tmp_path)
    assert set(site.partitions) == set(cluster.partitions)
    assert site.defaults.account == "team"
    site.check_partitions(cluster.partitions, tmp_path)


def test_an_ambiguous_gpu_is_a_question(tmp_path: Path) -> None:
    text = site_text(inventory(partition("gpu", GPU_NODES)))
    assert "gpu_model: a100-40gb  # ? a100 may be a100-40gb, a100-80gb-sxm, a100-80gb-pcie" in text
    assert read(text, tmp_path).partitions["gpu"].gpu_model == "a100-40gb"
    known = GPU_NODES.model_copy(update={"gpu_type": "a100-sxm4-80gb"})
    assert "gpu_model" not in site_text(inventory(partition("gpu", known)))
    unknown = GPU_NODES.model_copy(update={"gpu_type": "tpu"})
    text = site_text(inventory(partition("gpu", unknown)))
    assert "# gpu_model: MODEL  # ? tpu is unknown; one of a100-40gb" in text
    assert read(text, tmp_path).partitions["gpu"].gpu_model is None


def test_account_and_qos_that_a_partition_allows_are_set(tmp_path: Path) -> None:
    limits = AccountingLimits(
        associations=(
            association("main", "normal", "long", default="normal"),
            association("ai", "gpu"),
        )
    )
    text = site_text(
        inventory(
            partition("cpu", CPU_NODES, is_default=True),
            partition("long", CPU_NODES, allowed_qos=("long",)),
            partition("gpu", GPU_NODES, denied_accounts=("main",)),
            partition("closed", GPU_NODES, allowed_accounts=("others",)),
            limits=limits,
            cluster="big",
        )
    )
    site = read(text, tmp_path)
    assert "account: main  # ? you also have ai" in text
    assert site.settings_for("cpu").account == "main"
    assert site.settings_for("cpu").qos is None, "the default is allowed"
    assert site.settings_for("long").qos == "long"
    assert site.settings_for("gpu").account == "ai"
    assert "none of your accounts may use this partition" in text
    assert "Its job goes to partition cpu" in text


def test_a_list_of_allowed_names_counts_alone_and_in_any_case() -> None:
    limits = AccountingLimits(associations=(association("main", "normal", default="normal"),))
    lists = {"allowed_qos": ("NORMAL",), "denied_qos": ("normal",), "allowed_accounts": ("Main",)}
    text = site_text(inventory(partition("cpu", CPU_NODES, **lists), limits=limits, cluster="big"))
    assert "none of your" not in text


def test_rules_of_memory_and_nodes_are_told() -> None:
    text = site_text(
        inventory(
            partition("whole", CPU_NODES, is_exclusive=True),
            partition("shared", CPU_NODES, default_mem_mb_per_cpu=2000, max_mem_mb_per_cpu=4000),
            partition("open", CPU_NODES, time_limit_min=None, preempt_mode="REQUEUE"),
        )
    )
    assert "whole:  # at most 48 h, whole nodes only" in text
    assert "gets 2000 MiB for each CPU" in text
    assert "more than 4000 MiB for each CPU costs further CPUs" in text
    assert "may get the memory of a whole node" in text
    assert "no time limit, jobs may be preempted" in text


def test_container_tools_of_the_machine_are_offered() -> None:
    cluster = inventory(partition("gpu", GPU_NODES))
    assert "python_command: [apptainer, exec" in site_text(cluster, ["enroot", "apptainer"])
    assert "container-image" in site_text(cluster, ["enroot"])
    assert "container" not in site_text(cluster)


def test_names_that_yaml_would_read_as_something_else_are_quoted(tmp_path: Path) -> None:
    text = site_text(inventory(partition("no", CPU_NODES), partition("1e3", CPU_NODES)))
    assert set(read(text, tmp_path).partitions) == {"no", "1e3"}
    assert yaml.safe_load(text)["partitions"]["no"] == {}


def test_the_command_reads_a_saved_inventory_and_overwrites_nothing(tmp_path: Path) -> None:
    saved, target = tmp_path / "inventory.json", tmp_path / "site.yaml"
    inventory(partition("gpu", GPU_NODES)).save(saved)
    done = CliRunner().invoke(app, ["init-site", "--from", str(saved), "--out", str(target)])
    assert done.exit_code == 0, done.output
    assert "1 values need your answer" in done.output
    assert load_site(target).partitions["gpu"].gpu_model == "a100-40gb"
    with pytest.raises(
        InputError, match=r"site.yaml: exists already; name another file with --out"
    ):
        init_site(saved, target)
