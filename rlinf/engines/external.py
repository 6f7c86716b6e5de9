"""Engines of other projects: their settings, and what is known of the network that they serve."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field

from rlinf.config import Section
from rlinf.engines.base import Engine
from rlinf.engines.legs import Ask
from rlinf.errors import ConfigError, DataError
from rlinf.fit import LANGUAGE_MODEL
from rlinf.models.causal_lm import CausalLMConfig
from rlinf.models.device import DeviceName, local_device
from rlinf.models.loading import described_module
from rlinf.models.published import Published
from rlinf.models.published_folder import PublishedFolder, read_settings
from rlinf.models.rotary import length_scaling

NO_LIMIT = 4096
"""The context of models whose settings give no limit: vLLM needs one, and takes any."""


class ExternalConfig(Section):
    """What they have in common."""

    python: str | None = None
    """The interpreter of the stages that generate; see :mod:`rlinf.interpreters`."""
    max_rows: int = Field(default=256, gt=0)
    """Most samples that are decoded at once."""
    threads: int = Field(default=1, gt=0)
    """Threads of the decoding process on a CPU."""
    device: DeviceName = "auto"
    dtype: Literal["float32", "bfloat16"] | None = None
    """Of the weights it generates with; null: that of the model."""
    cache_gib: float = Field(default=1.0, gt=0)
    """Memory for cached keys and values, on each GPU."""
    context: int | None = Field(default=None, gt=0)
    """Most tokens of a prompt and its response together; null: as many as the model takes."""
    ignore_eos: bool = False
    """Decode to the horizon whatever is sampled (for benchmarks)."""
    arguments: tuple[str, ...] = ()
    """Of its command line, after those that are given anyway."""


class ExternalEngine(Engine):
    """See the module."""

    Config: ClassVar[type[Section]] = ExternalConfig
    needs = frozenset({LANGUAGE_MODEL})
    length_scalings: ClassVar[frozenset[str]] = frozenset()
    """Rotary scalings by a length (:mod:`rlinf.models.rotary`) that it computes as the trainer."""

    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        self._config = config
        self._policy_config: CausalLMConfig = policy_config
        if config.dtype is not None:
            self._policy_config = policy_config.model_copy(update={"dtype": config.dtype})
        self.device = local_device(config.device)
        self.stops = frozenset[int]()
        """Tokens that end a sample."""

    @classmethod
    def takes_dtype(cls, config: Any) -> torch.dtype | None:
        return None if config.dtype is None else getattr(torch, config.dtype)

    @classmethod
    def rows(cls, config: Any) -> int:
        return int(config.max_rows)

    @classmethod
    def check_policy(cls, config: Any, policy: Any) -> None:
        path = getattr(policy, "path", None)
        scaling = None if path is None else length_scaling(read_settings(path.expanduser()))
        if scaling is None:
            return
        if scaling.kind not in cls.length_scalings:
            raise ConfigError(
                f"engine.name: {cls.__name__.removesuffix('Engine')} would choose other rotary "
                f"frequencies than the trainer: those of {path} depend on a length "
                f"({scaling.kind} in config.json); set engine=transformers"
            )
        if config.context is not None and config.context != policy.context:
            raise ConfigError(
                f"engine.context: the rotary frequencies of {path} depend on this length "
                f"({scaling.kind} in config.json), for the trainer too; leave it out and set "
                f"model.context={config.context}"
            )

    @property
    def sleeps(self) -> bool:
        """Whether it lets go of its device's memory between two calls."""
        return self.device.type != "cpu"

    def cache_bytes(self) -> int:
        """For cached keys and values, on each GPU."""
        return int(self._config.cache_gib * 2**30)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of some tokens, in which stop strings are looked for."""
        return self.chat_format.decode(tokens)

    def stop_ids(self, texts: Iterable[str]) -> set[int]:
        """The ids of those stop strings that are special tokens, which no decoded text shows."""
        return self.chat_format.stop_ids(texts)

    def stops_of(self, ask: Ask) -> set[int]:
        """The tokens that the other project is to stop a leg at.

        Stop strings may come before ``min_tokens``, stop tokens cannot: then they are looked for
        here alone.
        """
        return {*self.stops, *(() if ask.least else self.stop_ids(ask.sampling.stop))}

    def check_room(self, ask: Ask) -> None:
        """See that what is asked for fits into the context.

        Raises:
            DataError: it does not.
        """
        if len(ask.tokens) + ask.most > self._context:
            raise DataError(
                f"{len(ask.tokens)} tokens and up to {ask.most} more do not fit into "
                f"{self._context}; shorten prompts or rollout.horizon, or raise engine.context and "
                "the cache"
            )

    def _known(self, model: Path) -> None:
        """Learn of a network what requests and weights need; it takes no memory."""
        config = self._policy_config
        module = described_module(model, config)
        self._settings = module.config.get_text_config()
        published = PublishedFolder.of(config, model)
        own = published.run_length(config.context)
        self._context = self._config.context or own or NO_LIMIT
        self.chat_format = published.chat_format
        self.stops = frozenset() if self._config.ignore_eos else published.stop_token_ids
        self._published = Published(module)

    def _device_bytes(self) -> int:
        """Of weights and cache, on one GPU."""
        weights = sum(tensor.nbytes for tensor in self._published.like.values())
        return weights // self.world.layout.tp + self.cache_bytes()
