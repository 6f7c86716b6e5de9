"""``python -m benchmarks.against OTHER ROW ...``: compare this checkout with another one.

``OTHER`` is a checkout of another commit with its own environment (``make install``). Each round
measures a row in both checkouts. The order changes from round to round, so that a machine that
slows down affects both. Results are appended to ``against.json`` and printed as ratios, which are
above 1 if this checkout is better. The rows of this checkout are also written to ``results.json``.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.__main__ import keep
from rlinf import package_paths

KEPT = Path(__file__).with_name("against.json")


def measure_row(checkout: Path, row: str) -> dict[str, dict[str, Any]]:
    """Return the rows that ``make bench NAME=row`` measures in a checkout, by name.

    The ``results.json`` of the checkout is restored afterwards.

    Raises:
        subprocess.CalledProcessError: the measurement failed.
    """
    results = checkout / "benchmarks" / "results.json"
    saved = results.read_bytes()
    results.write_text('{"rows": []}')
    try:
        subprocess.run(
            [checkout / ".venv" / "bin" / "python", "-m", "benchmarks", "--name", row],
            cwd=checkout,
            env={**os.environ, "PYTHONPATH": str(checkout)},
            stdout=subprocess.DEVNULL,
            check=True,
        )
        return {row["name"]: row for row in json.loads(results.read_text())["rows"]}
    finally:
        results.write_bytes(saved)


def ratios(points: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the ratio of each round, by row; above 1 if this checkout is better."""
    ratios_by_row: dict[str, list[float]] = {}
    for point in points:
        this, other = point["here"], point["other"]
        if this and other:
            ratio = this / other if point["better"] == "higher" else other / this
            ratios_by_row.setdefault(point["row"], []).append(ratio)
    return ratios_by_row


def main() -> None:
    """Measure the rows in both checkouts, save the results and print the ratios."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.against")
    parser.add_argument("other", type=Path)
    parser.add_argument("rows", nargs="*")
    parser.add_argument("--rounds", type=int, default=3)
    arguments = parser.parse_args()
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"],
        cwd=arguments.other,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.strip()
    points = json.loads(KEPT.read_text())["points"] if KEPT.exists() else []
    console = Console()
    sides = {"here": package_paths.ROOT, "other": arguments.other.resolve()}
    for row in arguments.rows:
        for number in range(arguments.rounds):
            order = list(sides) if number % 2 else list(sides)[::-1]
            rows = {side: measure_row(sides[side], row) for side in order}
            for name in rows["here"].keys() & rows["other"].keys():
                here, other = rows["here"][name], rows["other"][name]
                points.append(
                    {
                        "row": name,
                        "commit": commit,
                        "better": here["better"],
                        "here": here["value"],
                        "other": other["value"],
                    }
                )
            KEPT.write_text(json.dumps({"points": points}, indent=1) + "\n")
            keep(rows["here"])
            console.print(f"{row}, round {number + 1} of {arguments.rounds}")
    table = Table("row", "rounds", f"here over {commit}, median", "each")
    for name, row_ratios in sorted(ratios([p for p in points if p["commit"] == commit]).items()):
        table.add_row(
            name,
            str(len(row_ratios)),
            f"{statistics.median(row_ratios):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in row_ratios),
        )
    console.print(table)


if __name__ == "__main__":
    main()
