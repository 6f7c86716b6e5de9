"""Parallelism of Megatron-Core: process groups, pipeline stages, and splits of sequences.

Context parallelism splits sequences over processes by position, as ``get_batch_on_this_cp_rank`` of
Megatron-Core does: n processes split a sequence into 2n chunks, and process r has chunks r and
2n - 1 - r. Under causal attention, later chunks have more work, and the sum over these two chunks
is the same on every process.

Each layer gathers the keys and values of all processes (as in Llama 3, arXiv 2407.21783, section
3.3.2). Megatron-Core uses Transformer Engine for this; here only torch is needed.
"""

from __future__ import annotations

import json
import logging
import warnings
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.errors import StageError


def local_positions(length: int, processes: int, rank: int) -> Tensor:
    """Return the positions that a process has, ``[length / processes]``, in order.

    Args:
        length: a multiple of twice the number of processes.
    """
    chunks = torch.arange(length).view(2 * processes, -1)
    return torch.cat((chunks[rank], chunks[2 * processes - 1 - rank]))


def gather_order(length: int, processes: int) -> Tensor:
    """Return the order ``[length]`` that sorts the positions of all ranks, concatenated by rank."""
    return torch.cat(
        [local_positions(length, processes, rank) for rank in range(processes)]
    ).argsort()


def gather_sequence(local: Tensor, group: Any) -> Tensor:
    """Gather the positions of all processes, in order; collective.

    Args:
        local: ``[S / n, ...]``, of this process's positions.
        group: the n processes.

    Returns:
        ``[S, ...]``. Gradients of all processes are summed.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(local.contiguous(), group=group)
    return gathered.index_select(0, gather_order(len(gathered), group.size()).to(gathered.device))


def context_parallel_attention(query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
    """Compute causal attention of this process's queries to the keys of all processes; collective.

    Args:
        query: ``[S / n, B, H, D]``; keys and values may have fewer heads.
        group: the n processes.

    Returns:
        ``[S / n, B, H, D]``.
    """
    keys, values = gather_sequence(torch.cat((key, value), -1), group).chunk(2, -1)
    rank, last_chunk, half = group.rank(), 2 * group.size() - 1, len(query) // 2
    outputs = []
    for chunk, queries in zip((rank, last_chunk - rank), torch.split(query, half), strict=True):
        stop = (chunk + 1) * half
        positions = torch.arange(stop, device=query.device)
        # Leave out the keys after the chunk, because all of them would be masked.
        chunk_queries, visible_keys, visible_values = (
            states.permute(1, 2, 0, 3) for states in (queries, keys[:stop], values[:stop])
        )
        out = F.scaled_dot_product_attention(
            chunk_queries,
            visible_keys,
            visible_values,
            attn_mask=positions <= positions[-half:, None],
            enable_gqa=query.shape[2] != key.shape[2],
        )
        outputs.append(out.permute(2, 0, 1, 3))
    return torch.cat(outputs)


UNUSED_SEED = 1
"""Seed of generators that are never used: there is no dropout, and weights are loaded."""
_initialized: list[tuple[int, str]] = []
"""Number of processes and layout of the existing process groups; empty if there are none."""


def initialize_process_groups(world: ProcessGroupInfo, device_type: str) -> None:
    """Connect the processes, and create the process groups of their layout unless they exist.

    Raises:
        StageError: this process has the groups of another layout, or no CUDA device.
    """
    world.init_process_group(device_type)
    requested = (world.size, str(world.layout))
    if _initialized:
        if _initialized != [requested]:
            raise StageError(
                f"trainer=megatron: this process has the groups of {_initialized[0]} but needs "
                f"those of {requested}; give all trainers of a pool one layout"
            )
        return
    logging.getLogger("megatron.core").setLevel(logging.WARNING)
    with warnings.catch_warnings():
        # Megatron warns that Apex and Transformer Engine are missing, which it does not need.
        warnings.simplefilter("ignore")
        from megatron.core import parallel_state, tensor_parallel
        from megatron.core.models.gpt import GPTModel  # noqa: F401
        from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer  # noqa: F401

    layout = world.layout
    parallel_state.initialize_model_parallel(
        layout.tp,
        layout.pp,
        context_parallel_size=layout.cp,
        expert_model_parallel_size=layout.ep,
        create_gloo_process_groups=False,
    )
    with torch.random.fork_rng(devices=[]):
        try:
            tensor_parallel.model_parallel_cuda_manual_seed(UNUSED_SEED)
        except (RuntimeError, AssertionError) as error:  # from torch, which finds no device
            raise StageError(
                f"trainer=megatron: Megatron-Core needs a CUDA device ({error}); give the stage "
                "GPUs in the plan, or set trainer=fsdp"
            ) from None
    _initialized.append(requested)


A = TypeVar("A")


class NotLastStage(Exception):
    """Raised by a network at pipeline stages before the last, which compute no logits."""

    def __init__(self, hidden: Tensor) -> None:
        """``hidden``: the stage's output, which the next stage receives."""
        super().__init__("only the last pipeline stage computes logits")
        self.hidden = hidden


def run_pipeline(
    ddp: Any, batches: Sequence[A], compute: Callable[[A], tuple[Tensor, Any]], *, backward: bool
) -> list[Any]:
    """Run micro-batches through the pipeline, with backward passes if ``backward``.

    Args:
        ddp: Megatron's model in its ``DistributedDataParallel``.
        compute: calls the network once on a micro-batch; returns the value to differentiate, and
            any result.

    Returns:
        The result of each micro-batch at the last stage; an empty list at other stages.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        try:
            value, result = compute(next(data))
        except NotLastStage as stage_end:
            return stage_end.hidden, None
        return value, lambda output: (output, torch.ones((), dtype=torch.int), result)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter(batches),
        model=[ddp],
        num_microbatches=len(batches),
        # Placeholders: stages send each other the shapes of their tensors.
        seq_length=ddp.config.tensor_model_parallel_size,
        micro_batch_size=1,
        forward_only=not backward,
    )
    return results


def broadcast_from_last_stage(tensor: Tensor) -> Tensor:
    """Broadcast the last stage's tensor; all stages pass a tensor of the same shape and type."""
    from megatron.core import parallel_state

    torch.distributed.broadcast(
        tensor,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    return tensor


def broadcast_metric_sums(sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Broadcast the last stage's sums of metrics to all stages."""
    encoded_names = json.dumps(sorted(sums)).encode()
    size = int(broadcast_from_last_stage(torch.tensor(len(encoded_names), device=device)))
    buffer = torch.zeros(size, dtype=torch.uint8, device=device)
    if len(encoded_names) == size:
        buffer = torch.tensor(list(encoded_names), dtype=torch.uint8, device=device)
    names = json.loads(bytes(broadcast_from_last_stage(buffer).tolist()))
    values = torch.zeros(len(names), device=device)
    if sums:
        values = torch.stack([sums[name].float() for name in sorted(sums)])
    return dict(zip(names, broadcast_from_last_stage(values), strict=True))
