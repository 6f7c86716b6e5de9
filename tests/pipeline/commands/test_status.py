"""``rlinf status`` asks little of a controller that all users wait for."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest

import pipeline.commands.status
from pipeline.commands.status import CachedQueueClient, read_status
from pipeline.pools.work_log import WORK_LOG
from rlinf.artifacts import MANIFEST, read_manifest
from slurm.client import SlurmClient
from stages.layout import POOLS_FOLDER
from stages.runner import DISK_FALLBACKS


def test_a_watched_run_asks_for_the_queue_every_half_minute(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    requests, now = [], [100.0]
    monkeypatch.setattr(SlurmClient, "queue", lambda self: requests.append(now[0]) or {})
    monkeypatch.setattr(pipeline.commands.status.time, "monotonic", lambda: now[0])
    client = CachedQueueClient()
    for _ in range(60):
        assert client.queue() == {}
        now[0] += 2.0
    assert requests == [100.0, 132.0, 164.0, 196.0]


def test_what_was_read_from_disk_is_told_of_every_stage_and_of_work_items(
    tiny_run: Path, tmp_path: Path
) -> None:
    run = Path(shutil.copytree(tiny_run, tmp_path / "run"))
    assert read_status(run).disk_fallbacks == {}
    for out in ("it/0001/rollout", "evaluate/0002"):
        manifest = read_manifest(run / out)
        assert manifest is not None
        fallen = replace(manifest, extra={DISK_FALLBACKS: ["weights"]})
        (run / out / MANIFEST).write_text(fallen.to_json())
    (run / POOLS_FOLDER).mkdir(exist_ok=True)
    rows = [{"node": "rollout/1", "used_disk_fallback": used} for used in (True, False, True)]
    lines = "".join(f"{json.dumps(row)}\n" for row in rows)
    (run / POOLS_FOLDER / WORK_LOG).write_text(lines + '{"node"')
    assert read_status(run).disk_fallbacks == {"sync -> rollout": 3, "sync -> evaluate": 1}
