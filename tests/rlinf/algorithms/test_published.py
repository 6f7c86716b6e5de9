"""Advantages and losses are those of a published implementation, on the same numbers.

``verl_0_9_1.json`` has the inputs, what verl's functions made of them, and each call. A group of
one is not among them: verl takes its reward for its advantage, which here is zero.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from rlinf.algorithms import algorithms
from rlinf.algorithms.group_relative import GRPO
from rlinf.algorithms.losses import clipped_value_loss, kl_loss, loss_agg_weights
from rlinf.algorithms.policy_gradient import PolicyGradientConfig
from rlinf.data.batch import StepBatch
from rlinf.models.base import StepOutputs

PUBLISHED = json.loads((Path(__file__).parent / "verl_0_9_1.json").read_text())
GIVEN = {
    name: torch.tensor(rows, dtype=torch.float64) for name, rows in PUBLISHED["inputs"].items()
}
MASK = GIVEN["mask"]


def reference(name: str) -> Tensor:
    return torch.tensor(PUBLISHED["outputs"][name]["value"], dtype=torch.float64)


def alike(found: Tensor, name: str) -> None:
    torch.testing.assert_close(found.detach(), reference(name), atol=1e-6, rtol=1e-5)


def batch(rewards: str) -> StepBatch:
    zeros = torch.zeros_like(MASK)
    # The last step that counts is the end of a response.
    last = MASK * (MASK.cumsum(1) == MASK.sum(1, keepdim=True))
    return StepBatch(
        mask=MASK,
        rewards=GIVEN[rewards],
        groups=GIVEN["groups"].long(),
        old_logprobs=GIVEN["old_logprobs"],
        reference_logprobs=GIVEN["reference_logprobs"],
        values=GIVEN["values"],
        advantages=GIVEN["advantages"],
        terminated=last,
        truncated=zeros,
        bootstrap_values=zeros,
    )


@pytest.mark.parametrize(
    ("name", "algorithm", "settings", "rewards"),
    [
        ("grpo", "grpo", {}, "rewards"),
        ("dr_grpo", "grpo", {"norm_adv_by_std": False}, "rewards"),
        ("rloo", "rloo", {}, "rewards"),
        ("reinforce_plus_plus", "reinforce_plus_plus", {"gamma": 0.9}, "dense"),
        ("reinforce_plus_plus_baseline", "reinforce_plus_plus_baseline", {}, "rewards"),
        ("gae", "ppo", {"gamma": 0.9, "gae_lambda": 0.8}, "dense"),
    ],
)
def test_advantages(name: str, algorithm: str, settings: dict[str, Any], rewards: str) -> None:
    cls = algorithms.get(algorithm)
    found = cls(cls.Config(**settings)).with_advantages(batch(rewards))
    alike(found.require("advantages"), name)
    if name == "gae":
        alike(found.require("returns"), "gae_returns")


@pytest.mark.parametrize("aggregation", ["token_mean", "seq_mean_token_mean", "seq_mean_token_sum"])
def test_the_surrogate_clipped_twice(aggregation: Any) -> None:
    config = PolicyGradientConfig(clip_ratio_low=0.2, clip_ratio_high=0.28, clip_ratio_c=3.0)
    surrogate(config, aggregation, f"dual_clip_{aggregation}")


def test_the_surrogate_of_whole_responses() -> None:
    config = PolicyGradientConfig(
        clip_ratio_low=0.2, clip_ratio_high=0.28, importance_sampling_level="sequence"
    )
    surrogate(config, "seq_mean_token_mean", "gspo")


def surrogate(config: PolicyGradientConfig, aggregation: Any, name: str) -> None:
    logprobs = GIVEN["logprobs"].clone().requires_grad_()
    weights, divisor = loss_agg_weights(MASK, aggregation)
    loss, _ = GRPO(config).total_loss(StepOutputs(logprobs), batch("rewards"), weights / divisor)
    alike(loss, name)
    (gradient,) = torch.autograd.grad(loss, logprobs)
    alike(gradient, f"{name}_gradient")


def test_the_value_loss() -> None:
    values = GIVEN["new_values"].clone().requires_grad_()
    weights, divisor = loss_agg_weights(MASK, "token_mean")
    error = clipped_value_loss(values, GIVEN["values"], GIVEN["returns"], 0.2)
    loss = (weights * error).sum() / divisor
    alike(loss, "value_loss")
    (gradient,) = torch.autograd.grad(loss, values)
    alike(gradient, "value_loss_gradient")


@pytest.mark.parametrize(("kind", "name"), [("k1", "k1+"), ("k2", "k2"), ("k3", "k3")])
def test_the_divergence_in_the_loss(kind: Any, name: str) -> None:
    """What verl calls k1+ is k1 with the gradient of k2."""
    logprobs = GIVEN["logprobs"].clone().requires_grad_()
    found = kl_loss(logprobs, GIVEN["reference_logprobs"], kind) * MASK
    alike(found, f"kl_{name}")
    (gradient,) = torch.autograd.grad(found.sum(), logprobs)
    alike(gradient, f"kl_{name}_gradient")
