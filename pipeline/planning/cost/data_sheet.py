"""A profile from data sheets and the model's shape, for plans before any measurement.

Data sheets give upper limits. Programs reach only a share of each limit, which is assumed from
published runs. Trainers divide the model over data-parallel processes only, engines also by tensor
parallelism. The profile has the same form as a measured profile, but is marked as ``estimated``, so
that the planner gives it wide intervals.

Sources: for collectives Thakur, Rabenseifner and Gropp 2005, "Optimization of collective
communication operations in MPICH", and nccl-tests (PERFORMANCE.md); for ZeRO Rajbhandari et al.
2020 (arXiv 1910.02054); for activations Korthikanti et al. 2022 (arXiv 2205.05198, section 4); for
memory-bound decoding Pope et al. 2022 (arXiv 2211.05102); for tensor parallelism Shoeybi et al.
2019 (arXiv 1909.08053); for the paged KV cache Kwon et al. 2023 (arXiv 2309.06180). A group of one
process takes no time.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from types import MappingProxyType
from typing import Any

import numpy as np

from pipeline.plan import Plan
from pipeline.planning.cost.model_shape import FLOAT32, ModelShape, Recompute, from_hf_config
from pipeline.planning.profile.device_kinds import list_kinds, node_group_of_kind
from pipeline.planning.profile.schema import (
    SCHEMA,
    KindProfile,
    Measurement,
    Overhead,
    Profile,
    ProfileIdentity,
    ProfilePoint,
)
from rlinf.config import RunConfig
from rlinf.errors import DataError, PlanError, did_you_mean
from rlinf.registry import LANGUAGE_MODEL
from rlinf.trainers.optimizer import OFFLOAD_CHUNK_BYTES
from rlinf.verified_io import read_text
from slurm.gpus import GPUS
from slurm.inventory import Inventory, NodeGroup
from slurm.site import SiteConfig
from stages.factory import create_algorithm, engine_max_batch, environment_class, policy_class
from stages.flow import flow_of

Array = np.ndarray
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
FLOAT32_SHARE = 1 / 16
"""Peak float32 rate without TF32 as a share of the bfloat16 rate: 19.5 of 312 TFLOP/s on the A100,
67 of 989 on the H100 (NVIDIA data sheets)."""
PREFILL_TOKENS = 8192
"""Maximum tokens of an engine's prefill chunk (close to vLLM's default)."""
TENSOR_PARALLEL_SIZES, MAX_HINT_GPUS = (2, 4, 8), 1024
"""Degrees of tensor parallelism, and the maximum number of GPUs, that errors suggest."""
LENGTH_POINTS = 48
"""Number of decoding steps at which the distribution of response lengths is evaluated."""
READ_BYTES_PER_S = 1e9
"""Read and write rate of a shared filesystem (assumed)."""
START_S, IMPORTS_S, LOAD_S, REWARD_S = 5.0, 15.0, 5.0, 1e-3
"""Seconds to start a job, to import packages, to create an engine or trainer (besides reading its
weights), and to compute the reward of a sample (all assumed)."""


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


@dataclass(frozen=True)
class StateBytes:
    """Bytes per parameter in training: by default all in float32, as in the built-in trainers."""

    weights: float = 4
    gradients: float = 4
    optimizer: float = 8
    """Adam's two moments."""


TRAINER_STATE = StateBytes()


