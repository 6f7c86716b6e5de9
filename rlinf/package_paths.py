"""Paths of the workflow's files: the checkout, or its copy in a wheel.

``pipeline``, ``stages``, ``launchers`` and ``slurm`` are too generic for a user's site-packages, so
a wheel keeps them, with ``configs`` and the Snakefile, in ``rlinf/_tree``. Its entry points put
this folder on the path (docs/explanation/decisions.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_PACKAGE = Path(__file__).resolve().parent
IS_WHEEL: bool = (_PACKAGE / "_tree").is_dir()
"""Whether this is an installed wheel, not a checkout."""
ROOT: Path = _PACKAGE / "_tree" if IS_WHEEL else _PACKAGE.parent
"""Folder that holds ``pipeline``, ``stages``, ``launchers``, ``slurm``, ``configs``, Snakefile."""


def add_to_sys_path() -> None:
    """Make the packages in :data:`ROOT` and modules of the working folder importable."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    cwd = _working_folder()
    if "" not in sys.path and cwd not in sys.path:
        # Installed commands do not have the working folder on their path. It is put last, so that
        # no user module hides a package.
        sys.path.append(cwd)


def child_python_path() -> str:
    """Return an absolute ``PYTHONPATH`` for child processes, which may start in another folder.

    Its entries are :data:`ROOT`, the folder of the package ``rlinf``, the previous entries, and the
    working folder with the user's modules.
    """
    cwd = _working_folder()
    previous = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    parts = [str(ROOT), str(_PACKAGE.parent), *(os.path.join(cwd, p) for p in previous if p), cwd]  # noqa: PTH118
    return os.pathsep.join(dict.fromkeys(filter(None, parts)))


def _working_folder() -> str:
    """Return the working folder; empty if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""
