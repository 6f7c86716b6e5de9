"""The report shows what is there, hides nothing dangerous, and needs nothing from outside."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline import metrics
from pipeline.experiment import execute, prepare
from pipeline.report import write_report
from pipeline.report.data import read
from pipeline.report.page import tiles
from pipeline.status import read_status
from rlinf.artifacts import prune, read_manifest
from rlinf.channels.file import read_records, write_records
from tests.conftest import TINY

Compose = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from pipeline.experiment import compose as hydra_compose

    root = tmp_path_factory.mktemp("runs")
    words = ["experiment=arithmetic_grpo", f"++run.root={root}", *TINY]
    execute(hydra_compose([*words, "++log.trackers=[tensorboard]"]))
    return root / "tiny"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    copy = tmp_path / "copy"
    shutil.copytree(finished, copy)
    return copy


def test_all_charts_are_there_and_nothing_comes_from_outside(run: Path) -> None:
    page = write_report(run).read_text()
    pictures = {path.stem: path.stat().st_size for path in (run / "report").glob("*.png")}
    assert pictures.keys() == {
        "learning",
        "training",
        "stage-times",
        "gantt",
        "throughput",
        "distributions",
    }
    assert min(pictures.values()) > 5000
    for name in pictures:
        assert f'id="{name}"' in page
    links = re.findall(r'(?:src|href|url)\s*[=(]\s*["\']?(https?:[^"\')\s]+)', page)
    assert links == []
    assert "<script" not in page


def test_hostile_transcripts_stay_text(run: Path) -> None:
    folder = run / "it/0001/rollout"
    manifest = read_manifest(folder)
    assert manifest is not None
    (path,) = (folder / manifest.data).glob("*.h5")
    records = read_records(path)
    for record in records:
        record.info["text"] = "<script>alert(1)</script>"
    path.unlink()
    write_records(path, records)
    page = write_report(run).read_text()
    assert "<script>" not in page
    assert "&lt;script&gt;" in page


def test_unfinished_and_pruned_runs_have_a_report(run: Path, compose: Compose) -> None:
    shutil.rmtree(run / "it/0001/train")
    prune(run / "it/0000/rollout")
    shutil.rmtree(run / "evaluate")
    assert write_report(run).exists()
    empty = prepare(compose())
    assert write_report(empty.folder).exists()


def test_metrics_are_rebuilt_to_the_same_bytes(run: Path) -> None:
    before = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").unlink()
    metrics.write(run)
    assert (run / "metrics.jsonl").read_bytes() == before
    timings = [json.loads(line) for line in (run / "timings.jsonl").read_text().splitlines()]
    assert len(timings) == 10
    assert all(timing["end"] > timing["start"] for timing in timings)


def test_tensorboard_has_each_step_once(run: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(run / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("reward/mean")] == [1, 2]
    assert [event.step for event in events.Scalars("evaluate/score")] == [0, 1, 2]


def test_the_status_of_a_run(run: Path) -> None:
    status = read_status(run)
    assert (status.finished, status.total, status.stage) == (2, 2, "finished")
    assert status.versions == [0, 1, 2]
    shutil.rmtree(run / "it/0001/train")
    shutil.rmtree(run / "it/0001/sync")
    status = read_status(run)
    assert (status.finished, status.stage) == (1, "train of iteration 1")
    assert status.eta_s is not None


def test_the_tiles_name_the_scores(run: Path) -> None:
    shown = dict(tiles(read(run)))
    assert shown["iterations"] == "2 of 2"
    assert {"held-out score before RL", "held-out score now"} <= shown.keys()


def test_workers_of_pools_have_lanes_of_their_own_and_waits_do_not_count(run: Path) -> None:
    assert "<h2>Idle time</h2>" in write_report(run).read_text()
    path = run / "it/0001/train/manifest.json"
    manifest = json.loads(path.read_text())
    (whole,) = [span for span in manifest["timing"]["spans"] if span["name"] == "train"]
    whole["worker"] = "pool-1-3-r0"
    wait = {**whole, "name": "wait", "end": (whole["start"] + whole["end"]) / 2}
    manifest["timing"]["spans"] = [wait, whole]
    path.write_text(json.dumps(manifest))
    data = read(run)
    lane = f"pool 1 · rank 0 · {whole['host']}"
    mine = [piece for piece in data.pieces if piece.lane == lane]
    assert [piece.computes for piece in mine] == [False, True]
    (entry,) = [s for s in data.stages if (s["stage"], s["iteration"]) == ("train", 1)]
    assert entry["seconds"] == pytest.approx((whole["end"] - whole["start"]) / 2, abs=1e-6)
    assert lane in write_report(run).read_text()
