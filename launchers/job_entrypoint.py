"""The entry point of a Slurm job: set a rank's variables, run the module, exit with its code.

submitit pickles a :class:`ModuleCall`; in a heterogeneous job it is an argument of this module
(``python -m launchers.job_entrypoint CALL``). A call has only arguments, no state of the work.
When Slurm restarts the job, the same call runs again and continues from the files that it wrote.
"""

from __future__ import annotations

import json
import os
import re
import runpy
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from rlinf.channels.process_group import GROUP_VARIABLE, SPEED_WEIGHTS_VARIABLE
from rlinf.errors import EXIT_BAD_ARTIFACT, EXIT_BAD_INPUT, EXIT_REQUEUE, PlanError
from slurm.jobs import HET_GROUPS_VARIABLE, STOP_SIGNALS, current_job_id
from slurm.requeue import requeue

REQUEUE_STAGGER_S = 0.005
"""Seconds between the requeue requests of two ranks."""


@dataclass
class ModuleCall:
    """A call of ``python -m module *argv`` in this process."""

    module: str
    argv: tuple[str, ...]
    path: tuple[str, ...]
    """Folders that are prepended to the module search path."""
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
        return cls(**values | {"argv": tuple(values["argv"]), "path": tuple(values["path"])})

    def __call__(self) -> None:
        sys.path[:0] = [entry for entry in self.path if entry not in sys.path]
        os.environ["PYTHONPATH"] = os.pathsep.join(self.path)
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
        # Skip submitit's epilogue, so that the exit code of the job is that of the module.
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
        return json.loads(path.read_text())["code"] in (EXIT_BAD_INPUT, EXIT_BAD_ARTIFACT)
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
        for host in expand_hostlist(os.environ[f"SLURM_JOB_NODELIST{suffix}"])
        for _ in range(int(os.environ[f"SLURM_NTASKS_PER_NODE{suffix}"]))
    ]


def expand_hostlist(nodes: str) -> list[str]:
    """Expand a list of nodes such as ``a100-[1-3],cpu-1`` with scontrol.

    A wrapper of scontrol may print more text. So only lines that are one word and begin with the
    prefix of a name in the list count as hosts.
    """
    prefixes = {re.split(r"[\d\[]", part, maxsplit=1)[0] for part in _split_hostlist(nodes)}
    lines = map(str.strip, _scontrol("hostnames", nodes).splitlines())
    hosts = [line for line in lines if re.fullmatch(r"[\w.-]+", line)]
    return [host for host in hosts if re.split(r"\d", host, maxsplit=1)[0] in prefixes]


def _split_hostlist(nodes: str) -> list[str]:
    """Split a list of nodes at commas outside of brackets."""
    return re.split(r",(?![^\[]*\])", nodes)


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
    lines = _scontrol("node", host, "-o").splitlines()
    # A wrapper of scontrol may print text around this line.
    node_lines = [line for line in lines if line.lstrip().startswith("NodeName=")]
    return set(re.split(r"[\s,:=()]+", " ".join(node_lines)))


def _scontrol(*words: str) -> str:
    return subprocess.run(
        ["scontrol", "show", *words], capture_output=True, text=True, check=True
    ).stdout


if __name__ == "__main__":
    ModuleCall.from_json(sys.argv[1])()
