"""Communication by latency and bandwidth (Hockney's alpha and beta): sends, collectives, paths.

Sources: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective communication operations
in MPICH" (sections 4 to 8) for the collectives; the documentation of NCCL and of nccl-tests
(PERFORMANCE.md) for rings and for the double binary tree (Sanders, Speck and Träff 2009). The cost
of the arithmetic in a reduction is left out: GPUs add faster than links bring.

All functions take numbers or arrays that broadcast. A group of one process costs nothing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import numpy as np

from rlinf.errors import PlanError, did_you_mean
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup

Numbers = Any
"""A number or an array of numbers."""


@dataclass(frozen=True)
class LinkModel:
    """A way from one process to another."""

    latency_s: Numbers
    """Alpha: seconds until the first byte is there."""
    bytes_per_s: Numbers
    """1 / beta: what one process gets, in one direction."""

    def __post_init__(self) -> None:
        if not (np.all(np.asarray(self.latency_s) >= 0) and np.all(self.bytes_per_s > 0)):
            raise PlanError(
                f"a link of {self.bytes_per_s} bytes/s with a latency of {self.latency_s} s cannot "
                "be; give bandwidths above 0 and latencies of 0 or more"
            )

    def send_seconds(self, size: Numbers) -> Numbers:
        """Seconds for ``size`` bytes from one process to another."""
        return self.latency_s + size / self.bytes_per_s


def path_seconds(path: Sequence[LinkModel], size: float, chunk: float | None = None) -> float:
    """Seconds for ``size`` bytes over links one after the other: GPU to host, host to host, host to
    GPU; or a shared filesystem.

    Args:
        chunk: bytes passed on at once: the first chunk takes the whole way, each further one
            follows as fast as the slowest link takes chunks. None: a link takes up the message
            when the one before it has all of it (as with a file that is written, then read).

    Raises:
        PlanError: the path has no links.
    """
    if not path:
        raise PlanError("a relay path needs at least one link")
    if chunk is None or chunk >= size:
        return float(sum(link.send_seconds(size) for link in path))
    times = [float(link.send_seconds(chunk)) for link in path]
    return sum(times) + (math.ceil(size / chunk) - 1) * max(times)


def all_reduce_seconds(link: LinkModel, processes: Numbers, size: Numbers) -> Numbers:
    """Seconds to sum ``size`` bytes over all processes: the quicker of ring and tree.

    Ring, ``2 (p - 1) alpha + 2 (p - 1) / p n beta``: reduce-scatter, then all-gather. Tree,
    ``2 log2(p) alpha + 2 n beta``: two binary trees, each with half of the data, up and down.
    """
    ring = 2 * all_gather_seconds(link, processes, size)
    depth = np.ceil(np.log2(np.maximum(processes, 1)))
    tree = 2 * depth * link.latency_s + 2 * size / link.bytes_per_s
    return np.minimum(ring, tree)


def all_gather_seconds(link: LinkModel, processes: Numbers, size: Numbers) -> Numbers:
    """``(p - 1) alpha + (p - 1) / p n beta`` (ring), where ``size`` is what each has in the end; a
    reduce-scatter of ``size`` bytes takes as long."""
    others = np.asarray(processes) - 1
    return others * link.latency_s + others / processes * size / link.bytes_per_s


def all_to_all_seconds(link: LinkModel, processes: Numbers, size: Numbers) -> Numbers:
    """``(p - 1) (alpha + n / p beta)``, pair by pair; each has ``size`` bytes for all together."""
    return all_gather_seconds(link, processes, size)


GIB = 2**30

LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large messages reach: nccl-tests report 235 GB/s for all-reduce
on eight A100 with 300 GB/s of NVLink each (its PERFORMANCE.md defines the figure)."""
NVLINK_LATENCY_S = 4e-6
"""Per hop, launch included: chosen with published decoding over 2 to 8 A100 in view (gpt-fast)."""
PCIE_LATENCY_S = 10e-6
INTER_LATENCY_S = 20e-6
"""Between nodes, per hop (assumed)."""
INTER_BYTES_PER_S = 12.5e9
"""Assumed between nodes where nothing is known: one port of 100 Gbit/s."""
FLOPS_EFFICIENCY: Mapping[str, float] = MappingProxyType({"a100": 0.7})
"""Share of the peak that large matrix products reach, by family, communication and the work between
them not counted: what brings this model nearest to LLM Foundry's tables of A100 and H100."""
OTHER_FLOPS_EFFICIENCY = 0.6
"""Of the H100, and assumed of all others."""
PCIE_BYTES_PER_S = {"h100": 63e9, "h200": 63e9, "b200": 63e9, "mi300x": 63e9, "v100": 15.75e9}
"""PCIe x16 per direction by family: generation 5, and 3 of the V100; all others have 4."""
PCIE4_BYTES_PER_S = 31.5e9
FABRIC: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "a100-80gb-sxm": (300e9, "NVIDIA A100 data sheet: NVLink 600 GB/s, both directions"),
        "h100-sxm": (450e9, "NVIDIA H100 data sheet: NVLink 900 GB/s, both directions"),
        "h200-sxm": (450e9, "NVIDIA H200 data sheet: NVLink 900 GB/s, both directions"),
        "b200": (900e9, "NVIDIA HGX B200 data sheet: NVLink 1.8 TB/s, both directions"),
        "mi300x": (448e9, "AMD Instinct MI300X data sheet: 7 links of 128 GB/s, both directions"),
    }
)
"""Links between the GPUs of a node that these always come with, bytes/s per direction."""
FLOAT16_FLOPS: Mapping[str, float] = MappingProxyType({"v100-16gb": 125e12, "v100-32gb": 125e12})
"""Of GPUs without units for bfloat16; their models must run in float16."""


