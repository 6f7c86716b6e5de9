"""A lower bound on the iteration time of every placement: what no plan can beat.

Two relaxations, the larger counts. *Work*: give up order, pools, micro-batches and all moving, let
any GPU work on any stage at any moment at the best speed per GPU measured for that kind; the least
time in which all work can be done is a linear program. *Chain*: along any path of stages that
cannot overlap, each stage takes at least its time on all GPUs there are.
"""

from __future__ import annotations

import numpy as np
from scipy.optimize import linprog

from pipeline.planner.predict import Predictor
from pipeline.planner.problem import Problem


def lower_bound(problem: Problem) -> float:
    """Seconds per iteration that no placement goes below; infinite if a stage runs nowhere."""
    return max(work_bound(problem), chain_bound(problem))


def work_bound(problem: Problem) -> float:
    """The linear program: GPU-seconds ``y[s, k]`` of each kind for each stage.

    minimise T subject to ``sum_k u[s, k] y[s, k] >= 1`` (all of a stage's work is done) and
    ``sum_s y[s, k] <= gpus[k] T`` (no kind works more than it can), where ``u`` is the best rate
    per GPU at any number of GPUs.
    """
    stages, kinds = len(problem.stages), len(problem.kinds)
    best = np.zeros((stages, kinds))
    for s, stage in enumerate(problem.stages):
        for k in range(kinds):
            rates = problem.table(stage, k)
            best[s, k] = np.max(rates[1:] / np.arange(1, len(rates)), initial=0.0)
    if not np.all(best.max(1) > 0):
        return float("inf")
    # Scaled so that numbers of very different size do not meet in one program.
    scale = best.max(1, keepdims=True)
    size = stages * kinds
    cost = np.zeros(size + 1)
    cost[-1] = 1.0
    rows = np.zeros((stages + kinds, size + 1))
    limits = np.zeros(stages + kinds)
    unit = float((1 / scale).max())
    for s in range(stages):
        rows[s, s * kinds : (s + 1) * kinds] = -best[s] / scale[s]
        limits[s] = -float(1 / scale[s, 0]) / unit
    for k, kind in enumerate(problem.kinds):
        rows[stages + k, k:size:kinds] = 1.0
        rows[stages + k, -1] = -kind.gpus
    solved = linprog(cost, A_ub=rows, b_ub=limits, method="highs")
    return float(solved.fun) * unit if solved.success else 0.0


def chain_bound(problem: Problem) -> float:
    """The longest path of stages that wait for the whole of each other."""
    predictor = Predictor(problem)
    everything = np.array([[kind.gpus] for kind in problem.kinds])
    finish: dict[str, float] = {}
    for s, stage in enumerate(problem.stages):
        own = float(predictor.duration(s, everything)[0])
        waits = [finish[name] for name in stage.after] if not stage.streams else []
        finish[stage.name] = own + max(waits, default=0.0)
    return max(finish.values())
