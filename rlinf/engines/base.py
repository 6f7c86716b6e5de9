"""The engine interface."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor

from rlinf.channels.base import Channel
from rlinf.config import Section
from rlinf.data.record import Record
from rlinf.fit import Part


class Engine(Part, ABC):
    """Answers observation records with action records, under one version of the weights.

    A request's ``steps`` have one row per sample; ``steps["sample"]`` says which. Replies carry the
    same ``sample`` numbers, in any order and in one record or several. An engine that gives samples
    up also goes on with them: ``begun_tokens``, ``begun_logprobs`` and ``begun_version``, all
    ``[B, n]``, hold what there is of them, ``begun_length`` ``[B]`` steps.
    """

    Config: ClassVar[type[Section]] = Section
    version: int
    """Of the weights it serves."""
    newer: Callable[[], tuple[Path, int] | None] | None = None
    """Asked while samples are under way: the folder and version of weights to go on with. Where it
    is set, replies have ``steps["version"]``: the version that chose each action."""
    gives_up: Callable[[int, int], bool] | None = None
    """Asked while samples are under way, with how many of a request are unfinished and how many it
    has: whether to reply these as they are, marked in ``steps["unfinished"]``. Engines whose
    samples are short need not ask."""

    @abstractmethod
    def __init__(self, config: Any, policy: type, policy_config: Any) -> None: ...

    @abstractmethod
    def load(self, folder: Path, version: int) -> None:
        """Serve the weights in a policy folder from now on."""

    @abstractmethod
    def load_state(self, tensors: Mapping[str, Tensor], version: int) -> None:
        """Serve other weights of the network that is loaded, between two requests.

        Args:
            tensors: all weights by the policy's names, of any floating type; they are copied.

        Raises:
            DataError: they do not fit the network; it serves what it did before.
        """

    def refreshed(self) -> bool:
        """Serve newer weights, if there are any."""
        found = self.newer() if self.newer is not None else None
        if found is None:
            return False
        self.load(*found)
        return True

    def resident(self) -> Mapping[str, Sequence[Tensor]]:
        """What it keeps on the device between requests: see :class:`rlinf.residency.Holder`.

        :meth:`load` and :meth:`load_state` overwrite all of it. By default nothing that can move.
        """
        return {}

    @abstractmethod
    def generate(self, request: Record, seed: int, stage: str) -> Iterator[Record]:
        """Replies to one request; a row's randomness is (seed, iteration, stage, sample)."""


def serve(
    engine: Engine, observations: Channel, actions: Channel, *, seed: int, stage: str
) -> None:
    """Answer every observation until the channel closes; then close the action channel."""
    try:
        for request in observations:
            for reply in engine.generate(request, seed, stage):
                actions.put(reply)
    finally:
        actions.close()
