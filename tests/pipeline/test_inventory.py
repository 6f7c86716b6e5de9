"""``rlinf inventory`` as a person uses it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from pipeline.commands.cli import main
from pipeline.inventory import inventory_table
from slurm.inventory import Inventory, NodeGroup, PartitionInventory

GPU = NodeGroup(
    count=4,
    gpu_type="a100",
    gpus_per_node=4,
    cpus_per_node=64,
    mem_mb_per_node=524288,
    idle_nodes=1,
    idle_gpus=6,
    down_nodes=1,
)
CPU = NodeGroup(count=2, cpus_per_node=64, mem_mb_per_node=262144)
INVENTORY = Inventory(
    schema_version=1,
    created_at=datetime(2026, 1, 2, 3, 4, tzinfo=UTC),
    slurm_version="23.11.4",
    partitions={
        "gpu": PartitionInventory(
            name="gpu",
            groups=(GPU, CPU),
            time_limit_min=1470,
            is_default=True,
            queued_jobs=3,
            queued_gpus=24,
        ),
        "spot": PartitionInventory(
            name="spot",
            groups=(),
            time_limit_min=None,
            preempt_mode="REQUEUE",
            is_available=False,
        ),
    },
)


def run(*words: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["inventory", *words])
    code = ended.value.code
    assert isinstance(code, int)
    return code


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    path = tmp_path / "inventory.json"
    INVENTORY.save(path)
    return path


def test_the_table_has_a_row_for_each_group() -> None:
    rows = zip(*(column.cells for column in inventory_table(INVENTORY).columns), strict=True)
    assert list(rows) == [
        ("gpu*", "4 x a100", "1/4", "1", "6", "512", "24h30m", "no", "3", "24"),
        ("", "none", "0/2", "", "", "256", "", "", "", ""),
        ("spot (closed)", "", "0/0", "", "", "", "none", "yes", "0", ""),
    ]


@pytest.mark.parametrize("minutes", [0, 1, 59, 60, 1470, 20160])
def test_a_time_limit_is_never_empty(minutes: int) -> None:
    gpu = INVENTORY.partitions["gpu"].model_copy(update={"time_limit_min": minutes})
    limits = inventory_table(INVENTORY.model_copy(update={"partitions": {"gpu": gpu}})).columns[6]
    hours, rest = divmod(minutes, 60)
    assert next(iter(limits.cells)) in (f"{hours}h{rest}m", f"{hours}h", f"{rest}m")


def test_eighty_columns_hold_long_names_and_large_numbers() -> None:
    long = GPU.model_copy(
        update={
            "gpu_type": "a100-sxm4-80gb",
            "gpu_memory_gib": 80,
            "count": 1200,
            "idle_nodes": 1100,
            "down_nodes": 100,
            "idle_gpus": 8800,
            "mem_mb_per_node": 2 << 20,
        }
    )
    changes = {"groups": (long,), "queued_jobs": 12345, "queued_gpus": 54321}
    partition = INVENTORY.partitions["gpu"].model_copy(update=changes)
    wide = INVENTORY.model_copy(update={"partitions": {"gpu-a100-long-preemptible": partition}})
    console = Console(width=80, record=True, file=StringIO())
    console.print(inventory_table(wide))
    text = console.export_text()
    assert max(map(len, text.splitlines())) <= 80
    assert "\u2026" not in text, "nothing is cut off"
    words = text.split()
    for number in ("1100/1200", "100", "8800", "2048", "24h30m", "no", "12345", "54321"):
        assert number in words
    first, second = (line.split()[0] for line in text.splitlines()[6:8])
    assert first + second == "gpu-a100-long-preemptible*"


def test_a_saved_inventory_is_shown_without_slurm(
    saved: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run("--from", str(saved)) == 0
    assert "4 x a100" in capsys.readouterr().out


def test_json_is_what_was_saved(saved: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--from", str(saved), "--json") == 0
    assert json.loads(capsys.readouterr().out) == json.loads(saved.read_text())


def test_a_site_file_adds_what_slurm_does_not_know(
    saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    site, copy = tmp_path / "site.yaml", tmp_path / "copy.json"
    site.write_text("partitions: {gpu: {gpu_model: a100-80gb-pcie, cost_per_gpu_hour: 2}}")
    assert run("--from", str(saved), "--site", str(site), "--save", str(copy)) == 0
    assert "80 GiB" in capsys.readouterr().out
    group = json.loads(copy.read_text())["partitions"]["gpu"]["groups"][0]
    assert (group["gpu_memory_gib"], group["cost_per_gpu_hour"]) == (80, 2)


def test_a_damaged_file_is_one_line_and_the_code_of_bad_input(
    saved: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved.write_text(saved.read_text()[:-20])
    assert run("--from", str(saved)) == 65
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert str(saved) in error


def test_without_slurm_the_way_out_is_told(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert run() == 1
    assert "--from FILE" in capsys.readouterr().err
