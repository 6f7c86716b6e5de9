"""The common part of trainers, independent of how they shard weights.

A minibatch is a list of trajectories that every rank knows. Each rank computes a part of it, in
proportion to its speed, in micro-batches of limited size. The weight of each step in the loss is
fixed for the whole minibatch in advance, so the summed gradient does not depend on the split.
"""

from __future__ import annotations

import copy
import functools
import itertools
import math
from abc import abstractmethod
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from pydantic import Field
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from rlinf import mkl_warmup
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import OptimizerSection, Section
from rlinf.data.load_balancing import StepSpan, balance_costs, even_microbatches, pack_microbatches
from rlinf.data.trajectory import Trajectory
from rlinf.device_memory import OffloadableTensors, synchronize, use_device
from rlinf.errors import ConfigError, StageError
from rlinf.models.base import Batch, DeviceName, Policy, StepOutputs, concat_outputs, local_device
from rlinf.progress import PROGRESS
from rlinf.registry import RunComponents
from rlinf.safetensors_io import StreamedState
from rlinf.sharded_tensors import local_shard, storage_key
from rlinf.trainers import sharded_checkpoint
from rlinf.trainers.base import LossFunction, Trainer, is_max_metric, merge_metrics
from rlinf.trainers.lora import LoRAAdapters, LoRAConfig, check_lora_targets
from rlinf.trainers.optimizer import (
    HOST_DEVICE,
    MOMENT_NAMES,
    LossScaler,
    freeze_other_groups,
    set_learning_rates,
    start_move,
)


def enable_gradient_checkpointing(policy: Policy) -> None:
    """Keep only the inputs of a policy's blocks, and recompute the rest in the backward pass.

    Raises:
        ConfigError: the policy names no blocks.
    """
    blocks = policy.blocks()
    if not blocks:
        raise ConfigError(
            f"trainer.gradient_checkpointing: {type(policy).__name__} names no blocks whose "
            "activations could be recomputed; set it to false"
        )
    for block in blocks:
        # Inside the block's call, so that FSDP's hooks run only once.
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)


class MinibatchTrainerConfig(Section):
    """Settings of a training step's memory, speed and rounding, and of adapters (``lora``)."""

    max_tokens_per_microbatch: int = Field(default=8192, gt=0)
    """Maximum number of padded positions of one micro-batch."""
    packing: bool | None = None
    """Pack the rows of a micro-batch into one sequence without padding, with a shared prompt only
    once; rows do not attend to each other. null: if the policy supports it."""
    cpu_threads: int = Field(default=1, gt=0)
    """Threads of a process on CPUs. In a single process each thread computes its own micro-batches;
    the processes of a sharded model split every matrix product. The number affects the order of
    sums and therefore the result's last digits."""
    python: str | None = None
    """Interpreter of the stages that compute with this trainer; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "auto"
    param_dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Data type of parameters in forward and backward passes. The optimizer's weights keep their
    own type. null: ``bfloat16`` for a language model from a checkpoint (``model.path``) on a GPU,
    else ``float32``."""
    initial_loss_scale: float = Field(default=65536.0, ge=1)
    """Initial loss scale of float16, a power of two; see :mod:`rlinf.trainers.optimizer`."""
    loss_scale_window: int = Field(default=2000, gt=0)
    """Number of steps without overflow after which the loss scale is doubled."""
    gradient_checkpointing: bool = False
    """Keep only the inputs of the network's blocks for the backward pass and recompute the rest.
    This needs less memory and a third more computation."""
    lora: LoRAConfig | None = None
    """Train only low-rank adapters."""

    @property
    def compute_dtype(self) -> str:
        """``param_dtype``, or ``float32`` if it is not set. Stages set it."""
        return self.param_dtype or "float32"


