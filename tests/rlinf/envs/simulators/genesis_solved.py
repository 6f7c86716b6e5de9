"""Run under Genesis's interpreter, given the file that makes its worlds: puts the point of one arm
at its hand, and says what the next step tells of both.
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
world = maker.make("reach", {}, count=2, images={})
shown = world.reset([0, 1], [0, 0])
world._goals[1] = shown[1, 18:21]
_, reward, *ends = world.step(np.zeros((2, 7), np.float32))
print(json.dumps({"reward": reward.tolist(), "ends": [end.tolist() for end in ends]}))
