"""What the launcher tests run inside jobs: does what its first argument says."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

from slurm.stop_signals import StopFlag

NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RLINF_GROUP", "RLINF_ATTEMPT")


def main() -> int:
    what, out = sys.argv[1], Path(sys.argv[2])
    out.mkdir(parents=True, exist_ok=True)
    rank = os.environ["RANK"]
    note = {name: os.environ[name] for name in NAMES} | {
        "node": os.environ["SLURMD_NODENAME"],
        "gpus": os.environ.get("CUDA_VISIBLE_DEVICES", ""),
        "shares": os.environ.get("RLINF_SHARES", ""),
        "cpus": ",".join(map(str, sorted(os.sched_getaffinity(0)))),
    }
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    written = out / f".rank-{rank}"
    written.write_text(json.dumps(note))
    written.rename(out / f"rank-{rank}.{restart}.json")
    if what == "fail":
        print("the reason of the failure", file=sys.stderr)
        return 65
    if what == "sleep":
        time.sleep(120)
    if what == "slow":
        time.sleep(5)
    if what == "requeue" and restart == "0":
        return 75
    if what == "warned" and restart == "0":
        warned: list[int] = []
        signal.signal(signal.SIGUSR2, lambda number, frame: warned.append(number))
        (out / "ready").touch()
        while not warned:
            time.sleep(0.05)
        return 75
    if what == "stoppable":
        with StopFlag() as stop:
            (out / "ready").touch()
            while not stop.is_set():
                time.sleep(0.05)
        return 75
    if what == "last-stops" and restart == "0":
        if rank == "0":
            time.sleep(60)
        return 75
    if rank == "0":
        (out / "manifest.json").write_text("{}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
