"""What is collected has the log-probs that the training stack gives it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from rlinf.data.record import Record
from rlinf.engines.transformers import TransformersConfig, TransformersEngine
from rlinf.envs.base import Episodes
from rlinf.envs.prompts import Prompt, PromptEnvironment
from rlinf.models.causal_lm import CausalLM, CausalLMConfig, load_tokenizer
from stages.collect import collect

CONFIG = CausalLMConfig(hidden=32, layers=2, heads=2, kv_heads=1, intermediate=64)


class Asked(PromptEnvironment):
    """One empty prompt among others."""

    @classmethod
    def describe(cls, config: object) -> dict[str, object]:
        return {"alphabet": "0123456789+="}

    def prompts(self, episodes: Episodes) -> list[Prompt]:
        return [Prompt(text, "") for text in ("12+34=", "", "7=")]

    def score(self, trajectories: Sequence[Record]) -> list[float]:
        return [0.0] * len(trajectories)

    def grade(self, response: str, answer: str) -> float:
        return 0.0


def test_an_empty_prompt_does_not_shift_the_trainers_log_probs(tmp_path: Path) -> None:
    CausalLM.create(CONFIG, {"alphabet": "0123456789+="}, 0, tmp_path)
    engine = TransformersEngine(TransformersConfig(), CausalLM, CONFIG)
    engine.load(tmp_path, 0)
    episodes = Episodes(
        seed=0,
        iteration=0,
        split="train",
        starts=range(3),
        batch=3,
        group_size=2,
        horizon=8,
        temperature=1.0,
    )
    environment = Asked(None, load_tokenizer(tmp_path))
    records = list(collect(environment, engine, episodes, "rollout"))
    policy = CausalLM.load(tmp_path, CONFIG)
    with torch.no_grad():
        outputs = policy.evaluate(policy.collate(records), 1.0)
    assert len(records) == 6
    for i, record in enumerate(records):
        got = outputs.logprobs[i, : len(record)].numpy()
        np.testing.assert_allclose(got, record.steps["logprobs"], atol=2e-5)
