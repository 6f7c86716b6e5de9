"""Times and memory of a stage on GPUs from data sheets: hardware, workloads, and formulas.

Data sheets give upper limits. Programs reach only a share of each limit, which is assumed from
published runs. Measured stages use measurements instead (:mod:`pipeline.planning.cost.rates`).
A layout divides a model over tensor-parallel ranks (``tp``) and data-parallel replicas (``dp``).

Sources: for collectives Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", and nccl-tests (PERFORMANCE.md); for ZeRO Rajbhandari et al.
2020 (arXiv 1910.02054); for activations Korthikanti et al. 2022 (arXiv 2205.05198, section 4); for
tensor-parallel communication Narayanan et al. 2021 (arXiv 2104.04473, section 2.3); for
memory-bound decoding Pope et al. 2022 (arXiv 2211.05102); for the paged KV cache Kwon et al. 2023
(arXiv 2309.06180). A group of one process takes no time. Functions accept numbers or arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from pipeline.planning.cost.model_shape import FLOAT32, ModelShape, Recompute
from rlinf.errors import PlanError, did_you_mean
from slurm.gpus import GPUS
from slurm.inventory import NodeGroup

Array = np.ndarray
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

    def group_link(self, processes: Any, stride: Any) -> LinkModel:
        """Return the link between processes of a group whose ranks differ by ``stride``.

        Ranks fill one node first. In a ring, one GPU of a group sends to the next node, so up to
        ``stride`` interleaved groups share a node's bandwidth.
        """
        fits_in_node = np.asarray(processes) * stride <= self.gpus_per_node
        num_sharing = np.minimum(stride, self.gpus_per_node)
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
    own_link_bytes_per_s = GPU_LINKS.get(model, pcie)
    intra = intra_bytes_per_s or own_link_bytes_per_s
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


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter in training: by default bfloat16 with Adam in float32."""

    weights: float = 2
    gradients: float = 2
    optimizer: float = 12
    """Adam's two moments and the float32 copy of the weights (Rajbhandari et al. 2020, arXiv
    1910.02054, section 3.1: 12 bytes)."""


@dataclass(frozen=True)
class TrainingWorkload:
    """Training of one iteration: optimizer steps over sequences."""

    samples: int
    """Sequences per optimizer step."""
    tokens: int
    """Mean length of a sequence, in tokens."""
    longest: int = 0
    """Longest sequence, which determines the memory; 0: the mean."""
    steps: int = 1
    """Optimizer steps per iteration."""
    zero: int = 1
    """ZeRO stage: data-parallel replicas shard nothing (0), optimizer states (1), also gradients
    (2), also weights (3, FSDP)."""
    state: StateBytes = StateBytes()
    copies: int = 1
    """Number of complete copies of the states (hybrid sharding); the replicas are divided equally,
    and each part shards one copy."""
    optimizer_limit_bytes: float | None = None
    """Maximum bytes of optimizer states on a device at a time; the others are in host memory. None:
    nothing is offloaded."""

    def shards(self, replicas: Array | int) -> Array:
        """Return the number of replicas over which each copy of the states is sharded."""
        return np.maximum(1, np.asarray(replicas) // self.copies)

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "tokens", "steps", "copies")
        if self.zero not in (0, 1, 2, 3):
            raise PlanError(f"zero stage {self.zero}: there are 0, 1, 2 and 3")


@dataclass(frozen=True)
class InferenceWorkload:
    """A forward pass over all ``samples`` sequences of an iteration: log-probs, values or rewards.
    ``tokens`` and ``longest`` are as in :class:`TrainingWorkload`."""

    samples: int
    tokens: int
    longest: int = 0

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "tokens")


