"""The wheel works outside the checkout and keeps generic names out of site-packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from rlinf import tree

pytestmark = pytest.mark.slow


def call(*words: str | Path, cwd: Path) -> str:
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_wheel_works_from_anywhere(tmp_path: Path) -> None:
    call(
        sys.executable,
        "-m",
        "build",
        "-q",
        "--wheel",
        "--no-isolation",
        "-o",
        tmp_path,
        cwd=tree.ROOT,
    )
    (wheel,) = tmp_path.glob("rlinf_slurm-*.whl")
    environment = tmp_path / "venv"
    call(sys.executable, "-m", "venv", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=tmp_path)
    # Dependencies come from this environment, the project itself must not.
    ours = Path(sysconfig.get_paths()["purelib"])
    site = Path(
        call(
            python, "-c", "import sysconfig; print(sysconfig.get_paths()['purelib'])", cwd=tmp_path
        ).strip()
    )
    for entry in ours.iterdir():
        target = site / entry.name
        if not target.exists() and "rlinf" not in entry.name:
            target.symlink_to(entry)
    assert "experiment" in call(python, "-m", "rlinf.launch", "--help", cwd=tmp_path)
    assert "resume" in call(environment / "bin" / "rlinf", "--help", cwd=tmp_path)
    where = Path(
        call(python, "-c", "from rlinf import tree; print(tree.ROOT)", cwd=tmp_path).strip()
    )
    assert where == site / "rlinf" / "_tree"
    for name in ("Snakefile", "slurm/config.yaml", "configs/config.yaml", "stages/__main__.py"):
        assert (where / name).exists(), name
    assert not (site / "pipeline").exists()
    assert not (site / "slurm").exists()
    words = [
        "experiment=cartpole_ppo",
        "iterations=1",
        "rollout.batch=2",
        "algorithm.minibatches=1",
        "rollout.horizon=8",
        "evaluate.samples=2",
        "cluster=local",
        "run.name=w",
    ]
    call(python, "-m", "rlinf.launch", *words, cwd=tmp_path)
    assert (tmp_path / "runs/w/it/0000/sync/manifest.json").exists()
