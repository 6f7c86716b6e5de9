"""A worker keeps what its stages are to read, however much is ordered, and nothing else."""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml

import stages.inference
import stages.rank_reports
import stages.reward
import stages.rollout
import stages.worker.main
from pipeline.commands.experiment import compose
from rlinf.artifacts import Manifest, commit_output, content_digest, read_manifest
from rlinf.channels.control_link import Controller, PeerReport
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record, RecordId
from slurm.stop_signals import StopFlag
from stages.context import StageContext
from stages.layout import CONFIG_FILE, work_item_channel
from stages.worker import messages
from stages.worker.main import CHANNELS_FOLDER, PoolWorker
from stages.worker.messages import StageOrder, WorkItemEnded, read_report
from stages.worker.policy_client import PolicyClient
from stages.worker.record_transfer import SOCKET
from tests.conftest import QUIET, TINY
from tests.stages.worker.test_record_transfer import Worker

NAME, SAMPLES = "pool-0-1-r0", 16
MANY = 100
"""Rollouts ordered at once, as with a staleness of 64; more than anybody keeps by a count."""


def trajectory(sample: int) -> Record:
    steps = {"actions": np.zeros(3, np.int64)}
    return Record(RecordId(0, sample), steps, info={"stop_reason": "end", "group": 0})


class Bench:
    """A worker in a thread of its own, and the driver's end of its link."""

    def __init__(self, run: Path) -> None:
        self.run, self.stop = run, StopFlag()
        words = ["experiment=arithmetic_grpo", f"++run.root={run}", *QUIET, *TINY]
        values = compose(words)
        (run / CONFIG_FILE).write_text(yaml.safe_dump(values))
        config = validate(RunConfig, values)
        self.controller = Controller(run / CHANNELS_FOLDER)
        self.worker = PoolWorker(run, config, "pool-0-1", self.stop, uncast=False, deltas=False)
        self._thread = threading.Thread(target=self.worker.serve, args=(600.0,), daemon=True)
        self._thread.start()
        self.reports: dict[str, WorkItemEnded] = {}

    def order(self, *orders: StageOrder) -> None:
        self.controller.send_order(NAME, messages.RunStages(stages=orders).to_dict())

    def fetch(self, producer: str, output: str, work_item: str = "") -> None:
        order = messages.FetchOutput(
            output=output,
            channel="trajectories",
            producers=(producer,),
            transport=SOCKET,
            work_item=work_item,
        )
        self.controller.send_order(NAME, order.to_dict())

    def ended(self, node: str, timeout_s: float = 20.0) -> WorkItemEnded:
        """What the worker said of a stage in the end."""
        deadline = time.monotonic() + timeout_s
        while node not in self.reports and time.monotonic() < deadline:
            for event in self.controller.poll_events(0.1):
                report = read_report(event.content) if isinstance(event, PeerReport) else None
                if isinstance(report, WorkItemEnded):
                    self.reports[report.work_item] = report
        report = self.reports[node]
        assert not report.exit_code, report.reason
        return report

    def close(self) -> None:
        self.controller.send_order(NAME, messages.ShutDown().to_dict())
        self._thread.join(30)
        self.controller.close()


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Bench]:
    made = Bench(tmp_path)
    yield made
    made.close()


def order(stage: str, iteration: int, *inputs: str, gathers: bool = False) -> StageOrder:
    """To make a stage of some of the same iteration, which are under way here."""
    live = {name: (f"it/{iteration:04d}/{source}", True) for name, source in map(split, inputs)}
    if gathers:
        live["weights"] = ("sft", False)
    return StageOrder(
        node=f"{stage}/{iteration}",
        stage=stage,
        iteration=iteration,
        position=(iteration, 0, ["rollout", "reward", "inference"].index(stage)),
        num_chunks=1,
        output=f"it/{iteration:04d}/{stage}",
        attempt=f"{stage}{iteration}",
        ranks=(0,),
        inputs=live,
        receives_trajectories=gathers,
    )


def split(word: str) -> tuple[str, str]:
    name, _, source = word.partition("<")
    return name, source


def until(there: Callable[[], bool], timeout_s: float = 20.0) -> bool:
    deadline = time.monotonic() + timeout_s
    while not there() and time.monotonic() < deadline:
        time.sleep(0.01)
    return there()


def test_records_reach_the_first_of_very_many_rollouts_that_were_ordered(bench: Bench) -> None:
    about = {"files": {}, "inputs": {}, "metrics": {}, "timing": {}, "extra": {}}
    content = content_digest({}, {})
    (bench.run / "sft" / "data").mkdir(parents=True)
    commit_output(
        bench.run / "sft",
        Manifest("sft", 0, "key", content, "data", **about, host="", job="", world=1),
    )
    bench.order(*(order("rollout", iteration, gathers=True) for iteration in range(MANY)))
    generator = Worker(bench.run / CHANNELS_FOLDER, "generator")
    bench.fetch("generator", "it/0000/rollout", "one")
    assert until(lambda: len(bench.worker._stage_threads) == MANY)
    stream = generator.store.output("it/0000/rollout").stream(work_item_channel("one"))
    for sample in range(SAMPLES):
        stream.put(trajectory(sample))
    bench.ended("rollout/0")
    generator.close()


