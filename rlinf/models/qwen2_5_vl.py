"""Qwen2.5-VL policies (arXiv 2502.13923): language models with image inputs.

The images of a prompt are in its trajectory (:mod:`rlinf.models.images`), and the prompt has their
image tokens. With sharded weights, either all ranks must call the vision network for a micro-batch,
or none. Therefore either all prompts of a task have images, or none.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from pydantic import Field
from torch import nn

from rlinf.data.batch import pad_right
from rlinf.data.trajectory import Trajectory
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import Batch, ModelSpec
from rlinf.models.causal_lm import CausalLM, check_max_model_len
from rlinf.models.causal_lm_config import CausalLMConfig, check_model_sizes
from rlinf.models.character_tokenizer import write_character_tokenizer
from rlinf.models.checkpoint_tensors import check_checkpoint_tensors
from rlinf.models.hf_folder import (
    HFFolder,
    check_checkpoint,
    check_vocabulary,
    check_weight_files,
    read_config_json,
)
from rlinf.models.images import (
    PIXELS_COLUMN,
    PREPROCESSOR_FILE,
    SIZES_COLUMN,
    ImageProcessor,
    image_sizes,
    unpack_images,
)
from rlinf.models.loading import check_rotary
from rlinf.models.packed_attention import PACKED_ATTENTION, packed_attention
from rlinf.registry import LANGUAGE_MODEL, PROMPTS, VISION

MODEL_TYPE = "qwen2_5_vl"
VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD = (
    "<|vision_start|>",
    "<|vision_end|>",
    "<|image_pad|>",
    "<|video_pad|>",
)


class Qwen25VLConfig(CausalLMConfig):
    """Options of Qwen2.5-VL policies: a checkpoint folder, or the sizes of a new network."""

    vision_hidden: int = Field(default=64, gt=0)
    vision_layers: int = Field(default=2, gt=0)
    vision_heads: int = Field(default=2, gt=0)
    vision_window: int = Field(default=56, gt=0)
    """Side of the attention windows of patches, pixels; the last layer has full attention."""
    patch_size: int = Field(default=14, gt=0)
    """Side of a patch, pixels; a token represents 2 x 2 patches."""


class Qwen25VL(CausalLM):
    """A Qwen2.5-VL policy."""

    Config = Qwen25VLConfig
    requires = frozenset({PROMPTS})
    provides = frozenset({LANGUAGE_MODEL, VISION})

    def __init__(self, module: nn.Module, folder: Path) -> None:
        super().__init__(module, folder)
        self.supports_packing = True
        self._image_processor = self.image_processor(folder)
        self._suppressed_token_ids = self._image_processor.suppressed_token_ids

    @classmethod
    def image_processor(cls, folder: Path) -> ImageProcessor:
        return ImageProcessor.from_folder(folder, read_config_json(folder))

    @classmethod
    def check_spec(cls, config: CausalLMConfig, spec: ModelSpec) -> Any:
        if config.path is None:
            assert isinstance(config, Qwen25VLConfig)
            if config.architecture != "qwen2":
                raise ConfigError("model.architecture: qwen2_5_vl has one of its own; leave it out")
            if config.vision_hidden % (4 * config.vision_heads):
                raise ConfigError(
                    f"model.vision_heads: model.vision_hidden {config.vision_hidden} / "
                    f"{config.vision_heads} heads must be a multiple of 4: rotary positions of two "
                    "axes"
                )
            if config.vision_window % (2 * config.patch_size):
                raise ConfigError(
                    f"model.vision_window: {config.vision_window} is no multiple of two patches of "
                    f"model.patch_size={config.patch_size}"
                )
            check_model_sizes(config)
            return super().check_spec(config, spec)
        folder = config.path.expanduser()
        check_checkpoint(folder, config.trust_remote_code)
        if (kind := read_config_json(folder)["model_type"]) != MODEL_TYPE:
            raise DataError(
                f"model.path: {folder} is a {kind!r} model; model.name=qwen2_5_vl takes folders of "
                f"the type {MODEL_TYPE!r}, model.name=causal_lm those of language models"
            )
        hf_folder = HFFolder.from_config(config)
        check_max_model_len(hf_folder, config)
        check_weight_files(folder)
        check_vocabulary(hf_folder)
        check_checkpoint_tensors(folder)
        check_rotary(folder, config)
        return cls.processor(folder, config)

    @classmethod
    def processor(cls, folder: Path, config: CausalLMConfig) -> Any:
        """Return the tokenizer, with the image processor as its attribute."""
        tokenizer = HFFolder.from_config(config, folder).tokenizer
        tokenizer.image_processor = cls.image_processor(folder)
        return tokenizer

    @classmethod
    def meta_from_config(cls, config: CausalLMConfig) -> CausalLM | None:
        # The image preprocessing of a new model is in a folder that does not exist yet.
        return None if config.path is None else super().meta_from_config(config)

    @classmethod
    def create(cls, config: CausalLMConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        if config.path is not None:
            super().create(config, spec, seed, folder)
            return
        assert isinstance(config, Qwen25VLConfig)
        cls.check_spec(config, spec)
        from transformers import Qwen2_5_VLForConditionalGeneration
        from transformers.utils import logging

        logging.disable_progress_bar()  # type: ignore[no-untyped-call]
        specials = (*spec.get("special_tokens", ()), VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD)
        template = spec.get("chat_template")
        if template is not None:
            # The last special token ends a turn.
            specials = (VISION_START, VISION_END, IMAGE_PAD, VIDEO_PAD, *spec["special_tokens"])
        vocabulary = write_character_tokenizer(spec["alphabet"], folder, template, specials)
        settings = new_hf_config(config, vocabulary)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model_class: Any = Qwen2_5_VLForConditionalGeneration
            module = model_class._from_config(settings, dtype=torch.float32)
        module.to(getattr(torch, config.dtype)).save_pretrained(folder)
        processor = ImageProcessor(0, (), patch_size=config.patch_size)
        values = processor.to_settings()
        (folder / PREPROCESSOR_FILE).write_text(json.dumps(values, indent=1))

    def collate(self, trajectories: Sequence[Trajectory]) -> Batch:
        for trajectory in trajectories:
            if np.isin(trajectory.actions[:-1], self._suppressed_token_ids).any():
                raise DataError(
                    f"trajectory {tuple(trajectory.identity)}: an answer has an image token, "
                    "which engines must not generate"
                )
        batch = super().collate(trajectories)
        if not self._packing:
            rows = [row.T for row in self._positions(trajectories)]
            batch["positions"] = pad_right(rows, batch["tokens"].shape[1] - 1).permute(2, 0, 1)
        seen_prompts, images, sizes = set[bytes](), list[np.ndarray](), list[np.ndarray]()
        for trajectory in trajectories:
            key = self._prompt_key(trajectory)
            if key in seen_prompts and self._shares_prompts:
                continue
            seen_prompts.add(key)
            columns = _image_columns(trajectory)
            images += unpack_images(columns)
            sizes.append(image_sizes(columns))
        if images:
            processor = self._image_processor
            patches = processor.to_patches(images)
            batch["patches"] = torch.from_numpy(patches)
            batch["grids"] = torch.from_numpy(processor.patch_grids(np.concatenate(sizes)))
        return batch

    def _prompt_key(self, trajectory: Trajectory) -> bytes:
        pixels = trajectory.pixels
        sizes = image_sizes(_image_columns(trajectory)).tobytes()
        images = b"" if pixels is None else np.ascontiguousarray(pixels).tobytes()
        return super()._prompt_key(trajectory) + sizes + images

    def _positions(self, trajectories: Sequence[Trajectory]) -> list[np.ndarray]:
        return [
            self._image_processor.rope_positions(
                np.concatenate([trajectory.require("prompt"), trajectory.actions[:-1]]),
                image_sizes(_image_columns(trajectory)),
            )
            for trajectory in trajectories
        ]

    def _extra_inputs(self, batch: Batch) -> dict[str, Any]:
        inputs: dict[str, Any] = {"position_ids": batch["positions"]}
        if "patches" in batch:
            inputs |= {"pixel_values": batch["patches"], "image_grid_thw": batch["grids"]}
        return inputs

    @classmethod
    def check_packing(cls, config: CausalLMConfig) -> None:
        """Do nothing: the family supports packed attention."""

    def enable_packing(self, device: torch.device, dtype: torch.dtype) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(PACKED_ATTENTION, packed_attention)
        # Only for the language model, because attention between patches is bidirectional.
        self.network.model.language_model.set_attn_implementation(PACKED_ATTENTION)
        self._packing = self._shares_prompts = True


def new_hf_config(config: Qwen25VLConfig, vocabulary: dict[str, int]) -> Any:
    """Return the ``transformers`` configuration of a new network."""
    from transformers import Qwen2_5_VLConfig

    num_frequencies = config.hidden // config.heads // 2
    num_spatial = 3 * num_frequencies // 8
    return Qwen2_5_VLConfig(
        text_config={
            "vocab_size": len(vocabulary),
            "hidden_size": config.hidden,
            "num_hidden_layers": config.layers,
            "num_attention_heads": config.heads,
            "num_key_value_heads": config.kv_heads,
            "intermediate_size": config.intermediate,
            "max_position_embeddings": config.max_position_embeddings,
            # Frequencies of time, height and width, in the ratio 2 : 3 : 3 of published models.
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "mrope_section": [num_frequencies - 2 * num_spatial, num_spatial, num_spatial],
            },
            "pad_token_id": 0,
            "eos_token_id": 1,
            "bos_token_id": None,
        },
        vision_config={
            "depth": config.vision_layers,
            "hidden_size": config.vision_hidden,
            "num_heads": config.vision_heads,
            "intermediate_size": 2 * config.vision_hidden,
            "out_hidden_size": config.hidden,
            "patch_size": config.patch_size,
            "window_size": config.vision_window,
            "fullatt_block_indexes": [config.vision_layers - 1],
        },
        image_token_id=vocabulary[IMAGE_PAD],
        video_token_id=vocabulary[VIDEO_PAD],
        vision_start_token_id=vocabulary[VISION_START],
        vision_end_token_id=vocabulary[VISION_END],
        tie_word_embeddings=True,
    )


def _image_columns(trajectory: Trajectory) -> dict[str, np.ndarray]:
    """Return the columns of :mod:`rlinf.models.images`; none if the prompt has no images."""
    if trajectory.image_sizes is None:
        return {}
    return {PIXELS_COLUMN: trajectory.require("pixels"), SIZES_COLUMN: trajectory.image_sizes}
