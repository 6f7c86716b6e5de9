"""Time to build the inventory of a cluster with 5,000 nodes in three partitions each."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from benchmarks.row import BenchmarkRow, median_row
from slurm import discovery, gpus
from slurm.site import SiteConfig
from tests.slurm.clusters import large_cluster


def measure() -> list[BenchmarkRow]:
    """Measure the seconds from Slurm's output to the inventory with GPU data, without caches."""
    answers = large_cluster(5000)
    values = []
    for _ in range(7):
        for cached in vars(discovery).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        gpus.find_gpu.cache_clear()
        start = time.perf_counter()
        discovery.build_inventory(answers, datetime.now(UTC)).with_site_settings(SiteConfig())
        values.append(time.perf_counter() - start)
    return [median_row("inventory_5000_nodes_s", values, "s", 1.0, "lower")]
