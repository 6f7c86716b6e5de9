"""The common base of vLLM and SGLang engines: configuration, tokenizer, and model limits."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from rlinf.config import Section
from rlinf.engines.base import Engine
from rlinf.engines.cache_limit import KV_CACHE_SHARE, kv_bytes_per_token
from rlinf.engines.resumable import SegmentRequest
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import DeviceName, local_device
from rlinf.models.causal_lm_config import CausalLMConfig
from rlinf.models.hf_folder import HFFolder, read_config_json
from rlinf.models.loading import CheckpointExporter, inspect_module
from rlinf.models.rotary import length_scaling
from rlinf.registry import LANGUAGE_MODEL, RunComponents

DEFAULT_MODEL_LEN = 4096
"""Context length for models whose config.json has no limit, because vLLM requires one."""
BLOCK_MARGIN = 256
"""Tokens that the cache holds for a sample beyond the context. The cache is divided into blocks of
up to 128 tokens, vLLM keeps one of them free, and SGLang's context is a little longer."""
CPU_KV_CACHE_BYTES = 1 << 30
"""Largest KV cache on CPUs by default."""


class ExternalConfig(Section):
    """Options of all vLLM and SGLang engines."""

    python: str | None = None
    """Python interpreter of the rollout and evaluation stages; see :mod:`rlinf.interpreters`."""
    max_num_seqs: int = Field(default=256, gt=0)
    """Largest number of samples that are decoded at the same time."""
    threads: int = Field(default=1, gt=0)
    """CPU threads of the decoding process."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Type of the weights for generation; null: ``bfloat16`` for a checkpoint (``model.path``) on a
    GPU, else ``model.dtype``."""
    kv_cache_gib: float | None = Field(default=None, gt=0)
    """Memory of the KV cache on each GPU, GiB; null: as much as ``max_num_seqs`` samples of the
    longest context need, at most 40 % of the GPU's memory (on CPUs at most 1 GiB), and at least as
    much as one sample needs."""
    max_model_len: int | None = Field(default=None, gt=0)
    """Largest number of tokens of prompt and response together; null: what the task and
    ``rollout.horizon`` need if that is known, else the limit of the model."""
    ignore_eos: bool = False
    """Ignore stop tokens and decode to the horizon (for benchmarks)."""
    extra_args: tuple[str, ...] = ()
    """Further command-line arguments for vLLM or SGLang."""


