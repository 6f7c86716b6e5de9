"""What a cluster has: partitions, their groups of like nodes, and the limits of this user.

An inventory is taken by :mod:`slurm.discovery`, saved as JSON, and read where Slurm is not at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

from pydantic import AwareDatetime, Field, model_validator

from rlinf.artifacts import write_user_file
from rlinf.config import Section, validate
from rlinf.errors import ConfigError, PlanError
from slurm import gpus
from slurm.site import HardwareSettings, SiteConfig

SCHEMA = 1
NEVER_PREEMPTED = frozenset({"", "OFF", "GANG"})
GIGA = 10**9


class NodeGroup(Section):
    """Nodes of one partition whose hardware is alike.

    Racks, switches and the like do not part nodes; a feature that tells the GPU or its memory does.
    """

    count: int = Field(ge=1)
    """All nodes, those that are down included."""
    gpu_type: str = ""
    """The GPU's name in GRES, as sbatch wants it; "" where there is none. Of a node with several
    types the most numerous."""
    gpus_per_node: int = Field(default=0, ge=0)
    cpus_per_node: int = Field(ge=0)
    mem_mb_per_node: int = Field(ge=0)
    """Memory, MiB."""
    features: tuple[str, ...] = ()
    """Features that all of the nodes have."""
    nodes: tuple[str, ...] = ()
    """Their names; empty where unknown."""
    idle_nodes: int = Field(default=0, ge=0)
    """Nodes without a job, not kept for one, and fit to run one."""
    idle_gpus: int = Field(default=0, ge=0)
    """GPUs that a job could have now, on partly used nodes too."""
    down_nodes: int = Field(default=0, ge=0)
    """Nodes that are down, drained, failing or under maintenance."""
    gpu_model: str = ""
    """Key of :data:`slurm.gpus.GPUS`; "" where the GPU is unknown."""
    gpu_memory_gib: float | None = Field(default=None, gt=0)
    intra_node_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    """Between two GPUs of a node, per direction."""
    inter_node_bandwidth_bytes_per_s: float | None = Field(default=None, gt=0)
    """Between two nodes, per node and direction."""
    cost_per_gpu_hour: float | None = Field(default=None, gt=0)
    """In the site's own unit."""
    slowdown: float = Field(default=1.0, gt=0)
    """How many times longer work takes here than the GPU's figures say."""

    @model_validator(mode="after")
    def _adds_up(self) -> NodeGroup:
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
        """Nodes that are not down: what may be planned with."""
        return self.count - self.down_nodes

    @property
    def description(self) -> str:
        """What its nodes are, in words; differs between the groups of a partition."""
        gpu = self.gpu_type or ("gpu" if self.gpus_per_node else "no GPU")
        gpu_features = [feature for feature in self.features if gpus.is_gpu_feature(feature)]
        parts = [f"{self.gpus_per_node} x {gpu}" if self.gpus_per_node else gpu, *gpu_features]
        return ", ".join([*parts, f"{self.cpus_per_node} CPUs", f"{self.mem_mb_per_node} MiB"])


class PartitionInventory(Section):
    """A partition: its rules, its groups of nodes, and what waits for them.

    Partitions may share nodes: a sum over partitions counts those several times.
    """

    name: str = Field(min_length=1)
    groups: tuple[NodeGroup, ...]
    time_limit_min: int | None = Field(ge=0)
    """Longest wall time, minutes; None: unlimited."""
    preempt_mode: str = "OFF"
    priority_tier: int = Field(default=1, ge=0)
    is_available: bool = True
    """Whether jobs may start."""
    is_default: bool = False
    qos: str = ""
    """The partition's own QOS, whose limits hold for its jobs; "" for none."""
    allowed_qos: tuple[str, ...] | None = None
    """None: all but those denied. So for accounts."""
    denied_qos: tuple[str, ...] = ()
    allowed_accounts: tuple[str, ...] | None = None
    denied_accounts: tuple[str, ...] = ()
    max_nodes_per_job: int | None = Field(default=None, ge=0)
    queued_jobs: int = Field(default=0, ge=0)
    """Jobs (array tasks singly) that wait for nodes; not those held or waiting for another job."""
    queued_gpus: int = Field(default=0, ge=0)
    """GPUs they ask for."""

    @model_validator(mode="after")
    def _distinct_groups(self) -> PartitionInventory:
        kinds = [group.description for group in self.groups]
        if twice := next((kind for kind in kinds if kinds.count(kind) > 1), None):
            raise ValueError(f"two groups of like nodes ({twice}); make them one")
        return self

    @property
    def nodes(self) -> int:
        """All nodes."""
        return sum(group.count for group in self.groups)

    @property
    def gpus(self) -> dict[str, int]:
        """The most GPUs of each type that a node has."""
        having = sorted(self.groups, key=lambda group: group.gpus_per_node)
        return {group.gpu_type: group.gpus_per_node for group in having if group.gpus_per_node}


