"""Mapping of Megatron's parameters to tensors of the Hugging Face format.

Megatron fuses the projections of queries, keys and values into one matrix, interleaved by query
group (the query heads that share a key head), and gate and up projections into another. A
tensor-parallel rank has some rows or columns of a matrix. Megatron has a parameter for each expert;
the Hugging Face format has one tensor for all experts of a layer.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from rlinf.trainers.lora import ADAPTER_NAME
from rlinf.trainers.sharded_checkpoint import ShardPlacement, to_strided_ranges


@dataclass(frozen=True)
class RankSlice:
    """The part of a network that a process has."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors of the network, by name."""
    tp: int
    """Number of tensor-parallel processes."""
    tp_rank: int
    first_layer: int
    """Index, in the whole network, of the process's first layer."""
    first_expert: int
    """Index, in a layer, of the process's first expert."""
    query_and_kv_rows: tuple[int, int]
    """Numbers of rows of a query group in the fused matrix: of queries, and of keys (or values)."""
    tied: bool
    """Whether the head shares the weight of the embedding."""


@dataclass(frozen=True)
class TensorSlice:
    """Consecutive rows of a Megatron parameter. Each row is a whole row of a Hugging Face tensor,
    or a range of its columns."""

    name: str
    """Name of the tensor."""
    shape: tuple[int, ...]
    """Shape of the tensor. A row is along the last dimension; the others are flattened into one."""
    first_row: int
    """Index of the first row in the tensor."""
    first_column: int
    """Index of the first column in each row of the tensor."""
    param_row: int
    """Index of the first row in the parameter."""
    num_rows: int


@dataclass(frozen=True)
class ParamMapping:
    """Mapping of a Megatron parameter to slices of Hugging Face tensors."""

    slices: tuple[TensorSlice, ...]
    is_tensor_parallel: bool = False
    """Whether the parameter is split over tensor-parallel processes."""
    is_expert: bool = False


@dataclass(frozen=True)
class TensorPart:
    """The elements of a Hugging Face tensor that this process has, in fragments. A fragment is a
    contiguous range of a Megatron parameter."""

    name: str
    placement: ShardPlacement
    ranges: tuple[tuple[int, int, int], ...]
    """Where the elements are, in order: index of the fragment, offset in it, and length."""


REPLICATED_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
"""Hugging Face name, by Megatron's, of each parameter of a layer that is not split."""
ROW_PARALLEL_NAMES = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
"""Hugging Face name, by Megatron's, of each weight ``[out, in]`` that is split by columns."""
ADAPTED_BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}
"""Hugging Face name, by Megatron's, of each module with adapters."""
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_ADAPTER = re.compile(r"((\w+)\.linear_\w+)\.adapter\.lora_([AB])\.(\w+)")


