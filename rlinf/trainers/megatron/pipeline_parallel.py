"""Pipeline parallelism of micro-batches by Megatron's schedule (1F1B).

Only the last stage computes what a policy or a loss does with the network's outputs. At other
stages, the network's call raises :class:`rlinf.trainers.megatron.model.NotLastStage`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from rlinf.trainers.megatron.model import NotLastStage

A = TypeVar("A")


def run_pipeline(
    ddp: Any, batches: Sequence[A], compute: Callable[[A], tuple[Tensor, Any]], *, backward: bool
) -> list[Any]:
    """Run micro-batches through the pipeline, with backward passes if ``backward``.

    Args:
        ddp: Megatron's model in its ``DistributedDataParallel``.
        compute: calls the network once; returns the value to differentiate, and a result.

    Returns:
        The result of each micro-batch at the last stage; an empty list at other stages.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        try:
            value, result = compute(next(data))
        except NotLastStage as stage_end:
            return stage_end.hidden, None
        return value, lambda output: (output, torch.ones((), dtype=torch.int), result)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(batches),
        model=[ddp],
        num_microbatches=len(batches),
        # Stages send each other the shapes of their tensors.
        seq_length=ddp.config.tensor_model_parallel_size,
        micro_batch_size=1,
        forward_only=not backward,
    )
    return results


def broadcast_from_last_stage(tensor: Tensor) -> Tensor:
    """Broadcast a tensor from the last stage; all stages pass a tensor of its shape and type."""
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
