"""``python -m stages NAME --config F --out D``: the command with which drivers run a stage."""

from __future__ import annotations

import time

PROCESS_START = time.time()
"""Unix time at which the process began; the imports below take seconds."""

import argparse  # noqa: E402
import logging  # noqa: E402
import os  # noqa: E402
import sys  # noqa: E402
import traceback  # noqa: E402
from collections.abc import Sequence  # noqa: E402
from pathlib import Path  # noqa: E402

from rlinf import process_tuning, shared_memory  # noqa: E402
from rlinf.errors import (  # noqa: E402
    ConfigError,
    RequeueRequested,
    RlinfError,
    TransientUserCodeError,
    translate_resource_errors,
)
from rlinf.user_code import translate_user_errors  # noqa: E402


def parse_arguments(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line; see :class:`stages.runner.StageCall`."""
    parser = argparse.ArgumentParser(prog="python -m stages", description="Run one stage.")
    parser.add_argument("stage", help="name of the stage in the flow")
    parser.add_argument("--config", type=Path, required=True, help="config.yaml of the run")
    parser.add_argument("--out", type=Path, required=True, help="output folder of the stage")
    parser.add_argument("--iteration", type=int, default=0)
    parser.add_argument(
        "--input", action="append", default=[], metavar="NAME=FOLDER", help="a committed input"
    )
    return parser.parse_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a stage in this process; return its exit code (see ``rlinf.errors``)."""
    process_tuning.tune_process()
    shared_memory.remove_orphaned_segments()
    arguments = parse_arguments(sys.argv[1:] if argv is None else argv)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", stream=sys.stderr)
    from slurm.stop_signals import StopFlag
    from stages.runner import StageCall, run_stage
    from stages.timeout_retries import NoProgressGuard

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
        progress_guard = NoProgressGuard(call.output_folder)
        with translate_resource_errors(), StopFlag() as stop, translate_user_errors():
            try:
                run_stage(call, should_stop=stop.is_set, process_start=PROCESS_START)
            except RequeueRequested:
                if stop.is_time_limit():
                    progress_guard.record_timeout(
                        call.stage, os.environ.get("RLINF_ATTEMPT", str(PROCESS_START))
                    )
                raise
    except RlinfError as error:
        # A stage without progress has written its stacks.
        if error.exit_code == 1 and not isinstance(error, TransientUserCodeError):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
