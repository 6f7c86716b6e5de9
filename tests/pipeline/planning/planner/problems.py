"""Random problems, for tests and benchmarks alike."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace

import numpy as np

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import (
    GpuKind,
    IterationTime,
    MonetaryCost,
    Objective,
    Placement,
    PlacementProblem,
    PlacementStage,
    TimeToFinish,
)
from pipeline.planning.planner.search import enumerate_groupings

OBJECTIVES: tuple[Objective, ...] = (IterationTime(), MonetaryCost(), TimeToFinish(20))
NAMES = ("rollout", "reward", "inference", "train", "critic", "teacher", "judge", "search")


def random_problem(
    seed: int, sizes: tuple[int, ...], stages: int, *, smooth: bool = False
) -> PlacementProblem:
    """Stages of unlike scaling on kinds of unlike speed; some combinations cannot run."""
    rng = np.random.default_rng([seed, stages, *sizes])
    kinds = [
        GpuKind(
            f"kind{i}",
            size,
            price=float(rng.uniform(0.5, 4)),
            waits_s=((1, float(rng.choice([0, 60, 900]))),),
            interruptions_per_hour=float(rng.choice([0, 0.1, 1.0])),
        )
        for i, size in enumerate(sizes)
    ]
    names = NAMES[:stages]
    made = []
    for s, name in enumerate(names):
        rates = {}
        for kind in kinds:
            gpus = np.arange(kind.gpus + 1)
            speed = rng.uniform(0.2, 2) / rng.uniform(20, 300) / max(1, sum(sizes) / 4)
            curve = speed * gpus ** rng.uniform(0.7, 1)
            least = 1 if smooth else int(rng.choice([1, 1, 2, 4]))
            curve[gpus % least != 0] = 0
            curve[0] = 0
            if smooth or rng.random() > 0.15 or kind is kinds[0]:
                rates[kind.name] = curve
        after = (names[int(rng.integers(0, s))],) if s else ()
        made.append(
            PlacementStage(
                name,
                rates,
                after=after,
                streams=bool(rng.random() < 0.8),
                divisible=bool(rng.random() < 0.9) or smooth,
                switch_s={k.name: float(rng.choice([0.0, 3.0, 9.0])) for k in kinds},
            )
        )
    if (drawn := np.random.default_rng([seed, 1])).random() < 0.5:
        late, again = drawn.random(2)
        shares = {m: 1 / m + late * (1 - 1 / m) for m in (2, 8, 32)}
        lead = {m: {1: share, 4: (1 + share) / 2} for m, share in shares.items()}
        made[0] = replace(made[0], lead=lead, again=float(again))
    return PlacementProblem(
        made,
        kinds,
        chunks=(1, 2, 8, 32),
        sync=(names[-1], names[0]),
        sync_s={(a.name, b.name): float(rng.uniform(0, 9)) for a in kinds for b in kinds},
        mixing=float(rng.choice([1.0, 0.9, 0.5])),
    )


def random_placement(problem: PlacementProblem, seed: int) -> Placement:
    """Any grouping, any division; some stages may be unable to run."""
    rng = np.random.default_rng([seed, 1])
    groups: dict[int, list[int]] = {}
    for s in range(len(problem.stages)):
        groups.setdefault(int(rng.integers(len(problem.stages))), []).append(s)
    pools = tuple(sorted(tuple(pool) for pool in groups.values()))
    shares = [
        rng.multinomial(kind.gpus, rng.dirichlet(np.full(len(pools) + 1, 2.0)))
        for kind in problem.kinds
    ]
    gpus = tuple(tuple(int(share[p]) for share in shares) for p in range(len(pools)))
    return Placement(pools, gpus, int(rng.choice(problem.chunks)))


def public_case() -> PlacementProblem:
    """128 like GPUs: the case, and the cost functions, of RLinf's placement tool.

    Collocated a step takes 224 s of rollout, 10 s of inference and 101 s of training, for 512
    prompts of 16 samples. Engines of 2 GPUs run 256 requests each, of which 90 % count; trainers
    and inference are 4 GPUs, with 4 minibatches a step.
    """
    world, prompts, group = 128, 512, 16
    gpus = np.arange(world + 1)

    def rollout(total: float) -> np.ndarray:
        rates = np.zeros(world + 1)
        for n in range(2, world + 1, 2):
            fits = n / 2 * np.ceil(256 * 0.9) >= prompts * group
            rates[n] = 1 / (total if fits else total * world / n)
        return rates

    def trained(total: float) -> np.ndarray:
        rates = np.zeros(world + 1)
        for n in gpus[4::4]:
            if (prompts * group // 4) % (n // 4 * group):
                continue
            ratio = world / n
            scaled = total * ratio / (1 + min(0.9, max(ratio / 10, 0.1)))
            rates[n] = 1 / (total if n == world else scaled)
        return rates

    return PlacementProblem(
        [
            PlacementStage("rollout", {"gpu": rollout(224)}),
            PlacementStage("inference", {"gpu": trained(10)}, after=("rollout",)),
            PlacementStage("train", {"gpu": trained(101)}, after=("inference",)),
        ],
        [GpuKind("gpu", world)],
        chunks=(prompts,),
    )


def exhaustive(problem: PlacementProblem, objective: Objective) -> float:
    """The least cost of all placements there are, idle GPUs included, by plain enumeration."""
    predictor = Predictor(problem)
    least = math.inf
    for pools in enumerate_groupings(problem):
        per_kind = []
        for kind in problem.kinds:
            numbers = itertools.product(range(kind.gpus + 1), repeat=len(pools))
            per_kind.append([n for n in numbers if sum(n) <= kind.gpus])
        divisions = np.array(list(itertools.product(*per_kind)))
        gpus = [divisions[:, :, p].T for p in range(len(pools))]
        for chunks in problem.chunks if len(pools) > 1 else (1,):
            found = predictor.predict_batch(pools, gpus, chunks)
            total, busy = found.total_s, found.busy_s
            runs = np.isfinite(total)
            if runs.any():
                held = [pool[:, runs] for pool in gpus]
                costs = objective.cost(problem, total[runs], busy[:, runs], held)
                least = min(least, float(costs.min()))
    return least