@dataclass(frozen=True)
class GpuDevice:
    """GPUs of a kind and the nodes they sit in."""

    name: str
    memory_bytes: float
    flops: float
    """Peak of dense matrix products in the model's precision, FLOP/s."""
    bandwidth_bytes_per_s: float
    """Of the GPU's memory."""
    intra: LinkModel
    """Between two GPUs of a node."""
    inter: LinkModel
    """Between two nodes; its bandwidth is the node's, shared by all its GPUs."""
    host: LinkModel
    """Between a GPU and its host's memory."""
    gpus_per_node: int = 8
    flops_efficiency: float = OTHER_FLOPS_EFFICIENCY
    """Share of the peak that large matrix products reach."""
    bandwidth_efficiency: float = 0.8
    """Share of the memory bandwidth that reading weights reaches (assumed)."""
    layer_overhead_s: float = 20e-6
    """Seconds per layer and pass that no GPU is too fast for: launches of kernels (assumed)."""
    reserve_bytes: float = 1.5 * GIB
    """Kept by the driver, its context and communication buffers (assumed)."""
    fragmentation: float = 0.05
    """Share of the memory lost to the allocator (assumed)."""
    slowdown: float = 1.0
    """How many times longer work takes than the figures say."""
    sources: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False
    )
    """By field: where its number is from."""

    @property
    def usable_bytes(self) -> float:
        """What weights, states and activations may fill."""
        return self.memory_bytes * (1 - self.fragmentation) - self.reserve_bytes

    def roofline(self, flops: Any, read_bytes: Any) -> tuple[Any, Any]:
        """Seconds bound by arithmetic, and by memory bandwidth: the larger one, the other is 0.

        Work of ``flops`` that reads ``read_bytes`` takes the larger of the two (Williams, Waterman
        and Patterson 2009).
        """
        arithmetic = self.slowdown * flops / (self.flops * self.flops_efficiency)
        memory = self.slowdown * read_bytes
        memory = memory / (self.bandwidth_bytes_per_s * self.bandwidth_efficiency)
        bound = arithmetic >= memory
        return np.where(bound, arithmetic, 0.0), np.where(bound, 0.0, memory)

    def group_link(self, processes: Any, stride: Any, *, pairwise: bool = False) -> LinkModel:
        """The link of a group of ranks ``stride`` apart, ranks being counted along the nodes.

        Groups side by side share the node's way out: with a ring each group leaves a node once, so
        as many share it as groups lie interleaved; when all send to all (``pairwise``), all GPUs.
        """
        inside = np.asarray(processes) * stride <= self.gpus_per_node
        sharers = self.gpus_per_node if pairwise else np.minimum(stride, self.gpus_per_node)
        outside = np.minimum(self.inter.bytes_per_s / sharers, self.intra.bytes_per_s)
        return LinkModel(
            np.where(inside, self.intra.latency_s, self.inter.latency_s),
            np.where(inside, self.intra.bytes_per_s, outside),
        )


