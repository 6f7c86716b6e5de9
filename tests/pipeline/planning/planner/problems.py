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
    pools_of_jobs,
)
from pipeline.planning.planner.search import enumerate_groupings, gpus_by_job

OBJECTIVES: tuple[Objective, ...] = (IterationTime(), MonetaryCost(), TimeToFinish(20))
NAMES = ("rollout", "reward", "inference", "train", "critic", "teacher", "judge", "search")


def random_problem(
    seed: int, sizes: tuple[int, ...], stages: int, *, smooth: bool = False, beside: bool = False
) -> PlacementProblem:
    """Stages of unlike scaling on kinds of unlike speed; some combinations cannot run.

    Args:
        beside: the first stages may have some GPUs of their job each.
    """
    rng = np.random.default_rng([seed, stages, *sizes])
    kinds = [
        GpuKind(
            f"kind{i}",
            size,
            price=float(rng.uniform(0.5, 4)),
            wait_s=float(rng.choice([0, 60, 900])),
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
                chunk_s=float(rng.choice([0.0, 0.05, 1.0])),
                switch_s={k.name: float(rng.choice([0.0, 3.0, 9.0])) for k in kinds},
                cycle="act" if stages > 2 and s < 2 and seed % 4 == 0 else None,
            )
        )
    if made[0].cycle:
        made[1] = PlacementStage(**{**vars(made[1]), "after": (names[0],)})
    elif (drawn := np.random.default_rng([seed, 1])).random() < 0.5:
        late, again = drawn.random(2)
        shares = {m: 1 / m + late * (1 - 1 / m) for m in (2, 8, 32)}
        lead = {m: {1: share, 4: (1 + share) / 2} for m, share in shares.items()}
        made[0] = replace(made[0], lead=lead, again=float(again))
    if beside:
        made[:-1] = [replace(stage, beside=True) for stage in made[:-1]]
    return PlacementProblem(
        made,
        kinds,
        chunks=(1, 2, 8, 32),
        sync=(names[-1], names[0]),
        sync_s={(a.name, b.name): float(rng.uniform(0, 9)) for a in kinds for b in kinds},
        mixing=float(rng.choice([1.0, 0.9, 0.5])),
        cycle_steps=int(rng.integers(1, 20)),
    )


def random_placement(problem: PlacementProblem, seed: int) -> Placement:
    """Any grouping, any division; some stages may be unable to run."""
    rng = np.random.default_rng([seed, 1])
    groups: dict[int, list[int]] = {}
    for s in range(len(problem.stages)):
        groups.setdefault(int(rng.integers(len(problem.stages))), []).append(s)
    pools = tuple(sorted(tuple(pool) for pool in groups.values()))
    if any(stage.beside for stage in problem.stages):
        # As often two that overlap as none.
        every = enumerate_groupings(problem)
        overlap = [own for own in every if len(pools_of_jobs(own)) < len(own)]
        if overlap and rng.random() < 0.5:
            pools = overlap[int(rng.integers(len(overlap)))]
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


def embodied_case(actor_s: float, *, beside: bool = True) -> PlacementProblem:
    """Four like GPUs: the ManiSkill case of RLinf's placement tool, as its test has it.

    Forty simulators and the policy that acts in them take so many seconds with 10, 20, 30 and 40 of
    them on a GPU; numbers in between as the next one. Simulators are shared out evenly. Training
    takes ``actor_s`` (100 there) on all four and scales as in :func:`public_case`, on 1, 2 or 4; it
    takes the whole batch. An episode has 80 steps.

    Args:
        beside: whether simulators and policy may have some GPUs each before all train.
    """
    world, simulators = 4, 40
    env = {10: 0.8, 20: 0.8, 30: 0.85, 40: 0.85}
    policy = {10: 0.4, 20: 0.6, 30: 0.85, 40: 1.15}

    def acting(seconds: dict[int, float], numbers: tuple[int, ...]) -> np.ndarray:
        rates = np.zeros(world + 1)
        for n in numbers:
            rates[n] = 1 / seconds[min(m for m in seconds if m >= simulators // n)]
        return rates

    actor = np.zeros(world + 1)
    for n in (1, 2, 4):
        ratio = world / n
        actor[n] = (1 + min(0.9, max(ratio / 10, 0.1))) / (actor_s * ratio)
    actor[world] = 1 / actor_s
    return PlacementProblem(
        [
            PlacementStage("simulate", {"gpu": acting(env, (1, 2, 4))}, cycle="act", beside=beside),
            PlacementStage(
                "generate",
                {"gpu": acting(policy, (1, 2, 3, 4))},
                after=("simulate",),
                cycle="act",
                beside=beside,
            ),
            PlacementStage("train", {"gpu": actor}, after=("generate",), streams=False),
        ],
        [GpuKind("gpu", world)],
        chunks=(1, 2, 4, 8),
        sync=("train", "generate"),
        cycle_steps=80,
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
            total = predictor.predict_batch(pools, gpus, chunks).total_s
            runs = np.isfinite(total)
            if runs.any():
                held = [pool[:, runs] for pool in gpus_by_job(pools, gpus)]
                least = min(least, float(objective.cost(problem, total[runs], held).min()))
    return least
