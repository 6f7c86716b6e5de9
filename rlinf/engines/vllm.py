"""The engine that uses vLLM servers; see :mod:`rlinf.engines.server`.

Requests and responses have token ids (``/inference/v1/generate``). A worker extension
(``engine_plugins/rlinf_vllm.py``) loads new weights in place and computes the log-probabilities of
the policy.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlinf.engines.external import ExternalEngine
from rlinf.engines.resumable import GeneratedSegment, SegmentRequest
from rlinf.engines.server import ServerConfig, ServerEngine
from rlinf.engines.server_process import ServerProcess

SUBPROCESS_MODULES = ("rlinf.engines.engine_plugins.rlinf_vllm",)
"""Modules that other processes run; they are part of the identity of outputs."""
ENVIRONMENT = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension supports only the first model runner
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Environment variables of every process that imports vLLM."""


LENGTH_SCALINGS = frozenset({"longrope"})
"""vLLM uses the long factors if ``--max-model-len`` exceeds the original length, as
:mod:`rlinf.models.rotary` does. For dynamic NTK it uses the frequencies of the longest sequence."""


class VLLMConfig(ServerConfig):
    """Options of vLLM servers."""

    server_python: str = "vllm"


class VLLMEngine(ServerEngine):
    """An engine that sends requests to vLLM servers."""

    supported_length_scalings = LENGTH_SCALINGS

    Config = VLLMConfig
    server_package = "vllm"
    server_module = "vllm.entrypoints.openai.api_server"
    heartbeat_route = "/is_sleeping"  # reaches the decoding process, unlike /health

    def server_args(self, model: Path, context: int, socket: Path) -> list[str]:
        return [
            *vllm_args(self, model, context),
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
            "sampling_params": vllm_sampling_params(request, self.stop_token_ids_for(request)),
        }
        return "/inference/v1/generate", body

    def parse_response(self, values: Any) -> GeneratedSegment:
        (choice,) = values["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        finish_reason = choice["finish_reason"]
        return GeneratedSegment(tokens, [entry["logprob"] for entry in content], finish_reason)

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


def vllm_args(engine: ExternalEngine, model: Path, context: int) -> list[str]:
    """Return the command-line arguments of vLLM for the model and its decoding.

    Args:
        model: The model folder.
        context: Largest number of tokens of prompt and response together.
    """
    config, policy = engine._config, engine._policy_config
    return [
        *("--model", str(model), "--dtype", policy.dtype),
        *("--tensor-parallel-size", str(engine.world.layout.tp)),
        *("--max-model-len", str(context), "--max-num-seqs", str(config.max_num_seqs)),
        *("--kv-cache-memory-bytes", str(engine.kv_cache_bytes())),
        *("--generation-config", "vllm"),  # ignore the checkpoint's sampling defaults
        *(["--enable-sleep-mode"] if engine.can_sleep else []),
        *(["--enforce-eager"] if engine.device.type == "cpu" else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def vllm_sampling_params(request: SegmentRequest, stops: Collection[int]) -> dict[str, Any]:
    """Return vLLM's sampling parameters for a segment.

    Args:
        stops: Ids of the tokens that end a sample.
    """
    sampling = request.sampling
    return {
        "max_tokens": request.max_tokens,
        "min_tokens": request.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": request.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,  # stop_token_ids has all stop tokens
        "logprobs": 0,  # only for the sampled token
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": True,
    }
