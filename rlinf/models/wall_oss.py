"""WALL-OSS policies (arXiv 2509.11766): flow matching of action chunks by a Qwen2.5-VL.

All actions of a chunk attend to each other, so the whole chunk is denoised. The first
``n_action_steps`` actions are executed, and only they have a log-probability
(:mod:`rlinf.models.flow_vla`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from tokenizers import Tokenizer
from torch import Tensor, nn

from rlinf.data.lerobot import ACTION_FEATURE, STATE_FEATURE
from rlinf.models.base import ModelSpec
from rlinf.models.character_tokenizer import DEFAULT_ALPHABET, write_character_tokenizer
from rlinf.models.checkpoint_tensors import check_tensors, stored_shapes
from rlinf.models.flow_vla import (
    ADDED_HEADS,
    FlowVLAPolicy,
    check_spec_kinds,
    check_tokenizer_size,
    load_network,
    read_stored_tensors,
    write_weights,
)
from rlinf.models.hf_folder import (
    check_checkpoint,
    check_weight_files,
    copy_non_weight_files,
)
from rlinf.models.images import PREPROCESSOR_FILE, ImageProcessor
from rlinf.models.lerobot_folder import (
    VLM_FOLDER,
    action_normalizer,
    copy_processors,
    feature_size,
    locate_vlm,
    new_statistics,
    read_statistics,
    replace_statistics,
    state_normalizer,
)
from rlinf.models.vla_base import InstructionTokenizer
from rlinf.models.wall_oss_folder import (
    DENOISING_STEPS,
    SPECIAL_TOKENS,
    STATE_TOKEN,
    TOKEN_EMBEDDINGS,
    WallOSSConfig,
    WallOSSFolder,
    check_wall_task,
    choose_normalizer,
    is_original,
    network_tensors,
    new_network_config,
    new_policy_config,
    original_policy_config,
    original_statistics,
    prompt_text,
    read_network_config,
    read_policy_config,
    read_wall_tokenizer,
    write_wall_processors,
)
from rlinf.models.wall_oss_network import WallNetwork


class WallOSSPolicy(FlowVLAPolicy):
    """A WALL-OSS policy."""

    Config = WallOSSConfig
    folder_class = WallOSSFolder
    trains_padding = False
    # The second feed-forward expert of each layer is the one of the actions.
    vlm_parameters = re.compile(
        r"model\.(visual|model\.(embed_tokens|norm|layers\.\d+\.(?!moe\.experts\.1\.)))"
    )
    module: WallNetwork

    def __init__(
        self,
        module: WallNetwork,
        folder: Path,
        config: WallOSSConfig,
        settings: Mapping[str, Any],
        network: Mapping[str, Any],
        tokenizer: Tokenizer,
    ) -> None:
        def tokenize(text: str) -> list[int]:
            return list(tokenizer.encode(prompt_text(text, settings, config.camera_map)).ids)

        scheduler = network.get("noise_scheduler") or {}
        super().__init__(
            module,
            folder,
            config,
            settings,
            num_steps=int(scheduler.get("num_inference_timesteps", DENOISING_STEPS)),
            num_denoised=int(settings["chunk_size"]),
            image_tokens=(network["resolution"] // module.model.visual.patch_size) ** 2,
            tokenizer=InstructionTokenizer(tokenize, pad_left=False),
        )

    @classmethod
    def check_spec(cls, config: WallOSSConfig, spec: ModelSpec) -> Any:
        check_spec_kinds("wall_oss", spec)
        if config.path is not None:
            _read_source(config, spec)
            return
        settings = new_policy_config(config, spec)
        vocabulary = {token: index for index, token in enumerate(SPECIAL_TOKENS)}
        network = new_network_config(config, settings, spec, vocabulary)
        check_wall_task(settings, network, config, spec, "model")
        if config.norm_stats is not None:
            read_statistics(config.norm_stats, settings)

    @classmethod
    def create(cls, config: WallOSSConfig, spec: ModelSpec, seed: int, folder: Path) -> None:
        cls.check_spec(config, spec)
        if config.path is not None:
            return cls._copy(config, spec, folder)
        settings = new_policy_config(config, spec)
        vlm_folder = folder / VLM_FOLDER
        vlm_folder.mkdir()
        vocabulary = write_character_tokenizer(
            DEFAULT_ALPHABET + "\n", vlm_folder, special_tokens=SPECIAL_TOKENS
        )
        network = new_network_config(config, settings, spec, vocabulary)
        _write_json(vlm_folder / "config.json", network)
        processor = ImageProcessor(0, (), patch_size=config.patch_size)
        _write_json(vlm_folder / PREPROCESSOR_FILE, processor.to_settings())
        _write_json(folder / "config.json", settings)
        statistics = new_statistics(settings, spec)
        if config.norm_stats is not None:
            statistics = read_statistics(config.norm_stats, settings)
        write_wall_processors(folder, settings, statistics)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            module = _create_network(
                vlm_folder,
                settings,
                config,
                read_network_config(vlm_folder, "model.path"),
                read_wall_tokenizer(vlm_folder),
            )
        write_weights(folder, module.state_dict())

    @classmethod
    def _copy(cls, config: WallOSSConfig, spec: ModelSpec, folder: Path) -> None:
        assert config.path is not None
        source = config.path.expanduser().resolve()
        settings, network, vlm_source, normalizer = _read_source(config, spec)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(vlm_source.resolve(), folder / VLM_FOLDER)
        stored, heads = read_stored_tensors(source)
        statistics = None
        if config.norm_stats is not None:
            statistics = read_statistics(config.norm_stats, settings)
        elif normalizer is not None:
            statistics = original_statistics(stored, normalizer, settings)
        if is_original(source):
            assert statistics is not None
            write_wall_processors(folder, settings, statistics)
        else:
            copy_processors(source, folder)
            if statistics is not None:
                replace_statistics(folder, statistics)
        _write_json(folder / "config.json", settings)
        _write_json(folder / VLM_FOLDER / "config.json", network)
        tensors = network_tensors(stored, is_tied=network["tie_word_embeddings"])
        write_weights(folder, {**tensors, **heads})

    @classmethod
    def load(cls, folder: Path, config: WallOSSConfig) -> Self:
        """Load a policy folder.

        Raises:
            DataError: Files are missing, damaged, or inconsistent.
        """
        settings = read_policy_config(folder)
        vlm_folder = folder / VLM_FOLDER
        network = read_network_config(vlm_folder, "model.path")
        tokenizer = read_wall_tokenizer(vlm_folder)
        module, tensors = load_network(
            folder,
            lambda: _create_network(vlm_folder, settings, config, network, tokenizer, "meta"),
        )
        check_tokenizer_size(folder, tokenizer, len(tensors[TOKEN_EMBEDDINGS]))
        return cls(module, folder, config, settings, network, tokenizer)

    def save(self, folder: Path, tensors: dict[str, Tensor]) -> None:
        super().save(folder, tensors)
        (folder / VLM_FOLDER).mkdir(exist_ok=True)
        copy_non_weight_files(self._folder / VLM_FOLDER, folder / VLM_FOLDER)

    def blocks(self) -> list[nn.Module]:
        model: Any = self.module.model
        return [*model.visual.blocks, *model.model["layers"]]


class WallSource(NamedTuple):
    """The configuration of a folder that a policy starts from."""

    settings: dict[str, Any]
    """LeRobot's ``config.json``."""
    network: dict[str, Any]
    """The network's ``config.json``."""
    vlm_folder: Path
    """The folder of the network's configuration and tokenizer."""
    normalizer: Mapping[str, tuple[str, str]] | None
    """Names of the tensors with statistics by feature; None: the statistics are in files."""