def device_from_data_sheet(
    model: str,
    *,
    name: str = "",
    gpus_per_node: int = 8,
    memory_gib: float | None = None,
    intra_bytes_per_s: float | None = None,
    inter_bytes_per_s: float | None = None,
    slowdown: float = 1.0,
) -> GpuDevice:
    """A GPU of :data:`slurm.gpus.GPUS` in nodes of its kind.

    Args:
        model: key of :data:`slurm.gpus.GPUS`.
        name: what to call it; the model by default.
        memory_gib: of each GPU, where the data sheet does not hold.
        intra_bytes_per_s: between two GPUs of a node, per direction; by default what the GPU
            always comes with (:data:`FABRIC`), else PCIe.
        inter_bytes_per_s: between two nodes, per node and direction.

    Raises:
        PlanError: the GPU is unknown.
    """
    gpu = GPUS.get(model)
    if gpu is None:
        raise PlanError(
            f"GPU {model!r} is unknown{did_you_mean(model, GPUS)}; name it as gpu_model in the "
            "site file, or measure the stages with a profile"
        )
    pcie = PCIE_BYTES_PER_S.get(gpu.family, PCIE4_BYTES_PER_S)
    fabric, fabric_source = FABRIC.get(model, (pcie, "assumed: PCIe x16"))
    intra = intra_bytes_per_s or fabric
    sources = {
        "flops": gpu.source if gpu.bf16_flops else f"{gpu.source}, float16 (no bfloat16 units)",
        "bandwidth_bytes_per_s": gpu.source,
        "memory_bytes": "given" if memory_gib else gpu.source,
        "intra": "given" if intra_bytes_per_s else fabric_source,
        "inter": "given" if inter_bytes_per_s else "assumed: 100 Gbit/s",
    }
    return GpuDevice(
        name=name or model,
        memory_bytes=(memory_gib or gpu.memory_gib) * GIB,
        flops=gpu.bf16_flops or FLOAT16_FLOPS[model],
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        gpus_per_node=gpus_per_node,
        intra=LinkModel(
            NVLINK_LATENCY_S if intra > pcie else PCIE_LATENCY_S, LINK_EFFICIENCY * intra
        ),
        inter=LinkModel(
            INTER_LATENCY_S, LINK_EFFICIENCY * (inter_bytes_per_s or INTER_BYTES_PER_S)
        ),
        host=LinkModel(PCIE_LATENCY_S, LINK_EFFICIENCY * pcie),
        flops_efficiency=FLOPS_EFFICIENCY.get(gpu.family, OTHER_FLOPS_EFFICIENCY),
        slowdown=slowdown,
        sources=MappingProxyType(sources),
    )


def device_from_node_group(name: str, group: NodeGroup) -> GpuDevice:
    """The device that an inventory's group of like nodes describes.

    Raises:
        PlanError: the group has no GPUs, or an unknown one.
    """
    if not group.gpus_per_node:
        raise PlanError(f"{name}: its nodes have no GPUs")
    if not group.gpu_model:
        raise PlanError(
            f"{name}: nothing is known of its GPU {group.gpu_type!r}; name it as gpu_model in the "
            "site file, or measure the stages with a profile"
        )
    return device_from_data_sheet(
        group.gpu_model,
        name=name,
        gpus_per_node=group.gpus_per_node,
        memory_gib=group.gpu_memory_gib,
        intra_bytes_per_s=group.intra_node_bandwidth_bytes_per_s,
        inter_bytes_per_s=group.inter_node_bandwidth_bytes_per_s,
        slowdown=group.slowdown,
    )
