"""``python -m benchmarks.against OTHER ROW ...``: this checkout beside another one, in turns.

``OTHER`` is a checkout of another commit with an environment of its own (``make install``). Each
round measures a row in both, one after the other, the first of them changing from round to round,
so that a machine that gets slower does so for both. What came out is kept in ``against.json``,
which a second call adds to, and printed as ratios, above 1 where this checkout is better; the last
round's rows of this checkout come into ``results.json`` too.
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


def measured(checkout: Path, row: str) -> dict[str, dict[str, Any]]:
    """The rows that ``make bench NAME=row`` measures in a checkout, by name.

    Its ``results.json`` is left as it was.

    Raises:
        subprocess.CalledProcessError: the measurement failed.
    """
    results = checkout / "benchmarks" / "results.json"
    before = results.read_bytes()
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
        results.write_bytes(before)


def ratios(points: list[dict[str, Any]]) -> dict[str, list[float]]:
    """Return the ratios of every round of each row, above 1 where this checkout is better."""
    found: dict[str, list[float]] = {}
    for point in points:
        mine, other = point["here"], point["other"]
        if mine and other:
            ratio = mine / other if point["better"] == "higher" else other / mine
            found.setdefault(point["row"], []).append(ratio)
    return found


def main() -> None:
    """Measure, keep, print."""
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
            rows = {side: measured(sides[side], row) for side in order}
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
    for name, each in sorted(ratios([p for p in points if p["commit"] == commit]).items()):
        table.add_row(
            name,
            str(len(each)),
            f"{statistics.median(each):.2f}",
            " ".join(f"{ratio:.2f}" for ratio in each),
        )
    console.print(table)


if __name__ == "__main__":
    main()
