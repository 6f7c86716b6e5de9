"""Mapping of Megatron's parameters to tensors of the Hugging Face format.

Megatron keeps queries, keys and values in one matrix, with each group of heads together. Gate and
up projection are in another matrix. A process has some rows or columns of both. Each expert is
separate.
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
    """A process's part of a network."""

    shapes: Mapping[str, tuple[int, ...]]
    """Shapes of all tensors of the network, by name."""
    tp: int
    tp_rank: int
    first_layer: int
    first_expert: int
    group_rows: tuple[int, int]
    """Number of rows of the queries of a group of heads, and of its keys or values."""
    tied: bool


@dataclass(frozen=True)
class TensorSlice:
    """Rows of a parameter that correspond to rows of a tensor, or to a part of each row."""

    name: str
    shape: tuple[int, ...]
    """Shape of the tensor; its dimensions except the last are flattened."""
    first_row: int
    """The first row in the tensor."""
    first_column: int
    """The first column in a row of the tensor."""
    param_row: int
    """The first row in the parameter."""
    num_rows: int


@dataclass(frozen=True)
class ParamMapping:
    """Mapping of a parameter to slices of tensors."""

    slices: tuple[TensorSlice, ...]
    is_tensor_parallel: bool = False
    """Whether tensor-parallel processes have different parts of it."""
    is_expert: bool = False


@dataclass(frozen=True)
class TensorPart:
    """Elements of a tensor that fragments of parameters hold."""

    name: str
    placement: ShardPlacement
    ranges: tuple[tuple[int, int, int], ...]
    """Positions of the part's elements, in order: number of the fragment, begin in it, and
    length."""


REPLICATED_NAMES = {
    "input_layernorm.weight": "input_layernorm.weight",
    "pre_mlp_layernorm.weight": "post_attention_layernorm.weight",
    "self_attention.q_layernorm.weight": "self_attn.q_norm.weight",
    "self_attention.k_layernorm.weight": "self_attn.k_norm.weight",
    "mlp.router.weight": "mlp.gate.weight",
}
ROW_PARALLEL_NAMES = {
    "self_attention.linear_proj.weight": "self_attn.o_proj.weight",
    "mlp.linear_fc2.weight": "mlp.down_proj.weight",
}
ADAPTED_BLOCKS = {"self_attention": "self_attn", "mlp": "mlp"}
_LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.+)")
_EXPERT = re.compile(r"mlp\.experts\.local_experts\.(\d+)\.linear_fc([12])\.weight")
_ADAPTER = re.compile(r"((\w+)\.linear_\w+)\.adapter\.lora_([AB])\.(\w+)")


