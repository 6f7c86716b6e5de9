"""Snakemake executor ``rlinf``: rules become Slurm jobs through the project's own launcher.

One query of the queue serves all jobs. A job whose manifest exists counts as done, whatever the
queue shows. A job runs its stage directly, without a second Snakemake in the job
(docs/explanation/decisions.md).
"""

import json
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

from snakemake_interface_common.exceptions import WorkflowError
from snakemake_interface_executor_plugins.executors.base import SubmittedJobInfo
from snakemake_interface_executor_plugins.executors.remote import RemoteExecutor
from snakemake_interface_executor_plugins.settings import CommonSettings, ExecutorSettingsBase

from rlinf import package_paths

package_paths.add_to_sys_path()

from launchers.launcher import JobSpec  # noqa: E402
from launchers.slurm_launcher import SlurmLauncher  # noqa: E402
from rlinf.errors import RlinfError  # noqa: E402
from slurm.client import SlurmClient  # noqa: E402
from slurm.discovery import discover_partitions  # noqa: E402
from slurm.inventory import default_partition  # noqa: E402
from slurm.jobs import JobResources  # noqa: E402
from slurm.site import load_site  # noqa: E402


@dataclass
class ExecutorSettings(ExecutorSettingsBase):
    """Command-line options ``--rlinf-...``."""

    # Snakemake builds an argument parser from the annotation, which must have this form.
    site: Optional[Path] = field(  # noqa: UP045
        default=None,
        metadata={"help": "Site file with account, set-up lines, container of each partition"},
    )


common_settings = CommonSettings(
    non_local_exec=True,
    implies_no_shared_fs=False,
    job_deploy_sources=False,
    pass_default_storage_provider_args=False,
    pass_default_resources_args=False,
    pass_envvar_declarations_to_cmd=False,
    auto_deploy_default_storage_provider=False,
)


class Executor(RemoteExecutor):
    """Submits the rules of a workflow as Slurm jobs; see the module's docstring."""

    def __post_init__(self) -> None:
        self._launcher = SlurmLauncher(SlurmClient())

    @cached_property
    def _default_partition(self) -> str | None:
        """The partition of jobs that name no partition; the site file may have settings for it."""
        return default_partition(discover_partitions(self._launcher.client))

    def run_job(self, job: Any) -> None:
        """Submit a rule's job.

        Raises:
            WorkflowError: the rule is not a stage, or Slurm refused the job.
        """
        argv = job.params.get("argv")
        if argv is None:
            raise WorkflowError(
                f"rule {job.name}: the executor 'rlinf' runs rules with params.argv (stages); "
                "make this one a localrule"
            )
        manifest = Path(str(job.output[0])).absolute()
        site = self.workflow.executor_settings.site
        name = "-".join([job.name, *map(str, job.wildcards)])
        try:
            named_partition = job.resources.get("slurm_partition")
            default = self._default_partition if site and not named_partition else None
            request = JobSpec(
                name=name,
                argv=tuple(str(word) for word in argv),
                output_dir=manifest.parent,
                log_dir=Path(str(job.log[0])).absolute().parent / "slurm" / job.name,
                resources=resources(job.resources, site, default),
                module=str(job.params.get("module", "stages")),
            )
            job_id = self._launcher.submit(request)
        except RlinfError as error:
            raise WorkflowError(str(error)) from None
        self.logger.info(f"{name}: Slurm job {job_id}, logs in {request.log_dir}")
        self.report_job_submission(SubmittedJobInfo(job, external_jobid=job_id))

    async def check_active_jobs(
        self, active_jobs: list[SubmittedJobInfo]
    ) -> AsyncGenerator[SubmittedJobInfo, None]:
        """Poll all active jobs with one query of the queue."""
        if not active_jobs:
            return
        async with self.status_rate_limiter:
            try:
                statuses = self._launcher.poll([info.external_jobid for info in active_jobs])
            except RlinfError as error:
                # The controller may be restarting; the next round queries again.
                self.logger.warning(f"cannot ask Slurm: {error}")
                statuses = {}
        for info in active_jobs:
            status = statuses.get(info.external_jobid)
            if status is None or status.state.is_active:
                yield info
            elif status.exit_code in (0, None) and status.state.value == "done":
                self.report_job_success(info)
            else:
                message = f"{info.job.name}: {status.state.value}: {status.reason}"
                self.report_job_error(info, msg=message + "\n")

    def cancel_jobs(self, active_jobs: list[SubmittedJobInfo]) -> None:
        self._launcher.cancel([info.external_jobid for info in active_jobs])


def resources(requested: Any, site: Path | None, default: str | None = None) -> JobResources:
    """Convert a rule's Snakemake resources; add the site's settings for the partition.

    Args:
        default: the partition of a rule that names no partition; None: Slurm's default.
    """

    def get(name: str, default: Any = None) -> Any:
        value = requested.get(name, default)
        return default if value in ("", "None", None) else value

    gpus, gpu_type = 0, None
    if get("gres"):
        _, *types, count = str(get("gres")).split(":")
        gpus, gpu_type = int(count), types[0] if types else None
    nodes = int(get("nodes", 1))
    partition = get("slurm_partition", default)
    site_settings = load_site(site).settings_for(partition).resource_arguments() if site else {}
    if get("constraint"):
        site_settings["constraint"] = str(get("constraint"))
    speed_weights = json.loads(get("shares")) if get("shares") else None
    return JobResources(
        partition=partition,
        nodes=nodes,
        tasks_per_node=max(1, int(get("tasks", 1)) // nodes),
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        speed_weights=tuple(speed_weights) if isinstance(speed_weights, list) else speed_weights,
        cpus_per_task=int(get("cpus_per_task", 1)),
        mem_mb=int(get("mem_mb")) if get("mem_mb") else None,
        time_limit_min=int(get("runtime")) if get("runtime") else None,
        interpreter=get("interpreter"),
        **site_settings,
    )
