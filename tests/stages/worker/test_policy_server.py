"""The two ends of a rollout whose policy is in another worker, over real channels."""

from __future__ import annotations

import contextlib
import re
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from rlinf.channels import requests
from rlinf.channels.requests import RequestClient, RequestRejected, RequestServer
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.base import Environment, RolloutRequest
from rlinf.errors import EXIT_BAD_INPUT, DataError, InputError, RlinfError, UpstreamFailed
from stages import rollout
from stages.context import StageContext, StageInput
from stages.device_schedule import DeviceSchedule
from stages.layout import CHANNELS_FOLDER, worker_pointer
from stages.live_store import LiveStore
from stages.rollout import PolicyRunner
from stages.worker.messages import AttemptEnded, ServePolicy, StageOrder
from stages.worker.policy_client import FINISH, PolicyClient, PolicyClients
from stages.worker.policy_server import PolicyServer
from stages.worker_state import ActivityTracker, WorkerState

PLACE = (3, 0, 0)


class Doubles:
    """An engine that answers with twice of what it is asked."""

    fails: Exception | None = None
    says = 1
    """How often it says it."""

    def generate(self, requests: Any, **_: Any) -> Iterator[Record]:
        for request in requests:
            if self.fails is not None:
                raise self.fails
            action = np.tile(2 * request.steps["seen"], self.says)
            columns = {"sample": request.steps["sample"], "action": action}
            yield Record(request.identity, columns)


class Steps:
    """Simulators that take so many steps, two requests at a time."""

    def __init__(self, sample: int, steps: int = 3, columns: int = 1) -> None:
        self.sample, self.steps, self.columns = sample, steps, columns
        self.go_on = threading.Event()
        self.go_on.set()
        self.is_waiting = False

    def simulate(
        self, episodes: RolloutRequest, observations: Any, actions: Any
    ) -> Iterator[Trajectory]:
        for step in range(self.steps):
            requests = [self.sample, self.sample + 1]
            for sample in requests:
                seen = np.full((1, self.columns), 10.0 * sample + step, np.float32)
                columns = {"sample": np.array([sample]), "seen": seen}
                observations.put(Record(RecordId(3, sample), columns))
            replies = [actions.get() for _ in requests]
            found = {int(r.steps["sample"][0]): float(r.steps["action"].flat[0]) for r in replies}
            assert found == {sample: 20.0 * sample + 2 * step for sample in requests}
            self.is_waiting = True
            assert self.go_on.wait(10)
        yield Trajectory(identity=RecordId(3, self.sample), actions=np.zeros(0))
        observations.close()


class Sides:
    """A worker with the policy, and as many with simulators as are asked for."""

    def __init__(self, run: Path, config: RunConfig) -> None:
        self.run, self.config = run, config
        self.engine, self.turns, self.activity = Doubles(), DeviceSchedule(), ActivityTracker()
        parts = (LiveStore(), self.turns, WorkerState(), self.activity)
        self.server = PolicyServer(run, config, "policy-r0", *parts, lambda: False)
        pointer = worker_pointer(run / CHANNELS_FOLDER, "policy-r0")
        self.requests = RequestServer(pointer, self.server.handle)
        self.order = StageOrder(
            node="rollout/3",
            stage="rollout",
            iteration=3,
            position=PLACE,
            num_chunks=1,
            output="it/0003/rollout",
            attempt="first",
            ranks=(0,),
            inputs={"weights": ("it/0002/sync", False)},
            policy_workers=("policy-r0",),
        )

    def answer(self, *askers: str, attempt: str = "first") -> None:
        stage = self.order.model_copy(update={"attempt": attempt})
        self.server.serve(ServePolicy(stage=stage, has_live_weights=False, clients=askers))

    def simulators(
        self,
        name: str,
        steps: Steps,
        turns: DeviceSchedule | None = None,
        attempt: str = "first",
        askers: PolicyClients | None = None,
    ) -> Simulators:
        askers = askers or PolicyClients(self.run / CHANNELS_FOLDER, name)
        return Simulators(self, askers, steps, turns or DeviceSchedule(), attempt)

    def amid(self, name: str) -> Simulators:
        """Simulators that are answered, and take their next step when they are told to go on."""
        self.answer(name)
        steps = Steps(0)
        steps.go_on.clear()
        made = self.simulators(name, steps)
        until(lambda: steps.is_waiting)
        return made


