"""The hardware model: links with latency and bandwidth (Hockney's alpha and beta), and GPUs in
nodes.

Sources of the collectives: Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH" (sections 4 to 8); the documentation of NCCL and nccl-tests
(PERFORMANCE.md) for rings and for the double binary tree (Sanders, Speck and Träff 2009). The
arithmetic of a reduction is ignored, because GPUs add faster than links send. All functions accept
numbers or arrays that broadcast. A group of one process takes no time.

Data sheets give upper limits. Programs reach only a share of each limit, which is assumed from
published runs. Measured stages use measurements instead (:mod:`pipeline.planning.cost.rates`).
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
    """A link from one process to another."""

    latency_s: Numbers
    """Alpha: seconds until the first byte arrives."""
    bytes_per_s: Numbers
    """1 / beta: bandwidth of one process in one direction."""

    def __post_init__(self) -> None:
        if not (np.all(np.asarray(self.latency_s) >= 0) and np.all(self.bytes_per_s > 0)):
            raise PlanError(
                f"a link of {self.bytes_per_s} bytes/s with a latency of {self.latency_s} s is "
                "invalid; give bandwidths above 0 and latencies of 0 or more"
            )

    def send_seconds(self, size: Numbers) -> Numbers:
        """Return the seconds to send ``size`` bytes from one process to another."""
        return self.latency_s + size / self.bytes_per_s


def path_seconds(path: Sequence[LinkModel], size: float, chunk: float | None = None) -> float:
    """Return the seconds to send ``size`` bytes over consecutive links, such as GPU to host, host
    to host and host to GPU, or a shared filesystem.

    Args:
        chunk: bytes that are forwarded at a time. After the first chunk has crossed all links, the
            others follow at the rate of the slowest link. None: a link begins when the previous one
            has sent all bytes, as with a file that is written and then read.

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
    """Return the seconds to sum ``size`` bytes over all processes: the faster of ring and tree.

    Ring: ``2 (p - 1) alpha + 2 (p - 1) / p n beta``, a reduce-scatter and an all-gather. Tree:
    ``2 log2(p) alpha + 2 n beta``, up and down two binary trees with half of the data each.
    """
    ring = 2 * all_gather_seconds(link, processes, size)
    depth = np.ceil(np.log2(np.maximum(processes, 1)))
    tree = 2 * depth * link.latency_s + 2 * size / link.bytes_per_s
    return np.minimum(ring, tree)


def all_gather_seconds(link: LinkModel, processes: Numbers, size: Numbers) -> Numbers:
    """Return ``(p - 1) alpha + (p - 1) / p n beta`` (ring), if the result on each process has
    ``size`` bytes. A reduce-scatter of ``size`` bytes takes as long."""
    others = np.asarray(processes) - 1
    return others * link.latency_s + others / processes * size / link.bytes_per_s


def all_to_all_seconds(link: LinkModel, processes: Numbers, size: Numbers) -> Numbers:
    """Return ``(p - 1) (alpha + n / p beta)`` (pairwise exchanges), where each process sends
    ``size`` bytes in total."""
    return all_gather_seconds(link, processes, size)


GIB = 2**30

LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large messages reach: nccl-tests report 235 GB/s for all-reduce
on eight A100 with 300 GB/s of NVLink each (bus bandwidth as in PERFORMANCE.md)."""
NVLINK_LATENCY_S = 4e-6
"""Latency per hop with kernel launch, tuned to published decoding on 2 to 8 A100 (gpt-fast)."""
PCIE_LATENCY_S = 10e-6
"""Latency of PCIe (assumed)."""
INTER_LATENCY_S = 20e-6
"""Latency per hop between nodes (assumed)."""
INTER_BYTES_PER_S = 12.5e9
"""Bandwidth between nodes if unknown: one port of 100 Gbit/s (assumed)."""
FLOPS_EFFICIENCY: Mapping[str, float] = MappingProxyType({"a100": 0.7})
"""Share of the peak FLOP/s that large matmuls reach, without communication and other kernels, by
GPU family; tuned to LLM Foundry's tables of A100 and H100."""
DEFAULT_FLOPS_EFFICIENCY = 0.6
"""The same share for the H100; assumed for all other GPUs."""
PCIE_BYTES_PER_S = {"h100": 63e9, "h200": 63e9, "b200": 63e9, "mi300x": 63e9, "v100": 15.75e9}
"""Bandwidth of PCIe x16 per direction by family: generation 5, and 3 for the V100."""
PCIE4_BYTES_PER_S = 31.5e9
"""Bandwidth of PCIe x16 of generation 4, which all other families have."""
GPU_LINKS: Mapping[str, tuple[float, str]] = MappingProxyType(
    {
        "a100-80gb-sxm": (300e9, "NVIDIA A100 data sheet: NVLink 600 GB/s, both directions"),
        "h100-sxm": (450e9, "NVIDIA H100 data sheet: NVLink 900 GB/s, both directions"),
        "h200-sxm": (450e9, "NVIDIA H200 data sheet: NVLink 900 GB/s, both directions"),
        "b200": (900e9, "NVIDIA HGX B200 data sheet: NVLink 1.8 TB/s, both directions"),
        "mi300x": (448e9, "AMD Instinct MI300X data sheet: 7 links of 128 GB/s, both directions"),
    }
)
"""Built-in links between the GPUs of a node, bytes/s per direction, with their source."""
FLOAT16_FLOPS: Mapping[str, float] = MappingProxyType({"v100-16gb": 125e12, "v100-32gb": 125e12})
"""Peak float16 rates of GPUs without bfloat16 units."""


