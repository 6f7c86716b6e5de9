"""Site files: settings of a cluster's jobs and the hardware of its partitions, in YAML."""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, field_validator

from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError, did_you_mean
from rlinf.yaml_file import read_yaml
from slurm import gpus
from slurm.jobs import partition_names
from slurm.sbatch_options import (
    MEMORY_OPTIONS,
    EnvironmentVariables,
    OptionText,
    OptionValue,
    ShellText,
    check_site_options,
    check_srun_options,
)


class HardwareSettings(Section):
    """Hardware of a partition's nodes that Slurm cannot report; see
    :class:`slurm.inventory.NodeGroup`."""

    gpu_model: str | None = None
    """The GPU, if its GRES name is ambiguous (``gpu:4``, or ``a100``, which has two sizes): a key
    of :data:`slurm.gpus.GPUS` or any name that is recognised as one."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    """Memory of each GPU of the partition, GiB."""
    intra_node_bandwidth_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of a node, gigabytes per second and direction."""
    inter_node_bandwidth_gb_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two nodes, gigabytes per second, node and direction (400 Gbit/s are 50)."""
    cost_per_gpu_hour: float | None = Field(default=None, gt=0)
    """Cost of a GPU for one hour, in any unit that all partitions share."""
    interruptions_per_hour: float = Field(default=0.0, ge=0)
    """Expected preemptions and node failures of a job, per hour."""
    slowdown: float = Field(default=1.0, gt=0)
    """Factor by which work takes longer here than the GPU's data sheet predicts."""

    @field_validator("gpu_model")
    @classmethod
    def _check_gpu_model(cls, value: str | None) -> str | None:
        if value is not None and gpus.find_gpu(value) is None:
            raise ValueError(f"unknown GPU {value!r}{did_you_mean(value.lower(), gpus.GPUS)}")
        return value


DutyCycle = Annotated[float, Field(gt=0, le=1)]


class PartitionSettings(HardwareSettings):
    """Settings of the jobs of one partition, and the partition's hardware."""

    account: OptionText | None = None
    qos: OptionText | None = None
    constraint: OptionText | None = None
    exclude: OptionText | None = None
    reservation: OptionText | None = None
    setup: tuple[ShellText, ...] = ()
    """Shell lines that run before the job's command: ``module load cuda/12.4``."""
    python_command: tuple[ShellText, ...] = ()
    """Words of the Python command: ``[apptainer, exec, --nv, /images/rlinf.sif, python3]``."""
    env: EnvironmentVariables = {}
    sbatch: dict[str, OptionValue] = {}
    """Further sbatch options by long name, see :func:`slurm.sbatch_options.check_site_options`.

    They are defaults: ``mem_mb`` of the plan replaces ``mem``, ``mem-per-cpu`` and ``mem-per-gpu``.
    """
    srun: dict[str, OptionValue] = {}
    """Further options of srun, which starts the processes of a job: ``{container-image:
    /images/rlinf.sqsh}`` with Pyxis, see :func:`slurm.sbatch_options.check_srun_options`."""
    signal_delay_s: int = Field(default=90, ge=1)
    """Seconds between the warning signal and the end of the job."""
    duty_cycle: DutyCycle | dict[str, DutyCycle] = 1.0
    """Share of the time that processes of jobs may run, to make some nodes of a dev cluster slower:
    a number, or by kind of node (a GPU's GRES name or a feature), for partitions with several
    kinds. Leave it at 1 on real clusters."""

    @field_validator("sbatch")
    @classmethod
    def _check_options(cls, value: dict[str, OptionValue]) -> dict[str, OptionValue]:
        return check_site_options(value)

    @field_validator("srun")
    @classmethod
    def _check_srun(cls, value: dict[str, OptionValue]) -> dict[str, OptionValue]:
        return check_srun_options(value)

    def duty_cycle_for(self, *kinds: str) -> float:
        """Return the duty cycle of a node with these GPU names and features; 1 by default."""
        if isinstance(self.duty_cycle, float):
            return self.duty_cycle
        return min(
            (self.duty_cycle[kind] for kind in kinds if kind in self.duty_cycle), default=1.0
        )

    def resource_arguments(self) -> dict[str, Any]:
        """Return the settings as keyword arguments of :class:`slurm.jobs.JobResources`."""
        return {
            name: getattr(self, name)
            for name in type(self).model_fields
            if name not in HardwareSettings.model_fields
        }


