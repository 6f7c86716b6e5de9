"""The two ends of a rollout whose policy is in another worker, in one process over real channels."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlinf.config import RunConfig, validate
from rlinf.data.record import Identity, Record
from rlinf.envs.base import Environment, Episodes
from rlinf.errors import EXIT_BAD_INPUT, InputError, InputFailed, RlinfError
from stages import rollout
from stages.activity import Activity
from stages.board import Board
from stages.collect import Acting
from stages.context import Context
from stages.layout import CHANNELS
from stages.resident import Resident
from stages.runner import Attempt
from stages.turns import Turns
from stages.worker import services
from stages.worker.answers import Desk
from stages.worker.asks import Askers, Asks
from stages.worker.messages import Answer, Over, StageOrder
from tests.pipeline.helpers import Compose

PLACE = (3, 0, 0)


class Doubles:
    """An engine that answers with twice of what it is asked."""

    fails: Exception | None = None

    def generate(self, requests: Any, **_: Any) -> Iterator[Record]:
        for request in requests:
            if self.fails is not None:
                raise self.fails
            columns = {"sample": request.steps["sample"], "action": 2 * request.steps["seen"]}
            yield Record(request.identity, columns)


class Steps:
    """Simulators that take so many steps, two requests at a time."""

    def __init__(self, sample: int, steps: int = 3) -> None:
        self.sample, self.steps = sample, steps
        self.go_on = threading.Event()
        self.go_on.set()

    def simulate(self, episodes: Episodes, observations: Any, actions: Any) -> Iterator[Record]:
        for step in range(self.steps):
            asked = [self.sample, self.sample + 1]
            for sample in asked:
                seen = np.full(1, 10.0 * sample + step, np.float32)
                observations.put(Record(Identity(3, sample), {"sample": np.array([sample]), "seen": seen}))
            replies = [actions.get() for _ in asked]
            found = {int(r.steps["sample"][0]): float(r.steps["action"][0]) for r in replies}
            assert found == {sample: 20.0 * sample + 2 * step for sample in asked}
            assert self.go_on.wait(10)
        yield Record(Identity(3, self.sample))
        observations.close()


class Sides:
    """A worker with the policy, and as many with simulators as are asked for."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self.run, self.config = run, config
        self.engine, self.turns, self.activity = Doubles(), Turns(), Activity()
        parts = (Board(), self.turns, Resident(), self.activity)
        self.desk = Desk(run, config, "policy-r0", *parts, lambda: False)
        self.order = StageOrder(
            node="rollout/3",
            stage="rollout",
            iteration=3,
            position=PLACE,
            parts=1,
            out="it/0003/rollout",
            attempt="first",
            ranks=(0,),
            inputs={},
            asks=("policy-r0",),
        )

    def answer(self, *askers: str, attempt: str = "first") -> None:
        order = Answer(
            node="rollout/3",
            stage="rollout",
            iteration=3,
            position=PLACE,
            out="it/0003/rollout",
            attempt=attempt,
            weights=("it/0002/sync", False),
            askers=askers,
        )
        self.desk.answer(order)

    def simulators(
        self, name: str, steps: Steps, turns: Turns | None = None, attempt: str = "first"
    ) -> Simulators:
        return Simulators(self, name, steps, turns or Turns(), attempt)


class Simulators(threading.Thread):
    """A stage that asks, in a thread; its trajectories, or how it failed."""

    def __init__(self, sides: Sides, name: str, steps: Steps, turns: Turns, attempt: str) -> None:
        super().__init__(daemon=True)
        self.askers, self.turns, self.steps = Askers(sides.run / CHANNELS, name), turns, steps
        self.order = sides.order.model_copy(update={"attempt": attempt})
        self.spans: list[dict[str, Any]] = []
        self.made: list[Record] = []
        self.error: RlinfError | None = None
        self.start()

    def run(self) -> None:
        turn = self.turns.enter(PLACE)
        ctx = cast(Any, SimpleNamespace())
        ctx.stopping, ctx.spans, ctx.stage = (lambda: False), self.spans, "rollout"
        ctx.world, ctx.inputs = SimpleNamespace(rank=0), {"weights": SimpleNamespace()}
        ctx.waiting = lambda _: turn.resting()
        asks = cast(Asks, self.askers.begin(self.order, 0))
        try:
            with turn, self.askers.asking("rollout/3"):
                episodes = cast(Episodes, None)
                self.made = list(asks.collect(ctx, cast(Environment, self.steps), episodes))
        except RlinfError as error:
            self.error = error

    def ended(self) -> Simulators:
        self.join(20)
        assert not self.is_alive()
        return self
