"""``rlinf init-site``: write a commented site file from what Slurm says about the cluster."""

from __future__ import annotations

import shutil
from collections.abc import Collection, Iterator
from pathlib import Path

import yaml

from pipeline.inventory import load_or_survey
from rlinf.artifacts import write_user_file
from rlinf.errors import InputError
from slurm import gpus
from slurm.inventory import (
    Inventory,
    NodeGroup,
    PartitionInventory,
    is_accepted,
    partition_without_gpus,
)
from slurm.records import Association

CONTAINER_TOOLS = ("apptainer", "singularity", "enroot")
"""Commands of container tools, the preferred one first."""
QUESTION = "?"
"""Marks the comment of a value that Slurm cannot tell."""


def init_site(source: Path | None, target: Path) -> list[str]:
    """Write a site file; returns lines that tell what to do next.

    Args:
        source: a saved inventory; None queries Slurm.
        target: the file to write.

    Raises:
        InputError: the file exists, or cannot be written.
        SlurmError: Slurm is not installed or does not answer.
    """
    if target.expanduser().exists():
        raise InputError(f"{target}: exists already; name another file with --out, or remove it")
    inventory = load_or_survey(source, None)
    tools = [tool for tool in CONTAINER_TOOLS if source is None and shutil.which(tool)]
    text = site_text(inventory, tools)
    write_user_file(target, text)
    questions = text.count(f"# {QUESTION} ")
    lines = [f"site file: {target}"]
    if questions:
        lines.append(f"{questions} values need your answer; their comments begin with {QUESTION}")
    lines.append(f"then: rlinf plan experiment=NAME cluster=slurm cluster.site={target}")
    return lines


def site_text(inventory: Inventory, container_tools: Collection[str] = ()) -> str:
    """Return the site file of a cluster as YAML with comments.

    Args:
        container_tools: container tools of this machine, from :data:`CONTAINER_TOOLS`.
    """
    associations = _associations(inventory)
    name = f" {inventory.cluster}" if inventory.cluster else ""
    lines = [
        f"# Site file of cluster{name}, Slurm {inventory.slurm_version},",
        f"# written by rlinf init-site on {inventory.created_at:%Y-%m-%d}.",
        "# All keys: docs/howto/slurm.md.",
        "defaults:",
        *_account_lines(associations),
        "  setup: []  # shell lines before each job's command, such as module load cuda/12.4",
    ]
    if tool := next((tool for tool in CONTAINER_TOOLS if tool in container_tools), None):
        lines += _container_lines(tool)
    lines.append("partitions:")
    for partition in inventory.partitions.values():
        lines += _partition_lines(inventory, partition, associations)
    driver = partition_without_gpus(inventory)
    if driver is not None and not inventory.partitions[driver].gpus:
        lines += [
            f"# The driver needs no GPU. Its job goes to partition {driver}; for another one:",
            "#   rlinf submit RUN --partition NAME",
        ]
    return "\n".join(lines) + "\n"


def _associations(inventory: Inventory) -> list[Association]:
    """Return this user's associations in this cluster."""
    limits = inventory.limits
    every = limits.associations if limits is not None else ()
    return [a for a in every if not inventory.cluster or a.cluster == inventory.cluster]


def _account_lines(associations: list[Association]) -> Iterator[str]:
    accounts = list(dict.fromkeys(association.account for association in associations))
    if len(accounts) > 1:
        others = ", ".join(accounts[1:])
        yield f"  account: {_scalar(accounts[0])}  # {QUESTION} you also have {others}"
    elif accounts:
        yield f"  account: {_scalar(accounts[0])}"
    else:
        yield "  # account: NAME  # if jobs need one; accounting does not answer here"


def _container_lines(tool: str) -> Iterator[str]:
    if tool == "enroot":
        yield "  # srun: {container-image: /images/rlinf.sqsh}  # with Pyxis, to run stages in it"
        yield "  # python_command: [python3]  # that of the container"
    else:
        command = f"[{tool}, exec, --nv, /images/rlinf.sif, python3]"
        yield f"  # python_command: {command}  # to run stages in a container"


