"""Hydra's launcher for Slurm, ``hydra/launcher=submitit_slurm``: small changes of submitit.

submitit writes the script of a sweep and pickles its points. It is changed so that sweeps start on
the same clusters as all other jobs (:mod:`launchers.sbatch`).
"""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from typing import Any

from rlinf.errors import PlanError
from slurm.client import block_stop_signals, command_environment
from slurm.jobs import JobResources
from slurm.records import parse_submitted_id
from slurm.sbatch_options import check_script_options, srun_options

_NON_SBATCH_KEYWORDS = frozenset({"setup", "teardown", "srun_args", "additional_parameters"})
"""Keywords of submitit that do not become sbatch options."""


@functools.cache
def patch_submitit() -> None:
    """Change submitit in this process; later calls do nothing."""
    from submitit.slurm import slurm

    executor, submit = slurm.SlurmExecutor, slurm.SlurmExecutor._submit_command

    def make_script(self: Any, command: str, uid: str) -> str:
        check_script_options({"submitit_folder": self.folder}, "hydra.launcher")
        keywords = _complete_keywords(self.parameters)
        return str(slurm._make_sbatch_string(command=command, folder=self.folder, **keywords))

    def submit_as_on_login_node(self: Any, command: str) -> Any:
        # sbatch passes its environment on, so Slurm's variables would affect the new job's srun.
        variables = dict(os.environ)
        try:
            os.environ.clear()
            os.environ.update(command_environment(variables))
            with block_stop_signals():
                return submit(self, command)
        finally:
            os.environ.clear()
            os.environ.update(variables)

    def read_job_id(answer: str | bytes) -> str:
        return parse_submitted_id(answer if isinstance(answer, str) else answer.decode())

    for name, method in {
        "_make_submission_file_text": make_script,
        "_submit_command": submit_as_on_login_node,
        "_get_job_id_from_submission_command": staticmethod(read_job_id),
    }.items():
        setattr(executor, name, method)


def _complete_keywords(keywords: Mapping[str, Any]) -> dict[str, Any]:
    """Return submitit's keywords, completed by the options that a sweep's configuration lacks.

    Raises:
        PlanError: several options set the memory of a job, or an option does not fit into its
            line of the script.
    """
    options = {k: v for k, v in keywords.items() if k not in _NON_SBATCH_KEYWORDS}
    check_script_options(options, "hydra.launcher")
    check_script_options(
        keywords.get("additional_parameters") or {}, "hydra.launcher.additional_parameters"
    )
    memory = [key for key in ("mem", "mem_per_cpu", "mem_per_gpu") if keywords.get(key) is not None]
    if len(memory) > 1:
        raise PlanError(f"hydra.launcher: {' and '.join(memory)} exclude each other; keep one")
    resources = JobResources(cpus_per_task=keywords.get("cpus_per_task") or 1)
    # Where an option is given twice, srun obeys the last one.
    srun_args = [*srun_options(resources), *(keywords.get("srun_args") or ())]
    return {"wckey": None, **keywords, "srun_args": srun_args}
