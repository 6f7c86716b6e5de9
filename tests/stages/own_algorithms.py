"""Algorithms as a user's own file has them, with losses and loops that no other one here has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.algorithms.advantages import compute_gae, masked_whiten
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.group_relative import GRPO
from rlinf.algorithms.learner import Learner
from rlinf.config import Section
from rlinf.data.batch import StepBatch, TrainingSample, build_step_batch, gather_steps
from rlinf.data.load_balancing import StepSpan
from rlinf.data.trajectory import Trajectory
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.registry import VALUE_ESTIMATES
from rlinf.rewards.base import Reward
from rlinf.trainers.base import Loss, loss_from_steps
from stages.flow import Flow, InputSource, on_policy
from stages.train import SAMPLE_CHANNELS


class Favourite(Reward):
    """The share of an answer's tokens that are the one numbered 5."""

    needs_score = False

    def compute(self, trajectories: Sequence[Trajectory], scores: Sequence[float]) -> list[float]:
        return [float(np.mean(record.actions == 5)) for record in trajectories]


class Coached(GRPO):
    """GRPO that also makes a token likelier wherever another one was taken.

    What the policy says of tokens that nobody took is not in its step outputs.
    """

    TOKEN = 5

    def micro_batch_loss(
        self,
        policy: Policy,
        inputs: Batch,
        batch: StepBatch,
        weights: Tensor,
        *,
        temperature: float,
        entropy: bool,
    ) -> Loss:
        loss, metrics = super().micro_batch_loss(
            policy, inputs, batch, weights, temperature=temperature, entropy=entropy
        )
        other = {**inputs, "actions": torch.full_like(inputs["actions"], self.TOKEN)}
        wanted = (weights * policy.evaluate(other, temperature).logprobs).sum()
        return loss - wanted, {**metrics, "wanted": wanted.detach()}


class TwoTimescalesConfig(Section):
    critic_updates: int = Field(default=8, gt=0)
    actor_updates: int = Field(default=2, gt=0)


class TwoTimescales(Algorithm):
    """An actor and a critic that are updated apart; the critic on what earlier policies did too."""

    Config = TwoTimescalesConfig
    requires = frozenset({VALUE_ESTIMATES})

    def update(self, learner: Learner, parts: Iterable[list[TrainingSample]]) -> None:
        newest = [sample for part in parts for sample in part if sample.is_included]
        every = [*newest, *(sample for batch in learner.previous_batches() for sample in batch)]
        learner.log_metric("seen", len(every))
        records, batch = [sample.trajectory for sample in every], build_step_batch(every)
        advantages, returns = compute_gae(
            batch.rewards,
            batch.require("values"),
            batch.terminated,
            batch.truncated,
            batch.bootstrap_values,
            batch.mask,
            gamma=0.99,
            lam=0.95,
        )
        count = len(newest)
        mask = batch.mask[:count]
        gain = masked_whiten(advantages[:count], mask) / mask.sum()

        def actor(outputs: StepOutputs, spans: Sequence[StepSpan]) -> Loss:
            part = gather_steps(gain, spans, outputs.logprobs.shape[1])
            return -(part * outputs.logprobs).sum(), {}

        for number in range(self.config.critic_updates):
            chosen = learner.rng("critic", number).permutation(len(every))[:count].tolist()
            own, weights = returns[chosen], batch.mask[chosen] / batch.mask[chosen].sum()

            def critic(
                outputs: StepOutputs,
                spans: Sequence[StepSpan],
                own: Tensor = own,
                weights: Tensor = weights,
            ) -> Loss:
                assert outputs.values is not None
                length = outputs.values.shape[1]
                error = (outputs.values - gather_steps(own, spans, length)) ** 2
                loss = (gather_steps(weights, spans, length) * error).sum()
                return loss, {"critic_error": loss.detach()}

            learner.step(
                [records[row] for row in chosen], loss_from_steps(critic), groups=["value"]
            )
        for _ in range(self.config.actor_updates):
            learner.step(records[:count], loss_from_steps(actor), groups=["policy"])


def _window(source: InputSource) -> InputSource:
    return replace(source, history=2)


_train = on_policy.stages["train"]
_inputs = {
    **_train.inputs,
    **{name: _window(_train.inputs[name]) for name in SAMPLE_CHANNELS.values()},
}
replayed = Flow(
    stages={**on_policy.stages, "train": replace(_train, inputs=_inputs)},
    setup_stages=on_policy.setup_stages,
    evaluate=on_policy.evaluate,
)
"""Training sees the samples of the iteration before, too."""
