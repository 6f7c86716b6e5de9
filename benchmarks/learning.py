"""``make bench-learning NAME=row``: learning curves of an algorithm, one per seed.

A row is an experiment of this repository with overrides and a goal for its score. Some rows also
run the same method of Stable-Baselines3 (Raffin et al., 2021), if that is installed (``pip install
--no-deps stable-baselines3``), with the same networks, batch size, rates and steps. Runs stay in
``runs/learning``: an interrupted one resumes, and a finished one is only read. Curves are stored in
``learning.json``; an incomplete one of Stable-Baselines3 starts again.
``docs/explanation/figures.md`` has a table of that file, and a plot of every row.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import h5py
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.__main__ import RESULTS
from benchmarks.combinations import ALGORITHMS, COLUMNS, find_refusal
from benchmarks.learning_rows import PRIOR_DATA_ROW, ROWS
from pipeline.commands.results import RunResults
from pipeline.report.theme import STAGE_COLOURS
from rlinf import package_paths
from rlinf.artifacts import write_atomic
from rlinf.data.transitions import TRANSITION_FIELDS, transition_dtype
from rlinf.replay.buffer import ROWS_FILE as REPLAYED
from rlinf.replay.buffer import STATE_FILE
from rlinf.replay.offline_data import VECTOR_COLUMNS

CURVES = Path(__file__).parent / "learning.json"
RUNS = package_paths.ROOT / "runs" / "learning"
IMAGES = package_paths.ROOT / "docs" / "images"
EPISODES = 10
"""Episodes per evaluation of Stable-Baselines3, from initial states that training does not use."""


Point = dict[str, float]
"""``steps`` and ``score`` of an evaluation."""
AllCurves = dict[str, Any]
"""Curves that were measured, by row, seed, and implementation (``ours``, ``theirs``)."""


def words_of(name: str, seed: int, prior: Path) -> list[str]:
    """Return the overrides of a row's run for ``rlinf run``.

    Args:
        prior: file of prior data, for rows that use it.
    """
    row = ROWS[name]
    prior_data = [f"algorithm.offline_data={prior}"] if row.prior else []
    location = [f"seed={seed}", f"run.name={name}-{seed}", f"run.root={RUNS}"]
    return [f"experiment={row.experiment}", *row.words, *prior_data, *location]


def ours(name: str, seed: int) -> Iterator[Point]:
    """Run a seed with rlinf; yields its learning curve."""
    row = ROWS[name]
    prior = RUNS / f"collected-{row.prior}.hdf5"
    if row.prior and not prior.exists():
        write_prior(RUNS / f"{PRIOR_DATA_ROW}-0", prior, row.prior)
    rlinf = Path(sys.executable).with_name("rlinf")
    subprocess.run([rlinf, "run", *words_of(name, seed, prior)], cwd=package_paths.ROOT, check=True)
    run = RunResults.open(RUNS / f"{name}-{seed}")
    steps = np.cumsum([0, *(metrics[row.counted] for metrics in run.metrics())])
    for evaluation in run.evaluations():
        yield {
            "steps": float(steps[int(evaluation["version"])]),
            "score": float(evaluation["score"]),
        }


def write_prior(run: Path, path: Path, newest: int) -> None:
    """Write the newest transitions of a run, in order, to one file with a data set per column.

    Rewards are those of the simulator, without ``reward.scale``.

    Raises:
        SystemExit: the run does not exist.
    """
    if not (run / "replay" / STATE_FILE).exists():
        raise SystemExit(
            f"no transitions in {run}: make bench-learning NAME={PRIOR_DATA_ROW} first"
        )
    count = json.loads((run / "replay" / STATE_FILE).read_text())["appends"][-1][2]
    config = RunResults.open(run).config
    task, reward = config.task.model_extra or {}, config.reward.model_extra or {}
    rows = np.fromfile(
        run / "replay" / REPLAYED,
        transition_dtype(task["observation"], task["action"]["size"]),
        count,
    )
    rows["rewards"] /= reward.get("scale", 1.0)
    with h5py.File(part := path.with_suffix(".part"), "w") as file:
        for column in rows.dtype.names or ():
            file[column] = rows[column][-newest:]
    part.rename(path)


def theirs(name: str, seed: int) -> Iterator[Point]:
    """Run a seed with Stable-Baselines3 on one thread; yields its learning curve."""
    import stable_baselines3
    import torch
    from gymnasium.wrappers import TransformReward
    from stable_baselines3.common.env_util import make_vec_env
    from stable_baselines3.common.evaluation import evaluate_policy
    from stable_baselines3.common.vec_env import VecNormalize, sync_envs_normalization

    row = ROWS[name].theirs
    assert row is not None
    torch.set_num_threads(1)
    scale = row.reward_scale
    env = make_vec_env(
        row.env,
        row.environments,
        wrapper_class=lambda env: TransformReward(env, lambda reward: scale * float(reward)),
    )
    held_out = make_vec_env(row.env)
    if row.standardised:
        env = VecNormalize(env, norm_reward=False)
        held_out = VecNormalize(held_out, norm_reward=False, training=False)
    method = getattr(stable_baselines3, row.method)
    model = method("MlpPolicy", env, seed=seed, device="cpu", **row.settings)
    for steps in range(0, row.steps + 1, row.every):
        if steps:
            model.learn(row.every, reset_num_timesteps=steps == row.every)
        if row.standardised:
            sync_envs_normalization(model.env, held_out)
        held_out.seed(10_000)
        score, _ = evaluate_policy(model, held_out, EPISODES, warn=False)
        yield {"steps": float(steps), "score": float(np.mean(score))}


GAINS = {
    ("grpo", "causal_lm"): {
        "first_model": "names in texts",
        "first_model_lora": "names in texts, by adapters",
    },
    ("grpo", "openvla_oft"): {"vla": "drawer-close-v3"},
    ("grpo", "smolvla"): {"smolvla": "drawer-close-v3"},
}
"""Rows of ``python -m benchmarks`` by algorithm and column: prefixes of their names, and their
tasks."""


def main() -> int:
    """Measure one row, except for complete curves, or print the table of combinations."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.learning")
    parser.add_argument("--name", choices=sorted(ROWS), help="default: print combinations")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", choices=("ours", "theirs"))
    arguments = parser.parse_args()
    if arguments.name:
        for whose in ("ours", "theirs") if arguments.only is None else (arguments.only,):
            measure(arguments.name, arguments.seed, whose)
        draw(arguments.name, curves())
    sys.stdout.write(f"{table(curves())}\n" if arguments.name else f"{matrix(curves())}\n")
    return 0