@dataclass(frozen=True)
class GenerationWorkload:
    """Generation of responses with continuous batching."""

    lengths: Array
    """Examples of response lengths, tokens ``[n]``, in any order."""
    samples: int
    """Responses per iteration."""
    prompt_tokens: int
    """Mean length of a prompt."""
    group_size: int = 1
    """Responses per prompt, which share the prompt's KV cache."""
    max_running: int = 256
    """Maximum number of concurrent requests of an engine."""

    def __post_init__(self) -> None:
        _check_positive(self, "samples", "prompt_tokens", "group_size", "max_running")
        lengths = np.asarray(self.lengths, dtype=np.float64)
        if lengths.ndim != 1 or not len(lengths) or not np.all(np.isfinite(lengths)):
            raise PlanError("response lengths must be a list of numbers, at least one")
        if lengths.min() < 1:
            raise PlanError(f"a response of {lengths.min():g} tokens; each must have at least one")
        object.__setattr__(self, "lengths", lengths)


Workload = TrainingWorkload | InferenceWorkload | GenerationWorkload


def _check_positive(work: object, *names: str) -> None:
    for name in names:
        if getattr(work, name) < 1:
            raise PlanError(f"{type(work).__name__}: {name} is {getattr(work, name)}; at least 1")


@dataclass(frozen=True)
class CandidateLayout:
    """One or many layouts: ``dp`` and ``micro_batch`` may be arrays of the same shape."""

    tp: int = 1
    """Tensor parallel: number of processes that share each matrix."""
    dp: Numbers = 1
    """Data parallel: number of replicas."""
    micro_batch: Numbers = 1
    """Samples per replica and forward pass."""
    recompute: Recompute = "selective"
    """Activation recomputation; see :data:`pipeline.planning.cost.model_shape.RECOMPUTE`."""


PREFILL_TOKENS = 8192
"""Maximum tokens of an engine's prefill chunk (close to vLLM's default)."""


