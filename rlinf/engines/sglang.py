"""Engines that use SGLang: as servers (:mod:`rlinf.engines.server`), or in the stage's process.

``engine_plugins/rlinf_sglang.py`` patches SGLang in its processes so that it fulfils the engine
contract.
"""

from __future__ import annotations

import logging
import socket as sockets
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import Field
from torch import Tensor

from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.in_process import InProcessEngine, restore_process_state
from rlinf.engines.resumable import GeneratedSegment, ResumableSample, SegmentRequest
from rlinf.engines.server import ServerConfig, ServerEngine
from rlinf.engines.server_process import ServerProcess
from rlinf.errors import ConfigError, DataError

PACKAGES = ("sglang", "sgl_kernel")
"""Packages that SGLang's interpreter must have. The kernels are published for GPUs only."""
MEMORY_TAGS = ["kv_cache", "weights"]
"""SGLang's names of the memory that sleeping frees."""
CONTEXT_MARGIN = 8
"""Tokens to add to SGLang's context length. SGLang limits prompts to six tokens less than this
length, and ends responses two tokens before it as if they were complete."""
ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # for CONTEXT_MARGIN
"""Environment variables of every process that imports SGLang."""


class SGLangCacheConfig(ExternalConfig):
    """Options of SGLang, as a server and in the stage's process."""

    max_total_tokens: int | None = Field(default=None, gt=0)
    """Size of the KV cache in tokens; null: that of ``kv_cache_gib``."""


class SGLangCacheEngine(ExternalEngine):
    """An engine whose KV cache size is given in tokens."""

    def max_total_tokens(self) -> int:
        """Return the size of the KV cache in tokens."""
        if self._config.max_total_tokens is not None:
            return int(self._config.max_total_tokens)
        return super().kv_cache_bytes() // self.kv_bytes_per_token()

    def kv_cache_bytes(self) -> int:
        return self.max_total_tokens() * self.kv_bytes_per_token()

    def _read_model(self, model: Path) -> None:
        super()._read_model(model)
        length = self._config.max_model_len
        max_cached = self.max_total_tokens() - CONTEXT_MARGIN
        if max_cached < (length or 1):
            raise ConfigError(
                f"engine.max_total_tokens: {self.max_total_tokens()} hold no sample of "
                f"{length or 1} tokens and {CONTEXT_MARGIN} more; raise it, or lower "
                "engine.max_model_len"
            )
        self._max_model_len = min(self._max_model_len, max_cached)


class SGLangConfig(SGLangCacheConfig, ServerConfig):
    """Options of SGLang servers."""

    server_python: str = "sglang"


class SGLangEngine(SGLangCacheEngine, ServerEngine):
    """An engine that sends requests to SGLang servers."""

    Config = SGLangConfig
    server_module = "rlinf_sglang"
    server_packages = PACKAGES

    def server_args(self, model: Path, context_length: int, socket: Path) -> list[str]:
        with sockets.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # unused; SGLang derives other port numbers from it
        return [
            *sglang_args(self, model, context_length),
            *("--port", str(port), "--skip-server-warmup", "--log-level-http", "warning"),
            # Otherwise an idle scheduler occupies a CPU core.
            "--sleep-on-idle",
        ]

    def server_environment(self, socket: Path) -> Mapping[str, str]:
        # A new file, because an old one may have messages of a dead server, which torch would read.
        rendezvous = socket.with_name(f"rendezvous-{uuid.uuid4().hex}")
        return {
            **ENVIRONMENT,
            "RLINF_SOCKET": str(socket),
            # Otherwise a torch store listens on all network interfaces.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{rendezvous}",
        }

    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        body = {
            "input_ids": request.context_tokens,
            "sampling_params": sglang_sampling_params(request, self.stop_token_ids_for(request)),
        }
        return "/generate", {**body, "return_logprob": True}

    def parse_response(self, values: Any) -> GeneratedSegment:
        info = values["meta_info"]
        logprobs = [entry[0] for entry in info["output_token_logprobs"]]
        return GeneratedSegment(values["output_ids"], logprobs, info["finish_reason"]["type"])

    def abort_requests(self, process: ServerProcess) -> None:
        process.post("/abort_request", {"abort_all": True}, check_heartbeat=True)

    def sleep(self, process: ServerProcess) -> None:
        process.post("/release_memory_occupation", {"tags": MEMORY_TAGS})

    def wake(self, process: ServerProcess) -> None:
        process.post("/resume_memory_occupation", {"tags": MEMORY_TAGS})

    def update_weights(self, process: ServerProcess, folder: Path, version: int) -> None:
        process.post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)},
        )


def sglang_args(engine: SGLangCacheEngine, model: Path, context_length: int) -> list[str]:
    """Return the command-line arguments of SGLang for the model and its decoding.

    Args:
        context_length: Largest number of tokens of prompt and response together.
    """
    config, policy = engine._config, engine._policy_config
    return [
        *("--model-path", str(model)),
        *("--dtype", policy.dtype, "--context-length", str(context_length + CONTEXT_MARGIN)),
        *("--tp-size", str(engine.world.layout.tp)),
        *("--max-running-requests", str(config.max_num_seqs)),
        *("--max-total-tokens", str(engine.max_total_tokens())),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *(["--enable-memory-saver"] if engine.can_sleep else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def sglang_sampling_params(
    request: SegmentRequest, stop_token_ids: Collection[int]
) -> dict[str, Any]:
    """Return SGLang's sampling parameters for a segment."""
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_tokens,
        "min_new_tokens": request.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "sampling_seed": request.seed,
        # With min_new_tokens, resumable.py checks stop strings: SGLang would apply them too early.
        "stop": [] if request.min_tokens else list(sampling.stop),
        "stop_token_ids": sorted(stop_token_ids),
        "ignore_eos": not stop_token_ids,
        "no_stop_trim": True,
    }


class SGLangInProcessEngine(SGLangCacheEngine, InProcessEngine):
    """An engine that steps an SGLang scheduler in the stage's process."""

    Config = SGLangCacheConfig

    @classmethod
    def required_packages(cls, config: Any) -> tuple[str, ...]:
        return PACKAGES

    def create_backend(self, model: Path) -> None:
        arguments = [
            *sglang_args(self, model, self._max_model_len),
            *("--load-format", "dummy", "--log-level", "error", "--disable-overlap-schedule"),
            *(["--enable-weights-cpu-backup"] if self.can_sleep else []),
            *self._config.extra_args,
        ]
        logging.getLogger("sglang").setLevel(logging.ERROR)
        with restore_process_state(self.device, ENVIRONMENT, "SGLANG_"):
            if self.can_sleep:
                from torch_memory_saver import torch_memory_saver

                # The default mode needs a preloaded library. Later, the mode cannot be changed.
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
        """Samples of the running segments, by SGLang's request id."""
        self._num_submitted = 0

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        self._engine.check_length(request)
        self._num_submitted += 1
        request_id = str(self._num_submitted)
        self._engine.backend.rlinf_submit(
            request_id,
            request.context_tokens,
            sglang_sampling_params(request, self._engine.stop_token_ids_for(request)),
        )
        self._running[request_id] = sample

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        with self._engine.close_on_error():
            finished = self._engine.backend.step()
        return [(self._running.pop(rid), to_segment(request)) for rid, request in finished.items()]

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        backend, running, self._running = self._engine.backend, self._running, {}
        if running and backend is not None:
            requests = backend.rlinf_requests
            segments = [(sample, to_segment(requests[rid])) for rid, sample in running.items()]
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
