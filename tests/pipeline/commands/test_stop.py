"""Who stops a run ends all of it, and nothing of what was done is lost."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pipeline.callbacks import check_notify_command, notify_at_end
from pipeline.commands.experiment import prepare_run
from pipeline.commands.stop import stop_run
from pipeline.driver import Driver
from pipeline.executors import InProcessExecutor
from pipeline.run import LOCK_FILE
from pipeline.run_control import StopRequest
from rlinf.errors import (
    ConfigError,
    RequeueRequested,
    RunLockedError,
    RunStopped,
    SlurmError,
    StageError,
)
from stages.layout import STOP_FILE
from tests.pipeline.helpers import contents, run_here, start_driver, until
from tests.pipeline.pools.test_executor import TWO, _hydra, _words

Compose = Callable[..., dict[str, Any]]


def test_a_driver_here_is_stopped_and_its_run_goes_on_later(tiny_run: Path, tmp_path: Path) -> None:
    words = [*_words(tmp_path, "collocated"), f"plan={_hydra(TWO)}"]
    log, run = tmp_path / "log", tmp_path / "tiny"
    driver = start_driver(words, log)
    until((run / "sft/manifest.json").exists, driver, log)
    result = stop_run(run)
    assert driver.wait(timeout=20) == 1
    assert [line for line in result if line.startswith("driver (process") and "stopped" in line]
    assert "stopped by rlinf stop" in log.read_text()
    assert not (run / LOCK_FILE).exists()
    assert not (run / STOP_FILE).exists()
    assert stop_run(run) == [], "nothing is there any more"
    run_here(words)
    assert contents(run).keys() == contents(tiny_run).keys()


def test_a_driver_elsewhere_sees_that_it_is_named_and_its_successor_does_not(
    compose: Compose,
) -> None:
    run = prepare_run(compose())
    request = StopRequest(run.folder, lambda: False)
    (run.folder / LOCK_FILE).write_text(json.dumps({"token": "first"}))
    (run.folder / STOP_FILE).write_text("first")
    assert request()
    assert request.is_requested
    (run.folder / LOCK_FILE).write_text(json.dumps({"token": "second"}))
    assert not StopRequest(run.folder, lambda: False)()


def test_a_job_that_is_started_again_takes_the_run_over_from_its_former_life(
    compose: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On another node than before, whose heartbeat is not a minute old."""
    run = prepare_run(compose())
    former = {"host": "n1", "pid": 1, "started": 0.0, "job": "12", "token": "t"}
    (run.folder / LOCK_FILE).write_text(json.dumps(former))
    monkeypatch.setenv("SLURM_JOB_ID", "13")
    with pytest.raises(RunLockedError), run.lock():
        pass
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    with run.lock():
        assert json.loads((run.folder / LOCK_FILE).read_text())["job"] == "12"


@pytest.mark.parametrize(
    ("error", "leaves"),
    [
        (SlurmError("squeue did not answer"), True),
        (RequeueRequested("the job ends"), True),
        (OSError("stale file handle"), True),
        (StageError("train failed 3 times"), False),
        (KeyboardInterrupt(), False),
    ],
)
def test_pools_are_left_to_the_next_driver_unless_none_is_to_come(
    compose: Compose, error: BaseException, leaves: bool
) -> None:
    left = []

    class Executor(InProcessExecutor):
        def start(self, *_: Any) -> None:
            raise error

        def stop(self, *, keep_jobs: bool = False) -> None:
            left.append(keep_jobs)

    run = prepare_run(compose())
    with pytest.raises(type(error)):
        Driver(run, Executor(run)).drive()
    assert left == [leaves]


@pytest.mark.parametrize(
    ("error", "expected_value"),
    [
        (None, "a run,finished"),
        (StageError("no"), "a run,failed"),
        (RequeueRequested("no"), "a run,stopped"),
        (RunStopped("no"), ""),
    ],
)
def test_a_command_is_told_how_a_run_ended(
    tmp_path: Path, error: Exception | None, expected_value: str
) -> None:
    out = tmp_path / "told"
    code = f"import sys; open({str(out)!r}, 'w').write(','.join(sys.argv[1:]))"
    expected = contextlib.suppress(StageError, RequeueRequested, RunStopped)
    with expected, notify_at_end("a run", [sys.executable, "-c", code]):
        if error is not None:
            raise error
    assert (out.read_text() if out.exists() else "") == expected_value


def test_a_command_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"cluster\.notify_command: no command 'no-such"):
        check_notify_command(["no-such-command"])


def test_a_driver_loads_no_torch() -> None:
    """It starts in a second or two, and takes over its pools soon after Slurm starts it again."""
    imports = "import pipeline.commands.driver_job, pipeline.commands.experiment, sys"
    code = f"{imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_bad_input_is_refused_before_anything_is_submitted(tmp_path: Path) -> None:
    words = ["experiment=arithmetic_grpo", "seeed=1", f"run.root={tmp_path}"]
    done = subprocess.run(
        [sys.executable, "-m", "rlinf", "submit", *words],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 65
    assert "did you mean 'seed'" in done.stderr
    assert not list(tmp_path.iterdir())
