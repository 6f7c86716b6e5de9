"""Engines of other projects: their settings, and what is known of the network that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from rlinf.capabilities import LANGUAGE_MODEL
from rlinf.config import Section
from rlinf.engines.base import Engine
from rlinf.engines.resumable import SegmentRequest
from rlinf.errors import ConfigError, DataError
from rlinf.models.causal_lm import CausalLMConfig
from rlinf.models.device import DeviceName, local_device
from rlinf.models.hf_folder import HFFolder, read_config_json
from rlinf.models.loading import CheckpointExporter, inspect_module
from rlinf.models.rotary import length_scaling

DEFAULT_MODEL_LEN = 4096
"""The context of models whose settings give no limit: vLLM needs one, and takes any."""


class ExternalConfig(Section):
    """What they have in common."""

    python: str | None = None
    """The interpreter of the stages that generate; see :mod:`rlinf.interpreters`."""
    max_num_seqs: int = Field(default=256, gt=0)
    """Most samples that are decoded at once."""
    threads: int = Field(default=1, gt=0)
    """Threads of the decoding process on a CPU."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights it generates with; null: that of the model."""
    kv_cache_gib: float = Field(default=1.0, gt=0)
    """Memory for cached keys and values, on each GPU."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt and its response together; null: as many as the model takes."""
    ignore_eos: bool = False
    """Decode to the horizon whatever is sampled (for benchmarks)."""
    extra_args: tuple[str, ...] = ()
    """Of its command line, after those that are given anyway."""


class ExternalEngine(Engine):
    """See the module."""

    Config: ClassVar[type[Section]] = ExternalConfig
    requires = frozenset({LANGUAGE_MODEL})
    supported_length_scalings: ClassVar[frozenset[str]] = frozenset()
    """Rotary scalings by a length (:mod:`rlinf.models.rotary`) that it computes as the trainer."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy_config: CausalLMConfig = policy_config
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self.stop_token_ids = frozenset[int]()
        """Tokens that end a sample."""

    @classmethod
    def weight_dtype(cls, config: Any) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def max_batch(cls, config: Any) -> int:
        return int(config.max_num_seqs)

    @classmethod
    def check_policy(cls, config: Any, policy: Any) -> None:
        path = getattr(policy, "path", None)
        scaling = None if path is None else length_scaling(read_config_json(path.expanduser()))
        if scaling is None:
            return
        if scaling.rope_type not in cls.supported_length_scalings:
            raise ConfigError(
                f"engine.name: {cls.__name__.removesuffix('Engine')} would choose other rotary "
                f"frequencies than the trainer: those of {path} depend on a length "
                f"({scaling.rope_type} in config.json); set engine=transformers"
            )
        if config.max_model_len is not None and config.max_model_len != policy.max_model_len:
            raise ConfigError(
                f"engine.max_model_len: the rotary frequencies of {path} depend on this length "
                f"({scaling.rope_type} in config.json), for the trainer too; leave it out and set "
                f"model.max_model_len={config.max_model_len}"
            )

    @property
    def can_sleep(self) -> bool:
        """Whether it lets go of its device's memory between two calls."""
        return self.device.type != "cpu"

    def kv_cache_bytes(self) -> int:
        """For cached keys and values, on each GPU."""
        return int(self._config.kv_cache_gib * 2**30)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, in which stop strings are looked for."""
        return self.chat_format.decode(tokens)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """The ids of those stop strings that are special tokens, which no decoded text shows."""
        return self.chat_format.stop_ids(texts)

    def stop_token_ids_for(self, request: SegmentRequest) -> set[int]:
        """The tokens that the other project is to stop a leg at.

        Stop strings may come before ``min_tokens``, stop tokens cannot: then they are looked for
        here alone.
        """
        return {
            *self.stop_token_ids,
            *(() if request.min_tokens else self.stop_ids(request.sampling.stop)),
        }

    def check_length(self, request: SegmentRequest) -> None:
        """See that what is asked for fits into the context.

        Raises:
            DataError: it does not.
        """
        if len(request.context_tokens) + request.max_tokens > self._context:
            raise DataError(
                f"{len(request.context_tokens)} tokens and up to {request.max_tokens} more do not fit into "
                f"{self._context}; shorten prompts or rollout.horizon, or raise engine.max_model_len and "
                "the cache"
            )

    def _known(self, model: Path) -> None:
        """Learn of a network what requests and weights need; it takes no memory."""
        config = self._policy_config
        module = inspect_module(model, config)
        self._settings = module.config.get_text_config()
        published = HFFolder.from_config(config, model)
        own = published.max_model_len(config.max_model_len)
        self._context = self._config.max_model_len or own or DEFAULT_MODEL_LEN
        self.chat_format = published.chat_format
        self.stop_token_ids = frozenset() if self._config.ignore_eos else published.stop_token_ids
        self._published = CheckpointExporter(module)

    def _device_bytes(self) -> int:
        """Of weights and cache, on one GPU."""
        weights = sum(tensor.nbytes for tensor in self._published.meta_tensors.values())
        return weights // self.world.layout.tp + self.kv_cache_bytes()