@dataclass(frozen=True)
class GpuDevice:
    """A kind of GPU and its nodes."""

    name: str
    memory_bytes: float
    flops: float
    """Peak FLOP/s of dense matmuls in the model's precision."""
    bandwidth_bytes_per_s: float
    """Bandwidth of the GPU's memory."""
    intra: LinkModel
    """Link between two GPUs of a node."""
    inter: LinkModel
    """Link between two nodes; all GPUs of a node share its bandwidth."""
    host: LinkModel
    """Link between a GPU and its host's memory."""
    gpus_per_node: int = 8
    flops_efficiency: float = DEFAULT_FLOPS_EFFICIENCY
    """Share of the peak FLOP/s that large matmuls reach."""
    bandwidth_efficiency: float = 0.8
    """Share of the memory bandwidth that is reached when reading weights (assumed)."""
    layer_overhead_s: float = 20e-6
    """Minimum seconds per layer and pass for kernel launches (assumed)."""
    reserve_bytes: float = 1.5 * GIB
    """Memory of the driver, its context and communication buffers (assumed)."""
    fragmentation: float = 0.05
    """Share of the memory that the allocator loses (assumed)."""
    slowdown: float = 1.0
    """Factor by which work takes longer than the data sheet implies."""
    sources: Mapping[str, str] = field(
        default_factory=lambda: MappingProxyType({}), compare=False, repr=False
    )
    """Source of each field's value."""

    @property
    def usable_bytes(self) -> float:
        """Memory that weights, states and activations may use."""
        return self.memory_bytes * (1 - self.fragmentation) - self.reserve_bytes

    def roofline(self, flops: Any, read_bytes: Any) -> tuple[Any, Any]:
        """Return the seconds of compute-bound and of memory-bound work; one of them is 0.

        Work of ``flops`` that reads ``read_bytes`` takes the larger of both times (Williams,
        Waterman and Patterson 2009).
        """
        compute_s = self.slowdown * flops / (self.flops * self.flops_efficiency)
        memory_s = self.slowdown * read_bytes
        memory_s = memory_s / (self.bandwidth_bytes_per_s * self.bandwidth_efficiency)
        is_compute_bound = compute_s >= memory_s
        return np.where(is_compute_bound, compute_s, 0.0), np.where(is_compute_bound, 0.0, memory_s)

    def group_link(self, processes: Any, stride: Any, *, pairwise: bool = False) -> LinkModel:
        """Return the link between processes of a group whose ranks differ by ``stride``.

        Ranks fill one node first. In a ring, one GPU of a group sends to the next node, so up to
        ``stride`` interleaved groups share a node's bandwidth. If each process sends to all
        others (``pairwise``), all GPUs of the node share it.
        """
        fits_in_node = np.asarray(processes) * stride <= self.gpus_per_node
        num_sharing = self.gpus_per_node if pairwise else np.minimum(stride, self.gpus_per_node)
        inter_bytes_per_s = np.minimum(self.inter.bytes_per_s / num_sharing, self.intra.bytes_per_s)
        return LinkModel(
            np.where(fits_in_node, self.intra.latency_s, self.inter.latency_s),
            np.where(fits_in_node, self.intra.bytes_per_s, inter_bytes_per_s),
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
    """Return the device of a GPU in :data:`slurm.gpus.GPUS`.

    Args:
        model: key of :data:`slurm.gpus.GPUS`.
        name: the device's name; the model by default.
        memory_gib: memory of each GPU, if it differs from the data sheet.
        intra_bytes_per_s: bandwidth between two GPUs of a node, per direction; by default the GPU's
            own links (:data:`GPU_LINKS`), else PCIe.
        inter_bytes_per_s: bandwidth between two nodes, per node and direction.

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
    own_link_bytes_per_s, link_source = GPU_LINKS.get(model, (pcie, "assumed: PCIe x16"))
    intra = intra_bytes_per_s or own_link_bytes_per_s
    sources = {
        "flops": gpu.source if gpu.bf16_flops else f"{gpu.source}, float16 (no bfloat16 units)",
        "bandwidth_bytes_per_s": gpu.source,
        "memory_bytes": "given" if memory_gib else gpu.source,
        "intra": "given" if intra_bytes_per_s else link_source,
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
        flops_efficiency=FLOPS_EFFICIENCY.get(gpu.family, DEFAULT_FLOPS_EFFICIENCY),
        slowdown=slowdown,
        sources=MappingProxyType(sources),
    )


def device_from_node_group(name: str, group: NodeGroup) -> GpuDevice:
    """Return the device of a node group of an inventory.

    Raises:
        PlanError: the group has no GPUs, or the GPU is unknown.
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
