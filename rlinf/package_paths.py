"""Where the workflow's files are: the checkout, or the copy of it that a wheel carries.

``pipeline``, ``stages``, ``launchers`` and ``slurm`` are too generic for a user's site-packages, so
a wheel keeps them, with ``configs`` and the Snakefile, in ``rlinf/_tree`` and entry points put that
folder on the path (docs/explanation/decisions.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT: Path = _HERE / "_tree" if (_HERE / "_tree").is_dir() else _HERE.parent
"""Folder that holds ``pipeline``, ``stages``, ``launchers``, ``slurm``, ``configs``, Snakefile."""


def add_to_sys_path() -> None:
    """Make the packages of the tree and modules of the working folder importable."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))
    here = _working_folder()
    if "" not in sys.path and here not in sys.path:
        # An installed command has it nowhere. Last, so that nothing of the user's hides a package.
        sys.path.append(here)


def child_python_path() -> str:
    """Return an absolute ``PYTHONPATH`` for child processes, which may start elsewhere.

    It has the tree, the library, the previous entries, and the working folder with the user's
    modules.
    """
    here = _working_folder()
    previous = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    parts = [str(ROOT), str(_HERE.parent), *(os.path.join(here, p) for p in previous if p), here]  # noqa: PTH118
    return os.pathsep.join(dict.fromkeys(filter(None, parts)))


def _working_folder() -> str:
    """Return the working folder; empty if it was removed."""
    try:
        return str(Path.cwd())
    except FileNotFoundError:
        return ""
