"""Policies that are causal language models of ``transformers``, from a checkpoint or new."""

from __future__ import annotations

import contextlib
import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Batch, ModelSpec, Policy, StepOutputs
from rlinf.models.causal_lm_config import CausalLMConfig, check_causal, check_model_sizes, hf_config
from rlinf.models.character_tokenizer import write_character_tokenizer
from rlinf.models.chat_format import check_template_kwargs
from rlinf.models.checkpoint_tensors import (
    check_checkpoint_tensors,
    checkpoint_names_differ,
    to_checkpoint_tensors,
)
from rlinf.models.hf_folder import (
    WEIGHTS_FILE,
    HFFolder,
    check_checkpoint,
    check_vocabulary,
    check_weight_files,
    copy_non_weight_files,
    read_config_json,
    weight_files,
)
from rlinf.models.loading import (
    check_rotary,
    load_meta_module,
    load_module,
    load_weights,
    new_meta_module,
)
from rlinf.models.logprobs import (
    MAX_LOGITS,
    final_softcap,
    head_logprobs,
    mask_tokens,
    override_head,
    plain_head,
    token_logprobs,
    warn_full_logits,
    without_final_softcap,
)
from rlinf.models.packed_attention import (
    PACKABLE_FAMILIES,
    PackedRows,
    check_packable,
    enable_packed_attention,
    pack,
    unpack,
)
from rlinf.models.rotary import length_scaling
from rlinf.registry import LANGUAGE_MODEL, PROMPTS
from rlinf.safetensors_io import StreamedState, save_tensors

log = logging.getLogger("rlinf")
TokenOutputs = tuple[Tensor, Tensor | None, Tensor | None]
"""Log-probabilities, entropies and values."""


