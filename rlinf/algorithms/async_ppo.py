"""PPO on rollouts that are updates behind (AReaL, arXiv 2505.24298, section 5.2).

Three policies take part: ``behav`` collected a step, up to ``rollout.staleness`` versions ago;
``prox`` is that before the update, which clipping keeps the one in training near. With
``u = pi / pi_prox`` the objective of a step is (eq. 5 there)::

    pi_prox / pi_behav * min(u A, clip(u, 1 - eps, 1 + eps) A)

The bound of staleness is the flow's: a rollout begins with weights that are not older, and an
update refuses steps that are (:mod:`rlinf.algorithms.update`).
"""

from __future__ import annotations

from pydantic import Field, model_validator

from rlinf.algorithms.behaviour import Outside
from rlinf.algorithms.ppo import PPO, PPOConfig
from rlinf.fit import STALE, VALUES


class AsyncPPOConfig(PPOConfig):
    """PPO whose steps weigh ``pi_prox / pi_behav``; far from 1 they are left out."""

    behaviour_weight_cap: float | None = Field(default=5.0, gt=0)
    behaviour_weight_outside: Outside = "mask"

    @model_validator(mode="after")
    def _decoupled(self) -> AsyncPPOConfig:
        if self.behaviour_weight_cap is None:
            raise ValueError(
                "behaviour_weight_cap: without it steps of older policies weigh as if the newest "
                "had chosen them; give a number above 1, or set algorithm=ppo"
            )
        return self


class AsyncPPO(PPO):
    """See the module."""

    Config = AsyncPPOConfig
    config: AsyncPPOConfig
    needs = frozenset({VALUES, STALE})
