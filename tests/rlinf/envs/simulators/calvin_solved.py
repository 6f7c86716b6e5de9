"""Run under CALVIN's interpreter, given the file that makes its worlds and ``kwargs``: moves doors
and lights by hand until a chain of four subtasks is solved.

Prints, step by step, what is asked, and what the step says.
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
world = maker.make("chains", json.loads(sys.argv[2]))
world.reset(initial_state=0)
scene = world._desk.scene
steps = []


def step() -> None:
    request = world.instruction
    came = world.step(np.array([0.0] * 6 + [1.0]))
    steps.append([request, *map(float, came[1:4]), came[4]["success"]])


step()
scene.doors[1].reset(0.2)
step()
# Not what is asked now.
scene.lights[1].turn_on()
step()
scene.doors[0].reset(0.25)
step()
scene.lights[1].turn_off()
step()
scene.lights[0].turn_on()
step()
print(json.dumps({"steps": steps, "starts": world.num_initial_states}))