def map_param(name: str, shape: tuple[int, ...], where: RankSlice) -> ParamMapping:
    """Return the mapping of a parameter.

    Raises:
        KeyError: the network has no such tensors.
    """
    rows = shape[0]
    if name in ("embedding.word_embeddings.weight", "output_layer.weight"):
        own = "lm_head.weight" if name[0] == "o" and not where.tied else "model.embed_tokens.weight"
        # The vocabulary is padded to a multiple of the number of processes.
        real = max(0, min(rows, where.shapes[own][0] - where.tp_rank * rows))
        piece = TensorSlice(own, where.shapes[own], where.tp_rank * rows, 0, 0, real)
        return ParamMapping((piece,), is_tensor_parallel=True)
    if name == "decoder.final_layernorm.weight":
        return ParamMapping((_full_slice("model.norm.weight", where),))
    match = _LAYER.fullmatch(name)
    if match is None:
        raise KeyError(name)
    number, part = int(match[1]), match[2]
    prefix = f"model.layers.{where.first_layer + number}."
    if factor := _ADAPTER.fullmatch(part):
        linear, of, side, kind = factor.groups()
        own = f"{prefix}{ADAPTED_BLOCKS[of]}.{kind}.lora_{side}.{ADAPTER_NAME}.weight"
        # Split inputs split the columns of A; split outputs split the rows of B.
        if (inputs := f"{linear}.weight" in ROW_PARALLEL_NAMES) != (side == "A"):
            return ParamMapping((_full_slice(own, where),))
        row, column = (0, where.tp_rank * shape[1]) if inputs else (where.tp_rank * rows, 0)
        return ParamMapping(
            (TensorSlice(own, where.shapes[own], row, column, 0, rows),), is_tensor_parallel=True
        )
    if part in REPLICATED_NAMES:
        return ParamMapping((_full_slice(prefix + REPLICATED_NAMES[part], where),))
    if part in ROW_PARALLEL_NAMES:
        own = prefix + ROW_PARALLEL_NAMES[part]
        piece = TensorSlice(own, where.shapes[own], 0, where.tp_rank * shape[1], 0, rows)
        return ParamMapping((piece,), is_tensor_parallel=True)
    if part.startswith("self_attention.linear_qkv."):
        suffix = part.rpartition(".")[2]
        return ParamMapping(tuple(_heads(prefix, suffix, rows, where)), is_tensor_parallel=True)
    if part == "mlp.linear_fc1.weight":
        half, slices = rows // 2, []
        for begin, kind in ((0, "gate"), (half, "up")):
            own = f"{prefix}mlp.{kind}_proj.weight"
            slices.append(TensorSlice(own, where.shapes[own], where.tp_rank * half, 0, begin, half))
        return ParamMapping(tuple(slices), is_tensor_parallel=True)
    if expert := _EXPERT.fullmatch(part):
        at = where.first_expert + int(expert[1])
        if expert[2] == "1":
            own, half = f"{prefix}mlp.experts.gate_up_proj", rows // 2
            full_shape, slices = where.shapes[own], []
            for begin, of in ((0, 0), (half, full_shape[1] // 2)):
                row = at * full_shape[1] + of + where.tp_rank * half
                slices.append(TensorSlice(own, full_shape, row, 0, begin, half))
            return ParamMapping(tuple(slices), is_tensor_parallel=True, is_expert=True)
        own = f"{prefix}mlp.experts.down_proj"
        full_shape = where.shapes[own]
        piece = TensorSlice(own, full_shape, at * full_shape[1], where.tp_rank * shape[1], 0, rows)
        return ParamMapping((piece,), is_tensor_parallel=True, is_expert=True)
    raise KeyError(name)


def _full_slice(name: str, where: RankSlice) -> TensorSlice:
    shape = where.shapes[name]
    return TensorSlice(name, shape, 0, 0, 0, shape[0])


def _heads(prefix: str, suffix: str, rows: int, where: RankSlice) -> list[TensorSlice]:
    """Return queries, keys and values of each group of heads, one after the other."""
    queries, each = where.group_rows
    groups = rows // (queries + 2 * each)
    slices, begin = [], 0
    for group in range(where.tp_rank * groups, (where.tp_rank + 1) * groups):
        for kind, count in (("q", queries), ("k", each), ("v", each)):
            own = f"{prefix}self_attn.{kind}_proj.{suffix}"
            slices.append(TensorSlice(own, where.shapes[own], group * count, 0, begin, count))
            begin += count
    return slices


def tensor_parts(
    stretches: Sequence[tuple[ParamMapping, tuple[int, ...], int, int]], order: Callable[[str], int]
) -> list[TensorPart]:
    """Return the elements of tensors that fragments of parameters hold.

    Args:
        stretches: of each fragment: its parameter's mapping and shape, and the begin and length of
            the fragment.
        order: sort key of the names.
    """
    tables, shapes = dict[str, list[np.ndarray]](), dict[str, tuple[int, ...]]()
    for number, (share, shape, start, count) in enumerate(stretches):
        for piece in share.slices:
            table = _table(piece, prod(shape[1:]))
            low = np.maximum(table[:, 1], start)
            high = np.minimum(table[:, 1] + table[:, 2], start + count)
            here = np.full(len(table), number)
            table = np.stack([table[:, 0] + low - table[:, 1], here, low - start, high - low], 1)
            if len(overlap := table[table[:, 3] > 0]):
                tables.setdefault(piece.name, []).append(overlap)
                shapes[piece.name] = piece.shape
    parts = []
    for name in sorted(tables, key=order):
        table = np.concatenate(tables[name])
        table = table[np.argsort(table[:, 0], kind="stable")]
        runs = to_strided_ranges(table[:, 0], table[:, 3])
        parts.append(
            TensorPart(
                name, ShardPlacement(shapes[name], runs[0].start, runs), _joined(table[:, 1:])
            )
        )
    return parts


def _table(piece: TensorSlice, width: int) -> np.ndarray:
    """Return the ranges ``[n, 3]`` of a slice: begin in the tensor, begin in the parameter, and
    length."""
    wide = piece.shape[-1] if len(piece.shape) > 1 else 1
    if wide == width:
        return np.array([[piece.first_row * wide, piece.param_row * width, piece.num_rows * width]])
    row = np.arange(piece.num_rows)
    there = (piece.first_row + row) * wide + piece.first_column
    return np.stack(
        [there, (piece.param_row + row) * width, np.full(piece.num_rows, width)], axis=1
    )


def _joined(table: np.ndarray) -> tuple[tuple[int, int, int], ...]:
    """Merge adjacent ranges of one fragment, in the given order."""
    merged: list[tuple[int, int, int]] = []
    for number, begin, length in table.tolist():
        if merged and merged[-1][0] == number and sum(merged[-1][1:]) == begin:
            merged[-1] = (number, merged[-1][1], merged[-1][2] + length)
        else:
            merged.append((number, begin, length))
    return tuple(merged)
