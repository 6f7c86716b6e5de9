"""A Megatron-Core network that replaces a ``transformers`` network.

Policies call this network like the ``transformers`` network: tokens in, logits out. The layers are
those of Megatron, but attention is that of torch, or
:func:`rlinf.models.packed_attention.packed_attention` for packed rows. The rotary frequencies are
copied from the original network. With context parallelism, positions are exchanged only in the
attention and after the layers (:mod:`rlinf.trainers.megatron.parallel_dims`).
"""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from rlinf.channels.process_group import ParallelLayout
from rlinf.models.packed_attention import PackedRows, packed_attention
from rlinf.trainers.megatron import parallel_dims


@dataclass(frozen=True)
class AttentionContext:
    """Determines which positions of a batch attend to each other. Megatron's layers pass this to
    :class:`MegatronAttention`."""

    rows: PackedRows | None
    """Packed rows; None: each row attends to all of its earlier positions."""
    cp_group: Any = None
    """Context-parallel process group; None if context parallelism is off."""
    qkv_format: str = "sbhd"
    """Layout of queries, keys and values; Megatron reads this attribute."""


class MegatronAttention(nn.Module):
    """Causal attention of this process's heads, with the interface that Megatron's layers need."""

    def __init__(self, config: Any, **_: Any) -> None:
        super().__init__()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        *,
        packed_seq_params: AttentionContext,
        **_: Any,
    ) -> Tensor:
        """Compute the attention.

        Args:
            query: ``[S, B, H, D]``; keys and values may have fewer heads.

        Returns:
            ``[S, B, H * D]``.
        """
        length, rows = query.shape[0], packed_seq_params.rows
        if (group := packed_seq_params.cp_group) is not None:
            return parallel_dims.context_parallel_attention(query, key, value, group).flatten(2)
        queries, keys, values = (states.permute(1, 2, 0, 3) for states in (query, key, value))
        if rows is None:
            is_grouped = query.shape[2] != key.shape[2]
            out = F.scaled_dot_product_attention(
                queries, keys, values, is_causal=True, enable_gqa=is_grouped
            )
            return out.permute(2, 0, 1, 3).flatten(2)
        # Sequence parallelism needs padding after the rows, which attention excludes.
        num_tokens = len(rows.order)
        queries, keys, values = (states[:, :, :num_tokens] for states in (queries, keys, values))
        out, _none = packed_attention(self, queries, keys, values, None, rows=rows)
        return F.pad(out[0].flatten(1), (0, 0, 0, length - num_tokens))[:, None]


