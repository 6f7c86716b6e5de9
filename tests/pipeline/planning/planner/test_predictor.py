"""The closed form of an iteration's time equals stepping through its micro-batches."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.planner.predictor import Predictor, lockstep_groups
from pipeline.planning.planner.problem import GpuKind, Placement, PlacementProblem, PlacementStage
from tests.pipeline.planning.planner.problems import random_placement, random_problem


def stepped(problem: PlacementProblem, placement: Placement) -> float:
    """The iteration by its definition: every micro-batch of every stage, one after another."""
    predictor = Predictor(problem)
    chunks = placement.num_chunks
    pools_of = {
        s: {p for p, pool in enumerate(placement.pools) if s in pool}
        for s in range(len(problem.stages))
    }
    index = {stage.name: s for s, stage in enumerate(problem.stages)}
    gpus = {s: np.array(placement.gpus_of(s)) for s in pools_of}
    free = [0.0] * len(placement.pools)
    done: dict[int, list[float]] = {}
    for group in lockstep_groups(problem):
        sums: dict[frozenset[int], float] = {}
        for s in group:
            alone = float(predictor.duration(s, gpus[s][:, None])[0])
            where = frozenset(pools_of[s])
            sums[where] = sums.get(where, 0.0) + alone
        here = set().union(*sums)
        slowest, whole = max(sums.values()), sum(sums.values())
        if len(sums) == 1:
            time = whole
        else:
            # The last half leaves the first step behind the other: two at a time, or the slowest.
            step = max(slowest, whole / 2)
            time = step + min(slowest, whole - slowest) / (2 * problem.cycle_steps)
        neighbours = [
            (index[name], s)
            for s, stage in enumerate(problem.stages)
            for name in stage.after
            if (s in group) != (index[name] in group) and not pools_of[s] & pools_of[index[name]]
        ]
        streamed = any(problem.stages[s].streams for _, s in neighbours)
        passed = chunks if streamed else min(1, len(neighbours))
        first, shares = problem.stages[group[0]], [1 / chunks] * chunks
        # Of what takes its turns here those that have several pools come when the others are done.
        most = max(len(pools_of[s]) for s in group)
        others = [s for p in here for s in placement.pools[p] if s not in group]
        if any(len(pools_of[s]) <= most for s in others):
            time *= 1 + (chunks - 1) * first.again
        elif chunks in first.lead and chunks > 1:
            held = sum(gpus[group[0]])
            ahead = first.lead[chunks][4 if held >= 4 else 1]
            shares = [ahead, *[(1 - ahead) / (chunks - 1)] * (chunks - 1)]
        overhead = passed * max(problem.stages[s].chunk_s for s in group) / chunks
        clock = 0.0
        for pool in here:
            change = 0.0
            if not set(placement.pools[pool]) <= set(group):
                for k, kind in enumerate(problem.kinds):
                    if placement.gpus[pool][k]:
                        each = (
                            problem.stages[s].switch_s.get(kind.name, 0.0)
                            for s in group
                            if pool in pools_of[s]
                        )
                        change = max(change, sum(each))
            clock = max(clock, free[pool] + change)
        ends = []
        for chunk in range(chunks):
            for s in group:
                for name in problem.stages[s].after:
                    source = index[name]
                    if source in group:
                        continue
                    streamed = problem.stages[s].streams and not pools_of[source] & pools_of[s]
                    clock = max(clock, done[source][chunk if streamed else -1])
            clock += time * shares[chunk] + overhead
            ends.append(clock)
        for s in group:
            done[s] = ends
        for pool in here:
            free[pool] = clock
    total = max(ends[-1] for ends in done.values())
    if problem.sync is not None:
        a, b = (index[name] for name in problem.sync)
        if not pools_of[a] & pools_of[b]:
            sent = max(
                problem.sync_s.get((x.name, y.name), 0.0)
                for i, x in enumerate(problem.kinds)
                for j, y in enumerate(problem.kinds)
                if gpus[a][i] and gpus[b][j]
            )
            total = max(total, done[a][-1] + sent)
    return total


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(1, 5),
    code=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunks=st.sampled_from([1, 2, 3, 8, 32]),
    beside=st.booleans(),
)
def test_the_formula_is_what_stepping_gives(
    seed: int, stages: int, code: list[int], chunks: int, beside: bool
) -> None:
    problem = random_problem(seed, (12, 8), stages, beside=beside)
    groups: dict[int, list[int]] = {}
    for s in range(stages):
        groups.setdefault(code[s], []).append(s)
    pools = tuple(sorted(tuple(pool) for pool in groups.values()))
    rng = np.random.default_rng(seed)
    gpus = tuple((int(n), int(m)) for n, m in rng.integers(0, 6, (len(pools), 2)))
    placement = Placement(pools, gpus, chunks)
    if beside:
        placement = replace(random_placement(problem, sum(code)), num_chunks=chunks)
    predicted = float(Predictor(problem).predict(placement).total_s)
    if np.isfinite(predicted):
        assert predicted == pytest.approx(stepped(problem, placement), rel=1e-9)


def test_a_stage_without_gpus_never_ends() -> None:
    problem = PlacementProblem(
        [PlacementStage("train", {"a": np.array([0.0, 1.0])})], [GpuKind("a", 1)], sync=None
    )
    assert np.isinf(Predictor(problem).predict(Placement(((0,),), ((0,),), 1)).total_s)


def test_unlike_gpus_add_their_speeds_but_for_the_loss_of_mixing() -> None:
    problem = PlacementProblem(
        [PlacementStage("train", {"a": np.array([0.0, 0.25]), "b": np.array([0.0, 0.75])})],
        [GpuKind("a", 1), GpuKind("b", 1)],
        sync=None,
        mixing=0.9,
    )
    time = Predictor(problem).predict(Placement(((0,),), ((1, 1),), 1)).total_s
    assert time == pytest.approx(1 / 0.9)


def chain(*seconds: float, **problem: object) -> PlacementProblem:
    """Stages one after the other, each on one GPU of a kind of its own."""
    names = [f"s{i}" for i in range(len(seconds))]
    stages = [
        PlacementStage(
            name,
            {name: np.array([0.0, 1 / s])},
            after=(names[i - 1],) if i else (),
            chunk_s=1.0,
            cycle="act",
        )
        for i, (name, s) in enumerate(zip(names, seconds, strict=True))
    ]
    return PlacementProblem(stages, [GpuKind(name, 1) for name in names], sync=None, **problem)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "steps", "expected"),
    [((8, 4), 1, 10), ((8, 4), 4, 8.5), ((6, 6, 6), 1, 12), ((6, 6, 6), 3, 10), ((9, 2, 2), 1, 11)],
)
def test_halves_of_a_cycle_swap_places(
    seconds: tuple[int, ...], steps: int, expected: float
) -> None:
    """Three sides that are alike cannot all be busy with two halves."""
    problem = chain(*seconds, cycle_steps=steps)
    count = len(seconds)
    alone = tuple((s,) for s in range(count))
    gpus = tuple(tuple(int(k == s) for k in range(count)) for s in range(count))
    assert Predictor(problem).predict(Placement(alone, gpus, 8)).total_s == pytest.approx(expected)


def test_only_what_passes_between_pools_costs_overhead() -> None:
    rates = {"a": np.array([0.0, 0.1, 0.1])}
    names = ("rollout", "reward", "train")
    for streams, overhead in ((True, 8.0), (False, 1.0)):
        stages = [
            PlacementStage(
                name, rates, (names[i - 1],) if i else (), streams=streams or i < 2, chunk_s=1.0
            )
            for i, name in enumerate(names)
        ]
        problem = PlacementProblem(stages, [GpuKind("a", 2)], sync=None)
        found = Predictor(problem).predict(Placement(((0, 1), (2,)), ((1,), (1,)), 8))
        alone = found.finish_s - found.start_s
        assert alone[:2] == pytest.approx([10, 10 + overhead])


def test_weights_move_beside_what_ends_later() -> None:
    rates = {"a": np.array([0.0, 0.1])}
    critic = {"a": np.array([0.0, 0.05])}
    stages = [
        PlacementStage("rollout", {"b": rates["a"]}),
        PlacementStage("train", rates, ("rollout",)),
        PlacementStage("critic", {"c": critic["a"]}, ("rollout",)),
    ]
    problem = PlacementProblem(
        stages,
        [GpuKind("a", 1), GpuKind("b", 1), GpuKind("c", 1)],
        chunks=(1,),
        sync_s={("a", "b"): 4.0},
    )
    placement = Placement(((0,), (1,), (2,)), ((0, 1, 0), (1, 0, 0), (0, 0, 1)), 1)
    assert Predictor(problem).predict(placement).total_s == pytest.approx(30)


def test_a_pipeline_of_two_equal_stages_halves_the_time_as_pieces_get_small() -> None:
    rates = {"a": np.array([0.0, 0.1])}
    problem = PlacementProblem(
        [
            PlacementStage("rollout", rates),
            PlacementStage("train", {"b": rates["a"]}, after=("rollout",)),
        ],
        [GpuKind("a", 1), GpuKind("b", 1)],
        chunks=(1, 1000),
        sync=None,
    )
    times = [
        float(Predictor(problem).predict(Placement(((0,), (1,)), ((1, 0), (0, 1)), m)).total_s)
        for m in (1, 1000)
    ]
    assert times == pytest.approx([20.0, 10.01])
