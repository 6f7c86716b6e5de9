"""SGLang as a server; see :mod:`rlinf.engines.server`.

What it takes to keep the contract is changed in its processes (``engine_plugins/rlinf_sglang.py``). On a
CPU two of its packages have stand-ins (``engine_plugins/sglang_cpu``): its kernels are published for GPUs
alone.
"""

from __future__ import annotations

import itertools
import os
import socket as sockets
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch

from rlinf.engines.external import ExternalConfig, ExternalEngine
from rlinf.engines.resumable import GeneratedSegment, SegmentRequest
from rlinf.engines.server import PLUGIN_FOLDER, ServerConfig, ServerEngine
from rlinf.engines.server_process import ServerProcess
from rlinf.errors import ConfigError

SUBPROCESS_MODULES = ("rlinf.engines.engine_plugins.rlinf_sglang",)
"""Is part of the identity of what the engine makes (:mod:`stages.identity`)."""
MEMORY_TAGS = ["kv_cache", "weights"]
"""Of its memory."""
CPU_STUBS = PLUGIN_FOLDER / "sglang_cpu"
"""Of packages, on a CPU."""
CONTEXT_MARGIN = 8
"""Tokens that SGLang keeps free at the end of what it says that it takes: a prompt may come to six
before it, a response is cut off two before it, and that would look like its end."""
ENVIRONMENT = {"SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1"}  # by MORE, which no sample reaches
"""Of the environment of every process that imports SGLang."""


class SGLangCacheConfig(ExternalConfig):
    """What SGLang's server and SGLang in process have in common."""

    max_total_tokens: int = 65536
    """Tokens whose keys and values are cached, in place of ``kv_cache_gib``."""


class SGLangCacheEngine(ExternalEngine):
    """An engine whose cache is so many tokens."""

    def kv_cache_bytes(self) -> int:
        """Of keys and values on a GPU: 2 x layers x key-value heads that are there x size of a
        head, for each token."""
        settings = self._settings
        heads = settings.num_attention_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        shared = getattr(settings, "num_key_value_heads", None) or heads
        values = 2 * settings.num_hidden_layers * max(1, shared // self.world.layout.tp)
        width: int = getattr(torch, self._policy_config.dtype).itemsize
        return int(self._config.max_total_tokens * values * size * width)

    def _known(self, model: Path) -> None:
        super()._known(model)
        asked, cached = self._config.max_model_len, self._config.max_total_tokens - CONTEXT_MARGIN
        if cached < (asked or 1):
            raise ConfigError(
                f"engine.max_total_tokens: {self._config.max_total_tokens} hold no sample of "
                f"{asked or 1} tokens and {CONTEXT_MARGIN} more; raise it, or lower engine.max_model_len"
            )
        self._context = min(self._context, cached)


class SGLangConfig(SGLangCacheConfig, ServerConfig):
    """Decoding by an SGLang server."""

    server_python: str = "sglang"


class SGLangEngine(SGLangCacheEngine, ServerEngine):
    """See the module."""

    Config = SGLangConfig
    server_module = "rlinf_sglang"
    server_package = "sglang"

    def server_args(self, model: Path, context: int, socket: Path) -> list[str]:
        with sockets.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # nothing listens there; others are chosen from it
        return [
            *sglang_args(self, model, context),
            *("--port", str(port), "--skip-server-warmup", "--log-level-http", "warning"),
            # Without it a scheduler that waits takes a core from whatever runs meanwhile.
            "--sleep-on-idle",
        ]

    def server_environment(self, socket: Path) -> Mapping[str, str]:
        # One of its own for each start: what a dead server left in it would be taken for answers.
        meeting = socket.with_name(f"meeting-{uuid.uuid4().hex}")
        always = {
            **ENVIRONMENT,
            "RLINF_SOCKET": str(socket),
            # Else a store of torch listens, for anyone, at a port of all networks of the node.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}",
        }
        if self.device.type != "cpu":
            return always
        own = cpu_environment(self.world.layout.tp, self._config.threads)
        return {**always, **own, "PYTHONPATH": f"{PLUGIN_FOLDER}:{CPU_STUBS}"}

    def build_request(self, request: SegmentRequest) -> tuple[str, dict[str, Any]]:
        body = {
            "input_ids": request.context_tokens,
            "sampling_params": sglang_sampling_params(request, self.stop_token_ids_for(request)),
        }
        return "/generate", {**body, "return_logprob": True}

    def parse_response(self, values: Any) -> GeneratedSegment:
        about = values["meta_info"]
        logprobs = [entry[0] for entry in about["output_token_logprobs"]]
        return GeneratedSegment(values["output_ids"], logprobs, about["finish_reason"]["type"])

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


def sglang_args(engine: ExternalEngine, model: Path, context: int) -> list[str]:
    """Of SGLang's command line: what is decoded, and how.

    Args:
        model: the folder.
        context: most tokens of a prompt and its response together.
    """
    config, policy = engine._config, engine._policy_config
    on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
    return [
        *("--model-path", str(model)),
        *("--dtype", policy.dtype, "--context-length", str(context + CONTEXT_MARGIN)),
        *("--tp-size", str(engine.world.layout.tp)),
        *("--max-running-requests", str(config.max_num_seqs)),
        *("--max-total-tokens", str(config.max_total_tokens)),
        *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
        *(["--enable-memory-saver"] if engine.can_sleep else []),
        *(on_cpu if engine.device.type == "cpu" else []),
        *(["--trust-remote-code"] if policy.trust_remote_code else []),
    ]


def sglang_sampling_params(request: SegmentRequest, stops: Collection[int]) -> dict[str, Any]:
    """How SGLang samples a leg.

    Args:
        stops: tokens that end a sample.
    """
    sampling = request.sampling
    return {
        "max_new_tokens": request.max_tokens,
        "min_new_tokens": request.min_tokens,
        "temperature": sampling.temperature,
        "top_k": sampling.top_k or -1,
        "top_p": sampling.top_p,
        "min_p": sampling.min_p,
        "sampling_seed": request.seed,
        # It looks for them before min_new_tokens as well: then they are looked for here alone.
        "stop": [] if request.min_tokens else list(sampling.stop),
        "stop_token_ids": sorted(stops),
        "ignore_eos": not stops,
        "no_stop_trim": True,
    }


def cpu_environment(processes: int, threads: int) -> dict[str, str]:
    """Variables of the environment of SGLang's processes on a CPU."""
    return {
        "SGLANG_CPU_OMP_THREADS_BIND": core_binding(processes, threads),
        "SGLANG_USE_CPU_ENGINE": "1",
        "TORCH_COMPILE_DISABLE": "1",
    }


def core_binding(processes: int, threads: int) -> str:
    """Numbers of the cores that each of some processes computes on, as SGLang has them: without
    it there may be no more processes than nodes of memory."""
    free = itertools.cycle(sorted(os.sched_getaffinity(0)))
    each = (itertools.islice(free, threads) for _ in range(processes))
    return "|".join(",".join(map(str, sorted(set(own)))) for own in each)
