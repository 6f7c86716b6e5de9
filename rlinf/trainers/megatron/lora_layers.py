"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) of Megatron's linear layers.

PEFT has one adapter each for the query, key, value, gate and up projections of ``transformers``.
Megatron fuses the first three into one matrix, and the last two into another. Here, a Megatron
layer has the adapters of all its projections, and each process has a part of each adapter.
Checkpoints store adapters under PEFT's names and with PEFT's shapes.

In a column-parallel layer, A is replicated and B is split by rows. In a row-parallel layer, A is
split by columns and B is replicated. Processes exchange only the low-rank tensor between A and B.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.trainers.lora import LoRAConfig
from rlinf.trainers.megatron.model import head_size

ATTENTION_PROJECTIONS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
MLP_PROJECTIONS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
"""The projections in each of Megatron's linear layers, in the order of their rows."""


class MegatronLoRALayer(nn.Module):
    """Adapter of one Megatron layer: adds ``scale * B A x`` to each projection in it."""

    def __init__(
        self, linear: Any, projections: Collection[str], rows: dict[str, int], lora: LoRAConfig
    ) -> None:
        """
        Args:
            linear: Megatron's column-parallel or row-parallel layer.
            projections: the projections that have an adapter.
            rows: number of rows of each projection in one group of the layer's rows. The groups of
                a fused attention matrix are its query groups, each with queries, keys and values.
        """
        super().__init__()
        self.scale, self.rank, self.rows = lora.alpha / lora.rank, lora.rank, rows
        # Only column-parallel layers have ``gather_output``.
        self.is_column_parallel, self.is_sequence_parallel = (
            hasattr(linear, "gather_output"),
            linear.sequence_parallel,
        )
        weight = linear.weight
        self.num_groups = weight.shape[0] // sum(rows.values())
        out_features = {name: self.num_groups * rows[name] for name in rows if name in projections}

        def create_factor(*shape: int, replicated: bool) -> nn.Parameter:
            factor = nn.Parameter(weight.new_zeros(shape))
            # Each process has the gradient of some positions; Megatron sums it if this is true.
            factor.sequence_parallel = replicated and self.is_sequence_parallel  # type: ignore[attr-defined]
            return factor

        self.lora_A = nn.ParameterDict(
            {
                name: create_factor(lora.rank, weight.shape[1], replicated=self.is_column_parallel)
                for name in out_features
            }
        )
        self.lora_B = nn.ParameterDict(
            {
                name: create_factor(size, lora.rank, replicated=not self.is_column_parallel)
                for name, size in out_features.items()
            }
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the adapter's output.

        Args:
            inputs: ``[S, B, I]``, the layer's inputs. A column-parallel layer with sequence
                parallelism has a part of the positions; a row-parallel layer has a part of ``I``.

        Returns:
            ``[S, B, O]``, of the shape of the layer's outputs.
        """
        from megatron.core import tensor_parallel as tp

        low_rank = F.linear(inputs, torch.cat(list(self.lora_A.values())))
        if self.is_column_parallel and self.is_sequence_parallel:
            low_rank = tp.gather_from_sequence_parallel_region(low_rank)
        elif self.is_column_parallel:
            low_rank = tp.copy_to_tensor_model_parallel_region(low_rank)
        elif self.is_sequence_parallel:
            low_rank = tp.reduce_scatter_to_sequence_parallel_region(low_rank)
        else:
            low_rank = tp.reduce_from_tensor_model_parallel_region(low_rank)
        splits = zip(self.lora_A, torch.split(low_rank, self.rank, -1), strict=True)
        outputs = {projection: F.linear(x, self.lora_B[projection]) for projection, x in splits}
        shape = (*low_rank.shape[:-1], self.num_groups)
        parts = [
            outputs[projection].view(*shape, size)
            if projection in outputs
            else low_rank.new_zeros(*shape, size)
            for projection, size in self.rows.items()
        ]
        return self.scale * torch.cat(parts, -1).flatten(-2)

    def forward_hook(
        self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]
    ) -> Any:
        """Return the layer's output plus that of the adapter, and the layer's bias."""
        return output[0] + self(*inputs), output[1]


def add_lora_layers(
    inner: Any, hf_config: Any, first_layer: int, names: Collection[str], lora: LoRAConfig
) -> None:
    """Add adapters, initially zero, to the layers of Megatron's model, and freeze everything else.

    Args:
        inner: Megatron's model.
        hf_config: configuration of the ``transformers`` network.
        first_layer: index, in the whole network, of this process's first layer.
        names: PEFT's names of all adapters.
    """
    for parameter in inner.parameters():
        parameter.requires_grad_(requires_grad=False)
    head_dim = head_size(hf_config)
    query_rows = hf_config.num_attention_heads // hf_config.num_key_value_heads * head_dim
    rows = {"q_proj": query_rows, "k_proj": head_dim, "v_proj": head_dim}
    for layer_index, layer in enumerate(inner.decoder.layers, first_layer):
        for block, module_name, projections_by_linear in (
            (layer.self_attention, "self_attn", ATTENTION_PROJECTIONS),
            (layer.mlp, "mlp", MLP_PROJECTIONS),
        ):
            for linear_name, projections in projections_by_linear.items():
                prefixes = {
                    p: f"model.layers.{layer_index}.{module_name}.{p}." for p in projections
                }
                adapted = [p for p in projections if any(n.startswith(prefixes[p]) for n in names)]
                if not adapted:
                    continue
                linear = getattr(block, linear_name)
                default_rows = linear.weight.shape[0] // len(projections)
                linear_rows = {p: rows.get(p, default_rows) for p in projections}
                linear.adapter = MegatronLoRALayer(linear, adapted, linear_rows, lora)
                linear.register_forward_hook(linear.adapter.forward_hook)