def test_records_are_freed_once_they_are_on_disk_and_were_read(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[weakref.ref[Record]] = []
    read: list[int] = []
    goes_on = threading.Event()

    def rollout(ctx: StageContext) -> None:
        trajectories = ctx.open_writer("trajectories")
        for sample in range(SAMPLES):
            record = trajectory(sample)
            made.append(weakref.ref(record))
            trajectories.put(record)
        trajectories.close()

    def reward(ctx: StageContext) -> None:
        goes_on.wait(20)
        read.append(len(ctx.read_records("trajectories", range(SAMPLES))))

    monkeypatch.setattr(stages.rollout, "run", rollout)
    monkeypatch.setattr(stages.reward, "run", reward)
    taker = Worker(bench.run / CHANNELS_FOLDER, "taker")
    for iteration in range(3):
        out = f"it/{iteration:04d}/rollout"
        taker.fetch_order(
            messages.FetchOutput(
                output=out, channel="trajectories", producers=(NAME,), transport=SOCKET
            )
        )
    bench.order(
        *(order("rollout", i) for i in range(3)),
        *(order("reward", i, "trajectories<rollout") for i in range(3)),
    )
    bench.ended("rollout/0")
    time.sleep(0.3)
    assert any(ref() for ref in made), "a stage here is still to read them"
    goes_on.set()
    for iteration in range(3):
        bench.ended(f"reward/{iteration}")
    assert read == [SAMPLES] * 3
    assert len(made) == 3 * SAMPLES
    assert until(lambda: not any(ref() for ref in made))
    there = taker.store.output("it/0002/rollout").stream("trajectories")
    assert until(lambda: there.is_complete(range(SAMPLES + 1)))
    taker.close()


def test_a_stage_that_fails_before_it_computes_holds_up_no_other(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = stages.worker.main.AttemptRanks

    def create_or_fail(folder: Path, *arguments: Any) -> Any:
        if folder.parent.name == "rollout":
            raise OSError("no space for the folder of the ranks")
        return create(folder, *arguments)

    monkeypatch.setattr(stages.worker.main, "AttemptRanks", create_or_fail)
    monkeypatch.setattr(stages.reward, "run", lambda ctx: ctx.open_writer("rewards").close())
    bench.order(order("rollout", 0), order("reward", 0))
    bench.ended("reward/0")
    with pytest.raises(AssertionError, match="no space for the folder of the ranks"):
        bench.ended("rollout/0")


@pytest.mark.parametrize("came", [0, 3])
def test_who_comes_late_reads_the_rest_of_what_was_sent_from_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, came: int
) -> None:
    """The worker that made it has committed it and let go of it, or was lost."""

    def rollout(ctx: StageContext) -> None:
        trajectories = ctx.open_writer("trajectories")
        for sample in range(SAMPLES):
            trajectories.put(trajectory(sample))
        trajectories.close()

    read: list[list[int]] = []

    def inference(ctx: StageContext) -> None:
        for samples in (range(3), range(3, SAMPLES)):
            read.append([r.identity.sample for r in ctx.read_records("trajectories", samples)])

    monkeypatch.setattr(stages.rollout, "run", rollout)
    monkeypatch.setattr(stages.inference, "run", inference)
    bench.order(order("rollout", 0))
    bench.ended("rollout/0")
    assert read_manifest(bench.run / "it/0000/rollout") is not None
    assert until(lambda: "it/0000/rollout" not in bench.worker._live_store)
    producer = Worker(bench.run / CHANNELS_FOLDER, "producer")
    for sample in range(came):
        producer.stream.put(trajectory(sample))
    bench.fetch("producer", "it/0000/rollout")
    received = bench.worker._live_store.output("it/0000/rollout").stream("trajectories")
    assert until(lambda: len(received) == came)
    bench.order(order("inference", 0, "trajectories<rollout"))
    bench.ended("inference/0")
    assert read == [[0, 1, 2], list(range(3, SAMPLES))]
    producer.close()


def test_a_rank_that_waits_for_its_turn_gives_signs_of_life(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The others of its stage may have had theirs long ago, and wait for it."""
    goes_on = threading.Event()
    monkeypatch.setattr(stages.rank_reports, "HEARTBEAT_S", 0.02)
    monkeypatch.setattr(stages.rollout, "run", lambda ctx: goes_on.wait(20))
    bench.order(order("rollout", 0), order("rollout", 1).model_copy(update={"ranks": (0, 1)}))
    sign = bench.run / "it/0001/rollout/data-rollout1.ranks/0"
    assert until(sign.exists)
    first = sign.stat().st_mtime_ns
    assert until(lambda: sign.stat().st_mtime_ns > first)
    assert not sign.parent.with_name("data-rollout1").exists(), "it has not begun"
    goes_on.set()
    bench.ended("rollout/0")
    report = {"files": {}, "metrics": {}, "spans": [], "usage": [], "digests": {}, "faults": []}
    temporary = sign.parent / ".1.json"
    temporary.write_text(json.dumps(report | {"fallbacks": []}))
    temporary.replace(sign.parent / "1.json")  # Rank 0 polls: it must not read half a report.
    bench.ended("rollout/1")
    assert not sign.parent.exists()


def test_a_stage_under_way_that_is_ordered_once_more_is_told_so_and_computed_once(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the driver after one that died: it may be the only one that the policy has heard."""
    goes_on = threading.Event()
    began: list[str] = []
    calls: list[str] = []

    def rollout(ctx: StageContext) -> None:
        began.append(ctx.data_folder.name)
        goes_on.wait(20)

    monkeypatch.setattr(stages.rollout, "run", rollout)
    monkeypatch.setattr(PolicyClient, "update_order", lambda _, order: calls.append(order.attempt))
    one = order("rollout", 0).model_copy(update={"policy_workers": ("policy-r0",)})
    bench.order(one)
    assert until(lambda: bool(began))
    bench.order(one.model_copy(update={"attempt": "second"}))
    assert until(lambda: bool(calls))
    goes_on.set()
    bench.ended("rollout/0")
    assert (began, calls) == (["data-rollout0"], ["second"])
