"""The workflow's view of a run, as its own jobs have it."""

from __future__ import annotations

import contextlib
import shlex
import sys
from pathlib import Path

import pytest

from pipeline.commands.workflow import prepare_workflow
from pipeline.lock import LOCK_FILE, RunLock
from pipeline.run import Run
from rlinf.errors import ConfigError, RunLockedError


def test_a_job_of_a_workflow_opens_the_run_that_the_workflow_drives(tmp_path: Path) -> None:
    settings = {"experiment": "cartpole_ppo", "run__root": str(tmp_path), "run__name": "cp"}
    with pytest.raises(ConfigError, match="no such file"):
        prepare_workflow(settings, is_driver=False)
    assert not (tmp_path / "cp").exists()
    run = prepare_workflow(settings)
    with contextlib.closing(_Held(run.folder)):
        with pytest.raises(RunLockedError, match="driven by process"):
            prepare_workflow(settings)
        inside = prepare_workflow(settings, is_driver=False)
    assert inside.folder == run.folder
    assert inside.program("train") == run.program("train")


def test_an_interpreter_in_an_odd_folder_is_one_word_of_a_rules_command(tmp_path: Path) -> None:
    python = tmp_path / "it's here; touch x" / "python"
    python.parent.mkdir()
    python.symlink_to(sys.executable)
    settings = {"experiment": "cartpole_ppo", "run__root": str(tmp_path), "run__name": "cp"}
    workflow = prepare_workflow(settings)
    config = workflow._run.config
    trainer = config.trainer.model_copy(update={"python": str(python)})
    workflow._run = Run(workflow.folder, config.model_copy(update={"trainer": trainer}))
    assert shlex.split(workflow.program("train")) == [str(python), "-m", "stages"]


class _Held:
    """The lock of a run's driver."""

    def __init__(self, folder: Path) -> None:
        self._lock = RunLock(folder / LOCK_FILE)

    def close(self) -> None:
        self._lock.release()
