"""How fast the cost model makes the planner's tables."""

from __future__ import annotations

import time

from benchmarks.row import BenchmarkRow, median_row
from tests.pipeline.planning.cost.shapes import LLAMA_3_8B, LLAMA_3_70B, many_tables


def measure() -> list[BenchmarkRow]:
    """40 tables, 4,096 GPUs of 8 kinds and 5 stages, of a model of 8 B and one of 70 B in turns."""
    seconds = []
    for shape in (LLAMA_3_8B, LLAMA_3_70B) * 5:
        start = time.perf_counter()
        many_tables(shape)
        seconds.append(time.perf_counter() - start)
    return [median_row("rate_tables_4096x8_s", seconds, "s", 1, "lower")]
