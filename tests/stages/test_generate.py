"""Claims of a generator have their turns among the other stages of its worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import pytest

from pipeline.experiment import execute
from rlinf.artifacts import read_manifest
from rlinf.config import RunConfig
from stages.activity import Activity
from stages.board import Board
from stages.generate import Generator, unfinished
from stages.inbox import Inbox, Outbox
from stages.layout import CONFIG
from stages.runner import load_config
from stages.turns import Turns

OUT = "it/0000/rollout"


class Bench:
    """A generator with the real engine, and the inbox where its trajectories go."""

    def __init__(self, run: Path) -> None:
        self.run, self.config = run, load_config(run / CONFIG)
        folder = run / "channels"
        self.board, self.turns = Board(), Turns()
        self.inbox, self.outbox = Inbox(folder, "w", self.board), Outbox(folder)
        self.reports: Queue[dict[str, Any]] = Queue()
        self.generator = self._make(self.config)

    def _make(self, config: RunConfig) -> Generator:
        return Generator(
            self.run,
            config,
            self.board,
            self.outbox,
            self.turns,
            {},
            Activity(),
            self.reports.put,
            lambda: False,
        )

    def claim(self, name: str, *starts: int, iteration: int = 0, **more: Any) -> None:
        order = {
            "claim": name,
            "name": name,
            "iteration": iteration,
            "position": (iteration, 0, 0),
            "out": OUT,
            "weights": "warm_start",
            "to": "w",
            "starts": starts,
            "begun": None,
        }
        self.generator.claim({**order, **more})

    def report(self) -> dict[str, Any]:
        said = self.reports.get(timeout=60)
        assert not said["code"], said["reason"]
        return said

    def texts(self, out: str, count: int) -> dict[int, Any]:
        """What came to who gathers, by sample, once there are so many."""
        arriving = self.board.output(out).arriving("trajectories", count, lambda: False)
        return {record.identity.sample: record.info["text"] for record in arriving}

    def close(self) -> None:
        self.generator.close()
        self.outbox.close()
        self.inbox.close()


@pytest.fixture
def bench(compose: Callable[..., dict[str, Any]], tmp_path: Path) -> Iterator[Bench]:
    execute(compose("iterations=1", "rollout.horizon=64"))
    run = tmp_path / "tiny"
    assert read_manifest(run / "warm_start") is not None
    made = Bench(run)
    yield made
    made.close()


def test_claims_are_done_by_iteration_whatever_came_first(bench: Bench) -> None:
    """Tails and starts of lost workers come late; neither claim may wait for the other's turn."""
    waits = bench.turns.enter((1, 0, 0))
    with bench.turns.enter((0, 0, 0)):
        bench.claim("late", 0, iteration=2)
        bench.claim("early", 1)
    assert bench.report()["claim"] == "early"
    with waits:
        assert bench.reports.empty(), "a stage of the iteration in between goes first"
    assert bench.report()["claim"] == "late"


def test_a_stage_has_its_turn_after_all_claims_and_a_dropped_one_holds_nobody_up(
    bench: Bench,
) -> None:
    order: list[str] = []
    with bench.turns.enter((0, 0, 0)):
        bench.claim("first", 0)
        bench.claim("dropped", 1)
        trains = bench.turns.enter((0, 0, 3))

        def train() -> None:
            with trains:
                order.append("train")

        thread = threading.Thread(target=train)
        thread.start()
        bench.generator.drop()
        bench.claim("second", 1)
        bench.generator.submit(lambda: order.append("generated"))
    assert bench.report()["claim"] == "second"
    thread.join(60)
    assert sorted(order) == ["generated", "train"]
    size = bench.config.rollout.group_size
    there = bench.texts(OUT, size)
    assert there.keys() == set(range(size, 2 * size)), "dropped ones are not generated"


def test_the_tail_of_a_claim_goes_to_its_heir_who_goes_on_with_it(bench: Bench) -> None:
    bench.claim("whole", 0, 1)
    bench.report()
    whole = bench.texts(OUT, 2 * bench.config.rollout.group_size)
    out = "it/0000/elsewhere"
    with bench.turns.enter((0, 0, 0)):
        bench.claim("cut", 0, 1, out=out)
        bench.generator.hand_over("cut", "w")
    said = bench.report()
    assert 1 <= said["samples"] <= len(whole) // 4, "a quarter or less is handed over"
    assert set(said["rest"]) <= {0, 1}
    channel = unfinished("cut")
    bench.claim(
        "heir", *said["rest"], out=out, begun={"channel": channel, "samples": said["samples"]}
    )
    assert "rest" not in bench.report()
    assert bench.texts(out, len(whole)) == whole