class QosLimits(Section):
    """A QOS. Limits are None, or absent from a table, where there is none."""

    priority: int = 0
    preempts: tuple[str, ...] = ()
    """QOS whose jobs may be preempted for its own."""
    max_wall_min: int | None = Field(default=None, ge=0)
    max_jobs_per_user: int | None = Field(default=None, ge=0)
    max_submit_per_user: int | None = Field(default=None, ge=0)
    max_tres_per_user: dict[str, int] = {}
    """Amounts by Slurm's names: ``{"gres/gpu": 8, "node": 2}``; memory in MiB."""
    max_tres_per_job: dict[str, int] = {}
    max_tres_all_jobs: dict[str, int] = {}


class Association(Section):
    """What this user may do under one account."""

    cluster: str
    account: str
    partition: str = ""
    """Slurm's database writes it in lower case; "": any partition."""
    qos: tuple[str, ...] = ()
    default_qos: str = ""
    max_jobs: int | None = Field(default=None, ge=0)
    max_submit: int | None = Field(default=None, ge=0)
    max_wall_min: int | None = Field(default=None, ge=0)
    max_tres_per_job: dict[str, int] = {}
    max_tres_all_jobs: dict[str, int] = {}


class AccountingLimits(Section):
    """What accounting allows this user."""

    qos: dict[str, QosLimits] = {}
    associations: tuple[Association, ...] = ()


class Inventory(Section):
    """A cluster as it was at one moment."""

    schema_version: Literal[1]
    created_at: AwareDatetime
    slurm_version: str
    partitions: dict[str, PartitionInventory]
    limits: AccountingLimits | None = None
    """None: no accounting, or it does not answer."""
    cluster: str = ""
    """Its name in accounting, which may know several; "": not known."""
    enforces_limits: bool = True
    """Whether Slurm holds jobs to these limits."""

    @model_validator(mode="after")
    def _named_alike(self) -> Inventory:
        for name, partition in self.partitions.items():
            if name != partition.name:
                raise ValueError(f"partitions.{name}.name is {partition.name!r}")
        return self

    def is_preemptible(self, name: str) -> bool:
        """Whether jobs of a partition may lose their nodes to others.

        By partition priority where one of a higher tier exists, or by QOS where one preempts.
        Without accounting the QOS are unknown and the partition's mode decides.
        """
        partition = self.partitions[name]
        if set(partition.preempt_mode.split(",")) <= NEVER_PREEMPTED:
            return False
        if any(other.priority_tier > partition.priority_tier for other in self.partitions.values()):
            return True
        return self.limits is None or any(qos.preempts for qos in self.limits.qos.values())

    def with_site_settings(self, site: SiteConfig) -> Inventory:
        """The same cluster with what a site file, or else the data sheets, say of its GPUs."""
        partitions = {}
        for name, partition in self.partitions.items():
            groups = tuple(_described(group, site.settings_for(name)) for group in partition.groups)
            partitions[name] = partition.model_copy(update={"groups": groups})
        return self.model_copy(update={"partitions": partitions})

    def to_json(self) -> str:
        """As text that :func:`load_inventory` reads."""
        return self.model_dump_json(indent=1) + "\n"

    def save(self, path: Path) -> None:
        """Write it as JSON, whole or not at all.

        Raises:
            InputError: the file cannot be written.
        """
        write_user_file(path, self.to_json())


def load_inventory(path: Path) -> Inventory:
    """Read a saved inventory.

    Raises:
        PlanError: missing, not JSON, of another schema, or a key is missing or wrong; names the
            file and the key.
    """
    try:
        text = path.expanduser().read_text(encoding="utf-8")
    except FileNotFoundError:
        raise PlanError(f"no file {path}; make one with: rlinf inventory --save {path}") from None
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
            f"Take it anew: rlinf inventory --save {path}"
        )
    try:
        return validate(Inventory, values)
    except ConfigError as error:
        raise PlanError(f"{path}: {error}") from None


def _described(group: NodeGroup, hardware: HardwareSettings) -> NodeGroup:
    """A group with everything a site file may say, and nothing left of another one."""
    gpu = gpus.find_gpu(group.gpu_type, group.features) if group.gpus_per_node else None
    if hardware.gpu_model is not None and group.gpus_per_node:
        named = gpus.find_gpu(hardware.gpu_model)
        # A partition may mix GPUs; the site's word settles only what GRES leaves open.
        if gpu is None or (named is not None and named.family == gpu.family):
            gpu = named
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
