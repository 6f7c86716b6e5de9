"""Context parallelism: sequences are split over processes by position.

The split is that of Megatron-Core's ``get_batch_on_this_cp_rank``: twice as many chunks as
processes, of which process r of n has chunks r and 2n - 1 - r. Under causal attention, a later
chunk has more work, and two such chunks always have the same work together.

Each layer gathers the keys and values of all processes (as in Llama 3, arXiv 2407.21783, section
3.3.2). Megatron-Core uses the attention of Transformer Engine instead; this needs only torch.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def local_positions(length: int, processes: int, rank: int) -> Tensor:
    """Return the positions of a process, ``[length / processes]``, in order.

    Args:
        length: a multiple of twice the number of processes.
    """
    chunks = torch.arange(length).view(2 * processes, -1)
    return torch.cat((chunks[rank], chunks[2 * processes - 1 - rank]))


def gather_order(length: int, processes: int) -> Tensor:
    """Return, ``[length]``, the index of each position in the concatenation of all processes'
    positions."""
    return torch.cat(
        [local_positions(length, processes, rank) for rank in range(processes)]
    ).argsort()


def gather_sequence(own: Tensor, group: Any) -> Tensor:
    """Gather the positions of all processes, in order; collective.

    Args:
        own: ``[S / n, ...]``, of this process's positions.
        group: the n processes.

    Returns:
        ``[S, ...]``. Gradients of all processes are summed.
    """
    from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

    gathered = gather_from_sequence_parallel_region(own.contiguous(), group=group)
    return gathered.index_select(0, gather_order(len(gathered), group.size()).to(gathered.device))


def context_parallel_attention(query: Tensor, key: Tensor, value: Tensor, group: Any) -> Tensor:
    """Compute causal attention of this process's positions to those of all processes; collective.

    Args:
        query: ``[S / n, B, H, D]``; keys and values may have fewer heads.
        group: the n processes.

    Returns:
        ``[S / n, B, H, D]``.
    """
    keys, values = gather_sequence(torch.cat((key, value), -1), group).chunk(2, -1)
    rank, last, half = group.rank(), 2 * group.size() - 1, len(query) // 2
    outputs = []
    for chunk, queries in zip((rank, last - rank), torch.split(query, half), strict=True):
        stop = (chunk + 1) * half
        places = torch.arange(stop, device=query.device)
        # Positions after the chunk are excluded, because they would be computed and then masked.
        own_queries, own_keys, own_values = (
            each.permute(1, 2, 0, 3) for each in (queries, keys[:stop], values[:stop])
        )
        out = F.scaled_dot_product_attention(
            own_queries,
            own_keys,
            own_values,
            attn_mask=places <= places[-half:, None],
            enable_gqa=query.shape[2] != key.shape[2],
        )
        outputs.append(out.permute(2, 0, 1, 3))
    return torch.cat(outputs)
