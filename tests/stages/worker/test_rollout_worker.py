"""Claims of a generator have their turns among the other stages of its worker."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import pytest
from safetensors.torch import load_file

from pipeline.commands.experiment import compose, prepare_run, run_sft
from rlinf.artifacts import MANIFEST, read_manifest
from rlinf.channels.requests import RequestServer
from rlinf.config import RunConfig
from rlinf.data.record import Record
from rlinf.data.trajectory import Trajectory
from rlinf.errors import EXIT_BAD_INPUT, EXIT_REQUEUE, UpstreamFailed
from stages.device_schedule import DeviceSchedule
from stages.factory import WEIGHTS
from stages.layout import (
    CHANNELS_FOLDER,
    CONFIG_FILE,
    partial_samples_channel,
    work_item_channel,
    worker_pointer,
)
from stages.live_store import LiveStore
from stages.runner import load_config
from stages.worker import rollout_worker
from stages.worker.messages import FetchOutput, GenerateStarts, PartialSamples, WorkItemEnded
from stages.worker.record_transfer import SOCKET, Fetcher, RecordFetch, RecordServer
from stages.worker.rollout_worker import RolloutWorker
from stages.worker_state import ActivityTracker, WorkerState
from tests.conftest import QUIET, TINY

OUT = "it/0000/rollout"


class Bench:
    """A generator with the real engine, which also collects its trajectories."""

    def __init__(self, run: Path) -> None:
        self.run, self.config = run, load_config(run / CONFIG_FILE)
        folder = run / CHANNELS_FOLDER
        self.store, self.turns = LiveStore(), DeviceSchedule()
        handle = RecordServer(self.store).handle
        self.server = RequestServer(worker_pointer(folder, "w"), handle)
        self.fetcher = Fetcher(folder)
        self.fetches = True
        self.reports: Queue[WorkItemEnded] = Queue()
        self.worker_state = WorkerState()
        self.generator = self._make(self.config)

    def _make(self, config: RunConfig) -> RolloutWorker:
        return RolloutWorker(
            self.run,
            config,
            self.store,
            self.turns,
            self.worker_state,
            ActivityTracker(),
            self.reports.put,
            lambda: False,
        )

    def generate(self, name: str, *starts: int, iteration: int = 0, **more: Any) -> None:
        usual = {"output": OUT, "weights": "sft", "weights_attempt": None, "receiver": "w"}
        about = {"work_item": name, "label": name, "iteration": iteration, "starts": starts}
        order = GenerateStarts(**{**about, **usual, **more})
        if self.fetches:
            fetch = FetchOutput(
                output=order.output,
                channel="trajectories",
                producers=("w",),
                transport=SOCKET,
                work_item=name,
                source_attempt=order.weights_attempt,
            )
            self.fetcher.add("w", RecordFetch(fetch, "w", self.store))
        self.generator.enqueue(order)

    def report(self, code: int = 0) -> WorkItemEnded:
        report = self.reports.get(timeout=60)
        assert report.exit_code == code, report.reason
        return report

    def weights(self, out: str, attempt: str) -> None:
        """Have weights come to the store: the first ones, by another name."""
        (path,) = self.run.glob("sft/data-*/weights/model.safetensors")
        self.store.output(out).put_object(attempt, WEIGHTS, load_file(path))

    def texts(self, out: str, count: int) -> dict[int, Any]:
        """The collected texts by sample, once there are so many."""
        arriving = self.store.output(out).iter_records("trajectories", count, lambda: False)
        return {record.identity.sample: record.info["text"] for record in arriving}

    def close(self) -> None:
        self.generator.close()
        self.fetcher.close()
        self.server.close()


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run after SFT."""
    root = tmp_path_factory.mktemp("warm")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", *QUIET, *TINY]
    run = prepare_run(compose([*words, "iterations=1", "++rollout.horizon=64"]))
    run_sft(run)
    assert read_manifest(run.folder / "sft") is not None
    return run.folder


@pytest.fixture
def bench(warm: Path, tmp_path: Path) -> Iterator[Bench]:
    made = Bench(shutil.copytree(warm, tmp_path / "tiny"))
    yield made
    made.close()


def test_claims_are_done_by_iteration_whatever_came_first(bench: Bench) -> None:
    """Tails and starts of lost workers come late, and more waits for them."""
    with bench.turns.add((0, 0, 0)):
        bench.generate("late", 0, iteration=2)
        bench.generate("early", 1)
    assert [bench.report().work_item for _ in range(2)] == ["early", "late"]


def test_claims_fill_the_time_in_which_stages_wait(bench: Bench) -> None:
    """A stage that has its inputs goes first; a dropped work item takes no time."""
    with bench.turns.add((0, 0, 0)) as stage:
        bench.generate("dropped", 0)
        bench.generator.cancel()
        bench.generate("wanted", 1)
        assert bench.reports.empty(), "the stage computes"
        with stage.released():
            assert bench.report().work_item == "wanted"
    size = bench.config.rollout.group_size
    there = bench.texts(OUT, size)
    assert there.keys() == set(range(size, 2 * size)), "dropped ones are not generated"


def test_a_claim_that_was_not_begun_is_handed_over_whole(bench: Bench) -> None:
    with bench.turns.add((0, 0, 0)):
        bench.generate("waits", 0, 1)
        bench.generator.reassign("waits")
        report = bench.report()
    assert (report.unfinished_starts, report.num_partial_samples) == ((0, 1), 0)


