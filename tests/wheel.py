"""The project as its users have it: a wheel, installed into an environment of its own."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from rlinf import package_paths


@dataclass(frozen=True)
class Installed:
    """An environment with the wheel in it."""

    folder: Path
    site: Path
    """Its ``site-packages``."""

    @property
    def python(self) -> Path:
        return self.folder / "bin" / "python"

    @property
    def rlinf(self) -> Path:
        """The command."""
        return self.folder / "bin" / "rlinf"


def call(*words: str | Path, cwd: Path, env: Mapping[str, str] | None = None) -> str:
    """What a command that must succeed prints."""
    done = subprocess.run(
        [str(word) for word in words], cwd=cwd, env=env, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def install(folder: Path) -> Installed:
    """Build the wheel and install it, and nothing else of the project, below a folder."""
    build = [sys.executable, "-m", "build", "-q", "--wheel", "--no-isolation", "-o", folder]
    call(*build, cwd=package_paths.ROOT)
    (wheel,) = folder.glob("rlinf_slurm-*.whl")
    environment = folder / "venv"
    call(sys.executable, "-m", "venv", environment, cwd=folder)
    python = environment / "bin" / "python"
    call(python, "-m", "pip", "install", "-q", "--no-deps", wheel, cwd=folder)
    where = "import sysconfig; print(sysconfig.get_paths()['purelib'])"
    site = Path(call(python, "-c", where, cwd=folder).strip())
    # Dependencies come from this environment, the project itself must not.
    for entry in Path(sysconfig.get_paths()["purelib"]).iterdir():
        target = site / entry.name
        if not target.exists() and "rlinf" not in entry.name:
            target.symlink_to(entry)
    return Installed(environment, site)
