"""The engine that decodes with ``transformers`` models, made for small models.

Each distinct prompt is computed once; its keys and values are copied to all samples of the prompt.
The KV cache is allocated once. Log-probabilities come from the forward pass that samples the token.
:mod:`rlinf.engines.continuous_batching` schedules the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import torch
from pydantic import Field, model_validator
from torch import Tensor

from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.device_memory import OffloadableTensors, move_to_device, use_device
from rlinf.engines.base import NO_HOOKS, Engine, RequestReceiver, RolloutHooks, TokenScores
from rlinf.engines.cache_limit import CacheLimit, kv_bytes_per_token, measure_cache_limit
from rlinf.engines.continuous_batching import (
    BatchLimits,
    Cache,
    ContinuousBatching,
    Prefill,
    PromptImages,
    chunk_columns,
)
from rlinf.engines.cuda_graph_decoding import GraphedDecodeStep
from rlinf.engines.fused_decoding import FusedDecodeStep, use_decode_attention
from rlinf.engines.kv_cache import (
    EqualLengthCache,
    EqualLengthNetwork,
    KeyValueCache,
    supports_padding,
)
from rlinf.errors import DataError
from rlinf.models.base import DeviceName, Policy, copy_weights, local_device
from rlinf.models.causal_lm import causal_mask
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.models.hf_folder import HFFolder
from rlinf.models.images import (
    PIXELS_COLUMN,
    SIZES_COLUMN,
    ImageProcessor,
    image_sizes,
    unpack_images,
)
from rlinf.models.loading import load_module, reload_weights
from rlinf.models.logprobs import (
    final_softcap,
    mask_tokens,
    override_head,
    plain_head,
    top_logprobs,
    top_of_logits,
    without_final_softcap,
)
from rlinf.registry import IMAGE_INPUTS, LANGUAGE_MODEL

log = logging.getLogger(__name__)
MAX_SCORED_TOKENS = 8192
"""Largest number of tokens, padding included, whose log-probabilities are computed together; more
only if a single text has more."""


class TransformersConfig(Section):
    """Options of the engine that decodes with ``transformers`` classes."""

    max_num_seqs: int = Field(default=256, gt=0)
    """Largest number of samples that are decoded at the same time."""
    max_num_batched_tokens: int = Field(default=8192, gt=0)
    """Largest number of prompt tokens, padding included, that are computed together; at least
    ``max_num_seqs``. Longer prompts are computed in chunks, and running samples get a token between
    two chunks. Prompts with images, and those of architectures that do not support padding, are
    not divided."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Largest size of the KV cache, GiB; null: 40 % of the free memory of the GPU, or of the job's
    memory on this node, divided by its processes, on a CPU. Fewer than ``max_num_seqs`` samples are
    decoded at the same time if the longest possible responses of more would not fit."""
    threads: int = Field(default=1, gt=0)
    """Torch threads during generation; more than one slows down small models."""
    python: str | None = None
    """Python interpreter of the stages that use the engine; see :mod:`rlinf.interpreters`."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights for generation and weight sync; null: ``bfloat16`` for a checkpoint
    (``model.path``) on a GPU, else ``model.dtype``. The trainer and the inference stage do not use
    it."""
    cuda_graphs: bool = True
    """On a GPU, replay the decoding step as a CUDA graph; for the architectures ``llama``,
    ``qwen2`` and ``qwen3``. It needs memory for one more step."""
    ignore_eos: bool = False
    """Ignore stop tokens and decode to the horizon (for benchmarks)."""

    @model_validator(mode="after")
    def _check(self) -> TransformersConfig:
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens={self.max_num_batched_tokens} is less than one token for "
                f"each of max_num_seqs={self.max_num_seqs} samples; raise it or lower max_num_seqs"
            )
        return self


class TransformersEngine(OffloadableTensors, Engine):
    """An engine that generates with ``transformers`` models in the stage's process."""

    Config = TransformersConfig
    requires = frozenset({LANGUAGE_MODEL})
    provides = frozenset({IMAGE_INPUTS})

    def __init__(self, config: TransformersConfig, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy: type[Policy] = policy
        self._policy_config: CausalLMConfig = policy_config
        self._image_processor: ImageProcessor | None = None
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self.compute_dtype = self._policy_config.dtype
        self._module: Any = None
        self._fused_step: FusedDecodeStep | None = None
        self._graphed_step: GraphedDecodeStep | None = None
        """The CUDA graph of the current generation, if there is one."""
        self._equal_length: EqualLengthNetwork | None = None
        """The network of a family that does not support padding; else None."""
        self._has_logged_limits = False

    @classmethod
    def weight_dtype(cls, config: TransformersConfig) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def max_batch(cls, config: TransformersConfig) -> int:
        return config.max_num_seqs

    def load(self, folder: Path, version: int) -> None:
        if self._module is None or not reload_weights(self._module, folder):
            # Free the old weights first.
            self._module = self._fused_step = self._equal_length = None
            module = load_module(folder, self._policy_config).eval()
            self._module = move_to_device(module, self.device)
            if supports_padding(module.config):
                self._fused_step = FusedDecodeStep.from_module(self._module)
                use_decode_attention(self._module)
            else:
                self._equal_length = EqualLengthNetwork(self._module)
        self._image_processor = self._policy.image_processor(folder)
        hf_folder = HFFolder.from_config(self._policy_config, folder)
        self._chat_format = hf_folder.chat_format
        stops = () if self._config.ignore_eos else sorted(hf_folder.stop_token_ids)
        self.stop_token_ids = torch.tensor(stops, dtype=torch.int64, device=self.device)
        self.version = version

    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        self.version = -1
        copy_weights(self._module, tensors)
        self.version = version

    def tensor_groups(self) -> dict[str, list[Tensor]]:
        if self._module is None:
            return {}
        # The KV cache exists only while requests are answered.
        return {"weights": [*self._module.state_dict().values()]}

    def close(self) -> None:
        self.drop_host_copies()
        self._module = self._fused_step = self._equal_length = None
        self.version = -1
        if self.device.type == "cuda":
            torch.cuda.empty_cache()

    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        torch.set_num_threads(self._config.threads)
        use_device(self.device)
        # Between generations, the weights may move to other addresses.
        uses_graph = self.device.type == "cuda" and self._config.cuda_graphs
        self._graphed_step = GraphedDecodeStep() if uses_graph else None
        try:
            yield from ContinuousBatching(
                self, requests, seed, stage, hooks, self._measure_limits()
            ).iter_replies()
        finally:
            self._graphed_step = None

    @property
    def max_model_len(self) -> int | None:
        return None if self._module is None else self._measure_cache_limit().tokens

    def _measure_cache_limit(self) -> CacheLimit:
        text_config = self._module.config.get_text_config()
        bytes_per_token = kv_bytes_per_token(text_config, self._module.dtype)
        return measure_cache_limit(self.device, bytes_per_token, self._config.kv_cache_gib)

    def _measure_limits(self) -> BatchLimits:
        """Return the limits of a generation, and log them once."""
        config, cache = self._config, self._measure_cache_limit()
        if not self._has_logged_limits:
            self._has_logged_limits = True
            context = self.required_context
            fits = f", {cache.tokens // context} samples of {context} tokens" if context else ""
            log.info("KV cache: %s%s; engine.max_num_seqs is %d", cache, fits, config.max_num_seqs)
        return BatchLimits(config.max_num_seqs, config.max_num_batched_tokens, cache)

    @torch.inference_mode()
    def score_tokens(
        self, texts: Sequence[np.ndarray], temperature: float, num_top: int
    ) -> list[TokenScores]:
        if self._image_processor is not None:
            raise DataError("texts are not scored with models of images; use one without images")
        torch.set_num_threads(self._config.threads)
        use_device(self.device)
        scores = list[TokenScores]()
        for batch in self._score_batches(texts):
            scores += self._score_batch(batch, temperature, num_top)
        return scores

    def _score_batches(self, texts: Sequence[np.ndarray]) -> Iterator[list[np.ndarray]]:
        """Divide texts into batches that are padded to at most :data:`MAX_SCORED_TOKENS`."""
        # Families that do not support padding need rows of equal length.
        max_rows = self._config.max_num_seqs if self._equal_length is None else 1
        batch = list[np.ndarray]()
        for text in texts:
            width = max(len(text), *map(len, batch)) if batch else len(text)
            if batch and (len(batch) == max_rows or width * (len(batch) + 1) > MAX_SCORED_TOKENS):
                yield batch
                batch = []
            batch.append(text)
        if batch:
            yield batch

    def _score_batch(
        self, texts: Sequence[np.ndarray], temperature: float, num_top: int
    ) -> list[TokenScores]:
        width = max(map(len, texts))
        if width == 1:
            empty = np.zeros((0, num_top), np.int64)
            no_scores = TokenScores(np.zeros(0, np.float32), empty, empty.astype(np.float32))
            return [no_scores] * len(texts)
        padded = np.zeros((len(texts), width), np.int64)
        for row, text in zip(padded, texts, strict=True):
            row[: len(text)] = text
        tokens = torch.from_numpy(padded).to(self.device)
        targets = tokens[:, 1:].reshape(-1)
        inputs: dict[str, Any] = {"input_ids": tokens, "use_cache": False}
        if self._equal_length is None:
            # With padding on the right, earlier positions do not see it.
            inputs["attention_mask"] = causal_mask(torch.ones_like(tokens, dtype=torch.bool))
            inputs["position_ids"] = torch.arange(width, device=self.device)[None]
        head, module = plain_head(self._module), self._module

        def compute(hidden: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
            features = hidden[:, : width - 1].reshape(-1, hidden.shape[-1])
            return top_logprobs(
                features, weight, targets, temperature, num_top, bias=bias, softcap=cap
            )

        if head is None:
            logits = module(**inputs).logits[:, : width - 1]
            flat = top_of_logits(logits.flatten(0, 1), targets, temperature, num_top)
        else:
            cap = final_softcap(module)
            with without_final_softcap(module), override_head(head, compute):
                flat = module(**inputs).logits
        columns = flat.view(len(texts), width - 1, -1).cpu().numpy()
        return [
            TokenScores(
                row[: len(text) - 1, 0].astype(np.float32),
                row[: len(text) - 1, 1 : 1 + num_top].astype(np.int64),
                row[: len(text) - 1, 1 + num_top :].astype(np.float32),
            )
            for row, text in zip(columns, texts, strict=True)
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the decoded tokens: the text in which stop strings are searched."""
        return self._chat_format.decode(tokens)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of stop strings that are special tokens, which decoded text lacks."""
        return self._chat_format.stop_ids(texts)

    def prefill(
        self,
        contexts: Sequence[np.ndarray],
        free_columns: int,
        images: Sequence[PromptImages | None] = (),
    ) -> Prefill:
        """Compute each distinct context once, left-padded, and copy the cache to its rows.

        Yields between two chunks of ``max_num_batched_tokens``. Families that do not support
        padding use groups of equal length (:mod:`rlinf.engines.kv_cache`), and no chunks.

        Args:
            contexts: Token ids of each row.
            free_columns: Number of free columns of the cache, for further tokens.
            images: Images of each row, if there are any.

        Returns:
            Logits ``[B, V]`` of the next tokens, the cache, and a mask bool
            ``[B, length + free_columns]`` of the columns that each row attends to.
        """
        if self._fused_step is not None and not self._fused_step.is_valid:
            self._fused_step = None
        lengths = np.array([len(context) for context in contexts])
        width = int(lengths.max())
        if self._equal_length is not None:
            next_logits, equal_cache = self._equal_length.prefill(contexts, self.device)
            first_columns = torch.from_numpy(width - lengths).to(self.device)[:, None]
            columns = torch.arange(width + free_columns, device=self.device)
            return next_logits, equal_cache, (columns >= first_columns) & (columns < width)
        # A key is the length (because the padding 0 is also an ordinary token), the index of the
        # first row with the same images, and the tokens.
        keys = np.zeros((len(contexts), 2 + width), dtype=np.int64)
        first_rows: dict[bytes, int] = {}
        for i, (key, context) in enumerate(zip(keys, contexts, strict=True)):
            key[0], key[2 : 2 + len(context)] = len(context), context
            if images and (row_images := images[i]) is not None:
                content = row_images[SIZES_COLUMN].tobytes() + row_images[PIXELS_COLUMN].tobytes()
                key[1] = first_rows.setdefault(content, i)
        distinct, inverse = np.unique(keys, axis=0, return_inverse=True)
        counts = distinct[:, 0]
        tokens = np.zeros((len(distinct), width), dtype=np.int64)
        for row, context, count in zip(tokens, distinct[:, 2:], counts.tolist(), strict=True):
            row[width - count :] = context[:count]
        columns = torch.arange(width, device=self.device)
        first_columns = torch.from_numpy(width - counts).to(self.device)[:, None]
        valid = columns >= first_columns
        positions = (columns - first_columns).clamp(min=0)
        cache = KeyValueCache(width + free_columns)
        if self._image_processor is not None:
            distinct_images = [images[row] if images else None for row in distinct[:, 1].tolist()]
            positions, extra = self._image_inputs(distinct[:, 2:], counts, distinct_images, width)
        else:
            extra = {}
        step = chunk_columns(len(tokens), self._config.max_num_batched_tokens)
        if extra:
            step = width  # the network needs all tokens of its images in one call
        device_tokens = torch.from_numpy(tokens).to(self.device)
        for start in range(0, width, step):
            if start:
                yield
            stop = min(start + step, width)
            mask = causal_mask(valid[:, :stop], start)
            chunk = device_tokens[:, start:stop], positions[..., start:stop]
            logits = self.forward(*chunk, mask, cache, extra)
        rows = torch.from_numpy(inverse.ravel()).to(self.device)
        cache.select(rows)
        attend = torch.zeros(len(rows), width + free_columns, dtype=torch.bool, device=self.device)
        attend[:, :width] = valid[rows]
        return logits[rows], cache, attend

    def _image_inputs(
        self,
        contexts: np.ndarray,
        lengths: np.ndarray,
        images: Sequence[PromptImages | None],
        width: int,
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Return rotary positions ``[3, n, width]`` of left-padded contexts and the image patches.

        Args:
            contexts: Token ids ``[n, width]``, padded on the right.
            images: Images of each context.
        """
        processor = self._image_processor
        assert processor is not None
        positions = np.zeros((3, len(contexts), width), np.int64)
        arrays, sizes = list[np.ndarray](), list[np.ndarray]()
        for i, (context, count) in enumerate(zip(contexts, lengths.tolist(), strict=True)):
            row_images = images[i] or {}
            sizes.append(image_sizes(row_images))
            arrays += unpack_images(row_images)
            positions[:, i, width - count :] = processor.rope_positions(context[:count], sizes[-1])
        extra_inputs: dict[str, Tensor] = {}
        if arrays:
            patches = processor.to_patches(arrays)
            extra_inputs["pixel_values"] = torch.from_numpy(patches).to(self.device)
            grids = torch.from_numpy(processor.patch_grids(np.concatenate(sizes)))
            extra_inputs["image_grid_thw"] = grids.to(self.device)
        return torch.from_numpy(positions).to(self.device), extra_inputs

    def rope_shift(self, images: Sequence[PromptImages | None]) -> Tensor:
        """Return the offset of rotary positions after the images of each row, int64 ``[B]``."""
        processor = self._image_processor
        shifts = [
            0 if item is None or processor is None else processor.rope_shift(image_sizes(item))
            for item in images
        ]
        return torch.tensor(shifts, dtype=torch.int64, device=self.device)

    def forward(
        self,
        tokens: Tensor,
        positions: Tensor,
        mask: Tensor | None,
        cache: Cache,
        extra_inputs: Mapping[str, Tensor] = MappingProxyType({}),
    ) -> Tensor:
        """Add ``tokens`` to the cache and return the logits ``[B, V]`` float32 after the last one.

        Args:
            tokens: ``[B, n]``.
            positions: Positions of the tokens, ``[B, n]``, or ``[3, B, n]`` for models with images.
            mask: The attention mask of the model; None: each row attends to all columns.
            extra_inputs: Further inputs of the network.
        """
        if isinstance(cache, EqualLengthCache):
            assert self._equal_length is not None
            return self._equal_length.step(tokens, cache)
        if self._fused_step is not None and tokens.shape[1] == 1 and len(cache):
            if self._graphed_step is not None:
                logits = self._graphed_step(self._fused_step, tokens, positions, mask, cache)
            else:
                logits = self._fused_step(tokens, positions, mask, cache)
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
            if self._image_processor is None
            else mask_tokens(logits, self._image_processor.suppressed_token_ids)
        )
