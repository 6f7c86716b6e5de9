"""Algorithms as a user's own file has them, with losses and loops that no other one here has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.algorithms.advantages import generalised, whiten
from rlinf.algorithms.base import Algorithm
from rlinf.algorithms.grpo import GRPO
from rlinf.algorithms.learner import Learner
from rlinf.config import Section
from rlinf.data.batch import Sample, StepBatch, assemble, taken
from rlinf.data.packing import Span
from rlinf.data.record import Record
from rlinf.fit import VALUES
from rlinf.models.base import Batch, Policy, StepOutputs
from rlinf.rewards.base import Reward
from rlinf.trainers.base import Loss, of_steps
from stages.flow import Flow, Source, on_policy
from stages.train import CHANNELS


class Favourite(Reward):
    """The share of an answer's tokens that are the one numbered 5."""

    needs_score = False

    def judge(self, trajectories: Sequence[Record], scores: Sequence[float]) -> list[float]:
        return [float(np.mean(record.steps["actions"] == 5)) for record in trajectories]


class Coached(GRPO):
    """GRPO that also makes a token likelier wherever another one was taken.

    What the policy says of tokens that nobody took is not in its step outputs.
    """

    TOKEN = 5

    def objective(
        self,
        policy: Policy,
        inputs: Batch,
        batch: StepBatch,
        weights: Tensor,
        *,
        temperature: float,
        entropy: bool,
    ) -> Loss:
        loss, metrics = super().objective(
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
    needs = frozenset({VALUES})

    def update(self, learner: Learner, parts: Iterable[list[Sample]]) -> None:
        newest = [sample for part in parts for sample in part if sample.kept]
        every = [*newest, *(sample for batch in learner.earlier() for sample in batch)]
        learner.metric("seen", len(every))
        records, batch = [sample.trajectory for sample in every], assemble(every)
        advantages, returns = generalised(
            batch.rewards,
            batch.require("values"),
            batch.terminated,
            batch.truncated,
            batch.bootstrap,
            batch.mask,
            gamma=0.99,
            lam=0.95,
        )
        count = len(newest)
        mask = batch.mask[:count]
        gain = whiten(advantages[:count], mask) / mask.sum()

        def actor(outputs: StepOutputs, spans: Sequence[Span]) -> Loss:
            part = taken(gain, spans, outputs.logprobs.shape[1])
            return -(part * outputs.logprobs).sum(), {}

        for number in range(self.config.critic_updates):
            chosen = learner.random("critic", number).permutation(len(every))[:count].tolist()
            own, weights = returns[chosen], batch.mask[chosen] / batch.mask[chosen].sum()

            def critic(
                outputs: StepOutputs,
                spans: Sequence[Span],
                own: Tensor = own,
                weights: Tensor = weights,
            ) -> Loss:
                assert outputs.values is not None
                length = outputs.values.shape[1]
                error = (outputs.values - taken(own, spans, length)) ** 2
                loss = (taken(weights, spans, length) * error).sum()
                return loss, {"critic_error": loss.detach()}

            learner.step([records[row] for row in chosen], of_steps(critic), only=["value"])
        for _ in range(self.config.actor_updates):
            learner.step(records[:count], of_steps(actor), only=["policy"])


def _window(source: Source) -> Source:
    return replace(source, window=2)


_train = on_policy.stages["train"]
_inputs = {**_train.inputs, **{name: _window(_train.inputs[name]) for name in CHANNELS.values()}}
replayed = Flow(
    stages={**on_policy.stages, "train": replace(_train, inputs=_inputs)},
    offline=on_policy.offline,
    evaluate=on_policy.evaluate,
)
"""Training sees the samples of the iteration before, too."""
