"""The update of policy-gradient algorithms: passes over one batch, cut into minibatches.

Where the algorithm allows it, gradients of the first parts of the batch are computed while the
later ones are still to come; the weights change once all are there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rlinf.algorithms.behaviour import anchors, engine_metrics, lags
from rlinf.algorithms.learner import Learner
from rlinf.algorithms.levels import at_level, mask_of
from rlinf.algorithms.losses import KLEstimator, kl_estimate
from rlinf.algorithms.shares import step_shares
from rlinf.data.batch import Sample, StepBatch, assemble, taken
from rlinf.data.packing import Span
from rlinf.errors import InputError
from rlinf.models.base import Batch, Policy
from rlinf.trainers.base import Loss, is_largest

if TYPE_CHECKING:
    from rlinf.algorithms.policy_gradient import PolicyGradient


def by_minibatches(
    algorithm: PolicyGradient, learner: Learner, parts: Iterable[list[Sample]]
) -> None:
    """The whole update."""
    update = _Update(algorithm, learner)
    # Whether a part of the batch has a gradient of its own, whatever the others hold.
    streams = algorithm.streams and learner.accumulates and not learner.policy.observes
    every: list[Sample] = []
    for part in parts:
        every += part
        if streams:
            update.accumulate([sample for sample in part if sample.kept])
    if streams:
        update.step()
    elif kept := [sample for sample in every if sample.kept]:
        update.epochs(kept)
    # Afterwards: the update compares the policy with the one that the old log-probs are of,
    # which saw observations by the old statistics.
    if learner.policy.observes:
        learner.changing()
        learner.policy.observe([sample.trajectory for sample in every])


class _Update:
    """The optimizer steps of one iteration."""

    def __init__(self, algorithm: PolicyGradient, learner: Learner) -> None:
        self._algorithm, self._learner = algorithm, learner
        self._mass: float | None = None
        self._unit = 1.0
        """What losses are divided by before their gradient is computed: a power of two, which
        changes no digit, near the weight of the steps, so that float16 has that of a mean."""

    def accumulate(self, samples: list[Sample]) -> None:
        """Add the gradient of one part of the batch, not yet divided by the weight of the whole."""
        if samples:
            batch = self._with_advantages(samples)
            weights, mass = self._shares(batch.require("units"))
            if self._mass is None:
                self._unit = power_of_two(weights)
            self._mass = (self._mass or 0.0) + mass
            self._add(batch, samples, list(range(len(samples))), weights, entropy=True)

    def step(self) -> None:
        """Change the weights by what was accumulated."""
        if self._mass is not None:
            self._finish(self._mass)

    def epochs(self, samples: list[Sample]) -> None:
        """All steps on the whole batch."""
        learner, settings = self._learner, self._algorithm.config
        batch = self._with_advantages(samples)
        cuts = minibatches(learner, len(samples), settings.epochs, settings.minibatches)
        for done, chosen in enumerate(cuts):
            weights, mass = self._shares(batch.require("units")[chosen])
            entropy = self._algorithm.needs_entropy or done == 0
            self._unit = power_of_two(weights)
            self._add(batch, samples, chosen, weights, entropy=entropy)
            self._finish(mass)
            learner.progress(done + 1, len(cuts))
        if batch.values is not None and batch.returns is not None:
            counts = mask_of(batch, batch.values)
            value = explained_variance(batch.values, batch.returns, counts)
            learner.metric("explained_variance", value)

    def _shares(self, units: Tensor) -> tuple[Tensor, float]:
        config = self._algorithm.config
        weights, mass = step_shares(units.flatten(1), config.aggregation, config.aggregation_length)
        return weights.view(units.shape), mass

    def _with_advantages(self, samples: list[Sample]) -> StepBatch:
        config = self._algorithm.config
        batch = at_level(assemble(samples), config.logprob_level)
        if config.kl_reward:
            divergence = unit_divergence(batch, config.kl_reward_estimator)
            mean = divergence.sum() / batch.mask.sum().clamp(min=1)
            batch = less(batch, config.kl_reward * divergence)
            self._learner.metric("kl_reward", float(mean))
        return self._algorithm.judged(batch)

    def _add(
        self,
        batch: StepBatch,
        samples: list[Sample],
        chosen: list[int],
        weights: Tensor,
        *,
        entropy: bool,
    ) -> None:
        learner, config = self._learner, self._algorithm.config
        unit = self._unit
        places, share = self._trained(batch, chosen, weights)
        chosen, weights = [chosen[place] for place in places], weights[places]
        first, interpolate = not learner.updates, config.old_logprobs == "interpolate"
        if (first or interpolate) and batch.rollout_logprobs is not None:
            lag = lags([sample.trajectory for sample in samples], learner.iteration)
            if first:
                self._bound(lag, batch.mask)
                batch = replace(batch, fresh=batch.mask * (lag == 0))
            if interpolate:
                done = learner.updates / (config.epochs * config.minibatches)
                batch = replace(batch, anchor=anchors(lag, done))

        def loss(policy: Policy, inputs: Batch, spans: list[Span]) -> Loss:
            length, device = inputs["mask"].shape[1], inputs["mask"].device
            rows = batch.spans([s._replace(row=chosen[s.row]) for s in spans], length, device)
            value, metrics = self._algorithm.objective(
                policy,
                inputs,
                rows,
                taken(weights, spans, length).to(device),
                temperature=learner.temperature,
                entropy=entropy,
            )
            return value / unit, {
                name: metric if is_largest(name) else metric / share / unit
                for name, metric in metrics.items()
            }

        # Steps that stand alone would be cut to the budget; a ratio of the row needs them all.
        whole = self._algorithm.whole_rows and learner.policy.stepwise
        learner.accumulate(
            [samples[i].trajectory for i in chosen],
            loss,
            together=[[row] for row in range(len(chosen))] if whole else None,
        )

    def _bound(self, lag: Tensor, mask: Tensor) -> None:
        """Say how far behind the steps are that count, ``[N, T]``.

        Raises:
            InputError: some are further than ``rollout.staleness`` allows, or of weights to come.
        """
        learner, counts = self._learner, mask > 0
        limit = learner.staleness
        if limit is None or not counts.any():
            return
        found = lag[counts]
        if not 0 <= float(found.min()) <= float(found.max()) <= limit:
            wrong = found.min() if found.min() < 0 else found.max()
            raise InputError(
                f"iteration {learner.iteration + 1}: steps were chosen by version "
                f"{learner.iteration - int(wrong)} of the weights, and version {learner.iteration} "
                f"is to be updated; rollout.staleness allows {limit} updates between them. Look at "
                "the flow's inputs and the engine's version, or raise rollout.staleness"
            )
        if limit:
            learner.metric("staleness", float(found.mean()))

    def _trained(
        self, batch: StepBatch, chosen: list[int], weights: Tensor
    ) -> tuple[list[int], float]:
        """Which of the chosen rows are computed, at least one, and their share of the weight.

        The others would add nothing to the gradient. Metrics are means over those that are.
        """
        learns = ~self._algorithm.idle(batch)[chosen]
        if bool(learns.all()):
            return list(range(len(chosen))), 1.0
        places = learns.nonzero()[:, 0].tolist() or [0]
        share = float(weights[places].sum() / weights.sum().clamp(min=1e-30))
        return places, share if len(places) < len(chosen) and share > 0 else 1.0

    def _finish(self, mass: float) -> None:
        only = self._algorithm.learns(self._learner.iteration)
        scale = self._unit / max(1.0, mass)
        self._learner.update(scale=scale, check=self._compare, only=only)

    def _compare(self, totals: dict[str, float]) -> None:
        """Stop where engine and trainer, of equal weights, disagree on what was done.

        Raises:
            InputError: by more than the limit, in the mean over the steps that count.
        """
        found = engine_metrics(totals)
        for name, value in found.items():
            self._learner.metric(name, value)
        limit = self._algorithm.config.logprob_gap_limit
        limit = self._learner.gap_limit if limit is None else limit
        gap = found.get("engine_gap", 0.0)
        if not gap <= limit:
            raise InputError(
                f"iteration {self._learner.iteration + 1}: the log-probabilities of engine and "
                f"trainer differ by {gap:.3g} nats in the mean, the limit is {limit:.3g}; no "
                "weight was changed. Both have the same weights: look at engine.*, trainer.* and "
                "the model's files, or raise algorithm.logprob_gap_limit"
            )


def unit_divergence(batch: StepBatch, kind: KLEstimator) -> Tensor:
    """How far the policy before the update went from the reference, ``[N, T]`` or ``[N, T, K]`` of
    each unit, 0 where that does not count.

    Args:
        batch: of :func:`rlinf.algorithms.levels.at_level`.
    """
    reference = batch.require("reference_logprobs")
    return kl_estimate(batch.old_logprobs, reference, kind) * batch.require("units")


def less(batch: StepBatch, penalty: Tensor) -> StepBatch:
    """A batch with what remains of its rewards: a step, or an action of a chunk, pays the penalties
    of all of its units, ``[N, T]`` or ``[N, T, K]``."""

    def remains(rewards: Tensor) -> Tensor:
        return rewards - penalty.reshape(*rewards.shape, -1).sum(-1)

    of_actions = batch.action_rewards
    return replace(
        batch,
        rewards=remains(batch.rewards),
        action_rewards=None if of_actions is None else remains(of_actions),
    )


def power_of_two(weights: Tensor) -> float:
    """The nearest to the sum of some weights, at least 1."""
    # In float64 the order of the sum, another on each kind of machine, does not show.
    total = float(weights.sum(dtype=torch.float64))
    return 2.0 ** round(math.log2(max(1.0, total)))


def minibatches(learner: Learner, count: int, epochs: int, parts: int) -> list[list[int]]:
    """Sample numbers of each optimizer step: every sample once per epoch, in seeded order."""
    steps = []
    for epoch in range(epochs):
        order = np.arange(count)
        if parts > 1:
            order = learner.random(epoch).permutation(count)
        steps += [sorted(int(i) for i in part) for part in np.array_split(order, min(parts, count))]
    return steps


def explained_variance(values: Tensor, returns: Tensor, mask: Tensor) -> float:
    """``1 - Var(returns - values) / Var(returns)`` over the steps that count."""
    counted = mask.bool()
    spread = returns[counted].var()
    return float(1 - (returns[counted] - values[counted]).var() / spread) if spread > 0 else 0.0
