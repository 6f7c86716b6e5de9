"""A full disk stops the run with a clear error and corrupts nothing."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pipeline.commands.experiment import drive, run_experiment
from pipeline.run import Run
from rlinf.artifacts import read_manifest, verify_output
from rlinf.errors import StorageError, to_resource_error
from tests.pipeline.helpers import contents

Compose = Callable[..., dict[str, Any]]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A filesystem of its own with room for little."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=3m", "tmpfs", str(folder)]
    if os.geteuid() or subprocess.run(mount, check=False, capture_output=True).returncode:
        pytest.skip("mounting a small filesystem needs root")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)


def test_the_run_stops_and_goes_on_once_there_is_room(compose: Compose, small_disk: Path) -> None:
    values = compose("iterations=2", "checkpoint.keep_trajectories=50")
    values["run"]["root"] = str(small_disk)
    (small_disk / "ballast").write_bytes(b"x" * (2 << 20))
    with pytest.raises(StorageError, match="no space left"):
        run_experiment(values)
    run = small_disk / "tiny"
    for path in run.rglob("manifest.json"):
        manifest = read_manifest(path.parent)
        assert manifest is not None
        verify_output(path.parent, manifest, checksums=True)
    (small_disk / "ballast").unlink()
    subprocess.run(["mount", "-o", "remount,size=100m", str(small_disk)], check=True)
    drive(Run.open(run))
    assert "it/0001/sync" in contents(run)


def test_a_full_disk_is_recognised_behind_other_errors() -> None:
    behind = RuntimeError("checkpoint failed")
    behind.__cause__ = OSError(28, "No space left on device")
    assert to_resource_error(behind) is not None
    assert to_resource_error(RuntimeError("h5: No space left on device")) is not None
    assert to_resource_error(ValueError("something else")) is None
