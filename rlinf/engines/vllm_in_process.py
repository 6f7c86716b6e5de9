"""vLLM in the process of the stage; see :mod:`rlinf.engines.in_process`."""

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
    """See the module."""

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
            words = [
                *vllm_args(self, model, self._context),
                *("--load-format", "dummy", "--disable-log-stats", "--no-use-tqdm-on-load"),
                *(
                    "--worker-extension-cls",
                    "rlinf.engines.engine_plugins.rlinf_vllm.WorkerExtension",
                ),
                *self._config.extra_args,
            ]
            made = EngineArgs.from_cli_args(parser.parse_args(words))
            self.backend = LLMEngine.from_engine_args(made)
            self.backend.collective_rpc("rlinf_setup")
        # Of each update it says that layers without weights got none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)

    def update_weights(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.backend.collective_rpc("rlinf_load_weights", args=(tensors,))
        if not self.backend.reset_prefix_cache():
            raise RuntimeError("vLLM keeps what it has cached: samples are under way")

    def shut_down(self, inner: Any) -> None:
        inner.engine_core.shutdown()

    def sleep(self) -> None:
        self.backend.sleep(level=1)  # keeps the weights in the host's memory

    def wake(self) -> None:
        self.backend.wake_up()

    def create_decoder(self) -> VLLMStepDecoder:
        return VLLMStepDecoder(self)


@dataclass(eq=False)
class VLLMSegment:
    """What there is of a leg."""

    sample: ResumableSample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class VLLMStepDecoder:
    """See :class:`rlinf.engines.resumable.SegmentDecoder`: one step of all legs at a time."""

    def __init__(self, engine: VLLMInProcessEngine) -> None:
        self._engine = engine
        self._made: dict[str, VLLMSegment] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._made)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine.check_length(request)
        kind = RequestOutputKind.DELTA
        params = SamplingParams(
            **vllm_sampling_params(request, self._engine.stop_token_ids_for(request)),
            output_kind=kind,
        )
        self._count += 1
        name = str(self._count)
        self._engine.backend.add_request(name, tokens_input(request.context_tokens), params)
        self._made[name] = VLLMSegment(sample)

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        found: list[tuple[ResumableSample, GeneratedSegment | Exception]] = []
        with self._engine.close_on_error():
            outputs = self._engine.backend.step()
        for output in outputs:
            made, (choice,) = self._made[output.request_id], output.outputs
            made.tokens += choice.token_ids
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            made.logprobs += [entry[token].logprob for token, entry in pairs]
            if output.finished:
                del self._made[output.request_id]
                leg = GeneratedSegment(made.tokens, made.logprobs, choice.finish_reason)
                found.append((made.sample, leg))
        return found

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        made, self._made = self._made, {}
        if made and self._engine.backend is not None:
            self._engine.backend.abort_request([*made])
        for one in made.values():
            yield one.sample, GeneratedSegment(one.tokens, one.logprobs, "abort")

    def close(self) -> None:
        """Nothing is kept."""
