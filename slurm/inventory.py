"""The inventory of a cluster: partitions, groups of equal nodes in each, and this user's limits.

:mod:`slurm.discovery` creates an inventory. It can be saved as JSON and read on machines without
Slurm.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field, model_validator

from rlinf.artifacts import write_user_file
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError
from slurm import gpus
from slurm.records import AccountingLimits
from slurm.site import HardwareSettings, SiteConfig

SCHEMA = 1
"""Version of the saved format."""
NEVER_PREEMPTED = frozenset({"", "OFF", "GANG"})
"""Words of PreemptMode that let no other job preempt the jobs of a partition."""
GIGA = 10**9
PREFERRED_TIME_MIN = 24 * 60
"""A partition that allows at least this many minutes is long enough for any job without GPUs."""
MAX_ARRAY_SIZE = 1001
"""MaxArraySize of slurm.conf by default."""
MAX_JOB_COUNT = 10000
"""MaxJobCount of slurm.conf by default."""


class NodeGroup(Section):
    """Nodes of one partition with equal hardware.

    Nodes that differ only in features for racks or switches share a group. Features for the GPU or
    its memory separate groups.
    """

    count: int = Field(ge=1)
    """Number of nodes, down nodes included."""
    gpu_type: str = ""
    """The GPU's name in GRES, as sbatch expects it; "" without a GPU. If a node has several types,
    it is the most frequent type."""
    gpus_per_node: int = Field(default=0, ge=0)
    """Number of GPUs of this type."""
    other_gpus: dict[str, int] = {}
    """Number of GPUs of each other type that a node has too, by its name in GRES."""
    cpus_per_node: int = Field(ge=0)
    mem_mb_per_node: int = Field(ge=0)
    """Memory, MiB."""
    features: tuple[str, ...] = ()
    """Features that all nodes of the group have."""
    nodes: tuple[str, ...] = ()
    """Names of the nodes; empty if unknown."""
    idle_nodes: int = Field(default=0, ge=0)
    """Number of usable nodes that neither run a job nor are reserved for one."""
    idle_gpus: int = Field(default=0, ge=0)
    """Number of free GPUs, including those of partly used nodes."""
    down_nodes: int = Field(default=0, ge=0)
    """Number of nodes that are down, drained, failing or under maintenance."""
    gpu_model: str = ""
    """Key of :data:`slurm.gpus.GPUS`; "" if the GPU is unknown."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    intra_node_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two GPUs of a node, per direction."""
    inter_node_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    """Bandwidth between two nodes, per node and direction."""
    cost_per_gpu_hour: float | None = Field(default=None, gt=0)
    """Cost of a GPU for one hour, in the unit of the site file."""
    slowdown: float = Field(default=1.0, gt=0)
    """Factor by which work takes longer on these nodes than the GPU's data sheet predicts."""

    @model_validator(mode="after")
    def _check_counts(self) -> NodeGroup:
        if self.idle_nodes + self.down_nodes > self.count:
            raise ValueError(
                f"{self.idle_nodes} idle and {self.down_nodes} down nodes of {self.count}"
            )
        if self.idle_gpus > self.usable_nodes * self.gpus_per_node:
            raise ValueError(f"{self.idle_gpus} idle GPUs, more than the usable nodes have")
        if self.nodes and len(self.nodes) != self.count:
            raise ValueError(f"{len(self.nodes)} names for {self.count} nodes")
        return self

    @property
    def usable_nodes(self) -> int:
        """The number of nodes that are not down; the planner may use these."""
        return self.count - self.down_nodes

    @property
    def gpus(self) -> dict[str, int]:
        """The number of GPUs per node, by GPU type."""
        return {self.gpu_type: self.gpus_per_node, **self.other_gpus} if self.gpus_per_node else {}

    @property
    def description(self) -> str:
        """A text that describes the nodes; unique within a partition."""
        parts = [f"{count} x {gpu_type or 'gpu'}" for gpu_type, count in self.gpus.items()]
        parts += [feature for feature in self.features if gpus.is_gpu_feature(feature)]
        parts += [f"{self.cpus_per_node} CPUs", f"{self.mem_mb_per_node} MiB"]
        return ", ".join(parts if self.gpus else ["no GPU", *parts])


