"""The ``cluster`` section: how stages become processes."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator

from rlinf.channels.curve_sockets import LOOPBACK
from rlinf.config import Section
from slurm.sbatch_options import EnvironmentVariables, OptionText, ShellText


class DriverJobConfig(Section):
    """What the job of a driver asks for (``rlinf submit``).

    It is a small job without GPUs. Of a site file it has what every job needs to start (account,
    set-up lines, container, environment), and nothing that makes a job large or sends it to GPUs.
    """

    partition: OptionText | None = None
    """Null: the cluster's default one."""
    cpus: int = Field(default=1, gt=0)
    mem_mb: int = Field(default=4000, gt=0)
    """Memory, MiB."""
    time_limit_min: int | None = Field(default=None, gt=0)
    """Wall-time limit, minutes, before which it requeues itself. Null: a day, or what the
    partition and accounting allow."""
    mail: OptionText | None = None
    """Whom Slurm tells when the job ends or fails."""
    account: OptionText | None = None
    """Null: the site file's."""
    qos: OptionText | None = None
    """Null: what the site file says of this very partition if it has no GPUs, else Slurm's default.
    So for the next two."""
    constraint: OptionText | None = None
    reservation: OptionText | None = None
    exclude: OptionText | None = None
    """Null: the site file's."""
    sbatch: dict[str, str | int | bool] = {}
    """Further sbatch options by long name, which :func:`slurm.sbatch_options.check_driver_options`
    checks."""

    @field_validator("sbatch")
    @classmethod
    def _obeyed(cls, value: dict[str, str | int | bool]) -> dict[str, str | int | bool]:
        from slurm.sbatch_options import check_driver_options

        return check_driver_options(value)


class ClusterConfig(Section):
    """How stages become processes. Never changes a result."""

    launcher: Literal["inprocess", "local", "slurm"] = "inprocess"
    """In the driver's process, as processes of this machine, or as Slurm jobs."""
    site: Path | None = None
    """File that describes the cluster's partitions: account, set-up lines, container, ..."""
    poll_interval_s: float = Field(default=1.0, gt=0)
    """Seconds between two looks at the queue; 30 or more on a cluster shared with others."""
    max_retries: int = Field(default=2, ge=0)
    """Further attempts at a stage that failed for no stated reason."""
    env: EnvironmentVariables = {}
    """Environment of every stage."""
    network_interface: ShellText | None = None
    """Where sockets of the run listen: an interface (``ib0``), a network (``10.1.0.0/16``) or an
    address. By default the loopback where all processes are of this machine, else everywhere."""
    driver_reconnect_timeout_s: float = Field(default=600.0, gt=0)
    """How long pools wait for another driver when theirs was killed, or failed, before they give
    their devices back."""
    driver: DriverJobConfig = DriverJobConfig()
    notify_command: tuple[ShellText, ...] = ()
    """A command, as a list of words, that is run at the end of the run and when it fails, with the
    run's name and ``finished``, ``failed`` or ``stopped`` as its last arguments."""

    @property
    def bind_interface(self) -> str | None:
        """Where sockets of the run listen; None: on all networks of their nodes."""
        return self.network_interface or (None if self.launcher == "slurm" else LOOPBACK)