class SiteConfig(Section):
    """A site file: ``defaults`` for all partitions, and ``partitions`` that override them.

    The mappings ``env``, ``sbatch`` and ``srun`` are overridden key by key. An option of a
    partition that is ``false`` removes the default one.
    """

    defaults: PartitionSettings = PartitionSettings()
    partitions: dict[str, PartitionSettings] = {}
    interpreters: dict[str, str] = {}
    """Paths of Python interpreters by name, for ``task.python``, ``engine.python`` and
    ``trainer.python``."""

    def settings_for(self, partition: str | None) -> PartitionSettings:
        """Return the settings of a partition, or of a list (``a100,h100``) with equal settings.

        Raises:
            PlanError: the partitions of the list have different settings.
        """
        first, *others = partition_names(partition or "")
        settings = self._merged(first)
        for name in others:
            other, expected = self._merged(name).resource_arguments(), settings.resource_arguments()
            key = next((key for key in expected if expected[key] != other[key]), None)
            if key is not None:
                raise PlanError(
                    f"cluster.site: a job for partitions {partition} needs the same settings in "
                    f"all; {key} is {expected[key]!r} for {first} and {other[key]!r} for {name}. "
                    "Make them equal or name one partition"
                )
        return settings

    def overrides_for(self, partition: str | None) -> PartitionSettings:
        """Return the settings of one partition without the defaults."""
        return self.partitions.get(partition or "", PartitionSettings())

    def check_partitions(self, partitions: Collection[str], path: Path) -> None:
        """Check that the cluster has every partition of this site file.

        Raises:
            PlanError: partitions are missing. The message suggests the most similar name, or
                another site file if all are missing.
        """
        missing = [name for name in self.partitions if name not in partitions]
        if not missing:
            return
        if len(missing) == len(self.partitions) > 1:
            raise PlanError(
                f"cluster.site: {path}: this cluster has none of its partitions "
                f"({', '.join(missing)}), but {', '.join(sorted(partitions))}; is it the site file "
                "of another cluster? Write one for this cluster with: rlinf init-site"
            )
        raise PlanError(
            f"cluster.site: {path}: partitions.{missing[0]}: this cluster has no partition "
            f"{missing[0]!r}{did_you_mean(missing[0], partitions)}"
        )

    def _merged(self, partition: str) -> PartitionSettings:
        overrides = self.partitions.get(partition)
        if overrides is None:
            return self.defaults
        update = {name: getattr(overrides, name) for name in overrides.model_fields_set}
        for name in ("env", "sbatch", "srun"):
            if name in update:
                update[name] = {**getattr(self.defaults, name), **update[name]}
        if any(overrides.sbatch.get(name, False) is not False for name in MEMORY_OPTIONS):
            # They exclude each other, so a partition's own one replaces any default one.
            inherited = {name for name in MEMORY_OPTIONS if name not in overrides.sbatch}
            update["sbatch"] = {k: v for k, v in update["sbatch"].items() if k not in inherited}
        return self.defaults.model_copy(update=update)


@functools.cache
def load_site(path: Path) -> SiteConfig:
    """Read a site file.

    Raises:
        PlanError: the file is missing or not YAML, or a key is unknown or has the wrong type.
    """
    values = read_yaml(path, "cluster.site", PlanError)
    if not isinstance(values or {}, Mapping):
        raise PlanError(
            f"cluster.site: {path}: expected a mapping with 'defaults' and 'partitions'"
        )
    try:
        return validate(SiteConfig, values or {}, str(path))
    except ConfigError as error:
        raise PlanError(f"cluster.site: {error}") from None
