"""The state of a worker process: its loaded engines and trainers, and its running stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # they import torch, which processes that only wait do without
    from rlinf.device_memory import DeviceMemoryManager
    from rlinf.engines.base import Engine
    from rlinf.envs.base import Environment
    from rlinf.rewards.base import Reward
    from rlinf.trainers.base import Trainer
    from stages.weight_deltas import WeightDeltas

StageProgressCallback = Callable[[str, int, int, str], None]
"""Called with the stage, the amount done, the total and the unit."""


@dataclass(frozen=True)
class LoadedTrainer:
    """A loaded trainer and the state it is in."""

    trainer: Trainer
    initial_weights: str
    """The output with the weights that training began from."""
    checkpoint: str | None
    """The output of its checkpoint; empty: no update yet; None: unknown, load it again."""


@dataclass(frozen=True)
class LoadedActor:
    """A trainer used only for evaluating the policy, and the output of its weights."""

    trainer: Trainer
    weights: str


@dataclass
class WorkerState:
    """The components that a process has loaded; None: not loaded."""

    environment: Environment | None = None
    engine: Engine | None = None
    engine_weights: str | None = None
    """The output whose weights the engine serves; None: unknown."""
    reward: Reward | None = None
    reward_shard: tuple[int, int] | None = None
    """Rank and number of processes that the reward was created for."""
    trainer: LoadedTrainer | None = None
    actor: LoadedActor | None = None
    reference: Trainer | None = None
    device_memory: DeviceMemoryManager | None = None
    weight_deltas: WeightDeltas | None = None
    """None: the plan does not use weight deltas."""
    published_states: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """By newest published weights: initial weights and checkpoint of their trainer."""
    on_progress: StageProgressCallback | None = None

    def drop_engine(self) -> None:
        """Close the engine and free its memory."""
        loaded, self.engine, self.engine_weights = self.engine, None, None
        if loaded is not None:
            loaded.close()

    def drop_reward(self) -> None:
        """Close the reward and end its processes."""
        loaded, self.reward = self.reward, None
        if loaded is not None:
            loaded.close()

    def drop_trainer(self) -> None:
        """Close the trainer and free its memory."""
        loaded, self.trainer = self.trainer, None
        if loaded is not None:
            loaded.trainer.close()

    def drop_actor(self) -> None:
        """Close the actor and free its memory."""
        loaded, self.actor = self.actor, None
        if loaded is not None:
            loaded.trainer.close()

    def close(self) -> None:
        """End the processes and free the memory of every component. Idempotent."""
        parts = (self.reference, self.reward, self.engine, self.environment)
        self.environment = self.engine = self.engine_weights = self.reward = self.reference = None
        self.device_memory = None
        # A component that fails to close must not keep the others open.
        with ExitStack() as stack:
            for part in parts:
                if part is not None:
                    stack.callback(part.close)
            stack.callback(self.drop_actor)
            stack.callback(self.drop_trainer)


DEVICE_TURN = "its turn"
COMPUTING, COMMITTING, WAITING_FOR_DEVICE = "computes", "commits", f"waits for {DEVICE_TURN}"


@dataclass(eq=False)
class ActiveStage:
    """One running stage."""

    stage: str
    started_at: float
    """When it first had the device; before that, when it was ordered."""
    get_status: Callable[[], str]
    done: int = 0
    total: int = 0
    unit: str = ""
    compute_s: float | None = None
    """The compute time, once it is known."""


class ActivityTracker:
    """The stages of a worker that are under way, by their node's name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._doing: dict[str, ActiveStage] = {}

    def add(self, node: str, stage: str) -> None:
        with self._lock:
            self._doing[node] = ActiveStage(stage, time.time(), lambda: WAITING_FOR_DEVICE)

    def start(self, node: str, get_status: Callable[[], str]) -> None:
        """It has its first turn; ``watch`` says what it does."""
        with self._lock:
            if node in self._doing:
                self._doing[node].started_at = time.time()
                self._doing[node].get_status = get_status

    def update(self, stage: str, done: int, total: int, unit: str) -> None:
        """How far the present instance of a stage is: of one stage, one computes at a time."""
        with self._lock:
            now = [doing for doing in self._doing.values() if doing.stage == stage]
            for doing in now:
                if doing.compute_s is None:
                    doing.done, doing.total, doing.unit = done, total, unit
                    break

    def mark_computed(self, node: str) -> None:
        """What is left is writing files."""
        with self._lock:
            if node in self._doing:
                self._doing[node].compute_s = time.time() - self._doing[node].started_at
                self._doing[node].get_status = lambda: COMMITTING

    def remove(self, node: str) -> None:
        with self._lock:
            self._doing.pop(node, None)

    def rows(self) -> list[dict[str, Any]]:
        """As plain values, in the order in which they were ordered."""
        with self._lock:
            return [
                {
                    "node": node,
                    "stage": doing.stage,
                    "doing": doing.get_status(),
                    "since": doing.started_at,
                    "done": doing.done,
                    "total": doing.total,
                    "what": doing.unit,
                    "took_s": doing.compute_s,
                }
                for node, doing in self._doing.items()
            ]
