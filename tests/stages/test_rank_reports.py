"""Ranks wait for each other as long as they live, and leave each other's files alone."""

from __future__ import annotations

import os
import shutil
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

import stages.rank_reports
import stages.train
from pipeline.commands.experiment import compose
from rlinf import artifacts
from rlinf.artifacts import Manifest, checksum, content_digest
from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.channels.record_files import RecordFileWriter
from rlinf.config import RunConfig, validate
from rlinf.data.record import Record, RecordId
from rlinf.data.trajectory import Trajectory
from rlinf.errors import StageError, UserCodeError
from rlinf.trainers import sharded_checkpoint
from stages.context import StageContext, StageInput
from stages.dialogue_failures import DialogueFailures
from stages.rank_reports import AttemptRanks
from stages.runner import DISK_FALLBACKS, StageAttempt, StageCall
from stages.worker_state import WorkerState

Work = Callable[[StageContext], None]
TIMEOUT_S = 0.4


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stages.rank_reports, "RANK_TIMEOUT_S", TIMEOUT_S)
    monkeypatch.setattr(stages.rank_reports, "HEARTBEAT_S", 0.02)


class Two:
    """A stage of two ranks, each in a thread."""

    def __init__(self, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.config = validate(RunConfig, compose(["experiment=arithmetic_grpo"]))
        self.run, self.out = run, run / "train"
        self.works: dict[int, Work] = {}
        monkeypatch.setattr(stages.train, "run", lambda ctx: self.works[ctx.world.rank](ctx))
        self._threads = ThreadPoolExecutor(2)

    def start(
        self, rank: int, work: Work, name: str = "a", **inputs: StageInput
    ) -> Future[Manifest]:
        self.works[rank] = work
        now = time.time()
        attempt = StageAttempt(
            StageCall("train", self.run / "config.yaml", self.out),
            self.config,
            ProcessGroupInfo(rank, 2),
            inputs,
            WorkerState(),
            lambda: False,
            process_start=now,
            start=now,
            name=name,
        )
        return self._threads.submit(self._do, attempt)

    def _do(self, attempt: StageAttempt) -> Manifest:
        with attempt.ranks.attempt_scope():
            attempt.compute()
            return attempt.commit()

    def close(self) -> None:
        self._threads.shutdown()


@pytest.fixture
def two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Two:
    return Two(tmp_path, monkeypatch)


def writes(ctx: StageContext) -> None:
    (ctx.data_folder / f"of-{ctx.world.rank}").write_text("1")


def writes_late(ctx: StageContext) -> None:
    time.sleep(3 * TIMEOUT_S)
    writes(ctx)


@pytest.mark.parametrize("late", [0, 1])
def test_a_rank_that_works_for_long_is_waited_for(two: Two, late: int) -> None:
    ends = [two.start(rank, writes_late if rank == late else writes) for rank in range(2)]
    made = [end.result(30) for end in ends]
    assert made[0] == made[1]
    assert set(made[0].files) == {"of-0", "of-1"}
    two.close()
    assert sorted(path.name for path in two.out.iterdir()) == ["data-a", "manifest.json"]
    assert not [t for t in threading.enumerate() if t.name.startswith("sign of")]


def test_files_that_take_long_to_read_are_waited_for(
    two: Two, monkeypatch: pytest.MonkeyPatch
) -> None:
    def slow(path: Path) -> str:
        time.sleep(TIMEOUT_S)
        return checksum(path)

    monkeypatch.setattr(artifacts, "checksum", slow)
    ends = [two.start(rank, writes) for rank in range(2)]
    assert [set(end.result(30).files) for end in ends] == [{"of-0", "of-1"}] * 2
    two.close()


def test_the_folder_may_be_gone_once_the_last_report_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 commits, and removes it, as soon as it has read that."""
    ranks, rename = AttemptRanks(tmp_path / "data-a", ProcessGroupInfo(1, 2)), Path.replace

    def renamed(path: Path, target: Path) -> Path:
        found = rename(path, target)
        shutil.rmtree(ranks.ranks_folder)
        return found

    with ranks.attempt_scope():
        monkeypatch.setattr(Path, "replace", renamed)
        ranks.write_report(metrics={})
    assert not ranks.ranks_folder.exists()


@pytest.mark.parametrize("who", [0, 1])
def test_what_any_rank_read_from_disk_is_said(two: Two, who: int, tmp_path: Path) -> None:
    made = {"files": {}, "inputs": {}, "metrics": {}, "timing": {}, "host": "", "job": ""}
    manifest = Manifest("sync", 0, "key", content_digest({}, {}), "data", **made)

    def falls(ctx: StageContext) -> None:
        ctx.inputs["weights"].used_disk_fallback = ctx.world.rank == who

    inputs = [{n: StageInput(tmp_path, manifest) for n in ("weights", "initial")} for _ in range(2)]
    ends = [two.start(rank, falls, **inputs[rank]) for rank in range(2)]
    assert [end.result(30).extra[DISK_FALLBACKS] for end in ends] == [["weights"]] * 2
    two.close()


def test_a_rank_whose_held_out_episodes_are_all_lost_costs_these_alone(two: Two) -> None:
    """Eight samples on eight ranks: one simulator that dies is one episode."""

    def lost(ctx: StageContext) -> None:
        ctx.log_metric("score", np.nan, weight=0)

    def scored(ctx: StageContext) -> None:
        ctx.log_metric("score", 0.5, weight=3)

    ends = [two.start(rank, work) for rank, work in enumerate((lost, scored))]
    assert ends[0].result(30).metrics == {"score": 0.5}
    assert ends[1].result(30).metrics == {"score": 0.5}
    shutil.rmtree(two.out)
    ends = [two.start(rank, lost, "b") for rank in range(2)]
    with pytest.raises(StageError, match="none of the held-out episodes could be scored"):
        ends[0].result(30)
    two.close()


@pytest.mark.parametrize("bug", [False, True])
def test_outages_are_judged_on_the_dialogues_of_all_ranks(two: Two, bug: bool) -> None:
    """Of eight dialogues on eight ranks one is an eighth, though its rank has no other."""
    values = compose(["experiment=calculator_grpo"])
    two.config = validate(RunConfig, values)

    def ended(lost: int, of: int) -> Work:
        def work(ctx: StageContext) -> None:
            outages = DialogueFailures()
            for number in range(of):
                reason = "error" if number < lost else "stop"
                outages.add(
                    Trajectory(
                        identity=RecordId(0, number),
                        actions=np.zeros(2),
                        stop_reason=reason,
                        tool_errors=0,
                        tool_retries=0,
                        error="KeyError: 'row'" if number < lost else "",
                        failed_in_user_code=int(bug),
                    )
                )
            outages.log_metrics(ctx)

        return work

    def end(name: str, *works: Work) -> Manifest:
        shutil.rmtree(two.out, ignore_errors=True)
        ends = [two.start(rank, work, name) for rank, work in enumerate(works)]
        ends[1].exception(30)  # where rank 0 refuses, it is given up
        return ends[0].result(30)

    assert end("a", ended(1, 1), ended(0, 7)).metrics["failed_ratio"] == 1 / 8
    with pytest.raises(StageError, match=r"5 of 8 dialogues failed, .*(?s:.)*KeyError: 'row'"):
        end("b", ended(1, 1), ended(4, 7))
    with pytest.raises(UserCodeError if bug else StageError, match="KeyError: 'row'"):
        end("c", ended(1, 1), ended(7, 7))
    two.close()


def test_a_rank_that_is_lost_is_given_up_and_what_others_wrote_stays(two: Two) -> None:
    lost = two.out / "data-a.ranks" / "1"
    lost.parent.mkdir(parents=True)
    lost.touch()  # its process was killed
    end = two.start(0, writes)
    with pytest.raises(StageError, match=r"data-a: rank 1 sent no heartbeat for 0 s"):
        end.result(30)
    assert (two.out / "data-a" / "of-0").exists()
    again = [two.start(rank, writes, "b") for rank in range(2)]
    assert [end.result(30).data for end in again] == ["data-b"] * 2
    two.close()
    names = sorted(path.name for path in two.out.iterdir())
    assert names == ["data-b", "manifest.json"], "the next attempt removes what was left"


def test_a_rank_that_never_began_is_given_up_and_nothing_is_left(two: Two) -> None:
    with pytest.raises(StageError, match="rank 1 sent no heartbeat"):
        two.start(0, writes).result(30)
    two.close()
    assert list(two.out.iterdir()) == []


def test_a_rank_that_fails_leaves_the_files_of_one_that_goes_on(two: Two) -> None:
    failed = threading.Event()

    def fails(ctx: StageContext) -> None:
        raise StageError("a step failed")

    def goes_on(ctx: StageContext) -> None:
        writes(ctx)
        failed.wait(30)
        assert (ctx.data_folder / f"of-{ctx.world.rank}").exists()

    for broken in range(2):
        ends = {1 - broken: two.start(1 - broken, goes_on, f"f{broken}")}
        deadline = time.monotonic() + 30
        while not (two.out / f"data-f{broken}/of-{1 - broken}").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)
        with pytest.raises(StageError, match="a step failed"):
            two.start(broken, fails, f"f{broken}").result(30)
        failed.set()
        with pytest.raises(StageError, match=f"rank {broken} sent no heartbeat"):
            ends[1 - broken].result(30)
        failed.clear()
    two.close()


def test_time_in_which_the_waiting_process_was_suspended_does_not_count(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gangs are: both ranks stand still, and one goes on first."""
    now = [0.0]

    def sleep(seconds: float) -> None:
        now[0] += 3600.0

    looks = iter([None, None, None, "there"])
    monkeypatch.setattr(stages.rank_reports.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(stages.rank_reports.time, "sleep", sleep)
    ranks = AttemptRanks(tmp_path / "data-a", ProcessGroupInfo(0, 2))
    assert ranks._wait(1, lambda: next(looks)) == "there"


def test_a_sign_that_is_touched_again_counts_however_old_it_says_it_is(tmp_path: Path) -> None:
    """Its node's clock may be hours off."""
    ranks = AttemptRanks(tmp_path / "data-a", ProcessGroupInfo(0, 2))
    ranks.ranks_folder.mkdir()
    sign, end = ranks.ranks_folder / "1", time.monotonic() + 3 * TIMEOUT_S
    sign.touch()
    hours = iter(range(1, 10_000))

    def look() -> bool | None:
        back = time.time() - 3600 * next(hours)
        os.utime(sign, (back, back))
        return True if time.monotonic() > end else None

    assert ranks._wait(1, look)


def test_each_rank_describes_its_own_files_of_channels_and_checkpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are in its node's memory; rank 0 would read all of a checkpoint from other nodes."""
    data, size = tmp_path / "data-a", 12
    for rank in (0, 1, 11):
        data.mkdir(exist_ok=True)
        writer = RecordFileWriter(data, "rewards-r1-x", rank)
        writer.put(Record(RecordId(0, rank), {"rewards": np.zeros(1, np.float32)}))
        writer.close()
        sharded_checkpoint.write_shards(data / "checkpoint", {"weight": torch.zeros(2)}, rank, size)
    (data / "model-r1.safetensors").write_text("of rank 0")
    for rank in range(size):
        ranks = AttemptRanks(data, ProcessGroupInfo(rank, size))
        ranks.ranks_folder.mkdir(exist_ok=True)
        ranks.write_report()
    values = ranks.wait_for_reports()
    own = {rank: set(report["files"]) for rank, report in enumerate(values) if report["files"]}
    assert own == {
        rank: {
            f"rewards-r1-x-r{rank:03d}-p000.h5",
            f"checkpoint/rank-{rank}-of-{size}.safetensors",
        }
        for rank in (1, 11)
    }
    read: list[str] = []

    def counting(path: Path) -> str:
        read.append(path.name)
        return checksum(path)

    known = {name: entry for report in values for name, entry in report["files"].items()}
    whole = artifacts.describe_files(data)
    monkeypatch.setattr(artifacts, "checksum", counting)
    assert artifacts.describe_files(data, known) == whole
    assert len(read) == 3
    assert "model-r1.safetensors" in read
