"""Steps per second of LIBERO in two processes, compared with LIBERO's own vector environment.

Both sides step the same number of environments of one task with the same precomputed actions, and
render both cameras in 256 x 256 with LIBERO's own renderer at each step. On our side a policy looks
its actions up in a table, and the trajectories are recorded. LIBERO's ``SubprocVectorEnv`` has one
process for each environment; it runs under the interpreter of the environment ``libero``.
"""

from __future__ import annotations

import os
import subprocess
import time
from contextlib import closing

import numpy as np

from benchmarks.env_throughput import play_environment
from benchmarks.row import BenchmarkRow, median_row
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.simulators import libero
from rlinf.interpreters import resolve_interpreter

TASK, PROCESSES, ROUNDS = "libero_spatial/0", 2, 5
COUNT, STEPS, SIZE = 4, 20, 256
PROGRAM = """
import importlib.util, pathlib, sys
import numpy as np
spec = importlib.util.spec_from_file_location("module", sys.argv[1])
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._check_assets(None)
from libero.libero import benchmark, get_libero_path
from libero.libero.envs import OffScreenRenderEnv, SubprocVectorEnv

count, steps, size = map(int, sys.argv[2:5])
task = benchmark.get_benchmark_dict()["libero_spatial"]().get_task(0)
file = pathlib.Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file

def create():
    env = OffScreenRenderEnv(
        bddl_file_name=str(file), camera_heights=size, camera_widths=size, ignore_done=True
    )
    env.reset()
    env.env.hard_reset = False
    return env

if __name__ == "__main__":
    envs = SubprocVectorEnv([create] * count)
    actions = np.random.default_rng(0).uniform(-1, 1, (steps, count, 7)).astype(np.float32)
    for _ in sys.stdin:
        envs.reset()
        for action in actions:
            envs.step(action)
        print("done", flush=True)
    envs.close()
"""


def measure() -> list[BenchmarkRow]:
    """Measure our environments and LIBERO's alternately; the first round is not counted."""
    config = GymConfig.model_validate(
        {
            "simulator": "libero",
            "id": TASK,
            "python": "libero",
            "num_processes": PROCESSES,
            "images": {"agentview": (SIZE, SIZE), "robot0_eye_in_hand": (SIZE, SIZE)},
            # The episode's first steps at rest are not counted on either side.
            "kwargs": {"benchmark_images": True, "rest": 0},
        }
    )
    random = np.random.default_rng(0)
    actions = random.uniform(-1, 1, (STEPS, COUNT, 7)).astype(np.float32)
    python = resolve_interpreter("libero", "task.python")
    arguments = [str(libero.__file__), *map(str, (COUNT, STEPS, SIZE))]
    with (
        closing(GymEnvironment(config, None)) as ours,
        subprocess.Popen(
            [python, "-c", PROGRAM, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "MUJOCO_GL": "egl", "OMP_NUM_THREADS": "1"},
        ) as theirs,
    ):
        rates = []
        for number in range(-1, ROUNDS):
            start = time.perf_counter()
            play_environment(ours, actions)
            middle = time.perf_counter()
            play_libero(theirs)
            end = time.perf_counter()
            if number >= 0:
                rates.append((COUNT * STEPS / (middle - start), COUNT * STEPS / (end - middle)))
        assert theirs.stdin is not None
        theirs.stdin.close()
    ratios = [our_rate / their_rate for our_rate, their_rate in rates]
    return [
        median_row("libero_vs_subproc", ratios, "x", 1.0, "higher"),
        median_row("libero_steps_per_s", [rate for rate, _ in rates], "steps/s", None, "higher"),
        median_row("subproc_steps_per_s", [rate for _, rate in rates], "steps/s", None, "higher"),
    ]


def play_libero(process: subprocess.Popen[str]) -> None:
    """Step LIBERO's vector environment for one round."""
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("go\n")
    process.stdin.flush()
    while (line := process.stdout.readline()) != "done\n":
        assert line, "LIBERO's vector environment has ended"
