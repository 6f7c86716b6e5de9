"""Batched decoding on ``transformers`` models, written for small models and CPUs.

What makes it quick: a prompt is run once and its keys and values are shared by all samples of its
group; keys and values live in buffers allocated once; a token's log-probability comes from the
forward pass that sampled it; and what :mod:`rlinf.engines.continuous_batching` does.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field
from torch import Tensor

from rlinf.capabilities import IMAGE_INPUTS, LANGUAGE_MODEL
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.device_memory import OffloadableTensors, move_to_device
from rlinf.engines.base import NO_HOOKS, Engine, RequestReceiver, RolloutHooks
from rlinf.engines.continuous_batching import ContinuousBatching, PromptImages
from rlinf.engines.fused_decoding import FusedDecodeStep, use_decode_attention
from rlinf.engines.kv_cache import (
    EqualLengthCache,
    EqualLengthNetwork,
    KeyValueCache,
    supports_padding,
)
from rlinf.models.base import Policy, copy_weights
from rlinf.models.causal_lm import CausalLMConfig, causal_mask
from rlinf.models.device import DeviceName, local_device
from rlinf.models.hf_folder import HFFolder
from rlinf.models.images import (
    PIXELS_COLUMN,
    SIZES_COLUMN,
    ImageProcessor,
    image_sizes,
    unpack_images,
)
from rlinf.models.loading import load_module, reload_weights
from rlinf.models.logprobs import mask_tokens


class TransformersConfig(Section):
    """Decoding on the model's own ``transformers`` classes."""

    max_num_seqs: int = Field(default=256, gt=0)
    """Most samples decoded at once."""
    threads: int = Field(default=1, gt=0)
    """Torch threads while generating; more than one slows small models down."""
    python: str | None = None
    """The interpreter of the stages that compute with it; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights it generates with, and of what is sent to it; null: that of the model. The
    trainer keeps its own, and inference evaluates that."""
    ignore_eos: bool = False
    """Decode to the horizon whatever is sampled (for benchmarks)."""


