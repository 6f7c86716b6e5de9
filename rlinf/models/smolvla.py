"""SmolVLA policies (arXiv 2506.01844): flow matching of action chunks from images and instruction.

Actions attend only to earlier actions of their chunk. Actions that are not executed are therefore
not computed. The folder has LeRobot's format (:mod:`rlinf.models.smolvla_folder`).
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.errors import DataError
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import (
    DEFAULT_ALPHABET,
    read_tokenizer,
    write_character_tokenizer,
)
from rlinf.models.flow_vla import (
    HEADS_FILE,
    FlowVLAPolicy,
    check_spec_kinds,
    check_tokenizer_size,
    load_network,
    write_weights,
)
from rlinf.models.hf_folder import WEIGHTS_FILE, check_weight_files, copy_non_weight_files
from rlinf.models.lerobot_folder import (
    VLM_FOLDER,
    action_normalizer,
    copy_processors,
    locate_vlm,
    new_statistics,
    read_statistics,
    read_vlm_config,
    replace_statistics,
    state_normalizer,
)
from rlinf.models.smolvla_folder import (
    VLM_TYPES,
    SmolVLAConfig,
    SmolVLAFolder,
    check_smolvla_task,
    new_policy_config,
    new_vlm_config,
    read_policy_config,
    write_smolvla_processors,
)
from rlinf.models.smolvla_network import SmolVLANetwork
from rlinf.models.vla_base import InstructionTokenizer
from rlinf.verified_io import read_text

LM_HEAD = "model.vlm_with_expert.vlm.lm_head.weight"
TOKEN_EMBEDDINGS = "model.vlm_with_expert.vlm.model.text_model.embed_tokens.weight"
"""Tensor names of two weights that may be tied."""


class SmolVLAPolicy(FlowVLAPolicy):
    """A SmolVLA policy."""

    Config = SmolVLAConfig
    folder_class = SmolVLAFolder
    vlm_parameters = re.compile(r"model\.vlm_with_expert\.vlm\.")
    module: SmolVLANetwork

    def __init__(
        self,
        module: SmolVLANetwork,
        folder: Path,
        config: SmolVLAConfig,
        settings: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        max_length = int(settings["tokenizer_max_length"])

        def tokenize(text: str) -> list[int]:
            text = text if text.endswith("\n") else text + "\n"
            return list(tokenizer.encode(text).ids)[:max_length]

        vision: Any = module.model.vlm_with_expert.vlm.model.vision_model
        super().__init__(
            module,
            folder,
            config,
            settings,
            num_steps=int(settings["num_steps"]),
            num_denoised=int(settings["n_action_steps"]),
            image_tokens=(module.image_size[0] // vision.patch_size) ** 2,
            tokenizer=InstructionTokenizer(tokenize, pad_left=False),
        )

    @classmethod
    def check_spec(cls, config: SmolVLAConfig, spec: ModelSpec) -> Any:
        check_spec_kinds("smolvla", spec)
        if config.path is None:
            settings = new_policy_config(config, spec)
            side = settings["resize_imgs_with_padding"][0]
            vlm_settings = new_vlm_config(config, side, vocabulary_size=2)
        else:
            source = config.path.expanduser()
            settings = read_policy_config(source)
            located = locate_vlm(source, settings, config.vlm_path)
            vlm_settings = read_vlm_config(*located, VLM_TYPES)
            check_weight_files(source)
            if not (source / WEIGHTS_FILE).is_file():
                raise DataError(
                    f"model.path: {source} has no {WEIGHTS_FILE}; copy the folder again"
                )
        check_smolvla_task(settings, vlm_settings, config, spec)
        if config.norm_stats is not None:
            read_statistics(config.norm_stats, settings)
        elif config.path is not None:
            state_normalizer(source, settings)
            action_normalizer(source, settings)

    @classmethod
    def create(cls, config: SmolVLAConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            return cls._copy(config, folder)
        settings = new_policy_config(config, spec)
        (folder / VLM_FOLDER).mkdir()
        vocabulary = write_character_tokenizer(DEFAULT_ALPHABET + "\n", folder / VLM_FOLDER)
        side = settings["resize_imgs_with_padding"][0]
        vlm_settings = new_vlm_config(config, side, len(vocabulary))
        (folder / VLM_FOLDER / "config.json").write_text(json.dumps(vlm_settings, indent=1))
        (folder / "config.json").write_text(json.dumps(settings, indent=1))
        statistics = new_statistics(settings, spec)
        if config.norm_stats is not None:
            statistics = read_statistics(config.norm_stats, settings)
        write_smolvla_processors(folder, settings, statistics)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _create_network(settings, vlm_settings, config)
        write_weights(folder, module.state_dict())

    @classmethod
    def _copy(cls, config: SmolVLAConfig, folder: Path) -> None:
        assert config.path is not None
        source = config.path.expanduser().resolve()
        copy_processors(source, folder)
        for name in (WEIGHTS_FILE, HEADS_FILE):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        stored = json.loads(read_text(source / "config.json"))
        settings = read_policy_config(source)
        vlm_folder, _ = locate_vlm(source, settings, config.vlm_path)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(vlm_folder.resolve(), folder / VLM_FOLDER)
        # Training updates token embeddings and output head separately, so they must not be tied.
        vlm_settings = json.loads(read_text(folder / VLM_FOLDER / "config.json")) | {
            "tie_word_embeddings": False
        }
        vlm_settings["text_config"] |= {"tie_word_embeddings": False}
        (folder / VLM_FOLDER / "config.json").write_text(json.dumps(vlm_settings, indent=1))
        changes = {"num_steps": config.denoising_steps, "n_action_steps": config.chunk_size}
        stored |= {name: value for name, value in changes.items() if value is not None}
        (folder / "config.json").write_text(json.dumps(stored, indent=1))
        if config.norm_stats is not None:
            replace_statistics(folder, read_statistics(config.norm_stats, settings))

    @classmethod
    def load(cls, folder: Path, config: SmolVLAConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_policy_config(folder)
        vlm_settings = read_vlm_config(*locate_vlm(folder, settings, None), VLM_TYPES)
        module, tensors = load_network(
            folder,
            lambda: _create_network(settings, vlm_settings, config),
            _with_tied_tensors,
            assign=False,
        )
        tokenizer = read_tokenizer(folder / VLM_FOLDER)
        check_tokenizer_size(folder, tokenizer, len(tensors[TOKEN_EMBEDDINGS]))
        return cls(module, folder, config, settings, tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        super().save(folder, tensors)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(self._folder / VLM_FOLDER, folder / VLM_FOLDER)

    def blocks(self) -> list[nn.Module]:
        models: Any = self.module.model.vlm_with_expert
        vlm, expert = models.vlm.model, models.lm_expert
        return [*vlm.vision_model.encoder.layers, *vlm.text_model.layers, *expert["layers"]]


def _with_tied_tensors(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Add the other one of two tied weights, of which only one is stored."""
    for name, other in ((LM_HEAD, TOKEN_EMBEDDINGS), (TOKEN_EMBEDDINGS, LM_HEAD)):
        if other in tensors:
            tensors.setdefault(name, tensors[other])
    return tensors


def _create_network(
    settings: Mapping[str, Any], vlm_settings: Mapping[str, Any], config: SmolVLAConfig
) -> SmolVLANetwork:
    learned = config.noise_method == "learned"
    return SmolVLANetwork(
        settings, vlm_settings, learned_noise=learned, value_level=config.value_level
    )