def _read_source(config: WallOSSConfig, spec: ModelSpec) -> WallSource:
    """Read and check a folder; of its weights, only the headers are read.

    Raises:
        ConfigError: The task does not fit.
        DataError: Files or tensors are missing, unexpected or of another shape.
    """
    assert config.path is not None
    source, normalizer = config.path.expanduser(), None
    check_checkpoint(source, True)  # the folder's own code is never run
    check_weight_files(source)
    shapes = {n: s for n, s in stored_shapes(source).items() if not n.startswith(ADDED_HEADS)}
    if is_original(source):
        vlm_folder, key = source, "model.path"
        network = read_network_config(source, key)
        settings = original_policy_config(network, config, spec)
        if config.norm_stats is None:
            normalizer = choose_normalizer(shapes, config, source)
    else:
        settings = read_policy_config(source)
        vlm_folder, key = locate_vlm(source, settings, config.vlm_path)
        network = read_network_config(vlm_folder, key)
    if config.chunk_size is not None:
        settings["n_action_steps"] = config.chunk_size
    if config.denoising_steps is not None:
        steps = {"num_inference_timesteps": config.denoising_steps}
        network["noise_scheduler"] = (network.get("noise_scheduler") or {}) | steps
    check_wall_task(settings, network, config, spec, f"{key}: {vlm_folder / 'config.json'}")
    if config.norm_stats is not None:
        read_statistics(config.norm_stats, settings)
    elif normalizer is None:
        state_normalizer(source, settings)
        action_normalizer(source, settings)
    tensors = network_tensors(shapes, is_tied=network["tie_word_embeddings"])
    # The embeddings are enlarged to the tokenizer, whatever config.json says.
    network["vocab_size"] = tensors.get(TOKEN_EMBEDDINGS, [network["vocab_size"]])[0]
    tokenizer = read_wall_tokenizer(vlm_folder)
    module = _create_network(vlm_folder, settings, WallOSSConfig(), network, tokenizer, "meta")
    stored = {name.removeprefix("model."): shape for name, shape in tensors.items()}
    check_tensors(f"model.path: {source}", stored, module.model)
    check_tokenizer_size(vlm_folder, tokenizer, network["vocab_size"])
    return WallSource(settings, network, vlm_folder, normalizer)


def _create_network(
    folder: Path,
    settings: Mapping[str, Any],
    config: WallOSSConfig,
    network: dict[str, Any],
    tokenizer: Tokenizer,
    device: str = "cpu",
) -> WallNetwork:
    """Return a new network.

    Args:
        folder: The folder with the image preprocessing.
        settings: LeRobot's ``config.json``.
        config: The options of the heads.
        network: The network's ``config.json``.
        tokenizer: The network's tokenizer.
        device: ``meta`` for a network without weights.

    Raises:
        DataError: The image preprocessing is missing or malformed.
    """
    state_token_id = tokenizer.token_to_id(STATE_TOKEN)
    assert state_token_id is not None, "it was checked"
    return WallNetwork(
        network,
        ImageProcessor.from_folder(folder, network),
        state_token_id=state_token_id,
        action_dim=feature_size(settings, ACTION_FEATURE),
        state_dim=feature_size(settings, STATE_FEATURE),
        num_values=int(settings["n_action_steps"]) if config.value_level == "action" else None,
        learned_noise=config.noise_method == "learned",
        device=device,
    )


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1))
