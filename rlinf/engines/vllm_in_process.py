"""The engine that runs vLLM in the stage's process; see :mod:`rlinf.engines.in_process`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.engines.in_process import InProcessEngine, restore_process_state
from rlinf.engines.resumable import GeneratedSegment, ResumableSample, SegmentRequest
from rlinf.engines.vllm import ENVIRONMENT, LENGTH_SCALINGS, vllm_args, vllm_sampling_params


class VLLMInProcessEngine(InProcessEngine):
    """An engine that steps a vLLM engine in the stage's process."""

    supported_length_scalings = LENGTH_SCALINGS

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        return ("vllm",)

    def create_backend(self, model: Path) -> None:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            **ENVIRONMENT,
        }
        with restore_process_state(self.device, variables, "VLLM_"):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.utils.argparse_utils import FlexibleArgumentParser
            from vllm.v1.engine.llm_engine import LLMEngine

            parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
            arguments = [
                *vllm_args(self, model, self._max_model_len),
                *("--load-format", "dummy", "--disable-log-stats", "--no-use-tqdm-on-load"),
                *(
                    "--worker-extension-cls",
                    "rlinf.engines.engine_plugins.rlinf_vllm.WorkerExtension",
                ),
                *self._config.extra_args,
            ]
            args = EngineArgs.from_cli_args(parser.parse_args(arguments))
            self.backend = LLMEngine.from_engine_args(args)
            self.backend.collective_rpc("rlinf_setup")
        # Each update would log that layers without weights were not loaded.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.backend.collective_rpc("rlinf_load_weights", args=(tensors,))
        if not self.backend.reset_prefix_cache():
            raise RuntimeError("vLLM cannot clear its cache while samples are running")

    def shut_down(self, backend: Any) -> None:
        backend.engine_core.shutdown()

    def sleep(self) -> None:
        self.backend.sleep(level=1)  # keeps the weights in the host's memory

    def wake(self) -> None:
        self.backend.wake_up()

    def create_decoder(self) -> VLLMStepDecoder:
        return VLLMStepDecoder(self)


@dataclass(eq=False)
class VLLMSegment:
    """A running segment with the tokens generated so far."""

    sample: ResumableSample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VLLMStepDecoder:
    """A :class:`rlinf.engines.resumable.SegmentDecoder` that steps all segments together."""

    def __init__(self, engine: VLLMInProcessEngine) -> None:
        self._engine = engine
        self._running: dict[str, VLLMSegment] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine.check_length(request)
        params = SamplingParams(
            **vllm_sampling_params(request, self._engine.stop_token_ids_for(request)),
            output_kind=RequestOutputKind.DELTA,
        )
        self._count += 1
        name = str(self._count)
        self._engine.backend.add_request(name, tokens_input(request.context_tokens), params)
        self._running[name] = VLLMSegment(sample)

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        finished: list[tuple[ResumableSample, GeneratedSegment | Exception]] = []
        with self._engine.close_on_error():
            outputs = self._engine.backend.step()
        for output in outputs:
            running, (choice,) = self._running[output.request_id], output.outputs
            running.tokens += choice.token_ids
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            running.logprobs += [entry[token].logprob for token, entry in pairs]
            if output.finished:
                del self._running[output.request_id]
                segment = GeneratedSegment(running.tokens, running.logprobs, choice.finish_reason)
                finished.append((running.sample, segment))
        return finished

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        running, self._running = self._running, {}
        if running and self._engine.backend is not None:
            self._engine.backend.abort_request([*running])
        for segment in running.values():
            yield segment.sample, GeneratedSegment(segment.tokens, segment.logprobs, "abort")

    def close(self) -> None:
        """Do nothing: there are no resources."""
