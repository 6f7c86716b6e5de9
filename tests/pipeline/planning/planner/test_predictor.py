"""The closed form of an iteration's time equals stepping through its micro-batches."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.planning.planner.predictor import Predictor
from pipeline.planning.planner.problem import GpuKind, Placement, PlacementProblem, PlacementStage
from tests.pipeline.planning.planner.problems import random_problem


def stepped(problem: PlacementProblem, placement: Placement) -> float:
    """The iteration by its definition: every chunk of every stage, one after another."""
    predictor = Predictor(problem)
    chunks = placement.num_chunks
    pool_of = {s: p for p, pool in enumerate(placement.pools) for s in pool}
    index = {stage.name: s for s, stage in enumerate(problem.stages)}
    free = [0.0] * len(placement.pools)
    done: dict[int, list[float]] = {}
    for s, stage in enumerate(problem.stages):
        pool, gpus = pool_of[s], np.array(placement.gpus_of(s))
        time = float(predictor.duration(s, gpus[:, None])[0])
        shares, clock = [1 / chunks] * chunks, free[pool]
        if len(placement.pools[pool]) > 1:
            time *= 1 + (chunks - 1) * stage.again
            used = [kind.name for kind, n in zip(problem.kinds, gpus, strict=True) if n]
            clock += max((stage.switch_s.get(kind, 0.0) for kind in used), default=0.0)
        elif chunks in stage.lead and chunks > 1:
            ahead = stage.lead[chunks][4 if sum(gpus) >= 4 else 1]
            shares = [ahead, *[(1 - ahead) / (chunks - 1)] * (chunks - 1)]
        ends = []
        for chunk in range(chunks):
            for name in stage.after:
                source = index[name]
                by_chunk = stage.streams and pool_of[source] != pool
                clock = max(clock, done[source][chunk if by_chunk else -1])
            clock += time * shares[chunk]
            ends.append(clock)
        done[s], free[pool] = ends, clock
    total = max(ends[-1] for ends in done.values())
    if problem.sync is not None:
        a, b = (index[name] for name in problem.sync)
        if pool_of[a] != pool_of[b]:
            sent = max(
                problem.sync_s.get((x.name, y.name), 0.0)
                for i, x in enumerate(problem.kinds)
                for j, y in enumerate(problem.kinds)
                if placement.gpus_of(a)[i] and placement.gpus_of(b)[j]
            )
            total = max(total, done[a][-1] + sent)
    return total


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 10**6),
    stages=st.integers(1, 5),
    code=st.lists(st.integers(0, 4), min_size=5, max_size=5),
    chunks=st.sampled_from([1, 2, 3, 8, 32]),
)
def test_the_formula_is_what_stepping_gives(
    seed: int, stages: int, code: list[int], chunks: int
) -> None:
    problem = random_problem(seed, (12, 8), stages)
    groups: dict[int, list[int]] = {}
    for s in range(stages):
        groups.setdefault(code[s], []).append(s)
    pools = tuple(sorted(tuple(pool) for pool in groups.values()))
    rng = np.random.default_rng(seed)
    gpus = tuple((int(n), int(m)) for n, m in rng.integers(0, 6, (len(pools), 2)))
    placement = Placement(pools, gpus, chunks)
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
