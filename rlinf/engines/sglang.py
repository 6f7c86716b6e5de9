"""SGLang as a server; see :mod:`rlinf.engines.server`.

What it takes to keep the contract is changed in its processes (``inside/rlinf_sglang.py``). On a
CPU two of its packages have stand-ins (``inside/sglang_cpu``): its kernels are published for GPUs
alone.
"""

from __future__ import annotations

import itertools
import os
import socket as sockets
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from rlinf.engines.legs import Ask, Leg
from rlinf.engines.process import ServerProcess
from rlinf.engines.server import INSIDE, ServerConfig, ServerEngine

STARTED = ("rlinf.engines.inside.rlinf_sglang",)
"""Is part of the identity of what the engine makes (:mod:`stages.code`)."""
PARTS = ["kv_cache", "weights"]
"""Of its memory."""


class SGLangConfig(ServerConfig):
    """Decoding by an SGLang server."""

    server_python: str = "sglang"
    cache_tokens: int = 65536
    """Tokens whose keys and values are cached, in place of ``cache_gib``."""


class SGLangEngine(ServerEngine):
    """See the module."""

    Config = SGLangConfig
    module = "rlinf_sglang"
    package = "sglang"

    def command(self, model: Path, context: int, socket: Path) -> list[str]:
        config = self._config
        with sockets.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]  # nothing listens there; others are chosen from it
        on_cpu = ["--device", "cpu", "--attention-backend", "torch_native", "--disable-cuda-graph"]
        return [
            *("--model-path", str(model), "--port", str(port)),
            *("--dtype", self._policy_config.dtype, "--context-length", str(context)),
            *("--tp-size", str(self.world.layout.tp)),
            *("--max-running-requests", str(config.max_rows)),
            *("--max-total-tokens", str(config.cache_tokens)),
            *("--sampling-backend", "pytorch", "--grammar-backend", "none"),
            *("--skip-server-warmup", "--log-level-http", "warning"),
            # Without it a scheduler that waits takes a core from whatever runs meanwhile.
            "--sleep-on-idle",
            *(["--enable-memory-saver"] if self.sleeps else []),
            *(on_cpu if self.device.type == "cpu" else []),
            *(["--trust-remote-code"] if self._policy_config.trust_remote_code else []),
        ]

    def variables(self, socket: Path) -> Mapping[str, str]:
        # One of its own for each start: what a dead server left in it would be taken for answers.
        meeting = socket.with_name(f"meeting-{uuid.uuid4().hex}")
        always = {
            "RLINF_SOCKET": str(socket),
            # Else a store of torch listens, for anyone, at a port of all networks of the node.
            "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE": f"file://{meeting}",
        }
        if self.device.type != "cpu":
            return always
        return {
            **always,
            "SGLANG_CPU_OMP_THREADS_BIND": cores(self.world.layout.tp, self._config.threads),
            "SGLANG_USE_CPU_ENGINE": "1",
            "TORCH_COMPILE_DISABLE": "1",
            "PYTHONPATH": f"{INSIDE}:{INSIDE / 'sglang_cpu'}",
        }

    def body(self, ask: Ask) -> tuple[str, dict[str, Any]]:
        sampling = ask.sampling
        settings = {
            "max_new_tokens": ask.most,
            "min_new_tokens": ask.least,
            "temperature": sampling.temperature,
            "top_k": sampling.top_k or -1,
            "top_p": sampling.top_p,
            "min_p": sampling.min_p,
            "sampling_seed": ask.seed,
            # It looks for them before min_new_tokens as well: then they are looked for here alone.
            "stop": [] if ask.least else list(sampling.stop),
            "stop_token_ids": sorted(self.stops),
            "ignore_eos": not self.stops,
            "no_stop_trim": True,
        }
        body = {"input_ids": ask.tokens, "sampling_params": settings, "return_logprob": True}
        return "/generate", body

    def answer(self, values: Any) -> Leg:
        about = values["meta_info"]
        logprobs = [entry[0] for entry in about["output_token_logprobs"]]
        return Leg(values["output_ids"], logprobs, about["finish_reason"]["type"])

    def stop(self, process: ServerProcess) -> None:
        process.post("/abort_request", {"abort_all": True}, watched=True)

    def sleep(self, process: ServerProcess) -> None:
        process.post("/release_memory_occupation", {"tags": PARTS})

    def wake(self, process: ServerProcess) -> None:
        process.post("/resume_memory_occupation", {"tags": PARTS})

    def cache_bytes(self) -> int:
        """Of keys and values on a GPU: 2 x layers x key-value heads that are there x size of a
        head, for each token."""
        settings = self._settings
        heads = settings.num_attention_heads
        size = getattr(settings, "head_dim", None) or settings.hidden_size // heads
        shared = getattr(settings, "num_key_value_heads", None) or heads
        values = 2 * settings.num_hidden_layers * max(1, shared // self.world.layout.tp)
        width: int = getattr(torch, self._policy_config.dtype).itemsize
        return int(self._config.cache_tokens * values * size * width)

    def update(self, process: ServerProcess, folder: Path, version: int) -> None:
        process.post(
            "/update_weights_from_disk",
            {"model_path": str(folder), "flush_cache": True, "weight_version": str(version)},
        )


def cores(processes: int, threads: int) -> str:
    """Numbers of the cores that each of some processes computes on, as SGLang has them: without
    it there may be no more processes than nodes of memory."""
    free = itertools.cycle(sorted(os.sched_getaffinity(0)))
    each = (itertools.islice(free, threads) for _ in range(processes))
    return "|".join(",".join(map(str, sorted(set(own)))) for own in each)
