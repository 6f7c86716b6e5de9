"""Memory and time of training, inference and generation on a kind of GPU.

Trainers divide the model over data-parallel processes only, engines also by tensor parallelism.

Sources: for ZeRO Rajbhandari et al. 2020 (arXiv 1910.02054); for activations Korthikanti et al.
2022 (arXiv 2205.05198, section 4); for memory-bound decoding Pope et al. 2022 (arXiv 2211.05102);
for tensor parallelism Shoeybi et al. 2019 (arXiv 1909.08053); for the paged KV cache Kwon et al.
2023 (arXiv 2309.06180).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.planning.cost.data_sheet import GpuDevice
from pipeline.planning.cost.model_shape import FLOAT32, ModelShape, Recompute

Array = np.ndarray
PREFILL_TOKENS = 8192
"""Maximum tokens of an engine's prefill chunk (close to vLLM's default)."""
LENGTH_POINTS = 48
"""Number of decoding steps at which the distribution of response lengths is evaluated."""


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
