"""The engine that runs SGLang in the stage's process; see :mod:`rlinf.engines.in_process`.

It creates only SGLang's scheduler (``engine_plugins/sglang_scheduler.py``), without the processes
that SGLang starts around it.
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
    """An engine that steps an SGLang scheduler in the stage's process."""

    Config = SGLangCacheConfig

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        return ("sglang",)

    def create_backend(self, model: Path) -> None:
        variables = dict(ENVIRONMENT)
        if self.device.type == "cpu":
            variables |= cpu_environment(1, self._config.threads)
        arguments = [
            *sglang_args(self, model, self._max_model_len),
            *("--load-format", "dummy", "--log-level", "error", "--disable-overlap-schedule"),
            *(["--enable-weights-cpu-backup"] if self.can_sleep else []),
            *self._config.extra_args,
        ]
        logging.getLogger("sglang").setLevel(logging.ERROR)
        with restore_process_state(self.device, variables, "SGLANG_"):
            if self.can_sleep:
                from torch_memory_saver import torch_memory_saver

                # The default mode needs a preloaded library. It can be set only before the start.
                if torch_memory_saver._impl is None:
                    torch_memory_saver.hook_mode = "torch"
            from rlinf.engines.engine_plugins.sglang_scheduler import create_scheduler

            self.backend = create_scheduler(arguments, self.device.index or 0)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.backend.rlinf_load_weights(tensors)

    def shut_down(self, backend: Any) -> None:
        backend.rlinf_shut_down()

    def sleep(self) -> None:
        self.backend.rlinf_sleep(MEMORY_TAGS)

    def wake(self) -> None:
        self.backend.rlinf_wake(MEMORY_TAGS)

    def create_decoder(self) -> SGLangStepDecoder:
        return SGLangStepDecoder(self)


class SGLangStepDecoder:
    """A :class:`rlinf.engines.resumable.SegmentDecoder` that steps all segments together."""

    def __init__(self, engine: SGLangInProcessEngine) -> None:
        self._engine = engine
        self._running: dict[str, ResumableSample] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        self._engine.check_length(request)
        self._count += 1
        name = str(self._count)
        self._engine.backend.rlinf_submit(
            name,
            request.context_tokens,
            sglang_sampling_params(request, self._engine.stop_token_ids_for(request)),
        )
        self._running[name] = sample

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        with self._engine.close_on_error():
            finished = self._engine.backend.step()
        return [
            (self._running.pop(name), to_segment(request)) for name, request in finished.items()
        ]

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        backend, running, self._running = self._engine.backend, self._running, {}
        if running and backend is not None:
            requests = backend.rlinf_requests
            segments = [(sample, to_segment(requests[name])) for name, sample in running.items()]
            with self._engine.close_on_error():
                backend.rlinf_abort_all()
            yield from segments

    def close(self) -> None:
        """Do nothing: there are no resources."""


def to_segment(request: Any) -> GeneratedSegment | Exception:
    """Return the tokens of an SGLang request as a segment, or the error of a rejected request."""
    reason = request.finished_reason
    finish = {"type": "abort"} if reason is None else reason.to_json()
    if finish["type"] == "abort" and finish.get("status_code"):
        return DataError(f"SGLang refuses a request: {finish['message']}")
    tokens = [*request.output_ids_through_stop]
    logprobs = (request.logprob.output_token_logprobs_val or [])[: len(tokens)]
    return GeneratedSegment(tokens, logprobs, finish["type"])


if importlib.util.find_spec("sglang") and not torch.cuda.is_available():
    # Must precede imports, for example by transformers, of the packages that the stubs replace.
    sys.path.insert(0, str(CPU_STUBS))
