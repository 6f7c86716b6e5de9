"""Keys that an algorithm accepts are read by it, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from pipeline.commands.experiment import run_experiment
from rlinf import package_paths
from rlinf.algorithms import algorithms
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.group_relative import GRPO
from rlinf.algorithms.iql import IQL
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.policy_gradient import PolicyGradientConfig
from rlinf.algorithms.ppo import PPO
from rlinf.algorithms.sac import SAC
from rlinf.algorithms.unused_keys import reject_unused_keys, unused_keys
from rlinf.data.batch import StepBatch, TrainingSample
from rlinf.errors import ConfigError
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.trainers.base import Loss
from tests.contracts.own import parts

SURROGATE = ["importance_sampling_level", "clip_ratio_low", "clip_ratio_high", "clip_ratio_c"]


def with_all_keys(cls: type[Algorithm]) -> Any:
    """A configuration in which every key is set."""
    config = cls.Config.model_construct(**dict.fromkeys(cls.Config.model_fields))
    assert config.model_fields_set == set(cls.Config.model_fields)
    return config


class Reinforce(GRPO):
    """A subclass with a loss of its own."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return -(weights * batch.require("advantages") * outputs.logprobs).sum(), {}


class Halved(GRPO):
    """A subclass whose loss calls the one it overrides."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        loss, metrics = super().policy_loss(outputs, batch, weights)
        return loss / 2, metrics


class Named(GRPO):
    """The same by the name of the base class."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return GRPO.policy_loss(self, outputs, batch, weights)


def surrogate_of(config: Any) -> float:
    return float(config.clip_ratio_low + getattr(config, "clip_ratio_high"))  # noqa: B009


class Helped(GRPO):
    """A subclass whose loss reads its keys in a function of the module, one of them by text."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return surrogate_of(self.config) * (weights * outputs.logprobs).sum(), {}


class Declared(Reinforce):
    config_keys_read = frozenset({"clip_ratio_c"})


class Bare(GRPO):
    """A subclass whose objective has none of the terms of the configuration."""

    def micro_batch_loss(self, policy: Policy, inputs: Batch, *rest: Any, **options: Any) -> Loss:
        return policy.evaluate(inputs, 1.0).logprobs.sum(), {}


class Pairs(Algorithm):
    """A loop of its own with the configuration of another family."""

    Config = PolicyGradientConfig

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        for _ in range(self.config.epochs):
            learner.update()


class Plain(PPO):
    """PPO with advantages of its own: nothing discounts them."""

    def compute_advantages(self, batch: StepBatch) -> tuple[Tensor, Tensor]:
        return batch.rewards, batch.rewards


class Uniform(GRPO):
    def group_advantage(self, rewards: Tensor, groups: Tensor) -> Tensor:
        return rewards


class Critics(SAC):
    """An off-policy algorithm with a loss of its own, without a temperature."""

    def loss(self, policy: Any, batch: Batch) -> Loss:
        return policy.module.critics(batch["observations"]).mean() * self.config.gamma, {}


class Looped(Reinforce):
    """A loss that asks for its keys in a loop, by text."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        names = ("clip_ratio_low", "clip_ratio_high")
        return outputs.logprobs.sum() * sum(getattr(self.config, n) for n in names), {}


class Margins(PolicyGradientConfig):
    margin: float = 1.0
    slope: float = 1.0
    offset: float = 1.0
    other: float = 1.0

    @property
    def doubled(self) -> float:
        return 2 * self.margin

    @cached_property
    def line(self) -> float:
        return self.slope * self.shift()

    def shift(self) -> float:
        return self.offset


class MoreMargins(Margins):
    """A configuration that inherits its properties; it extends one and replaces one."""

    extra: float = 1.0

    def shift(self) -> float:
        return 0.0

    @property
    def doubled(self) -> float:
        return super().doubled + self.extra


class Margined(Reinforce):
    """A loss that reads properties of its configuration, one of them inherited."""

    Config = MoreMargins  # type: ignore[assignment]

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        config: Any = self.config
        return outputs.logprobs.sum() * config.doubled * config.line, {}


