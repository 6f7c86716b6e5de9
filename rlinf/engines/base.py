"""The engine interface: what is asked, what is answered, and how weights get in.

Requests and replies are records whose ``steps`` have one row per sample. Their columns are listed
here, once: a letter is a size (``B`` rows), the same in all columns of a record. Others may be
added: an engine passes on what a policy says of its actions, an environment keeps it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from torch import Tensor

from rlinf.capabilities import Component
from rlinf.channels.process_group import ParallelLayout, ProcessGroupInfo
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.device_memory import MemorySize
from rlinf.errors import DataError


@dataclass(frozen=True)
class ColumnSpec:
    """One of ``steps``: element type, shape after the leading ``B``, and whether it may lack.

    ``...`` is any shape.
    """

    dtype: str
    shape: str = ""
    optional: bool = False


TOKEN_REQUEST_COLUMNS = {
    "sample": ColumnSpec("int64"),  # number of the sample: with the seed it fixes its randomness
    "prompt": ColumnSpec(
        "int64", "P"
    ),  # token ids, from the left; what follows prompt_length is void
    "prompt_length": ColumnSpec("int64"),
    # Images of the prompts, of engines that offer rlinf.capabilities.IMAGE_INPUTS; rlinf.models.images.
    "pixels": ColumnSpec("uint8", "I", optional=True),  # filled up with anything
    "image_sizes": ColumnSpec("int64", "KD", optional=True),  # height and width; 0 0 is no image
    "turn": ColumnSpec(
        "int64", optional=True
    ),  # 0 by default: the how manieth request of the sample
    # What there is of samples that another engine gave up; begun_length is below the horizon.
    "begun_length": ColumnSpec("int64", optional=True),
    "begun_tokens": ColumnSpec("int64", "N", optional=True),
    "begun_logprobs": ColumnSpec("float32", "N", optional=True),
    "begun_version": ColumnSpec("int64", "N", optional=True),
}
"""``info`` has the fields of :class:`rlinf.data.sampling_params.SamplingParams`."""
TOKEN_REPLY_COLUMNS = {
    "sample": ColumnSpec("int64"),  # in any order, in one reply or several
    "tokens": ColumnSpec("int64", "T"),
    "logprobs": ColumnSpec("float32", "T"),  # of each token when it was chosen; see Sampling
    "length": ColumnSpec("int64"),  # tokens of the sample, the one that ended it included
    "stopped": ColumnSpec("bool"),  # by a stop token or stop string, not by the horizon
    "unfinished": ColumnSpec("bool", optional=True),  # given up; false by default
    "version": ColumnSpec("int64", "T", optional=True),  # of the weights that chose each token
}
"""``info["version"]`` is that of the weights that chose the first token of these samples."""
ACTION_REQUEST_COLUMNS = {"sample": ColumnSpec("int64")}
"""The other columns, ``[B, ...]``, are the observation. ``info``: ``time``, the step, below
``horizon``, and ``temperature``."""
ACTION_REPLY_COLUMNS = {
    "sample": ColumnSpec("int64"),  # as asked, in one reply
    "logprob": ColumnSpec(
        "float32", "..."
    ),  # [B], or of each choice of the action: [B, K], [B, C, D]
    "version": ColumnSpec("int64", optional=True),
}
"""And ``action`` ``[B]`` or ``[B, ...]``, with whatever else the policy says, such as ``value``.
``info["version"]`` as above."""


def check_columns(record: Record, columns: Mapping[str, ColumnSpec]) -> None:
    """See that a record has these columns.

    Raises:
        DataError: one is missing, or of another type or shape.
    """
    sizes: dict[str, int] = {}
    for name, column in columns.items():
        array = record.steps.get(name)
        if array is None:
            if column.optional:
                continue
            raise DataError(f"record {tuple(record.identity)} has no column {name!r}")
        shape = array.shape[1:]
        named = zip(column.shape, shape, strict=False)
        fits = column.shape == "..." or (
            len(shape) == len(column.shape)
            and all(sizes.setdefault(letter, size) == size for letter, size in named)
        )
        if array.dtype != np.dtype(column.dtype) or not fits:
            raise DataError(
                f"record {tuple(record.identity)}: column {name!r} is {array.dtype} {array.shape}, "
                f"not {column.dtype} [{', '.join(['B', *column.shape])}]"
            )


def check_token_request(record: Record) -> None:
    """See that a record is a request for tokens.

    Raises:
        DataError: a column is missing or malformed, or a prompt is empty.
    """
    check_columns(record, TOKEN_REQUEST_COLUMNS)
    if (record.steps["prompt_length"] < 1).any():
        raise DataError("a prompt has no token: nothing stands before the first of its sample")


class RequestReceiver(Protocol):
    """The end of a channel that an engine reads, in one thread."""

    def get(self) -> Record:
        """Wait for the next; raises ChannelClosed where none comes."""

    def __len__(self) -> int:
        """How many there are: so many times :meth:`get` does not wait."""

    def __iter__(self) -> Iterator[Record]: ...


@dataclass(frozen=True)
class RolloutHooks:
    """What a stage lets an engine ask while samples are under way."""

    newer_weights: Callable[[], tuple[Path, int] | None] | None = None
    """The folder and version of weights to go on with, if there are any. Where this is set, replies
    have ``version``."""
    should_abort: Callable[[int, int], bool] | None = None
    """Given how many samples are unfinished and how many have been asked: whether to reply those
    under way as they are, as ``unfinished``. Engines whose requests are short need not ask. What it
    raises ends :meth:`Engine.generate`."""


NO_HOOKS = RolloutHooks()


class Engine(Component, ABC):
    """Answers requests under one version of the weights, or the newest that hooks tell of.

    A sample's randomness is (seed, iteration, stage, sample, turn); what is drawn depends neither
    on its neighbours nor on when its request came. Computing rows side by side may round their
    log-probabilities otherwise: requests that come at the same point give the same bytes, and
    those that join a running batch at another one may differ in the last bits.
    """

    Config: ClassVar[type[Section]] = Section
    supported_layouts: ClassVar[frozenset[str]] = frozenset()
    """Ways in which processes can share a copy of the model: fields of
    :class:`rlinf.channels.process_group.ParallelLayout`."""
    world: ProcessGroupInfo = ProcessGroupInfo()
    """The processes of the stage; told before weights come. Those of one copy of the model load the
    same weights; the one that speaks has the requests, the others :meth:`assist`."""
    log_folder: Path | None = None
    """Folder for what its processes print; told before weights come. None: it is not kept."""
    version: int = -1
    """Of the weights it serves; -1: it has none."""
    device: torch.device = torch.device("cpu")

    @abstractmethod
    def __init__(self, config: Any, policy: type, policy_config: Any) -> None:
        """Start nothing yet: weights come by :meth:`load`."""

    @classmethod
    def weight_dtype(cls, config: Any) -> torch.dtype | None:
        """The type in which it takes float32 weights; None: as they are."""
        return None

    @classmethod
    def max_batch(cls, config: Any) -> int | None:
        """Most samples that a process decodes at once, for predictions; None: all it is asked."""
        return None

    @classmethod
    def interpreters(cls, config: Any) -> Mapping[str, tuple[str, tuple[str, ...]]]:
        """Keys that name interpreters of processes of its own, with what they name and the packages
        that must be there."""
        return {}

    @classmethod
    def check_layout(cls, config: Any, policy: Any, layout: ParallelLayout, key: str) -> None:
        """See that processes can share a model so, without making it; of engines with
        :attr:`layouts`.

        Args:
            policy: configuration of the policy.
            layout: of the ways that the engine has.
            key: of the layout, for errors.

        Raises:
            ConfigError: they cannot.
            DataError: its checkpoint cannot be read.
        """

    @classmethod
    def check_policy(cls, config: Any, policy: Any) -> None:
        """See that it can serve a policy as the trainer computes it, without making either.

        Args:
            policy: configuration of the policy.

        Raises:
            ConfigError: it cannot.
        """

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        """Optional packages that the process of the stage imports for it; extras of their names
        install them."""
        return ()

    @abstractmethod
    def load(self, folder: Path, version: int) -> None:
        """Serve the weights in a policy folder from now on; after :meth:`close` too."""

    @abstractmethod
    def load_state(self, tensors: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Serve other weights of the network that is loaded, between two calls of generate.

        Args:
            tensors: all weights by the policy's names (tied ones may lack), in any order, of any
                floating type and device; each is copied before the next is asked for.

        Raises:
            DataError: they do not fit the network. It has no weights then until :meth:`load`.
        """

    @abstractmethod
    def generate(
        self, requests: RequestReceiver, *, seed: int, stage: str, hooks: RolloutHooks = NO_HOOKS
    ) -> Iterator[Record]:
        """Replies to requests until their channel closes.

        Requests that come while others are under way join them where there is room. Who stops
        iterating gives up the rest.

        Raises:
            DataError: a request is malformed.
        """

    def run_follower(self, *, seed: int, stage: str) -> None:
        """Take part in one :meth:`generate` of the process that speaks, until that is through.

        Of engines with :attr:`layouts`.
        """
        raise NotImplementedError

    def group_sizes(self) -> Mapping[str, MemorySize]:
        """What it keeps on the device between requests; see :class:`rlinf.device_memory.Offloadable`.

        :meth:`load` and :meth:`load_state` overwrite all of it. By default nothing that can move.
        """
        return {}

    def offload(self, group: str, min_bytes: int) -> int:
        raise NotImplementedError

    def onload(self, groups: Collection[str], *, copy_data: bool) -> None:
        """Nothing ever left."""

    @abstractmethod
    def close(self) -> None:
        """Free its memory, on the device too, and end its processes; again does no harm."""

    def load_newer_weights(self, hooks: RolloutHooks) -> bool:
        """Serve newer weights, if there are any."""
        found = hooks.newer_weights() if hooks.newer_weights is not None else None
        if found is None:
            return False
        self.load(*found)
        return True