def map_param(name: str, shape: tuple[int, ...], rank_slice: RankSlice) -> ParamMapping:
    """Return the mapping of a Megatron parameter.

    Raises:
        KeyError: the network has no such parameter.
    """
    rows, shapes, tp_rank = shape[0], rank_slice.shapes, rank_slice.tp_rank
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        is_head = name[0] == "o" and not rank_slice.tied
        hf_name = "lm_head.weight" if is_head else "model.embed_tokens.weight"
        # Megatron pads the vocabulary to a multiple of the number of processes.
        unpadded_rows = max(0, min(rows, shapes[hf_name][0] - tp_rank * rows))
        tensor_slice = TensorSlice(hf_name, shapes[hf_name], tp_rank * rows, 0, 0, unpadded_rows)
        return ParamMapping((tensor_slice,), is_tensor_parallel=True)
    if name == "decoder.final_layernorm.weight":
        return ParamMapping((_full_slice("model.norm.weight", rank_slice),))
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    layer, local_name = int(match[1]), match[2]
    prefix = f"model.layers.{rank_slice.first_layer + layer}."
    if adapter := _ADAPTER.fullmatch(local_name):
        linear, block, side, projection = adapter.groups()
        hf_name = f"{prefix}{ADAPTED_BLOCKS[block]}.{projection}.lora_{side}.{ADAPTER_NAME}.weight"
        # Row-parallel layers split the columns of A; column-parallel layers split the rows of B.
        if (is_row_parallel := f"{linear}.weight" in ROW_PARALLEL_NAMES) != (side == "A"):
            return ParamMapping((_full_slice(hf_name, rank_slice),))
        row, column = (0, tp_rank * shape[1]) if is_row_parallel else (tp_rank * rows, 0)
        tensor_slice = TensorSlice(hf_name, shapes[hf_name], row, column, 0, rows)
        return ParamMapping((tensor_slice,), is_tensor_parallel=True)
    if local_name in REPLICATED_NAMES:
        return ParamMapping((_full_slice(prefix + REPLICATED_NAMES[local_name], rank_slice),))
    if local_name in ROW_PARALLEL_NAMES:
        hf_name = prefix + ROW_PARALLEL_NAMES[local_name]
        tensor_slice = TensorSlice(hf_name, shapes[hf_name], 0, tp_rank * shape[1], 0, rows)
        return ParamMapping((tensor_slice,), is_tensor_parallel=True)
    if local_name.startswith("self_attention.linear_qkv."):
        suffix = local_name.rpartition(".")[2]
        qkv_slices = _qkv_slices(prefix, suffix, rows, rank_slice)
        return ParamMapping(tuple(qkv_slices), is_tensor_parallel=True)
    if local_name == "mlp.linear_fc1.weight":
        half, slices = rows // 2, []
        for param_row, projection in ((0, "gate"), (half, "up")):
            hf_name = f"{prefix}mlp.{projection}_proj.weight"
            slices.append(TensorSlice(hf_name, shapes[hf_name], tp_rank * half, 0, param_row, half))
        return ParamMapping(tuple(slices), is_tensor_parallel=True)
    if expert := _EXPERT.fullmatch(local_name):
        expert_index = rank_slice.first_expert + int(expert[1])
        if expert[2] == "1":
            hf_name, half = f"{prefix}mlp.experts.gate_up_proj", rows // 2
            full_shape, slices = shapes[hf_name], []
            for param_row, offset in ((0, 0), (half, full_shape[1] // 2)):
                row = expert_index * full_shape[1] + offset + tp_rank * half
                slices.append(TensorSlice(hf_name, full_shape, row, 0, param_row, half))
            return ParamMapping(tuple(slices), is_tensor_parallel=True, is_expert=True)
        hf_name = f"{prefix}mlp.experts.down_proj"
        full_shape = shapes[hf_name]
        row, column = expert_index * full_shape[1], tp_rank * shape[1]
        tensor_slice = TensorSlice(hf_name, full_shape, row, column, 0, rows)
        return ParamMapping((tensor_slice,), is_tensor_parallel=True, is_expert=True)
    raise KeyError(name)


def _full_slice(name: str, rank_slice: RankSlice) -> TensorSlice:
    shape = rank_slice.shapes[name]
    return TensorSlice(name, shape, 0, 0, 0, shape[0])


def _qkv_slices(prefix: str, suffix: str, rows: int, rank_slice: RankSlice) -> list[TensorSlice]:
    """Return the slices of queries, keys and values of each query group, in this order."""
    query_rows, kv_rows = rank_slice.query_and_kv_rows
    num_groups = rows // (query_rows + 2 * kv_rows)
    slices, param_row, shapes = [], 0, rank_slice.shapes
    for group in range(rank_slice.tp_rank * num_groups, (rank_slice.tp_rank + 1) * num_groups):
        for projection, count in (("q", query_rows), ("k", kv_rows), ("v", kv_rows)):
            hf_name = f"{prefix}self_attn.{projection}_proj.{suffix}"
            slices.append(TensorSlice(hf_name, shapes[hf_name], group * count, 0, param_row, count))
            param_row += count
    return slices


def tensor_parts(
    fragments: Sequence[tuple[ParamMapping, tuple[int, ...], int, int]],
    sort_key: Callable[[str], int],
) -> list[TensorPart]:
    """Return, for each Hugging Face tensor, the elements that are in the fragments.

    Args:
        fragments: for each fragment: mapping and shape of its parameter, the fragment's offset in
            the parameter, and its length.
        sort_key: sort key of the tensor names.
    """
    overlaps_by_name, shapes = dict[str, list[np.ndarray]](), dict[str, tuple[int, ...]]()
    for fragment_index, (mapping, shape, start, length) in enumerate(fragments):
        for tensor_slice in mapping.slices:
            ranges = _slice_ranges(tensor_slice, prod(shape[1:]))
            low = np.maximum(ranges[:, 1], start)
            high = np.minimum(ranges[:, 1] + ranges[:, 2], start + length)
            starts, index = ranges[:, 0] + low - ranges[:, 1], np.full(len(ranges), fragment_index)
            # Columns: offset in the tensor, index of the fragment, offset in the fragment, length.
            overlaps = np.stack([starts, index, low - start, high - low], 1)
            if len(overlaps := overlaps[overlaps[:, 3] > 0]):
                overlaps_by_name.setdefault(tensor_slice.name, []).append(overlaps)
                shapes[tensor_slice.name] = tensor_slice.shape
    parts = []
    for name in sorted(overlaps_by_name, key=sort_key):
        overlaps = np.concatenate(overlaps_by_name[name])
        overlaps = overlaps[np.argsort(overlaps[:, 0], kind="stable")]
        strided_ranges = to_strided_ranges(overlaps[:, 0], overlaps[:, 3])
        placement = ShardPlacement(shapes[name], strided_ranges[0].start, strided_ranges)
        parts.append(TensorPart(name, placement, _merge_ranges(overlaps[:, 1:])))
    return parts


def _slice_ranges(tensor_slice: TensorSlice, param_columns: int) -> np.ndarray:
    """Return the ranges of a slice, ``[n, 3]``: offsets in tensor and in parameter, and length."""
    tensor_columns = tensor_slice.shape[-1] if len(tensor_slice.shape) > 1 else 1
    tensor_row, param_row = tensor_slice.first_row, tensor_slice.param_row
    num_rows = tensor_slice.num_rows
    if tensor_columns == param_columns:
        return np.array([[tensor_row, param_row, num_rows]]) * param_columns
    row = np.arange(num_rows)
    tensor_start = (tensor_row + row) * tensor_columns + tensor_slice.first_column
    param_start = (param_row + row) * param_columns
    return np.stack([tensor_start, param_start, np.full(num_rows, param_columns)], axis=1)


def _merge_ranges(ranges: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Merge adjacent ranges of one fragment, in the given order."""
    merged: list[tuple[int, int, int]] = []
    for fragment_index, start, length in ranges.tolist():
        if merged and merged[-1][0] == fragment_index and sum(merged[-1][1:]) == start:
            merged[-1] = (fragment_index, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((fragment_index, start, length))
    return tuple(merged)
