"""``python -m rlinf``: the ``rlinf`` command."""

import sys

from rlinf.launch import cli

sys.exit(cli())
