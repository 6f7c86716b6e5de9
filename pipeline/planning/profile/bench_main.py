"""``python -m pipeline.planning.profile.bench_main TASK.json``: entry point of a profiling job."""

import time

FIRST_LINE = time.time()
"""Time of the first line of code, seconds since the epoch."""

import sys  # noqa: E402
import traceback  # noqa: E402
from pathlib import Path  # noqa: E402


def main(argv: list[str]) -> int:
    """Run the task file. Returns the exit code (see ``rlinf.errors``)."""
    from rlinf import process_tuning
    from rlinf.errors import RlinfError

    process_tuning.tune_process()
    # A stage's own process imports the same modules before its work.
    import stages.rollout
    import stages.runner
    import stages.train  # noqa: F401

    imported = time.time()
    from pipeline.planning.profile.stage_bench import run_task

    try:
        run_task(Path(argv[0]), FIRST_LINE, imported)
    except RlinfError as error:
        traceback.print_exc() if error.exit_code == 1 else None
        print(f"error: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