class MinibatchTrainer(OffloadableTensors, Trainer):
    """Computes losses and gradients. Subclasses implement sharding and the optimizer step."""

    config: MinibatchTrainerConfig
    optimizer: torch.optim.Optimizer
    """Optimizer that :meth:`_step` uses; its groups are those of :func:`create_optimizer`."""
    _threads: ThreadedDataParallel

    def __init__(
        self,
        policy: Policy,
        config: MinibatchTrainerConfig,
        optimizer: OptimizerSection,
        world: ProcessGroupInfo,
    ) -> None:
        self.policy, self.config, self.world = policy, config, world
        self._metric_sums: dict[str, Any] | None = None
        """Sums of the metrics of accumulated losses; None: nothing is accumulated."""
        self._reusable_memory: dict[str, Tensor] = {}
        """Memory of an earlier snapshot, which the next snapshot reuses."""
        self._replica_index, self._shard_coords = 0, (world.rank, world.size)
        """Index of this process's model replica; index of its shard, and number of shards."""
        self._placements: dict[str, sharded_checkpoint.ShardPlacement] = {}
        """Placement of each tensor of which this process has a part, except for DTensors."""
        self._closed = False
        group_clips = {
            name: clip
            for name, clip in optimizer.group_clip_grad.items()
            if name in policy.parameter_groups
        }
        other_groups = [name for name in policy.parameter_groups if name not in group_clips]
        self._clip_groups = [([name], clip) for name, clip in group_clips.items()]
        """Parameter groups whose gradients are clipped together, and their maximum norm."""
        if other_groups:
            self._clip_groups.insert(0, (other_groups, optimizer.clip_grad))
        self._moment_names = MOMENT_NAMES[optimizer.name]
        self._torch_threads = config.cpu_threads
        """Number of threads of a torch operation, if the caller's thread computes micro-batches."""
        self.device = local_device(config.device)
        use_device(self.device)
        self.compute_dtype = config.compute_dtype
        self._is_packed = policy.supports_packing if config.packing is None else config.packing
        if self._is_packed:
            policy.enable_packing(self.device, getattr(torch, config.compute_dtype))
        self._loss_scaler = LossScaler()
        if config.param_dtype == "float16":
            self._loss_scaler = LossScaler(config.initial_loss_scale, config.loss_scale_window)
        self._adapters = None if config.lora is None else LoRAAdapters(policy, config.lora)

    @classmethod
    def required_packages(cls, config: MinibatchTrainerConfig) -> tuple[str, ...]:
        return () if config.lora is None else ("peft",)

    @classmethod
    def check_layout(
        cls, options: Any, run: RunComponents, layout: ParallelLayout, processes: int, key: str
    ) -> None:
        super().check_layout(options, run, layout, processes, key)
        policy, model = run.classes["model"], run.options["model"]
        if options.packing:
            policy.check_packing(model)
        if options.lora is not None:
            check_lora_targets(policy, policy.meta_from_config(model), options.lora)

    def _create_threads(self, count: int) -> None:
        """Create the threads that compute micro-batches; call it after the weights are loaded."""
        self._threads = ThreadedDataParallel(self.policy, count)
        if self.config.gradient_checkpointing:
            for policy in self._threads.policies:
                enable_gradient_checkpointing(policy)

    def split_micro_batches(
        self, trajectories: Sequence[Trajectory], row_groups: Sequence[Sequence[int]] | None = None
    ) -> list[MicroBatches]:
        """Return the micro-batches of each thread of this rank."""
        return split_micro_batches(
            self.policy,
            trajectories,
            row_groups,
            max_tokens=self.config.max_tokens_per_microbatch,
            padded=not self._is_packed,
            speeds=self.world.data_parallel_speeds,
            rank=self.world.data_parallel_rank,
            num_threads=len(self._threads),
        )

    def forward(
        self, trajectories: Sequence[Trajectory], temperature: float
    ) -> list[tuple[int, StepOutputs]]:
        torch.set_num_threads(self._torch_threads)

        @torch.no_grad()
        def evaluate(policy: Policy, batches: MicroBatches) -> list[tuple[StepSpan, StepOutputs]]:
            policy.module.eval()
            out: list[tuple[StepSpan, StepOutputs]] = []
            all_outputs = self._outputs(policy, trajectories, batches, temperature)
            entries = zip(batches.spans, batches.is_real, all_outputs, strict=True)
            for spans, is_real, outputs in entries:
                for i, span in enumerate(spans) if is_real else ():
                    length = span.stop - span.start
                    values = None if outputs.values is None else outputs.values[i, :length].cpu()
                    step_outputs = StepOutputs(outputs.logprobs[i, :length].cpu(), None, values)
                    out.append((span, step_outputs))
            return out

        outputs_of_row: dict[int, list[StepOutputs]] = defaultdict(list)
        thread_outputs = self._threads.map(evaluate, self.split_micro_batches(trajectories))
        pairs = itertools.chain.from_iterable(thread_outputs)
        for span, outputs in sorted(pairs, key=lambda pair: pair[0]):
            outputs_of_row[span.row].append(outputs)
        return [(row, concat_outputs(parts)) for row, parts in outputs_of_row.items()]

    def accumulate(
        self,
        trajectories: Sequence[Trajectory],
        loss: LossFunction,
        *,
        row_groups: Sequence[Sequence[int]] | None = None,
    ) -> None:
        torch.set_num_threads(self._torch_threads)
        self._metric_sums = self._metric_sums or {}

        def backward(policy: Policy, batches: MicroBatches) -> dict[str, Any]:
            if not policy.module.training:
                policy.module.train()
            return self._gradients(policy, trajectories, batches, loss)

        try:
            for part in self._threads.map(
                backward, self.split_micro_batches(trajectories, row_groups)
            ):
                merge_metrics(self._metric_sums, part)
            self._threads.reduce_gradients()
        except BaseException:
            self.discard_gradients()
            raise

    def update(
        self,
        *,
        lr: float | Mapping[str, float],
        scale: float = 1.0,
        groups: Collection[str] | None = None,
        check: Callable[[dict[str, float]], None] | None = None,
    ) -> dict[str, float]:
        if not self._metric_sums:
            raise ValueError("nothing was accumulated")
        try:
            self._prepare_step(set_learning_rates(self.optimizer, lr, groups))
            return self._update(self._metric_sums, scale, check)
        finally:
            self.discard_gradients()

    def _update(
        self,
        sums: dict[str, Any],
        scale: float,
        check: Callable[[dict[str, float]], None] | None,
    ) -> dict[str, float]:
        """Do the optimizer step of :meth:`update`; ``sums`` are this process's sums of metrics."""
        totals = {
            name: value if is_max_metric(name) else scale * value
            for name, value in self._reduce_metrics(sums).items()
        }
        if check is not None:
            check(totals)
        totals |= {
            name: float(scale_state[0]) for name, scale_state in self._loss_scaler.state().items()
        }
        factor = scale / self._loss_scaler.value
        norms = [factor * self._gradient_norm(groups) for groups, _ in self._clip_groups]
        norm = norms[0] if len(norms) == 1 else math.hypot(*norms)
        if self._loss_scaler.is_dynamic and math.isfinite(totals["loss"]):
            totals["skipped_steps"] = 0.0 if math.isfinite(norm) else 1.0
            if not math.isfinite(norm):
                self._loss_scaler.record_overflow()
                return totals
        if not math.isfinite(totals["loss"]) or not math.isfinite(norm):
            raise StageError(
                f"loss {totals['loss']}, gradient norm {norm}: not finite; the previous weights "
                "are untouched. Look at this iteration's trajectories; lower optimizer.lr or "
                "optimizer.clip_grad"
            )
        scales: dict[str, float] = {}
        for (groups, clip), group_norm in zip(self._clip_groups, norms, strict=True):
            group_factor = factor * clip / (group_norm + 1e-6) if group_norm > clip else factor
            scales |= dict.fromkeys(groups, group_factor)
        self._step(scales)
        self._loss_scaler.record_step()
        return {**totals, "grad_norm": norm}

    def _outputs(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        batches: MicroBatches,
        temperature: float,
    ) -> Iterable[StepOutputs]:
        """Return step outputs of each micro-batch of a thread, without gradients."""
        for spans in batches.spans:
            yield self._evaluate(policy, self._inputs(policy, trajectories, spans), temperature)

    def _gradients(
        self,
        policy: Policy,
        trajectories: Sequence[Trajectory],
        batches: MicroBatches,
        loss: LossFunction,
    ) -> dict[str, Any]:
        """Add the gradients of a thread's micro-batches, and return the sums of their metrics."""
        sums: dict[str, Any] = {}
        pairs = zip(batches.spans, batches.is_real, strict=True)
        for number, (spans, is_real) in enumerate(pairs, 1):
            weight = 1.0 if is_real else 0.0
            inputs = self._inputs(policy, trajectories, spans)
            parts = self._backward(
                functools.partial(loss, policy, inputs, spans),
                # Gradients are averaged over ranks, but the loss is a sum over them.
                weight * self.world.data_parallel_size * self._loss_scaler.value,
                last=number == len(batches.spans),
            )
            merge_metrics(sums, {name: part * weight for name, part in parts.items()})
        return sums

    def _evaluate(self, policy: Policy, inputs: Batch, temperature: float) -> StepOutputs:
        """Return step outputs of a micro-batch, without gradients."""
        return policy.evaluate(inputs, temperature)

    @abstractmethod
    def _backward(
        self, loss: Callable[[], tuple[Tensor, dict[str, Tensor]]], factor: float, *, last: bool
    ) -> dict[str, Tensor]:
        """Add the gradient of a micro-batch's loss, times ``factor``, to the accumulated gradient.

        Args:
            last: whether this is the thread's last micro-batch in a call of :meth:`accumulate`.

        Returns:
            The metrics of the micro-batch, and its ``loss``.
        """

    def _prepare_step(self, groups: Collection[str]) -> None:
        """Prepare a step that changes only these parameter groups: discard other gradients, and
        create missing moments. Subclasses also reduce gradients over processes; collective."""
        freeze_other_groups(self.optimizer, self._moment_names, groups)

    @abstractmethod
    def _gradient_norm(self, groups: Collection[str]) -> float:
        """Return the norm, over all ranks, of the gradient of ``groups`` that the step uses."""

    @abstractmethod
    def _step(self, scales: Mapping[str, float]) -> None:
        """Step the optimizer on the accumulated gradient, times the factor of each group."""

    def load_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self._load_tensors(tensors)
        self._reset_adapters()

    def load_policy_folder(self, folder: Path) -> None:
        super().load_policy_folder(folder)
        self._reset_adapters()

    def _reset_adapters(self) -> None:
        """Reset the adapters, if any, so that the network's output is unchanged."""
        if self._adapters is not None:
            self._adapters.reset()

    @abstractmethod
    def _load_tensors(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        """Load full weights by name; see :meth:`load_weights`."""

    @abstractmethod
    def _state(self) -> dict[str, Any]:
        """Return this rank's parts of the state, by their names in the files, without copying."""

    @torch.no_grad()
    def snapshot(self) -> dict[str, Tensor]:
        if self._replica_index:
            return {}
        # New memory costs far more than the copy, because each of its pages is zeroed first.
        reusable, self._reusable_memory = self._reusable_memory, {}
        named = sharded_checkpoint.named_tensors(self._state())
        return _copy_to_cpu(named, reusable, self.device)

    def save(self, folder: Path, state: dict[str, Tensor] | None = None) -> None:
        # All model replicas have the same state, so only the first writes it.
        if not self._replica_index:
            state_now = self._state() if state is None else state
            shard, placements = self._shard_coords, self._placements
            sharded_checkpoint.write_shards(folder, state_now, *shard, placements)
            self._reusable_memory = state or {}

    def stream_weights(self, *, copy: bool = False) -> StreamedState:
        named = self.policy.module.state_dict(keep_vars=True)
        first_names: dict[int, str] = {}
        for name, value in named.items():
            first_names.setdefault(id(value), name)
        templates = {name: self._template(name, named[name]) for name in first_names.values()}

        def full_tensors() -> Iterator[tuple[str, Tensor]]:
            merge = None
            if (adapters := self._adapters) is not None:
                merge = adapters.weight_merger(dict(self._gather_full(adapters.parameters())))
            pairs = ((name, named[name]) for name in first_names.values())
            for name, full in self._gather_full(pairs):
                yield name, full if merge is None else merge(name, full)
                del full  # before the next one is gathered

        def on_host(source: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
            for name, full in source:
                is_copied = copy and storage_key(full) == storage_key(named[name])
                host = full.clone() if is_copied and not full.is_cuda else full
                host = start_move(host, HOST_DEVICE)
                synchronize(self.device)
                yield name, host
                del full, host  # before the next one is gathered

        source = full_tensors()
        return StreamedState(
            {name: templates[first_names[id(value)]] for name, value in named.items()},
            on_host(source),
            source,
        )

    def _template(self, name: str, tensor: Tensor) -> Tensor:
        """Return a meta tensor with the shape and type of the full tensor of this name."""
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")

    def _gather_full(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """Yield the full tensor of each tensor in ``named``, one by one, on all processes.

        A trainer that overrides :meth:`stream_weights`, the only caller, need not implement it.
        """
        raise NotImplementedError

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        self.discard_gradients()
        self.drop_host_copies()
        self._threads.close()
        self._reusable_memory, self._adapters = {}, None
        self._release()
        del self.policy, self.optimizer, self._threads

    @abstractmethod
    def _release(self) -> None:
        """Drop the subclass's references that keep weights or optimizer state in memory."""

    def _inputs(
        self, policy: Policy, trajectories: Sequence[Trajectory], spans: Sequence[StepSpan]
    ) -> Batch:
        """Return the policy's inputs for these spans, a micro-batch, on the device."""
        PROGRESS.mark()
        batch = policy.collate(
            [trajectories[row].slice_steps(start, stop) for row, start, stop in spans]
        )
        return {name: tensor.to(self.device) for name, tensor in batch.items()}

    def _reduce_metrics(self, metrics: dict[str, Any]) -> dict[str, float]:
        max_names = sorted(filter(is_max_metric, metrics))
        sum_names = sorted(metrics.keys() - set(max_names))
        totals: dict[str, float] = {}
        for names in filter(None, (sum_names, max_names)):
            total = torch.stack([metrics[name] for name in names])
            if self.world.size > 1:
                reduce_op = torch.distributed.ReduceOp
                op = reduce_op.MAX if names is max_names else reduce_op.SUM
                torch.distributed.all_reduce(total, op)
            if names is sum_names:
                # Processes of one model replica have the same sums.
                total /= self.world.layout.model_parallel_size
            totals |= dict(zip(names, total.tolist(), strict=True))
        return totals


def _copy_to_cpu(
    named: Iterable[tuple[str, Tensor]], reusable: Mapping[str, Tensor], device: torch.device
) -> dict[str, Tensor]:
    """Copy tensors from a device to the CPU, into ``reusable`` memory if possible.

    Tied tensors share a copy.
    """
    copies: dict[str, Tensor] = {}
    by_storage: dict[object, Tensor] = {}
    for name, tensor in named:
        source, target = tensor.detach(), reusable.get(name)
        key = storage_key(tensor)
        if key in by_storage:
            pass
        elif target is not None and (target.shape, target.dtype) == (source.shape, source.dtype):
            local_shard(target).copy_(local_shard(source), non_blocking=True)
            by_storage[key] = target
        else:
            is_on_cpu = source.device.type == "cpu"
            by_storage[key] = source.clone() if is_on_cpu else start_move(source, HOST_DEVICE)
        copies[name] = by_storage[key]
    synchronize(device)
    return copies


A = TypeVar("A")
R = TypeVar("R")


class ThreadedDataParallel:
    """``count`` threads that share the weights of a policy; with 1, the caller's thread."""

    def __init__(self, policy: Policy, count: int) -> None:
        mkl_warmup.warm_up()
        self.policies = [policy, *(_copy_sharing_weights(policy) for _ in range(count - 1))]
        """The policy of each thread: the original, and copies that share its weights."""
        self._executor = (
            ThreadPoolExecutor(count, "batches", torch.set_num_threads, (1,)) if count > 1 else None
        )

    def __len__(self) -> int:
        return len(self.policies)

    def map(self, work: Callable[[Policy, A], R], parts: Sequence[A]) -> list[R]:
        """Compute ``work(policy, part)`` in all threads; return the results in order."""
        if self._executor is None:
            return [work(self.policies[0], parts[0])]
        futures = [
            self._executor.submit(work, policy, part)
            for policy, part in zip(self.policies, parts, strict=True)
        ]
        # Wait for all threads even after an error: none may overlap with later work.
        wait(futures)
        return [future.result() for future in futures]

    def close(self) -> None:
        if self._executor is not None:
            self._executor.shutdown()

    def reduce_gradients(self) -> None:
        """Add the gradients of all threads to those of the original, always in the same order."""
        modules = [policy.module for policy in self.policies]
        for other in modules[1:]:
            for parameter, copied in zip(modules[0].parameters(), other.parameters(), strict=True):
                if copied.grad is None:
                    continue
                if parameter.grad is None:
                    parameter.grad = copied.grad
                else:
                    parameter.grad.add_(copied.grad)
                copied.grad = None


def _copy_sharing_weights(policy: Policy) -> Policy:
    """Return a copy of a policy that shares weights and buffers with it, but not gradients."""
    duplicate = copy.copy(policy)
    duplicate.module = copy.deepcopy(policy.module)
    module, other = policy.module, duplicate.module
    for parameter, copied in zip(module.parameters(), other.parameters(), strict=True):
        copied.data = parameter.data
    for submodule, copied_submodule in zip(module.modules(), other.modules(), strict=True):
        _share_buffers(submodule, copied_submodule)
    return duplicate


def _share_buffers(module: nn.Module, copied: nn.Module) -> None:
    for name, buffer in module.named_buffers(recurse=False):
        copied._buffers[name] = buffer


@dataclass(frozen=True)
class MicroBatches:
    """The micro-batches of one thread of this rank.

    All ranks run the same number of micro-batches, because collectives must match. A rank with
    fewer repeats a small row in extra ones, with ``is_real`` false and weight 0.
    """

    spans: list[list[StepSpan]]
    """The spans of each micro-batch, one per row."""
    is_real: list[bool]


def split_micro_batches(
    policy: Policy,
    trajectories: Sequence[Trajectory],
    row_groups: Sequence[Sequence[int]] | None,
    *,
    max_tokens: int,
    padded: bool,
    speeds: Sequence[float],
    rank: int,
    num_threads: int,
) -> list[MicroBatches]:
    """Return the micro-batches of each thread of a rank.

    Every rank computes the split for all ranks, and so knows how many micro-batches each runs. A
    row is a trajectory. Rows are first grouped into bundles, each of which one thread computes. A
    bundle is split into pieces, each of which is in one micro-batch.

    Args:
        row_groups: groups of rows that must be in one micro-batch, unsplit. None: rows are
            independent. Rows with a common prompt are then placed together, and other rows are
            split into spans if the policy's steps are independent.
        max_tokens: maximum number of positions of a micro-batch.
        padded: whether rows are padded to the longest row of their micro-batch.
        speeds: relative speeds of the ranks.

    Raises:
        ValueError: a row is missing in ``row_groups``, or is in it twice.
    """
    thread_speeds = [speed for speed in speeds for _ in range(num_threads)]
    if row_groups is None:
        bundles = _bundle_rows(policy, trajectories, max_tokens, thread_speeds)
    else:
        bundles = [list(group) for group in row_groups]
    if sorted(row for bundle in bundles for row in bundle) != list(range(len(trajectories))):
        raise ValueError("each row must be in one micro-batch")
    pieces, bundle_piece_ids = list[list[StepSpan]](), list[list[int]]()
    for bundle in bundles:
        unsplit = [StepSpan(row, 0, len(trajectories[row])) for row in bundle]
        bundle_pieces = (
            _split_bundle(policy, trajectories, bundle, max_tokens)
            if row_groups is None
            else [unsplit]
        )
        bundle_piece_ids.append(list(range(len(pieces), len(pieces) + len(bundle_pieces))))
        pieces += bundle_pieces
    max_rows = max(map(len, pieces), default=1)
    costs = []
    for piece in pieces:
        parts = [trajectories[row].slice_steps(start, stop) for row, start, stop in piece]
        # An upper bound of the padded size: the number of rows times the largest cost.
        longest = max(map(policy.num_tokens, parts))
        costs.append(max_rows * longest if padded else _packed_size(policy, parts))
    # One process gets all spans of a trajectory, because it returns the trajectory's outputs.
    bundle_costs = [sum(costs[i] for i in piece_ids) for piece_ids in bundle_piece_ids]
    thread_piece_ids = [
        [i for bundle_index in bundle_indices for i in bundle_piece_ids[bundle_index]]
        for bundle_indices in balance_costs(bundle_costs, thread_speeds)
    ]

    def to_spans(batches: list[list[int]]) -> list[list[StepSpan]]:
        return [[span for i in piece_ids for span in pieces[i]] for piece_ids in batches]

    thread_batches = [
        pack_microbatches(costs, piece_ids, max_tokens, padded=padded)
        for piece_ids in thread_piece_ids
    ]
    if len(speeds) == 1:
        return [MicroBatches(to_spans(b), [True] * len(b)) for b in thread_batches]
    count = max(1, *map(len, thread_batches))
    out = []
    for piece_ids in thread_piece_ids[rank * num_threads :][:num_threads]:
        # Ranks wait for each other at every micro-batch, so micro-batches are of even size.
        batches = even_microbatches(costs, piece_ids, count, max_tokens, padded=padded)
        num_fillers = count - len(batches)
        filler = [min(piece_ids, key=lambda i: costs[i])] if piece_ids else [0]
        is_real = [True] * len(batches) + [False] * num_fillers
        out.append(MicroBatches(to_spans(batches + [filler] * num_fillers), is_real))
    return out


def _packed_size(policy: Policy, trajectories: Sequence[Trajectory]) -> int:
    """Return the number of positions of trajectories that are packed into one sequence."""
    prefixes = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    unshared = sum(map(policy.num_tokens, trajectories)) - sum(length for _, length in prefixes)
    return unshared + sum(dict(prefixes).values())


def _bundle_rows(
    policy: Policy, trajectories: Sequence[Trajectory], max_tokens: int, speeds: Sequence[float]
) -> list[list[int]]:
    """Group rows with a common prompt, unless this would slow down the slowest thread.

    Args:
        speeds: relative speeds of all threads of all ranks.
    """
    prefixes = [policy.shared_prefix(trajectory) for trajectory in trajectories]
    if not any(length for _, length in prefixes):
        return [[row] for row in range(len(trajectories))]
    costs = [policy.num_tokens(trajectory) for trajectory in trajectories]
    groups: dict[object, list[int]] = {}
    for row, (key, length) in enumerate(prefixes):
        groups.setdefault(key if length else row, []).append(row)

    def size(rows: Sequence[int]) -> int:
        prefix_lengths = dict(prefixes[row] for row in rows)
        return sum(costs[row] - prefixes[row][1] for row in rows) + sum(prefix_lengths.values())

    def split(limit: int) -> list[list[int]]:
        bundles = []
        for rows in groups.values():
            bundle: list[int] = []
            for row in rows:
                if bundle and size([*bundle, row]) > limit:
                    bundles.append(bundle)
                    bundle = []
                bundle.append(row)
            bundles.append(bundle)
        return bundles

    def slowest_time(bundles: list[list[int]]) -> float:
        assigned = balance_costs([size(bundle) for bundle in bundles], speeds)
        thread_rows = [[row for index in indices for row in bundles[index]] for indices in assigned]
        return max(size(rows) / speed for rows, speed in zip(thread_rows, speeds, strict=True))

    if len(speeds) == 1:
        return split(max_tokens)
    even_share = sum(map(size, groups.values())) // len(speeds)
    # Prefer large bundles, because every thread with a part of a group computes the shared prompt.
    limits = (max_tokens, even_share, even_share // 2, even_share // 4)
    candidates = [split(min(max_tokens, limit)) for limit in limits]
    return min(candidates, key=slowest_time)


def _split_bundle(
    policy: Policy, trajectories: Sequence[Trajectory], bundle: Sequence[int], budget: int
) -> list[list[StepSpan]]:
    """Split a bundle into pieces: spans within ``budget`` tokens if it is one row of independent
    steps, otherwise a single piece."""
    if len(bundle) > 1 or not policy.has_independent_steps:
        return [[StepSpan(row, 0, len(trajectories[row])) for row in bundle]]
    row, length = bundle[0], len(trajectories[bundle[0]])
    count = max(1, min(length, -(-policy.num_tokens(trajectories[row]) // budget)))
    bounds = [length * k // count for k in range(count + 1)]
    return [[StepSpan(row, *pair)] for pair in itertools.pairwise(bounds)]
