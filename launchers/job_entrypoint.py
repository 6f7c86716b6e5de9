"""The entry point of a Slurm job: set a rank's variables, run the module, exit with its code.

The batch script starts ``python -m launchers.job_entrypoint CALL``, where the call is JSON. A call
has only arguments, no state of the work. When Slurm restarts the job, the same call runs again and
continues from the files that it wrote.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rlinf.channels.process_group import GROUP_VARIABLE, SPEED_WEIGHTS_VARIABLE
from rlinf.errors import (
    EXIT_BAD_ARTIFACT,
    EXIT_BAD_INPUT,
    EXIT_NO_PROGRESS,
    EXIT_REQUEUE,
    PlanError,
)
from slurm.client import run_command
from slurm.jobs import HET_GROUPS_VARIABLE, STOP_SIGNALS, current_job_id
from slurm.records import parse_hostnames, parse_node_words
from slurm.requeue import requeue

REQUEUE_STAGGER_S = 0.005
"""Seconds between the requeue requests of two ranks."""


@dataclass
class ModuleCall:
    """A call of ``python -m module *argv`` in this process."""

    module: str
    argv: tuple[str, ...]
    exit_code_dir: str
    """Folder of the file ``JOB.exit`` with the job's exit code, which a driver reads if the cluster
    has no accounting."""
    speed_weights: tuple[tuple[str, float], ...] = ()
    """Relative speeds: (kind of node, speed) pairs, or ("", speed) pairs, one per process."""
    allow_requeue: bool = True
    """See :class:`launchers.launcher.JobSpec`."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> ModuleCall:
        values = json.loads(text)
        values["speed_weights"] = tuple((kind, speed) for kind, speed in values["speed_weights"])
        return cls(**values | {"argv": tuple(values["argv"])})

    def __call__(self) -> None:
        rank = set_torchrun_variables(self.speed_weights)
        # Until the module has loaded, which is slow on a shared filesystem, a stop signal is not a
        # failure, because no work has started.
        _set_stop_handler(_exit_for_requeue)
        code = run_module(self.module, self.argv)
        _set_stop_handler(signal.SIG_IGN)
        sys.stdout.flush()
        sys.stderr.flush()
        if code == EXIT_REQUEUE and self.allow_requeue:
            # The first rank that stops requeues the job, which ends the other ranks. The sleep
            # staggers the requests of hundreds of ranks that stop together.
            time.sleep(rank * REQUEUE_STAGGER_S)
            if requeue():
                os._exit(0)
        if rank == 0 or code:
            self._write_exit_code(code, rank)
        # Skip exit handlers of libraries, so that the exit code of the job is that of the module.
        os._exit(code)

    def _write_exit_code(self, code: int, rank: int) -> None:
        path = Path(self.exit_code_dir) / f"{current_job_id()}.exit"
        temporary = path.with_suffix(f".{os.getpid()}")
        temporary.write_text(json.dumps({"code": code, "rank": rank}))
        if path.exists() and (code == 0 or _has_conclusive_code(path)):
            # Keep the code of a rank with bad input; other ranks may have failed because it ended.
            temporary.unlink()
        else:
            temporary.replace(path)


def _has_conclusive_code(path: Path) -> bool:
    """Return True if the file has an exit code that explains the failure."""
    try:
        code = json.loads(path.read_text())["code"]
        return code in (EXIT_BAD_INPUT, EXIT_BAD_ARTIFACT, EXIT_NO_PROGRESS)
    except (OSError, ValueError, KeyError):
        return False


def _set_stop_handler(handler: Any) -> None:
    for number in STOP_SIGNALS:
        signal.signal(number, handler)


def _exit_for_requeue(number: int, frame: FrameType | None) -> None:
    raise SystemExit(EXIT_REQUEUE)


def run_module(module: str, argv: tuple[str, ...]) -> int:
    """Run a module as ``__main__`` and return its exit code."""
    sys.argv = [module, *argv]
    try:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    except SystemExit as stop:
        return stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1
    return 0


def set_torchrun_variables(speed_weights: tuple[tuple[str, float], ...] = ()) -> int:
    """Set torchrun's variables from Slurm's. Returns the rank.

    The name of the process group contains the job, the step and the number of restarts. So all
    ranks know it without communication, and a restarted job has a new name.

    Raises:
        PlanError: a node of the job is of none of the kinds in ``speed_weights``.
    """
    job = os.environ["SLURM_JOB_ID"]
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    rank = int(os.environ.get("SLURM_PROCID", "0"))
    world_size = int(os.environ.get("SLURM_NTASKS", "1"))
    if speed_weights and world_size > 1:
        os.environ[SPEED_WEIGHTS_VARIABLE] = ",".join(
            map(str, rank_speeds(speed_weights, rank_hosts()))
        )
    # Components of a heterogeneous job share the job id, but have different steps.
    step = os.environ.get("SLURM_STEP_ID", "0")
    os.environ.update(
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(world_size),
            "LOCAL_RANK": os.environ.get("SLURM_LOCALID", "0"),
            "LOCAL_WORLD_SIZE": os.environ.get("SLURM_NTASKS_PER_NODE", str(world_size)),
            GROUP_VARIABLE: f"{job}.{step}-{restart}",
            "RLINF_ATTEMPT": f"{job}-{restart}",
        }
    )
    return rank


def rank_hosts() -> list[str]:
    """Return the node of each rank; sbatch fills one node after another with ranks.

    Ranks follow Slurm's list of nodes, which is sorted within each component of the job.
    """
    groups = os.environ.get(HET_GROUPS_VARIABLE)
    suffixes = [f"_HET_GROUP_{group}" for group in groups.split(",")] if groups else [""]
    return [
        host
        for suffix in suffixes
        for host in _expand_hostlist(os.environ[f"SLURM_JOB_NODELIST{suffix}"])
        for _ in range(int(os.environ[f"SLURM_NTASKS_PER_NODE{suffix}"]))
    ]


def _expand_hostlist(nodes: str) -> list[str]:
    return parse_hostnames(run_command(("scontrol", "show", "hostnames", nodes)), nodes)


def rank_speeds(
    speed_weights: tuple[tuple[str, float], ...], hosts: Sequence[str]
) -> tuple[float, ...]:
    """Return the relative speed of each rank on its host.

    Raises:
        PlanError: a host belongs to none of the kinds, or to several.
    """
    if not speed_weights[0][0]:
        return tuple(speed for _, speed in speed_weights)
    speed_by_host: dict[str, float] = {}
    for host in dict.fromkeys(hosts):
        attributes = node_attributes(host)
        speeds = [speed for kind, speed in speed_weights if kind in attributes]
        if len(speeds) != 1:
            raise PlanError(
                f"plan: speed_weights: node {host} is {'none' if not speeds else 'several'} of "
                f"{', '.join(kind for kind, _ in speed_weights)}; name GPUs or features that tell "
                "the job's nodes apart"
            )
        speed_by_host[host] = speeds[0]
    return tuple(speed_by_host[host] for host in hosts)


def node_attributes(host: str) -> set[str]:
    """Return all words that Slurm prints about a node, including its GPU names and features."""
    return parse_node_words(run_command(("scontrol", "show", "node", host, "-o")))


if __name__ == "__main__":
    ModuleCall.from_json(sys.argv[1])()
