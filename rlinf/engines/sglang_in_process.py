"""SGLang in the process of the stage; see :mod:`rlinf.engines.in_process`.

Its scheduler alone is made (``engine_plugins/sglang_scheduler.py``), none of the processes that SGLang has
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

from rlinf.engines.in_process import InProcessEngine, restore_process_state
from rlinf.engines.resumable import GeneratedSegment, ResumableSample, SegmentRequest
from rlinf.engines.sglang import (
    CPU_STUBS,
    ENVIRONMENT,
    MEMORY_TAGS,
    SGLangCacheConfig,
    SGLangCacheEngine,
    cpu_environment,
    sglang_args,
    sglang_sampling_params,
)
from rlinf.errors import DataError


class SGLangInProcessEngine(SGLangCacheEngine, InProcessEngine):
    """See the module."""

    Config = SGLangCacheConfig

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        return ("sglang",)

    def create_backend(self, model: Path) -> None:
        variables = dict(ENVIRONMENT)
        if self.device.type == "cpu":
            variables |= cpu_environment(1, self._config.threads)
        words = [
            *sglang_args(self, model, self._context),
            *("--load-format", "dummy", "--log-level", "error", "--disable-overlap-schedule"),
            *(["--enable-weights-cpu-backup"] if self.can_sleep else []),
            *self._config.extra_args,
        ]
        logging.getLogger("sglang").setLevel(logging.ERROR)
        with restore_process_state(self.device, variables, "SGLANG_"):
            if self.can_sleep:
                from torch_memory_saver import torch_memory_saver

                # The other way is a library that is loaded before the process starts. It can be
                # said before the first start alone.
                if torch_memory_saver._impl is None:
                    torch_memory_saver.hook_mode = "torch"
            from rlinf.engines.engine_plugins.sglang_scheduler import create_scheduler

            self.backend = create_scheduler(words, self.device.index or 0)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.backend.rlinf_load_weights(tensors)

    def shut_down(self, inner: Any) -> None:
        inner.rlinf_shut_down()

    def sleep(self) -> None:
        self.backend.rlinf_sleep(MEMORY_TAGS)

    def wake(self) -> None:
        self.backend.rlinf_wake(MEMORY_TAGS)

    def create_decoder(self) -> SGLangStepDecoder:
        return SGLangStepDecoder(self)


class SGLangStepDecoder:
    """See :class:`rlinf.engines.resumable.SegmentDecoder`: one step of all legs at a time."""

    def __init__(self, engine: SGLangInProcessEngine) -> None:
        self._engine = engine
        self._begun: dict[str, ResumableSample] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._begun)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        self._engine.check_length(request)
        self._count += 1
        name = str(self._count)
        self._engine.backend.rlinf_submit(
            name,
            request.context_tokens,
            sglang_sampling_params(request, self._engine.stop_token_ids_for(request)),
        )
        self._begun[name] = sample

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        with self._engine.close_on_error():
            ended = self._engine.backend.step()
        return [(self._begun.pop(name), segment_of(request)) for name, request in ended.items()]

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        inner, begun, self._begun = self._engine.backend, self._begun, {}
        if begun and inner is not None:
            legs = [
                (sample, segment_of(inner.rlinf_requests[name])) for name, sample in begun.items()
            ]
            with self._engine.close_on_error():
                inner.rlinf_abort_all()
            yield from legs

    def close(self) -> None:
        """Nothing is kept."""


def segment_of(request: Any) -> GeneratedSegment | Exception:
    """What there is of one of SGLang's requests, or why it took none."""
    reason = request.finished_reason
    said = {"type": "abort"} if reason is None else reason.to_json()
    if said["type"] == "abort" and said.get("status_code"):
        return DataError(f"SGLang refuses a request: {said['message']}")
    tokens = [*request.output_ids_through_stop]
    logprobs = (request.logprob.output_token_logprobs_val or [])[: len(tokens)]
    return GeneratedSegment(tokens, logprobs, said["type"])


if importlib.util.find_spec("sglang") and not torch.cuda.is_available():
    # Before anything imports what they stand in for: transformers does.
    sys.path.insert(0, str(CPU_STUBS))