@dataclass(frozen=True)
class MemoryBreakdown:
    """The memory of a GPU by purpose, in bytes."""

    weights: Numbers = 0.0
    gradients: Numbers = 0.0
    optimizer: Numbers = 0.0
    activations: Numbers = 0.0
    """Activations for the backward pass, and the logits."""
    kv_cache: Numbers = 0.0

    @property
    def total(self) -> Numbers:
        """The sum of all parts."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.kv_cache


def stage_memory(shape: ModelShape, layout: CandidateLayout, work: Workload) -> MemoryBreakdown:
    """Return the bytes per GPU.

    For generation, this is the minimum: the KV cache of only one request, of maximum length. The
    remaining memory determines the number of running requests (:func:`running_requests`).
    """
    if isinstance(work, GenerationWorkload):
        longest = work.prompt_tokens + float(work.lengths.max())
        activation_bytes = shape.activation_bytes().max() * PREFILL_TOKENS
        activation_bytes = activation_bytes + FLOAT32 * shape.vocab * work.max_running
        return MemoryBreakdown(
            weights=shape.dtype_bytes * shape.parameters / layout.tp,
            activations=activation_bytes / layout.tp,
            kv_cache=longest * kv_bytes_per_token(shape, layout.tp),
        )
    tokens = layout.micro_batch * max(work.longest, work.tokens)
    layer_bytes = shape.activation_bytes()
    if isinstance(work, TrainingWorkload):
        return _training_memory(shape, layout, work, tokens)
    # One layer's activations or the logits are in memory, whichever is larger.
    bytes_per_token = max(layer_bytes.max(), shape.head_activation_bytes)
    weights = shape.dtype_bytes * shape.parameters / layout.tp
    return MemoryBreakdown(weights, activations=bytes_per_token * tokens / layout.tp)


def _training_memory(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, tokens: Numbers
) -> MemoryBreakdown:
    """Return the memory of training.

    With ZeRO 3, two layers are unsharded: the current one, and the prefetched next one. Of
    offloaded optimizer states, those of the embedding stay on the GPU unless the limit is 0.
    """
    shards = work.shards(layout.dp)
    unsharded = shape.parameters / layout.tp
    sharded = unsharded / shards

    def state_bytes(bytes_per_parameter: float, min_zero: int) -> Numbers:
        return bytes_per_parameter * (sharded if work.zero >= min_zero else unsharded)

    weights = state_bytes(work.state.weights, 3)
    if work.zero == 3:
        largest = float((shape.shared_parameters + shape.expert_parameters).max())
        weights = weights + 2 * work.state.weights * largest / layout.tp * (shards > 1)
    layer_bytes = shape.activation_bytes()
    # The gradient of the logits has the size of the logits.
    bytes_per_token = shape.head_activation_bytes + FLOAT32 * shape.vocab
    if layout.recompute == "full":
        # All activations of the layer that is being recomputed are in memory.
        input_bytes = float(shape.activation_bytes("full").max())
        bytes_per_token = bytes_per_token + layer_bytes.max() + shape.layers * input_bytes
    else:
        bytes_per_token = bytes_per_token + layer_bytes.sum()
    optimizer = state_bytes(work.state.optimizer, 1)
    if (limit := work.optimizer_limit_bytes) is not None:
        min_on_device = work.state.optimizer * shape.embedding_parameters / layout.tp / shards
        optimizer = np.minimum(optimizer, np.maximum(limit, min_on_device * (limit > 0)))
    gradients = state_bytes(work.state.gradients, 2)
    return MemoryBreakdown(weights, gradients, optimizer, bytes_per_token * tokens / layout.tp)


def mean_context(work: GenerationWorkload) -> float:
    """Return the mean number of tokens of a running request: its prompt and its response so far.

    A response of length L runs for L steps and is half complete on average, so the mean length so
    far is ``E[L^2] / (2 E[L])`` (the mean age in renewal theory).
    """
    lengths = work.lengths
    return work.prompt_tokens + float((lengths**2).mean() / (2 * lengths.mean()))


def kv_bytes_per_token(shape: ModelShape, tp: int) -> float:
    """Return the KV cache bytes of a token on one GPU; a GPU has at least one key-value head."""
    heads = max(shape.kv_heads / tp, 1.0)
    return 2.0 * shape.layers * heads * shape.head_dim * shape.dtype_bytes


def running_requests(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> int:
    """Return the number of requests of mean length that a replica runs concurrently: at most the
    engine's limit; 0 if a request of maximum length does not fit."""
    minimum = stage_memory(shape, layout, work)
    free_bytes = device.usable_bytes - minimum.weights - minimum.activations
    if free_bytes < minimum.kv_cache:
        return 0
    bytes_per_request = mean_context(work) * kv_bytes_per_token(shape, layout.tp)
    return int(np.clip(free_bytes // bytes_per_request, 1, work.max_running))


LENGTH_POINTS = 48
"""Number of decoding steps at which the distribution of response lengths is evaluated."""


@dataclass(frozen=True)
class TimeBreakdown:
    """The seconds of a stage, divided by the resource that limits them; the sum is the duration."""

    compute_s: Numbers = 0.0
    bandwidth_s: Numbers = 0.0
    """Reading and writing the GPU's memory."""
    communication_s: Numbers = 0.0
    overhead_s: Numbers = 0.0
    """Kernel launches."""

    @property
    def total(self) -> Numbers:
        """The sum of all parts."""
        return sum(vars(self).values())

    def map_parts(self, change: Callable[[Any], Any]) -> TimeBreakdown:
        """Return the breakdown with ``change`` applied to every part."""
        return TimeBreakdown(*(change(part) for part in vars(self).values()))

    def __add__(self, other: TimeBreakdown) -> TimeBreakdown:
        return TimeBreakdown(
            *(a + b for a, b in zip(vars(self).values(), vars(other).values(), strict=True))
        )


class PassCounts(NamedTuple):
    """The cost of one micro-batch in forward passes; a backward pass computes as much as two."""

    compute: int
    """Number of computed forward passes."""
    scores: int
    """Additional computations of only the attention scores."""
    exchanges: int
    """Number of passes that communicate; a backward pass communicates once."""


TRAINING_PASSES = {"selective": PassCounts(3, 1, 2), "full": PassCounts(4, 0, 3)}
"""Passes of a training step by activation recomputation."""


def stage_seconds(
    shape: ModelShape, layout: CandidateLayout, work: Workload, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds of one iteration. Memory only matters to generation: it limits the number
    of running requests, and the time is infinite if no request fits."""
    if isinstance(work, GenerationWorkload):
        return _generation(shape, layout, work, device)
    micro_batches = -(-work.samples // (layout.dp * layout.micro_batch))
    if isinstance(work, InferenceWorkload):
        passes = _passes(shape, layout, work.tokens, device, PassCounts(1, 0, 1))
        return passes.map_parts(lambda part: micro_batches * part)
    passes = _passes(shape, layout, work.tokens, device, TRAINING_PASSES[layout.recompute])
    step = passes.map_parts(lambda part: micro_batches * part) + TimeBreakdown(
        communication_s=_gradient_sync(shape, layout, work, device, micro_batches)
    )
    step = step + _optimizer(shape, layout, work, device)
    return step.map_parts(lambda part: work.steps * part)


def _passes(
    shape: ModelShape, layout: CandidateLayout, tokens: int, device: GpuDevice, passes: PassCounts
) -> TimeBreakdown:
    """Return the seconds of all passes over one micro-batch."""
    tp, batch_tokens = layout.tp, layout.micro_batch * tokens
    score_flops = shape.layers * shape.score_flops(tokens / 2)
    flops = passes.compute * (float(shape.layer_flops.sum()) + score_flops)
    # The head is never recomputed.
    flops = flops + passes.scores * score_flops + min(passes.compute, 3) * shape.head_flops
    reads = passes.compute * shape.dtype_bytes * shape.parameters / tp
    compute, bandwidth = device.roofline(flops * batch_tokens / tp, reads)
    # Norms, activation functions and residuals write and read the stored activations.
    activation_bytes = float(shape.activation_bytes().sum()) * batch_tokens / tp
    bandwidth = bandwidth + device.roofline(0.0, 2 * passes.compute * activation_bytes)[1]
    return TimeBreakdown(
        compute,
        bandwidth,
        passes.exchanges * _layer_communication(shape, tp, batch_tokens, device),
        overhead_s=passes.compute * shape.layers * device.layer_overhead_s,
    )


def _layer_communication(shape: ModelShape, tp: int, tokens: Numbers, device: GpuDevice) -> Numbers:
    """Return the seconds of tensor-parallel communication in a forward pass: two all-reduces of the
    hidden states per layer."""
    hidden_bytes = tokens * shape.hidden * shape.dtype_bytes
    return 2 * shape.layers * all_reduce_seconds(device.group_link(tp, 1), tp, hidden_bytes)


def _gradient_sync(
    shape: ModelShape,
    layout: CandidateLayout,
    work: TrainingWorkload,
    device: GpuDevice,
    micro_batches: Numbers,
) -> Numbers:
    """Return the seconds to sum gradients over replicas.

    Without sharding this is an all-reduce. ZeRO 1 and 2 need a reduce-scatter and an all-gather,
    which take as long. With ZeRO 3, each micro-batch gathers weights twice and reduce-scatters
    gradients (as long as an all-gather). With hybrid sharding, each micro-batch also all-reduces
    gradient shards over the copies of the states (``work.copies``).
    """
    parameters = shape.parameters / layout.tp
    gradient_bytes = work.state.gradients * parameters
    if work.zero < 3:
        link = device.group_link(layout.dp, layout.tp)
        return all_reduce_seconds(link, layout.dp, gradient_bytes)
    shards = work.shards(layout.dp)
    link = device.group_link(shards, layout.tp)
    seconds = 2 * all_gather_seconds(link, shards, work.state.weights * parameters)
    seconds = seconds + all_gather_seconds(link, shards, gradient_bytes)
    if work.copies > 1:
        link = device.group_link(work.copies, layout.tp * shards)
        seconds = seconds + all_reduce_seconds(link, work.copies, gradient_bytes / shards)
    return micro_batches * seconds


def _optimizer(
    shape: ModelShape, layout: CandidateLayout, work: TrainingWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds to read and write all states, and to transfer offloaded states."""
    parameters = shape.parameters / layout.tp / (work.shards(layout.dp) if work.zero else 1)
    bytes_per_parameter = work.state.gradients + 2 * work.state.optimizer + work.state.weights
    transfer_s: Numbers = 0.0
    if work.optimizer_limit_bytes is not None:  # offloaded
        transfer_s = 2 * work.state.optimizer * parameters / device.host.bytes_per_s
    return TimeBreakdown(
        bandwidth_s=device.roofline(0.0, bytes_per_parameter * parameters)[1],
        communication_s=transfer_s,
    )


def _generation(
    shape: ModelShape, layout: CandidateLayout, work: GenerationWorkload, device: GpuDevice
) -> TimeBreakdown:
    """Return the time of prefill and of decoding with continuous batching; infinite if no request
    fits.

    A replica generates ``R`` responses of random length ``L``, at most ``C`` at the same time. If
    ``R <= C``, all start together, and ``R P(L > t)`` are running after ``t`` steps. Otherwise the
    engine is full until the queue is empty. Then the remaining length of a running request is
    distributed as ``P(residual > t) = E[(L - t)+] / E[L]`` (the residual life of renewal theory).
    Requests that still run ``t`` steps after that had generated ``E[(L - t)+^2] / (2 E[(L - t)+])``
    tokens when the queue became empty, on average. The phase with a full engine has
    ``(R E[L] - C E[residual]) / C`` steps.
    """
    capacity = running_requests(shape, layout, work, device)
    if not capacity:
        return TimeBreakdown(bandwidth_s=np.inf + 0.0 * np.asarray(layout.dp, dtype=np.float64))
    requests = np.ceil(work.samples / np.asarray(layout.dp, dtype=np.float64))
    running = np.maximum(np.minimum(capacity, requests), 1.0)
    lengths = np.sort(work.lengths)
    mean_length = float(lengths.mean())
    grid = _step_grid(lengths)
    midpoints, widths = (grid[1:] + grid[:-1]) / 2, np.diff(grid)
    expected_excess = np.maximum(lengths[None] - grid[:, None], 0.0).mean(1)
    # Means of P(L > t) and of P(residual > t) over each interval.
    survival = -np.diff(expected_excess) / widths
    residual = (expected_excess[1:] + expected_excess[:-1]) / 2 / mean_length
    mean_residual = float((residual * widths).sum())
    is_full = capacity < requests
    full_tokens = np.maximum(requests * mean_length - running * mean_residual, 0.0)
    full_steps = np.where(is_full, full_tokens / running, 0.0)
    decode = decode_step(shape, layout.tp, running, mean_context(work), device)
    # When the queue is empty, n requests run. Later, each of them still runs with probability q, at
    # least one with probability 1 - (1 - q)^n; if any does, n q / (1 - (1 - q)^n) run on average.
    probability = np.where(is_full[..., None], residual, survival)
    any_running = 1 - (1 - probability) ** running[..., None]
    mean_running = running[..., None] * probability / np.maximum(any_running, 1e-300)
    num_running = np.where(any_running > 0, mean_running, 1.0)
    excess = np.maximum(lengths[None] - midpoints[:, None], 0.0)
    past_tokens = (excess**2).mean(1) / (2 * np.maximum(excess.mean(1), 1e-300))
    context = work.prompt_tokens + midpoints + np.where(is_full[..., None], past_tokens, 0.0)
    tail = decode_step(shape, layout.tp, num_running, context, device).map_parts(
        lambda part: (widths * any_running * part).sum(-1)
    )
    prefill = _prefill(shape, layout, work, np.ceil(requests / work.group_size), device)
    return prefill + decode.map_parts(lambda part: full_steps * part) + tail


def _step_grid(lengths: Array) -> Array:
    """Return steps ``[points]`` from 0 to the longest length, denser where many responses end."""
    quantiles = np.quantile(lengths, np.linspace(0, 1, LENGTH_POINTS // 2))
    grid = np.linspace(0, lengths[-1], LENGTH_POINTS // 2)
    return np.unique(np.concatenate([[0.0], quantiles, grid]))


def decode_step(
    shape: ModelShape, tp: int, running: Numbers, context: Numbers, device: GpuDevice
) -> TimeBreakdown:
    """Return the seconds to decode one token of ``running`` requests with ``context`` tokens each.

    All used weights and the whole KV cache are read once. Of ``E`` routed experts, ``running``
    tokens with ``k`` experts each use ``E (1 - (1 - k / E)^running)`` on average.
    """
    expert_share: Numbers = 1.0
    if shape.experts:
        expert_share = 1 - (1 - shape.active_experts / shape.experts) ** running
    shared = float(shape.shared_parameters.sum()) + shape.embedding_parameters
    routed = float(shape.expert_parameters.sum())
    weight_bytes = shape.dtype_bytes * (shared + expert_share * routed) / tp
    flops = running * shape.forward_flops(0.0) / tp
    score_flops = running * shape.layers * shape.score_flops(context) / tp
    cache_bytes = running * context * kv_bytes_per_token(shape, tp)
    # Attention depends on one matmul and precedes the next, so their times add up.
    matmul_s, weights_s = device.roofline(flops, weight_bytes)
    score_s, cache_s = device.roofline(score_flops, cache_bytes)
    return TimeBreakdown(
        matmul_s + score_s,
        weights_s + cache_s,
        _layer_communication(shape, tp, running, device),
        overhead_s=shape.layers * device.layer_overhead_s,
    )


def _prefill(
    shape: ModelShape,
    layout: CandidateLayout,
    work: GenerationWorkload,
    prompts: Numbers,
    device: GpuDevice,
) -> TimeBreakdown:
    """Return the seconds to process prompts, in chunks so large that compute is the limit."""
    tokens = prompts * work.prompt_tokens
    # Only the last token of each prompt needs logits.
    flops = tokens * (shape.forward_flops(work.prompt_tokens / 2) - shape.head_flops)
    hidden_bytes = tokens * shape.hidden * shape.dtype_bytes
    link = device.group_link(layout.tp, 1)
    all_reduce_s = all_reduce_seconds(link, layout.tp, hidden_bytes)
    compute_s = device.roofline(flops / layout.tp, 0.0)[0]
    return TimeBreakdown(compute_s, 0.0, 2 * shape.layers * all_reduce_s)


def switch_seconds(
    shape: ModelShape, layout: CandidateLayout, work: Workload, device: GpuDevice
) -> Numbers:
    """Return the seconds to load a stage's weights and optimizer states and to offload them again.

    Each GPU has its own link to the host; activations, gradients and caches are discarded.
    """
    memory = stage_memory(shape, layout, work)
    return 2 * device.host.send_seconds(memory.weights + memory.optimizer)


def sync_seconds(shape: ModelShape, source: GpuDevice, target: GpuDevice) -> float:
    """Return the seconds to send the weights from GPUs of one kind to GPUs of another, at the rate
    of the slowest link. One node sends each byte once; nodes of the target forward chunks."""
    weight_bytes = float(shape.parameters * shape.dtype_bytes)
    links = (source.inter, target.inter, target.intra)
    return float(max(link.send_seconds(weight_bytes) for link in links))
