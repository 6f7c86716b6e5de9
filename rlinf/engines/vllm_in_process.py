"""vLLM in the process of the stage; see :mod:`rlinf.engines.in_process`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from rlinf.engines.in_process import InProcessEngine, apart
from rlinf.engines.legs import Ask, Leg, Sample
from rlinf.engines.vllm import LENGTH_SCALINGS, VARIABLES, arguments, settings


class VLLMInProcess(InProcessEngine):
    """See the module."""

    length_scalings = LENGTH_SCALINGS

    @classmethod
    def packages(cls, config: Any) -> tuple[str, ...]:
        return ("vllm",)

    def make(self, model: Path) -> None:
        variables = {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_LOGGING_LEVEL": os.environ.get("VLLM_LOGGING_LEVEL", "WARNING"),
            **VARIABLES,
        }
        with apart(self.device, variables, "VLLM_"):
            from vllm.engine.arg_utils import EngineArgs
            from vllm.utils.argparse_utils import FlexibleArgumentParser
            from vllm.v1.engine.llm_engine import LLMEngine

            parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
            words = [
                *arguments(self, model, self._context),
                *("--load-format", "dummy", "--disable-log-stats", "--no-use-tqdm-on-load"),
                *("--worker-extension-cls", "rlinf.engines.inside.rlinf_vllm.Extension"),
                *self._config.arguments,
            ]
            made = EngineArgs.from_cli_args(parser.parse_args(words))
            self.inner = LLMEngine.from_engine_args(made)
            self.inner.collective_rpc("rlinf_begin")
        # Of each update it says that layers without weights got none.
        logging.getLogger("vllm.model_executor.model_loader.reload").setLevel(logging.ERROR)

    def put(self, tensors: Iterable[tuple[str, Tensor]]) -> None:
        self.inner.collective_rpc("rlinf_take", args=(tensors,))
        if not self.inner.reset_prefix_cache():
            raise RuntimeError("vLLM keeps what it has cached: samples are under way")

    def end(self, inner: Any) -> None:
        inner.engine_core.shutdown()

    def sleep(self) -> None:
        self.inner.sleep(level=1)  # keeps the weights in the host's memory

    def wake(self) -> None:
        self.inner.wake_up()

    def decoder(self) -> Stepped:
        return Stepped(self)


@dataclass(eq=False)
class Made:
    """What there is of a leg."""

    sample: Sample
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)


class Stepped:
    """See :class:`rlinf.engines.legs.Decoder`: one step of all legs at a time."""

    def __init__(self, engine: VLLMInProcess) -> None:
        self._engine = engine
        self._made: dict[str, Made] = {}
        self._count = 0

    def __len__(self) -> int:
        return len(self._made)

    def begin(self, sample: Sample, ask: Ask) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine.check_room(ask)
        kind = RequestOutputKind.DELTA
        params = SamplingParams(**settings(ask, self._engine.stops_of(ask)), output_kind=kind)
        self._count += 1
        name = str(self._count)
        self._engine.inner.add_request(name, tokens_input(ask.tokens), params)
        self._made[name] = Made(sample)

    def ended(self) -> list[tuple[Sample, Leg | Exception]]:
        found: list[tuple[Sample, Leg | Exception]] = []
        with self._engine.computing():
            outputs = self._engine.inner.step()
        for output in outputs:
            made, (choice,) = self._made[output.request_id], output.outputs
            made.tokens += choice.token_ids
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            made.logprobs += [entry[token].logprob for token, entry in pairs]
            if output.finished:
                del self._made[output.request_id]
                leg = Leg(made.tokens, made.logprobs, choice.finish_reason)
                found.append((made.sample, leg))
        return found

    def cut_off(self) -> Iterator[tuple[Sample, Leg | Exception]]:
        made, self._made = self._made, {}
        if made and self._engine.inner is not None:
            self._engine.inner.abort_request([*made])
        for one in made.values():
            yield one.sample, Leg(one.tokens, one.logprobs, "abort")

    def close(self) -> None:
        """Nothing is kept."""
