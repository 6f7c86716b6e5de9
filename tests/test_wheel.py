"""The wheel works outside the checkout and keeps generic names out of site-packages."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.wheel import Installed, call

pytestmark = pytest.mark.slow


def test_the_wheel_works_from_anywhere(installed: Installed, tmp_path: Path) -> None:
    python, site = installed.python, installed.site
    assert "experiment" in call(python, "-m", "rlinf.launch", "--help", cwd=tmp_path)
    assert "resume" in call(installed.rlinf, "--help", cwd=tmp_path)
    where = Path(
        call(
            python,
            "-c",
            "from rlinf import package_paths as paths; print(paths.ROOT)",
            cwd=tmp_path,
        ).strip()
    )
    assert where == site / "rlinf" / "_tree"
    for name in ("Snakefile", "slurm/config.yaml", "configs/config.yaml", "stages/__main__.py"):
        assert (where / name).exists(), name
    assert not (site / "pipeline").exists()
    assert not (site / "slurm").exists()
    words = [
        "experiment=cartpole_ppo",
        "iterations=1",
        "rollout.batch_size=2",
        "algorithm.minibatches=1",
        "rollout.horizon=8",
        "evaluate.samples=2",
        "cluster=local",
        "run.name=w",
    ]
    call(python, "-m", "rlinf.launch", *words, cwd=tmp_path)
    assert (tmp_path / "runs/w/it/0000/sync/manifest.json").exists()
