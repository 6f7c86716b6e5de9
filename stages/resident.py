"""What a process keeps from one stage to the next: loaded engines, trainers and environments."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # they import torch, which processes that only wait do without
    from rlinf.engines.base import Engine
    from rlinf.envs.base import Environment
    from rlinf.residency import Residency
    from rlinf.rewards.base import Reward
    from rlinf.trainers.base import Trainer
    from stages.deltas import Deltas

Progress = Callable[[str, int, int, str], None]
"""Is told of a stage, how much of what is done, of how much."""


@dataclass(frozen=True)
class Trained:
    """A trainer and where it stands."""

    trainer: Trainer
    start: str
    """Output whose weights its training began with."""
    state: str | None
    """Output of the checkpoint it is in the state of; empty: at the start; None: of none."""


@dataclass(frozen=True)
class Evaluated:
    """A trainer that only evaluates, and the output that its weights are of."""

    trainer: Trainer
    state: str


@dataclass
class Resident:
    """The parts that a process has loaded; those it has not are None."""

    environment: Environment | None = None
    engine: Engine | None = None
    engine_weights: str | None = None
    """Output whose weights the engine serves; None: nothing can be said of them."""
    reward: Reward | None = None
    reward_rank: tuple[int, int] | None = None
    """Rank and number of processes that the reward was made for."""
    trainer: Trained | None = None
    policy: Evaluated | None = None
    reference: Trainer | None = None
    residency: Residency | None = None
    deltas: Deltas | None = None
    """None: the plan asks for none."""
    published: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Of the newest published weights: start and state of the trainer that they are from."""
    progress: Progress | None = None

    def drop_engine(self) -> None:
        """End the engine and free its memory."""
        held, self.engine, self.engine_weights = self.engine, None, None
        if held is not None:
            held.close()

    def drop_reward(self) -> None:
        """End the reward with its processes."""
        held, self.reward = self.reward, None
        if held is not None:
            held.close()

    def drop_trainer(self) -> None:
        """Free the memory of the trainer."""
        held, self.trainer = self.trainer, None
        if held is not None:
            held.trainer.close()

    def drop_policy(self) -> None:
        """Free the memory of what only evaluates."""
        held, self.policy = self.policy, None
        if held is not None:
            held.trainer.close()

    def close(self) -> None:
        """End the processes, and free the memory, of every part; again does no harm."""
        parts = (self.reference, self.reward, self.engine, self.environment)
        self.environment = self.engine = self.engine_weights = self.reward = self.reference = None
        self.residency = None
        # One that fails to close keeps none of the others.
        with ExitStack() as stack:
            for part in parts:
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self.drop_policy)
            stack.callback(self.drop_trainer)
