"""``python -m launchers.throttle DUTY COMMAND...``: run a command for a share of the time only.

Dev clusters have nodes of one speed; this makes some slower. The command's process group is stopped
and continued several times a second; what the command starts by itself is in that group too.
Warning signals are passed on, and the exit status is the command's own. ``DUTY`` is a number, or
``KIND=NUMBER,...`` by kind of node (a GPU's GRES name, a feature); other nodes run all of the time.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from types import FrameType

from launchers.job import node_words
from rlinf.machine import die_with_parent

PERIOD_S = 0.04
"""One turn of running and standing still: long beside the scheduler's slices, short to a stage."""
GOLDEN = (5**0.5 - 1) / 2
"""Multiples of it divide a circle evenly, however many there are."""
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)


def main(argv: list[str]) -> int:
    """Run ``argv[1:]`` at duty cycle ``argv[0]``; returns its exit code."""
    duty = duty_here(argv[0])
    process = subprocess.Popen(
        argv[1:],
        process_group=0,
        # One system call, looked up beforehand.
        preexec_fn=die_with_parent,  # noqa: PLW1509
    )

    def pass_on(number: int, frame: FrameType | None) -> None:
        # To the command alone: what it started does not expect warnings. A stopped process gets
        # the signal as soon as it continues.
        if process.returncode is None:
            os.kill(process.pid, number)

    for number in PASSED_ON:
        signal.signal(number, pass_on)
    throttle(process, duty)
    code = process.wait()
    if code < 0:
        # End as the command did, so that whoever waits sees the signal.
        signal.signal(-code, signal.SIG_DFL) if -code in PASSED_ON else None
        os.kill(os.getpid(), -code)
    return code


def duty_here(text: str) -> float:
    """The duty cycle of this node, above 0 and at most 1."""
    if "=" not in text:
        return float(text)
    node = os.environ.get("SLURMD_NODENAME")
    words = node_words(node) if node else set()
    shares = (part.split("=") for part in text.split(","))
    return min((float(share) for kind, share in shares if kind in words), default=1.0)


def throttle(process: subprocess.Popen[bytes], duty: float) -> None:
    """Stop and continue the group of ``process``, its leader, until it has ended.

    It runs in the same part of every period of the machine's clock: a late wake-up shifts no later
    one, and the ranks of a job run and stand still together, as those of a slower device would.
    """
    begin = begin_s()
    while duty < 1:
        time.sleep(max(0.0, PERIOD_S * duty - (time.time() - begin) % PERIOD_S))
        if not _signal(process, signal.SIGSTOP):
            return
        time.sleep(PERIOD_S - (time.time() - begin) % PERIOD_S)
        if not _signal(process, signal.SIGCONT):
            return


def begin_s() -> float:
    """When in a period the job runs: jobs that follow each other do so one after the other, else
    all that share a machine would want it at the same time."""
    return PERIOD_S * (int(os.environ.get("SLURM_JOB_ID", "0")) * GOLDEN % 1)


def _signal(process: subprocess.Popen[bytes], number: signal.Signals) -> bool:
    """Whether the group is still there; its id is its own until ``process`` was waited for."""
    if process.poll() is not None:
        return False
    os.killpg(process.pid, number)
    return True


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