@dataclass(frozen=True)
class TrainingWorkload:
    """Training of one iteration on data-parallel processes: optimizer steps over sequences."""

    samples: int
    """Sequences per optimizer step."""
    tokens: int
    """Mean length of a sequence, in tokens."""
    longest: int = 0
    """Longest sequence, which determines the memory; 0: the mean."""
    micro_batch: int = 1
    """Sequences per process and forward pass."""
    steps: int = 1
    """Optimizer steps per iteration."""
    recompute: Recompute = "selective"
    """Activation recomputation; see :data:`pipeline.planning.cost.model_shape.RECOMPUTE`."""
    zero: int = 3
    """ZeRO stage: processes shard nothing (0), optimizer states (1), also gradients (2), also
    weights (3, FSDP)."""
    state: StateBytes = TRAINER_STATE
    gathered_bytes: float | None = None
    """Bytes per parameter of weights that are gathered for a pass: of the type in which the trainer
    computes (``param_dtype``). None: as many as those of the sharded weights."""
    copies: int = 1
    """Number of complete copies of the states (hybrid sharding); the processes are divided equally,
    and each part shards one copy."""
    optimizer_limit_bytes: float | None = None
    """Maximum bytes of optimizer states on a device at a time; the others are in host memory. None:
    nothing is offloaded."""

    def shards(self, processes: int) -> int:
        """Return the number of processes over which each copy of the states is sharded."""
        return max(1, processes // self.copies)

    def memory_bytes(self, shape: ModelShape, processes: int) -> float:
        """Return the bytes per GPU."""
        return sum(self.memory_parts(shape, processes).values())

    def memory_parts(self, shape: ModelShape, processes: int) -> dict[str, float]:
        """Return the bytes per GPU by purpose.

        Of offloaded optimizer states, those of the embedding stay on the GPU unless the limit is 0.
        """
        shards, state = self.shards(processes), self.state
        gradients = state.gradients * shape.parameters / (shards if self.zero >= 2 else 1)
        optimizer = state.optimizer * shape.parameters / (shards if self.zero >= 1 else 1)
        if (limit := self.optimizer_limit_bytes) is not None:
            min_on_device = state.optimizer * shape.embedding_parameters / shards * (limit > 0)
            optimizer = min(optimizer, max(limit, min_on_device))
        # The gradient of the logits has the size of the logits.
        bytes_per_token = float(shape.head_activation_bytes + FLOAT32 * shape.vocab)
        layer_bytes = shape.activation_bytes()
        if self.recompute == "full":
            # All activations of the layer that is being recomputed are in memory.
            input_bytes = float(shape.activation_bytes("full").max())
            bytes_per_token += float(layer_bytes.max()) + shape.layers * input_bytes
        else:
            bytes_per_token += float(layer_bytes.sum())
        tokens = self.micro_batch * max(self.longest, self.tokens)
        return {
            "weights": self.weight_bytes(shape, processes),
            "gradients": gradients,
            "optimizer": optimizer,
            "activations": bytes_per_token * tokens,
        }

    def weight_bytes(self, shape: ModelShape, processes: int) -> float:
        """Return the bytes of the weights per GPU. With ZeRO 3, two layers are unsharded: the
        current one, and the prefetched next one."""
        shards = self.shards(processes) if self.zero == 3 else 1
        sharded = self.state.weights * shape.parameters / shards
        if shards == 1:
            return sharded
        largest_layer = float((shape.shared_parameters + shape.expert_parameters).max())
        return sharded + 2 * self._gathered_bytes * largest_layer

    def gather_s(self, shape: ModelShape, processes: int, device: GpuDevice) -> float:
        """Return the seconds to gather all sharded weights once; 0 unless they are sharded."""
        if self.zero < 3:
            return 0.0
        shards = self.shards(processes)
        size = self._gathered_bytes * shape.parameters
        return float(device.group_link(shards).all_gather_s(shards, size))

    @property
    def _gathered_bytes(self) -> float:
        return self.state.weights if self.gathered_bytes is None else self.gathered_bytes

    def seconds(self, shape: ModelShape, processes: int, device: GpuDevice) -> float:
        """Return the seconds of one iteration: passes, gradients, and optimizer. A backward pass
        computes as much as two forward passes."""
        micro_batches = -(-self.samples // (processes * self.micro_batch))
        passes = 4 if self.recompute == "full" else 3
        scores = 0 if self.recompute == "full" else 1
        tokens = self.micro_batch * self.tokens
        pass_s = _passes_s(shape, tokens, self.tokens, device, passes, scores)
        shards, state = self.shards(processes), self.state
        gradient_bytes = state.gradients * shape.parameters
        if self.zero < 3:
            # ZeRO 1 and 2 need a reduce-scatter and an all-gather, as long as an all-reduce.
            sync_s = device.group_link(processes).all_reduce_s(processes, gradient_bytes)
        else:
            # Each micro-batch gathers weights twice, and reduce-scatters gradients. With hybrid
            # sharding it also all-reduces shards of gradients over the copies of the states.
            sync_s = 2 * self.gather_s(shape, processes, device)
            sync_s += device.group_link(shards).all_gather_s(shards, gradient_bytes)
            link = device.group_link(self.copies, shards)
            sync_s += link.all_reduce_s(self.copies, gradient_bytes / shards)
            sync_s *= micro_batches
        parameters = shape.parameters / (shards if self.zero else 1)
        # The optimizer reads and writes all states.
        bytes_per_parameter = state.gradients + 2 * state.optimizer + state.weights
        optimizer_s = device.roofline_s(0.0, bytes_per_parameter * parameters)
        if self.optimizer_limit_bytes is not None:
            optimizer_s += 2 * state.optimizer * parameters / device.host_bytes_per_s
        return float(self.steps * (micro_batches * pass_s + sync_s + optimizer_s))


@dataclass(frozen=True)
class InferenceWorkload:
    """A forward pass over all ``samples`` sequences of an iteration: log-probs, values or rewards.
    The other fields are as in :class:`TrainingWorkload`."""

    samples: int
    tokens: int
    longest: int = 0
    micro_batch: int = 1
    sharding: TrainingWorkload | None = None
    """The training whose sharded weights are used; None: each process has all weights."""

    def memory_bytes(self, shape: ModelShape, processes: int) -> float:
        """Return the bytes per GPU."""
        return sum(self.memory_parts(shape, processes).values())

    def memory_parts(self, shape: ModelShape, processes: int) -> dict[str, float]:
        """Return the bytes per GPU by purpose; activations are those of one layer, or the
        logits."""
        bytes_per_token = max(float(shape.activation_bytes().max()), shape.head_activation_bytes)
        tokens = self.micro_batch * max(self.longest, self.tokens)
        weights = float(shape.dtype_bytes * shape.parameters)
        if self.sharding is not None:
            weights = self.sharding.weight_bytes(shape, processes)
        return {"weights": weights, "activations": bytes_per_token * tokens}

    def seconds(self, shape: ModelShape, processes: int, device: GpuDevice) -> float:
        """Return the seconds of one iteration."""
        micro_batches = -(-self.samples // (processes * self.micro_batch))
        tokens = self.micro_batch * self.tokens
        seconds = _passes_s(shape, tokens, self.tokens, device, 1, 0)
        if self.sharding is not None:
            seconds += self.sharding.gather_s(shape, processes, device)
        return micro_batches * seconds


def _passes_s(
    shape: ModelShape,
    batch_tokens: int,
    sequence_tokens: int,
    device: GpuDevice,
    passes: int,
    scores: int,
) -> float:
    """Return the seconds of some forward passes over one micro-batch, and of ``scores`` additional
    computations of only the attention scores."""
    score_flops = shape.layers * shape.score_flops(sequence_tokens / 2)
    flops = passes * (float(shape.layer_flops.sum()) + score_flops)
    # The head is never recomputed.
    flops = flops + scores * score_flops + min(passes, 3) * shape.head_flops
    compute_s = device.roofline_s(
        flops * batch_tokens, passes * shape.dtype_bytes * shape.parameters
    )
    # Norms, activation functions and residuals write and read the stored activations.
    activation_bytes = float(shape.activation_bytes().sum()) * batch_tokens
    activations_s = device.roofline_s(0.0, 2 * passes * activation_bytes)
    return float(compute_s + activations_s + passes * shape.layers * device.layer_overhead_s)


@dataclass(frozen=True)
class GenerationWorkload:
    """Generation of responses with continuous batching."""

    lengths: Array
    """Examples of response lengths, tokens, float64 ``[n]``."""
    samples: int
    """Responses per iteration."""
    prompt_tokens: int
    """Mean length of a prompt."""
    group_size: int = 1
    """Responses per prompt, which share the prompt's KV cache."""
    max_running: int = 256
    """Maximum number of concurrent requests of an engine."""
    tensor_parallel: int = 1
    """Processes that share each matrix and each key-value head, and so form one engine."""

    def memory_bytes(self, shape: ModelShape, processes: int) -> float:
        """Return the minimum bytes per GPU."""
        return sum(self.memory_parts(shape, processes).values())

    def memory_parts(self, shape: ModelShape, processes: int) -> dict[str, float]:
        """Return the minimum bytes per GPU by purpose: the KV cache is that of only one request, of
        maximum length. The remaining memory determines the number of running requests."""
        longest = self.prompt_tokens + float(self.lengths.max())
        return {**self._fixed_parts(shape), "KV cache": longest * self._kv_bytes(shape)}

    def cache_bytes(self, shape: ModelShape, device: GpuDevice) -> float:
        """Return the bytes of the KV cache per GPU, of all requests that run concurrently."""
        return self.running_requests(shape, device) * self.mean_context * self._kv_bytes(shape)

    def _fixed_parts(self, shape: ModelShape) -> dict[str, float]:
        activation_bytes = float(shape.activation_bytes().max()) * PREFILL_TOKENS
        logits_bytes = FLOAT32 * shape.vocab * self.max_running
        return {
            "weights": shape.dtype_bytes * shape.parameters / self.tensor_parallel,
            "activations": activation_bytes + logits_bytes,
        }

    def _kv_bytes(self, shape: ModelShape) -> float:
        """Return the KV cache bytes of a token on each GPU."""
        return kv_bytes_per_token(shape) / min(self.tensor_parallel, shape.kv_heads)

    @property
    def mean_context(self) -> float:
        """The mean number of tokens of a running request: its prompt and its response so far.

        A response of length L runs for L steps and is half complete on average, so the mean length
        so far is ``E[L^2] / (2 E[L])`` (the mean age in renewal theory).
        """
        return self.prompt_tokens + float((self.lengths**2).mean() / (2 * self.lengths.mean()))

    def running_requests(self, shape: ModelShape, device: GpuDevice) -> int:
        """Return the number of requests of mean length that an engine runs concurrently; 0 if a
        request of maximum length does not fit."""
        if self.memory_bytes(shape, 1) > device.usable_bytes:
            return 0
        free_bytes = device.usable_bytes - sum(self._fixed_parts(shape).values())
        bytes_per_request = self.mean_context * self._kv_bytes(shape)
        return int(np.clip(free_bytes // bytes_per_request, 1, self.max_running))

    def seconds(self, shape: ModelShape, processes: int, device: GpuDevice) -> float:
        """Return the time of prefill and of decoding with continuous batching; infinite if no
        request fits.

        An engine generates ``R`` responses of random length ``L``, at most ``C`` at the same time.
        If ``R <= C``, all start together, and ``R P(L > t)`` are running after ``t`` steps.
        Otherwise the engine is full until the queue is empty. Then the remaining length of a
        running request is distributed as ``P(residual > t) = E[(L - t)+] / E[L]`` (the residual
        life of renewal theory). Requests that still run ``t`` steps after that had generated
        ``E[(L - t)+^2] / (2 E[(L - t)+])`` tokens when the queue became empty, on average. The
        phase with a full engine has ``(R E[L] - C E[residual]) / C`` steps.
        """
        capacity, tensor_parallel = self.running_requests(shape, device), self.tensor_parallel
        if not capacity or processes < tensor_parallel:
            return math.inf
        requests = math.ceil(self.samples / (processes // tensor_parallel))
        running, is_full = min(capacity, requests), capacity < requests
        lengths = np.sort(self.lengths)
        mean_length = float(lengths.mean())
        # Steps from 0 to the longest length, denser where many responses end.
        quantiles = np.quantile(lengths, np.linspace(0, 1, LENGTH_POINTS // 2))
        even = np.linspace(0, lengths[-1], LENGTH_POINTS // 2)
        grid = np.unique(np.concatenate([[0.0], quantiles, even]))
        midpoints, widths = (grid[1:] + grid[:-1]) / 2, np.diff(grid)
        expected_excess = np.maximum(lengths[None] - grid[:, None], 0.0).mean(1)
        # Means of P(L > t) or of P(residual > t) over each interval.
        probability = -np.diff(expected_excess) / widths
        context, full_s = self.prompt_tokens + midpoints, 0.0
        if is_full:
            probability = (expected_excess[1:] + expected_excess[:-1]) / 2 / mean_length
            full_steps = requests * mean_length / running - float((probability * widths).sum())
            step_s = decode_step_s(shape, running, self.mean_context, device, tensor_parallel)
            full_s = max(0.0, full_steps) * float(step_s)
            excess = np.maximum(lengths[None] - midpoints[:, None], 0.0)
            context += (excess**2).mean(1) / (2 * np.maximum(excess.mean(1), 1e-300))
        # When the queue is empty, n requests run. Later, each of them still runs with probability
        # q, at least one with probability 1 - (1 - q)^n; if any does, n q / (1 - (1 - q)^n) run on
        # average.
        any_running = 1 - (1 - probability) ** running
        mean_running = running * probability / np.maximum(any_running, 1e-300)
        num_running = np.where(any_running > 0, mean_running, 1.0)
        step_s = decode_step_s(shape, num_running, context, device, tensor_parallel)
        tail_s = widths * any_running * step_s
        # Prompts are processed in chunks so large that compute is the limit; only the last token of
        # each prompt needs logits.
        prompt_tokens = math.ceil(requests / self.group_size) * self.prompt_tokens
        flops = shape.forward_flops(self.prompt_tokens / 2) - shape.head_flops
        prefill_s = device.roofline_s(prompt_tokens * flops / tensor_parallel, 0.0)
        prefill_s += _tensor_parallel_s(shape, prompt_tokens, device, tensor_parallel)
        return float(prefill_s + full_s + tail_s.sum())


Workload = TrainingWorkload | InferenceWorkload | GenerationWorkload


def kv_bytes_per_token(shape: ModelShape) -> float:
    """Return the KV cache bytes of a token."""
    return 2.0 * shape.layers * shape.kv_heads * shape.head_dim * shape.dtype_bytes


def _tensor_parallel_s(shape: ModelShape, tokens: Any, device: GpuDevice, processes: int) -> Any:
    """Return the seconds of tensor parallelism in a forward pass over ``tokens`` tokens: after
    attention and after the feed-forward layer, hidden states are summed over the processes."""
    link = device.group_link(processes)
    return (
        2 * shape.layers * link.all_reduce_s(processes, tokens * shape.hidden * shape.dtype_bytes)
    )


def decode_step_s(
    shape: ModelShape, running: Any, context: Any, device: GpuDevice, tensor_parallel: int = 1
) -> Any:
    """Return the seconds to decode one token of ``running`` requests with ``context`` tokens each
    (numbers or arrays), on ``tensor_parallel`` processes that share each matrix.

    All used weights and the whole KV cache are read once. Of ``E`` routed experts, ``running``
    tokens with ``k`` experts each use ``E (1 - (1 - k / E)^running)`` on average.
    """
    expert_share: Any = 1.0
    if shape.experts:
        expert_share = 1 - (1 - shape.active_experts / shape.experts) ** running
    shared = float(shape.shared_parameters.sum()) + shape.embedding_parameters
    routed = float(shape.expert_parameters.sum())
    weight_bytes = shape.dtype_bytes * (shared + expert_share * routed)
    cache_bytes = running * context * kv_bytes_per_token(shape)
    score_flops = running * shape.layers * shape.score_flops(context)
    # Attention depends on one matmul and precedes the next, so their times add up.
    matmul_flops = running * shape.forward_flops(0.0)
    matmul_s = device.roofline_s(matmul_flops / tensor_parallel, weight_bytes / tensor_parallel)
    head_groups = min(tensor_parallel, shape.kv_heads)
    attention_s = device.roofline_s(score_flops / tensor_parallel, cache_bytes / head_groups)
    sums_s = _tensor_parallel_s(shape, running, device, tensor_parallel)
    return matmul_s + attention_s + sums_s + shape.layers * device.layer_overhead_s


def estimate_profile(
    config: RunConfig, inventory: Inventory, site: SiteConfig, plan: Plan | None = None
) -> Profile:
    """Return a profile of all kinds of GPUs with known data sheets.

    Args:
        plan: the plan whose tensor-parallel layout the engine has; None: it has none.

    Raises:
        PlanError: no kind has a known data sheet, or the formulas do not support the model.
        DataError: the config.json of the model cannot be used.
    """
    run = _RunWork.of(config, plan)
    kinds: dict[str, KindProfile] = {}
    reason = "there are no GPUs"
    for name, kind in list_kinds(inventory, site).items():
        group = node_group_of_kind(kind, inventory)
        if group is None or not group.gpus_per_node:
            continue
        try:
            device = device_from_node_group(name, group)
        except PlanError as error:
            reason = str(error)
            continue
        device = replace(device, slowdown=device.slowdown / kind.duty_cycle)
        kinds[name] = KindProfile(
            partition=kind.partition,
            gpu_type=kind.gpu_type,
            devices_per_node=kind.devices_per_node,
            duty_cycle=kind.duty_cycle,
            memory="device",
            points=tuple(_points(run, device, kind.nodes, kind.devices_per_node)),
            overheads=tuple(_overheads(run, device)),
        )
    if not kinds:
        raise PlanError(
            f"nothing is measured, and data sheets do not help: {reason}; measure with: "
            "rlinf profile"
        )
    return Profile(
        schema_version=SCHEMA,
        created_at=datetime.now(UTC),
        estimated=True,
        identity=ProfileIdentity.of(config),
        samples=run.generation.samples,
        weights_bytes=int(run.weights_bytes),
        lengths=tuple(int(n) for n in run.generation.lengths),
        kinds=kinds,
    )


def stage_memory_parts(
    config: RunConfig, stage: str, device: GpuDevice, processes: int, plan: Plan | None = None
) -> dict[str, float]:
    """Return the bytes per GPU of a stage by purpose: weights, activations, ...; the KV cache of an
    engine is that of all requests that run concurrently.

    Raises:
        PlanError, DataError: as :func:`estimate_profile`.
    """
    run = _RunWork.of(config, plan)
    work, shape = run.workload(stage, run.generation.samples)
    parts = work.memory_parts(shape, processes)
    if isinstance(work, GenerationWorkload):
        parts["KV cache"] = work.cache_bytes(shape, device)
    return parts


@dataclass(frozen=True)
class _RunWork:
    """The numbers of a run that determine its stages' times."""

    shape: ModelShape
    trainer_shape: ModelShape
    """The trainer's networks, including a separate critic."""
    generation: GenerationWorkload
    """Generation of the whole batch; lengths are uniform up to the horizon (assumed)."""
    training: TrainingWorkload
    """Training on the whole batch."""
    weights_bytes: float
    trainer_weights_bytes: float
    """Bytes of the weights in files, without and with a separate critic."""
    components: Mapping[str, str | None]
    """The component that each stage keeps in memory: ``engine``, ``trainer`` or None."""
    train_stage: str
    publish_stage: str

    @classmethod
    def of(cls, config: RunConfig, plan: Plan | None = None) -> _RunWork:
        policy, options = policy_class(config)
        if LANGUAGE_MODEL not in policy.provides:
            raise PlanError(
                f"nothing is measured, and data sheets give times only of language models, not of "
                f"model {config.model.name!r}; measure with: rlinf profile"
            )
        environment, settings = environment_class(config)
        spec = environment.model_spec(settings)
        task_size = environment.task_size(settings, policy.check_spec(options, spec))
        algorithm, rollout = create_algorithm(config), config.rollout
        engine, trainer = config.engine.model_extra or {}, config.trainer.model_extra or {}
        flow, trainer_name = flow_of(config), config.trainer.name
        components = {name: stage.holds for name, stage in flow.stages.items()}
        trainer_stages = [name for name, component in components.items() if component == "trainer"]
        shape = _model_shape(options, spec)
        dtype_sizes = {"float32": 4, "bfloat16": 2, "float16": 2}
        engine_bytes = dtype_sizes.get(str(engine.get("dtype")), shape.dtype_bytes)
        default = "bfloat16" if options.path is not None else "float32"  # on GPUs
        trainer_bytes = dtype_sizes.get(str(trainer.get("param_dtype") or default), 4)
        trainer_shape = with_critic(shape) if getattr(options, "critic", None) == "own" else shape
        samples = rollout.batch_size * rollout.group_size
        lengths = np.unique(np.linspace(1, rollout.horizon, 32).astype(np.int64)).astype(np.float64)
        prompt_tokens = max(1, task_size.max_prompt_tokens)
        budget, longest = trainer.get("max_tokens_per_microbatch"), prompt_tokens + rollout.horizon
        return cls(
            shape=replace(shape, dtype_bytes=engine_bytes),
            trainer_shape=replace(trainer_shape, dtype_bytes=trainer_bytes),
            generation=GenerationWorkload(
                lengths,
                samples,
                prompt_tokens,
                rollout.group_size,
                engine_max_batch(config) or samples,
                _tensor_parallel(plan),
            ),
            training=TrainingWorkload(
                samples,
                prompt_tokens + round(float(lengths.mean())),
                longest,
                max(1, (budget or 8192) // longest),
                steps=algorithm.minibatches * int(getattr(algorithm.config, "epochs", 1)),
                recompute="full" if trainer.get("gradient_checkpointing") else "selective",
                zero=_zero_stage(trainer_name, trainer),
                state=_state_bytes(shape, trainer.get("lora")),
                gathered_bytes=trainer_bytes,
                copies=int(trainer.get("dp_replicate", 1)) if trainer_name == "fsdp" else 1,
                optimizer_limit_bytes=_optimizer_limit_bytes(trainer_name, trainer),
            ),
            weights_bytes=shape.parameters * shape.dtype_bytes,
            trainer_weights_bytes=trainer_shape.parameters * shape.dtype_bytes,
            components=components,
            train_stage=[name for name in trainer_stages if name != flow.publish_stage][-1],
            publish_stage=flow.publish_stage,
        )

    def workload(self, stage: str, samples: int) -> tuple[Workload, ModelShape]:
        """Return a stage's workload for ``samples`` samples, and the shape of its model."""
        training = self.training
        if self.components[stage] == "engine":
            return replace(self.generation, samples=samples), self.shape
        if stage == self.train_stage:
            work = replace(training, samples=max(1, samples // training.steps))
            return work, self.trainer_shape
        size = training.tokens, training.longest, training.micro_batch
        sharding = training if training.zero == 3 else None
        return InferenceWorkload(samples, *size, sharding), self.trainer_shape


def _tensor_parallel(plan: Plan | None) -> int:
    """Return the number of processes that share each matrix of the engine in a plan."""
    if plan is None or plan.flow.rollout_stage is None:
        return 1
    return plan.stage_plan(plan.flow.rollout_stage).layout.tp


def _zero_stage(trainer: str, settings: Mapping[str, Any]) -> int:
    if trainer == "deepspeed":
        return int(settings.get("zero_stage", 2))
    if trainer == "megatron":
        return int(bool(settings.get("use_distributed_optimizer")))
    return 3


def _optimizer_limit_bytes(trainer: str, settings: Mapping[str, Any]) -> float | None:
    """Return the maximum optimizer bytes on the device; None: no limit. With DeepSpeed the host
    runs the optimizer step, so the limit is 0."""
    if not settings.get("offload_optimizer"):
        return None
    states_per_weight = TRAINER_STATE.optimizer / TRAINER_STATE.weights
    return OFFLOAD_CHUNK_BYTES * states_per_weight if trainer == "fsdp" else 0.0


def with_critic(shape: ModelShape) -> ModelShape:
    """Return the shape of a policy with a separate critic, which has twice the layers."""
    critic_dense_layers = tuple(number + shape.layers for number in shape.dense_layers)
    return replace(
        shape,
        layers=2 * shape.layers,
        dense_layers=(*shape.dense_layers, *critic_dense_layers),
        embeddings=2,
    )


def _state_bytes(shape: ModelShape, lora: Mapping[str, Any] | None) -> StateBytes:
    """Return the bytes per parameter of a trainer. With LoRA, only adapters have gradients and
    optimizer states; all linear layers of the blocks are assumed to have adapters."""
    if not lora:
        return TRAINER_STATE
    parameters_per_rank = [shape.hidden + shape.q_width] * 2 + [shape.hidden + shape.kv_width] * 2
    matrices = 3 if shape.gated else 2
    ffn_widths = [shape.ffn, shape.shared_ffn, *[shape.expert_ffn] * shape.experts]
    parameters_per_rank += [shape.hidden + width for width in ffn_widths if width] * matrices
    share = int(lora["rank"]) * sum(parameters_per_rank) * shape.layers / shape.parameters
    return StateBytes(
        TRAINER_STATE.weights * (1 + share),
        TRAINER_STATE.gradients * share,
        TRAINER_STATE.optimizer * share,
    )


def _model_shape(options: Any, spec: Mapping[str, Any]) -> ModelShape:
    if options.path is not None:
        path = options.path.expanduser() / "config.json"
        try:
            return from_hf_config(json.loads(read_text(path)))
        except (OSError, ValueError) as error:
            raise DataError(f"{path}: {error}") from None
    return from_hf_config(
        {
            "model_type": options.architecture,
            "hidden_size": options.hidden,
            "num_hidden_layers": options.layers,
            "num_attention_heads": options.heads,
            "num_key_value_heads": options.kv_heads,
            "head_dim": options.hidden // options.heads,
            "intermediate_size": options.intermediate,
            "vocab_size": len(spec.get("alphabet", "")) + 2,
            "tie_word_embeddings": True,
            "dtype": options.dtype,
        }
    )


def _points(run: _RunWork, device: GpuDevice, nodes: int, per_node: int) -> Iterator[ProfilePoint]:
    """Yield points of each stage for the batch and for half of the batch, on 1, 2, 4, ... devices
    of a node and on whole nodes."""
    counts_in_node = [1 << n for n in range(per_node.bit_length()) if 1 << n <= per_node]
    counts = sorted({*counts_in_node, *(per_node * n for n in _node_counts(nodes))})
    samples, group_size = run.generation.samples, run.generation.group_size
    for stage, component in run.components.items():
        if component is None or stage == run.publish_stage:
            is_publish = stage == run.publish_stage
            seconds = run.weights_bytes / READ_BYTES_PER_S if is_publish else REWARD_S * samples
            time = Measurement.of([seconds])
            yield ProfilePoint(stage=stage, nodes=1, processes=1, samples=samples, time=time)
            continue
        for count in counts:
            for size in sorted({samples, max(group_size, samples // 2)}):
                if count <= size // (group_size if component == "engine" else 1):
                    yield _point(run, device, stage, -(-count // per_node), count, size)


def _node_counts(nodes: int) -> list[int]:
    """Return numbers of nodes: all up to 8, then powers of two, and the maximum ``nodes``."""
    small, powers = range(1, min(nodes, 8) + 1), (1 << n for n in range(nodes.bit_length()))
    return sorted({*small, *powers, nodes})


def _point(
    run: _RunWork, device: GpuDevice, stage: str, nodes: int, count: int, samples: int
) -> ProfilePoint:
    work, shape = run.workload(stage, samples)
    if shape.dtype_bytes == 4:
        device = replace(device, flops=device.flops * FLOAT32_SHARE)
    memory_bytes, seconds = work.memory_bytes(shape, count), work.seconds(shape, count, device)
    failure = ""
    if memory_bytes > device.usable_bytes:
        sizes = f"{memory_bytes / GIB:.1f} GiB of {device.usable_bytes / GIB:.1f} usable"
        parts = [f"{n} {b / GIB:.1f}" for n, b in work.memory_parts(shape, count).items()]
        hint = _fitting_hint(work, shape, device)
        failure = f"does not fit: it needs {sizes} ({device.name}): {', '.join(parts)}; {hint}"
    elif not math.isfinite(seconds):
        failure = f"plan.stages.{stage}.layout: tp is larger than the {count} processes"
    if isinstance(work, GenerationWorkload) and count % work.tensor_parallel:
        tensor_parallel = work.tensor_parallel
        failure = f"plan.stages.{stage}.layout: tp={tensor_parallel} does not divide {count} GPUs"
    if stage == run.train_stage and count > 1 and count % run.training.copies:
        copies = run.training.copies
        failure = f"trainer.dp_replicate: {copies} does not divide {count} processes"
    return ProfilePoint(
        stage=stage,
        nodes=nodes,
        processes=count,
        samples=samples,
        time=None if failure else Measurement.of([seconds]),
        peak_memory_bytes=None if failure else int(memory_bytes),
        failure=failure,
    )


def _fitting_hint(work: Workload, shape: ModelShape, device: GpuDevice) -> str:
    """Return what to change so that a stage fits the memory of a kind of GPU."""

    def fits(work: Workload, processes: int) -> bool:
        return work.memory_bytes(shape, processes) <= device.usable_bytes

    if isinstance(work, GenerationWorkload):
        sizes = [n for n in TENSOR_PARALLEL_SIZES if not shape.heads % n]
        size = next((n for n in sizes if fits(replace(work, tensor_parallel=n), n)), None)
        if size is None:
            return "lower rollout.horizon, or choose GPUs with more memory"
        return f"it fits with tensor parallelism: plan.stages.rollout.layout={{tp: {size}}}"
    count = next((n for n in range(1, MAX_HINT_GPUS + 1) if fits(work, n)), None)
    if count is not None:
        return f"it fits on {count} such GPUs"
    return "lower trainer.max_tokens_per_microbatch, or set trainer.gradient_checkpointing=true"


def _overheads(run: _RunWork, device: GpuDevice) -> Iterator[Overhead]:
    read_s = run.weights_bytes / READ_BYTES_PER_S
    trainer_read_s = run.trainer_weights_bytes / READ_BYTES_PER_S
    state, is_offloaded = run.training.state, run.training.optimizer_limit_bytes is not None
    bytes_per_parameter = state.weights + (0.0 if is_offloaded else state.optimizer)
    offload_s = run.trainer_shape.parameters * bytes_per_parameter / device.host_bytes_per_s
    for name, seconds in (
        ("startup", START_S),
        ("imports", IMPORTS_S),
        ("engine_load", LOAD_S + read_s),
        ("trainer_load", LOAD_S + trainer_read_s),
        ("weight_load", read_s),
        ("publish", trainer_read_s),
        ("offload", offload_s),
        ("onload", offload_s),
    ):
        yield Overhead.of([seconds], name=name, nodes=1, processes=1)
