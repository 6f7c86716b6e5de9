"""Chunks of actions, and instructions: against a plain loop that takes one action after another."""

from __future__ import annotations

import contextlib
import tempfile
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("gymnasium", reason="the extra 'sims' is not installed")
from rlinf.algorithms.importance_sampling import batch_at_level
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.config import Section, validate
from rlinf.data.batch import TrainingSample, build_step_batch
from rlinf.data.episodes import decode_instruction
from rlinf.data.record import RecordId
from rlinf.data.trajectory import StepRewards, Trajectory, step_fields
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.gym import GymConfig, GymEnvironment
from rlinf.envs.observations import encode_instruction
from rlinf.errors import ConfigError, InputError
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.rewards.base import Reward, RewardResources
from rlinf.rewards.task_rewards import EnvironmentReward, EnvironmentRewardConfig
from rlinf.seeding import generator
from stages.reward import compute_rewards
from stages.rollout import local_rollout_iter

WORDS = "tests.rlinf.envs.speaking_worlds:make"


def collected(
    task: GymConfig,
    chunk: int,
    *,
    horizon: int,
    seed: int = 0,
    split: Any = "train",
    value_level: Any = "chunk",
) -> tuple[list[Trajectory], MLPPolicy]:
    """Experience of three samples with a policy of chunks, and that policy."""
    policy = MLPConfig(hidden=(8,), chunk_size=chunk, value_level=value_level)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        MLPPolicy.create(policy, GymEnvironment.read_spec(task), seed, folder)
        engine = DirectEngine(DirectConfig(), MLPPolicy, policy)
        engine.load(folder, 0)
        with contextlib.closing(GymEnvironment(task, None)) as environment:
            episodes = RolloutRequest(seed, 0, split, range(3), 3, 1, horizon, 1.0)
            records = sorted(
                local_rollout_iter(environment, engine, episodes, "rollout"), key=_identity
            )
        return records, MLPPolicy.load(folder, policy)


def _identity(record: Trajectory) -> RecordId:
    return record.identity


def replayed(task: GymConfig, record: Trajectory, seed: int, split: str) -> dict[str, list[Any]]:
    """What its actions do, one after the other, in a world of one's own."""
    import gymnasium

    world = gymnasium.make(task.id, **task.kwargs)
    columns: dict[str, list[Any]] = {}
    episode, over = 0, True
    for chunk in record.actions:
        if over:
            random = generator(seed, 0, split, "reset", record.identity.sample, episode)
            seen = world.reset(seed=int(random.integers(2**31)))[0]
            episode, over = episode + 1, False
        row = {"observations": seen.astype(np.float32), "rewards": 0.0, "executed": 0}
        gained = row["action_rewards"] = np.zeros(len(chunk))
        ends = (False, False)
        for action in chunk:
            box = hasattr(world.action_space, "low")
            chosen = np.clip(action, world.action_space.low, world.action_space.high) if box else 0
            seen, reward, *ends, _ = world.step(chosen if box else int(action))
            gained[row["executed"]] = reward
            row["rewards"] += float(reward)
            row["executed"] += 1
            if any(ends):
                break
        over = any(ends)
        row |= {"terminated": ends[0], "truncated": ends[1] and not ends[0]}
        for column, value in row.items():
            columns.setdefault(column, []).append(value)
    return columns


@settings(max_examples=12, deadline=None)
@given(
    name=st.sampled_from(["CartPole-v1", "Pendulum-v1"]),
    chunk=st.integers(2, 9),
    limit=st.integers(1, 40),
    double_buffer=st.booleans(),
    split=st.sampled_from(["train", "test"]),
    seed=st.integers(0, 99),
)
def test_a_chunk_is_its_actions_one_after_the_other_to_the_end_of_the_episode(
    name: str, chunk: int, limit: int, double_buffer: bool, split: str, seed: int
) -> None:
    task = GymConfig(id=name, kwargs={"max_episode_steps": limit}, double_buffer=double_buffer)
    records, policy = collected(task, chunk, horizon=8, seed=seed, split=split)
    for record in records:
        for column, expected in replayed(task, record, seed, split).items():
            found = record.to_record().steps[column]
            np.testing.assert_allclose(found, expected, rtol=1e-5, err_msg=column)
        executed, choices = record.num_executed, record.choice_mask
        assert record.actions.shape[1] == chunk
        assert choices.shape == record.logprobs.shape
        for row, count in zip(choices, executed, strict=True):
            assert (row[:count] == 1).all()
            assert (row[count:] == 0).all()
        with torch.no_grad():
            outputs = policy.evaluate(policy.collate([record]), 1.0)
        np.testing.assert_allclose(outputs.logprobs[0], record.logprobs, atol=1e-5)
        if record.num_episodes == 1 and split == "test":
            assert record.episode_length == executed.sum()
            assert record.episode_return == pytest.approx(record.rewards.sum(), rel=1e-4)


