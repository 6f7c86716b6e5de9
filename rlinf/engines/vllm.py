"""Engines that use vLLM: as servers (:mod:`rlinf.engines.server`), or in the stage's process.

Requests and responses carry token ids, no text (``/inference/v1/generate``). A worker extension
(``engine_plugins/rlinf_vllm.py``) loads new weights in place and computes the log-probabilities of
the policy.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlinf.config import Section
from rlinf.engines.base import TokenScores
from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.in_process import InProcessEngine, restore_process_state
from rlinf.engines.resumable import GeneratedSegment, ResumableSample, SegmentRequest
from rlinf.engines.server import ServerConfig, ServerEngine
from rlinf.engines.server_process import ServerError, ServerProcess, ServerUnavailable
from rlinf.errors import DataError
from rlinf.progress import PROGRESS

ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension supports only the first model runner
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of every process that imports vLLM."""
WORKSPACE_BYTES = 2 << 30
"""Memory of a GPU for activations and CUDA graphs, beside weights and KV cache."""
MAX_MEMORY_SHARE = 0.9
"""Largest share of a GPU that must be free when vLLM starts: vLLM's default."""
LENGTH_SCALINGS = frozenset({"longrope"})
"""Rotary scalings as in the trainer: vLLM uses the long factors of LongRoPE if ``--max-model-len``
exceeds the original length. Dynamic NTK would use the frequencies of the longest sequence."""


class RequestSeeds(Section):
    """The option of vLLM engines for the seeds of requests."""

    request_seeds: bool = True
    """Whether each request has a seed, so that a sample depends only on the run's seed, the
    iteration and its number. vLLM then draws the tokens of a batch row by row, which takes time
    with large batches on a GPU. If false, a sample also depends on those that run beside it."""


class VLLMConfig(RequestSeeds, ServerConfig):
    """Options of vLLM servers."""

    server_python: str = "vllm"


class VLLMInProcessConfig(RequestSeeds, ExternalConfig):
    """Options of vLLM in the stage's process."""


