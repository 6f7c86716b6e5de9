"""``python -m rlinf``: the ``rlinf`` command."""

import sys
from typing import Any

from rlinf import package_paths


def cli() -> Any:
    package_paths.add_to_sys_path()
    from pipeline.commands.cli import main

    return main()


if __name__ == "__main__":
    sys.exit(cli())