def measure(name: str, seed: int, whose: str) -> None:
    """Measure a curve, unless it is complete or cannot be measured here."""
    if whose == "theirs" and ROWS[name].theirs is None:
        return
    if curves().get(name, {}).get(str(seed), {}).get(whose, {}).get("complete"):
        return
    if whose == "theirs" and importlib.util.find_spec("stable_baselines3") is None:
        sys.stdout.write("stable_baselines3 is not installed: its curve is left out\n")
        return
    start, curve = time.monotonic(), list[Point]()
    for point in (ours if whose == "ours" else theirs)(name, seed):
        curve.append(point)
        sys.stdout.write(f"{whose}: {point['steps']:.0f} steps, score {point['score']:.4g}\n")
        sys.stdout.flush()
        keep(name, seed, whose, curve, start, complete=False)
    keep(name, seed, whose, curve, start, complete=True)


def keep(
    name: str, seed: int, whose: str, curve: list[Point], start: float, *, complete: bool
) -> None:
    """Write a curve. Curves that other processes wrote meanwhile stay."""
    all_curves = curves()
    minutes = round((time.monotonic() - start) / 60, 1)
    seeds = all_curves.setdefault(name, {}).setdefault(str(seed), {})
    seeds[whose] = {"curve": curve, "minutes": minutes, "complete": complete}
    write_atomic(CURVES, json.dumps(all_curves, indent=1) + "\n")


def curves() -> AllCurves:
    """Return the curves that were measured."""
    all_curves: AllCurves = json.loads(CURVES.read_text()) if CURVES.exists() else {}
    return all_curves


def goal_of(name: str, all_curves: AllCurves) -> float:
    """Return the goal of a row; infinity if it depends on curves that were not measured yet."""
    goal = ROWS[name].goal
    if goal is not None:
        return goal
    theirs = [
        measured["theirs"] for measured in all_curves.get(name, {}).values() if "theirs" in measured
    ]
    last_scores = [run["curve"][-1]["score"] for run in theirs]
    return float(np.mean(last_scores)) if last_scores else math.inf


def table(all_curves: AllCurves) -> str:
    """Return a Markdown table with the last scores of all seeds and the steps to the goal."""
    lines = [
        "| method | task | row | goal | last score of each seed | goal reached after |",
        "|---|---|---|---|---|---|",
    ]
    for name, row in ROWS.items():
        seeds = sorted(all_curves.get(name, {}).items())
        runs = [measured["ours"] for _, measured in seeds if "ours" in measured]
        goal = goal_of(name, all_curves)
        line_start = f"| {row.method} | {row.task} | `{name}` | {goal:.4g} |"
        if not runs:
            lines.append(f"{line_start} not measured | |")
            continue
        last_scores, reached_after = [], []
        for run in runs:
            cut = "" if run.get("complete") else " (cut off)"
            last_scores.append(f"{run['curve'][-1]['score']:.4g}{cut}")
            reached = [p["steps"] for p in run["curve"] if p["score"] >= goal]
            reached_after.append(f"{reached[0]:,.0f}" if reached else "not reached")
        reached_text = " / ".join(reached_after) + (
            f" {row.unit}" if any(f[0].isdigit() for f in reached_after) else ""
        )
        lines.append(f"{line_start} {' / '.join(last_scores)} | {reached_text} |")
    return "\n".join(lines)