class VLLMEngine(ServerEngine):
    """An engine that sends requests to vLLM servers."""

    supported_length_scalings = LENGTH_SCALINGS

    Config = VLLMConfig
    server_packages = ("vllm",)
    server_module = "vllm.entrypoints.openai.api_server"
    heartbeat_route = "/is_sleeping"  # reaches the decoding process, unlike /health

    def server_args(self, model: Path, context_length: int, socket: Path) -> list[str]:
        return [
            *vllm_args(self, model, context_length),
            *("--uds", str(socket), "--enable-scale-out", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", "rlinf_vllm.WorkerExtension"),
        ]

    def server_environment(self, socket: Path) -> Mapping[str, str]:
        variables = {
            **ENVIRONMENT,
            "VLLM_SERVER_DEV_MODE": "1",  # enables the routes for weights, aborts and caches
            "VLLM_RPC_BASE_PATH": str(socket.parent),
        }
        if self.device.type != "cpu":
            return variables
        return {**variables, "TORCH_COMPILE_DISABLE": "1"}

    def on_server_ready(self, process: ServerProcess) -> None:
        _call(process, "rlinf_setup", check_heartbeat=True)

    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        body = {
            "token_ids": request.context_tokens,
            "sampling_params": vllm_sampling_params(self, request),
        }
        return "/inference/v1/generate", body

    def parse_response(self, values: Any) -> GeneratedSegment:
        (choice,) = values["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        finish_reason = choice["finish_reason"]
        return GeneratedSegment(tokens, [entry["logprob"] for entry in content], finish_reason)

    def score_tokens(
        self, texts: Sequence[np.ndarray], temperature: float, num_top: int
    ) -> list[TokenScores]:
        if temperature not in (0, 1):
            raise DataError(
                f"vLLM computes log-probabilities of given texts at temperature 1 only, not "
                f"{temperature:g}"
            )
        with ThreadPoolExecutor(min(len(texts), self.max_batch(self._config)), "score") as pool:
            return list(pool.map(lambda text: self._score_text(text.tolist(), num_top), texts))

    def _score_text(self, tokens: list[int], num_top: int) -> TokenScores:
        if len(tokens) + 1 > self._max_model_len:
            raise DataError(
                f"a text of {len(tokens)} tokens and one more do not fit into {self._max_model_len}"
            )
        sampling = {"max_tokens": 1, "prompt_logprobs": num_top, "detokenize": False}
        body = {"token_ids": tokens, "sampling_params": sampling}
        try:
            values = self._servers.request(tokens, "/inference/v1/generate", body, lambda _: [])
        except ServerUnavailable as error:
            raise ServerError(
                f"a server died while it scored a text ({error}); end of its log:\n"
                f"{self.log_tail()}"
            ) from None
        # Log-probabilities by id: of the token at a position, and of the most likely ones.
        rows = [
            {int(token): float(entry["logprob"]) for token, entry in entries.items()}
            for entries in values["prompt_logprobs"][1:]
        ]
        top = [sorted(row.items(), key=lambda pair: -pair[1])[:num_top] for row in rows]
        shape = (len(rows), num_top)
        return TokenScores(
            np.array([row[t] for row, t in zip(rows, tokens[1:], strict=True)], np.float32),
            np.array([[token for token, _ in best] for best in top], np.int64).reshape(shape),
            np.array([[value for _, value in best] for best in top], np.float32).reshape(shape),
        )

    def abort_requests(self, process: ServerProcess) -> None:
        process.post("/abort_requests", {"request_ids": []}, check_heartbeat=True)

    def sleep(self, process: ServerProcess) -> None:
        # Level 2 keeps no copy of the weights in host memory.
        process.post("/sleep?level=2&mode=abort")

    def wake(self, process: ServerProcess) -> None:
        process.post("/wake_up")

    def update_weights(self, process: ServerProcess, folder: Path, version: int) -> None:
        _call(process, "rlinf_load_folder", str(folder))
        process.post("/reset_prefix_cache")
        process.post("/update_weight_version", {"new_version": str(version)})


def _call(process: ServerProcess, method: str, *args: str, check_heartbeat: bool = False) -> None:
    """Call a method of the worker extension in each worker of a server."""
    body = {"method": method, "args": list(args)}
    process.post("/collective_rpc", body, check_heartbeat=check_heartbeat)


def vllm_args(engine: ExternalEngine, model: Path, context_length: int) -> list[str]:
    """Return the command-line arguments of vLLM for the model and its decoding.

    Args:
        context_length: Largest number of tokens of prompt and response together.
    """
    config, policy = engine._config, engine._policy_config
    return [
        *("--model", str(model), "--dtype", policy.dtype),
        *("--tensor-parallel-size", str(engine.world.layout.tp)),
        *("--max-model-len", str(context_length), "--max-num-seqs", str(config.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_bytes())),
        *_memory_share_args(engine),
        *("--generation-config", "vllm"),  # ignore the checkpoint's sampling defaults
        *(["--enable-sleep-mode"] if engine.can_sleep else []),
        *(["--enforce-eager"] if engine.device.type == "cpu" else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def _memory_share_args(engine: ExternalEngine) -> list[str]:
    """Return the share of a GPU that must be free when vLLM starts.

    vLLM refuses to start with less free memory than this share, by default nine tenths, although
    ``--kv-cache-memory-bytes`` decides what it allocates. A trainer may keep the rest.
    """
    if engine.device.type != "cuda":
        return []  # on a CPU it would be a share of the node's memory
    total = torch.cuda.get_device_properties(engine.device).total_memory
    share = (engine.device_bytes() + WORKSPACE_BYTES) / total
    return ["--gpu-memory-utilization", f"{min(share, MAX_MEMORY_SHARE):.3f}"]


def vllm_sampling_params(engine: ExternalEngine, request: SegmentRequest) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a segment."""
    sampling = request.sampling
    return {
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.seed if engine._config.request_seeds else None,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(engine.stop_token_ids_for(request)),
        "ignore_eos": True,  # stop_token_ids has all stop tokens
        "logprobs": 0,  # only for the sampled token
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": True,
    }


class VLLMInProcessEngine(InProcessEngine):
    """An engine that steps a vLLM engine in the stage's process."""

    Config = VLLMInProcessConfig
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
                *("--load-format", "dummy", "--no-use-tqdm-on-load"),
                *(
                    "--worker-extension-cls",
                    "rlinf.engines.engine_plugins.rlinf_vllm.WorkerExtension",
                ),
                *self._config.extra_args,
            ]
            args = EngineArgs.from_cli_args(parser.parse_args(arguments))
            vllm_config = args.create_engine_config()
            if self.device.type == "cuda":
                # Otherwise vLLM uses GPU 0 in every process that sees all GPUs of its job.
                vllm_config.device_config.device = self.device
            self.backend = LLMEngine.from_vllm_config(vllm_config, disable_log_stats=True)
            self.backend.collective_rpc("rlinf_setup")
        # Otherwise each update logs that layers without weights were not loaded.
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
        """Running segments by vLLM's request id."""
        self._num_submitted = 0

    def __len__(self) -> int:
        return len(self._running)

    def submit(self, sample: ResumableSample, request: SegmentRequest) -> None:
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        self._engine.check_length(request)
        params = SamplingParams(
            **vllm_sampling_params(self._engine, request),
            output_kind=RequestOutputKind.DELTA,
        )
        self._num_submitted += 1
        request_id = str(self._num_submitted)
        self._engine.backend.add_request(request_id, tokens_input(request.context_tokens), params)
        self._running[request_id] = VLLMSegment(sample)

    def poll_finished(self) -> list[tuple[ResumableSample, GeneratedSegment | Exception]]:
        finished: list[tuple[ResumableSample, GeneratedSegment | Exception]] = []
        with self._engine.close_on_error():
            outputs = self._engine.backend.step()
            PROGRESS.mark()
        for output in outputs:
            segment, (choice,) = self._running[output.request_id], output.outputs
            segment.tokens += choice.token_ids
            pairs = zip(choice.token_ids, choice.logprobs, strict=True)
            segment.logprobs += [entry[token].logprob for token, entry in pairs]
            if output.finished:
                del self._running[output.request_id]
                result = GeneratedSegment(segment.tokens, segment.logprobs, choice.finish_reason)
                finished.append((segment.sample, result))
        return finished

    def abort_all(self) -> Iterator[tuple[ResumableSample, GeneratedSegment | Exception]]:
        running, self._running = self._running, {}
        if running and self._engine.backend is not None:
            self._engine.backend.abort_request([*running])
        for segment in running.values():
            yield segment.sample, GeneratedSegment(segment.tokens, segment.logprobs, "abort")

    def close(self) -> None:
        """Do nothing: there are no resources."""