class Simulators(threading.Thread):
    """A stage that asks, in a thread; its trajectories, or how it failed."""

    def __init__(
        self, sides: Sides, askers: PolicyClients, steps: Steps, turns: DeviceSchedule, attempt: str
    ) -> None:
        super().__init__(daemon=True)
        self.askers, self.turns, self.steps = askers, turns, steps
        self.order = sides.order.model_copy(update={"attempt": attempt})
        self.askers.add(self.order, 0)
        self.spans: list[dict[str, Any]] = []
        self.made: list[Record] = []
        self.weights = StageInput(sides.run / "it/0002/sync")
        self.error: RlinfError | None = None
        self.start()

    def run(self) -> None:
        turn = self.turns.add(PLACE)
        ctx = cast(Any, SimpleNamespace())
        ctx.should_stop, ctx.spans, ctx.stage = (lambda: False), self.spans, "rollout"
        ctx.world, ctx.inputs = SimpleNamespace(rank=0), {"weights": self.weights}
        ctx.waiting = lambda _: turn.released()
        try:
            with turn, self.askers.client_scope("rollout/3"):
                asks = cast(PolicyClient, self.askers.get("rollout/3"))
                episodes = cast(RolloutRequest, None)
                self.made = list(asks.rollout_iter(ctx, cast(Environment, self.steps), episodes))
        except RlinfError as error:
            self.error = error

    def ordered(self, attempt: str) -> None:
        """Once more, while they are at it, by another driver."""
        self.askers.update_order(self.order.model_copy(update={"attempt": attempt}))

    def ended(self) -> Simulators:
        self.join(20)
        assert not self.is_alive()
        return self


