"""``make bench-learning NAME=row``: learning curves, beside those of Stable-Baselines3.

A row is an experiment of this repository and the same method of Stable-Baselines3 (Raffin et al.,
2021) with the same networks, batch, rates and steps, where that is installed (``pip install
--no-deps stable-baselines3``). Runs stay in ``runs/learning``: one that was cut off goes on, one
that is finished is read. What Stable-Baselines3 did is kept in ``learning.json`` alone; it begins
anew where it is not complete.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np

from pipeline.commands.results import Results
from pipeline.report.colours import COLOURS
from rlinf import tree
from rlinf.artifacts import write_atomic

CURVES = Path(__file__).parent / "learning.json"
RUNS = tree.ROOT / "runs" / "learning"
IMAGES = tree.ROOT / "docs" / "images"
EPISODES = 10
"""Of an evaluation, each from a start that no training has."""


@dataclass(frozen=True)
class Compared:
    """One row: an experiment, and what is the same of Stable-Baselines3."""

    experiment: str
    env: str
    method: str
    steps: int
    every: int
    """Steps between evaluations."""
    settings: dict[str, Any] = field(default_factory=dict)


ROWS = {
    "double_pendulum_sac": Compared(
        experiment="double_pendulum_sac",
        env="InvertedDoublePendulum-v5",
        method="SAC",
        steps=30_000,
        every=5_000,
        settings={"learning_starts": 500, "batch_size": 256, "learning_rate": 3e-4},
    ),
}


Point = dict[str, float]
"""``steps`` and ``score`` of an evaluation."""


def ours(row: Compared, seed: int) -> Iterator[Point]:
    """The curve of the run of a seed."""
    name = f"{row.experiment}-{seed}"
    subprocess.run(
        [
            *(Path(sys.executable).with_name("rlinf"), "run", f"experiment={row.experiment}"),
            *(f"seed={seed}", f"run.name={name}", f"run.root={RUNS}"),
        ],
        cwd=tree.ROOT,
        check=True,
    )
    run = Results.of(RUNS / name)
    rows = run.metrics()
    steps = np.cumsum([0, *(row["rollout/steps"] for row in rows)])
    for found in run.evaluations():
        yield {"steps": float(steps[int(found["version"])]), "score": float(found["score"])}


def theirs(row: Compared, seed: int) -> Iterator[Point]:
    """The same of Stable-Baselines3, on one thread."""
    import gymnasium
    import stable_baselines3
    import torch
    from stable_baselines3.common.evaluation import evaluate_policy

    torch.set_num_threads(1)
    env, held_out = gymnasium.make(row.env), gymnasium.make(row.env)
    made = getattr(stable_baselines3, row.method)
    model = made("MlpPolicy", env, seed=seed, device="cpu", **row.settings)
    for steps in range(0, row.steps + 1, row.every):
        if steps:
            model.learn(row.every, reset_num_timesteps=steps == row.every)
        held_out.reset(seed=10_000)
        score, _ = evaluate_policy(model, held_out, EPISODES, warn=False)
        yield {"steps": float(steps), "score": float(np.mean(score))}


def main() -> int:
    """Measure one row; what is known of it already is not measured again."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("--name", choices=sorted(ROWS), required=True)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("ours", "theirs"))
    asked = parser.parse_args()
    row = ROWS[asked.name]
    for name, measure in (("ours", ours), ("theirs", theirs)):
        done = curves().get(asked.name, {}).get(str(asked.seed), {}).get(name, {"curve": []})
        if asked.only not in (None, name) or any(p["steps"] >= row.steps for p in done["curve"]):
            continue
        if name == "theirs" and importlib.util.find_spec("stable_baselines3") is None:
            sys.stdout.write("stable_baselines3 is not installed: its curve is left out\n")
            continue
        start = time.monotonic()
        curve: list[Point] = []
        for point in measure(row, asked.seed):
            curve.append(point)
            sys.stdout.write(f"{name}: {point['steps']:.0f} steps, score {point['score']:.1f}\n")
            sys.stdout.flush()
            # Written as it comes, beside what another process may have measured meanwhile.
            known = curves()
            minutes = round((time.monotonic() - start) / 60, 1)
            seeds = known.setdefault(asked.name, {}).setdefault(str(asked.seed), {})
            seeds[name] = {"curve": curve, "minutes": minutes}
            write_atomic(CURVES, json.dumps(known, indent=1) + "\n")
    if asked.name in curves():
        draw(asked.name, curves()[asked.name])
    return 0


def curves() -> dict[str, Any]:
    """What was measured so far: by row, seed, and whose it is."""
    known: dict[str, Any] = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    return known


def draw(name: str, seeds: dict[str, Any]) -> None:
    """Every curve of a row, ours and theirs."""
    figure, axis = plt.subplots(figsize=(7, 3.6))
    labels = {"ours": "rlinf", "theirs": "Stable-Baselines3"}
    colours = {"ours": COLOURS["train"], "theirs": COLOURS["rollout"]}
    for seed, found in sorted(seeds.items()):
        for who, measured in found.items():
            steps = [point["steps"] for point in measured["curve"]]
            scores = [point["score"] for point in measured["curve"]]
            label = f"{labels[who]}, seed {seed}"
            axis.plot(steps, scores, "o-", ms=3, color=colours[who], label=label)
    axis.set_xlabel("environment steps")
    axis.set_ylabel(f"return of {EPISODES} held-out episodes")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(IMAGES / f"learning-{name.replace('_', '-')}.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
