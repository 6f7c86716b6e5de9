"""Telling a person that a run is over: a command of their own."""

from __future__ import annotations

import contextlib
import logging
import shutil
import subprocess
from collections.abc import Iterator, Sequence

from rlinf.errors import ConfigError, Interrupted, RequeueRequested, RunLockedError, RunStopped
from slurm.ids import own_id

TIMEOUT_S = 60.0
log = logging.getLogger("rlinf")


def check_command(command: Sequence[str]) -> None:
    """See that the command is there.

    Raises:
        ConfigError: it is not.
    """
    if command and shutil.which(command[0]) is None:
        raise ConfigError(
            f"cluster.notify: no command {command[0]!r} here; give its path, then its words: "
            "[/home/me/bin/tell, --quietly]"
        )


@contextlib.contextmanager
def announced(name: str, command: Sequence[str]) -> Iterator[None]:
    """Run the command when what is inside ends, unless somebody just stopped it.

    Args:
        name: of the run.
    """
    try:
        yield
    except (Interrupted, RunLockedError, RunStopped):
        raise
    except RequeueRequested:
        if own_id() is None:  # a job is started again
            _call(command, name, "stopped")
        raise
    except Exception:
        _call(command, name, "failed")
        raise
    _call(command, name, "finished")


def _call(command: Sequence[str], name: str, outcome: str) -> None:
    if not command:
        return
    try:
        subprocess.run([*command, name, outcome], check=True, timeout=TIMEOUT_S)
    except (OSError, subprocess.SubprocessError) as error:
        log.warning("cluster.notify: %s", error)
