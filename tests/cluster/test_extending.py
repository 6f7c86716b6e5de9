"""Parts from a user's own folder, run by a wheel as Slurm jobs."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from rlinf import package_paths
from tests.pipeline.helpers import contents
from tests.test_extending import EXAMPLES, JOBS, clean, shortened
from tests.wheel import Installed, call

pytestmark = [pytest.mark.cluster, pytest.mark.slow, pytest.mark.timeout(900)]
DEVCLUSTER = package_paths.ROOT / "configs" / "plans" / "devcluster.yaml"


@pytest.mark.parametrize("words", JOBS, ids=" ".join)
def test_a_command_of_the_page_runs_as_slurm_jobs_and_gives_the_same_bytes(
    cluster: Path, installed: Installed, tmp_path: Path, words: list[str]
) -> None:
    mine = Path(shutil.copytree(EXAMPLES, tmp_path / "mine"))
    short = shortened(words)
    jobs = [*short, f"plan={DEVCLUSTER}", "cluster.poll_interval_s=0.2"]
    call(installed.rlinf, *jobs, cwd=mine, env=clean())
    here = [word for word in short if not word.startswith(("cluster=", "run.name="))]
    call(installed.rlinf, *here, "run.name=here", cwd=mine, env=clean())
    name = next(word.partition("=")[2] for word in words if word.startswith("run.name="))
    assert contents(mine / "runs" / name) == contents(mine / "runs/here")
