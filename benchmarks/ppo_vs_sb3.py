"""PPO on HalfCheetah: environment steps per second of the training loop, compared with SB3.

Number of environments, steps between updates, epochs, minibatches, network, normalization of
observations, rates and clipping are equal. Both sides alternate, each in a new process with its
best thread setting. The first iteration of a turn (imports, caches) does not count. Ours commits
every stage's output to disk as usual; Stable-Baselines3 keeps everything in memory. A minibatch is
the steps of one environment in ours, and as many steps of random ones in Stable-Baselines3.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from typing import Any

from benchmarks.row import BenchmarkRow, median_row

ENVIRONMENTS, HORIZON, EPOCHS, ITERATIONS, TURNS = 32, 256, 10, 6, 3
MINIBATCHES = 32
SETTINGS = {
    "ours": [{"processes": 0, "threads": 1}, {"processes": 2, "threads": 1}],
    "sb3": [{"threads": 1}, {"threads": 2}],
}
"""Settings that each side tries in its first turn; the fastest is used."""


def measure() -> list[BenchmarkRow]:
    """Measure both sides alternately, after a search for the best setting of each."""
    best: dict[str, dict[str, int]] = {}
    rates: dict[str, list[float]] = {"ours": [], "sb3": []}
    for side, settings in SETTINGS.items():
        median_rates = {json.dumps(s): statistics.median(turn(side, s)) for s in settings}
        best[side] = json.loads(max(median_rates, key=lambda s: median_rates[s]))
        print(f"  {side}: {median_rates}")
    ratios = []
    for number in range(TURNS):
        order = ["ours", "sb3"] if number % 2 else ["sb3", "ours"]
        values = {side: turn(side, best[side]) for side in order}
        for side, side_rates in values.items():
            rates[side] += side_rates
        ratios += [a / b for a, b in zip(values["ours"], values["sb3"], strict=True)]
    return [
        median_row("ppo_vs_sb3", ratios, "x", 1.5, "higher"),
        median_row("ppo_steps_per_s", rates["ours"], "steps/s", None, "higher"),
        median_row("sb3_steps_per_s", rates["sb3"], "steps/s", None, "higher"),
    ]


def turn(side: str, settings: dict[str, int]) -> list[float]:
    """Return steps per second of each counted iteration, measured in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        process = subprocess.run(
            [sys.executable, "-m", "benchmarks.ppo_vs_sb3", side, json.dumps(settings), folder],
            env={**os.environ, "OMP_NUM_THREADS": str(settings["threads"])},
            capture_output=True,
            text=True,
            check=False,
        )
    if process.returncode:
        raise RuntimeError(f"{side}: {process.stderr[-2000:]}")
    values: list[float] = json.loads(process.stdout.splitlines()[-1])
    return values[1:]


def run_ours(settings: dict[str, int], root: str) -> list[float]:
    """Run the stages in one process, with simulator processes if configured."""
    from benchmarks.run_helpers import run_node
    from pipeline.commands.experiment import compose
    from pipeline.executors import InProcessExecutor
    from pipeline.graph import Graph
    from pipeline.resume import create_run
    from rlinf.config import RunConfig, validate

    values = compose(
        [
            "experiment=halfcheetah_ppo",
            f"++run.root={root}",
            f"iterations={ITERATIONS}",
            f"++rollout.batch_size={ENVIRONMENTS}",
            f"++rollout.horizon={HORIZON}",
            f"++algorithm.epochs={EPOCHS}",
            f"++algorithm.minibatches={MINIBATCHES}",
            "++algorithm.old_logprobs=rollout",
            "++optimizer.lr_scheduler_type=constant",
            f"++task.num_processes={settings['processes']}",
            f"++trainer.cpu_threads={settings['threads']}",
            f"++engine.threads={settings['threads']}",
            "++evaluate.every=0",
        ]
    )
    run = create_run(validate(RunConfig, values), {})
    graph, executor, rates = Graph(run.config), InProcessExecutor(run), []
    for node in graph.nodes():
        if node.stage == "evaluate":
            continue
        if node.stage == "rollout":
            start = time.perf_counter()
        run_node(run, graph, executor, node)
        if node.stage == "sync":
            rates.append(ENVIRONMENTS * HORIZON / (time.perf_counter() - start))
    return rates


def run_sb3(settings: dict[str, int], root: str) -> list[float]:
    """Run the loop of Stable-Baselines3; a callback measures its iterations."""
    import gymnasium
    import torch
    from stable_baselines3 import PPO
    from stable_baselines3.common.callbacks import BaseCallback
    from stable_baselines3.common.vec_env import DummyVecEnv, VecNormalize

    torch.set_num_threads(settings["threads"])
    starts: list[float] = []

    class Sb3StepClock(BaseCallback):
        def _on_rollout_start(self) -> None:
            starts.append(time.perf_counter())

        def _on_step(self) -> bool:
            return True

    def bare() -> Any:
        return gymnasium.make("HalfCheetah-v5", disable_env_checker=True)

    environments = VecNormalize(DummyVecEnv([bare] * ENVIRONMENTS), norm_reward=False)
    model = PPO(
        "MlpPolicy",
        environments,
        n_steps=HORIZON,
        batch_size=ENVIRONMENTS * HORIZON // MINIBATCHES,
        n_epochs=EPOCHS,
        learning_rate=3e-4,
        gamma=0.99,
        gae_lambda=0.95,
        clip_range=0.2,
        ent_coef=0.0,
        vf_coef=0.5,
        max_grad_norm=0.5,
        policy_kwargs={"log_std_init": -1.0, "net_arch": {"pi": [64, 64], "vf": [64, 64]}},
        device="cpu",
        seed=0,
    )
    model.learn(ENVIRONMENTS * HORIZON * ITERATIONS, callback=Sb3StepClock())
    ends = [*starts[1:], time.perf_counter()]
    steps = ENVIRONMENTS * HORIZON
    return [steps / (end - start) for start, end in zip(starts, ends, strict=True)]


if __name__ == "__main__":
    side, settings, root = sys.argv[1:]
    rates = (run_ours if side == "ours" else run_sb3)(json.loads(settings), root)
    print(json.dumps(rates))
