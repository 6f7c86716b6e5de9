"""``rlinf inventory``: the partitions of the cluster, from Slurm or from a saved file."""

from __future__ import annotations

import sys
from datetime import UTC, datetime
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.table import Table

from pipeline.console import create_console
from rlinf.errors import SlurmError
from slurm.client import SlurmClient
from slurm.discovery import discover_inventory
from slurm.inventory import Inventory, NodeGroup, load_inventory
from slurm.site import SiteConfig, load_site


def load_or_survey(source: Path | None, site: Path | None) -> Inventory:
    """Load a saved inventory, or query Slurm, and apply a site file.

    A saved inventory keeps its site settings, unless a site file is given.

    Raises:
        PlanError: the inventory file or the site file is missing or invalid.
        SlurmError: Slurm is not installed or does not answer.
    """
    config = load_site(site) if site is not None else None
    if source is not None:
        saved = load_inventory(source)
        return saved if config is None or site is None else _with_site(saved, config, site)
    try:
        surveyed = discover_inventory(SlurmClient(), datetime.now(UTC).replace(microsecond=0))
    except SlurmError as error:
        raise SlurmError(f"{error}; or read a saved inventory with --from FILE") from None
    return (
        surveyed.with_site_settings(SiteConfig())
        if config is None or site is None
        else _with_site(surveyed, config, site)
    )


def _with_site(inventory: Inventory, config: SiteConfig, path: Path) -> Inventory:
    config.check_partitions(inventory.partitions, path)
    return inventory.with_site_settings(config)


def show_inventory(
    source: Path | None, target: Path | None, site: Path | None, *, as_json: bool
) -> None:
    """Print the inventory as a table or as JSON, and optionally save it.

    Args:
        source: inventory file to read; None queries Slurm.
        target: file to which the inventory is written; None writes none.
        site: site file whose settings are applied.

    Raises:
        PlanError: a file is missing or invalid.
        SlurmError: Slurm is not installed or does not answer.
        InputError: the file cannot be written.
    """
    inventory = load_or_survey(source, site)
    if target is not None:
        inventory.save(target)
    if as_json:
        sys.stdout.write(inventory.to_json())
        return
    console = create_console()
    console.print(inventory_table(inventory))
    if target is not None:
        console.print(f"saved: {target}", soft_wrap=True)


def inventory_table(inventory: Inventory) -> Table:
    """Return a table with one row per group of equal nodes. It fits 80 columns: only names wrap."""
    surveyed = inventory.created_at.strftime("%Y-%m-%d %H:%M:%S %Z")
    title = f"Slurm {inventory.slurm_version}, {surveyed}"
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, padding=0, pad_edge=False)
    for heading in ("partition", "GPUs a node"):
        table.add_column(f"\n\n{heading}", overflow="fold")
    numbers = ("nodes\nidle/\nall", "\n\ndown", "\nGPUs\nidle", "\nmem.\nGiB", "\ntime\nlimit")
    for heading in (*numbers, "\npre-\nempt", "\njobs\nwait", "\ntheir\nGPUs"):
        table.add_column(heading, no_wrap=True, justify="right")
    for name, partition in inventory.partitions.items():
        partition_cells = (
            _format_minutes(partition.time_limit_min),
            "yes" if inventory.is_preemptible(name) else "no",
            str(partition.queued_jobs),
            str(partition.queued_gpus or ""),
        )
        label = f"{name}{'*' if partition.is_default else ''}"
        label += "" if partition.is_available else " (closed)"
        if not partition.groups:
            table.add_row(label, "", "0/0", "", "", "", *partition_cells)
        for i, group in enumerate(partition.groups):
            table.add_row(
                label if i == 0 else "", *_cells(group), *(partition_cells if i == 0 else ())
            )
    return table


def _cells(group: NodeGroup) -> tuple[str, str, str, str, str]:
    nodes = f"{group.idle_nodes}/{group.count}"
    down = str(group.down_nodes or "")
    memory = f"{group.mem_mb_per_node / 1024:.0f}"
    if not group.gpus_per_node:
        return "none", nodes, down, "", memory
    gpu = f"{group.gpus_per_node} x {group.gpu_type or group.gpu_model or 'gpu'}"
    if group.gpu_memory_gib is not None:
        gpu += f" ({group.gpu_memory_gib:g} GiB)"
    return gpu, nodes, down, str(group.idle_gpus), memory


def _format_minutes(total_min: int | None) -> str:
    if total_min is None:
        return "none"
    parts = zip(divmod(total_min, 60), "hm", strict=True)
    return "".join(f"{value}{unit}" for value, unit in parts if value or not total_min)