def test_the_tail_of_a_claim_goes_to_its_heir_who_goes_on_with_it(bench: Bench) -> None:
    bench.generate("whole", 0, 1)
    bench.report()
    whole = bench.texts(OUT, 2 * bench.config.rollout.group_size)
    out = "it/0000/elsewhere"
    bench.generate("cut", 0, 1, output=out)
    while not bench.turns.is_busy or bench.generator._queue:
        time.sleep(0)
    bench.generator.reassign("cut")
    report = bench.report()
    assert 1 <= report.num_partial_samples <= len(whole) // 4, "a quarter or less is handed over"
    assert set(report.unfinished_starts) <= {0, 1}
    channel = partial_samples_channel("cut")
    begun = PartialSamples(
        worker="w",
        item_number=0,
        channel=channel,
        num_samples=report.num_partial_samples,
        weights_attempt=None,
    )
    bench.generate("heir", *report.unfinished_starts, output=out, partial=begun)
    assert not bench.report().unfinished_starts
    assert bench.texts(out, len(whole)) == whole


def test_unfinished_samples_of_a_lost_worker_go_back(bench: Bench) -> None:
    lost = PartialSamples(
        worker="lost", item_number=0, channel="any", num_samples=1, weights_attempt=None
    )
    bench.generate("heir", 0, partial=lost)
    assert "no unfinished samples from lost" in bench.report(EXIT_REQUEUE).reason


def test_a_work_item_whose_trajectories_nobody_fetches_goes_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rollout_worker, "FETCH_TIMEOUT_S", 0.5)
    bench.fetches = False
    bench.generate("lonely", 0)
    assert "w has not fetched all trajectories" in bench.report(EXIT_REQUEUE).reason
    channel = work_item_channel("lonely")
    assert not bench.store.output(OUT).has_stream(channel), "nothing is kept"


def test_a_work_item_whose_trajectories_cannot_be_sent_ends_with_the_error(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its receiver would wait for them in vain."""
    to_record = Trajectory.to_record

    def with_object(self: Trajectory) -> Record:
        record = to_record(self)
        record.steps["unknown"] = np.array([object()] * len(record))
        return record

    with monkeypatch.context() as patch:
        patch.setattr(Trajectory, "to_record", with_object)
        bench.generate("damaged", 0)
        reason = bench.report(EXIT_BAD_INPUT).reason
    assert "cannot be sent: array 'unknown' has element type object" in reason
    bench.generate("sound", 1)
    assert not bench.report().reason, "the next work item is not affected"


def test_a_work_item_that_its_collector_no_longer_needs_is_over(bench: Bench) -> None:
    """Its last sample may have ended the rollout, which cancels all work items."""
    bench.fetches = False
    bench.generate("last", 0)
    stream = bench.store.output(OUT).stream(work_item_channel("last"))
    while stream._own_end is None:
        time.sleep(0.01)
    bench.generator.cancel()
    assert not bench.report().unfinished_starts


SYNC = "it/0000/sync"


def made_of(bench: Bench, attempt: str) -> None:
    """See that all samples that came say of which weights they were made."""
    arriving = bench.store.output(OUT).iter_records("trajectories", 1, lambda: False, attempt)
    next(arriving)


def test_a_work_item_uses_uncommitted_weights_from_the_live_store(bench: Bench) -> None:
    bench.generate("prepares")
    bench.report()
    bench.weights(SYNC, "data-a")
    bench.generate("live", 0, iteration=1, weights=SYNC, weights_attempt="data-a")
    report = bench.report()
    assert [name for name, *_ in report.spans] == ["load", "generate"]
    assert not report.used_disk_fallback
    made_of(bench, "data-a")
    with pytest.raises(UpstreamFailed):
        made_of(bench, "data-b")


def test_a_claim_says_that_its_weights_were_lost_on_the_way(bench: Bench) -> None:
    bench.generate("prepares")
    assert not bench.report().used_disk_fallback, "the first ones always come from disk"
    manifest = read_manifest(shutil.copytree(bench.run / "sft", bench.run / SYNC))
    assert manifest is not None
    bench.worker_state.engine_weights = "older ones"
    bench.generate("lost", 0, iteration=1, weights=SYNC, weights_attempt=manifest.data)
    assert bench.report().used_disk_fallback


def test_a_work_item_uses_committed_weights_from_the_live_store(bench: Bench) -> None:
    """And from the disk if another attempt was committed."""
    bench.generate("prepares")
    bench.report()
    folder = bench.run / SYNC
    folder.parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(bench.run / "sft", folder)
    manifest = read_manifest(folder)
    assert manifest is not None
    for attempt, spans in (("data-a", ["verify"]), (manifest.data, [])):
        bench.worker_state.engine_weights = "older ones"
        bench.weights(SYNC, attempt)
        bench.generate(attempt, 0, iteration=1, weights=SYNC)
        names = [name for name, *_ in bench.report().spans]
        assert [name for name in names if name == "verify"] == spans


def test_a_claim_whose_weights_are_not_there_goes_back(bench: Bench) -> None:
    """It does not wait for them: they may be made again by whom it would hold up."""
    bench.weights(SYNC, "data-a")
    live = {"iteration": 1, "weights": SYNC}
    bench.generate("no engine", 0, **live, weights_attempt="data-a")
    bench.report(EXIT_REQUEUE)
    bench.generate("prepares")
    bench.report()
    bench.generate("another attempt", 0, **live, weights_attempt="data-b")
    assert "data-b" in bench.report(EXIT_REQUEUE).reason


def test_a_claim_whose_weights_were_withdrawn_goes_back(bench: Bench) -> None:
    """Also one of committed weights: the stage that makes them again may be of this worker."""
    (bench.run / "sft" / MANIFEST).rename(bench.run / "withdrawn")
    bench.generate("first", 0)
    assert "sft are neither in memory nor committed" in bench.report(EXIT_REQUEUE).reason
    (bench.run / "withdrawn").rename(bench.run / "sft" / MANIFEST)
    bench.generate("again", 0)
    bench.report()