class TransformersEngine(OffloadableTensors, Engine):
    """See the module."""

    Config = TransformersConfig
    requires = frozenset({LANGUAGE_MODEL})
    provides = frozenset({IMAGE_INPUTS})

    def __init__(self, config: TransformersConfig, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy: type[Policy] = policy
        self._policy_config: CausalLMConfig = policy_config
        self._images: ImageProcessor | None = None
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self._module: Any = None
        self._step: FusedDecodeStep | None = None
        self._cohorts: EqualLengthNetwork | None = None

    @classmethod
    def weight_dtype(cls, config: TransformersConfig) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def max_batch(cls, config: TransformersConfig) -> int:
        return config.max_num_seqs

    def load(self, folder: Path, version: int) -> None:
        if self._module is None or not reload_weights(self._module, folder):
            self._module = self._step = self._cohorts = None  # the old one leaves the memory first
            module = load_module(folder, self._policy_config).eval()
            self._module = move_to_device(module, self.device)
            if supports_padding(module.config):
                self._step = FusedDecodeStep.from_module(self._module)
                use_decode_attention(self._module)
            else:
                self._cohorts = EqualLengthNetwork(self._module)
        self._images = self._policy.image_processor(folder)
        published = HFFolder.from_config(self._policy_config, folder)
        self._chat_format = published.chat_format
        known = () if self._config.ignore_eos else sorted(published.stop_token_ids)
        self.stop_token_ids = torch.tensor(known, dtype=torch.int64, device=self.device)
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        copy_weights(self._module, tensors)
        self.version = version

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._module is None:
            return {}
        # Keys and values are cached only while a request is answered.
        return {"weights": [*self._module.state_dict().values()]}

    def close(self) -> None:
        self.drop_host_copies()
        self._module = self._step = self._cohorts = None
        self.version = -1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        return ContinuousBatching(
            self, requests, seed, stage, hooks, self._config.max_num_seqs
        ).iter_replies()

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, in which stop strings are looked for."""
        return self._chat_format.decode(tokens)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """The ids of those stop strings that are special tokens, which no decoded text shows."""
        return self._chat_format.stop_ids(texts)

    def prefill(
        self,
        contexts: Sequence[np.ndarray],
        free_columns: int,
        images: Sequence[PromptImages | None] = (),
    ) -> tuple[Tensor, KeyValueCache | EqualLengthCache, Tensor]:
        """Run each distinct context once, left-padded, then give every row its copy.

        Families that padding would disturb are run in cohorts (:mod:`rlinf.engines.kv_cache`).

        Args:
            contexts: token ids of each row.
            room: free columns of the cache.
            images: of each row, where there are some.

        Returns:
            Logits ``[B, V]`` of the next tokens, the cache, and which of its columns each row
            attends to: bool ``[B, length + room]``.
        """
        if self._step is not None and not self._step.is_valid:
            self._step = None
        lengths = np.array([len(context) for context in contexts])
        width = int(lengths.max())
        if self._cohorts is not None:
            first, cohorts = self._cohorts.prefill(contexts, self.device)
            begins = torch.from_numpy(width - lengths).to(self.device)[:, None]
            columns = torch.arange(width + free_columns, device=self.device)
            return first, cohorts, (columns >= begins) & (columns < width)
        # The length is part of a context: 0, which fills it up, is also an ordinary token.
        # So are its images, told by the first row that has them.
        whole = np.zeros((len(contexts), 2 + width), dtype=np.int64)
        known: dict[bytes, int] = {}
        for i, (line, context) in enumerate(zip(whole, contexts, strict=True)):
            line[0], line[2 : 2 + len(context)] = len(context), context
            if images and (own := images[i]) is not None:
                line[1] = known.setdefault(
                    own[SIZES_COLUMN].tobytes() + own[PIXELS_COLUMN].tobytes(), i
                )
        distinct, inverse = np.unique(whole, axis=0, return_inverse=True)
        sizes = distinct[:, 0]
        tokens = np.zeros((len(distinct), width), dtype=np.int64)
        for row, prompt, count in zip(tokens, distinct[:, 2:], sizes.tolist(), strict=True):
            row[width - count :] = prompt[:count]
        column = torch.arange(width, device=self.device)
        size = torch.from_numpy(sizes).to(self.device)
        seen = column >= (width - size)[:, None]
        positions = (column - (width - size)[:, None]).clamp(min=0)
        cache = KeyValueCache(width + free_columns)
        if self._images is not None:
            shown = [images[number] if images else None for number in distinct[:, 1].tolist()]
            positions, further = self._see(distinct[:, 2:], sizes, shown, width)
        else:
            further = {}
        logits = self.forward(
            torch.from_numpy(tokens).to(self.device), positions, causal_mask(seen), cache, further
        )
        rows = torch.from_numpy(inverse.ravel()).to(self.device)
        cache.select(rows)
        attend = torch.zeros(len(rows), width + free_columns, dtype=torch.bool, device=self.device)
        attend[:, :width] = seen[rows]
        return logits[rows], cache, attend

    def _see(
        self,
        contexts: np.ndarray,
        lengths: np.ndarray,
        shown: Sequence[PromptImages | None],
        width: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Positions ``[3, n, width]`` of contexts on the left, and their patches.

        Args:
            contexts: ``[n, width]``, from the left.
            shown: the images of each.
        """
        settings = self._images
        assert settings is not None
        positions = np.zeros((3, len(contexts), width), np.int64)
        pictures, sizes = list[np.ndarray](), list[np.ndarray]()
        for i, (context, count) in enumerate(zip(contexts, lengths.tolist(), strict=True)):
            own = shown[i] or {}
            sizes.append(image_sizes(own))
            pictures += unpack_images(own)
            positions[:, i, width - count :] = settings.rope_positions(context[:count], sizes[-1])
        further: dict[str, Tensor] = {}
        if pictures:
            patches = np.concatenate([settings.to_patches(image) for image in pictures])
            further["pixel_values"] = torch.from_numpy(patches).to(self.device)
            grids = torch.from_numpy(settings.patch_grids(np.concatenate(sizes)))
            further["image_grid_thw"] = grids.to(self.device)
        return torch.from_numpy(positions).to(self.device), further

    def rope_shift(self, images: Sequence[PromptImages | None]) -> Tensor:
        """What the images of each row add to the rotary positions behind them, int64 ``[B]``."""
        shifts = [
            0 if own is None or self._images is None else self._images.rope_shift(image_sizes(own))
            for own in images
        ]
        return torch.tensor(shifts, dtype=torch.int64, device=self.device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: KeyValueCache | EqualLengthCache,
        extra_inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Logits ``[B, V]`` float32 after the last of ``tokens`` ``[B, n]``, which join the cache.

        Args:
            positions: of the tokens in their samples, ``[B, n]``, or of models that read images
                ``[3, B, n]``.
            further: what the network takes beside them.
            mask: as the model takes it; None: every row attends to all columns.
        """
        if isinstance(cache, EqualLengthCache):
            assert self._cohorts is not None
            return self._cohorts.step(tokens, cache)
        if self._step is not None and tokens.shape[1] == 1 and len(cache):
            logits = self._step(tokens, positions, mask, cache)
            cache.advance(1)
            return logits.float()
        if mask is None:
            mask = torch.ones(1, 1, 1, cache.length + 1, dtype=torch.bool, device=self.device)
        output = self._module(
            input_ids=tokens,
            position_ids=positions,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
            **extra_inputs,
        )
        cache.advance(tokens.shape[1])
        logits = output.logits[:, -1].float()
        return (
            logits
            if self._images is None
            else mask_tokens(logits, self._images.ungenerated_token_ids)
        )
