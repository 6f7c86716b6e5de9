"""Write the files of the profiles again: ``python -m tests.sites.record [--slurm] [NAME ...]``.

Without an option it writes only the batch scripts. With ``--slurm`` it first records the
inventories from controllers with the profiles' configurations, which needs a running dev cluster.
For a change that is meant to change scripts; read the differences line by line.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path

from tests.sites import profiles


def main(words: list[str]) -> None:
    """Record the named profiles, or all."""
    for name in [word for word in words if not word.startswith("-")] or profiles.NAMES:
        with tempfile.TemporaryDirectory() as temporary:
            folder = Path(temporary)
            if "--slurm" in words:
                devcluster = Path(os.environ["SLURM_CONF"]).parents[1]
                with profiles.controller(name, devcluster, folder):
                    saved = profiles.FOLDER / name / "inventory.json"
                    profiles.inventory_of_controller().save(saved)
            profiles.save_scripts(name, folder)


if __name__ == "__main__":
    main(sys.argv[1:])
