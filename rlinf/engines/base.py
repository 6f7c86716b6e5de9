"""The engine interface: request and reply formats, generation, and weight updates.

Requests and replies are records whose ``steps`` have one row per sample. This module declares their
columns. In a shape, each letter is a size that is equal in all columns of a record; ``B`` is the
number of rows. Records may have more columns: an engine forwards all outputs of a policy, and the
environment stores them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.channels.process_group import ProcessGroupInfo
from rlinf.config import SamplingSection, Section
from rlinf.data.record import Record, RecordId
from rlinf.device_memory import MemorySize
from rlinf.errors import ConfigError, DataError
from rlinf.models.base import ModelHolder
from rlinf.registry import LANGUAGE_MODEL, RunComponents


@dataclass(frozen=True)
class ColumnSpec:
    """The element type and shape of one column of ``steps``, without the leading ``B``.

    The shape ``...`` matches any shape. An optional column may be missing.
    """

    dtype: str
    shape: str = ""
    optional: bool = False


TOKEN_REQUEST_COLUMNS = {
    "sample": ColumnSpec("int64"),  # sample number; with the seed it determines all randomness
    # Token ids, padded on the right to P; the padding is ignored.
    "prompt": ColumnSpec("int64", "P"),
    "prompt_length": ColumnSpec("int64"),
    # Prompt images (rlinf.models.images), for engines with rlinf.registry.IMAGE_INPUTS.
    "pixels": ColumnSpec("uint8", "I", optional=True),  # padded with arbitrary values
    # K images, D = 2: height and width; 0 0 means no image.
    "image_sizes": ColumnSpec("int64", "KD", optional=True),
    # Index of this request within the sample (default 0).
    "turn": ColumnSpec("int64", optional=True),
    # The beginning of a response, from an earlier request; begun_length is below the horizon.
    "begun_length": ColumnSpec("int64", optional=True),
    "begun_tokens": ColumnSpec("int64", "N", optional=True),
    "begun_logprobs": ColumnSpec("float32", "N", optional=True),
    "begun_version": ColumnSpec("int64", "N", optional=True),
}
"""Columns of a token request. ``info`` has the fields of
:class:`rlinf.engines.token_sampling.SamplingParams`."""
TOKEN_REPLY_COLUMNS = {
    "sample": ColumnSpec("int64"),  # in any order, in one or more replies to a request
    "tokens": ColumnSpec("int64", "T"),
    "logprobs": ColumnSpec("float32", "T"),  # at sampling time; see SamplingParams
    "length": ColumnSpec("int64"),  # tokens of the sample, including the stop token
    "stopped": ColumnSpec("bool"),  # by a stop token or stop string, not by the horizon
    "unfinished": ColumnSpec("bool", optional=True),  # the sample was aborted; default false
    "version": ColumnSpec("int64", "T", optional=True),  # weight version of each token
}
"""Columns of a token reply. ``info["version"]`` is the weight version of the first token."""
ACTION_REQUEST_COLUMNS = {"sample": ColumnSpec("int64")}
"""Columns of an action request. All other columns, ``[B, ...]``, are the observation. ``info`` has
``time`` (the step, below ``horizon``), ``horizon`` and ``temperature``."""
ACTION_REPLY_COLUMNS = {
    "sample": ColumnSpec("int64"),  # in the order of the request, in one reply
    # [B], or one per part of the action (a token or a dimension): [B, K], [B, C, D].
    "logprob": ColumnSpec("float32", "..."),
    "version": ColumnSpec("int64", optional=True),
}
"""Columns of an action reply, besides ``action`` ``[B]`` or ``[B, ...]`` and further outputs of the
policy, such as ``value``. ``info["version"]`` is the weight version."""


def check_columns(record: Record, columns: Mapping[str, ColumnSpec]) -> None:
    """Check that a record has the declared columns.

    Raises:
        DataError: A column is missing or has another type or shape.
    """
    size_of_letter: dict[str, int] = {}
    for name, column in columns.items():
        array = record.steps.get(name)
        if array is None:
            if column.optional:
                continue
            raise DataError(f"record {tuple(record.identity)} has no column {name!r}")
        shape = array.shape[1:]
        axes = zip(column.shape, shape, strict=False)
        has_shape = column.shape == "..." or (
            len(shape) == len(column.shape)
            and all(size_of_letter.setdefault(letter, size) == size for letter, size in axes)
        )
        if array.dtype != np.dtype(column.dtype) or not has_shape:
            raise DataError(
                f"record {tuple(record.identity)}: column {name!r} is {array.dtype} {array.shape}, "
                f"not {column.dtype} [{', '.join(['B', *column.shape])}]"
            )


def check_token_request(record: Record) -> None:
    """Check that a record is a valid token request.

    Raises:
        DataError: A column is missing or malformed, or a prompt is empty.
    """
    check_columns(record, TOKEN_REQUEST_COLUMNS)
    if (record.steps["prompt_length"] < 1).any():
        raise DataError("a prompt is empty; generation needs at least one prompt token")


class RequestReceiver(Protocol):
    """The receiving end of the request channel; the engine reads it in one thread."""

    def get(self) -> Record:
        """Wait for the next request. Raises ChannelClosed when the channel is closed."""

    def __len__(self) -> int:
        """Return the number of requests that :meth:`get` returns without waiting."""

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class TokenScores:
    """Log-probabilities of the tokens of a text of ``L`` tokens, each given the tokens before it.

    The first token has none, so there are ``L - 1`` rows.
    """

    logprobs: np.ndarray
    """``[L - 1]`` float32: log-probability of each token."""
    top_tokens: np.ndarray
    """``[L - 1, K]`` int64: ids of the ``K`` most likely tokens, most likely first."""
    top_logprobs: np.ndarray
    """``[L - 1, K]`` float32: their log-probabilities."""


@dataclass(frozen=True)
class RolloutHooks:
    """Callbacks of an engine during generation."""

    newer_weights: Callable[[], tuple[Path, int] | None] | None = None
    """Return the folder and version of newer weights, or None. If this is set, replies have the
    ``version`` column."""
    should_abort: Callable[[int, int], bool] | None = None
    """Called with the number of unfinished samples and the number of requested samples. If it
    returns true, the engine returns all running samples as ``unfinished``. Engines with short
    requests may ignore it. Its exceptions end :meth:`Engine.generate`."""
    on_token: Callable[[RecordId, int, int], None] | None = None
    """Called with the identity of the request, the sample and the token, for each token in the
    order of decoding and before the reply. Engines that receive finished samples may ignore it."""


NO_HOOKS = RolloutHooks()


class Engine(ModelHolder, ABC):
    """An inference engine: it answers requests with the loaded weights of a policy.

    If the hooks report newer weights, generation continues with them. The random numbers of a
    sample are derived from (seed, iteration, stage, sample, turn), so they depend neither on other
    rows nor on the arrival time of the request. Log-probabilities may differ in the last bits if a
    request joins the running batch earlier or later, because batched kernels round differently.
    """

    Config: ClassVar[type[Section]] = Section
    world: ProcessGroupInfo = ProcessGroupInfo()
    """The process group of the stage, set before the first load. All ranks of a model replica load
    the same weights. The primary rank serves the requests; the others call :meth:`run_follower`."""
    log_folder: Path | None = None
    """Folder for the logs of the engine's processes, set before the first load. None: no logs."""
    required_context: int | None = None
    """Largest number of tokens of prompt and response together that the run will ask for, set
    before the first load. None: unknown."""
    version: int = -1
    """Version of the loaded weights; -1 if no weights are loaded."""
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        """Store the configuration. Nothing is started before :meth:`load`."""

    @classmethod
    def check(cls, options: Any, run: RunComponents) -> None:
        for key in ("rollout", "evaluate"):
            sampling: SamplingSection | None = getattr(run.config, key).sampling
            settings = [] if sampling is None else list(sampling.non_default_settings())
            if settings and LANGUAGE_MODEL not in cls.requires:
                raise ConfigError(
                    f"{key}.sampling.{settings[0]}: engine {run.config.engine.name!r} samples no "
                    "tokens; remove it"
                )

    @classmethod
    def weight_dtype(cls, config: Any) -> torch.dtype | None:
        """Return the type to which float32 weights are cast for the engine; None: no cast."""
        return None

    @classmethod
    def max_batch(cls, config: Any) -> int | None:
        """Return the largest decoding batch of a process, for the planner; None: no limit."""
        return None

    @classmethod
    def interpreters(cls, config: Any) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """Return the interpreters of the engine's own processes: for each configuration key, the
        configured interpreter and the packages that it must have."""
        return {}

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        """Return the optional packages, or extras, that the stage's process needs."""
        return ()

    @abstractmethod
    def load(self, folder: Path, version: int) -> None:
        """Load the weights of a policy folder and serve them; also allowed after :meth:`close`."""

    @abstractmethod
    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Replace the weights of the loaded network, between two calls of :meth:`generate`.

        Args:
            tensors: All weights by the policy's names (tied weights may be missing), in any order,
                with any floating type and device. Each tensor is copied before the next is read.

        Raises:
            DataError: The tensors do not match the network. The engine then has no weights until
                the next :meth:`load`.
        """

    @abstractmethod
    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        """Yield replies to requests until the request channel is closed.

        New requests join the running batch if there is room. If the iterator is closed early,
        unfinished samples are discarded.

        Raises:
            DataError: A request is malformed.
        """

    def score_tokens(
        self, texts: Sequence[np.ndarray], temperature: float, num_top: int
    ) -> list[TokenScores]:
        """Return the log-probabilities of texts under ``softmax(z / temperature)``.

        Must not be called while :meth:`generate` runs.

        Args:
            texts: token ids of each text, int64 ``[L]``, ``L >= 1``.
            temperature: 0 counts as 1.
            num_top: number ``K`` of most likely tokens to return for each position.

        Raises:
            DataError: The engine only generates.
        """
        raise DataError(
            f"{type(self).__name__} does not compute log-probabilities of given texts; serve the "
            "model with engine=transformers"
        )

    @property
    def max_model_len(self) -> int | None:
        """Largest number of tokens of prompt and response together, if the engine limits it more
        than the model does; None before the first load."""
        return None

    def run_follower(self, *, seed: int, stage: str) -> None:
        """Take part in one :meth:`generate` call of the primary rank until it ends.

        Only engines with :attr:`parallel_dims` implement this.
        """
        raise NotImplementedError

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """Return the device memory that the engine holds between requests, by memory group.

        See :class:`rlinf.device_memory.Offloadable`. :meth:`load` and :meth:`load_state` overwrite
        all of this memory. By default, no memory can be offloaded.
        """
        return {}

    def offload(self, group: str, min_bytes: int) -> int:
        raise NotImplementedError

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Do nothing: the default implementation never offloads."""

    @abstractmethod
    def close(self) -> None:
        """Free all memory, also on the device, and stop the engine's processes. Idempotent."""

    def load_newer_weights(self, hooks: RolloutHooks) -> bool:
        """Load newer weights if the hooks report any. Returns whether weights were loaded."""
        newer = hooks.newer_weights() if hooks.newer_weights is not None else None
        if newer is None:
            return False
        self.load(*newer)
        return True
