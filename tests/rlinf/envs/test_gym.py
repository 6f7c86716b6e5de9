"""Simulate and generate exchange records; the same address gives the same experience."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from rlinf.data.record import Record
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import Episodes
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.errors import ConfigError
from rlinf.models.mlp import MLPConfig, MLPPolicy

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from stages.collect import collect

POLICY = MLPConfig(hidden=(16,))


@pytest.fixture(params=["CartPole-v1", "Pendulum-v1"])
def parts(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[GymEnvironment, DirectEngine]:
    task = GymConfig(id=request.param)
    MLPPolicy.create(POLICY, GymEnvironment.describe(task), 0, tmp_path)
    engine = DirectEngine(DirectConfig(), MLPPolicy, POLICY)
    engine.load(tmp_path, 4)
    return GymEnvironment(task, None), engine


def run(
    parts: tuple[GymEnvironment, DirectEngine], starts: range, split: str = "train"
) -> list[Record]:
    episodes = Episodes(1, 2, split, starts, 4, 1, 40, 1.0 if split == "train" else 0.0)  # type: ignore[arg-type]
    return sorted(collect(*parts, episodes, "rollout"), key=lambda record: record.identity)


def test_trajectories_are_those_of_a_plain_loop_over_their_own_policy(
    parts: tuple[GymEnvironment, DirectEngine],
) -> None:
    import torch

    _, engine = parts
    for record in run(parts, range(3)):
        assert len(record) == 40
        assert record.info["policy_version"] == 4
        policy = engine._policy
        with torch.no_grad():
            outputs = policy.evaluate(policy.collate([record]), 1.0)
        np.testing.assert_allclose(outputs.logprobs[0], record.steps["logprobs"], atol=1e-5)
        np.testing.assert_allclose(outputs.values[0], record.steps["values"], atol=1e-5)
        cut = record.steps["bootstrap"] != 0
        assert not np.any(cut & (record.steps["terminated"] == 1)), "no value after a real end"
        if not record.steps["terminated"][-1]:
            assert cut[-1], "an open segment is bootstrapped"


def test_experience_does_not_depend_on_who_collects_it(
    parts: tuple[GymEnvironment, DirectEngine],
) -> None:
    whole = run(parts, range(4))
    pieces = run(parts, range(0, 4, 2)) + run(parts, range(1, 4, 2))
    for a, b in zip(whole, sorted(pieces, key=lambda r: r.identity), strict=True):
        assert a.identity == b.identity
        for name in a.steps:
            np.testing.assert_allclose(a.steps[name], b.steps[name], atol=1e-5)


def test_evaluation_plays_one_episode_with_the_best_action(
    parts: tuple[GymEnvironment, DirectEngine],
) -> None:
    first, second = run(parts, range(3), "test"), run(parts, range(3), "test")
    assert [r.info for r in first] == [r.info for r in second]
    for record in first:
        assert record.info["episodes"] <= 1
        assert record.info["return"] == pytest.approx(
            float(record.steps["rewards"].sum()), rel=1e-4
        )


def test_an_unknown_environment_is_a_configuration_error() -> None:
    with pytest.raises(ConfigError, match=r"task\.id"):
        GymEnvironment.describe(GymConfig(id="CartPoel-v1"))


def test_a_text_task_does_not_fit_an_mlp() -> None:
    with pytest.raises(ConfigError, match="observation vectors"):
        MLPPolicy.check(POLICY, {"alphabet": "01"})


def test_observation_statistics_follow_all_batches() -> None:
    policy_settings = {"observation": 3, "action": {"kind": "discrete", "size": 2}}
    from rlinf.data.record import Identity
    from rlinf.models.mlp import ActorCritic

    settings = {**policy_settings, **MLPConfig(normalise_observations=True).model_dump(mode="json")}
    policy = MLPPolicy(ActorCritic(settings), settings)
    seen = np.random.default_rng(0).normal(3, 2, size=(100, 3)).astype(np.float32)
    for part in (seen[:30], seen[30:]):
        policy.observe([Record(Identity(0, 0), {"observations": part})])
    np.testing.assert_allclose(policy.module.mean, seen.mean(0), rtol=1e-5)
    np.testing.assert_allclose(policy.module.square, seen.var(0), rtol=1e-4)
