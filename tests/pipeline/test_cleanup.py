"""What killed processes left goes; what belongs to living ones, or to others, stays."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from pipeline.cleanup import remove_orphans as sweep_run
from pipeline.commands.cli import app
from pipeline.commands.experiment import prepare_run
from rlinf import shared_memory as memory
from rlinf.shared_memory import (
    SHM_FOLDER,
    new_segment_name,
    pid_namespace,
    remove_orphaned_segments,
)

WRITE = """
import sys, time, torch
from rlinf.shared_memory import create_segment, new_segment_name
from rlinf.weights.buckets import BucketLayout
from rlinf.weights.shared_weights import SharedWeightsWriter
name = new_segment_name()
writer = SharedWeightsWriter(name, BucketLayout.from_tensors({"w": torch.zeros(100_000)}))
records = new_segment_name()
memory = create_segment(records, 1 << 20)
print(name, records, flush=True)
time.sleep(60)
"""


@pytest.fixture
def killed() -> Iterator[tuple[list[Path], Callable[[], None]]]:
    """Segments of a process, and what kills it with its group."""
    child = subprocess.Popen(
        [sys.executable, "-c", WRITE],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    assert child.stdout is not None
    name, records = child.stdout.readline().split()

    def kill() -> None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    segments = [SHM_FOLDER / f"{name}-0", SHM_FOLDER / f"{name}-1", SHM_FOLDER / records]
    yield segments, kill
    if child.poll() is None:
        kill()
    for path in segments:
        path.unlink(missing_ok=True)


def test_memory_of_a_killed_group_is_swept_by_the_next_process(
    killed: tuple[list[Path], Callable[[], None]],
) -> None:
    segments, kill = killed
    remove_orphaned_segments()
    assert [path.exists() for path in segments] == [True] * 3, "its process lives"
    kill()
    done = subprocess.run(
        [sys.executable, "-m", "stages", "rollout", "--config", "/none", "--out", "/none"],
        capture_output=True,
        check=False,
    )
    assert done.returncode == 65
    assert [path.exists() for path in segments] == [False] * 3


def test_clean_lists_and_then_removes(
    compose: Callable[..., dict[str, Any]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # A folder of its own: what is abandoned in the real one goes with any process of this user.
    monkeypatch.setattr(memory, "SHM_FOLDER", tmp_path / "shm")
    (tmp_path / "shm").mkdir()
    words = new_segment_name().split("-")
    living, dead = tmp_path / "shm" / "-".join(words), tmp_path / "shm"
    dead /= "-".join([*words[:4], "1", words[5]])
    living.touch()
    dead.touch()
    run = prepare_run(compose()).folder
    for name in ("it/0000/sync/.manifest.json.0123abcd", ".plan.yaml.77.0123abcd"):
        (run / name).parent.mkdir(parents=True, exist_ok=True)
        (run / name).touch()
    (run / ".plan.yaml.78.0123abcd").touch()
    (run / ".driver.json.new-0123").write_text("{}")
    litter = [run / "it/0000/sync/.manifest.json.0123abcd", run / ".plan.yaml.77.0123abcd"]
    litter += [run / ".driver.json.new-0123"]
    for path in litter:
        os.utime(path, (0, 0))
    before = sorted(run.rglob("*"))
    request = CliRunner().invoke(app, ["clean", "--dry-run", str(run)])
    assert request.exit_code == 0, request.output
    for path in [dead, *litter]:
        assert str(path) in request.output
    assert ".plan.yaml.78" not in request.output, "it is being written"
    assert sorted(run.rglob("*")) == before
    assert str(living) not in request.output
    assert dead.exists()
    assert CliRunner().invoke(app, ["clean", str(run)]).exit_code == 0
    assert not any(path.exists() for path in [dead, *litter])
    assert living.exists()
    assert (run / "config.yaml").exists()


def test_the_next_driver_sweeps_what_killed_ones_never_finished(
    compose: Callable[..., dict[str, Any]],
) -> None:
    run = prepare_run(compose("iterations=1"))
    (run.folder / "it").mkdir()
    old = run.folder / "it" / ".manifest.json.0badc0de"
    young = run.folder / ".metrics.jsonl.12.0badc0de"
    for path in (old, young):
        path.touch()
    stale = run.folder / ".driver.json.new-0123"
    stale.write_text("{}")
    for path in (old, stale):
        os.utime(path, (1, 1))
    sweep_run(run.folder)
    assert not old.exists()
    assert young.exists(), "it may still be written"
    assert not stale.exists()


def test_clean_wants_run_directories(tmp_path: Path) -> None:
    (tmp_path / ".manifest.json.0123abcd").touch()
    done = CliRunner().invoke(app, ["clean", str(tmp_path)])
    assert done.exit_code
    assert (tmp_path / ".manifest.json.0123abcd").exists()


@pytest.mark.parametrize("whose", ["another user", "another space", "no name of ours"])
def test_memory_of_others_stays(whose: str) -> None:
    mine = new_segment_name().removeprefix(memory.SEGMENT_PREFIX).split("-")
    mine[2:4] = ["1", "1"]
    if whose == "another user":
        mine[0] = str(os.getuid() + 1)
    elif whose == "another space":
        mine[1] = str(pid_namespace() + 1)
    else:
        mine[3] = "x"
    path = SHM_FOLDER / f"{memory.SEGMENT_PREFIX}{'-'.join(mine)}"
    path.touch()
    try:
        remove_orphaned_segments()
        assert path.exists()
    finally:
        path.unlink()


def test_a_socket_in_a_folder_of_shared_memory_has_a_path_that_can_be_bound(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a user with a long number on a machine that was up for months, as vLLM makes it."""
    monkeypatch.setattr("rlinf.shared_memory.pid_namespace", lambda: 4026533333)
    monkeypatch.setattr("rlinf.shared_memory.own_start_time", lambda: 2_000_000_000)
    monkeypatch.setattr(os, "getuid", lambda: 1_867_200_512)
    monkeypatch.setattr(os, "getpid", lambda: 4_194_303)
    assert len(str(SHM_FOLDER / new_segment_name() / str(uuid.uuid4()))) <= 107
