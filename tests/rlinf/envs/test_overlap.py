"""Time loops that take turns get their own replies and give their records in order."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.envs.episode_runner import EpisodeLoop, run_interleaved


def part(sample: int, steps: int) -> EpisodeLoop:
    """Adds up what it is told, ``steps`` times."""
    total = 0
    for time in range(steps):
        settings = {"sample": np.array([sample]), "observation": np.array([[time]])}
        reply = yield Record(RecordId(0, sample), settings)
        assert reply.steps["sample"][0] == sample
        total += int(reply.steps["action"][0])
    return [Trajectory(identity=RecordId(0, sample), actions=np.zeros(0), extra={"total": total})]


@given(lengths=st.lists(st.integers(0, 5), max_size=5), choices=st.randoms(use_true_random=False))
@settings(max_examples=60, deadline=None)
def test_replies_in_any_order_reach_the_loop_that_asked(lengths: list[int], choices) -> None:
    waiting: list[Record] = []

    def get() -> Record:
        request = waiting.pop(choices.randrange(len(waiting)))
        sample, time = int(request.steps["sample"][0]), int(request.steps["observation"][0, 0])
        steps = {"sample": request.steps["sample"], "action": np.array([100 * sample + time])}
        return Record(request.identity, steps)

    parts = [part(sample, steps) for sample, steps in enumerate(lengths)]
    records = run_interleaved(parts, waiting.append, get)
    assert [record.identity.sample for record in records] == list(range(len(lengths)))
    expected = [sum(100 * k + t for t in range(steps)) for k, steps in enumerate(lengths)]
    assert [record.extra["total"] for record in records] == expected
    assert not waiting


def test_a_loop_is_stepped_while_another_waits() -> None:
    order: list[str] = []
    waiting: list[Record] = []

    def put(request: Record) -> None:
        order.append(f"asked {request.identity.sample}")
        waiting.append(request)

    def get() -> Record:
        request = waiting.pop(0)
        order.append(f"answered {request.identity.sample}")
        return Record(
            request.identity, {"sample": request.steps["sample"], "action": np.array([0])}
        )

    run_interleaved([part(0, 2), part(1, 2)], put, get)
    assert order == [
        *("asked 0", "asked 1", "answered 0", "asked 0"),
        *("answered 1", "asked 1", "answered 0", "answered 1"),
    ]
