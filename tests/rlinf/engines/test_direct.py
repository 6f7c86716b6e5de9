"""One forward pass per step: log-probs of the training stack, right frequencies, own randomness."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from rlinf.channels.channel import LocalChannel
from rlinf.config import Section
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines.base import NO_HOOKS, RolloutHooks
from rlinf.engines.direct import DirectConfig, DirectEngine
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.base import ModelSpec, Policy
from rlinf.registry import SINGLE_PASS_ACTIONS

CONFIG = MLPConfig(hidden=(8,), initial_log_std=-0.5)
ACTIONS = {"discrete": {"kind": "discrete", "size": 3}, "box": {"kind": "box", "size": 2}}


@pytest.fixture(params=["discrete", "box"])
def engine(request: pytest.FixtureRequest, tmp_path: Path) -> DirectEngine:
    return make(request.param, tmp_path)


def make(kind: str, folder: Path, version: int = 3) -> DirectEngine:
    MLPPolicy.create(CONFIG, {"observation": 4, "action": ACTIONS[kind]}, 0, folder)
    policy = MLPPolicy.load(folder, CONFIG)
    with torch.no_grad():
        # The first policy is almost uniform; make its preferences visible.
        policy.module.policy[-1].weight.mul_(100)
    policy.save(folder, dict(policy.module.state_dict()))
    made = DirectEngine(DirectConfig(), MLPPolicy, CONFIG)
    made.load(folder, version)
    return made


def ask(
    engine: DirectEngine,
    samples: Any,
    observations: np.ndarray,
    time: int = 0,
    temperature: float = 1.0,
    iteration: int = 0,
    seed: int = 7,
    stage: str = "rollout",
    hooks: RolloutHooks = NO_HOOKS,
) -> dict[str, np.ndarray]:
    wanted = Record(
        RecordId(iteration, 0),
        {"sample": np.asarray(samples), "observation": observations},
        info={"time": time, "horizon": 5, "temperature": temperature},
    )
    channel = LocalChannel()
    channel.put(wanted)
    channel.close()
    (reply,) = engine.generate(channel, seed=seed, stage=stage, hooks=hooks)
    assert reply.info["version"] == 3
    assert reply.steps["sample"].tolist() == list(samples)
    return reply.steps


def seen(count: int) -> np.ndarray:
    return np.random.default_rng(0).normal(size=(count, 4)).astype(np.float32)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_and_values_are_those_of_the_training_stack(
    engine: DirectEngine, temperature: float
) -> None:
    got = ask(engine, range(12), seen(12), temperature=temperature)
    policy = engine._policy
    record = Trajectory(identity=RecordId(0, 0), observations=seen(12), actions=got["action"])
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate([record]), temperature)
    np.testing.assert_allclose(got["logprob"], outputs.logprobs[0], atol=1e-5)
    np.testing.assert_allclose(got["value"], outputs.values[0], atol=1e-5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_choices_have_the_right_frequencies(tmp_path: Path, temperature: float) -> None:
    engine, count = make("discrete", tmp_path), 8000
    same = seen(1).repeat(count, axis=0)
    got = ask(engine, range(count), same, temperature=temperature)
    with torch.no_grad():
        logits = engine._policy.module(torch.from_numpy(same[:1]))[0][0]
    expected = (logits / temperature).softmax(-1).numpy()
    shares = np.bincount(got["action"], minlength=3) / count
    np.testing.assert_allclose(shares, expected, atol=4 * 0.5 / count**0.5)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_vectors_have_the_right_mean_and_deviation(tmp_path: Path, temperature: float) -> None:
    engine, count = make("box", tmp_path), 8000
    same = seen(1).repeat(count, axis=0)
    actions = ask(engine, range(count), same, temperature=temperature)["action"]
    with torch.no_grad():
        mean, log_std, _ = engine._policy.module(torch.from_numpy(same[:1]))
    deviation = log_std.detach().exp().numpy() * temperature
    np.testing.assert_allclose(actions.mean(0), mean[0], atol=5 * deviation.max() / count**0.5)
    np.testing.assert_allclose(actions.std(0), deviation, rtol=0.05)


def test_randomness_does_not_depend_on_what_was_asked_before(tmp_path: Path) -> None:
    engine, fresh = (make("box", tmp_path) for _ in range(2))
    for time in (4, 1, 0):
        ask(engine, range(3), seen(3), time)
    ask(engine, range(6), seen(6), 2, iteration=5)
    a, b = (ask(one, range(3), seen(3), 3)["action"] for one in (engine, fresh))
    np.testing.assert_array_equal(a, b)


def test_every_part_of_the_address_changes_the_draw(tmp_path: Path) -> None:
    engine, same = make("box", tmp_path), seen(1)
    draws = [
        ask(engine, [0], same),
        ask(engine, [1], same),
        ask(engine, [0], same, time=1),
        ask(engine, [0], same, iteration=1),
        ask(engine, [0], same, seed=8),
        ask(engine, [0], same, stage="evaluate"),
    ]
    assert len({draw["action"].tobytes() for draw in draws}) == len(draws)


def test_loading_changes_what_is_served(tmp_path: Path) -> None:
    engine = make("box", tmp_path)
    before = ask(engine, range(3), seen(3), temperature=0.0)["action"]
    policy = MLPPolicy.load(tmp_path, CONFIG)
    with torch.no_grad():
        policy.module.policy[-1].bias += 1
    policy.save(tmp_path, dict(policy.module.state_dict()))
    engine.load(tmp_path, 3)
    after = ask(engine, range(3), seen(3), temperature=0.0)["action"]
    np.testing.assert_allclose(after, before + 1, atol=1e-6)


def test_it_does_not_import_transformers() -> None:
    import subprocess

    modules = "rlinf.engines.direct, rlinf.models.actor_critic"
    code = f"import sys, {modules}; print('transformers' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


def test_newer_weights_answer_the_next_time_step(tmp_path: Path) -> None:
    for name in ("old", "new"):
        (tmp_path / name).mkdir()
    engine, other = make("box", tmp_path / "old"), make("box", tmp_path / "new")
    policy = MLPPolicy.load(tmp_path / "new", CONFIG)
    with torch.no_grad():
        policy.module.policy[-1].bias.add_(1.0)
    policy.save(tmp_path / "new", dict(policy.module.state_dict()))
    other.load(tmp_path / "new", 3)
    waiting = [None, (tmp_path / "new", 3)]
    hooks = RolloutHooks(newer_weights=lambda: waiting.pop(0) if waiting else None)
    plain = make("box", tmp_path / "old")
    for time, expected in enumerate([plain, other, other]):
        got = ask(engine, range(3), seen(3), time, hooks=hooks)
        assert got["version"].tolist() == [3, 3, 3]
        np.testing.assert_array_equal(
            got["action"], ask(expected, range(3), seen(3), time)["action"]
        )


class Chunks(Policy):
    """Sees a picture and a text, acts in chunks of two vectors drawn by a chain of two steps."""

    Config = Section
    provides = frozenset({SINGLE_PASS_ACTIONS})

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    @classmethod
    def create(cls, config: Any, spec: ModelSpec, seed: int, folder: Path) -> None:
        raise AssertionError

    @classmethod
    def processor(cls, folder: Path, config: Any) -> None:
        return None

    @classmethod
    def load(cls, folder: Path, config: Any) -> Chunks:
        torch.manual_seed(0)
        return cls(nn.Linear(12, 6))

    def save(self, folder: Path, tensors: dict[str, torch.Tensor]) -> None:
        raise AssertionError

    def collate(self, records: Any) -> Any:
        raise AssertionError

    def evaluate(self, batch: Any, temperature: float, *, entropy: bool = False) -> Any:
        raise AssertionError

    def draw_noise(self, random: np.random.Generator, steps: int) -> np.ndarray:
        return random.standard_normal((steps, 2, 2, 3), dtype=np.float32)

    def act(
        self, observations: Any, noise: torch.Tensor | None, temperature: float
    ) -> dict[str, torch.Tensor]:
        picture, text = observations["image"], observations["instruction"]
        mean = (
            self.module(picture.float().flatten(1) / 255).view(-1, 2, 3)
            + text.sum(1)[:, None, None]
        )
        drawn = torch.zeros(len(mean), 2, 2, 3) if noise is None else noise * temperature
        chain = mean[:, None] + drawn.cumsum(1)
        logprob = -0.5 * drawn.square().sum((1, 2, 3))
        return {"action": chain[:, -1], "logprob": logprob, "chain": chain}


def test_a_policy_of_pictures_text_and_chunks_needs_no_engine_of_its_own(tmp_path: Path) -> None:
    made = DirectEngine(DirectConfig(), Chunks, Section())
    made.load(tmp_path, 5)
    random = np.random.default_rng(0)
    steps = {
        "sample": np.arange(5),
        "image": random.integers(0, 255, (5, 3, 2, 2), dtype=np.uint8),
        "instruction": random.integers(0, 9, (5, 4)),
    }

    def answer(rows: list[int], temperature: float = 1.0) -> dict[str, np.ndarray]:
        channel = LocalChannel()
        info = {"time": 1, "horizon": 3, "temperature": temperature}
        channel.put(Record(RecordId(0, 0), {n: c[rows] for n, c in steps.items()}, info=info))
        channel.close()
        (reply,) = made.generate(channel, seed=1, stage="rollout")
        assert reply.info["version"] == 5
        return reply.steps

    whole, part = answer([0, 1, 2, 3, 4]), answer([3, 1])
    assert {name: c.shape for name, c in whole.items()} == {
        "sample": (5,), "action": (5, 2, 3), "logprob": (5,), "chain": (5, 2, 2, 3),
    }  # fmt: skip
    for name, column in part.items():
        np.testing.assert_array_equal(column, whole[name][[3, 1]])
    drawn = np.diff(whole["chain"], axis=1)[:, 0]
    assert len(np.unique(drawn)) == drawn.size, "samples have noise of their own"
    assert not answer([0, 1], 0.0)["logprob"].any()