@pytest.fixture
def sides(
    tmp_path: Path, compose: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> Iterator[Sides]:
    made = Sides(tmp_path, validate(RunConfig, compose(experiment="cartpole_ppo")))
    policy = PolicyRunner(cast(Any, made.engine), 0, "rollout")
    monkeypatch.setattr(rollout, "policy_runner", lambda ctx: policy)
    yield made
    made.server.end_attempt(
        AttemptEnded(node="rollout/3", attempt="first", reason="the test is over")
    )
    made.server.close()
    made.requests.close()


def until(there: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not there():
        assert time.monotonic() < deadline
        time.sleep(0.005)


def test_each_gets_the_replies_to_its_own_requests_and_the_last_what_they_took(
    sides: Sides,
) -> None:
    sides.answer("sim-r0", "sim-r1")
    asking = [sides.simulators(f"sim-r{n}", Steps(4 * n)) for n in (0, 1)]
    assert [len(one.ended().made) for one in asking] == [1, 1]
    assert not any(one.error for one in asking)
    values = [span["name"] for one in asking for span in one.spans]
    assert values.count("generate") == 1
    until(lambda: not sides.server.is_busy)


@pytest.mark.parametrize("fell", [False, True])
def test_weights_that_the_policy_read_from_disk_are_said_to_have_fallen(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, fell: bool
) -> None:
    """They were to come by memory; the simulators' stage is committed, and says so."""

    def acting(ctx: StageContext) -> PolicyRunner:
        ctx.inputs["weights"].used_disk_fallback = fell
        return PolicyRunner(cast(Any, sides.engine), 0, "rollout")

    monkeypatch.setattr(rollout, "policy_runner", acting)
    sides.answer("sim-r0")
    one = sides.simulators("sim-r0", Steps(0)).ended()
    assert len(one.made) == 1
    assert one.weights.used_disk_fallback == fell


def test_who_asks_before_the_order_has_come_is_answered(sides: Sides) -> None:
    sides.answer("other-r0", attempt="other")  # from now on it listens
    one = sides.simulators("sim-r0", Steps(0))
    time.sleep(0.3)
    assert one.is_alive()
    sides.server.end_attempt(AttemptEnded(node="rollout/3", attempt="first", reason="it has ended"))
    sides.answer("sim-r0")
    assert len(one.ended().made) == 1


def test_serving_lets_earlier_stages_compute_between_requests_and_later_ones_at_its_end(
    sides: Sides,
) -> None:
    sides.answer("sim-r0", "sim-r1")
    steps = Steps(0)
    steps.go_on.clear()
    first = sides.simulators("sim-r0", steps)
    done: list[str] = []

    def stage(name: str, place: tuple[int, int, int]) -> threading.Thread:
        turn = sides.turns.add(place)

        def work() -> None:
            with turn:
                done.append(name)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread

    until(lambda: steps.is_waiting)
    earlier, later = stage("evaluate", (3, 0, -1)), stage("train", (3, 0, 3))
    earlier.join(10)
    assert done == ["evaluate"], "the simulators take their time"
    steps.go_on.set()
    first.ended()
    time.sleep(0.3)
    assert done == ["evaluate"], "the other process has not asked yet, and train is after it"
    sides.simulators("sim-r1", Steps(4)).ended()
    later.join(10)
    assert done == ["evaluate", "train"]


def test_neither_worker_waits_for_the_other_with_its_device_in_hand(sides: Sides) -> None:
    """Each has an earlier stage, which needs the other's: both can compute before the policy."""
    sides.answer("sim-r0")
    steps, turns = Steps(0), DeviceSchedule()
    steps.go_on.clear()
    one = sides.simulators("sim-r0", steps, turns)
    until(lambda: steps.is_waiting)
    with sides.turns.add((2, 0, 0)):
        steps.go_on.set()
        with turns.add((2, 0, 0)):
            assert one.is_alive(), "it waits for actions"
    assert len(one.ended().made) == 1


@pytest.mark.parametrize(
    ("error", "code"),
    [(InputError("the weights have diverged"), EXIT_BAD_INPUT), (ValueError("what"), 1)],
)
def test_what_fails_there_fails_the_stage_here_with_its_code(
    sides: Sides, error: Exception, code: int
) -> None:
    sides.engine.fails = error
    sides.answer("sim-r0")
    one = sides.simulators("sim-r0", Steps(0)).ended()
    assert one.error is not None
    assert one.error.exit_code == code
    assert str(error) in str(one.error)
    assert "policy-r0, which has the policy" in str(one.error)
    until(lambda: not sides.server.is_busy)


def test_a_client_that_finishes_an_attempt_which_nobody_serves_gets_no_spans(sides: Sides) -> None:
    pointer = worker_pointer(sides.run / CHANNELS_FOLDER, "policy-r0")
    with contextlib.closing(RequestClient(pointer)) as client:
        reply = client.request(FINISH, {"attempt": "unknown", "client": "sim-r0"})
        assert reply.arguments == {"retry": True}
        with pytest.raises(RequestRejected, match="KeyError: 'attempt'"):
            client.request(FINISH, {"client": "sim-r0"})
        sides.answer("sim-r0")
        with pytest.raises(RequestRejected, match="KeyError: 'client'"):
            client.request(FINISH, {"attempt": "first"})
    one = sides.simulators("sim-r0", Steps(0)).ended()
    assert one.error is None, "the malformed requests have ended nothing"
    assert len(one.made) == 1


def test_more_than_the_other_worker_takes_in_a_request_is_refused(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_MESSAGE_BYTES", 1 << 12)
    sides.answer("sim-r0")
    one = sides.simulators("sim-r0", Steps(0, columns=1 << 10)).ended()
    assert isinstance(one.error, DataError)
    assert re.search(r"rollout/3 .* \d+ bytes, .* 4096: .*max_parallel_envs", str(one.error))


def test_more_than_a_worker_that_asks_takes_in_a_reply_fails_the_stage(
    sides: Sides, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(requests, "MAX_MESSAGE_BYTES", 1 << 12)
    sides.engine.says = 1 << 11
    sides.answer("sim-r0")
    one = sides.simulators("sim-r0", Steps(0)).ended()
    assert one.error is not None
    assert one.error.exit_code == EXIT_BAD_INPUT
    message = r"answers in one step of rollout/3 takes \d+ bytes, .* 4096: .*max_parallel_envs"
    assert re.search(message, str(one.error))
    until(lambda: not sides.server.is_busy)


def test_an_attempt_that_is_over_is_answered_no_more_and_the_next_one_is(sides: Sides) -> None:
    one = sides.amid("sim-r0")
    sides.server.end_attempt(
        AttemptEnded(node="rollout/3", attempt="first", reason="the attempt that asked has ended")
    )
    one.steps.go_on.set()
    assert isinstance(one.ended().error, UpstreamFailed)
    sides.answer("sim-r0", attempt="second")
    assert len(sides.simulators("sim-r0", Steps(0), attempt="second").ended().made) == 1
    late = sides.simulators("sim-r0", Steps(0)).ended()
    assert isinstance(late.error, UpstreamFailed), "the first attempt once more"


def test_simulators_give_up_when_the_driver_says_that_the_policy_is_gone(sides: Sides) -> None:
    sides.answer("sim-r0")
    steps = Steps(0, steps=1000)
    one = sides.simulators("sim-r0", steps)
    until(lambda: steps.is_waiting)
    one.askers.end_attempt(
        AttemptEnded(node="rollout/3", attempt="first", reason="its lease is over")
    )
    assert isinstance(one.ended().error, UpstreamFailed)
    assert "its lease is over" in str(one.error)


def test_simulators_that_heard_so_before_their_turn_give_up_at_once(sides: Sides) -> None:
    """An answer that never comes would be waited for at the turn of each that was ordered ahead."""
    turns = DeviceSchedule()
    with turns.add((2, 0, 0)):
        gone = sides.simulators("sim-r0", Steps(0), turns)
        gone.askers.end_attempt(
            AttemptEnded(node="rollout/3", attempt="first", reason="its lease is over")
        )
    began = time.monotonic()
    assert isinstance(gone.ended().error, UpstreamFailed)
    assert "its lease is over" in str(gone.error)
    assert time.monotonic() - began < 10
    sides.answer("sim-r0", attempt="second")
    again = sides.simulators("sim-r0", Steps(0), turns, attempt="second", askers=gone.askers)
    assert len(again.ended().made) == 1


def test_askers_of_another_lease_take_the_place_of_those_that_are_gone(sides: Sides) -> None:
    """Whose driver is gone too, so that nobody says it."""
    old = sides.amid("old-r0")
    sides.answer("new-r0", attempt="second")
    assert len(sides.simulators("new-r0", Steps(0), attempt="second").ended().made) == 1
    old.steps.go_on.set()
    assert isinstance(old.ended().error, UpstreamFailed)


def test_simulators_whose_policy_never_had_the_order_ask_by_the_next_drivers(sides: Sides) -> None:
    """The driver died between the two halves of an order: one of them was taken, and one dropped.
    The next one orders both anew."""
    sides.answer("sim-r0", attempt="second")
    one = sides.simulators("sim-r0", Steps(0), attempt="first")
    time.sleep(0.5)
    assert one.is_alive(), "nobody knows of the first attempt"
    one.ordered("second")
    assert len(one.ended().made) == 1
    until(lambda: not sides.server.is_busy)


def test_simulators_that_wait_for_their_turn_meanwhile_ask_by_the_next_drivers(
    sides: Sides,
) -> None:
    turns = DeviceSchedule()
    with turns.add((2, 0, 0)):
        one = sides.simulators("sim-r0", Steps(0), turns, attempt="first")
        one.ordered("second")
        sides.answer("sim-r0", attempt="second")
    assert len(one.ended().made) == 1


def test_simulators_that_are_answered_go_on_when_another_driver_orders_them(sides: Sides) -> None:
    one = sides.amid("sim-r0")
    time.sleep(0.3)  # it has heard so
    one.ordered("second")
    sides.answer("sim-r0", attempt="second")
    one.steps.go_on.set()
    assert len(one.ended().made) == 1
    assert one.error is None
