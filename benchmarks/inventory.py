"""Reading a large cluster: Slurm's answers for 5,000 nodes in three partitions each."""

from __future__ import annotations

import time
from datetime import UTC, datetime

from benchmarks.row import Row, median_row
from slurm import gpus, survey
from slurm.site import Site
from tests.slurm.clusters import large_cluster


def measure() -> list[Row]:
    """Seconds from the commands' text to the inventory with the GPUs' figures; nothing cached."""
    answers = large_cluster(5000)
    values = []
    for _ in range(7):
        for cached in vars(survey).values():
            if hasattr(cached, "cache_clear"):
                cached.cache_clear()
        gpus.find.cache_clear()
        start = time.perf_counter()
        survey.read(answers, datetime.now(UTC)).with_site(Site())
        values.append(time.perf_counter() - start)
    return [median_row("inventory_5000_nodes_s", values, "s", 1.0, "lower")]
