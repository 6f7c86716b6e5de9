"""What every algorithm keeps to: one of the registry, and that of the examples, passes this."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from rlinf.algorithms import algorithms
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.losses import loss_agg_weights
from rlinf.algorithms.policy_gradient import PolicyGradient
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import OptimizerSection
from rlinf.data.batch import StepBatch, TrainingSample
from rlinf.data.load_balancing import StepSpan
from rlinf.data.record import RecordId
from rlinf.data.trajectory import (
    PolicyOutputs,
    StepRewards,
    Trajectory,
)
from rlinf.models.actor_critic import MLPConfig, MLPPolicy
from rlinf.models.base import StepOutputs
from rlinf.models.causal_lm import CausalLM, CausalLMConfig
from rlinf.models.tanh_normal_q import MLPQConfig, MLPQPolicy
from rlinf.registry import TRANSITION_REPLAY, VALUE_ESTIMATES
from rlinf.trainers.fsdp import FSDPConfig, FSDPTrainer
from tests.contracts.own import parts

DATA_ALONE = ("bc",)
"""Those that learn from a data set, whatever is sampled: tests/rlinf/algorithms/test_bc.py."""
EVERY = [name for name in parts(algorithms) if name not in DATA_ALONE]
NAMES = [name for name in EVERY if issubclass(algorithms.get(name), PolicyGradient)]
AGGREGATIONS = ("token_mean", "seq_mean_token_mean", "seq_mean_token_sum")
each = pytest.mark.parametrize("name", NAMES)
seeds = st.integers(0, 2**16)
CPU = torch.device("cpu")
SPEC = {"observation": 4, "action": {"kind": "discrete", "size": 3}}
BOX = {"observation": 4, "action": {"kind": "box", "size": 2}}
Q_SMALL: dict[str, Any] = {"hidden": (8,), "critic_hidden": (8,)}
Q_OPTIONS: dict[str, dict[str, Any]] = {
    "crossq": {**Q_SMALL, "critic_norm": "batch_renorm", "use_target_critics": False},
    "rlpd": {**Q_SMALL, "critic_norm": "layer", "num_critics": 4},
    "iql": {**Q_SMALL, "use_state_value": True},
}
SMALL = CausalLMConfig(hidden=16, layers=1, heads=2, kv_heads=1, intermediate=32)


def made(name: str, **settings: Any) -> Any:
    cls = algorithms.get(name)
    return cls(cls.Config(**settings))


def batch_of(seed: int, groups: int = 3, size: int = 4, longest: int = 7) -> StepBatch:
    """Samples of unlike lengths; some steps inside do not count, the last one does."""
    random = np.random.default_rng(seed)
    count = groups * size
    lengths = random.integers(1, longest + 1, count)
    inside = np.arange(longest) < lengths[:, None]
    mask = inside & (random.random((count, longest)) < 0.8)
    last = np.zeros_like(mask)
    last[np.arange(count), lengths - 1] = True
    mask |= last

    def column(scale: float = 1.0) -> Tensor:
        return torch.tensor(random.normal(size=mask.shape) * scale * inside, dtype=torch.float32)

    cut = random.random((count, 1)) < 0.3
    old = column(0.3) - 1
    return StepBatch(
        mask=torch.tensor(mask, dtype=torch.float32),
        rewards=column() * torch.tensor(mask),
        groups=torch.tensor(np.repeat(np.arange(groups), size)),
        old_logprobs=old,
        rollout_logprobs=old + column(0.05),
        terminated=torch.tensor(last & ~cut, dtype=torch.float32),
        truncated=torch.tensor(last & cut, dtype=torch.float32),
        bootstrap_values=column() * torch.tensor(last & cut),
        values=column(),
        reference_logprobs=old + column(0.1),
    )


def outputs_of(batch: StepBatch, seed: int) -> StepOutputs:
    """What a policy near the old one says, with gradients."""
    random = torch.Generator().manual_seed(seed)

    def column(near: Tensor, scale: float) -> Tensor:
        return near + scale * torch.randn(near.shape, generator=random)

    return StepOutputs(
        column(batch.old_logprobs, 0.2).requires_grad_(),
        column(torch.ones_like(batch.mask), 0.2).requires_grad_(),
        column(batch.require("values"), 0.2).requires_grad_(),
    )


def chosen(batch: StepBatch, index: Sequence[int]) -> StepBatch:
    length = batch.mask.shape[1]
    return batch.select_spans([StepSpan(row, 0, length) for row in index], length, CPU)


def rows(outputs: StepOutputs, index: Sequence[int]) -> StepOutputs:
    columns = (outputs.logprobs, outputs.entropy, outputs.values)
    return StepOutputs(*(None if column is None else column[list(index)] for column in columns))  # type: ignore[arg-type]


@each
@given(seed=seeds, more=st.integers(1, 4))
def test_padding_changes_no_advantage(name: str, seed: int, more: int) -> None:
    batch, algorithm = batch_of(seed), made(name)
    padded = {
        f.name: torch.nn.functional.pad(value, (0, more)) if value.ndim > 1 else value
        for f in fields(batch)
        if (value := getattr(batch, f.name)) is not None
    }
    short, length = algorithm.with_advantages(batch), batch.mask.shape[1]
    long = algorithm.with_advantages(StepBatch(**padded))
    for column in ("advantages", "returns"):
        one, other = getattr(short, column), getattr(long, column)
        if one is not None:
            torch.testing.assert_close(other[:, :length], one)
            assert not other[:, length:].any()


@each
@given(seed=seeds)
def test_the_order_of_the_samples_does_not_matter(name: str, seed: int) -> None:
    batch, algorithm = batch_of(seed), made(name)
    order = np.random.default_rng(seed).permutation(len(batch)).tolist()
    moved = chosen(batch, order)
    torch.testing.assert_close(
        algorithm.with_advantages(moved).advantages,
        algorithm.with_advantages(batch).require("advantages")[order],
        atol=1e-5,
        rtol=1e-4,
    )
    scores, groups = batch.rewards.sum(-1).numpy(), batch.groups.numpy()
    kept = algorithm.select_samples(scores, groups)
    assert kept.dtype == bool
    assert np.array_equal(algorithm.select_samples(scores[order], groups[order]), kept[order])


@each
@given(seed=seeds)
def test_steps_that_do_not_count_have_no_influence(name: str, seed: int) -> None:
    algorithm = made(name, kl_loss_coef=0.1, entropy_coeff=0.1)
    batch = batch_of(seed)
    hidden, noise = 1 - batch.mask, torch.Generator().manual_seed(seed)

    def spoiled(column: Tensor) -> Tensor:
        return column + 3 * hidden * torch.randn(column.shape, generator=noise)

    columns = ("values", "old_logprobs", "rollout_logprobs", "reference_logprobs")
    other = replace(batch, **{n: spoiled(batch.require(n)) for n in columns})
    first, second = algorithm.with_advantages(batch), algorithm.with_advantages(other)
    assert not (first.require("advantages") * hidden).any()
    torch.testing.assert_close(first.advantages, second.advantages)
    weights, _ = loss_agg_weights(batch.mask, "token_mean")
    outputs = outputs_of(batch, seed)
    unlike = StepOutputs(
        *(
            spoiled(c.detach())
            for c in (outputs.logprobs, outputs.entropy, outputs.values)
            if c is not None
        )
    )
    ours, theirs = (
        algorithm.total_loss(outputs, first, weights),
        algorithm.total_loss(unlike, second, weights),
    )
    torch.testing.assert_close(ours[0], theirs[0])
    (gradient,) = torch.autograd.grad(ours[0], outputs.logprobs)
    assert not (gradient * hidden).any()


@each
@given(seed=seeds)
def test_a_step_without_advantage_has_no_gradient(name: str, seed: int) -> None:
    algorithm, batch = made(name), batch_of(seed)
    indifferent = (torch.rand(batch.mask.shape) < 0.5) & (batch.mask > 0)
    advantages = torch.where(indifferent, 0.0, batch.mask)
    batch = replace(algorithm.with_advantages(batch), advantages=advantages)
    outputs = outputs_of(batch, seed)
    loss, _ = algorithm.total_loss(outputs, batch, batch.mask)
    (gradient,) = torch.autograd.grad(loss, outputs.logprobs)
    assert not gradient[indifferent].any()


@each
@given(seed=seeds)
def test_the_first_step_follows_the_policy_gradient(name: str, seed: int) -> None:
    """Where the policy is the old one, ``d loss / d log-prob`` is minus weight times advantage."""
    algorithm, batch = made(name), batch_of(seed)
    batch = replace(algorithm.with_advantages(batch), rollout_logprobs=batch.old_logprobs)
    weights, _ = loss_agg_weights(batch.mask, "seq_mean_token_mean")
    same = batch.old_logprobs.clone().requires_grad_()
    loss, _ = algorithm.total_loss(StepOutputs(same, None, batch.values), batch, weights)
    (gradient,) = torch.autograd.grad(loss, same)
    torch.testing.assert_close(gradient, -weights * batch.require("advantages"))


@each
@given(seed=seeds, aggregation=st.sampled_from(AGGREGATIONS), data=st.data())
def test_loss_metrics_and_gradients_do_not_depend_on_the_cut(
    name: str, seed: int, aggregation: Any, data: st.DataObject
) -> None:
    algorithm = made(name, kl_loss_coef=0.1, entropy_coeff=0.1, loss_agg_mode=aggregation)
    batch = algorithm.with_advantages(batch_of(seed))
    weights, _ = loss_agg_weights(batch.mask, aggregation)
    outputs = outputs_of(batch, seed)
    whole, metrics = algorithm.total_loss(outputs, batch, weights)
    (gradient,) = torch.autograd.grad(whole, outputs.logprobs, retain_graph=True)
    order = np.random.default_rng(seed).permutation(len(batch))
    cuts = sorted(data.draw(st.sets(st.integers(1, len(batch) - 1), max_size=4)))
    total, totals = torch.zeros(()), dict.fromkeys(metrics, torch.zeros(()))
    for part in np.split(order, cuts):
        index = part.tolist()
        local = chosen(batch, index)
        loss, found = algorithm.total_loss(rows(outputs, index), local, weights[index])
        total = total + loss
        assert found.keys() == metrics.keys()
        totals = {key: totals[key] + found[key] for key in totals}
    torch.testing.assert_close(total, whole, atol=1e-4, rtol=1e-4)
    for key, value in metrics.items():
        torch.testing.assert_close(totals[key], value, atol=1e-4, rtol=1e-4)
    (summed,) = torch.autograd.grad(total, outputs.logprobs)
    torch.testing.assert_close(summed, gradient, atol=1e-5, rtol=1e-4)


@each
@given(seed=seeds)
def test_what_is_said_to_be_by_group_is(name: str, seed: int) -> None:
    algorithm, batch = made(name, whiten_advantages=False), batch_of(seed)
    if not algorithm.has_group_local_advantages:
        return
    every = algorithm.with_advantages(batch).require("advantages")
    scores, groups = batch.rewards.sum(-1).numpy(), batch.groups.numpy()
    for group in np.unique(groups):
        index = np.flatnonzero(groups == group).tolist()
        alone = algorithm.with_advantages(chosen(batch, index))
        torch.testing.assert_close(alone.advantages, every[index])
        kept = algorithm.select_samples(scores, groups)[index]
        assert np.array_equal(algorithm.select_samples(scores[index], groups[index]), kept)


class Update:
    """Updates of a policy that offers what the algorithm needs, from the same weights each time."""

    def __init__(self, name: str, folder: Path, **settings: Any) -> None:
        self.algorithm = made(name, **settings)
        self.valued, self.folder = VALUE_ESTIMATES in self.algorithm.requires, folder / "model"
        self.replays = TRANSITION_REPLAY in self.algorithm.requires
        self.folder.mkdir()
        if self.replays:
            MLPQPolicy.create(MLPQConfig(**Q_OPTIONS.get(name, Q_SMALL)), BOX, 0, self.folder)
        elif self.valued:
            MLPPolicy.create(MLPConfig(hidden=(8,)), SPEC, 0, self.folder)
        else:
            CausalLM.create(SMALL, {"alphabet": "0123456789+="}, 0, self.folder)
        self.samples = self._samples()

    def trainer(self) -> FSDPTrainer:
        policy: Any = MLPPolicy.load(self.folder, MLPConfig()) if self.valued else None
        policy = MLPQPolicy.load(self.folder, MLPQConfig()) if self.replays else policy
        return FSDPTrainer(
            policy or CausalLM.load(self.folder, SMALL),
            FSDPConfig(device="cpu", max_tokens_per_microbatch=40),
            OptimizerSection(),
            ProcessGroupInfo(),
        )

    def weights(self, batch: Iterable[list[TrainingSample]]) -> dict[str, Tensor]:
        """The weights after an update by samples that come in these parts."""
        trainer = self.trainer()
        rates = dict.fromkeys(trainer.policy.parameter_groups, 1e-2)
        self.algorithm.update(Learner(trainer, rates, seed=3), batch)
        return {name: tensor.clone() for name, tensor in trainer.full_state_dict().items()}

    def _samples(self, groups: int = 3, size: int = 4) -> list[TrainingSample]:
        random, found = np.random.default_rng(1), []
        for number in range(groups * size):
            length = int(random.integers(1, 7))
            trajectory = Trajectory(
                identity=RecordId(0, number),
                actions=random.integers(2, 14, length),
                group=number // size,
                policy_version=0,
            )
            if self.valued:
                trajectory.actions = random.integers(0, 3, length)
                trajectory.observations = random.normal(size=(length, 4)).astype(np.float32)
            else:
                trajectory.prompt = random.integers(2, 14, 3)
            if self.replays:
                seen = random.normal(size=(length + 1, 4)).astype(np.float32)
                cut = seen[-1:] if number % 2 else seen[:0]
                trajectory.observations, trajectory.final_observations = seen[:-1], cut
                trajectory.actions = random.uniform(-1, 1, (length, 2))
                trajectory.truncation_steps = np.arange(length)[length - len(cut) :]
            found.append(trajectory)
        samples = []
        for row, result in self.trainer().forward(found, 1.0):
            record, old = found[row], result.logprobs.numpy()
            record.logprobs = old
            record.terminated = (np.arange(len(old)) == len(old) - 1).astype(np.float32)
            if self.replays and len(record.truncation_steps):
                record.terminated[-1] = 0
            rewards = random.normal(size=len(old)).astype(np.float32)
            outputs = PolicyOutputs(
                identity=record.identity, logprobs=old, reference_logprobs=old - 0.1
            )
            if result.values is not None:
                outputs.values = result.values.numpy()
            reward = StepRewards(identity=record.identity, rewards=rewards)
            samples.append(TrainingSample(record, reward, outputs))
        return samples


def alike(one: dict[str, Tensor], other: dict[str, Tensor], atol: float = 0.0) -> None:
    for name, tensor in one.items():
        torch.testing.assert_close(other[name], tensor, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("name", EVERY)
def test_an_update_follows_from_the_samples_alone(name: str, tmp_path: Path) -> None:
    """Again it gives the same bytes; in parts, as they arrive, the same weights to rounding."""
    update = Update(name, tmp_path)
    samples = update.samples
    whole, again = update.weights([samples]), update.weights([samples])
    alike(whole, again)
    untouched = update.trainer().full_state_dict()
    assert any(not torch.equal(untouched[name], tensor) for name, tensor in whole.items())
    # The first steps of Adam are as long as the rate whatever the gradient: rounding shows there.
    alike(whole, update.weights([samples[:4], samples[4:8], samples[8:]]), 1e-2 / 50)


@pytest.mark.parametrize("name", EVERY)
def test_samples_that_are_not_kept_teach_nothing(name: str, tmp_path: Path) -> None:
    update = Update(name, tmp_path)
    dropped = []
    for sample in update.samples[4:]:
        assert sample.reward is not None
        reward = replace(sample.reward, is_included=False)
        dropped.append(sample._replace(reward=reward))
    alike(update.trainer().full_state_dict(), update.weights([dropped]))
    some, alone = update.samples[:4], update.weights([update.samples[:4]])
    alike(alone, update.weights([[*some, *dropped]]))