class CausalLM(Policy):
    """A causal language model; the steps are the tokens of a response."""

    Config = CausalLMConfig
    requires = frozenset({PROMPTS})
    provides = frozenset({LANGUAGE_MODEL})
    supports_sharded_loading = True

    def __init__(self, module: nn.Module, folder: Path) -> None:
        self.module = module
        self._folder = folder
        self._packing, self._shares_prompts = False, False
        """Whether rows are packed, and whether equal prompts of packed rows are stored once."""
        self._suppressed_token_ids: tuple[int, ...] = ()
        """Ids of tokens that the policy must not generate."""
        self.supports_packing = (
            getattr(getattr(self.network, "config", None), "model_type", "") in PACKABLE_FAMILIES
        )

    @property
    def network(self) -> Any:
        """The language model."""
        return self.module

    @property
    def networks(self) -> list[Any]:
        """The policy's network and, if it is separate, the critic's."""
        return [self.network]

    @classmethod
    def check_spec(cls, config: CausalLMConfig, spec: ModelSpec) -> Any:
        if config.path is not None:
            hf_folder = HFFolder.from_config(config)
            check_checkpoint(hf_folder.folder, config.trust_remote_code)
            check_family(hf_folder)
            check_max_model_len(hf_folder, config)
            check_weight_files(hf_folder.folder)
            check_vocabulary(hf_folder)
            check_checkpoint_tensors(hf_folder.folder)
            check_rotary(hf_folder.folder, config)
            return hf_folder.tokenizer
        if "alphabet" not in spec:
            raise ConfigError(
                "model.path: this task has no alphabet to build a tokenizer from; give the folder "
                "of a checkpoint, or choose a task that fits model.name"
            )
        check_model_sizes(config)
        check_max_model_len(None, config)
        check_template_kwargs(config.chat_template_kwargs, spec.get("chat_template"))
        return None

    @classmethod
    def max_model_len(cls, config: CausalLMConfig) -> int | None:
        if config.path is None:
            return config.max_model_len or config.max_position_embeddings
        return HFFolder.from_config(config).max_model_len(config.max_model_len)

    @classmethod
    def create(cls, config: CausalLMConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            source = config.path.expanduser().resolve()
            copy_non_weight_files(source, folder)
            for path in weight_files(source):
                shutil.copyfile(path, folder / path.name)
            return
        from transformers import AutoModelForCausalLM
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        vocabulary = write_character_tokenizer(
            spec["alphabet"], folder, spec.get("chat_template"), spec.get("special_tokens", ())
        )
        settings = hf_config(config, len(vocabulary))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module: Any = AutoModelForCausalLM.from_config(  # type: ignore[no-untyped-call]
                settings, dtype=torch.float32
            )
        module.to(getattr(torch, config.dtype)).save_pretrained(folder)

    @classmethod
    def processor(cls, folder: Path, config: CausalLMConfig) -> Any:
        return HFFolder.from_config(config, folder).tokenizer

    @classmethod
    def load(cls, folder: Path, config: CausalLMConfig) -> CausalLM:
        return cls(cls.wrap_network(load_module(folder, config), config), folder)

    @classmethod
    def meta_from_config(cls, config: CausalLMConfig) -> CausalLM | None:
        if config.path is None:
            return cls(cls.wrap_network(new_meta_module(config), config), Path())
        folder = config.path.expanduser()
        module = load_meta_module(folder, config)
        return None if module is None else cls(cls.wrap_network(module, config), folder)

    @classmethod
    def wrap_network(cls, network: Any, config: Any) -> nn.Module:
        """Wrap a language model in the module that is trained."""
        module: nn.Module = network
        return module

    @classmethod
    def meta_from_folder(cls, folder: Path, config: CausalLMConfig) -> CausalLM:
        module = load_meta_module(folder, config)
        if module is None:
            log.warning(
                "%s: only transformers can convert the tensors of this checkpoint to those of the "
                "network; each process loads the full model before it is sharded",
                folder,
            )
            return cls.load(folder, config)
        return cls(cls.wrap_network(module, config), folder)

    def load_weights(self, folder: Path | None = None) -> None:
        folder = folder or self._folder
        load_weights(self.network, folder, f"model.path: {folder}")

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        self.save_state(folder, StreamedState.from_tensors(tensors))

    def save_state(self, folder: Path, state: StreamedState) -> None:
        copy_non_weight_files(self._folder, folder)
        if checkpoint_names_differ(self.network):
            state = StreamedState.from_tensors(to_checkpoint_tensors(self.network, state.collect()))
        tied = getattr(self.network, "_tied_weights_keys", None) or {}
        if not getattr(self.network.config, "tie_word_embeddings", False):
            tied = {}
        names = [name for name in state.templates if name not in tied]
        save_tensors(folder / WEIGHTS_FILE, state, names, {"format": "pt"})

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        prompts = [trajectory.require("prompt") for trajectory in trajectories]
        if not all(len(prompt) for prompt in prompts):
            raise DataError("a prompt is empty; training needs at least one prompt token")
        actions = [trajectory.actions for trajectory in trajectories]
        length = max(len(action) for action in actions)
        mask = pad_right([np.ones(len(action), np.float32) for action in actions], length)
        step_columns = {"actions": pad_right(actions, length), "mask": mask}
        if self._packing:
            keys = [self._prompt_key(trajectory) for trajectory in trajectories]
            packed = pack(
                prompts,
                actions,
                length,
                share=self._shares_prompts,
                prompt_keys=keys,
                positions=self._positions(trajectories),
            )
            return {**packed, **step_columns}
        tokens = [
            np.concatenate(pair, dtype=np.int64) for pair in zip(prompts, actions, strict=True)
        ]
        return {
            "tokens": pad_right(tokens, max(len(row) for row in tokens)),
            "prompt_lengths": torch.tensor([len(prompt) for prompt in prompts]),
            **step_columns,
        }

    def _prompt_key(self, trajectory: Trajectory) -> bytes:
        """Return a key of the prompt; equal prompts have equal keys."""
        key: bytes = trajectory.require("prompt").tobytes()
        return key

    def _positions(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray] | None:
        """Return the position ids of each row: ``P`` prompt and ``T`` response tokens without the
        last one, ``[..., P + T - 1]`` (``...``: axes of M-RoPE). None: 0, 1, 2 and so on."""
        return None

    def _extra_inputs(self, batch: Batch) -> dict[str, Any]:
        """Return inputs of the network besides the tokens, such as images."""
        return {}

    def evaluate(self, batch: Batch, temperature: float, *, entropy: bool = False) -> StepOutputs:
        mask = batch["mask"]
        if "step_indices" in batch:  # packed, see pack()
            inputs: dict[str, Any] = {
                "input_ids": batch["tokens"],
                "position_ids": batch["positions"],
                "logits_to_keep": batch["logit_indices"],
            }
            inputs |= self._extra_inputs(batch)
            if (rows := PackedRows.from_batch(batch)) is not None:
                inputs["rows"] = rows
            targets = batch["actions"].flatten()[batch["step_indices"]][None]
            outputs = self._token_outputs(inputs, lambda x: x, targets, temperature, entropy)
            logprobs, entropies, values = (
                None if x is None else unpack(x[0], batch["step_indices"], mask) for x in outputs
            )
        else:
            logprobs, entropies, values = self._evaluate_padded(batch, temperature, entropy)
        assert logprobs is not None
        return StepOutputs(logprobs * mask, entropies, None if values is None else values * mask)

    def _evaluate_padded(self, batch: Batch, temperature: float, entropy: bool) -> TokenOutputs:
        tokens, prompt_lengths = batch["tokens"], batch["prompt_lengths"]
        length = batch["mask"].shape[1]
        # With padding on the right, causal attention needs no mask and uses its fastest path.
        first_kept = int(prompt_lengths.min()) - 1
        num_kept = tokens.shape[1] - 1 - first_kept
        # The token at position p is predicted at p - 1. Rows have different prompt lengths.
        offsets = prompt_lengths[:, None] - 1 - first_kept
        indices = (offsets + torch.arange(length, device=tokens.device)).clamp(max=num_kept - 1)
        has_equal_lengths = int(prompt_lengths.max()) - 1 == first_kept

        def select(features: Tensor) -> Tensor:
            if has_equal_lengths:
                return features
            return features.gather(1, indices[..., None].expand(-1, -1, features.shape[-1]))

        inputs = {
            "input_ids": tokens[:, :-1],
            "logits_to_keep": num_kept,
            **self._extra_inputs(batch),
        }
        return self._token_outputs(inputs, select, batch["actions"], temperature, entropy)

    def _token_outputs(
        self,
        inputs: Mapping[str, Any],
        select: Callable[[Tensor], Tensor],
        actions: Tensor,
        temperature: float,
        entropy: bool,
    ) -> TokenOutputs:
        """Return log-probabilities, entropies and values of tokens ``[B, T]``.

        Args:
            inputs: Arguments of the network, with ``logits_to_keep``.
            select: Selects, from the features at the positions in ``logits_to_keep``, the positions
                at which the tokens are predicted.
        """

        def chunked_logprobs(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            if self._suppressed_token_ids:
                full_bias = weight.new_zeros(len(weight)) if bias is None else bias
                bias = mask_tokens(full_bias, self._suppressed_token_ids)
            out = head_logprobs(
                select(hidden).flatten(0, 1),
                weight,
                actions.flatten(),
                temperature,
                MAX_LOGITS,
                bias=bias,
                softcap=cap,
                entropy=entropy,
            )
            return out.view(*actions.shape, -1)

        head, settings = plain_head(self.network), getattr(self.network, "config", None)
        if settings is not None and hasattr(settings, "get_text_config"):
            settings = settings.get_text_config()
        exceeds_limit = actions.numel() * getattr(settings, "vocab_size", 0) > MAX_LOGITS
        if exceeds_limit and head is None:
            warn_full_logits(getattr(settings, "model_type", ""))
        in_chunks = exceeds_limit and head is not None
        cap = final_softcap(self.network) if in_chunks else None
        with contextlib.ExitStack() as stack:
            if head and in_chunks:
                stack.enter_context(without_final_softcap(self.network))
                stack.enter_context(override_head(head, chunked_logprobs))
            out, values = self._run(inputs)
        if not in_chunks and isinstance(num_kept := inputs["logits_to_keep"], int):
            # Some families return logits of all positions, despite logits_to_keep.
            out = out[:, -num_kept:]
            values = None if values is None else values[:, -num_kept:]
        values = None if values is None else select(values[..., None])[..., 0]
        if in_chunks:
            return out[..., 0], out[..., 1] if entropy else None, values
        logits = mask_tokens(select(out), self._suppressed_token_ids)
        return *token_logprobs(logits, actions, temperature, entropy), values

    def _run(self, inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor | None]:
        """Return logits ``[B, K, V]`` at the positions in ``logits_to_keep`` and, with a critic,
        values ``[B, K]``."""
        return self.module(**inputs, use_cache=False).logits, None

    @classmethod
    def check_packing(cls, config: CausalLMConfig) -> None:
        family = config.architecture
        if config.path is not None:
            family = read_config_json(config.path.expanduser())["model_type"]
        check_packable(family)

    def enable_packing(self, device: torch.device, dtype: torch.dtype) -> None:
        for network in self.networks:
            # The result depends only on device and type, so it is equal for all networks.
            self._shares_prompts = enable_packed_attention(network, device, dtype)
        self._packing = True

    def num_tokens(self, trajectory: Trajectory) -> int:
        return len(trajectory.require("prompt")) + len(trajectory)

    def shared_prefix(self, trajectory: Trajectory) -> tuple[bytes, int]:
        length = len(trajectory.require("prompt"))
        return (self._prompt_key(trajectory), length) if self._shares_prompts else (b"", 0)

    def blocks(self) -> list[nn.Module]:
        return [block for stack in self.block_stacks() for block in stack]

    def block_stacks(self) -> list[list[nn.Module]]:
        names = set(getattr(self.network, "_no_split_modules", None) or ())
        # The class of a sharded module is a subclass of the original one.
        return [
            [
                module
                for module in network.modules()
                if not names.isdisjoint(cls.__name__ for cls in type(module).__mro__)
            ]
            for network in self.networks
        ]


def causal_mask(attend: Tensor, start: int = 0) -> Tensor:
    """Return the mask, bool ``[B, 1, L - start, L]`` (query, key), by which each position attends
    to itself and to earlier valid positions.

    Args:
        attend: Whether a position is valid, bool ``[B, L]``.
        start: First position of the queries.
    """
    keys = torch.arange(attend.shape[1], device=attend.device)
    queries = keys[start:, None]
    # A padded position must see itself; otherwise its softmax is NaN, which would spread.
    return ((attend[:, None, :] & (keys <= queries)) | (keys == queries))[:, None]


def check_family(hf_folder: HFFolder) -> None:
    """Check that ``transformers`` has a causal language model of this type.

    Raises:
        DataError: There is no such class.
    """
    from transformers import AutoModelForCausalLM

    if hf_folder.trust_remote_code and "auto_map" in hf_folder.config_json:
        return
    if type(hf_folder.hf_config) not in AutoModelForCausalLM._model_mapping:
        raise DataError(
            f"model.path: {hf_folder.folder} is a {hf_folder.hf_config.model_type!r} model, which "
            "is no causal language model"
        )
    check_causal(hf_folder.hf_config, f"model.path: {hf_folder.folder}")


def check_max_model_len(hf_folder: HFFolder | None, config: CausalLMConfig) -> None:
    """Check that the model supports ``model.max_model_len`` tokens.

    Raises:
        ConfigError: The model does not, or its remote code chooses rotary frequencies per batch.
    """
    max_length: int | None = config.max_position_embeddings
    if hf_folder is not None:
        scaling, max_length = length_scaling(hf_folder.config_json), hf_folder.context_length
        if scaling is not None:
            max_length = scaling.max_length
            if "auto_map" in hf_folder.config_json and config.trust_remote_code:
                raise ConfigError(
                    f"model.trust_remote_code: the code in {hf_folder.folder} chooses rotary "
                    f"frequencies by the longest row of a call ({scaling.rope_type} in "
                    "config.json), so samples would depend on their neighbours; if transformers "
                    "has this family, remove auto_map from config.json and set this to false"
                )
    limit = config.max_model_len
    if limit is not None and max_length is not None and limit > max_length:
        key = (
            "model.max_position_embeddings"
            if hf_folder is None
            else f"{hf_folder.folder / 'config.json'}"
        )
        raise ConfigError(
            f"model.max_model_len: {config.max_model_len} tokens do not fit into the {max_length} "
            f"positions of the model ({key}); lower it"
        )
