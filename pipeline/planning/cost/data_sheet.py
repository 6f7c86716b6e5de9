"""GPUs and links between them as data sheets describe them.

Data sheets give upper limits. Programs reach only a share of each limit, which is assumed from
published runs.

Sources: for collectives Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", and nccl-tests (PERFORMANCE.md). A group of one process takes no
time.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy as np

from rlinf.errors import PlanError, did_you_mean
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup

GIB = 2**30

LINK_EFFICIENCY = 0.8
"""Share of a link's bandwidth that large messages reach: nccl-tests report 235 GB/s for all-reduce
on eight A100 with 300 GB/s of NVLink each (bus bandwidth as in PERFORMANCE.md)."""
NVLINK_LATENCY_S, PCIE_LATENCY_S, INTER_LATENCY_S = 4e-6, 10e-6, 20e-6
"""Latencies per hop with kernel launch: of NVLink, tuned to published decoding on 2 to 8 A100
(gpt-fast); of PCIe and between nodes (assumed)."""
INTER_BYTES_PER_S = 12.5e9
"""Bandwidth between nodes if unknown: one port of 100 Gbit/s (assumed)."""
FLOPS_EFFICIENCY: Mapping[str, float] = MappingProxyType({"a100": 0.7})
"""Share of the peak FLOP/s that large matmuls reach, without communication and other kernels, by
GPU family; tuned to LLM Foundry's tables of A100 and H100."""
DEFAULT_FLOPS_EFFICIENCY = 0.6
"""The same share for the H100; assumed for all other GPUs."""
BANDWIDTH_EFFICIENCY = 0.8
"""Share of the memory bandwidth that is reached when reading weights (assumed)."""
LAYER_OVERHEAD_S = 20e-6
"""Minimum seconds per layer and pass for kernel launches (assumed)."""
RESERVE_BYTES, FRAGMENTATION = 1.5 * GIB, 0.05
"""Memory of the driver, its context and communication buffers, and the share of the memory that the
allocator loses (assumed)."""
PCIE_BYTES_PER_S = {"h100": 63e9, "h200": 63e9, "b200": 63e9, "mi300x": 63e9, "v100": 15.75e9}
"""Bandwidth of PCIe x16 per direction by family: generation 5, and 3 for the V100."""
PCIE4_BYTES_PER_S = 31.5e9
"""Bandwidth of PCIe x16 of generation 4, which all other families have."""
GPU_LINKS: Mapping[str, float] = MappingProxyType(
    {
        "a100-80gb-sxm": 300e9,
        "h100-sxm": 450e9,
        "h200-sxm": 450e9,
        "b200": 900e9,
        "mi300x": 448e9,
    }
)
"""Bandwidth between two GPUs of a node, bytes/s per direction: half of the data sheets' NVLink
bandwidth for both directions (AMD: 7 links of 128 GB/s). Other GPUs have PCIe."""
FLOAT16_FLOPS: Mapping[str, float] = MappingProxyType({"v100-16gb": 125e12, "v100-32gb": 125e12})
"""Peak float16 rates of GPUs without bfloat16 units."""


@dataclass(frozen=True)
class LinkModel:
    """A link from one process to another."""

    latency_s: float
    """Alpha: seconds until the first byte arrives."""
    bytes_per_s: float
    """1 / beta: bandwidth of one process in one direction."""

    def all_gather_s(self, processes: int, size: Any) -> Any:
        """Return ``(p - 1) alpha + (p - 1) / p n beta`` (ring), if the result on each process has
        ``size`` bytes. A reduce-scatter of ``size`` bytes takes as long."""
        others = processes - 1
        return others * self.latency_s + others / processes * size / self.bytes_per_s

    def all_reduce_s(self, processes: int, size: Any) -> Any:
        """Return the seconds to sum ``size`` bytes (a number or an array) over all processes: the
        faster of ring and tree.

        Ring: ``2 (p - 1) alpha + 2 (p - 1) / p n beta``, a reduce-scatter and an all-gather. Tree:
        ``2 log2(p) alpha + 2 n beta``, up and down two binary trees with half of the data each.
        """
        depth = math.ceil(math.log2(processes))
        tree_s = 2 * depth * self.latency_s + 2 * size / self.bytes_per_s
        return np.minimum(2 * self.all_gather_s(processes, size), tree_s)


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
    host_bytes_per_s: float
    """Bandwidth between a GPU and its host's memory."""
    gpus_per_node: int = 8
    flops_efficiency: float = DEFAULT_FLOPS_EFFICIENCY
    """Share of the peak FLOP/s that large matmuls reach."""
    layer_overhead_s: float = LAYER_OVERHEAD_S
    slowdown: float = 1.0
    """Factor by which work takes longer than the data sheet implies."""

    @property
    def usable_bytes(self) -> float:
        """Memory that weights, states and activations may use."""
        return self.memory_bytes * (1 - FRAGMENTATION) - RESERVE_BYTES

    def roofline_s(self, flops: Any, read_bytes: Any) -> Any:
        """Return the seconds of work of ``flops`` that reads ``read_bytes``: the larger of both
        times (Williams, Waterman and Patterson 2009). Numbers or arrays."""
        compute_s = flops / (self.flops * self.flops_efficiency)
        memory_s = read_bytes / (self.bandwidth_bytes_per_s * BANDWIDTH_EFFICIENCY)
        return self.slowdown * np.maximum(compute_s, memory_s)

    def group_link(self, processes: int, stride: int = 1) -> LinkModel:
        """Return the link between processes of a group whose ranks differ by ``stride``.

        Ranks fill one node first. In a ring, one GPU of a group sends to the next node, so up to
        ``stride`` interleaved groups share a node's bandwidth.
        """
        if processes * stride <= self.gpus_per_node:
            return self.intra
        shared = self.inter.bytes_per_s / min(stride, self.gpus_per_node)
        return LinkModel(self.inter.latency_s, min(shared, self.intra.bytes_per_s))


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
    intra = intra_bytes_per_s or GPU_LINKS.get(model, pcie)
    inter = inter_bytes_per_s or INTER_BYTES_PER_S
    latency_s = NVLINK_LATENCY_S if intra > pcie else PCIE_LATENCY_S
    return GpuDevice(
        name=name or model,
        memory_bytes=(memory_gib or gpu.memory_gib) * GIB,
        flops=gpu.bf16_flops or FLOAT16_FLOPS[model],
        bandwidth_bytes_per_s=gpu.bandwidth_bytes_per_s,
        gpus_per_node=gpus_per_node,
        intra=LinkModel(latency_s, LINK_EFFICIENCY * intra),
        inter=LinkModel(INTER_LATENCY_S, LINK_EFFICIENCY * inter),
        host_bytes_per_s=LINK_EFFICIENCY * pcie,
        flops_efficiency=FLOPS_EFFICIENCY.get(gpu.family, DEFAULT_FLOPS_EFFICIENCY),
        slowdown=slowdown,
    )


def device_from_node_group(name: str, group: NodeGroup) -> GpuDevice:
    """Return the device of a node group of an inventory.

    Raises:
        PlanError: the GPU is unknown.
    """
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
