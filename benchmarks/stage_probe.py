"""Program of a job: records when its first line ran and when a stage was imported."""

import time

FIRST_LINE = time.time()

import json  # noqa: E402
import sys  # noqa: E402
from pathlib import Path  # noqa: E402

if __name__ == "__main__":
    import stages.rollout  # noqa: F401

    out = Path(sys.argv[1])
    out.mkdir(parents=True, exist_ok=True)
    times = {"first_line": FIRST_LINE, "imported": time.time()}
    temporary = out / "note"
    temporary.write_text(json.dumps(times))
    temporary.rename(out / "manifest.json")
