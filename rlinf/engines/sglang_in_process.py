"""SGLang in the process of the stage; see :mod:`rlinf.engines.in_process`.

Its scheduler alone is made (``inside/sglang_scheduler.py``), none of the processes that SGLang has
around it.
"""

from __future__ import annotations

import importlib.util
import logging
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from rlinf.engines.in_process import InProcessEngine, apart
from rlinf.engines.legs import Ask, Leg, Sample
from rlinf.engines.sglang import (
    PARTS,
    STAND_INS,
    VARIABLES,
    CacheConfig,
    Cached,
    arguments,
    cpu_variables,
    settings,
)
from rlinf.errors import DataError


class SGLangInProcess(Cached, InProcessEngine):
    """See the module."""

    Config = CacheConfig

    @classmethod
    def packages(cls, config: Any) -> tuple[str, ...]:
        return ("sglang",)

    def make(self, model: Path) -> None:
        variables = dict(VARIABLES)
        if self.device.type == "cpu":
            variables |= cpu_variables(1, self._config.threads)
        words = [
            *arguments(self, model, self._context),
            *("--load-format", "dummy", "--log-level", "error", "--disable-overlap-schedule"),
            *(["--enable-weights-cpu-backup"] if self.sleeps else []),
            *self._config.arguments,
        ]
        logging.getLogger("sglang").setLevel(logging.ERROR)
        with apart(self.device, variables, "SGLANG_"):
            if self.sleeps:
                from torch_memory_saver import torch_memory_saver

                # The other way is a library that is loaded before the process starts. It can be
                # said before the first start alone.
                if torch_memory_saver._impl is None:
                    torch_memory_saver.hook_mode = "torch"
            from rlinf.engines.inside.sglang_scheduler import started

            self.inner = started(words, self.device.index or 0)

    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.inner.put(tensors)

    def end(self, inner: Any) -> None:
        inner.end()

    def sleep(self) -> None:
        self.inner.rest(PARTS)

    def wake(self) -> None:
        self.inner.rise(PARTS)

    def decoder(self) -> Stepped:
        return Stepped(self)


class Stepped:
    """See :class:`rlinf.engines.legs.Decoder`: one step of all legs at a time."""

    def __init__(self, engine: SGLangInProcess) -> None:
        self._engine = engine
        self._begun: dict[str, Sample] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._begun)

    def begin(self, sample: Sample, ask: Ask) -> None:
        self._engine.check_room(ask)
        self._count += 1
        name = str(self._count)
        self._engine.inner.add(name, ask.tokens, settings(ask, self._engine.stops_of(ask)))
        self._begun[name] = sample

    def ended(self) -> list[tuple[Sample, Leg | Exception]]:
        with self._engine.computing():
            ended = self._engine.inner.step()
        return [(self._begun.pop(name), leg_of(request)) for name, request in ended.items()]

    def cut_off(self) -> Iterator[tuple[Sample, Leg | Exception]]:
        inner, begun, self._begun = self._engine.inner, self._begun, {}
        if begun and inner is not None:
            legs = [(sample, leg_of(inner.asked[name])) for name, sample in begun.items()]
            with self._engine.computing():
                inner.drop()
            yield from legs

    def close(self) -> None:
        """Nothing is kept."""


def leg_of(request: Any) -> Leg | Exception:
    """What there is of one of SGLang's requests, or why it took none."""
    reason = request.finished_reason
    said = {"type": "abort"} if reason is None else reason.to_json()
    if said["type"] == "abort" and said.get("status_code"):
        return DataError(f"SGLang refuses a request: {said['message']}")
    tokens = [*request.output_ids_through_stop]
    logprobs = (request.logprob.output_token_logprobs_val or [])[: len(tokens)]
    return Leg(tokens, logprobs, said["type"])


if importlib.util.find_spec("sglang") and not torch.cuda.is_available():
    # Before anything imports what they stand in for: transformers does.
    sys.path.insert(0, str(STAND_INS))