class ExternalEngine(Engine):
    """An engine that generates with vLLM or SGLang."""

    Config: ClassVar[type[Section]] = ExternalConfig
    requires = frozenset({LANGUAGE_MODEL})
    supported_length_scalings: ClassVar[frozenset[str]] = frozenset()
    """Length-dependent rotary scalings (:mod:`rlinf.models.rotary`) that equal the trainer's."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy_config: CausalLMConfig = policy_config
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self.compute_dtype = self._policy_config.dtype
        self._max_model_len = 0
        self.stop_token_ids = frozenset[int]()
        """Ids of the tokens that end a sample."""

    @classmethod
    def weight_dtype(cls, config: Any) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def max_batch(cls, config: Any) -> int:
        return int(config.max_num_seqs)

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        super().check(options, run)
        policy = run.options["model"]
        cls.check_rotary(options, policy)
        check_model_len(options.max_model_len, run.classes["model"].max_model_len(policy))

    @classmethod
    def check_rotary(cls, config: Any, policy: Any) -> None:
        """Check that the engine computes the same rotary frequencies as the trainer.

        Args:
            policy: The configuration of the policy.

        Raises:
            ConfigError: The frequencies would differ.
        """
        path = getattr(policy, "path", None)
        scaling = None if path is None else length_scaling(read_config_json(path.expanduser()))
        if scaling is None:
            return
        if scaling.rope_type not in cls.supported_length_scalings:
            raise ConfigError(
                f"engine.name: {cls.__name__.removesuffix('Engine')} would use other rotary "
                f"frequencies than the trainer: those of {path} depend on a length "
                f"({scaling.rope_type} in config.json); set engine=transformers"
            )
        if config.max_model_len is not None and config.max_model_len != policy.max_model_len:
            raise ConfigError(
                f"engine.max_model_len: the rotary frequencies of {path} depend on this length "
                f"({scaling.rope_type} in config.json), also in the trainer; remove it and set "
                f"model.max_model_len={config.max_model_len}"
            )

    @property
    def can_sleep(self) -> bool:
        """Whether the engine can free its device memory between two :meth:`generate` calls."""
        return self.device.type != "cpu"

    def kv_cache_bytes(self) -> int:
        """Return the size of the KV cache on each GPU, bytes."""
        if self._config.kv_cache_gib is not None:
            return int(self._config.kv_cache_gib * 2**30)
        limit = CPU_KV_CACHE_BYTES
        if self.device.type == "cuda":
            properties = torch.cuda.get_device_properties(self.device)
            limit = int(KV_CACHE_SHARE * properties.total_memory)
        one_sample = (self._max_model_len + BLOCK_MARGIN) * self.kv_bytes_per_token()
        return max(one_sample, min(limit, self._config.max_num_seqs * one_sample))

    def kv_bytes_per_token(self) -> int:
        """Return the bytes of the keys and values of one token on each GPU."""
        dtype: torch.dtype = getattr(torch, self._policy_config.dtype)
        return kv_bytes_per_token(self._text_config, dtype, self.world.layout.tp)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the decoded tokens: the text in which stop strings are searched."""
        return self.chat_format.decode(tokens)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """Return the ids of stop strings that are special tokens, which decoded text lacks."""
        return self.chat_format.stop_ids(texts)

    def stop_token_ids_for(self, request: SegmentRequest) -> set[int]:
        """Return the ids of tokens at which vLLM or SGLang must stop a segment.

        Both ban these tokens before ``min_tokens``, but stop strings may appear there.
        If ``min_tokens`` > 0, the result therefore omits special tokens that are stop strings;
        :mod:`rlinf.engines.resumable` detects them.
        """
        return {
            *self.stop_token_ids,
            *(() if request.min_tokens else self.stop_ids(request.sampling.stop)),
        }

    def check_length(self, request: SegmentRequest) -> None:
        """Check that a request fits into the context length.

        Raises:
            DataError: The request is too long.
        """
        if len(request.context_tokens) + request.max_tokens > self._max_model_len:
            raise DataError(
                f"{len(request.context_tokens)} tokens and up to {request.max_tokens} more do not "
                f"fit into {self._max_model_len}; shorten prompts or rollout.horizon, or raise "
                "engine.max_model_len and the KV cache"
            )

    @property
    def max_model_len(self) -> int | None:
        return self._max_model_len or None

    def _read_model(self, model: Path) -> None:
        """Read the limits, the tokenizer and the weight names of a model, but not its weights."""
        config = self._policy_config
        module = inspect_module(model, config)
        self._text_config = module.config.get_text_config()
        hf_folder = HFFolder.from_config(config, model)
        model_limit = hf_folder.max_model_len(config.max_model_len)
        limit = self._config.max_model_len or model_limit or DEFAULT_MODEL_LEN
        # Rotary frequencies that depend on the length are those of the model's limit.
        depends_on_length = length_scaling(read_config_json(model)) is not None
        if self._config.max_model_len is None and self.required_context and not depends_on_length:
            limit = min(limit, self.required_context)
        self._max_model_len = limit
        self.chat_format = hf_folder.chat_format
        self.stop_token_ids = frozenset() if self._config.ignore_eos else hf_folder.stop_token_ids
        self._exporter = CheckpointExporter(module)

    def device_bytes(self) -> int:
        """Return the size of weights and KV cache on one GPU, bytes."""
        weights = sum(tensor.nbytes for tensor in self._exporter.meta_tensors.values())
        return weights // self.world.layout.tp + self.kv_cache_bytes()


def check_model_len(max_model_len: int | None, positions: int | None) -> None:
    """Check that the context length of the engine does not exceed the positions of the model.

    Args:
        positions: The maximum number of tokens of the model; None: no limit.

    Raises:
        ConfigError: It exceeds them, so that the engine would not start.
    """
    if max_model_len is not None and positions is not None and max_model_len > positions:
        raise ConfigError(
            f"engine.max_model_len: {max_model_len} is more than the {positions} positions of the "
            f"model; set it to {positions} or less, or leave it out"
        )
