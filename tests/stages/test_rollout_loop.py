"""What is collected has the log-probs that the training stack gives it."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.engines.base import NO_HOOKS, Engine, RolloutHooks
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.envs.base import RolloutRequest
from rlinf.envs.text_environment import Prompt, PromptEnvironment
from rlinf.errors import RequeueRequested
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from stages.rollout import local_rollout_iter

CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


class Questions(PromptEnvironment):
    """One empty prompt among others."""

    @classmethod
    def model_spec(cls, config: object) -> dict[str, object]:
        return {"alphabet": "0123456789+="}

    def prompts(self, episodes: RolloutRequest) -> list[Prompt]:
        return [Prompt(text, "") for text in ("12+34=", "", "7=")]

    def score(self, trajectories: Sequence[Trajectory]) -> list[float]:
        return [0.0] * len(trajectories)

    def grade(self, response: str, answer: str) -> float:
        return 0.0


def test_an_empty_prompt_does_not_shift_the_trainers_log_probs(tmp_path: Path) -> None:
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, tmp_path)
    engine = TransformersEngine(TransformersConfig(), CausalLM, CONFIG)
    engine.load(tmp_path, 0)
    episodes = RolloutRequest(
        seed=0,
        iteration=0,
        split="train",
        group_ids=range(3),
        num_groups=3,
        group_size=2,
        horizon=8,
        temperature=1.0,
    )
    environment = Questions(None, HFFolder(tmp_path).tokenizer)
    records = list(local_rollout_iter(environment, engine, episodes, "rollout"))
    policy = CausalLM.load(tmp_path, CONFIG)
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate(records), 1.0)
    assert len(records) == 6
    for i, record in enumerate(records):
        got = outputs.logprobs[i, : len(record)].numpy()
        np.testing.assert_allclose(got, record.logprobs, atol=2e-5)


class Endless(Engine):
    """Asks its hooks before every token, of which there are as many as it is let."""

    Config = TransformersConfig
    steps = 0

    def __init__(self) -> None:
        pass

    def load(self, folder: Path, version: int) -> None: ...

    def load_state(self, tensors: Any, version: int) -> None: ...

    def close(self) -> None: ...

    def generate(
        self, requests: Any, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Any:
        for request in requests:
            for _ in range(100_000):
                self.steps += 1
                time.sleep(0.001)
                if hooks.should_abort is not None:
                    hooks.should_abort(1, 1)
            yield request


class Waiting(Questions):
    """Shows one trajectory, then waits for the engine."""

    def simulate(self, episodes: RolloutRequest, observations: Any, actions: Any) -> Any:
        observations.put(Record(RecordId(0, 0), {"sample": np.arange(1)}))
        yield Trajectory(identity=RecordId(0, 1), actions=np.zeros(1))
        actions.get()


ONE = RolloutRequest(0, 0, "train", range(1), 1, 1, 8, 1.0)


def test_an_engine_whose_samples_nobody_takes_ends() -> None:
    """A stage that is told to stop would otherwise generate the whole rest of its batch."""
    engine = Endless()
    made = local_rollout_iter(Waiting(None, None), engine, ONE, "rollout")
    next(made)
    began = time.monotonic()
    made.close()
    assert time.monotonic() - began < 20
    assert engine.steps < 50_000


def test_an_engine_ends_when_the_allocation_does() -> None:
    engine = Endless()
    made = local_rollout_iter(
        Waiting(None, None), engine, ONE, "rollout", should_stop=lambda: engine.steps >= 3
    )
    next(made)
    with pytest.raises(RequeueRequested, match="rollout: stopping with 1 of 1 samples left"):
        next(made)
    assert engine.steps == 3
