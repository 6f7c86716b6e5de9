"""Run under LIBERO's interpreter: writes the images of LIBERO's own observations when an episode
begins, as bytes."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import numpy as np

spec = importlib.util.spec_from_file_location("libero_module", sys.argv[1])
assert spec is not None
assert spec.loader is not None
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)
module._check_assets(None)

from libero.libero import benchmark, get_libero_path  # noqa: E402
from libero.libero.envs import OffScreenRenderEnv  # noqa: E402

tasks = benchmark.get_benchmark_dict()["libero_spatial"]()
task = tasks.get_task(0)
bddl = Path(get_libero_path("bddl_files")) / task.problem_folder / task.bddl_file
states = Path(get_libero_path("init_states")) / task.problem_folder
env = OffScreenRenderEnv(bddl_file_name=str(bddl), camera_heights=64, camera_widths=64)
env.seed(0)
env.reset()
env.env.hard_reset = False
env.seed(0)
env.reset()
observation = env.set_init_state(
    module._load_initial_states(states / f"{task.init_states_file}.npz")[0]
)
for _ in range(10):
    observation = env.step(np.array([0.0] * 6 + [-1.0]))[0]
for camera in ("agentview", "robot0_eye_in_hand"):
    sys.stdout.buffer.write(np.asarray(observation[f"{camera}_image"], np.uint8).tobytes())