class MegatronRMSNorm(nn.RMSNorm):
    """RMSNorm with sequence parallelism, which Megatron's own norm does not support."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-6, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class MegatronNetwork(nn.Module):
    """This process's part of a network, with the interface of ``transformers``."""

    frequencies: Tensor
    """Inverse frequencies of the rotary position embedding, ``[D / 2]``."""

    def __init__(
        self, network: Any, layout: ParallelLayout, *, options: dict[str, Any], device: torch.device
    ) -> None:
        """
        Args:
            network: the ``transformers`` network, whose parameters may have no memory.
            options: options of Megatron's configuration that depend on the trainer.
        """
        super().__init__()
        self.config = network.config
        self.generation_config = getattr(network, "generation_config", None)
        self._tied_weights_keys = getattr(network, "_tied_weights_keys", None)
        self.vocab_size = network.config.vocab_size
        self.padding_token = network.get_input_embeddings().padding_idx
        """Id of the padding token, if any; torch computes no gradient for its embedding."""
        self.tp, self.cp = layout.tp, layout.cp
        settings = transformer_config(network.config, layout, options)
        self.inner = build_gpt_model(settings, network.config, layout)
        self.is_sequence_parallel = settings.sequence_parallel
        (rotary,) = (submodule for submodule in network.modules() if hasattr(submodule, "inv_freq"))
        self.register_buffer("frequencies", rotary.inv_freq.detach().clone(), persistent=False)
        self.to(device)

    def get_output_embeddings(self) -> None:
        """Return None, because the head is split over processes."""

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor | None = None,
        logits_to_keep: int | Tensor = 0,
        rows: PackedRows | None = None,
        use_cache: bool = False,
    ) -> SimpleNamespace:
        """Compute logits.

        Args:
            input_ids: ``[B, S]``.
            position_ids, rows: positions ``[1, S]`` and layout of packed rows, which exclude
                context parallelism. None: rows are padded.
            logits_to_keep: number of last positions (0: all) or indices of positions.

        Returns:
            ``logits`` ``[B, K, V]``, the same on all processes of a replica's last pipeline stage.

        Raises:
            NotLastStage: this pipeline stage is not the last.
        """
        assert (position_ids is None) == (rows is None), "packed rows need position_ids"
        length, inner = input_ids.shape[1], self.inner
        multiple = self.tp if self.is_sequence_parallel else 1
        multiple *= 2 * self.cp if self.cp > 1 else 1
        padded_length = -(-length // multiple) * multiple
        if position_ids is None:
            position_ids = torch.arange(padded_length, device=input_ids.device)[None]
        input_ids = F.pad(input_ids, (0, padded_length - length))
        position_ids = F.pad(position_ids, (0, padded_length - position_ids.shape[1]))
        cp_group = None
        if self.cp > 1:
            from megatron.core import parallel_state

            cp_group = parallel_state.get_context_parallel_group()
            rank = cp_group.rank()
            positions = parallel_dims.local_positions(padded_length, self.cp, rank)
            positions = positions.to(input_ids.device)
            input_ids, position_ids = input_ids[:, positions], position_ids[:, positions]
        angles = position_ids[0, :, None].float() * self.frequencies
        hidden = None
        if inner.pre_process:
            hidden = inner.embedding(input_ids=input_ids, position_ids=position_ids)
            if self.padding_token is not None and hidden.requires_grad:
                # Megatron's embedding computes a gradient for the padding token; torch's does not.
                is_padding = self._local_tokens(input_ids.t()) == self.padding_token
                hidden = torch.where(is_padding[..., None], hidden.detach(), hidden)
                # The transposed mask may make the result non-contiguous; pipelines cannot send it.
                hidden = hidden.contiguous()
            if torch.is_grad_enabled() and not hidden.requires_grad:
                # With adapters the embedding is frozen, but recomputation in the backward pass
                # requires an input that requires a gradient.
                hidden.requires_grad_()
        hidden = inner.decoder(
            hidden_states=hidden,
            attention_mask=None,
            rotary_pos_emb=torch.cat((angles, angles), -1)[:, None, None],
            packed_seq_params=AttentionContext(rows, cp_group),
        )
        if not inner.post_process:
            raise parallel_dims.NotLastStage(hidden)
        if self.is_sequence_parallel:
            from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

            # Every process continues with the full sequence and computes the same loss.
            hidden = gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        if cp_group is not None:
            # Here too, every process computes the same loss; :func:`MegatronTrainer._backward`
            # divides it by the number of processes in the group.
            hidden = parallel_dims.gather_sequence(hidden, cp_group)
        hidden = hidden.transpose(0, 1)[:, :length]
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        is_tied = inner.share_embeddings_and_output_weights
        head = inner.shared_embedding_or_output_weight() if is_tied else None
        logits, _ = inner.output_layer(hidden[:, keep].contiguous(), weight=head)
        return SimpleNamespace(logits=logits[..., : self.vocab_size])

    def _local_tokens(self, tokens: Tensor) -> Tensor:
        """Return the part of tokens ``[S, B]`` that this process has with sequence parallelism."""
        if not self.is_sequence_parallel:
            return tokens
        from megatron.core import parallel_state

        return tokens.chunk(self.tp)[parallel_state.get_tensor_model_parallel_rank()]


def head_size(hf_config: Any) -> int:
    """Return the size of an attention head of a ``transformers`` network."""
    size = getattr(hf_config, "head_dim", None)
    return int(size or hf_config.hidden_size // hf_config.num_attention_heads)


def transformer_config(hf_config: Any, layout: ParallelLayout, options: dict[str, Any]) -> Any:
    """Return Megatron's configuration for a ``transformers`` network."""
    from megatron.core.transformer import TransformerConfig

    experts = getattr(hf_config, "num_experts", None)
    moe_options: dict[str, Any] = {}
    if experts:
        moe_options = {
            "num_moe_experts": experts,
            "moe_router_topk": hf_config.num_experts_per_tok,
            "moe_ffn_hidden_size": hf_config.moe_intermediate_size,
            # Softmax over all experts before the selection, or over the selected experts only.
            "moe_router_pre_softmax": not hf_config.norm_topk_prob,
            "moe_router_load_balancing_type": "none",
            "moe_aux_loss_coeff": 0.0,
            "moe_router_dtype": "fp32",
            "expert_model_parallel_size": layout.ep,
        }
    return TransformerConfig(
        num_layers=hf_config.num_hidden_layers,
        hidden_size=hf_config.hidden_size,
        num_attention_heads=hf_config.num_attention_heads,
        num_query_groups=hf_config.num_key_value_heads,
        kv_channels=head_size(hf_config),
        ffn_hidden_size=hf_config.intermediate_size,
        normalization="RMSNorm",
        layernorm_epsilon=hf_config.rms_norm_eps,
        gated_linear_unit=True,
        activation_func=F.silu,
        add_bias_linear=False,
        add_qkv_bias=hf_config.model_type == "qwen2",
        qk_layernorm=hf_config.model_type in ("qwen3", "qwen3_moe"),
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tp,
        pipeline_model_parallel_size=layout.pp,
        context_parallel_size=layout.cp,
        variable_seq_lengths=True,
        moe_token_dispatcher_type="alltoall",
        # The algorithm has weighted the losses, so Megatron must only sum them.
        calculate_per_token_loss=True,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        masked_softmax_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **moe_options,
        **options,
    )


def build_gpt_model(settings: Any, hf_config: Any, layout: ParallelLayout) -> Any:
    """Build Megatron's model of this process, with memory but without weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_block import (
        TransformerBlockSubmodules,
        get_num_layers_to_build,
    )

    # Megatron reads this name, which only Transformer Engine defines.
    moe_utils.te_general_gemm = getattr(moe_utils, "te_general_gemm", None)
    spec = get_gpt_layer_local_spec(
        settings.num_moe_experts, qk_layernorm=settings.qk_layernorm, normalization="RMSNorm"
    )
    submodules, attention = spec.submodules, spec.submodules.self_attention.submodules
    submodules.input_layernorm = submodules.pre_mlp_layernorm = MegatronRMSNorm
    attention.core_attention = MegatronAttention
    if settings.qk_layernorm:
        attention.q_layernorm = attention.k_layernorm = MegatronRMSNorm
    layers = [spec] * get_num_layers_to_build(settings)
    model = GPTModel(
        settings,
        TransformerBlockSubmodules(layer_specs=layers, layer_norm=MegatronRMSNorm),
        vocab_size=-(-hf_config.vocab_size // layout.tp) * layout.tp,
        max_sequence_length=hf_config.max_position_embeddings,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        parallel_output=False,
        share_embeddings_and_output_weights=hf_config.tie_word_embeddings,
        position_embedding_type="none",
    )
    with torch.no_grad():
        # Checkpoints have no rows for the vocabulary's padding; uninitialised memory may be NaN.
        for name, parameter in model.named_parameters():
            if "word_embeddings" in name or "output_layer" in name:
                parameter.zero_()
    if model.post_process:
        # The head gets full sequences: :meth:`MegatronNetwork.forward` gathers them.
        model.output_layer.sequence_parallel = False
        model.output_layer.allreduce_dgrad = layout.tp > 1
    return model
