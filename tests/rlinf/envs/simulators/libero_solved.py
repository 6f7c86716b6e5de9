"""Run under LIBERO's interpreter, given the file that makes its worlds: puts the bowl on the plate.

Prints what the next step says before and after.
"""

from __future__ import annotations

import importlib.util
import json
import sys

import numpy as np

spec = importlib.util.spec_from_file_location("world", sys.argv[1])
assert spec is not None
assert spec.loader is not None
maker = importlib.util.module_from_spec(spec)
spec.loader.exec_module(maker)
world = maker.make("libero_spatial/0", {"steps": 30})
world.reset(seed=0)
rest = np.array([0.0] * 6 + [-1.0])
steps = [[*map(float, world.step(rest)[1:4])]]
sim = world._env.sim
where = sim.data.get_joint_qpos("plate_1_joint0").copy()
where[2] += 0.03
sim.data.set_joint_qpos("akita_black_bowl_1_joint0", where)
sim.forward()
for _ in range(20):
    came = world.step(rest)
    steps.append([*map(float, came[1:4])])
    if came[2]:
        break
print(json.dumps({"instruction": world.instruction, "steps": steps}))
