"""Where the workflow's files are: the checkout, or the copy of it that a wheel carries.

``pipeline``, ``stages``, ``launchers`` and ``slurm`` are too generic for a user's site-packages, so
a wheel keeps them, with ``configs`` and the Snakefile, in ``rlinf/_tree`` and entry points put that
folder on the path (docs/decisions/0001-wheel-layout.md).
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

_HERE = Path(__file__).resolve().parent
ROOT: Path = _HERE / "_tree" if (_HERE / "_tree").is_dir() else _HERE.parent
"""Folder that holds ``pipeline``, ``stages``, ``launchers``, ``slurm``, ``configs``, Snakefile."""


def activate() -> None:
    """Make the packages of the tree importable in this process."""
    if str(ROOT) not in sys.path:
        sys.path.insert(0, str(ROOT))


def python_path() -> str:
    """``PYTHONPATH`` for child processes: the tree, the library, then what was set before."""
    parts = [str(ROOT), str(_HERE.parent), os.environ.get("PYTHONPATH", "")]
    return os.pathsep.join(dict.fromkeys(part for part in parts if part))
