"""Low-rank adapters (LoRA: Hu et al. 2021, arXiv 2106.09685) of Megatron's linear layers.

PEFT has one adapter each for the query, key, value, gate and up projections of ``transformers``,
whereas Megatron fuses these into one matrix. Here, a layer of Megatron has the adapters of all its
projections, each process a part of them. Checkpoints store them under PEFT's names and shapes.

If a layer's outputs are split over tensor-parallel processes, A is replicated and B is split by
rows. If its inputs are split, A is split by columns and B is replicated. Processes exchange only
the narrow tensor between the two.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.trainers.lora import LoRAConfig

ATTENTION_PROJECTIONS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
MLP_PROJECTIONS = {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
"""The projections in each of Megatron's layers, in their order."""


class MegatronLoRALayer(nn.Module):
    """Adapter of one Megatron layer: adds ``scale * B A x`` to each projection in it."""

    def __init__(
        self, linear: Any, kinds: Collection[str], rows: dict[str, int], lora: LoRAConfig
    ) -> None:
        """
        Args:
            linear: Megatron's layer, whose outputs or inputs are split.
            kinds: the projections that have an adapter.
            rows: number of rows of each projection in a group of the layer. Groups follow one
                another (queries, keys and values of a group of heads).
        """
        super().__init__()
        self.scale, self.rank, self.rows = lora.alpha / lora.rank, lora.rank, rows
        # Either the outputs are split or the inputs.
        self.splits_outputs, self.is_sequence_parallel = (
            hasattr(linear, "gather_output"),
            linear.sequence_parallel,
        )
        weight = linear.weight
        self.groups = weight.shape[0] // sum(rows.values())
        outs = {kind: self.groups * count for kind, count in rows.items() if kind in kinds}

        def create_factor(*shape: int, replicated: bool) -> nn.Parameter:
            factor = nn.Parameter(weight.new_zeros(shape))
            # Each process has the gradient of some positions, and Megatron sums these.
            factor.sequence_parallel = replicated and self.is_sequence_parallel  # type: ignore[attr-defined]
            return factor

        self.lora_A = nn.ParameterDict(
            {
                kind: create_factor(lora.rank, weight.shape[1], replicated=self.splits_outputs)
                for kind in outs
            }
        )
        self.lora_B = nn.ParameterDict(
            {
                kind: create_factor(out, lora.rank, replicated=not self.splits_outputs)
                for kind, out in outs.items()
            }
        )

    def forward(self, inputs: Tensor) -> Tensor:
        """Compute the adapter's output.

        Args:
            inputs: ``[S, B, I]``, the layer's inputs: a part of the positions with sequence
                parallelism and split outputs, a part of ``I`` with split inputs.

        Returns:
            ``[S, B, O]``, of the shape of the layer's outputs.
        """
        from megatron.core import tensor_parallel as tp

        narrow = F.linear(inputs, torch.cat(list(self.lora_A.values())))
        if self.splits_outputs and self.is_sequence_parallel:
            narrow = tp.gather_from_sequence_parallel_region(narrow)
        elif self.splits_outputs:
            narrow = tp.copy_to_tensor_model_parallel_region(narrow)
        elif self.is_sequence_parallel:
            narrow = tp.reduce_scatter_to_sequence_parallel_region(narrow)
        else:
            narrow = tp.reduce_from_tensor_model_parallel_region(narrow)
        each = dict(zip(self.lora_A, torch.split(narrow, self.rank, -1), strict=True))
        projected = {kind: F.linear(own, self.lora_B[kind]) for kind, own in each.items()}
        shape = (*narrow.shape[:-1], self.groups)
        parts = [
            projected[kind].view(*shape, size)
            if kind in projected
            else narrow.new_zeros(*shape, size)
            for kind, size in self.rows.items()
        ]
        return self.scale * torch.cat(parts, -1).flatten(-2)

    def forward_hook(
        self, linear: Any, inputs: tuple[Tensor, ...], output: tuple[Tensor, Any]
    ) -> Any:
        """Return the layer's outputs plus those of the adapter, and its bias."""
        return output[0] + self(*inputs), output[1]


def add_lora_layers(
    inner: Any, hf: Any, first_layer: int, names: Collection[str], lora: LoRAConfig
) -> None:
    """Add adapters, initially zero, to the layers of Megatron's model, and freeze everything else.

    Args:
        hf: configuration of the ``transformers`` network.
        first_layer: index of the network's layer that is this process's first.
        names: PEFT's names of all adapters.
    """
    for parameter in inner.parameters():
        parameter.requires_grad_(requires_grad=False)
    head = getattr(hf, "head_dim", None) or hf.hidden_size // hf.num_attention_heads
    heads = hf.num_attention_heads // hf.num_key_value_heads * head
    rows = {"q_proj": heads, "k_proj": head, "v_proj": head}
    for number, layer in enumerate(inner.decoder.layers, first_layer):
        for part, prefix, of in (
            (layer.self_attention, "self_attn", ATTENTION_PROJECTIONS),
            (layer.mlp, "mlp", MLP_PROJECTIONS),
        ):
            for where, all_kinds in of.items():
                begin = f"model.layers.{number}.{prefix}."
                kinds = [k for k in all_kinds if any(n.startswith(f"{begin}{k}.") for n in names)]
                if not kinds:
                    continue
                linear = getattr(part, where)
                alike = linear.weight.shape[0] // len(all_kinds)
                own = {kind: rows.get(kind, alike) for kind in all_kinds}
                linear.adapter = MegatronLoRALayer(linear, kinds, own, lora)
                linear.register_forward_hook(linear.adapter.forward_hook)
