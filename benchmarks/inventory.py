"""Reading a large cluster: Slurm's answers for 5,000 nodes in three partitions each."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from benchmarks.row import BenchmarkRow, median_row
from slurm import discovery, gpus
from slurm.site import SiteConfig
from tests.slurm.clusters import large_cluster


def measure() -> list[BenchmarkRow]:
    """Seconds from the commands' text to the inventory with the GPUs' figures; nothing cached."""
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
