"""``python -m stages NAME --config F --out D``: the one command that every driver calls."""

from __future__ import annotations

import time

BEGAN = time.time()

import argparse  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from rlinf import machine, segments  # noqa: E402
from rlinf.errors import (  # noqa: E402
    ConfigError,
    RequeueRequested,
    RlinfError,
    TransientUserCodeError,
    told_of_exhaustion,
)
from rlinf.user_code import reporting_user_errors  # noqa: E402


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The command line; see :class:`stages.runner.StageCall`."""
    parser = argparse.ArgumentParser(prog="python -m stages", description="Run one stage.")
    parser.add_argument("stage", help="its name in the flow")
    parser.add_argument("--config", type=Path, required=True, help="config.yaml of the run")
    parser.add_argument("--out", type=Path, required=True, help="output folder of the stage")
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=FOLDER", help="a committed input"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stage in this process; returns its exit code (see ``rlinf.errors``)."""
    machine.apply()
    segments.sweep()
    arguments = parse(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    from slurm.signals import StopFlag
    from stages.lives import Lives
    from stages.runner import StageCall, run_stage

    try:
        inputs = {}
        for text in arguments.input:
            name, separator, folder = text.partition("=")
            if not separator:
                raise ConfigError(f"--input {text!r}: expected NAME=FOLDER")
            inputs[name] = Path(folder)
        call = StageCall(
            arguments.stage, arguments.config, arguments.out, arguments.iteration, inputs
        )
        lives = Lives(call.out)
        with told_of_exhaustion(), StopFlag() as stop, reporting_user_errors():
            try:
                run_stage(call, stopping=stop.is_set, began=BEGAN)
            except RequeueRequested:
                if stop.time_is_up():
                    lives.used_up(call.stage, os.environ.get("RLINF_ATTEMPT", str(BEGAN)))
                raise
    except RlinfError as error:
        if error.exit_code == 1 and not isinstance(error, TransientUserCodeError):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