class PartitionInventory(Section):
    """A partition: its rules, its node groups, and the jobs that wait for them.

    Partitions may share nodes; a sum over partitions counts shared nodes several times.
    """

    name: str = Field(min_length=1)
    groups: tuple[NodeGroup, ...]
    time_limit_min: int | None = Field(ge=0)
    """Maximum wall time in minutes; None: unlimited."""
    preempt_mode: str = "OFF"
    """Slurm's PreemptMode: what happens to a preempted job, ``OFF`` if jobs are not preempted."""
    priority_tier: int = Field(default=1, ge=0)
    """Slurm's PriorityTier: jobs of a higher tier may preempt those of a lower one."""
    is_available: bool = True
    """True if jobs may start."""
    is_default: bool = False
    qos: str = ""
    """The partition's QOS, whose limits apply to its jobs; "": none."""
    allowed_qos: tuple[str, ...] | None = None
    """None: all QOS except the denied ones. The same holds for accounts."""
    denied_qos: tuple[str, ...] = ()
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    max_nodes_per_job: int | None = Field(default=None, ge=0)
    is_exclusive: bool = False
    """True if a job gets whole nodes (``OverSubscribe=EXCLUSIVE``)."""
    default_mem_mb_per_cpu: int | None = Field(default=None, ge=0)
    """Memory of a job that requests none, MiB per CPU (DefMemPerCPU); None: not set."""
    max_mem_mb_per_cpu: int | None = Field(default=None, ge=0)
    """MaxMemPerCPU: a job that requests more memory per CPU gets more CPUs; None: not set."""
    queued_jobs: int = Field(default=0, ge=0)
    """Jobs that wait for nodes, array elements counted singly; without jobs on hold or with
    unfinished dependencies."""
    queued_gpus: int = Field(default=0, ge=0)
    """GPUs that these jobs request."""

    @model_validator(mode="after")
    def _distinct_groups(self) -> PartitionInventory:
        descriptions = [group.description for group in self.groups]
        if duplicate := next((d for d in descriptions if descriptions.count(d) > 1), None):
            raise ValueError(f"two groups of equal nodes ({duplicate}); merge them")
        return self

    @property
    def nodes(self) -> int:
        """The number of nodes of all groups."""
        return sum(group.count for group in self.groups)

    @property
    def knows_memory(self) -> bool:
        """True if Slurm knows the memory of the nodes. It refuses requests for memory otherwise.

        A node whose RealMemory is not set has 1 MiB.
        """
        return any(group.mem_mb_per_node > 1 for group in self.groups)

    @property
    def gpus(self) -> dict[str, int]:
        """The maximum number of GPUs per node, by GPU type."""
        counts = [item for group in self.groups for item in group.gpus.items()]
        return dict(sorted(counts, key=lambda item: item[1]))


def is_accepted(name: str, allowed: tuple[str, ...] | None, denied: tuple[str, ...]) -> bool:
    """Return whether a partition accepts an account or a QOS.

    If there is a list of allowed names, Slurm ignores the denied names. It ignores case.
    """
    names = {word.casefold() for word in (denied if allowed is None else allowed)}
    return (name.casefold() in names) != (allowed is None)


def default_partition(partitions: Mapping[str, PartitionInventory]) -> str | None:
    """Return the name of the partition that jobs use by default; None if there is none."""
    return next((name for name, partition in partitions.items() if partition.is_default), None)


def partition_without_gpus(
    inventory: Inventory, accepts: Callable[[str], bool] = lambda name: True
) -> str | None:
    """Return the partition of jobs without GPUs that name none; None: Slurm's default.

    It is the default partition, unless that has GPUs and an open partition without GPUs exists.
    Of several such partitions, one is chosen that shares its nodes, whose jobs are not preempted,
    that allows jobs of a day, and that has the most nodes, in this order.

    Args:
        accepts: returns whether the job may run in a partition without GPUs.
    """
    default = default_partition(inventory.partitions)
    if default is not None and not inventory.partitions[default].gpus:
        return default

    def preference(partition: PartitionInventory) -> tuple[bool, bool, int, int]:
        limit = partition.time_limit_min
        minutes = PREFERRED_TIME_MIN if limit is None else min(limit, PREFERRED_TIME_MIN)
        preemptible = inventory.is_preemptible(partition.name)
        return (not partition.is_exclusive, not preemptible, minutes, partition.nodes)

    candidates = [
        partition
        for name, partition in inventory.partitions.items()
        if partition.is_available and partition.groups and not partition.gpus and accepts(name)
    ]
    return max(candidates, key=preference).name if candidates else default


