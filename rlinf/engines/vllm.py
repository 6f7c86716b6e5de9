"""vLLM as a server; see :mod:`rlinf.engines.server`.

Tokens go in and come out as numbers (``/inference/v1/generate``); a worker extension
(``inside/rlinf_vllm.py``) reads new weights in place and takes log-probabilities as they are
defined here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rlinf.engines.legs import Ask, Leg
from rlinf.engines.process import ServerProcess
from rlinf.engines.server import ServerConfig, ServerEngine


class VLLMConfig(ServerConfig):
    """Decoding by a vLLM server."""

    server_python: str = "vllm"


class VLLMEngine(ServerEngine):
    """See the module."""

    Config = VLLMConfig
    package = "vllm"
    module = "vllm.entrypoints.openai.api_server"

    def command(self, model: Path, context: int, socket: Path) -> list[str]:
        config = self._config
        return [
            *("--model", str(model), "--uds", str(socket)),
            *("--dtype", self._policy_config.dtype),
            *("--max-model-len", str(context), "--max-num-seqs", str(config.max_rows)),
            *("--kv-cache-memory-bytes", str(int(config.cache_gib * 2**30))),
            *("--worker-extension-cls", "rlinf_vllm.Extension"),
            *("--generation-config", "vllm"),  # nothing of a checkpoint's own sampling settings
            *("--enable-scale-out", "--disable-uvicorn-access-log"),
            *(["--enable-sleep-mode"] if self.sleeps else []),
            *(["--enforce-eager"] if self.device.type == "cpu" else []),
            *(["--trust-remote-code"] if self._policy_config.trust_remote_code else []),
        ]

    def variables(self, socket: Path) -> Mapping[str, str]:
        always = {
            "VLLM_SERVER_DEV_MODE": "1",  # for weights, aborting and caches
            "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension knows the sampler of the first one
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_RPC_BASE_PATH": str(socket.parent),
        }
        if self.device.type != "cpu":
            return always
        return {**always, "TORCH_COMPILE_DISABLE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}

    def started(self, process: ServerProcess) -> None:
        _call(process, "rlinf_begin")

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        sampling = ask.sampling
        settings = {
            "max_tokens": ask.most,
            "min_tokens": ask.least,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "seed": ask.seed,
            "stop": list(sampling.stop),
            "stop_token_ids": sorted(self.stops),
            "ignore_eos": True,  # the stop tokens are all there are
            "logprobs": 0,  # of the token that was drawn alone
            "detokenize": bool(sampling.stop),
            "skip_special_tokens": True,
        }
        return "/inference/v1/generate", {"token_ids": ask.tokens, "sampling_params": settings}

    def answer(self, values: Any) -> Leg:
        (choice,) = values["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        end = choice["finish_reason"]
        return Leg(tokens, [entry["logprob"] for entry in content], end)

    def stop(self, process: ServerProcess) -> None:
        process.post("/abort_requests", {"request_ids": []})

    def sleep(self, process: ServerProcess) -> None:
        # The second level keeps no copy of the weights in the host's memory.
        process.post("/sleep?level=2&mode=abort")

    def wake(self, process: ServerProcess) -> None:
        process.post("/wake_up")

    def update(self, process: ServerProcess, folder: Path, version: int) -> None:
        _call(process, "rlinf_update", str(folder))
        process.post("/reset_prefix_cache")
        process.post("/update_weight_version", {"new_version": str(version)})


def _call(process: ServerProcess, method: str, *arguments: str) -> None:
    """Run a method of the worker extension in every worker of a server."""
    process.post("/collective_rpc", {"method": method, "args": list(arguments)})
