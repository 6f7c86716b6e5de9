"""Context parallelism: sequences are split over processes by position.

The split is that of Megatron-Core's ``get_batch_on_this_cp_rank``: twice as many chunks as
processes, of which process r of n has chunks r and 2n - 1 - r. Under causal attention, later chunks
have more work, and the sum over these two chunks is the same on every process.

Each layer gathers the keys and values of all processes (as in Llama 3, arXiv 2407.21783, section
3.3.2). Megatron-Core uses Transformer Engine for this; here only torch is needed.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def local_positions(length: int, processes: int, rank: int) -> Tensor:
    """Return the positions ``[length / processes]`` of a process, in order.

    Args:
        length: a multiple of twice the number of processes.
    """
    chunks = torch.arange(length).view(2 * processes, -1)
    return torch.cat((chunks[rank], chunks[2 * processes - 1 - rank]))


def gather_order(length: int, processes: int) -> Tensor:
    """Return the index ``[length]`` of each position in the gathered positions of all ranks."""
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
    rank, last, half = group.rank(), 2 * group.size() - 1, len(query) // 2
    outputs = []
    for chunk, queries in zip((rank, last - rank), torch.split(query, half), strict=True):
        stop = (chunk + 1) * half
        positions = torch.arange(stop, device=query.device)
        # Leave out the keys after the chunk, which would only be masked.
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
