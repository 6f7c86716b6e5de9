"""The log of finished shares of rollouts, which the report and ``rlinf status`` read."""

from __future__ import annotations

import contextlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stages.layout import POOLS_FOLDER

WORK_LOG = "work_items.jsonl"
"""Name of the log, in the folder of the pools."""


def append_work(run: Path, row: dict[str, Any]) -> None:
    """Append a finished share of a rollout."""
    with (run / POOLS_FOLDER / WORK_LOG).open("a", encoding="utf-8") as stream:
        stream.write(json.dumps(row) + "\n")


def read_work_spans(run: Path) -> dict[int, list[dict[str, Any]]]:
    """Return the spans of generators by iteration. A span named ``rollout`` is a whole work item.

    Incomplete or damaged lines are left out.
    """
    spans_by_iteration: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in _read_rows(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            times = [time for _, *pair in row["spans"] for time in pair]
            worker = str(row["worker"])
            rank = int(worker.rpartition("-r")[2])
            common = {"worker": worker, "rank": rank, "host": row["host"]}
            common["work_item"] = row.get("work_item")
            spans = [*row["spans"], ["rollout", min(times), max(times)]]
            spans_by_iteration[int(row["node"].partition("/")[2])] += [
                {**common, "name": name, "start": start, "end": end} for name, start, end in spans
            ]
    return spans_by_iteration


def count_disk_fallbacks(run: Path) -> Counter[int]:
    """Return the number of work items whose weights were read from disk instead of memory, by
    iteration."""
    counts = Counter[int]()
    for row in _read_rows(run):
        with contextlib.suppress(ValueError, KeyError, TypeError, AttributeError):
            counts[int(row["node"].partition("/")[2])] += bool(row.get("used_disk_fallback"))
    return counts


def _read_rows(run: Path) -> Iterator[Any]:
    try:
        text = (run / POOLS_FOLDER / WORK_LOG).read_text(encoding="utf-8", errors="replace")
    except OSError:
        return
    for line in text.splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
