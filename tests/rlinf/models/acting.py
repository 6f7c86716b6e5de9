"""Trajectories of policies that see pictures and an instruction, as an engine makes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch

from rlinf.algorithms.learner import Learner
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.channels.channel import LocalChannel
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.batch import TrainingSample
from rlinf.data.episodes import INSTRUCTION_COLUMN
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import PolicyOutputs, StepRewards, Trajectory, info_fields, step_fields
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.envs.episode_runner import TRAJECTORY_NAMES
from rlinf.envs.observations import encode_instruction
from rlinf.sharded_tensors import local_shard
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks

SPEC: dict[str, Any] = {
    "observation": 5,
    "action": {"kind": "box", "size": 3},
    "images": {"front": [16, 24], "wrist": [16, 24]},
}
TEXTS = ("reach", "push the block to the left")
SHARED = """
import sys
from pathlib import Path
import torch
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.trainers.base import loss_from_steps
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.rlinf.trainers.ranks import run_ranks
from tests.rlinf.models.acting import rolled_out
from {module} import {name}
from {test} import SIZES

folder, rank, config = Path(sys.argv[1]), int(sys.argv[2]), {name}.Config(**SIZES)
records = rolled_out({name}, config, folder)

def stepped(world):
    options = FSDPConfig(device="cpu", fsdp_wrap_min_mb=0, max_tokens_per_microbatch=400)
    policy = {name}.load(folder, config)
    trainer = FSDPTrainer(policy, options, OptimizerSection(), world)
    loss = loss_from_steps(
        lambda outputs, spans: (1e-3 * outputs.logprobs.square().sum(), dict())
    )
    trainer.step(records, loss, lr=1e-3)
    return trainer.full_state_dict()

