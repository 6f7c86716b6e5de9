"""The ``cluster`` section: how stages become processes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rlinf.channels import LOOPBACK
from rlinf.config import Section
from slurm.sbatch_options import EnvironmentVariables, OptionText, ShellText


class DriverJobConfig(Section):
    """Resources of the job that runs the driver (``rlinf submit``).

    The job is small and has no GPUs. It uses the settings of the site file that every job needs
    (account, set-up lines, container, environment), but none that request GPUs or large jobs.
    """

    partition: OptionText | None = None
    """Null: the default partition of the cluster."""
    cpus: int = Field(default=1, gt=0)
    mem_mb: int = Field(default=4000, gt=0)
    """Memory, MiB."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes. The job requeues itself before the limit. Null: one day, or less if
    the partition or accounting allows less."""
    mail: OptionText | None = None
    """E-mail address that Slurm notifies when the job ends or fails."""
    account: OptionText | None = None
    """Null: the account of the site file."""
    qos: OptionText | None = None
    """Null: the value of the site file for this partition if it has no GPUs, else Slurm's default.
    The same holds for ``constraint`` and ``reservation``."""
    constraint: OptionText | None = None
    reservation: OptionText | None = None
    exclude: OptionText | None = None
    """Null: the value of the site file."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options by long name, checked by
    :func:`slurm.sbatch_options.check_driver_options`."""

    @field_validator("sbatch")
    @classmethod
    def _check_sbatch(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        from slurm.sbatch_options import check_driver_options

        return check_driver_options(value)


class ClusterConfig(Section):
    """The ``cluster`` section: where stages run. These settings never change a result."""

    launcher: Literal["inprocess", "local", "slurm"] = "inprocess"
    """Run stages in the driver's process, as local processes, or as Slurm jobs."""
    site: Path | None = None
    """Site file with settings of the partitions: account, set-up lines, container, ..."""
    poll_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two queries of the queue. Use 30 or more on a shared cluster."""
    max_retries: int = Field(default=2, ge=0)
    """Number of retries of a stage that failed for an unknown reason."""
    env: EnvironmentVariables = {}
    """Environment variables of every stage."""
    network_interface: ShellText | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. Null: the loopback for local launchers, all interfaces for Slurm."""
    driver_reconnect_timeout_s: float = Field(default=600.0, gt=0)
    """How long pools wait for a new driver after theirs failed or was killed, before they exit."""
    driver: DriverJobConfig = DriverJobConfig()
    notify_command: tuple[ShellText, ...] = ()
    """Command, as a list of words, that is called when the run ends. Its last arguments are the
    name of the run and ``finished``, ``failed`` or ``stopped``."""

    @property
    def bind_interface(self) -> str | None:
        """The interface on which sockets listen; None: all interfaces."""
        return self.network_interface or (None if self.launcher == "slurm" else LOOPBACK)