class Norms(Reinforce):
    """A loss that has the names by which a configuration is dumped, and dumps something else."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        scale = self.config.entropy_coeff
        found = [value.sum() for value in vars(outputs).values() if value is not None]
        return scale * sum(found) + len(outputs.__dict__), {}


class Metrics(Reinforce):
    """A loss whose metric has the name of a key."""

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        """clip_ratio_low"""
        total = outputs.logprobs.sum()
        return total, {"clip_ratio_low": total, "clip_ratio_high": total}


KL_KEYS = {"entropy_coeff", "kl_loss_coef", "kl_loss_type", "rollout_is_threshold"}
CASES: list[tuple[type[Algorithm], set[str], set[str]]] = [
    (
        Reinforce,
        set(SURROGATE),
        KL_KEYS | {"kl_reward_coef", "loss_agg_mode", "old_logprobs", "norm_adv_by_std"},
    ),
    (Halved, set(), {*SURROGATE, *KL_KEYS}),
    (Named, set(), {*SURROGATE, *KL_KEYS}),
    (Helped, {"importance_sampling_level", "clip_ratio_c"}, {"clip_ratio_low", "clip_ratio_high"}),
    (
        Declared,
        {"importance_sampling_level", "clip_ratio_low", "clip_ratio_high"},
        {"clip_ratio_c"},
    ),
    (Bare, {*SURROGATE, *KL_KEYS}, {"epochs", "loss_agg_mode", "kl_reward_coef"}),
    (
        Pairs,
        {*SURROGATE, *KL_KEYS, "minibatches", "kl_reward_coef", "whiten_advantages"},
        {"epochs"},
    ),
    (Plain, {"gamma", "gae_lambda"}, {"cliprange_value", "clip_ratio_low", "critic_warmup"}),
    (Uniform, {"norm_adv_by_std"}, {"advantage_level", "clip_ratio_low"}),
    (
        Critics,
        {"target_entropy", "learn_temperature", "backup_entropy", "target_q_agg"},
        {"gamma", "tau", "offline_ratio", "buffer_size", "policy_delay"},
    ),
    (Looped, {"clip_ratio_c"}, {"clip_ratio_low", "clip_ratio_high"}),
    (Margined, {"other", "offset", "clip_ratio_low"}, {"margin", "extra", "slope"}),
    (Norms, set(SURROGATE), set()),
    (Metrics, set(SURROGATE), set()),
]


@pytest.mark.parametrize(("cls", "unread", "read"), CASES, ids=lambda v: getattr(v, "__name__", ""))
def test_keys_that_an_override_leaves_without_a_reader_are_found(
    cls: type[Algorithm], unread: set[str], read: set[str]
) -> None:
    found = set(unused_keys(cls, with_all_keys(cls)))
    assert unread <= found
    assert not read & found


# Targets that CrossQ has not, and the value of a policy's action, which IQL never asks for.
NEVER = {"crossq": ["tau"], "iql": ["policy_q_agg"], "mylab.algorithm:LeaveOneOut": SURROGATE}


@pytest.mark.parametrize("name", parts(algorithms))
def test_algorithms_of_the_product_read_their_keys(name: str) -> None:
    cls = algorithms.get(name)
    assert unused_keys(cls, with_all_keys(cls)) == NEVER.get(name, [])


def test_a_key_that_is_not_set_is_no_trouble() -> None:
    reject_unused_keys(Reinforce(Reinforce.Config(kl_loss_coef=1.0)), "mine:Reinforce")


def test_the_error_names_key_and_method_and_says_what_to_do() -> None:
    algorithm = Reinforce(Reinforce.Config(clip_ratio_low=0.1, clip_ratio_c=3.0))
    with pytest.raises(ConfigError) as caught:
        reject_unused_keys(algorithm, "mine:Reinforce")
    assert str(caught.value).startswith(
        "algorithm.clip_ratio_low: mine:Reinforce never reads it (nor clip_ratio_c); its own "
        "policy_loss replaces what does; take it out of the configuration"
    )
    with pytest.raises(ConfigError, match=r"^algorithm\.policy_q_agg: iql never reads it; take"):
        reject_unused_keys(IQL(IQL.Config(policy_q_agg="mean")), "iql")


class OfDump(Reinforce):
    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return outputs.logprobs.sum() * len(self.config.model_dump()), {}


class OfVars(Reinforce):
    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return outputs.logprobs.sum() * len(vars(self.config)), {}


class OfDict(Reinforce):
    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return outputs.logprobs.sum() * len({**dict(self.config)}), {}


class OfVariable(Reinforce):
    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        keys = self.config
        return outputs.logprobs.sum() * len([keys.__dict__ for _ in "a"]), {}


def dumped(config: Any) -> int:
    return len(config.model_dump())


class OfHelper(Reinforce):
    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        return outputs.logprobs.sum() * dumped(self.config), {}


class Summed(PolicyGradientConfig):
    @property
    def size(self) -> int:
        return len(self.model_dump())


class OfProperty(Reinforce):
    Config = Summed  # type: ignore[assignment]

    def policy_loss(self, outputs: StepOutputs, batch: StepBatch, weights: Tensor) -> Loss:
        config: Any = self.config
        return outputs.logprobs.sum() * config.size, {}


@pytest.mark.parametrize("cls", [OfDump, OfVars, OfDict, OfVariable, OfHelper, OfProperty])
def test_a_configuration_that_is_read_as_a_whole_has_no_unread_key(cls: type[Algorithm]) -> None:
    assert not unused_keys(cls, with_all_keys(cls))


def test_the_door_refuses_before_anything_is_written(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(package_paths.ROOT / "docs" / "examples")
    name = "mylab.algorithm:LeaveOneOut"
    values = compose()
    values["algorithm"] = {"name": name, "entropy_coeff": 0.1, "clip_ratio_c": 2}
    with pytest.raises(ConfigError, match=rf"algorithm\.clip_ratio_c: {name} never reads it"):
        run_experiment(values)
    assert not any(tmp_path.iterdir())