class Inventory(Section):
    """The state of a cluster at one moment."""

    schema_version: Literal[1]
    created_at: AwareDatetime
    slurm_version: str
    partitions: dict[str, PartitionInventory]
    limits: AccountingLimits | None = None
    """None: the cluster has no accounting, or accounting does not answer."""
    cluster: str = ""
    """The cluster's name in accounting, which may manage several clusters; "": unknown."""
    enforces_limits: bool = True
    """True if Slurm enforces ``limits``."""
    max_array_size: int = Field(default=MAX_ARRAY_SIZE, ge=1)
    """Maximum elements of one array."""
    max_jobs: int = Field(default=MAX_JOB_COUNT, ge=0)
    """MaxJobCount: maximum number of jobs of all users."""

    @model_validator(mode="after")
    def _check_names(self) -> Inventory:
        for name, partition in self.partitions.items():
            if name != partition.name:
                raise ValueError(f"partitions.{name}.name is {partition.name!r}")
        return self

    def is_preemptible(self, name: str) -> bool:
        """Return True if other jobs may preempt the jobs of a partition.

        They may if the mode allows preemption, and either another partition has a higher priority
        tier or any QOS preempts others. Without accounting the QOS are unknown: the mode suffices.
        """
        partition = self.partitions[name]
        if set(partition.preempt_mode.split(",")) <= NEVER_PREEMPTED:
            return False
        if any(other.priority_tier > partition.priority_tier for other in self.partitions.values()):
            return True
        return self.limits is None or any(qos.preempts for qos in self.limits.qos.values())

    def with_site_settings(self, site: SiteConfig) -> Inventory:
        """Return the inventory with the hardware values of a site file, or else of data sheets."""
        partitions = {}
        for name, partition in self.partitions.items():
            groups = tuple(
                _with_hardware(group, site.settings_for(name)) for group in partition.groups
            )
            partitions[name] = partition.model_copy(update={"groups": groups})
        return self.model_copy(update={"partitions": partitions})

    def to_json(self) -> str:
        """Return the inventory as text that :func:`load_inventory` reads."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write the inventory as JSON, atomically.

        Raises:
            InputError: the file cannot be written.
        """
        write_user_file(path, self.to_json())


def load_inventory(path: Path) -> Inventory:
    """Read a saved inventory.

    Raises:
        PlanError: the file is missing, not JSON or of another schema, or a key is missing or
            wrong. The message names the file and the key.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(f"no file {path}; create one with: rlinf inventory --save {path}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise PlanError(f"{path}: cannot be read ({error})") from None
    try:
        values = json.loads(text)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PlanError(f"{path} is not valid JSON ({error})") from None
    if not isinstance(values, dict):
        raise PlanError(f"{path}: expected an inventory, a JSON object with 'partitions'")
    version = values.get("schema_version", SCHEMA)
    if version != SCHEMA:
        raise PlanError(
            f"{path}: schema_version: {version!r}; this program reads {SCHEMA}. "
            f"Create it again: rlinf inventory --save {path}"
        )
    try:
        return validate(Inventory, values)
    except ConfigError as error:
        raise PlanError(f"{path}: {error}") from None


def _with_hardware(group: NodeGroup, hardware: HardwareSettings) -> NodeGroup:
    """Return a group with all hardware values reset to those of a site file or of data sheets."""
    gpu = gpus.find_gpu(group.gpu_type, group.features) if group.gpus_per_node else None
    if hardware.gpu_model is not None and group.gpus_per_node:
        site_gpu = gpus.find_gpu(hardware.gpu_model)
        # A partition may mix GPUs, so the site's model only resolves an ambiguous GRES name.
        if gpu is None or (site_gpu is not None and site_gpu.family == gpu.family):
            gpu = site_gpu
    memory = hardware.gpu_memory_gib or (gpu.memory_gib if gpu else None)
    return group.model_copy(
        update={
            "gpu_model": gpu.name if gpu else "",
            "gpu_memory_gib": memory if group.gpus_per_node else None,
            "intra_node_bandwidth_bytes_per_s": _bytes_per_s(
                hardware.intra_node_bandwidth_gb_per_s
            ),
            "inter_node_bandwidth_bytes_per_s": _bytes_per_s(
                hardware.inter_node_bandwidth_gb_per_s
            ),
            "cost_per_gpu_hour": hardware.cost_per_gpu_hour if group.gpus_per_node else None,
            "slowdown": hardware.slowdown,
        }
    )


def _bytes_per_s(gb_per_s: float | None) -> float | None:
    return None if gb_per_s is None else gb_per_s * GIGA