shared = stepped(ProcessGroupInfo(rank, 2, rendezvous_file=folder / "channels" / "group-t.json"))
alone, first = stepped(ProcessGroupInfo()), {name}.load(folder, config).module.state_dict()
assert any(not torch.equal(first[n], t) for n, t in alone.items())
assert alone.keys() == shared.keys() == first.keys()
# Attention does not depend on biases of keys: their gradient is rounding, of either sign.
names = [name for name in alone if not name.endswith(("k_proj.bias", "to_k.bias"))]
wrong = [n for n in names if not torch.allclose(shared[n], alone[n], atol=1e-5)]
assert not wrong, wrong
print("ok")
"""


def stirred(policy: Any) -> None:
    """Add to all weights, so that what began at zero or one matters too; always the same."""
    random = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in policy.module.parameters():
            tensor.add_(0.1 * torch.randn(tensor.shape, generator=random))


def request(count: int, time: int, temperature: float = 1.0, seed: int = 0) -> Record:
    random = np.random.default_rng(seed)
    steps: dict[str, Any] = {
        "sample": np.arange(count),
        "observation": random.normal(size=(count, 5)).astype(np.float32),
        INSTRUCTION_COLUMN: np.stack([encode_instruction(TEXTS[i % 2]) for i in range(count)]),
    }
    for camera, (height, width) in SPEC["images"].items():
        steps[f"images.{camera}"] = random.integers(0, 256, (count, height, width, 3), np.uint8)
    info: dict[str, Any] = {"time": time, "horizon": 3, "temperature": temperature}
    return Record(RecordId(0, 0), steps, info=info)


def rolled_out(cls: Any, config: Any, folder: Path, temperature: float = 1.0) -> list[Trajectory]:
    """Trajectories of three steps of five samples, by the engine."""
    engine = DirectEngine(DirectConfig(), cls, config)
    engine.load(folder, 0)
    requests = [request(5, time, temperature, time) for time in range(3)]
    channel = LocalChannel()
    for each in requests:
        channel.put(each)
    channel.close()
    replies = list(engine.generate(channel, seed=3, stage="rollout"))
    records = []
    for row in range(5):
        steps: dict[str, Any] = {}
        for ask, reply in zip(requests, replies, strict=True):
            seen = {**ask.steps, "observations": ask.steps["observation"], **reply.steps}
            for name, column in seen.items():
                steps.setdefault(TRAJECTORY_NAMES.get(name, name), []).append(column[row])
        columns = {name: np.stack(column) for name, column in steps.items()}
        columns["submask"] = np.ones_like(columns["logprobs"], np.uint8)
        columns["executed"] = np.full(3, columns["actions"].shape[1], np.int32)
        info: dict[str, Any] = {"group": row, "policy_version": 0}
        records.append(
            Trajectory(identity=RecordId(0, row), **step_fields(columns), **info_fields(info))
        )
    return records


def trainer(cls: Any, config: Any, folder: Path, **options: Any) -> FSDPTrainer:
    return FSDPTrainer(
        cls.load(folder, config),
        FSDPConfig(max_tokens_per_microbatch=400, device="cpu", **options),
        OptimizerSection(lr=1e-3),
        ProcessGroupInfo(),
    )


def assert_shares_learn_what_one_learns(cls: Any, test: str, folder: Path) -> None:
    """Two processes that share a policy out learn what one learns; ``test`` has its sizes."""
    run_ranks(SHARED.format(module=cls.__module__, name=cls.__name__, test=test), 2, folder)


def rewarded(records: list[Trajectory]) -> list[TrainingSample]:
    """With rewards of some kind."""
    random = np.random.default_rng(0)
    return [
        TrainingSample(
            record,
            StepRewards(identity=record.identity, rewards=random.normal(size=3).astype(np.float32)),
            PolicyOutputs(identity=record.identity),
        )
        for record in records
    ]


def assert_recomputed(learns: FSDPTrainer, records: list[Trajectory], temperature: float) -> None:
    """The trainer says of trajectories what the engine said as it made them."""
    for row, outputs in learns.forward(records, temperature):
        sampled = records[row].logprobs
        np.testing.assert_allclose(outputs.logprobs.numpy(), sampled, atol=1e-5)
        assert outputs.values is not None
        np.testing.assert_allclose(outputs.values.numpy(), records[row].values, atol=1e-5)


def assert_values_of_actions(cls: Any, config: Any, folder: Path) -> None:
    """What was said of each action is recomputed and learned from."""
    records = rolled_out(cls, config, folder)
    values = records[0].values
    assert values.shape == (3, 4)
    assert np.ptp(values, axis=1).min() > 1e-3
    learns = trainer(cls, config, folder)
    assert_recomputed(learns, records, 1.0)
    random, before = np.random.default_rng(0), cls.load(folder, config).module.state_dict()
    samples = []
    for sample in rewarded(records):
        each = random.normal(size=(3, 4)).astype(np.float32)
        identity = sample.trajectory.identity
        reward = StepRewards(identity=identity, rewards=each.sum(1), action_rewards=each)
        samples.append(sample._replace(reward=reward))
    settings = PPOConfig(logprob_level="action", old_logprobs="rollout", value_loss_coef=1.0)
    learner = Learner(learns, {"policy": 1e-3, "value": 1e-3}, temperature=1.0)
    PPO(settings).update(learner, [samples])
    head = learns.policy.module.state_dict()["value_head.fc2.weight"]
    changed = (local_shard(head) - before["value_head.fc2.weight"]).abs().amax(1)
    assert changed.shape == (4,)
    assert (changed > 1e-4).all(), "each action's value learns"
    learns.close()


def assert_values_begin_anew(cls: Any, folder: Path, state: dict[str, Any]) -> None:
    """A policy that values chunks of four actions, in ``folder / "one"``, is a start for one that
    values their actions, and that for one of chunks; all else is taken over."""
    for level, size, source in (("action", 4, "one"), ("chunk", 1, "action_saved")):
        config = cls.Config(path=folder / source, value_level=level)
        first, saved = folder / level, folder / f"{level}_saved"
        first.mkdir()
        saved.mkdir()
        cls.create(config, SPEC, 5, first)
        policy = cls.load(first, config)
        found = policy.module.state_dict()
        assert found["value_head.fc2.weight"].shape[0] == size
        assert not found["value_head.fc2.weight"].any(), "it begins anew, at zero"
        assert all(torch.equal(t, state[n]) for n, t in found.items() if "value_head.fc2" not in n)
        policy.save(saved, found)
        again = cls.load(saved, config).module.state_dict()
        assert all(torch.equal(t, found[n]) for n, t in again.items())


def assert_first_update(learns: FSDPTrainer, records: list[Trajectory], level: Any) -> None:
    """Before any step the policy is that which sampled, and there is something to learn."""
    learner = Learner(learns, {"policy": 1e-3, "value": 1e-3}, temperature=1.0)
    algorithm = PPO(PPOConfig(logprob_level=level, old_logprobs="rollout", value_loss_coef=0.0))
    algorithm.update(learner, [rewarded(records)])
    found = learner.metrics
    # Advantages have a mean of zero, and every ratio is one.
    assert abs(found["policy_loss"]) < 1e-5
    assert found["clip_ratio"] == 0
    assert found["approx_kl"] < 1e-7
    assert found["grad_norm"] > 1e-2