@pytest.mark.parametrize(
    "options", [{"num_processes": 2}, {"num_processes": 1, "double_buffer": True}]
)
def test_processes_and_double_buffering_give_the_same_bytes(options: dict[str, Any]) -> None:
    task = GymConfig(id="CartPole-v1")
    one, _ = collected(task, 3, horizon=12)
    other, _ = collected(task.model_copy(update=options), 3, horizon=12)
    for a, b in zip(one, other, strict=True):
        assert a.to_record().digest() == b.to_record().digest()


def test_advantages_of_chunks_are_those_of_their_summed_rewards() -> None:
    """Generalised advantages by their definition, where a step is a whole chunk."""
    gamma, lam = 0.9, 0.8
    task = GymConfig(id="CartPole-v1", kwargs={"max_episode_steps": 21})
    records, _ = collected(task, 4, horizon=14)
    rows = [TrainingSample(r, StepRewards(identity=r.identity, rewards=r.rewards)) for r in records]
    batch = build_step_batch(rows)
    config = PPOConfig(gamma=gamma, gae_lambda=lam, whiten_advantages=False)
    found, _ = PPO(config).compute_advantages(batch)
    kinds = set()
    for n, record in enumerate(records):
        steps = record.to_record().steps
        ends = (steps["terminated"] | steps["truncated"]).astype(bool)
        for t in range(len(record)):
            expected, weight = 0.0, 1.0
            for k in range(t, len(record)):
                last = k + 1 == len(record)
                after = steps["bootstrap"][k] if ends[k] or last else steps["values"][k + 1]
                after = 0.0 if steps["terminated"][k] else after
                expected += weight * (steps["rewards"][k] + gamma * after - steps["values"][k])
                weight *= gamma * lam
                kinds.add((bool(steps["terminated"][k]), bool(steps["truncated"][k])))
                if ends[k]:
                    break
            assert float(found[n, t]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert {(True, False), (False, True)} <= kinds


def test_advantages_of_actions_are_those_of_each_in_turn() -> None:
    """From the simulator's rewards of each, which the reward passes on, to the advantages of all
    that was carried out; after a cut comes the first value of what was shown then."""
    gamma, lam = 0.9, 0.8
    task = GymConfig(id="Pendulum-v1", kwargs={"max_episode_steps": 9})
    records, policy = collected(task, 4, horizon=7, value_level="action")
    reward = EnvironmentReward(EnvironmentRewardConfig(scale=0.1), RewardResources())
    given = compute_rewards(reward, PPO(PPOConfig()), None, records, Counter()).step_rewards
    batch = batch_at_level(build_step_batch(list(map(TrainingSample, records, given))), "action")
    config = PPOConfig(gamma=gamma, gae_lambda=lam, whiten_advantages=False, logprob_level="action")
    found, returns = PPO(config).compute_advantages(batch)
    cuts = 0
    for n, record in enumerate(records):
        steps = record.to_record().steps
        assert steps["values"].shape == (7, 4)
        for at, seen in zip(record.truncation_steps, record.final_observations, strict=True):
            with torch.no_grad():
                result = policy.act({"observation": torch.tensor(seen)[None]}, None, 0.0)["value"]
            assert steps["bootstrap"][at] == pytest.approx(float(result[0, 0]), abs=1e-5)
            cuts += 1
        np.testing.assert_allclose(0.1 * steps["rewards"], given[n].rewards, rtol=1e-5)
        places = [(t, c) for t in range(7) for c in range(int(steps["executed"][t]))]
        assert len(places) < 7 * 4
        for first, begin in enumerate(places):
            expected, weight = 0.0, 1.0
            for k, (t, c) in enumerate(places[first:], first):
                over = c + 1 == steps["executed"][t] and steps["truncated"][t]
                last = k + 1 == len(places)
                after = steps["bootstrap"][t] if over or last else steps["values"][places[k + 1]]
                gain = 0.1 * steps["action_rewards"][t, c]
                expected += weight * (gain + gamma * after - steps["values"][t, c])
                weight *= gamma * lam
                if over:
                    break
            assert float(found[(n, *begin)]) == pytest.approx(expected, rel=1e-4, abs=1e-4)
            wanted = expected + steps["values"][begin]
            assert float(returns[(n, *begin)]) == pytest.approx(wanted, rel=1e-4, abs=1e-4)
    assert cuts > 3
    # A stage between may have changed what chunks are worth, and said nothing of their actions.
    plain = [replace(r, action_rewards=None) for r in given]
    placed = build_step_batch(list(map(TrainingSample, records, plain))).require("action_rewards")
    torch.testing.assert_close(placed.sum(-1), batch.rewards)
    done = torch.tensor(np.stack([record.num_executed for record in records])).long()
    at_last = placed.gather(2, done[..., None] - 1)[..., 0]
    torch.testing.assert_close(at_last, batch.rewards)
    halved = [replace(r, rewards=0.5 * r.rewards) for r in given]
    with pytest.raises(InputError, match="do not add up to 'rewards'; a stage that changes one"):
        build_step_batch(list(map(TrainingSample, records, halved)))
    for record in records:
        record.num_executed = None
    with pytest.raises(InputError, match="several values for a step"):
        build_step_batch(list(map(TrainingSample, records, plain)))


class Given(Reward):
    """What a test says."""

    Config = Section
    needs_score = False
    says: Any = None

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[Any]:
        return [self.says for _ in trajectories]


def test_what_a_chunk_is_worth_lies_on_the_last_action_that_was_carried_out() -> None:
    """Also what a step was given that does not count: it goes to the action before."""
    steps = {
        "actions": np.zeros((4, 3, 1), np.float32),
        "executed": np.array([3, 2, 1, 3], np.int32),
        "mask": np.array([1, 1, 0, 0], np.float32),
    }
    record = Trajectory(identity=RecordId(0, 0), **step_fields(steps))
    reward = Given(Section(), RewardResources())
    each = np.arange(1.0, 13).reshape(4, 3)
    for result, wanted in (
        (5.0, [[0, 0, 0], [0, 5, 0]]),
        (np.array([1.0, 2, 3, 4]), [[0, 0, 1], [0, 9, 0]]),
        # What was left out of a chunk was not carried out: it goes to what came before it, too.
        (each, [[1, 2, 3], [4, 5 + 6 + each[2:].sum(), 0]]),
    ):
        reward.says = result
        (judgement,) = reward.compute_results([record], [])
        assert np.asarray(judgement.reward).tolist() == [*wanted, [0, 0, 0], [0, 0, 0]]
        (rewards,) = reward.compute_step_rewards([record], [])
        assert rewards.dtype == np.float32
        assert rewards.tolist() == [*map(sum, wanted), 0, 0]
    reward.says = np.zeros((4, 2))
    with pytest.raises(InputError, match=r"shape \[4, 2\]; .* 4 steps, or for .* 3 actions"):
        reward.compute_results([record], [])
    none = Trajectory(
        identity=RecordId(0, 0), **step_fields({**steps, "mask": np.zeros(4, np.float32)})
    )
    reward.says = each
    (judgement,) = reward.compute_results([none], [])
    assert np.asarray(judgement.reward).tolist() == [[0, 0, 0]] * 4


@pytest.mark.parametrize("processes", [0, 1])
@pytest.mark.parametrize("values", [True, "stack the plates", False])
def test_an_instruction_reaches_the_policy_and_the_trajectory(
    values: bool | str, processes: int
) -> None:
    """It is that of the moment: this world asks for another thing after every third step."""
    task = GymConfig(simulator=WORDS, id="two", num_processes=processes, instruction=values)
    records, _ = collected(task, 2, horizon=4)
    for record in records:
        if values is False:
            assert record.instruction is None
            continue
        texts = [decode_instruction(row) for row in record.instruction]
        own = ["öffne 0", "öffne 0", "öffne 1", "öffne 2"]
        assert texts == (own if values is True else [values] * 4)


def test_an_instruction_that_is_not_there_or_too_long_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"task\.instruction: CartPole-v1 has no instruction"):
        GymEnvironment.read_spec(GymConfig(id="CartPole-v1", instruction=True))
    with pytest.raises(ConfigError, match=r"task\.instruction: .*300 bytes.*256"):
        validate(GymConfig, {"id": "CartPole-v1", "instruction": "x" * 300}, "task")


@given(st.text(max_size=64))
def test_an_instruction_is_kept_to_the_letter(text: str) -> None:
    text = text.replace("\0", "")
    assert decode_instruction(encode_instruction(text)) == text


@pytest.mark.parametrize("processes", [0, 1])
def test_a_simulator_without_an_expert_has_no_demonstrations(processes: int) -> None:
    task = GymConfig(id="CartPole-v1", demonstrations=2, num_processes=processes)
    with (
        contextlib.closing(GymEnvironment(task, None)) as environment,
        pytest.raises(InputError, match=r"task\.demonstrations: .*no expert"),
    ):
        environment.demonstrations(0, 0, 1)
    assert GymEnvironment(GymConfig(id="CartPole-v1"), None).demonstrations(0, 0, 1) == []