def matrix(all_curves: AllCurves) -> str:
    """Return a Markdown table of algorithms by policies: learned, runs, or not possible."""
    lines = [
        "| `algorithm=` | " + " | ".join(column.title for column in COLUMNS.values()) + " |",
        "|---" * (len(COLUMNS) + 1) + "|",
    ]
    with tempfile.TemporaryDirectory() as folder:
        # Whether a combination is rejected does not depend on the content of the transitions.
        prior = Path(folder) / "prior.hdf5"
        with h5py.File(prior, "w") as file:
            for column in TRANSITION_FIELDS:
                file[column] = np.zeros((1, 1) if column in VECTOR_COLUMNS else 1)
        for algorithm in ALGORITHMS:
            cells = [
                "no"
                if find_refusal(algorithm, column, prior)
                else cell(algorithm, column, all_curves)
                for column in COLUMNS
            ]
            lines.append(f"| `{algorithm}` | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(algorithm: str, column: str, all_curves: AllCurves) -> str:
    """Return the mean scores of a combination's rows, or ``runs`` if none was measured."""
    texts = gains(algorithm, column)
    for name, row in ROWS.items():
        if (row.algorithm, row.column) != (algorithm, column):
            continue
        seeds = [
            measured["ours"]["curve"]
            for measured in all_curves.get(name, {}).values()
            if "ours" in measured
        ]
        if not seeds:
            continue
        goal = goal_of(name, all_curves)
        mean = np.mean([curve[-1]["score"] for curve in seeds])
        best = np.mean([max(p["score"] for p in curve) for curve in seeds])
        reached = all(any(p["score"] >= goal for p in curve) for curve in seeds)
        if row.goal is None:  # a mean is compared with a mean
            reached = bool(mean >= goal)
        if reached and mean < goal:
            text = f"goal reached, not held: {row.task} {best:.4g} at best, {mean:.4g} at the end"
        else:
            text = f"{'learns' if reached else 'goal not reached'}: {row.task} {mean:.4g}"
        texts.append(text + source_share_text(name, all_curves))
    return "; ".join(texts) or "runs"


SOURCE_SHARE = 0.8
"""Share of the source policy's gain that a method must reach if it learns only from its data."""


def source_share_text(name: str, all_curves: AllCurves) -> str:
    """Return the gain of each seed of an offline row, relative to the distance from its first score
    to the last score of its source policy. Empty for other rows or without measurements."""
    source = all_curves.get(PRIOR_DATA_ROW, {}).get("0", {}).get("ours")
    if ROWS[name].counted != "train/steps" or source is None:
        return ""
    source_score, shares = source["curve"][-1]["score"], []
    for _, measured in sorted(all_curves[name].items()):
        curve = measured.get("ours", {}).get("curve", [])
        if len(curve) > 1:
            first_score = curve[0]["score"]
            shares.append((curve[-1]["score"] - first_score) / (source_score - first_score))
    if not shares:
        return ""
    verdict = "at least" if min(shares) >= SOURCE_SHARE else "not"
    percentages = ", ".join(f"{share:.0%}" for share in shares)
    return f" ({verdict} {SOURCE_SHARE:.0%} of its source policy: {percentages})"


def gains(algorithm: str, column: str) -> list[str]:
    """Return the gains over the initial policy of combinations that :mod:`benchmarks.score_gain`
    measures."""
    rows = {row["name"]: row for row in json.loads(RESULTS.read_text())["rows"]}
    texts = []
    for prefix, task in GAINS.get((algorithm, column), {}).items():
        points, lower = (rows.get(f"{prefix}_gain_{kind}") for kind in ("points", "lower"))
        if points is not None and lower is not None:
            reached = points["value"] >= points["goal"] and lower["value"] > 0
            verdict = "learns" if reached else "goal not reached"
            texts.append(f"{verdict}: {task} {points['value']:+.3g} points")
    return texts


def draw(name: str, all_curves: AllCurves) -> None:
    """Plot all curves of a row and its goal."""
    row, goal, seeds = ROWS[name], goal_of(name, all_curves), all_curves.get(name, {})
    figure, axis = plt.subplots(figsize=(7, 3.6))
    labels = {"ours": "rlinf", "theirs": "Stable-Baselines3"}
    colours = {"ours": STAGE_COLOURS["train"], "theirs": STAGE_COLOURS["rollout"]}
    styles = ("-", "--", ":", "-.")
    for seed, runs in sorted(seeds.items()):
        for whose, measured in runs.items():
            steps = [point["steps"] for point in measured["curve"]]
            scores = [point["score"] for point in measured["curve"]]
            label, style = f"{labels[whose]}, seed {seed}", styles[int(seed) % len(styles)]
            axis.plot(steps, scores, f"o{style}", ms=3, color=colours[whose], label=label)
    axis.axhline(goal, color="0.6", lw=1, label=f"goal {goal:.4g}")
    axis.set_xlabel(row.unit)
    axis.set_ylabel("held-out score")
    axis.set_title(f"{row.method}, {row.task}", fontsize=10)
    axis.legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    figure.tight_layout()
    figure.savefig(IMAGES / f"learning-{name.replace('_', '-')}.png", dpi=120)
    plt.close(figure)


if __name__ == "__main__":
    raise SystemExit(main())
