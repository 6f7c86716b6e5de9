"""vLLM as a server; see :mod:`rlinf.engines.server`.

Tokens go in and come out as numbers (``/inference/v1/generate``); a worker extension
(``inside/rlinf_vllm.py``) reads new weights in place and takes log-probabilities as they are
defined here.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from rlinf.engines.external import ExternalEngine
from rlinf.engines.legs import Ask, Leg
from rlinf.engines.process import ServerProcess
from rlinf.engines.server import ServerConfig, ServerEngine

STARTED = ("rlinf.engines.inside.rlinf_vllm",)
"""Is part of the identity of what the engine makes (:mod:`stages.code`)."""
VARIABLES = {
    "VLLM_USE_V2_MODEL_RUNNER": "0",  # the extension knows the sampler of the first one
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
"""Of the environment of every process that imports vLLM."""


LENGTH_SCALINGS = frozenset({"longrope"})
"""vLLM takes the long factors where ``--max-model-len`` exceeds the original length, as
:mod:`rlinf.models.rotary` does. Its dynamic NTK has the frequencies of the longest sequence."""


class VLLMConfig(ServerConfig):
    """Decoding by a vLLM server."""

    server_python: str = "vllm"


class VLLMEngine(ServerEngine):
    """See the module."""

    length_scalings = LENGTH_SCALINGS

    Config = VLLMConfig
    package = "vllm"
    module = "vllm.entrypoints.openai.api_server"
    pulse = "/is_sleeping"  # asks the process that decodes, which /health does not

    def command(self, model: Path, context: int, socket: Path) -> list[str]:
        return [
            *arguments(self, model, context),
            *("--uds", str(socket), "--enable-scale-out", "--disable-uvicorn-access-log"),
            *("--worker-extension-cls", "rlinf_vllm.Extension"),
        ]

    def variables(self, socket: Path) -> Mapping[str, str]:
        always = {
            **VARIABLES,
            "VLLM_SERVER_DEV_MODE": "1",  # for weights, aborting and caches
            "VLLM_RPC_BASE_PATH": str(socket.parent),
        }
        if self.device.type != "cpu":
            return always
        return {**always, "TORCH_COMPILE_DISABLE": "1"}

    def started(self, process: ServerProcess) -> None:
        _call(process, "rlinf_begin", watched=True)

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        body = {"token_ids": ask.tokens, "sampling_params": settings(ask, self.stops_of(ask))}
        return "/inference/v1/generate", body

    def answer(self, values: Any) -> Leg:
        (choice,) = values["choices"]
        tokens = choice["token_ids"] or []
        content = (choice["logprobs"] or {}).get("content") or []
        end = choice["finish_reason"]
        return Leg(tokens, [entry["logprob"] for entry in content], end)

    def stop(self, process: ServerProcess) -> None:
        process.post("/abort_requests", {"request_ids": []}, watched=True)

    def sleep(self, process: ServerProcess) -> None:
        # The second level keeps no copy of the weights in the host's memory.
        process.post("/sleep?level=2&mode=abort")

    def wake(self, process: ServerProcess) -> None:
        process.post("/wake_up")

    def update(self, process: ServerProcess, folder: Path, version: int) -> None:
        _call(process, "rlinf_update", str(folder))
        process.post("/reset_prefix_cache")
        process.post("/update_weight_version", {"new_version": str(version)})


def _call(process: ServerProcess, method: str, *arguments: str, watched: bool = False) -> None:
    """Run a method of the worker extension in every worker of a server."""
    body = {"method": method, "args": list(arguments)}
    process.post("/collective_rpc", body, watched=watched)


def arguments(engine: ExternalEngine, model: Path, context: int) -> list[str]:
    """Of vLLM's command line: what is decoded, and how.

    Args:
        model: the folder.
        context: most tokens of a prompt and its response together.
    """
    config, policy = engine._config, engine._policy_config
    return [
        *("--model", str(model), "--dtype", policy.dtype),
        *("--tensor-parallel-size", str(engine.world.layout.tp)),
        *("--max-model-len", str(context), "--max-num-seqs", str(config.max_rows)),
        *("--kv-cache-memory-bytes", str(engine.cache_bytes())),
        *("--generation-config", "vllm"),  # nothing of a checkpoint's own sampling settings
        *(["--enable-sleep-mode"] if engine.sleeps else []),
        *(["--enforce-eager"] if engine.device.type == "cpu" else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def settings(ask: Ask, stops: Collection[int]) -> dict[str, Any]:
    """How vLLM samples a leg.

    Args:
        stops: tokens that end a sample.
    """
    sampling = ask.sampling
    return {
        "max_tokens": ask.most,
        "min_tokens": ask.least,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "seed": ask.seed,
        "stop": list(sampling.stop),
        "stop_token_ids": sorted(stops),
        "ignore_eos": True,  # the stop tokens are all there are
        "logprobs": 0,  # of the token that was drawn alone
        "detokenize": bool(sampling.stop),
        "skip_special_tokens": True,
    }
