"""Commands of Slurm as some sites have them: wrappers that print texts of their own around."""

from __future__ import annotations

from pathlib import Path

BANNER = """\
-----------------------------------------------------------------
|  Welcome to | the | cluster | of | the | university | of | X  |
-----------------------------------------------------------------
--> Verifying valid submit host (login1)...OK
--> Checking available allocation (A-job1)...OK
Welcome to the Frontera Supercomputer
New here: PartitionName=debug Default=YES State=UP NodeName=d1 GresUsed=gpu:4
PartitionName may be gpu = new; NodeName = c1; JobId = 7; StartTime=soon
Note: 3 nodes a100-1 are not responding since 2026, Unable to contact slurm controller there
12 of 5000 node hours used | 4988 | left
RUNNING
"""
FOOTER = "\nHave a nice day | and | come | again | to | our | 12 | GPUs | some | day\n-- 42 %\n"


def wrap(text: str) -> str:
    """Return an answer of Slurm's with a site's own texts before and behind it."""
    return f"{BANNER}{text.rstrip()}\n{FOOTER}"


def write_command(folder: Path, name: str, script: str) -> Path:
    """Write a command for bash into a folder, which a test puts into PATH."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/bash\n{script}\n")
    path.chmod(0o700)
    return path
