"""Pipeline parallelism of micro-batches by Megatron's schedule (1F1B).

The last stage computes everything that a policy or a loss does with the network's outputs. At other
stages the call ends where it requests them (:class:`rlinf.trainers.megatron.model.NotLastStage`).
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
    parallel: Any, parts: Sequence[A], compute: Callable[[A], tuple[Tensor, Any]], *, backward: bool
) -> list[Any]:
    """Compute micro-batches.

    Args:
        parallel: Megatron's model in its data parallelism.
        compute: calls the network once; returns the value to differentiate, and any other value.

    Returns:
        The other value of each micro-batch at the last stage; an empty list at other stages.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def step(data: Any, model: Any) -> tuple[Tensor, Callable[[Tensor], Any] | None]:
        try:
            value, other = compute(next(data))
        except NotLastStage as passed:
            return passed.hidden, None
        return value, lambda output: (output, torch.ones((), dtype=torch.int), other)

    results: list[Any] = get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter(parts),
        model=[parallel],
        num_microbatches=len(parts),
        # Stages send each other the shapes of their tensors.
        seq_length=parallel.config.tensor_model_parallel_size,
        micro_batch_size=1,
        forward_only=not backward,
    )
    return results


def broadcast_from_last_stage(tensor: Tensor) -> Tensor:
    """Broadcast a tensor from the last stage to all; it has the same shape and type there."""
    from megatron.core import parallel_state

    torch.distributed.broadcast(
        tensor,
        parallel_state.get_pipeline_model_parallel_last_rank(),
        parallel_state.get_pipeline_model_parallel_group(),
    )
    return tensor


def broadcast_metric_sums(sums: dict[str, Tensor], device: torch.device) -> dict[str, Tensor]:
    """Broadcast sums that only the last stage knows to all stages."""
    names = json.dumps(sorted(sums)).encode()
    size = int(broadcast_from_last_stage(torch.tensor(len(names), device=device)))
    text = torch.zeros(size, dtype=torch.uint8, device=device)
    if len(names) == size:
        text = torch.tensor(list(names), dtype=torch.uint8, device=device)
    known = json.loads(bytes(broadcast_from_last_stage(text).tolist()))
    values = torch.zeros(len(known), device=device)
    if sums:
        values = torch.stack([sums[name].float() for name in sorted(sums)])
    return dict(zip(known, broadcast_from_last_stage(values), strict=True))