def _partition_lines(
    inventory: Inventory, partition: PartitionInventory, associations: list[Association]
) -> Iterator[str]:
    yield f"  {_scalar(partition.name)}:  # {_description(inventory, partition)}"
    for group in partition.groups:
        yield f"    # {group.count} nodes: {group.description}"
    settings = [
        *_access_lines(partition, associations),
        *_memory_lines(partition),
        *_gpu_lines(partition.groups),
    ]
    yield from settings
    if not any(line.lstrip()[0] != "#" for line in settings):
        yield "    {}"


def _description(inventory: Inventory, partition: PartitionInventory) -> str:
    limit = partition.time_limit_min
    parts = [
        "the default" if partition.is_default else "",
        "" if partition.is_available else "closed now",
        "no time limit" if limit is None else f"at most {limit / 60:.3g} h",
        "whole nodes only" if partition.is_exclusive else "",
        "jobs may be preempted" if inventory.is_preemptible(partition.name) else "",
    ]
    return ", ".join(part for part in parts if part)


def _access_lines(partition: PartitionInventory, associations: list[Association]) -> Iterator[str]:
    """Yield account and QOS if those that jobs have by default are not allowed here."""
    accounts = list(dict.fromkeys(association.account for association in associations))
    allowed = [
        a for a in accounts if is_accepted(a, partition.allowed_accounts, partition.denied_accounts)
    ]
    if accounts and not allowed:
        yield f"    # {QUESTION} none of your accounts may use this partition"
        return
    account = allowed[0] if allowed else None
    if account is not None and account != accounts[0]:
        yield f"    account: {_scalar(account)}"
    own = [a for a in associations if a.account == account]
    names = list(dict.fromkeys(name for a in own for name in (a.default_qos, *a.qos) if name))
    usable = [n for n in names if is_accepted(n, partition.allowed_qos, partition.denied_qos)]
    if names and not usable:
        yield f"    # {QUESTION} none of your QOS ({', '.join(names)}) may use this partition"
    elif usable and usable[0] != names[0]:
        others = f"  # {QUESTION} or {', '.join(usable[1:])}" if usable[1:] else ""
        yield f"    qos: {_scalar(usable[0])}{others}"
    elif usable[1:]:
        yield f"    # qos: {_scalar(usable[0])}  # or {', '.join(usable[1:])}"


def _memory_lines(partition: PartitionInventory) -> Iterator[str]:
    if partition.is_exclusive:
        return
    if (default := partition.default_mem_mb_per_cpu) is not None:
        yield f"    # a job without mem_mb in the plan gets {default} MiB for each CPU"
    else:
        yield "    # a job without mem_mb in the plan may get the memory of a whole node"
    if (maximum := partition.max_mem_mb_per_cpu) is not None:
        yield f"    # more than {maximum} MiB for each CPU costs further CPUs"


def _gpu_lines(groups: tuple[NodeGroup, ...]) -> Iterator[str]:
    """Yield the GPU's model if its name in Slurm does not determine it."""
    gpu_groups = [group for group in groups if group.gpus_per_node]
    models: dict[str, str] = {}
    for group in gpu_groups:
        name = group.gpu_type or "gpu"
        variants = [gpu.name for gpu in gpus.matching_gpus(name, group.features)]
        if not variants:
            models["# gpu_model: MODEL"] = f"{name} is unknown; one of {', '.join(gpus.GPUS)}"
        elif variants[1:]:
            models[f"gpu_model: {variants[0]}"] = f"{name} may be {', '.join(variants)}"
    # The key exists once; a partition with several ambiguous names needs a decision.
    for number, (line, reason) in enumerate(models.items()):
        prefix = "" if number == 0 or line.startswith("#") else "# "
        yield f"    {prefix}{line}  # {QUESTION} {reason}; nvidia-smi on a node says which"
    if gpu_groups and max(group.count for group in gpu_groups) > 1:
        yield "    # inter_node_bandwidth_gb_per_s: 25  # of the network (200 Gbit/s are 25)"


def _scalar(text: str) -> str:
    """Return a text as a YAML scalar."""
    return str(yaml.safe_dump(text, width=1 << 20).splitlines()[0])
