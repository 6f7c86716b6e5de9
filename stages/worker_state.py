"""The state of a worker process: its loaded engines and trainers, and its running stages."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:  # these modules import torch, which idle processes do not need
    from rlinf.device_memory import DeviceMemoryManager
    from rlinf.engines.base import Engine
    from rlinf.envs.base import Environment
    from rlinf.rewards.base import Reward
    from rlinf.trainers.base import Trainer
    from stages.weight_deltas import WeightDeltas

StageProgressCallback = Callable[[str, int, int, str, str], None]
"""Called with the stage, the amount done, the total, the unit, and a note such as ``loss 0.5``."""


@dataclass(frozen=True)
class LoadedTrainer:
    """A loaded trainer and its state."""

    trainer: Trainer
    initial_weights: str
    """Content id (:attr:`StageInput.content_id`) of the weights from which training started."""
    checkpoint: str | None
    """Content id of the checkpoint of its state. Empty: no update yet. None: unknown state, so the
    trainer must be loaded again."""


@dataclass(frozen=True)
class LoadedActor:
    """A trainer that only runs forward passes of the policy."""

    trainer: Trainer
    weights: str
    """Content id of its weights."""


@dataclass
class WorkerState:
    """The components that a process has loaded; None: not loaded."""

    environment: Environment | None = None
    eval_environment: Environment | None = None
    """The environment of evaluations, if it is not ``environment``."""
    engine: Engine | None = None
    engine_weights: str | None = None
    """Content id of the weights of the engine; None: none, or unknown."""
    reward: Reward | None = None
    reward_shard: tuple[int, int] | None = None
    """Data-parallel rank and size for which the reward was created."""
    trainer: LoadedTrainer | None = None
    actor: LoadedActor | None = None
    reference: Trainer | None = None
    """A trainer that only runs forward passes of the reference policy."""
    device_memory: DeviceMemoryManager | None = None
    weight_deltas: WeightDeltas | None = None
    """None: the plan does not use weight deltas."""
    published_states: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    """Initial weights and checkpoint of the trainer, by the content id of its published weights."""
    on_progress: StageProgressCallback | None = None
    """None: progress is written to the log."""

    def drop_engine(self) -> None:
        """Close the engine and free its memory."""
        loaded, self.engine, self.engine_weights = self.engine, None, None
        if loaded is not None:
            loaded.close()

    def drop_reward(self) -> None:
        loaded, self.reward = self.reward, None
        if loaded is not None:
            loaded.close()

    def drop_trainer(self) -> None:
        loaded, self.trainer = self.trainer, None
        if loaded is not None:
            loaded.trainer.close()

    def drop_actor(self) -> None:
        loaded, self.actor = self.actor, None
        if loaded is not None:
            loaded.trainer.close()

    def close(self) -> None:
        """Close every component: end its processes and free its memory. Idempotent."""
        environments = (self.environment, self.eval_environment)
        components = (self.reference, self.reward, self.engine, *environments)
        self.environment = self.engine = self.engine_weights = self.reward = self.reference = None
        self.eval_environment = self.device_memory = None
        # A component that fails to close must not keep the others open.
        with ExitStack() as stack:
            for component in components:
                if component is not None:
                    stack.callback(component.close)
            stack.callback(self.drop_actor)
            stack.callback(self.drop_trainer)


COMPUTING, COMMITTING, WAITING_FOR_DEVICE = "computing", "committing", "waiting for the device"


@dataclass(eq=False)
class ActiveStage:
    """One running stage."""

    stage: str
    started_at: float
    """When it first got the device; until then, when it was ordered (Unix time, s)."""
    get_activity: Callable[[], str]
    """Returns the current activity, for the status."""
    done: int = 0
    """Amount done, of ``total`` units such as samples."""
    total: int = 0
    unit: str = ""
    note: str = ""
    compute_s: float | None = None
    """The compute time in seconds; None: the stage still computes."""


class ActivityTracker:
    """The running stages of a worker, by node: a stage of one iteration, such as ``rollout/3``."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._active: dict[str, ActiveStage] = {}

    def add(self, node: str, stage: str) -> None:
        """Record that a stage was ordered."""
        with self._lock:
            self._active[node] = ActiveStage(stage, time.time(), lambda: WAITING_FOR_DEVICE)

    def start(self, node: str, get_activity: Callable[[], str]) -> None:
        """Record that a stage has the device for the first time.

        Args:
            get_activity: returns the current activity of the stage, for the status.
        """
        with self._lock:
            if node in self._active:
                self._active[node].started_at = time.time()
                self._active[node].get_activity = get_activity

    def update(self, stage: str, done: int, total: int, unit: str, note: str = "") -> None:
        """Set the progress of the computing instance of a stage; only one computes at a time."""
        with self._lock:
            for active in self._active.values():
                if active.stage == stage and active.compute_s is None:
                    active.done, active.total = done, total
                    active.unit, active.note = unit, note
                    break

    def mark_computed(self, node: str) -> None:
        """Record that a stage has computed, so that only its commit remains."""
        with self._lock:
            if node in self._active:
                self._active[node].compute_s = time.time() - self._active[node].started_at
                self._active[node].get_activity = lambda: COMMITTING

    def remove(self, node: str) -> None:
        with self._lock:
            self._active.pop(node, None)

    def rows(self) -> list[dict[str, Any]]:
        """Return the running stages as plain values, in the order in which they were ordered."""
        with self._lock:
            return [
                {
                    "node": node,
                    "stage": active.stage,
                    "activity": active.get_activity(),
                    "started_at": active.started_at,
                    "done": active.done,
                    "total": active.total,
                    "unit": active.unit,
                    "note": active.note,
                    "compute_s": active.compute_s,
                }
                for node, active in self._active.items()
            ]
